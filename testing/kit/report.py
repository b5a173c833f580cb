"""Result file of the conformance kit, schema `headway.check/1`; results of cells; comparison of two reports."""

from __future__ import annotations

import platform
import re
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from headway.core.contract.errors import HeadwayError, known_cause
from headway.core.contract.layout import SCALES
from headway.core.oracle.cells import Finding, KitCell, Skipped
from headway.core.oracle.steps import CellErrors
from headway.core.system.json_files import ResultFile, write_json
from headway.core.system.provenance import Origin, cpu_name, installed_versions, interpreted

Status = Literal["passed", "failed", "skipped"]
_LIBRARIES = ("triton", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "xformers", "numpy")


class CellResult(BaseModel):
    """Result of one check of one subject at one value of each axis."""

    model_config = ConfigDict(extra="forbid")

    cell: str
    """Name of the cell, as for `headway check --cell`."""
    check: str
    status: Status
    reason: str = ""
    """Reason for a failure or skip; measurements for a cell that passed."""
    guess: str = ""
    """Likely cause of the failure; "" if none of the kit's known mistakes explains it."""
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
    """Index of the model's layer that was tested; "" means one of the kit's own layers."""
    state: str = ""
    """Further properties of a state layer: dtype of its states, value dimension, convolution and decays."""
    shape: str = ""
    """Further properties of a layer with weights and its calls: sizes, and the distribution of values."""
    relative_error: float | None = None
    """||out - reference|| / ||reference|| of the wrong step or, if the cell passed, of the step closest to its tolerance. For
    `lse`, it is the largest difference of a log-sum-exp; for `engine`, the largest difference from the best logit. None if
    nothing is measured, or if the error is not finite."""
    tolerance: float | None = None
    """Maximum `relative_error` with which the cell passes. None if nothing is measured."""
    seconds: float = 0.0


class CheckMachine(BaseModel):
    """Machine on which a report was made."""

    model_config = ConfigDict(extra="forbid")

    device: str
    """Type of the device: cpu or cuda."""
    name: str
    python: str
    torch: str
    interpreted: bool = False
    """True if Triton kernels ran in Triton's interpreter."""
    libraries: dict[str, str] = {}


class CheckReport(ResultFile):
    """Report of one run of the kit for one kernel or layout on one device."""

    schema_: Literal["headway.check/1"] = Field(default="headway.check/1", alias="schema")
    target: str
    """Target of the run: a kernel's name, FILE.py:CLASS, or a layout's name."""
    plugins: list[str] = Field(default_factory=list)
    """Plugin files that were registered in addition to the installed plugins."""
    model: str = ""
    """Model whose layers were tested; "" means the kit's own layers."""
    rule: str = ""
    """Attention rule of the layers; "" means none."""
    subject: str
    """Name under which the subject is registered."""
    digest: str = ""
    """SHA-256 of the file that defines the subject; "" if the subject is not defined in a file."""
    kind: str = Field(default="attention", exclude=True)
    """Kind of operation of the subject."""
    plugin: Sequence[str] | None = Field(default=None, exclude=True)
    """Plugin that provides the subject, as in `Subject.plugin`; None if there is none."""
    origin: Origin
    """Version of Headway's code that made the report."""
    version: str = ""
    """Version of the distribution that provides the subject."""
    date: str
    quick: bool
    machine: CheckMachine
    unavailable: str = ""
    """Reason why nothing could be tested on this machine; "" if cells could be tested."""
    seconds: float = 0.0
    not_run: int = 0
    """Number of cells that were not run because the run was interrupted."""
    cells: list[CellResult] = Field(default_factory=list)

    @property
    def failed(self) -> list[CellResult]:
        """Results of the cells that failed."""
        return [cell for cell in self.cells if cell.status == "failed"]

    @property
    def tested(self) -> bool:
        """True if at least one cell passed or failed, so that not all were skipped."""
        return any(cell.status != "skipped" for cell in self.cells)

    def write(self, path: Path) -> None:
        """Write the report as JSON.

        :raises ConfigError: if the file cannot be written.
        """
        write_json(self, path)


def read_check(path: Path) -> CheckReport:
    """Read a result file.

    :raises ConfigError: if the file is missing, is not JSON, has a different schema, or has an invalid field. The message names
    the first fault.
    """
    return CheckReport.read(path)


