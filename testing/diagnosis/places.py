"""Where an answer is wrong: what exactly the wrong sequences of a step share, and heads or elements that are wrong alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway.core.oracle.oracle import StepSequence

_TRAITS: dict[str, Callable[[StepSequence, int, int], bool]] = {
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


_MEASURES: dict[str, Callable[[StepSequence, int], int]] = {
    "those of more than {most:,} tokens": lambda row, number: row.kv_len,
    "those of more than {most:,} new tokens": lambda row, number: row.query_len,
    "those after the first {most:,} of the step": lambda row, number: number + 1,
}
_FEWEST = 3
"""Right sequences below a limit that is said."""
_EXACT = 1e-3
_LISTED = 3


def wrong_sequences(rows: Sequence[StepSequence], wrong: Sequence[int]) -> str:
    """Say what exactly the wrong sequences of a step have; empty if all are wrong, or nothing says it."""
    if not wrong or len(wrong) == len(rows):
        return ""
    for name, holds in _TRAITS.items():
        if [number for number, row in enumerate(rows) if holds(row, number, len(rows))] == list(wrong):
            return f"wrong in exactly {name}"
    for name, measure in _MEASURES.items():
        right = [measure(row, number) for number, row in enumerate(rows) if number not in wrong]
        most, least = max(right), min(measure(rows[number], number) for number in wrong)
        if len(right) >= _FEWEST and most < least and (len(wrong) > 1 or least >= 64):
            power = 1 << (least - 1).bit_length() - 1
            return f"wrong in exactly {name.format(most=power if power >= most else most)}"
    return ""


def wrong_parts(outs: Sequence[Tensor], answers: Sequence[Tensor]) -> str:
    """Name the heads or elements that are wrong in the outputs [query_len, num_heads, v_head_dim] of some sequences, where the
    others are right in all; empty where all are wrong, or by no more than rounding."""
    rounding = max(_EXACT, torch.finfo(outs[0].dtype).eps)
    for axis, name in ((1, "heads"), (2, "elements")):
        others = [at for at in range(3) if at != axis]
        apart = torch.stack([(out.double() - right).norm(dim=others) for out, right in zip(outs, answers, strict=True)])
        size = torch.stack([right.norm(dim=others) for right in answers])
        bad = (apart > rounding * size).any(0)
        if not bool(bad.all()) and bool(apart.norm() > 10 * rounding * size.norm()):
            return f"wrong in {name} {spans(bad.nonzero().flatten().tolist())} alone, of {len(bad)}"
    return ""


def spans(numbers: Sequence[int]) -> str:
    """Words for numbers, those that follow one another as one."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    said = [f"{first} to {last}" if last > first else f"{first}" for first, last in found[:_LISTED]]
    return ", ".join(said) + (", ..." if len(found) > _LISTED else "")
