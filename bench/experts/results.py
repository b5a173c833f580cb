"""The result file of `headway bench experts`, schema `headway.bench_experts/1`."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.testing.json_files import read_json
from headway.testing.origin import Origin
from headway.tuning.identity import DeviceInfo

SCHEMA: Final = "headway.bench_experts/1"


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
    """Of the products and the sum over experts, from a CUDA graph, the L2 cache flushed; the choice of experts is given."""
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


class ExpertsReport(BaseModel):
    """One run."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal["headway.bench_experts/1"] = Field(default=SCHEMA, alias="schema")
    command: str
    origin: Origin
    date: str
    """UTC, ISO 8601."""
    dtype: str
    device: DeviceInfo
    read_gbps: float
    """Measured rate of reading, 1e9 bytes a second."""
    libraries: dict[str, str]
    """Peer -> its version, or why it is not here."""
    chosen: dict[str, str]
    """Shape -> which of Headway's methods serves how many tokens."""
    cells: list[ExpertsCell]


def read_report(path: Path) -> ExpertsReport:
    """Read a result file.

    :raises ConfigError: see read_json.
    """
    return read_json(path, ExpertsReport, SCHEMA)
