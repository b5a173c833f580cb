"""Console that the commands print to. Names are printed literally, without markup or control sequences."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.measure import Measurement
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from headway.core.system.text import harmless

if TYPE_CHECKING:  # rich's progress bars are imported only when needed
    from rich.progress import Progress


class Terminal(Console):
    """rich's Console that does not interpret square brackets or emoji codes as markup, and escapes control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        self.push_render_hook(_Hook())

    def status(self, status: Any, **options: Any) -> Status:
        """Return a spinner with a literal text. To change the text, pass a `Text` to `Status.update`."""
        return super().status(Text(harmless(status)) if isinstance(status, str) else status, **options)


def for_standard_output(text: str) -> str:
    """Return a model's text for stdout: unchanged for a file or a pipe, with control characters escaped for a terminal."""
    return harmless(text, keep="\n\t") if sys.stdout.isatty() else text


class _Hook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Harmless(each) for each in renderables]


class _Harmless:
    """Wrapper of a renderable that escapes its control characters."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._inner, options):
            text, style, control = segment
            yield segment if control or text.isspace() else Segment(harmless(text, keep="\n"), style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._inner)


def progress_bar(console: Console | None) -> Progress:
    """Return a progress bar that shows the time left, hidden if the console is not a terminal."""
    import rich.progress as bars

    shown = console if console is not None and console.is_terminal else None
    return bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=shown or Console(quiet=True),  # rich before 14.3 ends a hidden bar with an empty line too
        disable=shown is None,
        transient=True,
    )


@dataclass(frozen=True)
class Row:
    """A table row: one kernel, or several that share a reason."""

    cells: Sequence[str]
    """Texts of the row: the kernel's name, then its time or range in each column."""
    chosen: Collection[int] = ()
    """Indices of the cells that show the choice."""
    why_not: str = ""
    runs_here: bool = True
    """True if the kernel can run on the device."""


@dataclass(frozen=True)
class Section:
    """Kernels for one kind of operation, and the reasons against the other kernels."""

    title: str
    answer: str = ""
    summary: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Row] = ()
    remarks: Sequence[str] = ()
    notes: Sequence[str] = ()
    """Remarks on the sources of the choice and of its times."""


def show(found: Section, console: Console, all_kernels: bool) -> None:
    """Print a section: summary, table of kernels, remarks and sources. all_kernels: True to include kernels that cannot run on
    the device."""
    console.print(Text(found.title, "bold").append(found.answer, "bold green"))
    for line in found.summary:
        console.print(Text(line))
    rows = [row for row in found.rows if all_kernels or row.runs_here]
    if hidden := len(found.rows) - len(rows):
        console.print(Text(f"not listed: {hidden} backends that cannot run on this device (--all)", "dim"))
    if rows:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, column in enumerate(found.columns):
            table.add_column(column, justify="right" if number else "left")
        if any(row.why_not for row in rows):
            table.add_column("why not", overflow="fold")
        for row in rows:
            cells = [Text(cell, "bold green" if number in row.chosen else "") for number, cell in enumerate(row.cells)]
            table.add_row(*[*cells, Text(row.why_not)][: len(table.columns)])
        console.print(table)
    for line in found.remarks:
        console.print(Text(line))
    for line in found.notes:
        console.print(Text(line, "dim"))
