"""The sequences that decode one token in every step, as arrays that go from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy
from numpy.typing import NDArray

from headway.core.engine.sequence import Sequence, StepCount

_Counts = NDArray[numpy.int64]


class DecodeBatch:
    """What a plain decode needs of a sequence is the same in every step, so it is kept here and counted on for all members at
    once, instead of being asked of each (after vLLM's persistent batch).

    A member has one token to compute, the one that the executor has sampled last, and no drafts. `Sequence.num_computed` and what
    depends on it count the batch's steps, so a member can be looked at like any other sequence; whoever changes more of it than
    its pages takes it out first.
    """

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        """In the order of the arrays. Never changed in place: a step that was launched goes on holding it."""
        self.rows: NDArray[numpy.int32] = numpy.zeros(0, dtype=numpy.int32)
        """[members]: row of each. Never changed in place either."""
        self._steps = StepCount()
        self._offsets: _Counts = numpy.zeros(0, dtype=numpy.int64)
        """[members]: computed tokens less the steps counted."""
        self._due: _Counts = self._offsets
        """[members]: steps after which the member's pages are full, or its last token is on its way."""
        self._boundaries: _Counts = self._offsets
        """[members]: steps after which a page of the member may be named or given back."""
        self._changed: list[Sequence] = []

    def __len__(self) -> int:
        """Members."""
        return len(self.members)

    def context_lens(self) -> NDArray[numpy.int32]:
        """int32 [members]: cached tokens of each before the next step."""
        return (self._offsets + self._steps.taken).astype(numpy.int32)

    def due(self) -> list[int]:
        """Places of the members that cannot take the next step as they are: see `Sequence.lasts_until`."""
        places: list[int] = numpy.flatnonzero(self._due <= self._steps.taken).tolist()
        return places

    def renew(self, place: int) -> None:
        """The member in a place has got pages."""
        seq = self.members[place]
        self._due[place] = seq.lasts_until - self._offsets[place]
        self._changed.append(seq)

    def step(self) -> list[int]:
        """Count a step that has been launched. Returns the places of the members whose pages may have been filled."""
        self._steps.taken += 1
        places: list[int] = numpy.flatnonzero(self._boundaries <= self._steps.taken).tolist()
        return places

    def passed(self, place: int) -> None:
        """The member in a place has had its filled pages named."""
        seq = self.members[place]
        self._boundaries[place] = seq.next_boundary - self._offsets[place]
        if seq.table_changes:
            self._changed.append(seq)

    def take_changed(self) -> list[Sequence]:
        """The members whose tables have changed since the last call, and others that the executor knows already."""
        changed, self._changed = self._changed, []
        return changed

    def add(self, seqs: Items[Sequence]) -> None:
        """Take sequences in that decode one token next, see the class."""
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

    def remove(self, leaving: Iterable[Sequence]) -> None:
        """Take members out; others are left alone."""
        gone = {seq for seq in leaving if seq.together}
        if not gone:
            return
        kept = numpy.array([seq not in gone for seq in self.members], dtype=numpy.bool_)
        self.members = [seq for seq in self.members if seq not in gone]
        self.rows, self._offsets = self.rows[kept], self._offsets[kept]
        self._due, self._boundaries = self._due[kept], self._boundaries[kept]
        self._changed = [seq for seq in self._changed if seq not in gone]
        for seq in gone:
            seq.leave()

    def clear(self) -> None:
        """Take all members out."""
        self.remove(self.members)
