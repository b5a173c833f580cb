"""Where the seconds of something long go, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class PartClock:
    """Seconds by part. What runs inside another part counts as its own, and not as the other's, too."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._ended: float | None = None
        self._open: list[float] = []  # For each part that has begun and not ended, the seconds of the parts inside
        self.seconds: dict[str, float] = {}
        """Part -> seconds, in the order in which parts ended first."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what runs inside as a part. A name that comes again adds to it."""
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
        """A function that makes the same contexts as `make`, whose insides count as a part; None for None."""
        if make is None:
            return None

        @contextmanager
        def timed() -> Iterator[object]:
            with self.part(name), make() as found:
                yield found

        return timed

    def end(self) -> None:
        """Take the whole's time."""
        self._ended = self._clock()

    @property
    def whole(self) -> float:
        """Seconds since the beginning, until `end`."""
        return (self._clock() if self._ended is None else self._ended) - self._began

    def __str__(self) -> str:
        """The whole and its parts, the longest first; what takes less than a tenth of a second is the rest's."""
        named = {name: seconds for name, seconds in self.seconds.items() if seconds >= 0.1}
        parts = [f"{name} {seconds:.1f}" for name, seconds in sorted(named.items(), key=lambda part: -part[1])]
        rest = self.whole - sum(named.values())
        return f"{self.whole:.1f} s: {', '.join([*parts, f'the rest {max(rest, 0.0):.1f}'])}"
