"""A report in the terminal, one line for each check, and as a badge."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from headway.core.system.text import page
from headway.testing.cells import AXES
from headway.testing.report import CellResult, CheckReport, Status

_MARKS: dict[Status, tuple[str, str]] = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "skipped": ("–", "dim")}
_NAME = 10
_SHOWN = 8
"""Failures shown in words; the rest are counted, and all are in the JSON file."""


def scorecard(report: CheckReport, about: Mapping[str, str], width: int = 80) -> Iterator[Text]:
    """The lines of a report. about: what each check holds a subject to."""
    yield Text(f"{report.subject} on {report.machine.device}: {report.machine.name}, torch {report.machine.torch}", "bold")
    if report.unavailable:
        yield from _wrapped(f"not available here: {report.unavailable}", width, "", "red")
        return
    for name, text in about.items():
        cells = [cell for cell in report.cells if cell.check == name]
        if cells:
            yield _line(name, text, cells, width)
    failed = report.failed
    if failed:
        yield Text()
        for cell in _different(failed)[:_SHOWN]:
            yield from _failure(report, cell, width)
        more = len(failed) - min(_SHOWN, len(_different(failed)))
        if more:
            yield Text(f"{more} more failed; --json FILE holds them all")
        for line in patterns(report.cells):
            yield from _wrapped(line, width, "", "yellow")
    yield Text()
    counts = Counter(cell.status for cell in report.cells)
    verdict = "FAILED" if failed else "passed"
    summary = ", ".join(f"{counts[status]} {status}" for status in _MARKS if counts[status])
    yield Text(f"{verdict}: {summary or 'nothing was tried'} in {report.seconds:.0f} s", "bold red" if failed else "bold green")


def _line(name: str, text: str, cells: Sequence[CellResult], width: int) -> Text:
    counts = Counter(cell.status for cell in cells)
    status: Status = "failed" if counts["failed"] else "passed" if counts["passed"] else "skipped"
    mark, style = _MARKS[status]
    number = f"{counts['failed']} of {len(cells)} failed" if status == "failed" else str(counts["passed"])
    said = text
    if status == "skipped":
        number, said = "", cells[0].reason
    elif name == "cold":
        slowest = max(cells, key=lambda cell: cell.seconds)
        said = f"{slowest.phase}: {slowest.reason}"
    elif status == "passed" and len(cells) == 1 and cells[0].reason:
        said = cells[0].reason
    elif status == "passed" and counts["skipped"]:
        said = f"{text}; {counts['skipped']} skipped"
    line = Text(f" {mark} ", style).append(name.ljust(_NAME), "bold").append(f"{number:>4} " if number else "     ", style)
    room = width - len(line)
    return line.append(said if len(said) <= room else said[: room - 1] + "…", "default")


def _failure(report: CheckReport, cell: CellResult, width: int) -> Iterator[Text]:
    yield Text("✗ ", "bold red").append(cell.cell, "bold")
    if cell.relative_error is not None and cell.tolerance is not None:
        numbers = f"; relative error {cell.relative_error:.2g}, tolerance {cell.tolerance:.2g}"
    else:
        numbers = ""
    yield from _wrapped(cell.reason + numbers, width, "  ", "default")
    if cell.guess:
        yield from _wrapped(f"looks like: {cell.guess}", width, "  ", "yellow")
    yield Text(f"  {command(report, cell)}", "cyan")


def command(report: CheckReport, cell: CellResult) -> str:
    """The one command that runs exactly this cell."""
    device = f" --device {report.machine.device}" if report.machine.device != "cpu" else ""
    target = f" {report.target}" if not report.target.startswith("layout ") else ""
    layout = f" --layout {cell.layout}" if cell.check == "layout" else ""
    plugins = "".join(f" --plugin {file}" for file in report.plugins)
    return f"headway check{target}{plugins}{layout}{device} --cell {cell.cell}"


def patterns(cells: Sequence[CellResult]) -> list[str]:
    """Values that all failures of the answers share and no success has."""
    tried = [cell for cell in cells if cell.check in ("answer", "long", "graph")]
    bad = [cell for cell in tried if cell.status == "failed"]
    good = [cell for cell in tried if cell.status == "passed"]
    found = []
    for axis in ("check", "phase", *AXES):
        values = {getattr(cell, axis) for cell in bad}
        if bad and good and not values & {getattr(cell, axis) for cell in good}:
            listed = " or ".join(map(str, sorted(values, key=str)))
            found.append(f"answers are wrong exactly where {axis} is {listed} ({len(bad)} cells)")
    return found


def badge(report: CheckReport) -> str:
    """The outcome as an SVG picture, in the form that shields.io made usual."""
    failed, done = len(report.failed), len(report.cells)
    kind = "quick" if report.quick else "full"
    if report.unavailable or not done:
        text, colour = "not tested", "#9f9f9f"
    elif failed:
        text, colour = f"{failed} of {done} failed", "#e05d44"
    else:
        text, colour = f"{done} cells passed ({kind})", "#4c1"
    label = page(f"headway check {report.subject}")
    made = page(f"{report.machine.name}, {report.origin}, {report.date[:10]}")
    left, right = 7 * len(label) + 10, 7 * len(text) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{label}: {text}">'
        f"<title>{label}: {text}, {made}</title>"
        f'<rect width="{left}" height="20" fill="#555"/><rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{left / 2}" y="14">{label}</text><text x="{left + right / 2}" y="14">{text}</text></g></svg>\n'
    )


def _different(failed: Sequence[CellResult]) -> list[CellResult]:
    """Failures with one of each check and guess first."""
    seen: set[tuple[str, str]] = set()
    first: list[CellResult] = []
    rest: list[CellResult] = []
    for cell in failed:
        key = (cell.check, cell.guess)
        (rest if key in seen else first).append(cell)
        seen.add(key)
    return [*first, *rest]


def _wrapped(text: str, width: int, indent: str, style: str) -> Iterator[Text]:
    for line in textwrap.wrap(text, width - len(indent), break_on_hyphens=False):
        yield Text(indent + line, style)
