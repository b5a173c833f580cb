"""Block tables in the memory from which a graph's inputs are sent: a step differs from the one before in few of them."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from headway.core.engine.rows import Rows


class SentTables:
    """What a host buffer holds of block tables already, so that only those that have changed since are written again."""

    def __init__(self, tables: NDArray[numpy.int32]) -> None:
        """tables: [groups, batch, width], of the buffer; whatever they hold is void."""
        tables.fill(0)
        self._tables = tables
        self._at: NDArray[numpy.int64] = numpy.full(tables.shape[1], -1, dtype=numpy.int64)
        """[batch]: whose block table each row holds; -1: nobody's yet."""
        self._num_updates = 0
        """What `Rows.num_updates` was when they were filled last."""

    def fill(self, places: NDArray[numpy.int64], rows: Rows) -> int:
        """Make row i the block table of `places[i]`, in each group; returns how many had to be written.

        places: [batch]. rows: the same in every call.
        """
        if rows.last_change <= self._num_updates and (self._at == places).all():
            return 0
        stale = numpy.flatnonzero((self._at != places) | (rows.updated[places] > self._num_updates))
        if len(stale):
            for table, known in zip(self._tables, rows.tables, strict=True):
                table[stale, : known.shape[1]] = known[places[stale]]
        self._at[:], self._num_updates = places, rows.num_updates
        return len(stale)
