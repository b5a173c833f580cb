"""A step that the device has been given, until its tokens have come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class Launched:
    """See `InFlight`."""

    tokens: Tensor
    """int64 [rows], or [rows, drafts + 1], in host memory and in the order of `order`; valid once `done`."""
    counts: Tensor | None
    """int64 [rows], likewise; None: every row has one token."""
    order: NDArray[numpy.int64] | None
    """Which of the step's sampling sequences each row is; None: they are in order."""
    done: torch.cuda.Event | None
    """None where the step ran at once."""
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

    def wait(self) -> Sampled:
        """The sampled tokens; waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        tokens = self.tokens.numpy()
        if tokens.ndim == 1:
            tokens = tokens[:, None]
        if self.order is not None:  # a graph's rows, and those have no drafts
            ordered = numpy.empty_like(tokens)
            ordered[self.order] = tokens
            tokens = ordered
        counts = numpy.ones(len(tokens), dtype=numpy.int64) if self.counts is None else self.counts.numpy()
        return Sampled(tokens, counts, None if self.extras is None else self.extras.found())
