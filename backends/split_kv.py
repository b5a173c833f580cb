"""Query tiles of prefill and extend, and split-KV (flash-decoding, Dao et al. 2023): which keys several programs share.

An item is a query tile of one kv head. Programs are thread blocks that run concurrently. A program that ends an item takes the
next one. Times are in units of the time of one key tile.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray

Ints = NDArray[numpy.integer[Any]]
Floats = NDArray[numpy.floating[Any]]
PARTS = numpy.array((2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64))
"""Candidate numbers of parts into which the keys of the longest item are split."""
TAPERED = 6
"""Maximum number of parts of the longest item in a tapered split."""
MAX_PARTIALS = 4
"""Maximum number of partial results of a step, per program."""
_GAIN, _WORTH = 0.98, 4.0  # A split must take at most 98 % of the time, and is sought if it may save 4 key tiles
_TAPER = 1.05  # Tapered splits are tried if the best equal one takes at least this multiple of the work per program
_TRIED = 3  # Number of candidates whose time is estimated item by item
_MAX_ROUNDS = 32  # Number of items per program from which on an incomplete last round does not matter


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Query tiles of a step for one kv head, in order of decreasing sequence length. Within a sequence, the last tile, which has
    the most keys, comes first. Arrays have one element per query tile."""

    seq: Ints
    number: Ints
    """Position of the tile in its sequence."""
    first: Ints
    """First key tile."""
    end: Ints
    """End of the keys: index of the first key that no query of the tile sees."""

    @classmethod
    def of(
        cls, query_lens: Ints, kv_lens: Ints, group: int, rows: int, keys: int, window: int | None, causal: bool = True
    ) -> QueryTiles:
        """Return the query tiles of a step.

        query_lens, kv_lens: [num_seqs]. A kv_len of 0 marks padding. group: number of rows of a token. rows, keys: size of a
        tile. causal: as in AttentionSpec.
        """
        counts = -(-query_lens * group // rows) * (kv_lens > 0)
        order = numpy.argsort(-kv_lens, kind="stable")
        seq = numpy.repeat(order, counts[order])
        number = numpy.repeat(numpy.cumsum(counts[order]), counts[order]) - 1 - numpy.arange(len(seq))
        context, end = (kv_lens - query_lens)[seq], kv_lens[seq]
        ahead = 1 if causal else window  # keys after the tile's newest query
        if ahead is not None:
            end = numpy.minimum(context + ((number + 1) * rows - 1) // group + ahead, end)
        first = numpy.zeros_like(end)
        if window is not None:
            first = numpy.maximum(context + number * rows // group - window + 1, 0) // keys
        return cls(seq, number, first, end)

    def lengths(self, keys: int) -> Ints:
        """Return the number of key tiles of each query tile."""
        return -(-self.end // keys) - self.first


@dataclass(frozen=True, slots=True)
class Split:
    """Split of a step's items into parts with fewer key tiles. The first `whole` items are not split."""

    whole: int
    run: int
    """Maximum number of key tiles per part, on average. An item has as few parts as possible."""
    tapered: bool = False
    """False if the parts of a query tile are equal. True if each part has half of the key tiles that are left, so that short
    parts fill the gaps at the end."""

    def parts(self, lengths: Ints) -> Parts:
        """Return the parts of these query tiles, tile after tile. lengths: number of key tiles of each."""
        counts = -(-lengths // self.run)
        counts[: self.whole] = 1
        tile = numpy.repeat(numpy.arange(len(lengths)), counts)
        number = numpy.arange(len(tile)) - (numpy.cumsum(counts) - counts)[tile]
        length, count = lengths[tile], counts[tile]
        if self.tapered:
            first, last = length - (length >> number), length - (length >> number + 1)
            last[number + 1 == count] = length[number + 1 == count]
        else:
            first, last = length * number // count, length * (number + 1) // count
        return Parts(tile, number, count, first, last)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of query tiles: arrays with one element per part."""

    tile: Ints
    number: Ints
    count: Ints
    """Number of parts of the same query tile."""
    first: Ints
    """First key tile, counted from the first one of the query tile."""
    last: Ints

    @property
    def shared(self) -> NDArray[numpy.bool_]:
        """True for parts with a partial result."""
        return self.count > 1

    @property
    def slots(self) -> Ints:
        """Number of each part's partial result."""
        return numpy.cumsum(self.shared) - self.shared


@dataclass(frozen=True, slots=True)
class Programs:
    """Programs that run concurrently, and the costs of items."""

    count: int
    start: float
    """Fixed cost of an item, in key tiles."""
    partial: float
    """Additional cost of an item with a partial result."""
    merge: float = 0.0
    """Time to read one partial result."""
    launch: float = 0.0
    """Time to launch a kernel that merges partial results. 0 if the last program of a query tile merges."""

    def costs(self, parts: Parts) -> Floats:
        """Return the estimated time of each part."""
        return parts.last - parts.first + self.start + self.partial * parts.shared

    def ends(self, costs: Floats, begins: Floats) -> Floats:
        """Return the times at which programs end. This is exact if items have similar costs, and otherwise slightly too late.

        costs: time of each item, in the order in which programs take them. begins: [programs]: time at which each program begins.
        """
        ends, step = begins.copy(), self.count
        if len(costs) <= 4 * self.count and costs.max(initial=0) > 1.25 * costs.min(initial=math.inf):
            step = -(-self.count // 8)
        for at in range(0, len(costs), step):
            ends.sort()
            taken = costs[at : at + step]
            ends[: len(taken)] += taken
        return ends

    def time(self, split: Split, lengths: Ints, begins: Floats) -> float:
        """Return the estimated time at which the parts of these items have ended and are merged. begins: as in `ends`. It is
        exact for a tapered split, for which it takes ten times as long."""
        counts = -(-lengths // split.run)
        merging = self.launch + self.merge * int(counts.max())
        if not split.tapered:  # without `parts`, in a fifth of the time
            costs = lengths / counts + self.start + self.partial * (counts > 1)
            return float(self.ends(-numpy.sort(-costs.repeat(counts)), begins).max()) + merging
        ends: list[float] = sorted(begins.tolist())
        for cost in (-numpy.sort(-self.costs(split.parts(lengths)))).tolist():
            heapq.heapreplace(ends, ends[0] + cost)
        return max(ends) + merging

    def split(self, lengths: Ints, heads: int = 1, limit: float = math.inf) -> tuple[Split, float]:
        """Return the split with the lowest estimated time, and that time in key tiles.

        lengths: number of key tiles of each item, in the order in which programs take them.
        heads: divisor of the number of items that are not split.
        limit: time from which on the result need not be the best.

        Without a split, some programs have one item more than others, and the others wait at the end. To avoid this, the items of
        the last, incomplete round of all programs are split, or also the items of the round before, or all items.
        """
        count, idle = len(lengths), numpy.zeros(self.count)
        unsplit, even = Split(count, int(lengths.max())), (float(lengths.sum()) + self.start * count) / self.count
        if even >= limit or (count > _MAX_ROUNDS * self.count and unsplit.run < even):
            return unsplit, even
        best = unsplit, float(self.ends(lengths + self.start, idle).max())
        even += self.partial + self.launch + 2 * self.merge
        full = count // self.count * self.count
        wholes = {each // heads * heads for each in (0, max(full - self.count, 0), full)}
        for whole in sorted(wholes - {count}, reverse=True):
            if even > min(_GAIN * best[1], best[1] - _WORTH, limit):
                break
            begins, rest = self.ends(lengths[:whole] + self.start, idle), lengths[whole:]
            limit = min(_GAIN * best[1], limit)
            for split in self._promising(rest, float(begins.sum()), limit):
                if split.tapered and best[1] < _TAPER * even:
                    break
                time = self.time(split, rest, begins)
                if time < limit:
                    best, limit = (replace(split, whole=whole), time), time
        return best

    def _promising(self, lengths: Ints, busy: float, limit: float) -> list[Split]:
        """Return a few splits of all these items whose time may be less than `limit`. busy: sum of the times at which programs
        begin."""
        sizes, counts = numpy.unique(lengths, return_counts=True)
        longest, most = int(sizes[-1]), MAX_PARTIALS * self.count
        runs = numpy.unique(-(-longest // PARTS[longest >= 2 * PARTS]))
        parts = -(-sizes // runs[:, None])
        items = (parts * counts).sum(1)
        partials = items - ((parts == 1) * counts).sum(1)
        merging = self.launch + self.merge * parts[:, -1]
        work = int(lengths.sum()) + self.start * items + self.partial * partials
        able = (partials <= most) & (busy + work < (limit - merging) * self.count)
        times = -(-items // self.count) * work / items + merging
        found = [Split(0, int(runs[i])) for i in numpy.argsort(times) if able[i]][:_TRIED]
        tapered = min(TAPERED, most // len(lengths))
        if busy == 0 and tapered >= 3 and longest << 2 >= tapered << tapered:  # no part is empty
            found.append(Split(0, -(-longest // tapered), True))
        return found
