"""`python -m headway.bench.conformance.support_matrix GRID.json ...`: the support matrix, from result files of the grid.

With --docs it replaces what stands between the two markers of a document; without, it prints. Nothing in it is typed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from headway.bench.conformance.report import GridCell, GridReport, merge, read_grid
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.tuning.device import DeviceIdentity
from headway.tuning.json_files import write_json

BEGIN = "<!-- support matrix: begin, written by python -m headway.bench.conformance.support_matrix -->"
END = "<!-- support matrix: end -->"
_PHASES = ("prefill", "extend", "decode", "mixed", "verify", "ragged")
TABLES = (
    ("phase", "Phases", _PHASES),
    ("layout", "Cache layouts", ("nhd", "hnd", "vllm_5d")),
    ("block_size", "Block sizes", (8, 16, 64, 128, 256)),
    ("head_dim", "Head sizes", (64, 80, 96, 128, 256)),
    ("group", "Query heads a kv head", (1, 4, 7, 8)),
    ("dtype", "Element types", ("bfloat16", "float16", "float32")),
    ("feature", "Features", ("none", "scale", "window", "window 1", "softcap", "alibi", "sinks", "together", "fp8 cache")),
)
"""Axis, title, and the columns that come first, in this order; values that only a result has follow."""
GRAPHS = (("decode", "1 query token"), ("verify", "4 query tokens"))
HIDDEN = frozenset({"float64"})
"""Values that exist to be refused."""
PASS, REFUSED, FAIL, UNTRIED = "✓", "✗", "⚠", "–"
LEGEND = (
    f"{PASS} with the number of cells whose answer was right; {REFUSED} refused, with reasons; {FAIL} wrong in so many cells of "
    f"so many; {UNTRIED} not tried. Phases in brackets are the only ones in which the value is served. `mixed`: prefill, extend "
    "and decode in one step; `verify`: several query tokens a sequence in decode; `ragged`: decode of very different lengths "
    "with padding rows; `scale`: other than 1 / sqrt(head_dim); `together`: all features that the backend claims in one layer."
)


def render(reports: Iterable[GridReport]) -> str:
    """Markdown of all reports, one section a device; parts of one device's grid are put together first."""
    return "\n\n".join([LEGEND, *(_section(report) for report in merge(reports))])


def replace_in(text: str, matrix: str) -> str:
    """The document with the matrix between its markers.

    :raises ConfigError: the markers are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in after:
        raise ConfigError("--docs", f"a document with one {BEGIN} and one {END} after it", "another")
    return f"{before}{BEGIN}\n\n{matrix}\n\n{END}{after}"


def _section(report: GridReport) -> str:
    cells = report.cells
    missing = {cell.backend: cell.reason for cell in cells if cell.check == "available" and cell.status == "refused"}
    tried = [cell.backend for cell in cells if cell.check == "answer"]
    backends = [name for name in dict.fromkeys(cell.backend for cell in cells if cell.check != "writer") if name in tried]
    parts = [f"### {report.device.name}", _device(report.device)]
    for axis, title, first in TABLES:
        answers = [cell for cell in cells if cell.check == "answer" or (cell.check == "claim" and cell.about == axis)]
        others = {getattr(cell, axis) for cell in answers} - set(first) - HIDDEN
        numbers = all(isinstance(value, int) for value in first)
        columns = sorted({*first, *others}) if numbers else [*first, *sorted(others)]
        rows = [
            [_mark([c for c in answers if c.backend == name and getattr(c, axis) == v]) for v in columns] for name in backends
        ]
        parts.append(_table(title, [str(value) for value in columns], backends, rows))
    checks = (("option", "Options that change the output"), ("alternate", "Turns on one cache with another"))
    rows = [
        [_mark([c for c in cells if c.check == check and c.backend.split(" > ")[0] == b]) for check, _ in checks]
        for b in backends
    ]
    parts.append(_table("Checks", [title for _, title in checks], backends, rows))
    graphs = [cell for cell in cells if cell.check == "graph"]
    if graphs:
        rows = [[_mark([c for c in graphs if c.backend == b and c.phase == phase]) for phase, _ in GRAPHS] for b in backends]
        parts.append(_table("CUDA graphs, captured at the longest lengths", [title for _, title in GRAPHS], backends, rows))
    writers = _mark([cell for cell in cells if cell.check == "writer"])
    parts.append(f"Cache writers, rows read back exactly: {writers}")
    failed = [cell for cell in cells if cell.status == "fail"]
    if failed:
        lines = [f"- `{cell.backend}` {cell.check}, {_place(cell)}: {_one_line(cell.reason)}" for cell in failed]
        parts.append("\n".join([f"{FAIL} **{len(failed)} cells failed:**", "", *lines]))
    if missing:
        lines = [f"- `{name}`: {_one_line(reason)}" for name, reason in missing.items()]
        parts.append("\n".join(["Not available in this run:", "", *lines]))
    return "\n\n".join(parts)


def _device(device: DeviceIdentity) -> str:
    facts = [f"torch {device.torch}", f"Python {device.python}"]
    if device.driver:
        facts.append(f"driver {device.driver}")
    facts += [f"{name} {version}" for name, version in sorted(device.libraries.items()) if name != "headway"]
    return f"{', '.join(facts)}; {device.date[:10]}."


def _mark(cells: Sequence[GridCell]) -> str:
    count = {status: sum(cell.status == status for cell in cells) for status in ("pass", "fail", "refused")}
    if count["fail"]:
        return f"{FAIL} {count['fail']}/{count['fail'] + count['pass']}"
    if count["pass"] and count["refused"]:  # by phase: a kernel for dense prefill binds neither layout nor block size
        phases = dict.fromkeys(cell.phase for cell in cells if cell.status == "pass")
        return f"{PASS} {count['pass']} ({', '.join(sorted(phases, key=_PHASES.index))})"
    if count["pass"]:
        return f"{PASS} {count['pass']}"
    return REFUSED if count["refused"] else UNTRIED


def _table(title: str, columns: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = [f"| {' | '.join([title, *columns])} |", f"|---{'|---' * len(columns)}|"]
    return "\n".join(head + [f"| `{name}` | {' | '.join(row)} |" for name, row in zip(names, rows, strict=True)])


def _place(cell: GridCell) -> str:
    values = [cell.phase, cell.layout, f"block_size {cell.block_size}", f"head_dim {cell.head_dim}", f"group {cell.group}"]
    return ", ".join([*values, cell.dtype, cell.feature])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(
    files: Annotated[list[Path], typer.Argument(help="Result files of the grid; parts of one device are put together.")],
    docs: Annotated[Path | None, typer.Option(help="Replace the matrix between the markers of this document.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the parts of one device's grid as one file.")] = None,
) -> None:
    """Render the support matrix of FILES."""
    try:
        reports = merge(read_grid(path) for path in files)
        matrix = render(reports)
        if output is not None:
            if len(reports) != 1:
                raise ConfigError("--output", "parts of one device's grid", f"{len(reports)} devices")
            write_json(reports[0], output)
        if docs is not None:
            docs.write_text(replace_in(docs.read_text(encoding="utf-8"), matrix), encoding="utf-8")
    except (HeadwayError, OSError) as error:
        typer.echo(f"support_matrix: error: {error}", err=True)
        raise typer.Exit(2) from error
    if docs is None and output is None:
        typer.echo(matrix)


if __name__ == "__main__":
    typer.run(main)
