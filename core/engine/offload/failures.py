"""What could not be kept, or was not found as it should be."""

from __future__ import annotations

import logging

from headway.core.engine.stats import EngineStats

log = logging.getLogger("headway")


class Failures:
    """Counts pages in `EngineStats.offload_failures`, by what has become of them, and logs the first error of each kind."""

    def __init__(self, stats: EngineStats) -> None:
        self._counts = stats.offload_failures
        self._logged: set[str] = set()

    def count(self, what: str, num_pages: int, error: Exception | None = None) -> None:
        """What has become of some pages. error: why; the engine goes on without them, whatever it is."""
        self._counts[what] += num_pages
        if error is not None and what not in self._logged:
            self._logged.add(what)
            log.warning("offload: blocks were %s (%s: %s); further ones are only counted", what, type(error).__name__, error)
