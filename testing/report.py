"""The result file of the conformance kit, schema `headway.check/1`."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from headway.testing.installed import cpu_name, installed_versions, interpreted
from headway.testing.json_files import read_json, write_json
from headway.testing.origin import Origin

SCHEMA: Final = "headway.check/1"
Status = Literal["passed", "failed", "skipped"]
_LIBRARIES = ("triton", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "xformers", "numpy")


class CellResult(BaseModel):
    """One check of one subject at one value of each axis."""

    model_config = ConfigDict(extra="forbid")

    cell: str
    """Its name, which `headway check --cell` takes."""
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
    relative_error: float | None = None
    """||out - reference|| / ||reference|| of a wrong step; None where there was none, or no number."""
    tolerance: float | None = None
    seconds: float = 0.0


class Machine(BaseModel):
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


class CheckReport(BaseModel):
    """One run of one backend or layout on one device."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal["headway.check/1"] = Field(default=SCHEMA, alias="schema")
    target: str
    """What was asked for: a backend's name, FILE.py:CLASS, or the layout."""
    plugins: list[str] = []
    """Files that were registered beside the installed plugins."""
    subject: str
    """The name it is registered by."""
    origin: Origin
    """The code that made it."""
    version: str = ""
    """Of the distribution that brings the subject."""
    date: str
    quick: bool
    machine: Machine
    unavailable: str = ""
    """Why nothing could be tried on this machine."""
    seconds: float = 0.0
    not_run: int = 0
    """Cells that were left when the run was interrupted."""
    cells: list[CellResult] = []

    @property
    def failed(self) -> list[CellResult]:
        """Cells that failed."""
        return [cell for cell in self.cells if cell.status == "failed"]

    def write(self, path: Path) -> None:
        """Write it as JSON.

        :raises ConfigError: the file cannot be written.
        """
        write_json(self, path)


def read_check(path: Path) -> CheckReport:
    """Read a result file.

    :raises ConfigError: missing, not JSON, of another schema, or with a field that cannot be; the first fault is named.
    """
    return read_json(path, CheckReport, SCHEMA)


def machine_of(device: torch.device) -> Machine:
    """This machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return Machine(
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
