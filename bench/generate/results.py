"""The result file of offline runs of `headway bench throughput`, schema `headway.offline/1`, and that of peers' figures."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.tuning.table.schema import DeviceInfo


class OfflineCell(BaseModel):
    """One workload. Every figure is of the same pass: that of the median rate among the timed ones (the slower of two)."""

    model_config = ConfigDict(extra="forbid")

    label: str
    num_adapters: int = 0
    """Adapters of random numbers that the requests had in turn; 0: none, as in files of before 2026-11-26."""
    batch_size: int
    """Requests, all sent at once."""
    input_len: int | None
    """None where requests differ; likewise output_len."""
    output_len: int | None
    temperature: float
    prompt_tokens: int
    output_tokens: int
    seconds: float
    """From the first request to the last token."""
    tokens_per_second: float
    """Output tokens over `seconds`."""
    fastest: float
    """Tokens a second of the fastest timed pass; likewise slowest."""
    slowest: float
    time_to_first_token_ms: float
    """Mean over the requests."""
    time_per_output_token_ms: float | None
    """Mean over the requests, of the time after the first token; None where none writes a second."""
    roofline_share: float | None
    """floor_seconds over seconds. None, like the next two, for a model of transformers' code, whose products are not counted."""
    floor_seconds: float | None
    """Least time by headway.bench.generate.roofline, prefill_floor_seconds included."""
    prefill_floor_seconds: float | None
    """Operations of the prompts over the device's matrix rate."""
    num_steps: int
    num_graph_steps: int
    """Steps that were one CUDA graph's replay."""
    steps_in_pieces: dict[str, int] = Field(default_factory=dict)
    """Steps that were graphs' replays with attention launched between them, by reason; empty in files of before 2026-11-22."""
    steps_without_graph: dict[str, int] = Field(default_factory=dict)
    """Steps that were launched kernel by kernel although graphs were in use, by the reason; likewise."""
    compilations: dict[str, int] = Field(default_factory=dict)
    """Kernels that were compiled during the pass, by name; likewise."""
    num_preemptions: int
    host_ms_per_step: float
    """The host's own work, without waiting for the device."""
    host_ms_by_part: dict[str, float] = Field(default_factory=dict)
    """Milliseconds per step of each part of that work, and of the client's ("outputs"), which comes on top; empty in files of
    before 2026-11-23."""
    wait_ms_per_step: float
    """The host blocked on the device."""
    gpu_idle_share: float | None
    """1 - (time in which a kernel or copy ran, a step) / (time of a step), by headway.bench.generate.profile; None on a CPU."""
    steps_by_backend: dict[str, int]


class OfflineReport(ResultFile):
    """One run: an engine built once, and its workloads."""

    schema_: Literal["headway.offline/1"] = Field(default="headway.offline/1", alias="schema")
    command: str
    origin: Origin | None = None
    """The code that made it; None in files of before 2026-11-22."""
    busy: str = ""
    """What other processes took of the CPU when the run began or ended; empty where that was too little to matter."""
    date: str
    """UTC, ISO 8601."""
    model: str
    load_format: str
    dtype: str
    warmup: int
    """Passes before the timed ones, of each workload."""
    repeat: int
    """Timed passes."""
    start_seconds: float
    """Until the engine was ready: weights, self-tests, cache, graphs; the process's imports left out."""
    settings: dict[str, str]
    """Backends by phase, cache and limits, as they came to be."""
    device: DeviceInfo
    read_gbps: float
    """Measured rate of a large sum: what the roofline divides by."""
    cells: list[OfflineCell]


class PeerEngine(BaseModel):
    """Another engine's figures for the same workloads."""

    model_config = ConfigDict(extra="forbid")

    name: str
    version: str
    settings: str
    tokens_per_second: dict[str, float]
    """Label of the workload -> output tokens per second."""
    passes: dict[str, list[float]] = Field(default_factory=dict)
    """Tokens per second of each timed pass, by label; empty where it was not written down."""


class PeersFile(ResultFile):
    """Figures that were measured elsewhere, for reference columns."""

    schema_: Literal["headway.offline-peers/1"] = Field(default="headway.offline-peers/1", alias="schema")
    device: str
    model: str
    date: str
    measured_by: str = ""
    """Who measured, where that was no command of Headway's; empty for a run of `python -m headway.bench.studies.engines`."""
    command: str = ""
    """The command of such a run, as typed."""
    origin: Origin | None = None
    peers: list[PeerEngine]


class Share(BaseModel):
    """Speed as a share of the fastest library's, over the cells of one phase."""

    model_config = ConfigDict(extra="forbid")

    mean: float
    """Geometric, over all cells."""
    lowest: float | None
    """The lowest mean of a geometry; None where it was not written down."""


class KernelShares(BaseModel):
    """One kernel."""

    model_config = ConfigDict(extra="forbid")

    name: str
    decode: Share
    prefill: Share
    extend: Share


class KernelPeersFile(ResultFile):
    """Kernels beside libraries over shapes that no grid of ours holds, measured outside Headway."""

    schema_: Literal["headway.kernel-peers/1"] = Field(default="headway.kernel-peers/1", alias="schema")
    device: str
    date: str
    measured_by: str
    what: str
    cells: dict[str, int]
    """How many of each phase."""
    contenders: list[KernelShares]
