"""Drafts in graphs: every step that is a replay writes what the same step without graphs and without drafts writes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy
import pytest
from numpy.typing import NDArray

from graph_backend import Again, Wide
from graph_stub import Tape
from headway.backends.states.torch_states import TorchStates
from headway.core.contract.backend import GraphLevel
from headway.core.contract.model import Model
from headway.core.contract.sampling_plugins import Proposer
from headway.core.contract.state import MAMBA2
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.attention import HostBlockTables, MirroredTables
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.registry import Registry
from made_engine import made_engine
from proposer_stub import Told, told_of
from registries import registering
from run_engine import generate
from sample_tokens import DRAWS_INSIDE, FILTERS_INSIDE
from stateful_model import MODELS, NO_ATTENTION, Stateful
from tiny_model import TinyModel

CONFIG = EngineConfig(
    attn_backend="wide", block_size=8, max_num_batched_tokens=40, max_model_len=64, max_num_seqs=6, kv_cache_memory=2**18
)
REGISTRY = registering(wide=Wide)


def made(
    proposer: Proposer | None,
    sampling: SamplingOps = TORCH_SAMPLING,
    model: Model | None = None,
    source: Registry = REGISTRY,
    **options: object,
) -> EngineLoop:
    config, model = replace(CONFIG, **options), model or TinyModel()
    return made_engine(model, source, config, sampling=sampling, proposer=proposer, measured=False)


def requests(wish: dict[str, float]) -> tuple[list[list[int]], list[SamplingParams]]:
    random = Random(2)
    prompts = [[random.randrange(50) for _ in range(random.randint(1, 25))] for _ in range(14)]
    prompts += [[7] * 17, [*[7] * 17, 3]]  # the prefix cache has part of it
    wishes = [SamplingParams(max_tokens=random.randint(9, 30), ignore_eos=True, **{**wish, "seed": n}) for n in range(16)]
    wishes[3] = replace(wishes[3], stop_token_ids=tuple(range(0, 50, 3)))
    return prompts, wishes


def rare(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sampling", [TORCH_SAMPLING, DRAWS_INSIDE, FILTERS_INSIDE], ids=["sampled after", "sampled inside", "filtered inside"]
)
@pytest.mark.parametrize("wish", [{"temperature": 0}, rare({"temperature": 1.0}), {"temperature": 0.8, "top_k": 5}], ids=str)
@pytest.mark.parametrize("memory", [rare(2**18), 9 * 8 * 512], ids=["roomy", "tight"])
def test_drafts_in_graphs_change_no_token(wish: dict[str, float], sampling: SamplingOps, memory: int) -> None:
    """Through padding of both kinds, preemption, prefix hits, stop tokens, and drafts that do not hold."""
    prompts, wishes = requests(wish)
    expected = [(each.token_ids, each.finish_reason) for each in generate(made(None), prompts, wishes)]
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    proposer = told_of(texts)
    engine = made(proposer, sampling, kv_cache_memory=memory)
    recorder = Again()
    engine.executor.capture(recorder)
    assert [(each.token_ids, each.finish_reason) for each in generate(engine, prompts, wishes)] == expected
    stats = engine.stats
    assert stats.num_graph_steps == len(recorder.sizes)
    assert bool(stats.steps_after_model) == ("top_k" in wish and sampling is not FILTERS_INSIDE)
    assert stats.num_accepted_tokens > 50
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert len(set(recorder.sizes)) > 1
    assert stats.num_graph_steps > 8
    assert {reason for reason in stats.steps_in_pieces if "drafts" in reason} <= {
        "drafts beside a prompt",
        "drafts of more tokens than were captured",
        "drafts beside a sequence shorter than the graph",
    }
    assert bool(engine.stats.num_preemptions) == (memory < 2**17)
    assert sorted(map(len, proposer.finished)) == sorted(map(len, texts))


class Once(Tape):
    """Runs a whole step again over the same memory, and writes down of what shape it was."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []

    def record(self, run: object) -> object:
        graph = run.__self__  # type: ignore[attr-defined]

        def replay() -> None:
            if run.__name__ == "run":  # type: ignore[attr-defined]
                self.shapes.append((graph.size, getattr(graph, "width", 1)))
            run()  # type: ignore[operator]

        return replay


