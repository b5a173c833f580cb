"""What a step consists of: sequences, how many tokens of each, and the batch of those that decode together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from headway.core.contract.metadata import Phase
from headway.core.engine.data.sequence import Sequence, StepCount

_Counts = NDArray[numpy.int64]


class DecodeBatch:
    """The sequences that decode one token in every step, as arrays that advance for all members at once, instead of sequence by
    sequence (after vLLM's persistent batch).

    A member has one token to compute, the one that the executor has sampled last, and no drafts. `Sequence.num_computed` and what
    depends on it count the batch's steps, so a member can be read like any other sequence; before more of it than its pages is
    changed, it must be taken out.
    """

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        """Members in the order of the arrays. The list is never changed in place: a step that was launched goes on holding it."""
        self.rows: NDArray[numpy.int32] = numpy.zeros(0, dtype=numpy.int32)
        """[members]: row of each. The array is never changed in place either."""
        self._steps = StepCount()
        self._offsets: _Counts = numpy.zeros(0, dtype=numpy.int64)
        """[members]: computed tokens minus the steps that the batch has counted."""
        self._due: _Counts = self._offsets
        """[members]: steps after which the member's pages are full, or its last token is on its way."""
        self._boundaries: _Counts = self._offsets
        """[members]: steps after which a page of the member may be named or given back."""
        self.state_indices: NDArray[numpy.int32] = numpy.zeros(0, dtype=numpy.int32)
        """[members]: `Sequence.state_index` of each, which stays while a sequence decodes without drafts."""
        self.adapter_slots: NDArray[numpy.int32] = numpy.zeros(0, dtype=numpy.int32)
        """[members]: `Sequence.adapter_slot` of each, which stays while a sequence runs."""
        self._changed: list[Sequence] = []

    def __len__(self) -> int:
        """Number of members."""
        return len(self.members)

    def context_lens(self) -> NDArray[numpy.int32]:
        """int32 [members]: cached tokens of each before the next step."""
        return (self._offsets + self._steps.taken).astype(numpy.int32)

    def due(self) -> list[int]:
        """Indexes of the members that cannot take the next step as they are; see `Sequence.lasts_until`."""
        places: list[int] = numpy.flatnonzero(self._due <= self._steps.taken).tolist()
        return places

    def renew(self, place: int) -> None:
        """Note that the member at this index has got pages."""
        seq = self.members[place]
        self._due[place] = seq.lasts_until - self._offsets[place]
        self._changed.append(seq)

    def step(self) -> list[int]:
        """Count a step that has been launched. Returns the indexes of the members whose pages may have been filled."""
        self._steps.taken += 1
        places: list[int] = numpy.flatnonzero(self._boundaries <= self._steps.taken).tolist()
        return places

    def passed(self, place: int) -> None:
        """Note that the filled pages of the member at this index have been named."""
        seq = self.members[place]
        self._boundaries[place] = seq.next_boundary - self._offsets[place]
        if seq.table_changes:
            self._changed.append(seq)

    def take_changed(self) -> list[Sequence]:
        """The members whose tables have changed since the last call; some may have no change that the executor does not know."""
        changed = self._changed
        self._changed = []
        return changed

    def add(self, seqs: Items[Sequence]) -> None:
        """Take in sequences that decode one token next; see the class."""
        if not seqs:
            return
        taken = self._steps.taken
        for seq in seqs:
            seq.join(self._steps)
        self._changed += [seq for seq in seqs if seq.table_changes]
        offsets = numpy.array([seq.num_computed - taken for seq in seqs], dtype=numpy.int64)
        due = numpy.array([seq.lasts_until for seq in seqs], dtype=numpy.int64) - offsets
        boundaries = numpy.array([seq.next_boundary for seq in seqs], dtype=numpy.int64) - offsets
        self.members = [*self.members, *seqs]
        self.rows = numpy.concatenate([self.rows, numpy.array([seq.row for seq in seqs], dtype=numpy.int32)])
        self._offsets = numpy.concatenate([self._offsets, offsets])
        self._due = numpy.concatenate([self._due, due])
        self._boundaries = numpy.concatenate([self._boundaries, boundaries])
        indices = numpy.array([seq.state_index for seq in seqs], dtype=numpy.int32)
        self.state_indices = numpy.concatenate([self.state_indices, indices])
        slots = numpy.array([seq.adapter_slot for seq in seqs], dtype=numpy.int32)
        self.adapter_slots = numpy.concatenate([self.adapter_slots, slots])

    def remove(self, leaving: Iterable[Sequence]) -> None:
        """Take members out; others are left alone."""
        gone = {seq for seq in leaving if seq.in_decode_batch}
        if not gone:
            return
        kept = numpy.array([seq not in gone for seq in self.members], dtype=numpy.bool_)
        self.members = [seq for seq in self.members if seq not in gone]
        self.rows = self.rows[kept]
        self._offsets = self._offsets[kept]
        self._due = self._due[kept]
        self._boundaries = self._boundaries[kept]
        self.state_indices = self.state_indices[kept]
        self.adapter_slots = self.adapter_slots[kept]
        self._changed = [seq for seq in self._changed if seq not in gone]
        for seq in gone:
            seq.leave()

    def clear(self) -> None:
        """Take all members out."""
        self.remove(self.members)


class ScheduledSequence(NamedTuple):
    """A sequence's part of a step, as the sequence was when scheduled: it moves on before the step has run."""

    seq: Sequence
    num_new_tokens: int
    """Tokens that the step computes of it, drafts included."""
    context_len: int
    """Tokens of it that the cache holds before the step."""
    samples: bool
    """Whether the logits of the last new token are wanted: not in the middle of a prompt."""
    num_draft_tokens: int = 0
    """How many of the new tokens, the last ones, are guesses to be verified."""

    @property
    def phase(self) -> Phase:
        """The phase of these tokens."""
        return Phase.DECODE if self.num_draft_tokens else Phase.of(self.num_new_tokens, self.context_len)


class ScheduledStep:
    """A step: sequences that are scheduled individually, and after them the members of the decode batch."""

    def __init__(self, individual: list[ScheduledSequence], batch: DecodeBatch | None) -> None:
        """individual: those that prefill or extend come first. batch: its members take the step; it moves on before that runs."""
        self.individual = individual
        self.members: list[Sequence] = [] if batch is None else batch.members
        self.rows: NDArray[numpy.int32] = _NO_MEMBERS if batch is None else batch.rows
        """int32 [members]: row of each."""
        self.context_lens: NDArray[numpy.int32] = _NO_MEMBERS if batch is None else batch.context_lens()
        """int32 [members]: tokens that the cache holds before the step."""
        self.state_indices: NDArray[numpy.int32] = _NO_MEMBERS if batch is None else batch.state_indices
        """int32 [members]: which slot of its row holds each member's state."""
        self.adapter_slots: NDArray[numpy.int32] = _NO_MEMBERS if batch is None else batch.adapter_slots
        """int32 [members]: the slot of each member's adapter."""
        self.changed: list[Sequence] = [] if batch is None else batch.take_changed()
        """Members whose tables have changed since the step before."""

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.individual) + len(self.members)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Every sequence, in the step's order."""
        yield from self.individual
        for seq, context_len in zip(self.members, self.context_lens.tolist(), strict=True):
            yield ScheduledSequence(seq, 1, context_len, True)

    @property
    def seqs(self) -> list[Sequence]:
        """Every sequence, in the step's order."""
        return [*(each.seq for each in self.individual), *self.members] if self.individual else self.members

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences whose next token the step samples."""
        return [*(each.seq for each in self.individual if each.samples), *self.members] if self.individual else self.members


_NO_MEMBERS: NDArray[numpy.int32] = numpy.zeros(0, dtype=numpy.int32)
