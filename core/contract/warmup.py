"""Which steps reach every kernel: run before the engine is ready, they leave nothing to be compiled for a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headway.core.contract.metadata import Phase


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps that an engine runs."""

    max_num_tokens: int
    """New tokens of a step."""
    max_num_seqs: int
    max_model_len: int
    """Tokens of the longest sequence."""
    max_decode_len: int = 1
    """Query tokens of a decode: more than 1 where drafts are verified."""


class StepShape(NamedTuple):
    """A part of a step: equal sequences of one phase."""

    num_seqs: int
    query_len: int
    context_len: int


_PREFILLS = (1, 8)
"""Sequences of a prefill: more differ in the number of programs alone."""
_MOST_PAIRS = 2**27
"""Query tokens times context tokens of a shape: larger ones take long, and choose as those of a shorter query or context do."""


def lattice(phase: Phase, limits: StepLimits) -> Iterator[StepShape]:
    """Shapes of a phase at and just beyond the powers of two of sequences and query tokens, and at powers of four of the context.

    They reach every kernel of a backend that chooses by these numbers and changes its mind at powers of two. One that chooses
    otherwise lists its own shapes (`AttentionBackend.warmup_shapes`).
    """
    decodes = phase is Phase.DECODE
    contexts = [0] if phase is Phase.PREFILL else sorted({max(limits.max_model_len - 1, 1), *(4**n for n in range(16))})
    longest = limits.max_decode_len if decodes else limits.max_num_tokens
    for num_seqs in powers(limits.max_num_seqs) if decodes else _PREFILLS:
        if num_seqs > limits.max_num_seqs:
            continue
        for query_len in powers(min(longest, limits.max_num_tokens // num_seqs, limits.max_model_len)):
            if phase is Phase.EXTEND and query_len == 1:  # which is a decode
                continue
            for context_len in contexts:
                fits = context_len + query_len <= limits.max_model_len
                if fits and (decodes or num_seqs * query_len * context_len <= _MOST_PAIRS):
                    yield StepShape(num_seqs, query_len, context_len)


def powers(limit: int) -> list[int]:
    """1, 2, 3, 4, 5, 8, 9, 16, 17 and so on: the powers of two and what follows each, up to the limit, and the limit."""
    found = {limit}
    power = 1
    while power <= limit:
        found |= {power, power + 1}
        power *= 2
    return sorted(each for each in found if 1 <= each <= limit)
