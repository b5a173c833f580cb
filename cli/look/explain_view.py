"""The result of `headway backends explain`, and its printed form for terminals of 80 columns or more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from headway.core.select.costs import Shape
    from headway.tuning.table.schema import Cell, PriorRecord


@dataclass(frozen=True)
class BackendTime:
    """One backend's time in a step, or the reasons for having none."""

    name: str
    step_us: float | None
    """Microseconds of the plan and all layers of a step; None: not measured, or the backend cannot serve the step."""
    reasons: tuple[str, ...]
    """Why the backend has no time, or takes no part."""
    runs_here: bool = True
    """True if the backend can run on the device of the step."""


@dataclass(frozen=True)
class Explanation:
    """What `auto` (or a named backend) would do with one step."""

    shape: Shape
    layers: int
    selection: str
    choice: str
    candidates: list[BackendTime]
    """The choice first, then the others by time, then those without a time."""
    nearest: Cell | None
    """The row of the table that lies nearest to the step; None without a table."""
    covered: bool
    """Whether the times were measured around the step; else they are those of the nearest measured edge. True without times."""
    table: str
    age: str
    prior: PriorRecord | None
    """The shipped table that cells of the table are taken from; None: all of them were measured on its machine."""

    @property
    def gap(self) -> tuple[str, float] | None:
        """(the fastest of the others, its time over the choice's); below 1 where a slower backend was named."""
        timed = [candidate for candidate in self.candidates if candidate.step_us is not None]
        if len(timed) < 2 or timed[0].name != self.choice:
            return None
        return timed[1].name, (timed[1].step_us or 0.0) / (timed[0].step_us or 1.0)


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
