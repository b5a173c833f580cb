"""A prompt that is a step of its own, run at a captured length with padding after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from graph_stub import Tape
from headway.core.contract.backend import GraphLevel
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.testing.broken.attention import PlainBackend
from made_engine import made_engine
from registries import registering
from run_engine import generate
from tiny_model import TinyModel


class Uniform(PlainBackend):
    graph_level = GraphLevel.UNIFORM


class Again(Tape):
    """Counts what is run again in place of a replay."""

    def __init__(self, fits: int = 1000) -> None:
        super().__init__()
        self.runs: Counter[tuple[str, int]] = Counter()
        """By the kind of graph and its size."""
        self._fits = fits

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        graph = run.__self__  # type: ignore[attr-defined]
        key = type(graph).__name__, graph.size
        if graph.size > self._fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def replay() -> None:
            self.runs[key] += 1
            run()

        return replay


def engine(**options: object) -> EngineLoop:
    config = EngineConfig(attn_backend="plain", block_size=8, max_num_batched_tokens=40, max_model_len=48, max_num_seqs=4)
    registry = registering(plain=Uniform)
    return made_engine(TinyModel(), registry, replace(config, kv_cache_memory=30 * 8 * 512, **options))


@pytest.mark.parametrize("wish", [{"temperature": 0}, {"seed": 3}], ids=str)
def test_a_lone_prompt_is_one_graph_and_writes_the_same_tokens(wish: dict[str, float]) -> None:
    plain, fast = engine(), engine(async_scheduling=True)
    recorder = Again()
    fast.executor.capture(recorder)
    params = SamplingParams(max_tokens=4, ignore_eos=True, **wish)
    for length in (20, 1, 8, 9, 39, 7, 32, 33):
        prompt = [[(7 * length + at) % 50 for at in range(length)]]
        assert generate(fast, prompt, params)[0].token_ids == generate(plain, prompt, params)[0].token_ids
    prompts = {size: count for (kind, size), count in recorder.runs.items() if kind == "PrefillGraph"}
    assert prompts == {8: 3, 16: 1, 32: 2, 40: 2}
    stats = fast.stats
    assert stats.num_graph_steps == stats.num_steps == recorder.runs.total()


def test_steps_of_more_than_one_whole_prompt_run_piecewise() -> None:
    made = engine()
    recorder = Again()
    made.executor.capture(recorder)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    generate(made, [[1] * 9, [2] * 9], params)  # two prompts in one step
    generate(made, [[3] * 45], params)  # in two chunks: what is sampled comes after the second
    generate(made, [[1] * 9 + [4] * 9], params)  # extends what is cached
    assert not any(kind == "PrefillGraph" for kind, _ in recorder.runs)
    assert made.stats.steps_in_pieces == {"a prompt in the step": 4}


def test_prompts_whose_graph_does_not_fit_run_piecewise(caplog: pytest.LogCaptureFixture) -> None:
    made = engine()
    recorder = Again(fits=16)
    with caplog.at_level("INFO", "headway"):
        made.executor.capture(recorder)
    assert "no memory for a prompt of 40 tokens" in caplog.text
    assert "2 of one prompt captured" in caplog.text
    generate(made, [[1] * 20], SamplingParams(max_tokens=1, ignore_eos=True))
    assert made.stats.steps_in_pieces.total() == 1


def test_backend_captured_for_decode_alone_has_no_prefill_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Uniform, "graph_level", GraphLevel.DECODE)
    made = engine()
    made.executor.capture(Again())
    generate(made, [[1] * 20], SamplingParams(max_tokens=3, ignore_eos=True))
    assert made.stats.steps_in_pieces == {"a prompt in the step": 1}
    assert made.stats.num_graph_steps == 2
