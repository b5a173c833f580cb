"""The result file of the conformance grid, schema `headway.grid/1`: which backend gave the right answer where."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway.core.contract.errors import ConfigError
from headway.tuning.device import DeviceIdentity

SCHEMA: Final = "headway.grid/1"
Status = Literal["pass", "fail", "refused"]
Check = Literal["answer", "claim", "option", "alternate", "graph", "writer", "available"]
AXES: Final = ("phase", "layout", "block_size", "head_dim", "group", "dtype", "feature")
"""What a cell varies, in the order of the matrix's tables."""


class GridCell(BaseModel):
    """One check of one backend."""

    model_config = ConfigDict(extra="forbid")

    check: Check
    """answer: against float64. claim: what is not claimed is refused. option: an accepted option changes the output.
    alternate: with another backend on one cache. graph: captured at the longest lengths, replayed at others. writer: rows read
    back exactly. available: the backend does not run on this machine at all."""
    backend: str
    """Name of the backend; "A > B" where two take turns; "writer" for a layout's cache writer."""
    status: Status
    reason: str = ""
    """Why it was refused or failed; empty where it passed."""
    about: str = ""
    """Of a refused claim: the axis, out of AXES, whose value is not claimed."""
    phase: str = ""
    layout: str = ""
    block_size: int = 0
    head_dim: int = 0
    group: int = 0
    """Query heads a kv head."""
    dtype: str = ""
    feature: str = ""
    relative_error: float | None = None
    """||out - reference|| / ||reference||, the worst of the check's runs; None where there was none, or no number."""
    tolerance: float | None = None

    @model_validator(mode="after")
    def _only_a_pass_needs_no_reason(self) -> Self:
        if (self.status == "pass") == bool(self.reason):
            raise ValueError(f"a cell has a reason if and only if it did not pass: {self.status}, {self.reason!r}")
        return self


class GridReport(BaseModel):
    """One run on one device."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal["headway.grid/1"] = Field(default=SCHEMA, alias="schema")
    device: DeviceIdentity
    cells: list[GridCell]


def read_grid(path: Path) -> GridReport:
    """Read a result file.

    :raises ConfigError: missing, not JSON, of another schema, or with a field that cannot be; the first fault is named.
    """
    need = f"a JSON file of schema {SCHEMA}"
    try:
        return GridReport.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError("grid file", need, str(path), error.strerror or str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"grid file {path}", need, f"{place}: {first['msg']}") from error


def merge(reports: Iterable[GridReport]) -> list[GridReport]:
    """One report a device: parts of a grid that ran side by side, such as one process a backend, count as one run.

    What several parts did alike, such as the cache writers, counts once. Parts may have run with different libraries installed:
    the report names them all, and a backend that was there in one part was there.
    """
    merged: dict[tuple[str, str, str], GridReport] = {}
    for report in reports:
        key = (report.device.type, report.device.name, report.device.torch)
        if key in merged:
            known = merged[key]
            libraries = {**known.device.libraries, **report.device.libraries}
            device = known.device.model_copy(update={"libraries": libraries})
            merged[key] = GridReport(device=device, cells=_present(_distinct([*known.cells, *report.cells])))
        else:
            merged[key] = report
    return list(merged.values())


def _distinct(cells: list[GridCell]) -> list[GridCell]:
    return list({cell.model_dump_json(exclude={"relative_error"}): cell for cell in cells}.values())


def _present(cells: list[GridCell]) -> list[GridCell]:
    """Without the refusals of parts in which a backend's library was not installed, where another part had it."""
    there = {cell.backend for cell in cells if cell.check == "available" and cell.status == "pass"}
    return [cell for cell in cells if cell.check != "available" or cell.status != "refused" or cell.backend not in there]
