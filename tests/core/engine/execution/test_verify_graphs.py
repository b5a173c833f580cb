"""Drafts in graphs: every step that is a replay writes what the same step without graphs and without drafts writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from graph_backend import Again, Wide
from graph_stub import Tape
from headway.backends.states.torch_states import TorchStates
from headway.core.contract.adapters import LoRARequest, rows_with
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.model import Attention, AttentionFunctions, Model
from headway.core.contract.state import MAMBA2
from headway.core.contract.text_plugins import Proposer
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.attention import HostBlockTables, MirroredTables
from headway.core.engine.execution.graph_set import PiecewiseGraphs
from headway.core.engine.execution.local_executor import LocalExecutor
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.registry import Registry
from sample_tokens import DRAWS_INSIDE, FILTERS_INSIDE
from stateful_model import MODELS, NO_ATTENTION, Stateful
from tiny_engine import TinyModel, Told, drain, generate, made_engine, registering, tokens_of, told_of

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
    assert "state backend single cannot verify drafts in a full graph; verification runs as piecewise graphs" in record.message
    generate(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    assert engine.stats.steps_in_pieces["drafts to verify: state backend single cannot be captured"] > 0


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 7])
def test_a_step_takes_the_narrowest_graph_that_holds_it(count: int, drafts: int) -> None:
    prompts = [[number, *range(20)] for number in range(count)]
    wishes = SamplingParams(temperature=0, max_tokens=16)
    expected = tokens_of(generate(made(None), prompts, wishes))
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]

    def propose(token_ids: list[int]) -> list[int]:
        (text,) = (text for text in texts if text[: len(token_ids)] == token_ids)
        return text[len(token_ids) : len(token_ids) + drafts]

    engine, recorder = made(Told(propose), max_num_seqs=32, num_speculative_tokens=max(drafts, 1)), Once()
    engine.executor.capture(recorder)  # type: ignore[arg-type]
    assert tokens_of(generate(engine, prompts, wishes)) == expected
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
    assert tokens_of(generate(engine, [prompt], params)) == [expected]
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

    engine = made_engine(TinyModel(), registering(wide=Narrow), CONFIG, proposer=Told(lambda _: [1]), measured=False)
    with caplog.at_level("WARNING", "headway"):
        engine.executor.capture(Again())
    (record,) = caplog.records
    assert "verification with wide runs as piecewise graphs: graph_level: needs UNIFORM or higher, got DECODE" in record.message
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
    assert tokens_of(generate(engine, prompts, wishes)) == [text[16:] for text in texts]
    assert engine.stats.num_graph_steps == len(written) >= 10
    new_pages = 4 * (57 // 8 - 16 // 8)
    assert sum(count for _, count in written) <= 2 * (4 + new_pages)  # in each of two buffers


NUMBERS = {"one": 1, "two": 2, "three": 3}


class Shift(NamedTuple):
    digest: bytes
    row: Tensor


class Shifts:
    """Slots of which each adds a row of its own to every hidden state, by operators that a graph holds."""

    def __init__(self) -> None:
        self.num_slots = 2
        self.table = torch.zeros(3, 32)
        self.slots: Tensor | None = None

    def read(self, request: LoRARequest) -> Shift:
        draw = torch.Generator().manual_seed(request.lora_int_id)
        return Shift(request.lora_path.encode(), 5 * torch.randn(32, generator=draw))

    def put(self, slot: int, adapter: Shift) -> None:
        self.table[slot] = adapter.row

    def begin(self, slots: Tensor | None) -> None:
        self.slots = slots


class ShiftedModel(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = Shifts()
        self.calls: Counter[bool] = Counter()

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        hidden = super().__call__(input_ids, positions, attention)
        slots = self.adapters.slots
        self.calls[slots is not None] += 1
        return hidden if slots is None else hidden + self.adapters.table[slots.long().remainder(3)]


def engine_of(graphs: bool, proposer: Told | None = None) -> tuple[EngineLoop, ShiftedModel]:
    config = EngineConfig(
        attn_backend="wide",
        block_size=8,
        kv_cache_memory=2**20,
        max_num_seqs=4,
        max_model_len=64,
        enable_lora=True,
        max_loras=2,
        async_scheduling=False,
        enforce_eager=not graphs,
    )
    model = ShiftedModel()
    engine = made_engine(model, registering(wide=Wide), config, proposer=proposer, measured=False)
    assert isinstance(engine.executor, LocalExecutor)
    if graphs:
        engine.executor.capture(Again())
    return engine, model


def texts(engine: EngineLoop, names: Sequence[str] = ("plain", "one", "two", "three")) -> dict[str, list[int]]:
    """What requests write, each with an adapter of its own but for "plain"; slots are too few for all of them."""
    for name in names:
        adapter = None if name == "plain" else LoRARequest(name, NUMBERS[name], name)
        prompt = [7, 3, 9, len(name), *([5] * 9 if name == "two" else [])]
        params = SamplingParams(temperature=0, max_tokens=12)
        engine.add_request(name, engine.limits.checked(prompt, params, lora_request=adapter))
    return {name: end.token_ids for (name, _), end in drain(engine).items()}


def test_graphs_with_adapters_write_what_single_launches_do() -> None:
    expected = texts(engine_of(graphs=False)[0])
    engine, _ = engine_of(graphs=True)
    assert texts(engine) == expected
    assert engine.stats.num_graph_steps > 5
    assert len({tuple(tokens) for tokens in expected.values()}) == 4


def test_verifications_in_graphs_have_adapters() -> None:
    expected = texts(engine_of(graphs=False)[0])
    known = [[7, 3, 9, len(name), *([5] * 9 if name == "two" else []), *tokens] for name, tokens in expected.items()]
    engine, _ = engine_of(graphs=True, proposer=told_of(known))
    assert texts(engine) == expected
    assert engine.stats.num_accepted_tokens > 5
    assert engine.stats.num_graph_steps > 5


def test_steps_without_adapters_run_graphs_that_hold_nothing_of_them() -> None:
    engine, model = engine_of(graphs=True)
    for names, with_adapters in ((["plain"], False), (["one"], True), (["plain"], False)):
        before, steps = model.calls.copy(), engine.stats.num_graph_steps
        texts(engine, names)
        ran = model.calls - before
        assert set(ran) == {with_adapters}
        assert engine.stats.num_graph_steps - steps >= 10


def test_a_prompt_alone_has_its_adapter_in_a_graph() -> None:
    graphed, _ = engine_of(graphs=True)
    assert texts(graphed, ["two"]) == texts(engine_of(graphs=False)[0], ["two"])
    assert not graphed.stats.steps_without_graph


@torch.inference_mode()
def test_pieces_between_attentions_have_the_adapters_of_their_rows() -> None:
    model = ShiftedModel()
    model.adapters.table[:2] = torch.randn(2, 32)
    attention = AttentionFunctions(lambda layer, q, k, v: q)
    ids, positions = torch.arange(5), torch.arange(5)
    slots = torch.tensor([1, -1, 0, 0, 1], dtype=torch.int32)
    # Of as many rows as are captured: some processors' products of five rows have other bits than those of eight.
    padded = [torch.cat([each, each.new_full((3,), fill)]) for each, fill in ((ids, 0), (positions, 0), (slots, -1))]
    with rows_with(model.adapters, padded[2]):
        expected = model(padded[0], padded[1], attention)[:5]
    pieces = PiecewiseGraphs(model, Passing(), torch.device("cpu"), adapters=model.adapters)  # type: ignore[arg-type]
    pieces.capture([8], Tape())
    for turn in (slots, slots.flip(0), slots):
        found = pieces.run(ids, positions, turn)
    assert found is not None
    assert torch.equal(found, expected)
    assert model.adapters.slots is None


class Passing:
    """Attention that returns its queries."""

    value_head_dims = (8, 8)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, writes: bool) -> None:
        out.copy_(q)
