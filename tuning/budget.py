"""The time that a measurement may take."""

from __future__ import annotations

import time

MOST_COMPILING = 2.0
"""Times the budget: compiling beyond this counts, so that no start takes longer than three times what was asked for."""


class Budget:
    """Seconds for measuring. Compiling kernels is not counted: it would leave points unmeasured that a second start measures."""

    def __init__(self, seconds: float | None = None) -> None:
        """seconds: None is as many as it takes."""
        self._seconds = seconds
        self._started = time.perf_counter()
        self.compiling = 0.0
        """Seconds that first calls took longer than later ones; whoever makes such a call adds to it."""

    def begin(self) -> None:
        """Count from now on; what went before, at most `MOST_COMPILING` times the budget, was compiling."""
        self.compiling += time.perf_counter() - self._started

    @property
    def spent(self) -> float:
        """Seconds that count."""
        free = self.compiling if self._seconds is None else min(self.compiling, MOST_COMPILING * self._seconds)
        return time.perf_counter() - self._started - free

    @property
    def left(self) -> float | None:
        """Seconds that are left; None without a limit."""
        return None if self._seconds is None else self._seconds - self.spent
