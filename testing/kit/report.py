"""The result file of the conformance kit, schema `headway.check/1`."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from headway.core.system.json_files import ResultFile, write_json
from headway.core.system.provenance import Origin, cpu_name, installed_versions, interpreted

Status = Literal["passed", "failed", "skipped"]
_LIBRARIES = ("triton", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "xformers", "numpy")


class CellResult(BaseModel):
    """One check of one subject at one value of each axis."""

    model_config = ConfigDict(extra="forbid")

    cell: str
    """The cell's name, which `headway check --cell` takes."""
    check: str
    status: Status
    reason: str = ""
    """Why it failed or was skipped; of a passed one, what was measured on the way."""
    guess: str = ""
    """What the failure looks like; empty where nothing of the kit's list explains it."""
    phase: str = "-"
    layout: str = "-"
    memory: str = "own"
    block_size: int = 0
    head_dim: int = 0
    group: int = 0
    dtype: str = ""
    feature: str = ""
    kv_heads: int = 2
    scale: str = "odd"
    scores: str = "normal"
    work: str = "edges"
    layer: str = ""
    """The layer of the model that the kit was given; empty: a layer of the kit's."""
    state: str = ""
    """What else a layer with a state is made of: the type of its states, the value's size, its convolution and its decays."""
    relative_error: float | None = None
    """||out - reference|| / ||reference|| of the wrong step or, if the cell passed, of the step nearest to its tolerance; of
    `lse` the largest distance, of `engine` that of a logit. None if the cell measures nothing, or the error is not a number."""
    tolerance: float | None = None
    """Largest error that passes."""
    seconds: float = 0.0


class CheckMachine(BaseModel):
    """Where a report was made."""

    model_config = ConfigDict(extra="forbid")

    device: str
    """cpu or cuda."""
    name: str
    python: str
    torch: str
    interpreted: bool = False
    """Whether Triton's kernels ran under its interpreter."""
    libraries: dict[str, str] = {}


class CheckReport(ResultFile):
    """One run of one backend or layout on one device."""

    schema_: Literal["headway.check/1"] = Field(default="headway.check/1", alias="schema")
    target: str
    """What was asked for: a backend's name, FILE.py:CLASS, or the layout."""
    plugins: list[str] = Field(default_factory=list)
    """Files that were registered beside the installed plugins."""
    model: str = ""
    """The model whose layers were tried; empty: the kit's."""
    subject: str
    """The name it is registered by."""
    digest: str = ""
    """SHA-256 of the file that defines the subject; empty if no file does."""
    origin: Origin
    """The code that made it."""
    version: str = ""
    """Version of the distribution that brings the subject."""
    date: str
    quick: bool
    machine: CheckMachine
    unavailable: str = ""
    """Why nothing could be tried on this machine."""
    seconds: float = 0.0
    not_run: int = 0
    """Cells that were left when the run was interrupted."""
    cells: list[CellResult] = Field(default_factory=list)

    @property
    def failed(self) -> list[CellResult]:
        """Cells that failed."""
        return [cell for cell in self.cells if cell.status == "failed"]

    def write(self, path: Path) -> None:
        """Write the report as JSON.

        :raises ConfigError: the file cannot be written.
        """
        write_json(self, path)


def read_check(path: Path) -> CheckReport:
    """Read a result file.

    :raises ConfigError: missing, not JSON, of another schema, or with a field that cannot be; the first fault is named.
    """
    return CheckReport.read(path)


def machine_of(device: torch.device) -> CheckMachine:
    """The machine that the process runs on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return CheckMachine(
        device=device.type,
        name=name,
        python=platform.python_version(),
        torch=torch.__version__,
        interpreted=interpreted(),
        libraries=installed_versions(_LIBRARIES),
    )


def now() -> str:
    """The date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
