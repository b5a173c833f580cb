"""Rendering of a report: text for the terminal, one line per check, and an SVG badge."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from rich.text import Text

from headway.core.oracle.cells import AXES, INPUTS
from headway.core.system.text import page
from headway.testing.kit.report import CellResult, CheckReport, Status

_MARKS: dict[Status, tuple[str, str]] = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "skipped": ("–", "dim")}
_NAME = 10
_SHOWN = 8
"""Maximum number of failures shown in words, one of each kind. Other failures are counted; the JSON file has all of them."""
_UNEXPLAINED = 3
"""Maximum number of failures of one kind that are shown if they have no likely cause."""
_RAISED = re.compile(r"(\w+: .*)(\(\S+\.py:\d+\))$")
"""Pattern for the exception and its location at the end of a failure's reason."""


def scorecard(report: CheckReport, about: Mapping[str, str], width: int = 80) -> Iterator[Text]:
    """Yield the lines of a report. about: name of a check -> its description."""
    how = " under Triton's interpreter" if report.machine.interpreted else ""
    layers = f" with the layers of {report.model}" if report.model else ""
    title = f"{report.subject} on {report.machine.device}{how}{layers}: {report.machine.name}, torch {report.machine.torch}"
    yield from _wrapped(title, width, "", "bold")
    if report.unavailable:
        yield from _wrapped(f"not available here: {report.unavailable}", width, "", "red")
        return
    for name, text in about.items():
        cells = [cell for cell in report.cells if cell.check == name]
        if cells:
            yield _line(name, text, cells, width)
        for cell in cells if name == "serves" else ():
            yield from _wrapped(cell.reason, width, "     ", "" if cell.status == "passed" else "yellow")
    failed = report.failed
    if failed:
        yield Text()
        left = _SHOWN
        for kind in _kinds(failed):
            shown = kind[: min(left, 1 if kind[0].guess or _RAISED.search(kind[0].reason) else _UNEXPLAINED)]
            left -= len(shown)
            for cell in shown:
                yield from _failure(report, cell, width)
            if shown and len(kind) > len(shown):
                yield Text(f"  and {len(kind) - len(shown)} more like it", "dim")
        if len(failed) > _SHOWN - left:
            yield Text(f"{len(failed)} failed in all; --json FILE keeps them")
        for line in patterns(report.cells) if not report.not_run else ():
            yield from _wrapped(line, width, "", "yellow")
    yield Text()
    counts = Counter(cell.status for cell in report.cells)
    verdict, style = ("FAILED", "bold red") if failed else ("passed", "bold green")
    if not failed and (report.not_run or not report.tested):
        verdict, style = "interrupted" if report.not_run else "nothing was checked", "bold yellow"
    parts = [f"{counts[status]} {status}" for status in _MARKS if counts[status]]
    parts += [f"{report.not_run} not run"] if report.not_run else []
    yield Text(f"{verdict}: {', '.join(parts) or 'no cells'} in {report.seconds:.0f} s", style)


def _line(name: str, text: str, cells: Sequence[CellResult], width: int) -> Text:
    counts = Counter(cell.status for cell in cells)
    status: Status = "failed" if counts["failed"] else "passed" if counts["passed"] else "skipped"
    mark, style = _MARKS[status]
    number = f"{counts['failed']} of {len(cells)} failed" if status == "failed" else str(counts["passed"])
    said = text
    if name == "serves":  # each cell's reason is printed below
        number = str(counts["passed"] or "")
    elif status == "skipped":
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
    numbers = ""
    if cell.relative_error is not None and cell.tolerance is not None:
        numbers = f"; relative error {cell.relative_error:.2g}, tolerance {cell.tolerance:.2g}"
    yield from _wrapped(cell.reason + numbers, width, "  ", "default")
    if cell.guess:
        yield from _wrapped(f"looks like: {cell.guess}", width, "  ", "yellow")
    yield Text(f"  {command(report, cell)}", "cyan")


def command(report: CheckReport, cell: CellResult) -> str:
    """Return the command line that runs only this cell."""
    device = f" --device {report.machine.device}" if report.machine.device != "cpu" else ""
    target = f" {report.target}" if not report.target.startswith("layout ") else ""
    layout = f" --layout {cell.layout}" if cell.check == "layout" else ""
    plugins = "".join(f" --plugin {file}" for file in report.plugins)
    model = f" --model {report.model}" if report.model else ""
    rule = f" --rule {report.rule}" if report.rule else ""
    return f"headway check{target}{plugins}{layout}{device}{model}{rule} --cell {cell.cell}"


