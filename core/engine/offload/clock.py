"""Times the steps of prompts, for what computing a token again costs."""

from __future__ import annotations

import time
from collections import deque

from headway.core.engine.offload.costs import Costs
from headway.core.engine.stats import EngineStats


class StepClock:
    """Takes a step's time from the later of its launch and the end of the step before, to its own end, as the host sees them."""

    def __init__(self, costs: Costs, stats: EngineStats) -> None:
        """stats: in which every launched step has been counted."""
        self._costs, self._stats = costs, stats
        self._counted = 0, 0
        """Tokens of prompts and decodes, before the newest step."""
        self._launched: deque[tuple[float, int, int]] = deque()
        self._last = 0.0

    def launched(self, began: float) -> None:
        """A step was launched from `began` (time.perf_counter) on, and counted."""
        before, self._counted = self._counted, (self._stats.num_prefill_tokens, self._stats.num_decode_tokens)
        self._launched.append((began, self._counted[0] - before[0], self._counted[1] - before[1]))

    def forget(self) -> None:
        """Steps in flight have failed."""
        self._launched.clear()

    def read(self) -> None:
        """The oldest step has ended."""
        began, num_prompt_tokens, num_decodes = self._launched.popleft()
        now = time.perf_counter()
        self._costs.note_step(num_prompt_tokens, num_decodes, now - max(began, self._last))
        self._last = now
