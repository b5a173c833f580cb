"""One HTML page with the whole view: winners as a heat-map, times as tables, and what they were measured on. Loads nothing."""

from __future__ import annotations

from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined

from headway.bench.crossover.palette import TIE, cell_colour, colours, faded
from headway.bench.crossover.plot import lengths
from headway.bench.crossover.report import notes, software, speedup, winner
from headway.bench.crossover.view import Block, Row, View, show, unit
from headway.core.system.text import harmless
from headway.tuning.schema import PhaseName

PURPOSE: dict[PhaseName, str] = {
    "decode": "One new token a sequence over its whole cache: most of the steps of a generation.",
    "verify": "A few new tokens a sequence at once: the guesses of a speculator.",
    "prefill": "Prompts without a cached context.",
    "extend": "New tokens after a cached context: a prefix hit, or a later chunk of a long prompt.",
    "generate": "Whole generations, with as many tokens out as in.",
}


def to_html(view: View) -> str:
    """The page. Every colour, rule and number is in it, so it can be mailed or kept beside the table."""
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
    """What goes into the page: autoescape takes care of markup."""
    return harmless(value, keep="\n") if type(value) is str else value


def _wins(view: View, name: str) -> int:
    return sum(name in row.winners for row in view.rows)


def _panel(phase: PhaseName, blocks: list[Block]) -> dict[str, object]:
    """What the page says of one phase."""
    return {
        "phase": phase,
        "purpose": PURPOSE[phase],
        "unit": unit(phase),
        "corner": "batch \\ in + out" if phase == "generate" else "batch \\ length",
        "lengths": lengths(blocks),
        "blocks": [(block, {row.label: row for row in block.rows}) for block in blocks],
    }


def _kind(row: Row, name: str) -> str:
    """The style of a backend's time in a row."""
    cell = row.cells.get(name)
    return "win" if name in row.winners else "" if cell is not None and cell.median_us is not None else "no"
