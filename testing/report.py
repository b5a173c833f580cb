"""The result file of the conformance kit, schema `headway.check/1`."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.core.contract.errors import ConfigError
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
    libraries: dict[str, str] = {}


class CheckReport(BaseModel):
    """One run of one backend or layout on one device."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal["headway.check/1"] = Field(default=SCHEMA, alias="schema")
    target: str
    """What was asked for: a backend's name, FILE.py:CLASS, or the layout."""
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
    cells: list[CellResult] = []

    @property
    def failed(self) -> list[CellResult]:
        """Cells that failed."""
        return [cell for cell in self.cells if cell.status == "failed"]

    def write(self, path: Path) -> None:
        """Write it as JSON.

        :raises ConfigError: the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(by_alias=True, indent=1, exclude_defaults=False) + "\n")
        except OSError as error:
            raise ConfigError("--json", "a file that can be written", str(path), error.strerror or str(error)) from error


def read_check(path: Path) -> CheckReport:
    """Read a result file.

    :raises ConfigError: missing, not JSON, of another schema, or with a field that cannot be; the first fault is named.
    """
    need = f"a JSON file of schema {SCHEMA}"
    try:
        return CheckReport.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError("check file", need, str(path), error.strerror or str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"check file {path}", need, f"{place}: {first['msg']}") from error


def machine_of(device: torch.device) -> Machine:
    """This machine."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return Machine(device=device.type, name=name, python=platform.python_version(), torch=torch.__version__, libraries=found)


def now() -> str:
    """The date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
