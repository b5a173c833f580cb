"""What exactly the wrong sequences of a step share, and no right one has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.core.oracle.oracle import StepSequence

TRAITS: dict[str, Callable[[StepSequence, int, int], bool]] = {
    "those of a single token": lambda row, number, count: row.kv_len == 1,
    "the last sequence of the step": lambda row, number, count: number == count - 1,
    "the first sequence of the step": lambda row, number, count: number == 0,
    "those with a context": lambda row, number, count: row.context > 0,
    "those without a context": lambda row, number, count: row.context == 0,
    "those whose context ends with a block": lambda row, number, count: (
        row.context > 0 and row.context % row.cache.block_size == 0
    ),
    "those that end with a block": lambda row, number, count: row.kv_len % row.cache.block_size == 0,
    "those of several blocks": lambda row, number, count: row.kv_len > row.cache.block_size,
    "those of more than 1,024 tokens": lambda row, number, count: row.kv_len > 1024,
    "those of one new token": lambda row, number, count: row.query_len == 1,
    "those of several new tokens": lambda row, number, count: row.query_len > 1,
    "those with an odd length": lambda row, number, count: row.kv_len % 2 == 1,
}


def trait(rows: Sequence[StepSequence], wrong: Sequence[int]) -> str:
    """What exactly the wrong sequences of a step share; empty if all are wrong, or nothing says it."""
    if len(wrong) == len(rows):
        return ""
    for name, holds in TRAITS.items():
        if [number for number, row in enumerate(rows) if holds(row, number, len(rows))] == list(wrong):
            return name
    return _beyond(rows, wrong)


_MEASURES: dict[str, Callable[[StepSequence, int], int]] = {
    "those of more than {most:,} tokens": lambda row, number: row.kv_len,
    "those of more than {most:,} new tokens": lambda row, number: row.query_len,
    "those after the first {most:,} of the step": lambda row, number: number + 1,
}
_FEWEST = 3
"""Right sequences below a limit that is said."""


def _beyond(rows: Sequence[StepSequence], wrong: Sequence[int]) -> str:
    """The limit that all wrong sequences and no right one are beyond: a power of two, if one lies between."""
    for name, measure in _MEASURES.items():
        right = [measure(row, number) for number, row in enumerate(rows) if number not in wrong]
        most, least = max(right), min(measure(rows[number], number) for number in wrong)
        if len(right) >= _FEWEST and most < least and (len(wrong) > 1 or least >= 64):
            power = 1 << (least - 1).bit_length() - 1
            return name.format(most=power if power >= most else most)
    return ""
