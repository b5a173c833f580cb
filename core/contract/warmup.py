"""Which steps reach every kernel: run before the engine is ready, they leave nothing to be compiled for a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class Lengths(NamedTuple):
    """A sequence of a step."""

    query_len: int
    context_len: int
    num_drafts: int = 0
    """Of a decode that verifies: one less than its query tokens."""


_MOST_PAIRS = 2**27
"""Query tokens times context tokens of a shape: larger ones take long, and choose as those of a shorter query or context do."""


def lattice(phase: Phase, limits: StepLimits) -> Iterator[list[Lengths]]:
    """Steps of a phase at and just beyond the powers of two of sequences and query tokens, and at powers of the context.

    They reach every kernel of a backend that chooses by these numbers and changes its mind at powers of two. One that chooses
    otherwise lists its own steps (`AttentionBackend.warmup_steps`).
    """
    decodes = phase is Phase.DECODE
    contexts = sorted({max(limits.max_model_len - 1, 1), *((4 if decodes else 16) ** n for n in range(16))})
    contexts = [0] if phase is Phase.PREFILL else contexts
    longest = min(limits.max_decode_len if decodes else limits.max_num_tokens, limits.max_num_tokens, limits.max_model_len)
    for query_len in powers(longest):
        if phase is Phase.EXTEND and query_len == 1:  # which is a decode
            continue
        room = min(limits.max_num_seqs, limits.max_num_tokens // query_len)
        left = limits.max_num_tokens - room * query_len
        for num_seqs in powers(room) if decodes else sorted({1, room}):
            for context_len in contexts:
                if context_len + query_len > limits.max_model_len or (
                    not decodes and num_seqs * query_len * context_len > _MOST_PAIRS
                ):
                    continue
                step = [Lengths(query_len, context_len, query_len - 1 if decodes else 0)] * num_seqs
                yield step
                shorter = 1 if context_len == 0 else 2
                if not decodes and num_seqs == room < limits.max_num_seqs and left >= shorter:
                    yield [*step, Lengths(left, context_len)]  # the most work there can be beside the longest query


def fits(step: Sequence[Lengths], limits: StepLimits) -> bool:
    """Whether an engine may run a step."""
    longest = max((query_len + context_len for query_len, context_len, _ in step), default=0)
    tokens = sum(each.query_len for each in step)
    return 0 < len(step) <= limits.max_num_seqs and tokens <= limits.max_num_tokens and longest <= limits.max_model_len


def powers(limit: int) -> list[int]:
    """1, 2, 3, 4, 5, 8, 9, 16, 17 and so on: the powers of two and what follows each, up to the limit, and the limit."""
    found = {limit}
    power = 1
    while power <= limit:
        found |= {power, power + 1}
        power *= 2
    return sorted(each for each in found if 1 <= each <= limit)
