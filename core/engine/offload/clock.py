"""Times the steps of prompts, for what computing a token again costs."""

from __future__ import annotations

import time
from collections import deque

from headway.core.engine.offload.costs import Costs


class StepClock:
    """Takes a step's time from the later of its launch and the end of the step before, to its own end, as the host sees them."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._launched: deque[tuple[float, int, int]] = deque()
        self._last = 0.0

    def launched(self, began: float, num_prompt_tokens: int, num_decodes: int) -> None:
        """A step was launched from `began` (time.perf_counter) on."""
        self._launched.append((began, num_prompt_tokens, num_decodes))

    def read(self) -> None:
        """The oldest step has ended."""
        began, num_prompt_tokens, num_decodes = self._launched.popleft()
        now = time.perf_counter()
        self._costs.note_step(num_prompt_tokens, num_decodes, now - max(began, self._last))
        self._last = now
