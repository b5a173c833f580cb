"""A step's input as bytes, and back."""

from __future__ import annotations

from dataclasses import fields

import numpy
import pytest

from headway.core.engine.data.step import NEWEST, NewPages, PageCopy, StartedRow, StepInput
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


def assert_same(found: StepInput, step: StepInput) -> None:
    for field in fields(StepInput):
        mine, theirs = getattr(found, field.name), getattr(step, field.name)
        if isinstance(theirs, numpy.ndarray):
            assert mine.dtype == theirs.dtype, field.name
            numpy.testing.assert_array_equal(mine, theirs)
        else:
            assert mine == theirs, field.name


PAGES = (NewPages(3, 0, [5, 900_000], 1), NewPages(0, 17, [], 0), NewPages(1, 2, [4], 0))


@pytest.mark.parametrize("count", [1, 7, 64])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"new_pages": PAGES},
        {"state_indices": True, "new_pages": PAGES},
        {"copies": (PageCopy(0, 1, 2, 3),)},
        {"restored": ((1, 2),), "checkpoints": numpy.ones((2, 3), dtype=numpy.int32)},
        {"started": (StartedRow(0, SamplingParams(logprobs=2, stop="x"), 2**63 - 1, (1, 2), 2, (0,)),)},
    ],
    ids=str,
)
def test_a_step_comes_back_as_it_was(count: int, more: dict[str, object]) -> None:
    more = {**more, "state_indices": numpy.arange(count, dtype=numpy.int32)} if "state_indices" in more else more
    step = decode_step(count, **more)
    assert_same(decode(encode(step)), step)


def test_a_decode_that_goes_on_takes_a_few_hundred_bytes() -> None:
    assert len(encode(decode_step(64))) < 600
    assert len(encode(decode_step(1))) < 32


def test_logits_processors_stay_on_rank_0() -> None:
    params = SamplingParams(logits_processors=[lambda output, logits: logits], extra_args={"lock": object()}, top_k=3)
    step = decode_step(2, started=(StartedRow(1, params, 5),))
    (found,) = decode(encode(step)).started
    assert (found.row, found.seed, found.params.top_k, found.params.extra_args) == (1, 5, 3, None)
    assert len(found.params.logits_processors or ()) == 1
