"""The console that commands write to: names are shown as they are, neither markup nor anything that a terminal obeys."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.measure import Measurement
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from headway.core.system.text import harmless


class Terminal(Console):
    """rich's Console, without markup in square brackets and emoji codes, and with control characters as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        self.push_render_hook(_Hook())

    def status(self, status: Any, **options: Any) -> Status:
        """A spinner with a text, which is no markup either; `Status.update` takes a `Text`."""
        return super().status(Text(harmless(status)) if isinstance(status, str) else status, **options)


def for_standard_output(text: str) -> str:
    """What a model has written: as it is for a file or a pipe, and without what it would have obeyed for a terminal."""
    return harmless(text, keep="\n\t") if sys.stdout.isatty() else text


class _Hook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Harmless(each) for each in renderables]


class _Harmless:
    """Something to show, with the control characters of its text as escapes."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._inner, options):
            text, style, control = segment
            yield segment if control or text.isspace() else Segment(harmless(text, keep="\n"), style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._inner)
