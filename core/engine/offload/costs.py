"""What it costs to copy pages over the host link, and to compute their tokens again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_RATE = 0.2
"""Weight of the newest time in a running mean."""
_OUTLIER = 3.0
"""A step that took longer than this times the mean counts as this many: something else took the time."""
_FEWEST = 32
"""Tokens of a prompt's part from which on its step tells what a token costs."""
_LATENCY = 200e-6
"""Seconds by which a transfer delays a request beyond the copy: the host sees its end only between steps."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second between the pool and the host's memory, as copies of pages reach them."""

    out: float
    back: float


@dataclass(slots=True)
class Costs:
    """Seconds of copies, by the link's rates, and of steps, by the times that steps of prompts have taken."""

    rates: LinkRates
    page_bytes: int
    step_tokens: int
    """Most tokens of one step: a longer prompt takes several."""
    _seconds: dict[int, float] = field(default_factory=dict)
    """Octave of a step's prompt tokens -> seconds per token."""

    def note_step(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step with so many tokens of prompts, and sequences that decoded beside them, took so long."""
        if num_prompt_tokens < max(_FEWEST, 4 * num_decodes):
            return
        octave, each = _octave(num_prompt_tokens), seconds / num_prompt_tokens
        mean = self._seconds.get(octave)
        if mean is None:
            self._seconds[octave] = each
        else:
            self._seconds[octave] = mean + _RATE * (min(each, _OUTLIER * mean) - mean)

    def recompute(self, num_tokens: int) -> float | None:
        """Seconds of computing so many tokens of a prompt; None: no step of a prompt has been measured."""
        if not self._seconds or num_tokens <= 0:
            return None if not self._seconds else 0.0
        wanted = _octave(min(num_tokens, self.step_tokens))
        nearest = min(self._seconds, key=lambda octave: abs(octave - wanted))
        return self._seconds[nearest] * num_tokens

    def copy_out(self, num_pages: int) -> float:
        """Seconds of copying pages to the host."""
        return num_pages * self.page_bytes / self.rates.out

    def copy_back(self, num_pages: int) -> float:
        """Seconds until pages that are copied back can be used."""
        return _LATENCY + num_pages * self.page_bytes / self.rates.back


def _octave(count: int) -> int:
    return round(math.log2(count))