HYBRIDS = {
    **{name: MODELS[name] for name in ("gated delta", "kda", "mamba1", "lightning")},
    "mamba2": Stateful(MAMBA2, None),
    "no attention": NO_ATTENTION,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("drafts", [7, 4])
@pytest.mark.parametrize("name", HYBRIDS)
def test_drafts_in_graphs_leave_the_states_that_hold(name: str, drafts: int) -> None:
    """Layers that keep a state pass by the tokens that fill a sequence up to the width of a graph."""
    prompts, wishes = requests({"temperature": 0} if drafts == 7 else {"temperature": 0.8, "top_k": 5})
    options: dict[str, object] = {"model": HYBRIDS[name], "kv_cache_memory": 2**21, "num_speculative_tokens": drafts}
    plain = made(None, **options)
    expected = [(each.token_ids, each.finish_reason) for each in generate(plain, prompts, wishes)]
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    engine, recorder = made(told_of(texts), DRAWS_INSIDE, **options), Once()
    engine.executor.capture(recorder)  # type: ignore[arg-type]
    assert [(each.token_ids, each.finish_reason) for each in generate(engine, prompts, wishes)] == expected
    stats, widths = engine.stats, Counter(width for _, width in recorder.shapes)
    assert stats.num_graph_steps == widths.total()
    assert widths.total() - widths[1] > 8
    assert set(widths) - {1} <= {2, 4, drafts + 1}, "no wider than a row has slots"
    assert max(widths) == drafts + 1
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 50
    assert not stats.steps_without_graph
    assert not any("cannot be captured" in reason for reason in stats.steps_in_pieces)


def test_a_state_backend_that_cannot_be_captured_wide_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Single(TorchStates):
        name = "single"
        graph_level = GraphLevel.DECODE

    source = registering(Single, wide=Wide)
    engine = made(Told(lambda _: [1]), model=HYBRIDS["lightning"], source=source, state_backend="single", kv_cache_memory=2**21)
    with caplog.at_level("WARNING", "headway"):
        engine.executor.capture(Again())
    (record,) = caplog.records
    assert "state backend single cannot verify drafts in a graph: such steps are launched in pieces" in record.message
    generate(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    assert engine.stats.steps_in_pieces["drafts to verify: state backend single cannot be captured"] > 0


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 7])
def test_a_step_takes_the_narrowest_graph_that_holds_it(count: int, drafts: int) -> None:
    prompts = [[number, *range(20)] for number in range(count)]
    wishes = SamplingParams(temperature=0, max_tokens=16)
    expected = [each.token_ids for each in generate(made(None), prompts, wishes)]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]

    def propose(token_ids: list[int]) -> list[int]:
        (text,) = (text for text in texts if text[: len(token_ids)] == token_ids)
        return text[len(token_ids) : len(token_ids) + drafts]

    engine, recorder = made(Told(propose), max_num_seqs=32, num_speculative_tokens=max(drafts, 1)), Once()
    engine.executor.capture(recorder)  # type: ignore[arg-type]
    assert [each.token_ids for each in generate(engine, prompts, wishes)] == expected
    width = {1: 2, 2: 4, 3: 4, 4: 8, 7: 8}[drafts]
    assert (1 if count == 1 else 4, width) in recorder.shapes
    assert max(each for _, each in recorder.shapes) == width
    assert not engine.stats.steps_without_graph


def test_logits_are_seen_of_every_token_that_is_sampled() -> None:
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    prompt, params = list(range(20)), SamplingParams(temperature=0, max_tokens=12)
    (expected,) = (each.token_ids for each in generate(made(None), [prompt], params))
    engine = made(told_of([[*prompt, *expected]]), DRAWS_INSIDE)
    engine.executor.capture(Again())
    engine.executor.observe(lambda rows, logits: seen.append((rows.tolist(), tuple(logits.argmax(-1).tolist()))))
    assert [each.token_ids for each in generate(engine, [prompt], params)] == [expected]
    at = 0
    for rows, best in seen:
        assert len(rows) == len(best)
        held = next((n for n, token in enumerate(best) if expected[at : at + n + 1] != list(best[: n + 1])), len(best))
        assert held >= 1
        at += held
    assert engine.stats.num_draft_tokens > 0


def test_a_backend_that_cannot_be_captured_wide_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Narrow(Wide):
        name = "wide"
        graph_level = GraphLevel.DECODE

    registry = registering(wide=Narrow)
    engine = made_engine(TinyModel(), registry, CONFIG, proposer=Told(lambda _: [1]), measured=False)
    with caplog.at_level("WARNING", "headway"):
        engine.executor.capture(Again())
    (record,) = caplog.records
    assert "verification with wide is launched in pieces: graph_level: needs UNIFORM or higher, got DECODE" in record.message
    generate(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    assert engine.stats.steps_in_pieces["drafts to verify: wide cannot be captured"] > 0


def test_replays_write_the_block_tables_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    real = MirroredTables.fill

    def counting(self: MirroredTables, rows: NDArray[numpy.int64], tables: HostBlockTables) -> int:
        written.append((len(rows), real(self, rows, tables)))
        return written[-1][1]

    prompts, wishes = [[number, *range(15)] for number in range(4)], SamplingParams(temperature=0, max_tokens=41)
    texts = [[*prompt, *each.token_ids] for prompt, each in zip(prompts, generate(made(None), prompts, wishes), strict=True)]

    def propose(token_ids: list[int]) -> list[int]:
        return next(text for text in texts if text[: len(token_ids)] == token_ids)[len(token_ids) :][:3]

    engine = made(Told(propose))
    engine.executor.capture(Again())
    monkeypatch.setattr(MirroredTables, "fill", counting)
    assert [each.token_ids for each in generate(engine, prompts, wishes)] == [text[16:] for text in texts]
    assert engine.stats.num_graph_steps == len(written) >= 10
    new_pages = 4 * (57 // 8 - 16 // 8)
    assert sum(count for _, count in written) <= 2 * (4 + new_pages)  # in each of two buffers
