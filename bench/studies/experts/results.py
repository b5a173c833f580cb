"""The result file of `python -m headway.bench.studies.experts`, schema `headway.bench_experts/1`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.tuning.table.schema import DeviceInfo


class ExpertsCell(BaseModel):
    """One way of computing a layer of one shape with so many tokens. Only an answer that was right has a time."""

    model_config = ConfigDict(extra="forbid")

    way: str
    """A method of Headway's, or a library."""
    peer: bool
    """Whether it is a library called without Headway."""
    shape: str
    tokens: int
    touched: int
    """Experts that at least one token passes, shared ones included."""
    median_us: float | None = None
    """Time of the products and the sum over experts, from a CUDA graph, the L2 cache flushed; the choice of experts is given."""
    layer_us: float | None = None
    """The same with norm, router and choice; None for peers."""
    relative_error: float | None = None
    """||out - reference|| / ||reference||."""
    reason: str = ""
    """Why there is no time."""
    bytes_share: float | None = None
    """Bytes of the touched experts' weights at the measured read rate, as a share of `median_us`."""
    operations_share: float | None = None
    """Likewise the floating-point operations at the measured matrix rate."""


class ExpertsReport(ResultFile):
    """One run."""

    schema_: Literal["headway.bench_experts/1"] = Field(default="headway.bench_experts/1", alias="schema")
    command: str
    origin: Origin
    date: str
    """UTC, ISO 8601."""
    dtype: str
    form: str = "plain"
    """The form of the experts' weights."""
    device: DeviceInfo
    read_gbps: float
    """Measured rate of reading, 1e9 bytes a second."""
    libraries: dict[str, str]
    """Peer -> its version, or why it is not here."""
    chosen: dict[str, str]
    """Shape -> which of Headway's methods serves how many tokens."""
    cells: list[ExpertsCell]
