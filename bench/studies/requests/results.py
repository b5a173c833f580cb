"""The result file of `python -m headway.bench.studies.requests`, schema `headway.bench_requests/1`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.tuning.table.schema import DeviceInfo

Study = Literal["sampling", "speculation", "second-turn", "overload"]


class RequestsCell(BaseModel):
    """One way of serving one load. Ways that share `study` and `load` did the same work."""

    model_config = ConfigDict(extra="forbid")

    study: Study
    load: str
    """What was asked, such as "64 sequences"."""
    way: str
    """How, such as "top_p" or "swap"."""
    unit: Literal["tok/s", "ms", "s"]
    median: float
    all: list[float]
    """The figure of each timed turn."""
    gain: float
    """How many times as fast as the load's first way."""
    equal: float | None = None
    """Share of sequences whose tokens are those of the first way; None: the ways are not to write the same tokens."""
    counts: dict[str, float] = Field(default_factory=dict)
    """What the engine counted in the last turn, by name."""


class RequestsReport(ResultFile):
    """One run."""

    schema_: Literal["headway.bench_requests/1"] = Field(default="headway.bench_requests/1", alias="schema")
    command: str
    origin: Origin
    busy: str = ""
    """What other processes took of the CPU when the run began or ended; empty where that was too little to matter."""
    date: str
    """UTC, ISO 8601."""
    model: str
    dtype: str
    device: DeviceInfo
    cells: list[RequestsCell]
