"""A sequence's query heads taken by themselves, where they alone are wrong: the mistake in them is then guessed as any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.oracle import StepSequence
from headway.testing.diagnosis.mistakes import Wrong

_TRIED = 8
"""Query heads of each kv head that are taken: what is wrong in one of them is wrong in the others, and many take long."""


def of_heads(wrong: Wrong, heads: Sequence[int]) -> Wrong | None:
    """The sequence in a layer that has a few of these query heads alone, with every other sequence of its step.

    None where they are not the same ones of each kv head, so that no layer has them.
    """
    spec, given = wrong.row.spec, set(heads)
    places = [place for place in range(spec.group_size) if place in given]
    if given != {kv_head * spec.group_size + place for kv_head in range(spec.num_kv_heads) for place in places}:
        return None
    few = places[:: -(-len(places) // _TRIED)]
    at = torch.tensor([kv_head * spec.group_size + place for kv_head in range(spec.num_kv_heads) for place in few])
    rows = [_row(row, at) for row in wrong.rows]
    return replace(
        wrong,
        row=rows[wrong.number] if rows else _row(wrong.row, at),
        out=wrong.out[:, at],
        asked=None,  # its strides are those of all heads
        layers=[_row(row, at) for row in wrong.layers],
        rows=rows,
        answers=[answer[:, at] for answer in wrong.answers],
    )


def _row(row: StepSequence, at: Tensor) -> StepSequence:
    return replace(row, spec=_spec(row.spec, at.tolist()), q=row.q[:, at])


def _spec(spec: AttentionSpec, heads: Sequence[int]) -> AttentionSpec:
    """The layer of these query heads, with what it has for each of them."""
    slopes, sinks = (None if own is None else tuple(own[head] for head in heads) for own in (spec.alibi_slopes, spec.sinks))
    return replace(spec, num_heads=len(heads), alibi_slopes=slopes, sinks=sinks)
