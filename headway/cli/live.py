"""A line of statistics that a terminal shows in place while text is written above it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from headway.core.engine.stats import EngineSnapshot
from headway.stats_text import stats_line

_SECONDS_IN_PLACE = 0.25
"""Between two refreshes on a terminal."""
_SECONDS_BETWEEN_LINES = 2.0
"""Elsewhere."""


class LiveStats:
    """Shows what an engine does, on stderr: in the terminal's last row, or as plain lines where stderr is no terminal.

    The last row is kept out of what scrolls (DECSTBM, as package managers do), so text may be streamed to the same terminal.
    """

    def __init__(self, stats: Callable[[], EngineSnapshot], shown: bool = True, out: TextIO | None = None) -> None:
        """stats: reads the engine's. shown: else it does nothing."""
        self._stats, self._shown = stats, shown
        self._out = sys.stderr if out is None else out
        self._in_place = self._out.isatty() and os.get_terminal_size(self._out.fileno()).lines > 1  # 0: it does not know
        self._rows = 0

    def __enter__(self) -> Self:
        if self._shown:
            self._last = self._stats()
        return self

    def refresh(self) -> None:
        """Show the line anew, if it is time."""
        if self._shown and time.perf_counter() - self._last.time >= (
            _SECONDS_IN_PLACE if self._in_place else _SECONDS_BETWEEN_LINES
        ):
            self._show()

    def _show(self) -> None:
        now = self._stats()
        line = stats_line(now, self._last)
        self._last = now
        if not self._in_place:
            print(line, file=self._out, flush=True)
            return
        columns, rows = os.get_terminal_size(self._out.fileno())
        reserve = ""
        if rows != self._rows:  # "index" makes room below the cursor; setting the region moves it, hence save and restore
            reserve, self._rows = f"\x1bD\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A", rows
        self._out.write(f"{reserve}\x1b7\x1b[{rows};1H\x1b[2K{line[: columns - 1]}\x1b8")
        self._out.flush()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._rows:  # all rows scroll again, and the last is free
            self._out.write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[r\x1b8")
            self._out.flush()
            self._rows = 0
        elif self._shown and not self._in_place and self._stats().totals.num_steps > self._last.totals.num_steps:
            self._show()
