"""Times of steps with guesses and without: measured as steps run, and estimated from the crossover table before that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache

WIDTHS = (2, 4, 8)
"""Query tokens of a sequence whose guesses are verified, rounded up to what graphs are captured for."""
MAX_VERIFIED = 256
"""Query tokens of the largest verification that is captured."""
PLAIN = 1
"""Stands for steps for which no guesses were sought."""
UNGUESSED = 0
"""Stands for steps for which guesses were sought and none was found: the host waited in vain for the step before."""

_RATE, _FALL = 0.1, 0.3
"""Weight of the newest time in a running mean, and of one below the mean. The second is larger because other work on the machine
only makes steps longer, and because a width that seems too slow is seldom tried again."""
_OUTLIER = 1.5
"""Largest multiple of the mean that the time of one step counts as: what took longer was something else."""
_NEEDED = 4
"""Steps after which a mean is used; until then it is the least of them, for the first ones take longer than all that follow."""

AttentionTime = Callable[[int, int, int], float]
"""Microseconds of a step's attention, infinite if unknown: (sequences, query tokens of each, cached and new tokens of each)."""


def width_of(query_len: int) -> int:
    """The width of a step whose longest verification has this many query tokens."""
    return next((width for width in WIDTHS if width >= query_len), query_len)


def is_captured(num_seqs: int, query_len: int) -> bool:
    """Whether verification by so many sequences of so many query tokens is captured: by widths, at powers of two of sequences."""
    return width_of(query_len) << (num_seqs - 1).bit_length() <= MAX_VERIFIED


@cache
def size_class(num_seqs: int) -> int:
    """The class of steps that take about as long as those of this many sequences: two classes to an octave."""
    return round(2 * math.log2(num_seqs))


class StepTimes:
    """Seconds of a step by its number of sequences and its width."""

    def __init__(self, attention: AttentionTime | None = None) -> None:
        """attention: looked up in a crossover table; None: there is no table."""
        self._attention = attention
        self._means: dict[tuple[int, int], tuple[float, int]] = {}
        """Mean seconds, and the steps in that mean, by size class and width."""

    def note(self, num_seqs: int, width: int, seconds: float) -> None:
        """Note the seconds from the end of the step before to the end of a step of this width."""
        key = size_class(num_seqs), width
        mean, count = self._means.get(key, (seconds, 0))
        if count < _NEEDED:
            self._means[key] = min(mean, seconds), count + 1
            return
        seconds = min(seconds, _OUTLIER * mean)
        rate = _RATE if seconds > mean else _FALL
        self._means[key] = mean + rate * (seconds - mean), count + 1

    def of(self, num_seqs: int, widths: Iterable[int], kv_len: int = 1) -> dict[int, float]:
        """Seconds of a step by its width, PLAIN among them; empty where steps of its size without guesses have not been measured.

        PLAIN comes first. A width that has not been measured takes as long as a step without guesses, plus the additional time of
        attention by the crossover table; without a table it counts as equally long until it has been tried.
        """
        plain = self._measured(num_seqs, PLAIN)
        if plain is None:
            return {}
        return {PLAIN: plain} | {width: self._of_guesses(num_seqs, width, kv_len, plain) for width in widths}

    def _of_guesses(self, num_seqs: int, width: int, kv_len: int, plain: float) -> float:
        measured = self._measured(num_seqs, width)
        if measured is not None:
            return measured
        plain = max(plain, self._measured(num_seqs, UNGUESSED) or 0.0)
        if self._attention is None:
            return plain
        longer = self._attention(num_seqs, width, kv_len + width - 1) - self._attention(num_seqs, 1, kv_len)
        return plain + (1e-6 * max(longer, 0.0) if math.isfinite(longer) else 0.0)

    def is_measured(self, num_seqs: int, width: int) -> bool:
        """Whether the time of a width is more than an estimate."""
        return self._measured(num_seqs, width) is not None

    def forget(self, num_seqs: int) -> None:
        """Measure steps of this size with guesses anew: what made them slow may be over, and no other step would show it."""
        middle = size_class(num_seqs)
        for size, width in list(self._means):
            if abs(size - middle) <= 1 and width != PLAIN:
                del self._means[size, width]

    def _measured(self, num_seqs: int, width: int) -> float | None:
        """The mean seconds of steps of this size, or of a neighbouring class; None: not measured."""
        middle, means = size_class(num_seqs), self._means
        for size in (middle, middle - 1, middle + 1):
            found = means.get((size, width))
            if found is not None and found[1] >= _NEEDED:
                return found[0]
        return None