def patterns(cells: Sequence[CellResult]) -> list[str]:
    """Return patterns that distinguish cells with wrong answers from cells with correct answers, in words.

    The first choice is axes on which the two groups share no value, of which the axes with the fewest values are returned. The
    second choice is a pair of values that only wrong answers combine. The third choice is a value common to all wrong answers, if
    this is unlikely to be a coincidence.
    """
    tried = [cell for cell in cells if cell.check in ("answer", "long", "graph")]
    bad = [cell for cell in tried if cell.status == "failed"]
    good = [cell for cell in tried if cell.status == "passed"]
    found = []
    for axis in _AXES:
        wrong, right = ({getattr(cell, axis) for cell in cells} for cells in (bad, good))
        if wrong and right and not wrong & right:
            how, values = ("wrong", wrong) if len(wrong) <= len(right) else ("right", right)
            listed = " or ".join(map(str, sorted(values, key=str)))
            found.append((len(values), f"answers are {how} exactly where {axis} is {listed} ({len(bad)} cells are wrong)"))
    if found:
        return [line for count, line in found if count == min(found)[0]]
    return _pairs(bad, good) or _common(bad, tried) if len(bad) >= _FEWEST and good else []


_AXES = ("check", "phase", *AXES, *INPUTS)
_FEWEST = 3
"""Minimum number of wrong answers from which a pattern is derived."""
_CHANCE = 1e-3
"""Maximum probability of a coincidence at which a value shared by all wrong answers is reported."""


def _pairs(bad: Sequence[CellResult], good: Sequence[CellResult]) -> list[str]:
    """Return a pair of values that all wrong answers and no correct answers have, in words."""
    shared = [(axis, values.pop()) for axis in _AXES if len(values := {getattr(cell, axis) for cell in bad}) == 1]
    found = []
    for (one, first), (other, second) in combinations(shared, 2):
        if not any(getattr(cell, one) == first and getattr(cell, other) == second for cell in good):
            found.append(f"answers are wrong exactly where {one} is {first} and {other} is {second} ({len(bad)} cells are wrong)")
    return found[:1]


def _common(bad: Sequence[CellResult], tried: Sequence[CellResult]) -> list[str]:
    """Return the value or lower bound that all wrong answers and the fewest correct answers have, in words."""
    found: list[tuple[float, str]] = []
    for axis in _AXES:
        values = {getattr(cell, axis) for cell in bad}
        if len(values) == 1:
            text, with_it = f"{axis} {min(values)}", [cell for cell in tried if getattr(cell, axis) in values]
        elif all(isinstance(value, int) for value in values):
            text, with_it = f"{axis} {min(values)} or more", [cell for cell in tried if getattr(cell, axis) >= min(values)]
        else:
            continue
        share = len(with_it) / len(tried)
        if share ** len(bad) < _CHANCE:
            found.append((share, f"all {len(bad)} wrong answers have {text}, as have {len(with_it) - len(bad)} right ones"))
    return [line for share, line in sorted(found)[:1]]


def badge(report: CheckReport) -> str:
    """Return the report's result as an SVG badge in the style of shields.io."""
    failed, done = len(report.failed), len(report.cells)
    kind = "quick" if report.quick else "full"
    if failed:
        text, colour = f"{failed} of {done} failed", "#e05d44"
    elif report.not_run or not report.tested:
        text, colour = "not tested", "#9f9f9f"
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


def _kinds(failed: Sequence[CellResult]) -> list[list[CellResult]]:
    """Return failures in groups, in order of appearance. Exceptions are grouped by type and location; other failures are grouped
    by check and by cause without its parameters."""
    kinds: dict[tuple[str, str], list[CellResult]] = {}
    for cell in failed:
        raised = _RAISED.search(cell.reason)
        kind = (re.sub(r"\d+", "0", raised[1]), raised[2]) if raised else (cell.check, cell.guess.partition(";")[0])
        kinds.setdefault(kind, []).append(cell)
    return list(kinds.values())


def _wrapped(text: str, width: int, indent: str, style: str) -> Iterator[Text]:
    for line in textwrap.wrap(text, width - len(indent), break_on_hyphens=False):
        yield Text(indent + line, style)
