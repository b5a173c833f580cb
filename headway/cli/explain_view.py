"""The printed form of `headway backends explain`, for terminals of 80 columns or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from headway.cli.explain import BackendTime, Explanation
    from headway.core.select.costs import Shape
    from headway.tuning.table.schema import Cell, PriorRecord


def print_explanation(found: Explanation, console: Console, all_backends: bool) -> None:
    """Print a summary of at most three lines, the times of the backends, and what they are taken from."""
    shape = found.shape
    console.print(Text(f"{shape.phase.value}, {_in_words(shape)}: ", "bold").append(found.choice, "bold green"))
    if found.gap is not None:
        name, factor = found.gap
        verdict = "as fast within a hundredth" if abs(factor - 1) < 0.01 else f"{factor:.2f} times as long"
        rank = "runner-up" if factor > 0.99 else "faster here,"
        console.print(Text(f"{rank} {name}: {verdict}"))
    shown = [each for each in found.candidates if all_backends or each.runs_here]
    if hidden := len(found.candidates) - len(shown):
        console.print(Text(f"not listed: {hidden} backends that cannot run on this device (--all)", "dim"))
    console.print(_times(found, shown))
    if any(each.step_us is not None for each in shown):
        console.print(Text("us: microseconds of all layers, with the step's plan", "dim"))
    if shape.captured:
        console.print(Text("one prompt alone is one graph: launches cost the host nothing here, beside other sequences they do"))
    if not found.covered:
        console.print(Text("the step lies beyond what was measured: these are times of the nearest measured edge"))
    each_step = "; |: chosen for each step by its lengths" if "|" in found.selection else ""
    console.print(Text(f"selection: {found.selection}{each_step}", "dim"))
    if found.nearest is not None:
        cell = found.nearest
        time = "no time"
        if cell.median_us is not None:
            time = f"{cell.median_us:.1f} us per layer (p20 {cell.p20_us:.1f}, p80 {cell.p80_us:.1f})"
        where = f"{cell.layout} {cell.block_size}" if cell.layout else "any layout"
        source = "" if found.prior is None else f", {_source(cell, found.prior)}"
        row = f"{cell.phase}, {_in_words(cell)}, {cell.backend}, {where}: {time}, {cell.status}{source}"
        console.print(Text(f"nearest row of the table: {row}"))
        console.print(Text(f"table: {found.table}, {found.age}", "dim"))
    if found.prior is not None:
        console.print(Text(f"prior: {found.prior}", "dim"))
        for title, lines in (
            ("other there:", found.prior.differs),
            ("not used around", found.prior.disagreed),
            ("corrected around", found.prior.corrected),
        ):
            for line in lines:
                console.print(Text(f"  {title} {line}", "dim"))


def _in_words(step: Shape | Cell) -> str:
    sequences = "1 sequence" if step.batch == 1 else f"{step.batch} sequences"
    return f"{sequences}, {step.query_len} new of {step.kv_len} tokens"


def _times(found: Explanation, candidates: Sequence[BackendTime]) -> Table:
    """Return a table of the candidates' times, with reasons if any of them has none."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("backend", no_wrap=True)
    shown.add_column(f"us per step of {found.layers} layers", justify="right")
    if any(candidate.reasons for candidate in candidates):
        shown.add_column("why not", overflow="fold")
    for candidate in candidates:
        us = "" if candidate.step_us is None else f"{candidate.step_us:,.0f}"
        style = "bold green" if candidate.name == found.choice else ""
        more = f"; and {len(candidate.reasons) - 1} more" if len(candidate.reasons) > 1 else ""
        reasons = [Text("".join(candidate.reasons[:1]) + more)] if len(shown.columns) == 3 else []
        shown.add_row(Text(candidate.name, style), us, *reasons)
    return shown


def _source(cell: Cell, prior: PriorRecord) -> str:
    """Whether a cell was measured here."""
    if not cell.prior:
        return "measured here"
    return "prior, checked here" if prior.checked else "prior, not checked here"
