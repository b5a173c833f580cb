"""What a step consists of: sequences, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from headway.core.contract.metadata import Phase
from headway.core.engine.decode_batch import DecodeBatch
from headway.core.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """What a sequence gets of a step, as the sequence was when scheduled: it moves on before the step has run."""

    seq: Sequence
    num_new_tokens: int
    """Drafts included."""
    context_len: int
    """Tokens of it that the cache holds before the step."""
    samples: bool
    """Whether the last token's logits are wanted: not in the middle of a prompt."""
    num_draft_tokens: int = 0
    """How many of the new tokens, the last ones, are guesses to be verified."""

    @property
    def phase(self) -> Phase:
        """The phase of these tokens."""
        return Phase.DECODE if self.num_draft_tokens else Phase.of(self.num_new_tokens, self.context_len)


class Schedule:
    """A step: sequences that are looked at one by one, and after them those that decode together."""

    def __init__(self, apart: list[ScheduledSequence], batch: DecodeBatch | None) -> None:
        """apart: those that prefill or extend come first. batch: whose members take the step; it moves on before it has run."""
        self.apart = apart
        self.members: list[Sequence] = [] if batch is None else batch.members
        self.rows: NDArray[numpy.int32] = _NOBODY if batch is None else batch.rows
        """int32 [members]."""
        self.context_lens: NDArray[numpy.int32] = _NOBODY if batch is None else batch.context_lens()
        """int32 [members]: tokens that the cache holds before the step."""
        self.changed: list[Sequence] = [] if batch is None else batch.take_changed()
        """Members whose tables have changed since the step before."""

    def __len__(self) -> int:
        """Sequences."""
        return len(self.apart) + len(self.members)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Every sequence, in the step's order."""
        yield from self.apart
        for seq, context_len in zip(self.members, self.context_lens.tolist(), strict=True):
            yield ScheduledSequence(seq, 1, context_len, True)

    @property
    def seqs(self) -> list[Sequence]:
        """In the step's order."""
        return [*(each.seq for each in self.apart), *self.members] if self.apart else self.members

    @property
    def sampling(self) -> list[Sequence]:
        """Those whose next token it samples."""
        return [*(each.seq for each in self.apart if each.samples), *self.members] if self.apart else self.members


_NOBODY: NDArray[numpy.int32] = numpy.zeros(0, dtype=numpy.int32)
