"""The result files of `python -m headway.bench.studies.ranks`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin


class FamilyTokens(BaseModel):
    """The greedy tokens of one model on several ranks beside those of one."""

    model_config = ConfigDict(extra="forbid")

    family: str
    dtype: str
    tokens: int = 0
    """Tokens that one rank wrote."""
    same: int = 0
    """Tokens that several ranks wrote too: of each text those before the first difference."""
    gaps: list[float] = Field(default_factory=list)
    """At each text's first difference: by how much one rank's log-probability of its own token exceeds that of the other's."""
    start_seconds: float = 0.0
    """Seconds that the engine of several ranks took to start."""
    graph_steps: int = 0
    """Steps of several ranks that were a CUDA graph's replay."""
    error: str = ""
    """Why there are no tokens."""
    ok: bool = False


class RankFault(BaseModel):
    """Something that was done to an engine of several ranks, and what came of it."""

    model_config = ConfigDict(extra="forbid")

    what: str
    after_seconds: float = 0.0
    """Seconds for which the engine had been writing."""
    seconds: float = 0.0
    """From the fault, or from the start of the process, until the error was told and every process had ended."""
    text: str = ""
    """What was told; empty where nobody was left to tell it."""
    error: str = ""
    """What should have been otherwise."""
    ok: bool = False


class RanksCheck(ResultFile):
    """Whether several ranks write what one writes, and end as they should."""

    schema_: Literal["headway.ranks-check/1"] = Field(default="headway.ranks-check/1", alias="schema")
    command: str
    origin: Origin | None = None
    date: str
    """UTC, ISO 8601."""
    device: str
    ranks: int
    families: list[FamilyTokens] = Field(default_factory=list)
    not_run: list[str] = Field(default_factory=list)
    """Families for which there was no time."""
    faults: list[RankFault] = Field(default_factory=list)
    left_behind: list[str] = Field(default_factory=list)
    """Names in /dev/shm that were not there before."""

    @property
    def ok(self) -> bool:
        """Whether all that was tried is as it should be."""
        tried = [each.ok for each in self.families] + [each.ok for each in self.faults]
        return all(tried) and not self.left_behind


class PlannedRun(BaseModel):
    """One workload on so many GPUs as `headway plan` predicts it."""

    model_config = ConfigDict(extra="forbid")

    model: str
    weights: str
    """A format of `headway plan`: model, or fp8."""
    ranks: int
    batch: int
    input_len: int
    output_len: int
    tokens_per_second: float
    """Output tokens over the time from the first request to the last token."""
    first_token_ms: float
    """Mean over the requests; likewise the next."""
    per_token_ms: float


class RanksPrediction(ResultFile):
    """Predictions for GPUs of one kind, made before anything was measured on them."""

    schema_: Literal["headway.ranks-prediction/1"] = Field(default="headway.ranks-prediction/1", alias="schema")
    command: str
    origin: Origin | None = None
    date: str
    gpu: str
    """The driver's name of the kind of GPU."""
    runs: list[PlannedRun]
    sum_bytes: list[int]
    """Bytes of tensors that ranks sum."""
    sum_us: dict[str, list[float]]
    """Ranks -> microseconds at each of them, as the predictions take them from tables that others measured."""


class RanksRow(BaseModel):
    """One workload on several GPUs beside one, beside vLLM on as many, and beside its prediction."""

    model_config = ConfigDict(extra="forbid")

    work: str
    ranks: int
    tokens_per_second: float
    one: float | None = None
    """The same on one GPU; None where it was not measured there."""
    speedup: float | None = None
    """`tokens_per_second` over `one`."""
    vllm: float | None = None
    """vLLM's output tokens per second on as many GPUs."""
    ratio: float | None = None
    """`tokens_per_second` over `vllm`."""
    planned: float | None = None
    """The prediction; None where none was made before."""
    off: float | None = None
    """The prediction over what was measured, less 1, in per cent."""
    planned_one: float | None = None
    """The same of one GPU; likewise the next."""
    off_one: float | None = None


class RanksReport(ResultFile):
    """What the files of one folder say of several GPUs."""

    schema_: Literal["headway.ranks/1"] = Field(default="headway.ranks/1", alias="schema")
    date: str
    """Date of the newest of the files."""
    device: str
    origin: Origin | None = None
    """The code that made that file."""
    rows: list[RanksRow]
    median_off: float | None
    """Median size of all errors of predictions, in per cent; None where there is none."""
    sums: dict[str, list[float | None]]
    """Way -> microseconds of a sum for each of sum_bytes, as they were measured in CUDA graphs."""
    sum_bytes: list[int]
