"""Clock that divides the duration of a long task among its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class PartClock:
    """Clock that measures seconds per part. Time in a nested part counts only for the nested part."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._ended: float | None = None
        self._open: list[float] = []  # For each open part, the seconds of its nested parts
        self.seconds: dict[str, float] = {}
        """Part -> seconds, in the order in which parts first ended."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block as a part. A repeated name adds to its seconds."""
        began = self._clock()
        self._open.append(0.0)
        try:
            yield
        finally:
            whole, inside = self._clock() - began, self._open.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - inside
            if self._open:
                self._open[-1] += whole

    def within(
        self, name: str, make: Callable[[], AbstractContextManager[object]] | None
    ) -> Callable[[], AbstractContextManager[object]] | None:
        """Return a function that makes the same contexts as `make` and times each of them as a part. None if `make` is None."""
        if make is None:
            return None

        @contextmanager
        def timed() -> Iterator[object]:
            with self.part(name), make() as found:
                yield found

        return timed

    def end(self) -> None:
        """Stop the clock, so that `whole` no longer grows."""
        self._ended = self._clock()

    @property
    def whole(self) -> float:
        """Seconds from the start to `end`, or to now."""
        return (self._clock() if self._ended is None else self._ended) - self._began

    def __str__(self) -> str:
        """Return the total and its parts, longest first. Parts below 0.1 s are merged into the rest."""
        named = {name: seconds for name, seconds in self.seconds.items() if seconds >= 0.1}
        parts = [f"{name} {seconds:.1f}" for name, seconds in sorted(named.items(), key=lambda part: -part[1])]
        rest = self.whole - sum(named.values())
        return f"{self.whole:.1f} s: {', '.join([*parts, f'the rest {max(rest, 0.0):.1f}'])}"
