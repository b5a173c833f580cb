"""`python docs/_tools/support_matrix.py CHECK.json ...`: the support matrix, from result files of the conformance kit.

With --docs it replaces the text between the two markers of a document; otherwise it prints. Nothing in it is typed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.oracle.cells import FEATURES, MEMORIES, MODEL_SOFTCAPS, MODEL_WINDOWS, PHASES
from headway.core.system.files import write_whole
from headway.testing.kit.report import CellResult, CheckReport, read_check
from result_tables import in_words

BEGIN = "<!-- support matrix: begin, written by python docs/_tools/support_matrix.py -->"
END = "<!-- support matrix: end -->"
TABLES: tuple[tuple[str, str, tuple[str | int, ...]], ...] = (
    ("phase", "Phases", tuple(PHASES)),
    ("layout", "Cache layouts", ("nhd", "hnd", "vllm_5d", "latent", "nhd_int8")),
    ("memory", "Memory", MEMORIES),
    ("block_size", "Block sizes", (8, 16, 64, 128, 256)),
    ("head_dim", "Head sizes", (64, 80, 96, 128, 256)),
    ("group", "Query heads per kv head", (1, 4, 7, 8)),
    ("dtype", "Element types", ("bfloat16", "float16", "float32")),
    ("feature", "Features", tuple(name for name in FEATURES if name not in MODEL_WINDOWS | MODEL_SOFTCAPS)),
)
"""(axis, title, first columns). Values that only a result has follow."""
DEEP = ("graph", "prompt", "bounds", "lse", "turns", "steps", "repeat", "invariant", "memory", "sync", "engine", "long")
PASS, REFUSED, FAIL, UNTRIED = "✓", "✗", "⚠", "–"
LEGEND = f"""{PASS} N: all answers are correct in N cells. {REFUSED}: the backend refuses the value and gives a reason.
{FAIL} M/N: wrong answers in M of N cells. {UNTRIED}: not tested.

- `mixed`: prefill, extend and decode in one step
- `verify`: decode with several query tokens per sequence
- `ragged`: decode of sequences with very different lengths, and padding rows
- `packed`, `interleaved`, `spaced`, `far`: caches that are strided views of other memory
- `together`: all features that the backend claims, in one layer"""


def render(reports: Iterable[CheckReport]) -> str:
    """Return all reports as Markdown, with one section per device."""
    devices: dict[str, list[CheckReport]] = {}
    for report in reports:
        devices.setdefault(f"{report.machine.device} {report.machine.name}", []).append(report)
    return "\n\n".join([LEGEND, *(_section(parts) for parts in devices.values())])


def replace_in(text: str, matrix: str) -> str:
    """Return the document with the matrix between its markers.

    :raises ConfigError: if the markers are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in after:
        raise ConfigError("--docs", f"a document with one {BEGIN} and one {END} after it", "another")
    return f"{before}{BEGIN}\n\n{matrix}\n\n{END}{after}"


def _section(reports: Sequence[CheckReport]) -> str:
    first = reports[0]
    parts = [f"### {first.machine.name}", _origin(reports)]
    tried = [report for report in reports if report.cells]
    for axis, title, known in TABLES:
        others = {getattr(cell, axis) for report in tried for cell in report.cells if cell.check == "answer"} - set(known)
        numbers = all(isinstance(value, int) for value in known)
        columns = sorted({*known, *others}) if numbers else [*known, *sorted(others)]
        rows = [[_mark(_about(report, axis, value)) for value in columns] for report in tried]
        parts.append(_table(title, [str(value) for value in columns], tried, rows))
    rows = [[_mark([cell for cell in report.cells if cell.check == name]) for name in DEEP] for report in tried]
    parts.append(_table("Checks", list(DEEP), tried, rows))
    failed = [(report, cell) for report in tried for cell in report.failed]
    if failed:
        lines = [f"- `{report.subject}` `{cell.cell}`: {_one_line(cell.guess or cell.reason)}" for report, cell in failed]
        parts.append("\n".join([f"{FAIL} **{len(failed)} cells failed:**", "", *lines]))
    missing = [report for report in reports if report.unavailable]
    if missing:
        lines = [f"- `{report.subject}`: {_one_line(report.unavailable)}" for report in missing]
        parts.append("\n".join(["Not available in this run:", "", *lines]))
    return "\n\n".join(parts)


def _about(report: CheckReport, axis: str, value: str | int) -> list[CellResult]:
    cells = [cell for cell in report.cells if getattr(cell, axis) == value]
    refused = [cell for cell in cells if cell.check == "refuse" and cell.cell.rpartition(":")[2] == axis]
    return [cell for cell in cells if cell.check == "answer"] + refused


def _origin(reports: Sequence[CheckReport]) -> str:
    machine = reports[0].machine
    libraries = {name: version for report in reports for name, version in report.machine.libraries.items()}
    facts = [f"torch {machine.torch}", f"Python {machine.python}", *(f"{name} {v}" for name, v in sorted(libraries.items()))]
    tested = in_words([report.origin for report in reports])
    return f"{', '.join(facts)}. Tested on {max(report.date for report in reports)[:10]} with {tested}."


def _mark(cells: Sequence[CellResult]) -> str:
    failed = sum(cell.status == "failed" for cell in cells)
    refused = sum(cell.check == "refuse" or cell.status == "skipped" for cell in cells)
    passed = sum(cell.status == "passed" and cell.check != "refuse" for cell in cells)
    if failed:
        return f"{FAIL} {failed}/{len(cells)}"
    if passed:
        return f"{PASS} {passed}"
    return REFUSED if refused else UNTRIED


def _table(title: str, columns: Sequence[str], reports: Sequence[CheckReport], rows: Sequence[Sequence[str]]) -> str:
    head = [f"| {' | '.join([title, *columns])} |", f"|---{'|---' * len(columns)}|"]
    body = [f"| `{report.subject}` | {' | '.join(row)} |" for report, row in zip(reports, rows, strict=True)]
    return "\n".join(head + body)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(
    files: Annotated[list[Path], typer.Argument(help="Result files of `headway check --json`.")],
    docs: Annotated[Path | None, typer.Option(help="Replace the matrix between the markers of this document.")] = None,
) -> None:
    """Render the support matrix of FILES."""
    try:
        matrix = render(read_check(path) for path in files)
        if docs is not None:
            write_whole(docs, replace_in(docs.read_text(encoding="utf-8"), matrix).encode())
    except (HeadwayError, OSError) as error:
        typer.echo(f"matrix: error: {error}", err=True)
        raise typer.Exit(2) from error
    if docs is None:
        typer.echo(matrix)


if __name__ == "__main__":
    typer.run(main)
