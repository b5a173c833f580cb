"""Comparison of two reports of the conformance kit: verdicts that changed, errors that grew, cells that only one has."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from headway.testing.kit.report import CellResult, CheckReport

GROWN = 2.0
"""Factor by which the error of a cell that passes in both reports must change to be listed. Sums in another order change the
error of a right kernel by less."""
_NOISE = 1e-3
"""Share of the tolerance up to which an error says nothing."""
_WIDTH = 80
_LISTED = 20
"""Cells listed of each kind; the rest are counted."""


class ReportComparison:
    """Differences of two reports, the second of which is the newer one."""

    def __init__(self, first: CheckReport, second: CheckReport) -> None:
        self.first = first
        self.second = second
        self._old, self._new = ({cell.cell: cell for cell in report.cells} for report in (first, second))

    @property
    def _sides(self) -> list[tuple[dict[str, CellResult], dict[str, CellResult]]]:
        return [(self._new, self._old), (self._old, self._new)]

    @cached_property
    def _both(self) -> list[tuple[CellResult, CellResult]]:
        return [(self._old[name], cell) for name, cell in self._new.items() if name in self._old]

    @cached_property
    def _failing(self) -> list[str]:
        """Cells that fail in the second report and do not in the first, which need not have them."""
        found = [cell for cell in self.second.failed if cell.cell not in self._old or self._old[cell.cell].status != "failed"]
        return [f"{cell.cell} ({self._was(cell)}): {cell.reason}" for cell in found]

    def _was(self, cell: CellResult) -> str:
        return self._old[cell.cell].status if cell.cell in self._old else "new"

    @cached_property
    def _lost(self) -> list[str]:
        """Cells that passed and are skipped, or missing although the second run tried as much of their check."""
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
        """Whether the second report has a failure, a grown error or a lost cell that the first does not have."""
        unavailable = bool(self.second.unavailable) and not self.first.unavailable
        return unavailable or bool(self._failing or self._grown or self._lost)

    def lines(self) -> Iterator[str]:
        """The differences, in lines of at most 80 columns where names of cells allow."""
        for name, report in (("A", self.first), ("B", self.second)):
            made = f"{report.target} on {report.machine.device}, {report.date[:16]}, file {report.digest[:12] or 'unknown'}"
            left = f", {report.not_run} not run" if report.not_run else ""
            cells = report.unavailable or f"{len(report.cells)} cells, {len(report.failed)} failed{left}"
            yield from _wrapped(f"{name}: {made}; {cells}", "")
        fixed = [f"{new.cell}" for old, new in self._both if (old.status, new.status) == ("failed", "passed")]
        added, gone = ([name for name in ours if name not in theirs] for ours, theirs in self._sides)
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
