"""A line of statistics in the log from time to time."""

from __future__ import annotations

import logging
import time

from headway.core.engine.loop import EngineLoop
from headway.stats_text import stats_line

log = logging.getLogger("headway")


class StatsLog:
    """Logs what an engine does, at most once in an interval, while it does something."""

    def __init__(self, engine: EngineLoop, interval: float) -> None:
        """interval: seconds."""
        self._interval = interval
        self._last = engine.snapshot()

    def stepped(self, engine: EngineLoop) -> None:
        """Log a line, if it is time; call it after each step."""
        if time.perf_counter() - self._last.time >= self._interval:
            now = engine.snapshot()
            log.info("%s", stats_line(now, self._last))
            self._last = now
