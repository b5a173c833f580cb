"""A step's input as bytes, and back."""

from __future__ import annotations

import numpy

from headway.core.engine.data.step import NEWEST, StartedRow, StepInput
from headway.core.engine.ranks.rank_messages import decode, encode
from headway.core.sampling.params import SamplingParams


def decode_step(count: int, **more: object) -> StepInput:
    draw = numpy.random.default_rng(count)
    return StepInput(
        rows=draw.permutation(count).astype(numpy.int32),
        query_lens=numpy.ones(count, dtype=numpy.int32),
        context_lens=draw.integers(1, 2**20, count, dtype=numpy.int32),
        num_draft_tokens=numpy.zeros(count, dtype=numpy.int32),
        samples=numpy.ones(count, dtype=numpy.bool_),
        token_ids=numpy.full(count, NEWEST),
        goes_on=True,
        **more,  # type: ignore[arg-type]
    )


def test_logits_processors_stay_on_rank_0() -> None:
    params = SamplingParams(logits_processors=[lambda output, logits: logits], extra_args={"lock": object()}, top_k=3)
    step = decode_step(2, started=(StartedRow(1, params, 5),))
    (found,) = decode(encode(step)).started
    assert (found.row, found.seed, found.params.top_k, found.params.extra_args) == (1, 5, 3, None)
    assert len(found.params.logits_processors or ()) == 1
