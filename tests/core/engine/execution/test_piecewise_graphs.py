"""Piecewise graphs: the same hidden states as in one go, whatever stands in the padding."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graph_stub import PiecesTape, Tape
from headway.core.contract.errors import BackendError
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.captured_step import borrowed
from headway.core.engine.execution.graph_set import MAX_TOKENS, PiecewiseGraphs, piecewise_sizes
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.registry import create_registry
from made_engine import made_engine
from run_engine import generate
from tiny_model import TinyModel


def test_sizes_waste_less_than_half_a_step() -> None:
    assert piecewise_sizes(5) == [8]
    assert piecewise_sizes(100) == [8, 16, 32, 64, 96, 104]
    assert piecewise_sizes(16384)[-5:] == [1024, 1280, 1536, 1792, MAX_TOKENS]
    waste = [next(size for size in piecewise_sizes(16384) if size >= count) / count for count in range(100, MAX_TOKENS + 1)]
    assert max(waste) < 1.5


def engine(**options: object) -> EngineLoop:
    config = EngineConfig(attn_backend="sdpa.math", block_size=8, max_model_len=64, max_num_seqs=6, kv_cache_memory=40 * 8 * 512)
    return made_engine(TinyModel(), create_registry(load_entry_points=False), replace(config, **options))


def test_steps_of_prompts_extends_and_decodes_are_the_same_in_pieces_and_larger_ones_are_counted() -> None:
    prompts = [[number] * (3 + 7 * number) for number in range(1, 8)] + [[5, 6, 7] * 6]
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * len(prompts)
    plain, fast = engine(max_num_batched_tokens=24), engine(max_num_batched_tokens=24)
    tape = PiecesTape()
    fast.executor.capture(tape)
    expected = [each.token_ids for each in generate(plain, prompts, params)]
    assert [each.token_ids for each in generate(fast, prompts, params)] == expected
    stats = fast.stats
    assert stats.num_graph_steps == 0, "sdpa.math needs exact lengths, so no decode is captured"
    assert stats.steps_in_pieces.total() == stats.num_steps
    assert set(stats.steps_in_pieces) == {"a prompt in the step", "no graph was captured"}
    assert tape.num_replays == 3 * stats.num_steps


def test_a_step_of_more_tokens_than_the_largest_pieces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.core.engine.execution.graph_set.MAX_TOKENS", 16)
    made = engine(max_num_batched_tokens=64)
    made.executor.capture(PiecesTape())
    generate(made, [[1] * 40], SamplingParams(max_tokens=2, ignore_eos=True))
    assert made.stats.steps_without_graph == {"more than 16 tokens": 1}
    assert made.stats.steps_in_pieces == {"no graph was captured": 1}


def pieces_of(model: object) -> PiecewiseGraphs:
    return PiecewiseGraphs(model, engine().executor.attention, torch.device("cpu"))  # type: ignore[arg-type]


def test_sizes_that_do_not_fit_are_named_and_the_others_serve(caplog: pytest.LogCaptureFixture) -> None:
    class Small(TinyModel):
        def __call__(self, input_ids: Tensor, *rest: object) -> Tensor:
            if len(input_ids) > 16:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(input_ids, *rest)  # type: ignore[arg-type]

    pieces = pieces_of(Small())
    with caplog.at_level("INFO", "headway"):
        pieces.capture([8, 16, 32, 64], Tape())
    assert pieces.largest == 16
    assert "no memory for steps of 64, 32 tokens in pieces" in caplog.text
    assert re.search(r"steps of up to 16 tokens in pieces, in \d+\.\d s", caplog.text)


def test_a_model_that_cannot_be_captured_is_an_error_with_a_way_out() -> None:
    class Waits(TinyModel):
        calls = 0

        def __call__(self, input_ids: Tensor, *rest: object) -> Tensor:
            self.calls += 1
            if self.calls > 1:  # the first warms up
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().__call__(input_ids, *rest)  # type: ignore[arg-type]

    with pytest.raises(BackendError, match=r"the model over 8 tokens cannot be captured: operation not .*--enforce-eager"):
        pieces_of(Waits()).capture([8], Tape())


@pytest.mark.gpu
def test_what_is_borrowed_is_the_same_memory_and_holds_none() -> None:
    whole = torch.arange(4096, device="cuda").view(64, 64).to(torch.bfloat16)
    part = whole[3:40, 5:60:2]
    before = torch.cuda.memory_allocated()
    lent = borrowed(part)
    assert torch.equal(lent, part)
    assert (lent.data_ptr(), lent.stride(), lent.dtype) == (part.data_ptr(), part.stride(), part.dtype)
    assert torch.cuda.memory_allocated() == before
    whole.fill_(7)
    assert (lent == 7).all()
