"""Into how many programs a decode is cut: the rule, from a model of the launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy
from numpy.typing import NDArray

from headway.backends.triton.configs import DecodeConfig, PrefillConfig
from headway.backends.triton.work import Ints

SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Splits of a sequence, those that were measured: what lies between them gains nothing."""

MAX_ROUNDS = 40
"""Splits stop where every multiprocessor has this many programs: the partial results would cost more than the balance brings."""

FAN = 8
"""Partial results that one program merges; where a sequence has more, the results of such merges are merged."""

FAN_ROUND = 8
"""What the second go costs beside its parts: as much as so many of them."""

FEWEST = 2
"""Programs a multiprocessor from which on the configurations that do not split are worth a look."""


@lru_cache(maxsize=4096)
def choose_cut(
    items: int, keys: int, key_bytes: int, rows: int, multiprocessors: int, configs: Sequence[DecodeConfig]
) -> tuple[DecodeConfig, int]:
    """The configuration, and the number of splits, that the model below expects to finish first.

    items: programs without a split, sequences times kv heads times query tiles; keys: of each, in the mean; key_bytes: K and V of
    one key; rows: of a query tile. The first of `configs` may split; the others serve many programs as they are.
    """
    if keys == 0 or items == 0:
        return configs[0], 1
    most = max(1, min(-(-keys // configs[0].block_n), MAX_ROUNDS * multiprocessors // items))
    cuts = [(configs[0], splits) for splits in SPLITS if splits <= most]
    if items >= FEWEST * multiprocessors:
        cuts += [(config, 1) for config in configs[1:]]
    return min(cuts, key=lambda cut: expected_us(cut[0], cut[1], items, keys, key_bytes, rows, multiprocessors))


def expected_us(
    config: DecodeConfig, splits: int, items: int, keys: int, key_bytes: int, rows: int, multiprocessors: int
) -> float:
    """Microseconds of a launch, less what is the same for every cut.

    A multiprocessor runs `residents` programs at a time. They take their tiles at the rate of the memory, or at that of their own
    latency where they are too few, and near the crossing of the two at neither; the multiprocessor with most programs at no more
    than its own rate. Fitted on an H200 (docs/kernels.md).
    """
    tiles = -(-keys // config.block_n)
    each = -(-tiles // splits)
    shared_us = multiprocessors * config.block_n * key_bytes / config.bytes_per_us  # a tile of every multiprocessor at once
    programs = items * tiles / each / multiprocessors
    waves = math.floor(programs / config.residents)
    rest = programs - waves * config.residents
    time = waves * (each * math.hypot(config.tile_us, config.residents * shared_us) + config.wave_us)
    if rest > 0:
        tile_us = max(math.hypot(config.tile_us, rest * shared_us), math.ceil(rest) * config.busy_us)
        time += each * tile_us + config.wave_us
    merge_us = config.merge_us + config.merge_row_us * rows
    parts = -(-tiles // each)
    if parts > FAN:
        parts = FAN + -(-parts // FAN) + FAN_ROUND
    return time + (merge_us * parts if splits > 1 else 0.0)


MOST_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128)
"""Parts into which the keys of the longest query tile of a prefill or extend may be cut."""


@dataclass(frozen=True, slots=True)
class RunRule:
    """How many tiles of keys one program of a prefill or extend folds."""

    config: PrefillConfig
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    multiprocessors: int
    num_splits: int | None = None
    """Of the longest query tile's keys, in place of the rule."""

    def longest_run(self, tiles: Ints) -> int:
        """The most tiles of keys for one program; tiles: those that each query tile sees."""
        longest = max(int(tiles.max()), 1)
        if self.num_splits is not None:
            return -(-longest // self.num_splits)
        slots = self.multiprocessors * self.config.residents
        if len(tiles) * self.num_kv_heads >= 4 * slots:
            return longest
        runs = numpy.array([-(-longest // parts) for parts in MOST_PARTS if parts <= longest])
        return int(runs[numpy.argmin(self.expected_us(tiles, runs))])

    def expected_us(self, tiles: Ints, runs: Ints) -> NDArray[numpy.float64]:
        """Microseconds of a launch for each of `runs`, less what is the same for all."""
        config, sms = self.config, self.multiprocessors
        parts = -(-tiles[None, :] // runs[:, None])
        each = -(-tiles[None, :] // parts)
        programs = parts.sum(1) * self.num_kv_heads
        flops = 2 * config.block_m * config.block_n * (self.head_dim + self.v_head_dim)
        shared_us = flops * sms / config.flops_per_us  # a tile of each multiprocessor's tensor cores
        together = numpy.minimum(numpy.ceil(programs / sms), config.residents)
        tile_us = numpy.hypot(config.tile_us, together * shared_us)
        waves = tiles.sum() * self.num_kv_heads / (sms * config.residents) * tile_us  # where programs are many
        slowest = each.max(1)
        more = programs > sms * config.residents
        time = numpy.where(more, numpy.maximum(waves + 0.5 * slowest * tile_us, slowest * tile_us), slowest * tile_us)
        slots = numpy.where(parts > 1, parts, 0).sum(1) * self.num_kv_heads
        moved = slots * config.block_m * (self.v_head_dim + 1) * 8  # partial results, written and read
        merge_us = numpy.where(slots > 0, config.merge_us + moved / config.bytes_per_us, 0.0)
        rounds = numpy.ceil(programs / (sms * config.residents))
        return numpy.asarray(time + rounds * config.wave_us + merge_us + parts.max(1) * 0.05)
