"""The vocabulary of the logits that a model computes: all of it in one process, or a part on each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headway.core.sampling.logprobs import Scores, score
from headway.core.sampling.row_needs import FILTERING, SHAPING
from headway.core.sampling.sampler import Draws, SamplingOps, sample


class ChangingRows(NamedTuple):
    """Rows of logits that change before their tokens are chosen, in host memory."""

    at: NDArray[numpy.int64]
    """[changing]: which of the step's rows each is."""
    needs: NDArray[numpy.int32]
    """[changing]: its `Need`s."""
    filters: NDArray[numpy.float32]
    """[4, any]: columns that are a `TokenFilter` each."""
    columns: NDArray[numpy.int64]
    """[changing]: which of them is its own."""

    @property
    def scales(self) -> NDArray[numpy.float32]:
        """1 / temperature, of rows that filter: float32 [changing]."""
        scales: NDArray[numpy.float32] = self.filters[0, self.columns]
        return scales

    @property
    def top_k(self) -> NDArray[numpy.float32]:
        """How many of the most likely tokens are all that a row's token depends on, float32 [changing]; 0: it depends on all."""
        top_k: NDArray[numpy.float32] = self.filters[1, self.columns] * (self.needs & SHAPING & ~FILTERING == 0)
        return top_k

    def only(self, some: NDArray[numpy.bool_]) -> ChangingRows:
        """Return some of them."""
        return ChangingRows(self.at[some], self.needs[some], self.filters, self.columns[some])


@dataclass
class Gathers:
    """Counts of what ranks have put together so that tokens could be chosen."""

    rows: int = 0
    """Rows whose logits were gathered whole."""
    candidates: int = 0
    """Rows of which each rank has sent its most likely tokens alone."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Rows that were gathered whole, by what asked for it; a row with several reasons counts under each."""


class Vocabulary(Protocol):
    """What chooses tokens from the logits that a model computes, [rows, width]."""

    @property
    def sampling(self) -> SamplingOps:
        """Operations on such logits, which may be captured."""

    def sample(self, logits: Tensor, draws: Draws, best: Tensor | None = None) -> Tensor:
        """Choose a token for each row: see `sampler.sample`."""

    def changing(self, logits: Tensor, rows: ChangingRows) -> Tensor:
        """Return logits of the whole vocabulary: of the rows that change, or of all of them.

        What a row's token does not depend on may be -inf.
        """

    def sample_changed(self, logits: Tensor, draws: Draws) -> Tensor:
        """Choose a token for each row of logits of the whole vocabulary."""

    def score(self, logits: Tensor, tokens: Tensor, k: int, reason: str) -> Scores:
        """Score tokens: see `logprobs.score`. reason: what asks for it."""

    def whole(self, logits: Tensor, reason: str) -> Tensor:
        """Return the logits of all rows over the whole vocabulary. reason: what asks for it."""

    def filtered_in_graph(self, filters: NDArray[numpy.float32], num_rows: int) -> None:
        """Take note that a graph of num_rows rows filters. filters: float32 [4, rows], see `Draws`."""

    def take_gathers(self) -> Gathers | None:
        """Return what ranks have put together since the last call; None where there is one rank."""


class WholeVocabulary:
    """The vocabulary of one rank: logits are those of all tokens."""

    def __init__(self, sampling: SamplingOps) -> None:
        self.sampling = sampling
        self.sample: Callable[..., Tensor] = partial(sample, ops=sampling)
        """See `Vocabulary`: nothing stands between a step and its choice."""
        self.sample_changed = self.sample

    def changing(self, logits: Tensor, rows: ChangingRows) -> Tensor:
        """See `Vocabulary`; all rows, as they are."""
        return logits

    def score(self, logits: Tensor, tokens: Tensor, k: int, reason: str) -> Scores:
        """See `Vocabulary`."""
        return score(logits, tokens, k)

    def whole(self, logits: Tensor, reason: str) -> Tensor:
        """See `Vocabulary`."""
        return logits

    def filtered_in_graph(self, filters: NDArray[numpy.float32], num_rows: int) -> None:
        """See `Vocabulary`."""

    def take_gathers(self) -> Gathers | None:
        """See `Vocabulary`."""
        return None
