"""Export of a crossover table or its chart to a file, in the format of the file name's suffix."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from headway.bench.charts import TIE, cell_colour, colours, faded
from headway.bench.crossover.plot import lengths
from headway.bench.crossover.report import (
    Block,
    TableRow,
    View,
    notes,
    show,
    software,
    speedup,
    to_csv,
    to_markdown,
    unit,
    winner,
)
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_bytes, write_json
from headway.core.system.text import harmless
from headway.tuning.table.schema import PhaseName


def _json(view: View, path: Path) -> None:
    write_json(view.table, path)


def _csv(view: View, path: Path) -> None:
    write_bytes(to_csv(view.table).encode(), path)


def _markdown(view: View, path: Path) -> None:
    write_bytes(to_markdown(view).encode(), path)


def _html(view: View, path: Path) -> None:
    write_bytes(to_html(view).encode(), path)


def _png(view: View, path: Path) -> None:
    from headway.bench.crossover.plot import to_png

    write_bytes(to_png(view), path)


FORMS: dict[str, Callable[[View, Path], None]] = {
    ".json": _json,
    ".csv": _csv,
    ".md": _markdown,
    ".html": _html,
    ".png": _png,
}
"""File suffix -> writer. JSON and CSV have every layout and block size; the other formats have only the view's layout and block
size."""


def check_target(path: Path, table: Path | None) -> None:
    """Check a target's file name before any slow work. table: file of the table to show.
    :raises ConfigError: if the format is unknown or the target is the table's own file, whose cells would be lost.
    """
    if table is not None and path.resolve() == table.resolve():
        raise ConfigError("--export", "another file than the table's", str(path))
    check_suffix(path)


def check_suffix(path: Path) -> None:
    """:raises ConfigError: if the format is unknown."""
    if path.suffix.lower() not in FORMS:
        raise ConfigError("--export", f"a file name that ends in {' or '.join(FORMS)}", str(path))


def export(view: View, path: Path) -> None:
    """Write the view atomically.
    :raises ConfigError: if the format is unknown or unsupported for this table, a library is missing, or the folder is not
    writable."""
    check_suffix(path)
    if view.table.kind != "attention" and path.suffix.lower() in (".html", ".png"):
        raise ConfigError("--export", f"a table of attention for {path.suffix}", f"one of kind {view.table.kind}")
    FORMS[path.suffix.lower()](view, path)


PURPOSE: dict[PhaseName, str] = {
    "decode": "One new token per sequence over its whole cache: most of the steps of a generation.",
    "verify": "A few new tokens per sequence at once: the draft tokens of a speculator.",
    "prefill": "Prompts without a cached context.",
    "extend": "New tokens after a cached context: a prefix hit, or a later chunk of a long prompt.",
    "generate": "Whole generations, with as many tokens out as in.",
}


def to_html(view: View) -> str:
    """Return a self-contained HTML page of the view."""
    loader = PackageLoader(__package__, "")
    environment = Environment(
        loader=loader, autoescape=True, finalize=_harmless, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    chosen = colours(view.backends)
    return environment.get_template("page.html").render(
        view=view,
        software=software(view.table.device),
        keys=[
            *((name, chosen[name], f"{_wins(view, name)} of {sum(1 for _ in view.rows)}") for name in view.backends),
            ("tie", TIE, "cannot be told apart"),
        ],
        panels=[_panel(phase, list(blocks)) for phase, blocks in groupby(view.blocks, key=lambda block: block.phase)],
        notes=notes(view),
        colour=lambda row: cell_colour(row.winners, chosen),
        share=lambda row: 100 if len(row.winners) > 1 else round(100 * faded(row.speedup)),
        kind=_kind,
        winner=winner,
        speedup=speedup,
        show=show,
    )


def _harmless(value: object) -> object:
    """Return a value without control characters, for the page. Autoescape handles markup."""
    return harmless(value, keep="\n") if type(value) is str else value


def _wins(view: View, name: str) -> int:
    return sum(name in row.winners for row in view.rows)


def _panel(phase: PhaseName, blocks: list[Block]) -> dict[str, object]:
    """Return the page's data for one phase."""
    return {
        "phase": phase,
        "purpose": PURPOSE[phase],
        "unit": unit(phase),
        "corner": "batch \\ in + out" if phase == "generate" else "batch \\ length",
        "lengths": lengths(blocks),
        "blocks": [(block, {row.label: row for row in block.rows}) for block in blocks],
    }


def _kind(row: TableRow, name: str) -> str:
    """Return the CSS class of a backend's time in a row: "win" for a winner, "no" if the backend has no time, else ""."""
    cell = row.cells.get(name)
    return "win" if name in row.winners else "" if cell is not None and cell.median_us is not None else "no"
