"""One HTML page with the whole view: winners as a heat-map, times as tables, and what they were measured on. Loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources
from itertools import groupby
from string import Template

from headway.bench.crossover.palette import TIE, cell_colour, colours, faded
from headway.bench.crossover.plot import lengths
from headway.bench.crossover.report import notes, software, speedup, winner
from headway.bench.crossover.view import Block, Row, View, show, unit
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
    chosen = colours(view.backends)
    panels = [(phase, list(blocks)) for phase, blocks in groupby(view.blocks, key=lambda block: block.phase)]
    page = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(view.table.title),
        where=escape(view.where),
        software=escape(software(view.table.device)),
        command=escape(view.table.command),
        date=escape(view.table.date),
        legend="".join(_key(name, chosen[name], _wins(view, name)) for name in view.backends)
        + _key("tie", TIE, "cannot be told apart"),
        sections="\n".join(_section(phase, blocks, view, chosen) for phase, blocks in panels),
        notes="".join(f"<li>{escape(line)}</li>" for line in notes(view)),
    )


def _wins(view: View, name: str) -> str:
    won = sum(name in row.winners for row in view.rows)
    return f"{won} of {sum(1 for _ in view.rows)}"


def _key(name: str, colour: str, won: str) -> str:
    return f'<li><i style="background:{colour}"></i><b>{escape(name)}</b> <span>{won}</span></li>'


def _section(phase: PhaseName, blocks: list[Block], view: View, chosen: dict[str, str]) -> str:
    return (
        f'<section><h2>{phase}</h2><p>{PURPOSE[phase]}</p><div class="scroll">{_heat(phase, blocks, chosen)}</div>'
        f"<details><summary>Times ({unit(phase)})</summary>{''.join(_times(block, view, chosen) for block in blocks)}</details>"
        "</section>"
    )


def _heat(phase: PhaseName, blocks: list[Block], chosen: dict[str, str]) -> str:
    """Batch sizes down, lengths across; a cell in its winner's colour, fuller the more it gains."""
    columns = lengths(blocks)
    head = "".join(f"<th scope=col>{escape(label)}</th>" for label in columns)
    rows = []
    for block in blocks:
        by_label = {row.label: row for row in block.rows}
        cells = "".join(_cell(by_label[label], chosen) if label in by_label else "<td class=empty></td>" for label in columns)
        rows.append(f"<tr><th scope=row>{block.batch}</th>{cells}</tr>")
    corner = "batch \\ length" if phase != "generate" else "batch \\ in + out"
    return f"<table class=heat><thead><tr><th>{corner}</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(row: Row, chosen: dict[str, str]) -> str:
    colour = cell_colour(row.winners, chosen)
    share = 100 if len(row.winners) > 1 else round(100 * faded(row.speedup))
    times = "\n".join(f"{cell.backend}: {show(cell)}" for cell in row.cells.values())
    return (
        f'<td style="--c:{colour};--s:{share}%" title="{escape(times)}"><b>{escape(winner(row))}</b>'
        f"<span>{escape(speedup(row))}</span></td>"
    )


def _times(block: Block, view: View, chosen: dict[str, str]) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in view.backends)
    body = "".join(_line(row, view.backends, chosen) for row in block.rows)
    return (
        f"<h3>batch size {block.batch}</h3><div class=scroll><table class=times><thead><tr><th>length</th>{head}"
        f"<th>winner</th><th>speed-up</th></tr></thead><tbody>{body}</tbody></table></div>"
    )


def _line(row: Row, backends: Iterable[str], chosen: dict[str, str]) -> str:
    cells = []
    for name in backends:
        cell = row.cells.get(name)
        kind = "win" if name in row.winners else "" if cell is not None and cell.median_us is not None else "no"
        reason = f' title="{escape(cell.reason)}"' if cell is not None and cell.reason else ""
        cells.append(f'<td class="{kind}"{reason}>{escape(show(cell))}</td>')
    named = escape(winner(row))
    return f"<tr><th scope=row>{escape(row.label)}</th>{''.join(cells)}<td class=name>{named}</td><td>{speedup(row)}</td></tr>"
