"""The choice of each step, by measured times: the fastest backend, unless the one in use is equally fast within the noise."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from headway.core.contract.metadata import Phase
from headway.core.select.costs import Shape, StepCosts

log = logging.getLogger("headway")

_Choice = tuple[str, dict[str, float], float]
"""(fastest, microseconds of each, microseconds up to which a backend still counts as equally fast)."""


class StepChooser:
    """Names a step's backend with a dict get: lengths are rounded to an eighth of an octave, each answer is computed once."""

    def __init__(self, costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> None:
        """names: the backends between which a phase may switch; `choose` is not asked about other phases."""
        self.costs = costs
        self.names = names
        self._choices: dict[tuple[Phase, int, int, int], _Choice | None] = {}
        self._candidates: dict[int, list[str]] = {}
        self._current: dict[Phase, str] = {}
        self._said: set[Phase] = set()

    def choose(self, phase: Phase, batch: int, query_len: int, kv_len: int) -> str | None:
        """The backend for a part of a step, None where nothing was measured; it becomes the phase's current one.

        query_len, kv_len: of each of the part's sequences; where they differ see `Shape.of`.
        """
        key = (phase, batch, _rounded(query_len), _rounded(kv_len))
        try:
            choice = self._choices[key]
        except KeyError:
            choice = self._choices[key] = self._work_out(Shape(*key))
        if choice is None:
            return None
        fastest, times, limit = choice
        current = self._current.get(phase)
        if current == fastest:
            return fastest
        if current is not None and times.get(current, math.inf) <= limit:
            return current
        self._current[phase] = fastest
        log.debug(
            "attention: %s of %d sequences, query_len %d, kv_len %d: %s (before: %s)", phase.value, *key[1:], fastest, current
        )
        return fastest

    def forget(self) -> None:
        """Forget which backend of each phase is in use: after steps of warm-up."""
        self._current.clear()

    def decode_candidates(self, batch: int) -> list[str]:
        """Backends worth a captured graph of this batch size, at most two.

        The first is best over all measured lengths; a second one wins somewhere by more than the noise.
        """
        if batch not in self._candidates:
            self._candidates[batch] = self._find_candidates(batch)
        return self._candidates[batch]

    def _work_out(self, shape: Shape) -> _Choice | None:
        names = self.names[shape.phase]
        if shape.phase is Phase.DECODE and shape.query_len == 1:  # no third one is captured; drafts are verified outside graphs
            names = self.decode_candidates(shape.batch)
        if not self.costs.covers(shape) and shape.phase not in self._said:
            self._said.add(shape.phase)
            log.info("crossover table: %s lies beyond what was measured; the nearest measured edge decides", shape)
        ranked = self.costs.ranking(shape, names)
        if not ranked:
            return None
        fastest, least = ranked[0]
        return fastest, dict(ranked), least * (1 + self.costs.noise)

    def _find_candidates(self, batch: int) -> list[str]:
        names = list(self.names[Phase.DECODE])
        lengths = sorted({shape.kv_len for shape in self.costs.shapes(Phase.DECODE)})
        between = [round(math.sqrt(low * high)) for low, high in pairwise(lengths)]
        shapes = [Shape(Phase.DECODE, batch, 1, kv_len) for kv_len in sorted({*lengths, *between})]
        times = {name: [self.costs.step_us(name, shape) for shape in shapes] for name in names}
        if not times or not shapes:
            return names[:1]

        def overall(name: str) -> tuple[int, float]:
            known = [math.log(us) for us in times[name] if math.isfinite(us)]
            return len(shapes) - len(known), sum(known)

        first = min(names, key=overall)

        def gain(name: str) -> float:
            """The largest factor by which a backend is faster than the first at some length."""
            pairs = zip(times[first], times[name], strict=True)
            return max(
                (math.inf if not math.isfinite(ours) else ours / theirs for ours, theirs in pairs if math.isfinite(theirs)),
                default=0.0,
            )

        second = max((name for name in names if name != first), key=gain, default=None)
        return [first] if second is None or gain(second) <= 1 + self.costs.noise else [first, second]


def _rounded(length: int) -> int:
    """The middle of the eighth of an octave that holds a length: short ones as they are."""
    shift = max(length.bit_length() - 4, 0)
    return ((length >> shift) << shift) + (1 << shift >> 1)