def machine_of(device: torch.device) -> CheckMachine:
    """Return the description of the machine that this process runs on."""
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
    """Return the current date and time in UTC, as text."""
    return datetime.now(UTC).isoformat(timespec="seconds")


GROWN = 2.0
"""Factor by which the error of a cell that passes in both reports must grow or shrink for the cell to be listed. The error of a
correct kernel that sums in a different order changes by a smaller factor."""
_NOISE = 1e-3
"""Fraction of the tolerance. A change of an error is ignored if both errors are below this fraction."""
_WIDTH = 80
_LISTED = 20
"""Maximum number of cells listed for each kind of difference; further cells are only counted."""


class ReportComparison:
    """Differences between two reports, of which the second is newer."""

    def __init__(self, first: CheckReport, second: CheckReport) -> None:
        self.first = first
        self.second = second
        old, new = ({cell.cell: cell for cell in report.cells} for report in (first, second))
        self._old = old
        self._new = new

    @cached_property
    def _both(self) -> list[tuple[CellResult, CellResult]]:
        return [(self._old[name], cell) for name, cell in self._new.items() if name in self._old]

    @cached_property
    def _failing(self) -> list[str]:
        """Cells that fail in the second report, but pass, are skipped or are missing in the first report."""
        was = {cell.cell: self._old[cell.cell].status if cell.cell in self._old else "new" for cell in self.second.failed}
        failed = (cell for cell in self.second.failed if was[cell.cell] != "failed")
        return [f"{cell.cell} ({was[cell.cell]}): {cell.reason}" for cell in failed]

    @cached_property
    def _lost(self) -> list[str]:
        """Cells that pass in the first report but are skipped in the second report, or are missing from it although their check
        was run."""
        checks = {cell.check for cell in self.second.cells} if self.first.quick == self.second.quick else set()
        found = []
        for name, cell in self._old.items():
            now = self._new[name].status if name in self._new else "missing" if cell.check in checks else ""
            if cell.status == "passed" and now in ("skipped", "missing"):
                found.append(f"{name}: {now}")
        return found

    @cached_property
    def _grown(self) -> list[str]:
        return self._changed(lambda before, after: after > GROWN * before)

    def _changed(self, counts: Callable[[float, float], bool]) -> list[str]:
        found = []
        for old, new in self._both:
            before, after = old.relative_error, new.relative_error
            if old.status != "passed" or new.status != "passed" or before is None or after is None:
                continue
            if max(before, after) > _NOISE * (new.tolerance or 0.0) and counts(before, after):
                ratio = f"{after / before:.1f} x" if before else "from 0"
                found.append(f"{new.cell}: error {before:.2g} to {after:.2g} ({ratio}), tolerance {new.tolerance or 0:.2g}")
        return found

    @property
    def worse(self) -> bool:
        """True if the second report has a failure, a grown error or a lost cell that the first report does not have, or if only
        the second report could test nothing."""
        unavailable = bool(self.second.unavailable) and not self.first.unavailable
        return unavailable or bool(self._failing or self._grown or self._lost)

    def lines(self) -> Iterator[str]:
        """Yield the differences as lines of at most 80 columns, unless a cell's name is too long."""
        for name, report in (("A", self.first), ("B", self.second)):
            made = f"{report.target} on {report.machine.device}, {report.date[:16]}, file {report.digest[:12] or 'unknown'}"
            left = f", {report.not_run} not run" if report.not_run else ""
            cells = report.unavailable or f"{len(report.cells)} cells, {len(report.failed)} failed{left}"
            yield from _wrapped(f"{name}: {made}; {cells}", "")
        fixed = [f"{new.cell}" for old, new in self._both if (old.status, new.status) == ("failed", "passed")]
        added = [name for name in self._new if name not in self._old]
        gone = [name for name in self._old if name not in self._new]
        shrunk = self._changed(lambda before, after: GROWN * after < before)
        yield from _section("fail in B", self._failing)
        yield from _section("lost in B: passed in A, skipped or missing in B", self._lost)
        yield from _section(f"error grew by more than {GROWN:g} x", self._grown)
        yield from _section("fixed in B", fixed)
        yield from _section(f"error shrank by more than {GROWN:g} x", shrunk, listed=3)
        yield from _section("only in B", added, listed=3)
        yield from _section("only in A", gone, listed=3)
        yield "B is worse than A" if self.worse else "B is not worse than A"


