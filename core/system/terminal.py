"""Console that the commands print to. Names are printed literally, without markup or control sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.measure import Measurement
from rich.segment import Segment
from rich.status import Status
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
