"""Costs of offloading: time to copy pages over the host link, and time to recompute tokens. Also counts of lost pages."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.core.engine.data.page_mover import STATES, LinkRates, PageName
from headway.core.engine.data.stats import EngineStats

log = logging.getLogger("headway")

_RATE = 0.2  # Weight of the newest time in a running mean
_OUTLIER = 3.0  # Maximum of a step's time, as a multiple of the mean: a longer step was delayed by something else
_FEWEST = 32  # Minimum number of prompt tokens in a step whose time measures the cost per token
_LATENCY = 200e-6  # Seconds of delay in addition to the copy: the host sees the end of a copy only between steps


@dataclass(slots=True)
class OffloadCosts:
    """Estimates the time to copy pages from link rates, and the time to recompute tokens from measured times of prompt steps."""

    rates: LinkRates
    page_bytes: int
    step_tokens: int
    """Maximum number of tokens per step. A longer prompt takes several steps."""
    state_bytes: int = 0
    _seconds: dict[int, float] = field(default_factory=dict)  # log2 of a step's prompt tokens, rounded -> seconds per token

    def note_step(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Record the time of a step with `num_prompt_tokens` prompt tokens and `num_decodes` decodes."""
        if num_prompt_tokens < max(_FEWEST, 4 * num_decodes):
            return
        octave, each = _octave(num_prompt_tokens), seconds / num_prompt_tokens
        mean = self._seconds.get(octave)
        if mean is None:
            self._seconds[octave] = each
        else:
            self._seconds[octave] = mean + _RATE * (min(each, _OUTLIER * mean) - mean)

    def recompute(self, num_tokens: int) -> float | None:
        """Return the time to compute this number of prompt tokens, in seconds, or None if no prompt step was measured."""
        if not self._seconds or num_tokens <= 0:
            return None if not self._seconds else 0.0
        wanted = _octave(min(num_tokens, self.step_tokens))
        nearest = min(self._seconds, key=lambda octave: abs(octave - wanted))
        return self._seconds[nearest] * num_tokens

    def bytes_of(self, names: Sequence[PageName]) -> int:
        """Return the total size of pages and states in bytes."""
        num_states = sum(group == STATES for group, _ in names)
        return num_states * self.state_bytes + (len(names) - num_states) * self.page_bytes

    def copy_out(self, names: Sequence[PageName]) -> float:
        """Return the time to copy pages and states to the host, in seconds."""
        return self.bytes_of(names) / self.rates.out

    def copy_back(self, names: Sequence[PageName]) -> float:
        """Return the time, in seconds, until pages and states that are copied back to the device can be used."""
        return _LATENCY + self.bytes_of(names) / self.rates.back


def _octave(count: int) -> int:
    return round(math.log2(count))


class PrefillTimer:
    """Timer of steps for `OffloadCosts`, on the host. A step's time begins at its launch or at the end of the previous step,
    whichever is later."""

    def __init__(self, costs: OffloadCosts, stats: EngineStats, now: Callable[[], float] = time.perf_counter) -> None:
        """stats: counters in which every launched step is counted. now: clock, in seconds."""
        self._costs = costs
        self._stats = stats
        self._now = now
        self._counted = 0, 0  # Prompt tokens and decodes launched before the newest step
        self._launched: deque[tuple[float, int, int]] = deque()  # Steps in flight: launch time, prompt tokens and decodes
        self._last = 0.0  # End time of the last step

    def launched(self, began: float) -> None:
        """Record a step that has been launched and counted. began: time at which its launch began, in seconds."""
        before = self._counted
        self._counted = (self._stats.num_prefill_tokens, self._stats.num_decode_tokens)
        self._launched.append((began, self._counted[0] - before[0], self._counted[1] - before[1]))

    def forget(self) -> None:
        """Forget the steps in flight, because they failed."""
        self._launched.clear()

    def read(self) -> None:
        """Record that the oldest step in flight has ended."""
        began, num_prompt_tokens, num_decodes = self._launched.popleft()
        now = self._now()
        self._costs.note_step(num_prompt_tokens, num_decodes, now - max(began, self._last))
        self._last = now


class OffloadFailures:
    """Counts pages in `EngineStats.offload_failures` by kind of failure, and logs the first error of each kind."""

    def __init__(self, stats: EngineStats) -> None:
        self._counts = stats.offload_failures
        self._logged: set[str] = set()

    def count(self, what: str, num_pages: int, error: Exception | None = None) -> None:
        """Count failed pages, without which the engine continues. what: kind of failure. error: cause of the failure, or None."""
        self._counts[what] += num_pages
        if error is not None and what not in self._logged:
            self._logged.add(what)
            log.warning("offload: blocks were %s (%s: %s); further failures are only counted", what, type(error).__name__, error)