def _section(title: str, entries: Sequence[str], listed: int = _LISTED) -> Iterator[str]:
    if not entries:
        return
    yield f"{title} ({len(entries)}):"
    for entry in entries[:listed]:
        yield from _wrapped(entry, "  ")
    if len(entries) > listed:
        yield f"  and {len(entries) - listed} more"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


_NOTE = 400
_TWO_SIZES = re.compile(
    r"(?:size of tensor a|expanded size of the tensor|got) \(?(\d+)\)?.*?(?:size of tensor b|existing size|to match) \(?(\d+)\)?"
)
_LEAST_ROUND = 128
"""Minimum value of a number in an error message for the number to be considered the size of a buffer."""


def _round(size: int) -> bool:
    """Return whether a size is a typical buffer size: a power of two, a power of two plus one, or a multiple of 1000."""
    return size >= _LEAST_ROUND and (size & (size - 1) == 0 or size % 1000 == 0 or (size - 1) & (size - 2) == 0)


def result_of(cell: KitCell, run: Callable[[], str], errors: CellErrors) -> CellResult:
    """Run one cell and return its result. An exception of the backend is also returned as a result.

    run: function that runs the cell and returns a note if the cell passes. errors: errors that are measured while the cell runs.
    """
    started = time.perf_counter()
    torch.manual_seed(0)
    try:
        with torch.inference_mode():  # as in the engine, including caches and inputs
            note, status, found = run(), "passed", None
    except Skipped as reason:
        note, status, found = str(reason), "skipped", None
    except Finding as finding:
        note, status, found = str(finding), "failed", finding
    except Exception as error:
        found = Finding(_raised(error), guess=_guess_of(error))
        note, status = str(found), "failed"
    measured = CellErrors(found.error, found.tolerance) if found is not None else errors
    result = new_result(cell, status, note[: 2 * _NOTE], found.guess if found is not None else "", started)
    result.relative_error = measured.error if measured.error is not None and measured.error < 1e30 else None
    result.tolerance = measured.tolerance
    return result


def new_result(cell: KitCell, status: str, reason: str, guess: str = "", started: float | None = None) -> CellResult:
    """Return the result of a cell. started: start time by time.perf_counter; None means unknown."""
    seconds = 0.0 if started is None else round(time.perf_counter() - started, 4)
    said = {"cell": str(cell), "check": cell.check, "status": status, "reason": reason, "guess": guess, "seconds": seconds}
    return CellResult.model_validate(said | cell.axes)


def _raised(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, HeadwayError) else error
    frames = traceback.extract_tb(cause.__traceback__)[-1:] if cause is not None else []
    where = f" ({frames[0].filename.rsplit('/', 1)[-1]}:{frames[0].lineno})" if frames else ""
    # A HeadwayError with a cause is the engine's message about the backend's exception.
    kind = f"raised {type(error).__name__}: " if cause is None or cause is error else ""
    return f"{kind}{' '.join(str(error).split())[:_NOTE]}{where}"


def _guess_of(error: BaseException) -> str:
    error = error.__cause__ or error
    text = str(error)
    if isinstance(error, KeyError) and text.strip("'") in ("key", "value", *SCALES):
        return f"asks for the tensor {text}, which this layout does not have: read `cache.layout`, or refuse it in supports()"
    if "non-zero size" in text:
        return "reduces over no keys at all: a sequence, or a part of it, for which it finds none"
    if "out of range" in text or "out of bounds" in text:
        return "reads or writes outside of a tensor: of the block table or the cache, or of a buffer of its own"
    sizes = _TWO_SIZES.search(text)
    if sizes is not None and _round(min(map(int, sizes.groups()))):
        least, most = sorted(map(int, sizes.groups()))
        return f"holds a size of {least:,} where this step needs {most:,}: a buffer or a table of fixed size"
    if "view size is not compatible" in text or "contiguous" in text:
        return "needs tensors in one piece: .view() of a slice"
    return known_cause(text)
