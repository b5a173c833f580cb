"""The result of `headway diff`, schema `headway.diff/1`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.contract.metadata import Phase
from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.tuning.table.schema import DeviceIdentity

Error = float | None
"""A relative error ||a - b|| / ||b||; None where it is no number, because one side's answer holds none."""


class LayerDiff(BaseModel):
    """One layer in one phase."""

    model_config = ConfigDict(extra="forbid")

    layer: int
    relative_error: Error
    """The error of the layer's whole output, on the same q, k and v."""
    heads: list[Error]
    """The same of each query head."""
    free_running: Error
    """The error where each side attends to the q, k and v of its own run, so that errors of lower layers are included."""

    @property
    def worst_head(self) -> int:
        """The query head with the largest error; the first without a number, if there is one."""
        return max(range(len(self.heads)), key=lambda head: size(self.heads[head]))

    @property
    def mean(self) -> Error:
        """The mean over the heads."""
        numbers = [error for error in self.heads if error is not None]
        return sum(numbers) / len(numbers) if len(numbers) == len(self.heads) else None


class Flip(BaseModel):
    """A position after which the two sides would greedily write different tokens."""

    model_config = ConfigDict(extra="forbid")

    prompt: int
    position: int
    """Position of the token before, counted from the prompt's first."""
    token_a: int
    token_b: int
    gap: Error
    """How far B's logit of its own token lies above B's logit of A's: a near-tie says little about A."""
    kl: Error = None
    """KL(A || B) of the next token here, in nats; None where it is no number, and in files of before 2026-11-25."""


class PhaseDiff(BaseModel):
    """All tokens of one phase."""

    model_config = ConfigDict(extra="forbid")

    phase: Phase
    backend_a: str
    backend_b: str
    kernel_a: str
    kernel_b: str
    tokens: int
    tolerance: float
    """What the two sides declare for this dtype, added up: each may be that far from the truth."""
    layers: list[LayerDiff]
    first_beyond: int | None
    """The first layer whose relative_error is beyond the tolerance."""
    hidden_error: Error
    """Relative error of the last hidden states, free-running."""
    logits_error: Error
    """Relative error of the logits, free-running."""
    flip_rate: float
    """Share of the positions whose greedy next token differs, free-running on the same tokens."""
    flips: list[Flip]
    """The first of them."""
    kl_mean: Error
    """Kullback-Leibler divergence KL(A || B) of the next token's distribution in nats, mean over the positions; free-running."""
    kl_max: Error


class SideReport(BaseModel):
    """One of the two sides, as the user asked for it and as it ran."""

    model_config = ConfigDict(extra="forbid")

    name: str
    kv_layout: str
    block_size: int
    weights: str = ""
    """What the side's weights are, in words; "" where both sides have the same."""
    products: list[str] = []
    """What multiplies over the side's quantised weights, for each kind of product for which that is chosen."""


class DiffReport(ResultFile):
    """One run."""

    schema_: Literal["headway.diff/1"] = Field(default="headway.diff/1", alias="schema")
    command: str
    origin: Origin | None = None
    """The code that made it; None in files of before 2026-11-22."""
    device: DeviceIdentity
    model: str
    dtype: str
    a: SideReport
    b: SideReport
    prompts: int
    max_tokens: int
    phases: list[PhaseDiff]

    @property
    def within_tolerance(self) -> bool:
        """Whether no layer is beyond the tolerance in any phase."""
        return all(phase.first_beyond is None for phase in self.phases)


def size(error: Error) -> float:
    """For comparisons: what is no number is beyond every number."""
    return float("inf") if error is None else error
