"""Into how many programs a decode is cut: the rule, from a model of the launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from headway.backends.triton.configs import DecodeConfig

SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
"""Splits of a sequence, those that were measured: what lies between them gains nothing."""

MAX_ROUNDS = 40
"""Splits stop where every multiprocessor has this many programs: the partial results would cost more than the balance brings."""

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
    latency where they are too few, and near the crossing of the two at neither. Fitted on an H200 (docs/kernels.md).
    """
    tiles = -(-keys // config.block_n)
    each = -(-tiles // splits)
    shared_us = multiprocessors * config.block_n * key_bytes / config.bytes_per_us  # a tile of every multiprocessor at once
    programs = items * tiles / each / multiprocessors
    waves = math.floor(programs / config.residents)
    rest = programs - waves * config.residents
    time = waves * (each * math.hypot(config.tile_us, config.residents * shared_us) + config.wave_us)
    if rest > 0:
        time += each * math.hypot(config.tile_us, rest * shared_us) + config.wave_us
    merge_us = config.merge_us + config.merge_row_us * rows
    return time + (merge_us * math.ceil(tiles / each) if splits > 1 else 0.0)
