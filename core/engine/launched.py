"""A step that the device has been given, until its tokens have come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from headway.core.engine.results import Coming
from headway.core.engine.step import Found, Sampled
from headway.core.sampling.logprobs import Scores, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of some of a prompt's tokens."""

    index: int
    """Of the sequence in the step."""
    first: int
    """Position of the first of these tokens."""
    k: int
    """How many of the most likely tokens each has."""
    scores: Scores


@dataclass(frozen=True, slots=True)
class Extras:
    """What a step brings beyond tokens, its tensors in host memory; valid once the step is done."""

    errors: Mapping[int, str]
    """Row of logits -> why its sequence cannot go on."""
    scores: Scores | None
    scored: Sequence[tuple[int, int]]
    """For each place of `scores` its row of logits, and how many of the most likely tokens it wants."""
    prompts: Sequence[PromptScores]
    owners: NDArray[numpy.int64]
    """[rows of logits]: which of the step's sampling sequences each belongs to."""

    def found(self) -> Found:
        """As plain data, by sequence."""
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for place, (row, k) in enumerate(self.scored):
            assert self.scores is not None
            logprobs.setdefault(int(self.owners[row]), []).append(self.scores.at(place, k))
        prompts = {
            each.index: (each.first, [each.scores.at(place, each.k) for place in range(len(each.scores.ranks))])
            for each in self.prompts
        }
        return Found({int(self.owners[row]): why for row, why in self.errors.items()}, logprobs, prompts)


@dataclass(slots=True)
class Launched:
    """See `InFlight`."""

    coming: Coming
    """The tokens, int64 [rows] in the order of `order`, or [rows, drafts + 2] as in `Verified`."""
    order: NDArray[numpy.int64] | None
    """Which of the step's sampling sequences each row is; None: they are in order."""
    backends: tuple[str, ...] = ()
    graph: bool = False
    piecewise: bool = False
    no_graph: str = ""
    compiled: tuple[str, ...] = ()
    first_nan: str | None = None
    after_model: tuple[str, ...] = ()
    waited_for: tuple[str, ...] = ()
    wait_seconds: float = 0.0
    extras: Extras | None = None
    _sampled: Sampled | None = field(default=None, init=False)

    def wait(self) -> Sampled:
        """The sampled tokens; waits for the device."""
        if self._sampled is None:
            self._sampled = self._read()
        return self._sampled

    def _read(self) -> Sampled:
        tokens = self.coming.wait()
        if tokens.ndim == 2:
            tokens, counts = tokens[:, :-1], tokens[:, -1]
        else:
            tokens, counts = tokens[:, None], numpy.ones(len(tokens), dtype=numpy.int64)
        if self.order is not None:  # a graph's rows, and those have no drafts
            ordered = numpy.empty_like(tokens)
            ordered[self.order] = tokens
            tokens = ordered
        return Sampled(tokens, counts, None if self.extras is None else self.extras.found())
