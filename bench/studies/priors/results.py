"""What a study of shipped tables found: what auto loses by each kind of table, and how long starts take."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.tuning.table.schema import DeviceIdentity


class Loss(BaseModel):
    """What auto loses by one table at held-out points."""

    model_config = ConfigDict(extra="forbid")

    points: int
    geometric_mean: float
    worst: float
    seconds: float | None = None
    """What measuring the table took; None: nothing was measured for it."""


class LayerLosses(BaseModel):
    """One kind of layer."""

    model_config = ConfigDict(extra="forbid")

    geometry: str
    prior: str
    """Which table was taken as a prior, in words; "of this run" where none had shipped: its own loss says nothing then."""
    checked: int
    disagreed: list[str]
    losses: dict[str, Loss]
    """Table -> its loss: "prior" as it ships, "first start" after its check, "full"."""


class StartTimes(BaseModel):
    """One start of a process, from its beginning to the first token."""

    model_config = ConfigDict(extra="forbid")

    name: str
    seconds: float
    before: float
    """Seconds of those before the engine was asked for: Python, imports."""
    parts: dict[str, float]
    """Part of the engine's start -> seconds."""
    attention: str
    """What was chosen, and by which table."""


class PriorsReport(ResultFile):
    """One run of the study; written anew after each step."""

    written_by: ClassVar[str] = "bench/reproduce.sh FOLDER priors"
    schema_: Literal["headway.priors/1"] = Field(default="headway.priors/1", alias="schema")
    command: str
    origin: Origin
    date: str
    device: DeviceIdentity
    seeds: list[int]
    layers: list[LayerLosses] = Field(default_factory=list)
    starts: list[StartTimes] = Field(default_factory=list)
    skipped: list[str] = Field(default_factory=list)
    """What there was no time for."""
