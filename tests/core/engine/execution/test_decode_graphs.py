"""Graphs: what captured decodes, prompts and pieces are fed, and that they write what single launches write."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from graph_backend import Again, Walk
from graph_stub import PiecesTape, Tape
from headway.core.contract.backend import Backends
from headway.core.contract.errors import BackendError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.metadata import AttentionMetadata
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.step import NEWEST, ScheduledStep, StepInput
from headway.core.engine.execution.attention import HostBlockTables, PagedAttention
from headway.core.engine.execution.captured_step import DecodeGraph, borrowed
from headway.core.engine.execution.graph_set import (
    MAX_TOKENS,
    DecodeGraphs,
    PiecewiseGraphs,
    PrefillGraphs,
    capture_sizes,
    piecewise_sizes,
)
from headway.core.engine.execution.static_inputs import (
    DecodeInputs,
    ModelStep,
    Shapes,
    StaticInputs,
    decode_shapes,
    prefill_shapes,
    verify_shapes,
)
from headway.core.engine.loop import EngineLoop
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.engine.scheduling.step_input import prepare
from headway.core.sampling.filtering import torch_filter
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps, draw, greedy
from headway.core.select.request import LayerSpecs
from headway.registry import create_registry
from headway.testing.broken.attention import PlainBackend
from tiny_engine import TinyModel, generate, made_engine, registering, tokens_of

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
ROWS = 8


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
        (1000, [1, 2, 4, *range(8, 257, 8), *range(288, 1000, 32), 1000]),
        (2000, [1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32), *range(1152, 2000, 128), 2000]),
    ],
)
def test_batch_sizes(max_num_seqs: int, sizes: list[int]) -> None:
    assert capture_sizes(max_num_seqs) == sizes


def graph_step(attention: PagedAttention | None = None, block_size: int = BLOCK_SIZE, max_len: int = MAX_MODEL_LEN) -> ModelStep:
    attention = attention or PagedAttention(LayerSpecs([]), [], lambda *_: None)
    return ModelStep(TinyModel(), attention, TORCH_SAMPLING, torch.zeros(ROWS + 1, dtype=torch.int64), block_size, max_len, [9])


@examples(
    15,
    60,
    prompts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=6),
    spare=st.integers(0, 6),
    overlapped=st.booleans(),
)
def test_a_replay_is_fed_what_the_metadata_says(prompts: list[list[int]], spare: int, overlapped: bool) -> None:
    """Through admission, growth, preemption and readmission in another row."""
    scheduler = Scheduler(BlockManager(MAX_MODEL_LEN // BLOCK_SIZE + spare, BLOCK_SIZE, False), 64, ROWS)
    for number, prompt in enumerate(prompts):
        scheduler.add(Sequence(str(number), 0, prompt, SamplingParams(temperature=0, max_tokens=15), frozenset(), MAX_MODEL_LEN))
    inputs = DecodeInputs(graph_step(), [decode_shapes(graph_step(), ROWS)])
    tables, in_flight = HostBlockTables(ROWS, MAX_MODEL_LEN // BLOCK_SIZE, scheduler.blocks.groups), []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        if step:
            told = pickle.loads(pickle.dumps(prepare(step, scheduler.blocks.groups)))  # as another process would get it
            tables.update(told)
            if told.continues:
                check(inputs, tables, step, told)
        scheduler.launched(step)
        read, in_flight = (in_flight, step) if overlapped else (step, [])
        for scheduled in read:
            if scheduled.samples:
                seq = scheduled.seq
                scheduler.append_sampled(seq, [] if seq.finished else [len(seq.token_ids) % 7])
        scheduler.remove_finished()


def check(inputs: DecodeInputs, tables: HostBlockTables, step: ScheduledStep, told: StepInput) -> None:
    inputs.buffer.fill_(99)
    count, size = len(step), ROWS if len(step) > ROWS // 2 else ROWS // 2  # two sizes share the memory
    shapes = decode_shapes(graph_step(), size)
    sent = inputs.fill(shapes, told.rows, told.context_lens, tables)
    fields = inputs.fields(shapes)
    (table,), (slots,), rows = fields.tables, fields.slots.tolist(), fields.rows.tolist()
    positions, seq_lens = fields.positions.tolist(), fields.seq_lens.tolist()
    assert not fields.scales.any()
    pages = [scheduled.seq.tables[0].pages for scheduled in step]
    metadata = AttentionMetadata.build([1] * count, [scheduled.context_len for scheduled in step], pages, BLOCK_SIZE)
    assert slots == metadata.slot_mapping.tolist() + [-1] * (size - count)
    assert seq_lens == sent.seq_lens.tolist() == metadata.kv_lens + [0] * (size - count)
    assert positions[:count] == metadata.context_lens.tolist()
    assert torch.equal(table, sent.tables[0])
    for row, blocks in enumerate(pages):
        assert table[row, : len(blocks)].tolist() == blocks
    assert rows[:count] == [scheduled.seq.row for scheduled in step]
    assert set(rows[count:]) <= {ROWS}, "padding writes its token beside everybody's"
    assert not table[count:].any(), "padding points at a block that exists"


def step_of(*sequences: tuple[int, int], continues: bool = False, drafts: int = 0) -> StepInput:
    """A step of (query_len, context_len)."""
    query_lens, context_lens = numpy.array(sequences, dtype=numpy.int32).T
    many = len(query_lens)
    num_drafts = numpy.full(many, drafts, dtype=numpy.int32)
    tokens = numpy.full(query_lens.sum(), NEWEST, dtype=numpy.int64)
    rows = numpy.arange(many, dtype=numpy.int32)
    verifies = bool(drafts and (query_lens == drafts + 1).all() and context_lens.all())
    return StepInput(rows, query_lens, context_lens, num_drafts, numpy.ones(many, dtype=bool), tokens, continues, verifies)


def test_reason_for_a_step_without_graph_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made = engine()
    attention = made.executor.attention
    backends = {spec: Walk(spec, made.selection.layout, 8) for spec in attention.specs}
    captured = DecodeGraphs(graph_step(attention, 8, 64))
    captured.capture([1, 2], lambda size: [backends], Again())

    def why(step: StepInput, backends: Backends = backends) -> str | int:
        graph, reason = captured.for_step(step, lambda size: backends)
        assert (graph is None) == bool(reason)
        return reason if graph is None else graph.size

    decode = (1, 8)
    assert why(step_of(decode, continues=True)) == 1
    assert why(step_of(decode, decode, continues=True)) == 2
    assert why(step_of((9, 0))) == why(step_of((3, 6), decode)) == "a prompt in the step"
    assert why(step_of(decode)) == "a token that the device does not hold"
    other = {spec: Uncapturable(spec, made.selection.layout, 8) for spec in attention.specs}
    assert why(step_of(decode, continues=True), other) == "no graph of uncapturable for 1 sequences"
    with caplog.at_level("WARNING", "headway"):
        assert [why(step_of(*[decode] * 3, continues=True)) for _ in range(2)] == ["more than 2 sequences"] * 2
    (record,) = caplog.records
    assert "a decode step of 3 sequences is launched kernel by kernel: the largest captured batch is 2" in record.message


def engine(**options: object) -> EngineLoop:
    config = EngineConfig(attn_backend="walk", block_size=8, max_num_batched_tokens=24, max_model_len=64, max_num_seqs=6)
    return made_engine(TinyModel(), registering(walk=Walk), replace(config, kv_cache_memory=9 * 8 * 512, **options))


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("wish", [{"temperature": 0}, {"seed": 3}, {"seed": 3, "top_k": 5}], ids=str)
def test_steps_through_static_inputs_write_the_same_tokens(overlapped: bool, wish: dict[str, float]) -> None:
    """Through padding, preemption, prefix hits, and sequences that end by a token while the next step is under way."""

    def run(engine: EngineLoop) -> list[tuple[list[int], str | None]]:
        random = Random(1)
        prompts, wishes = [], []
        for number in range(20):
            prompt = [random.randrange(50) for _ in range(random.randint(1, 30))] if number % 4 else [7] * 17
            stops = random.sample(range(50), 8) if number % 3 == 0 else []
            most = random.randint(8, 30) if number < 19 else 33  # the last goes on alone
            prompts.append(prompt)
            wishes.append(SamplingParams(max_tokens=most, stop_token_ids=stops, **wish))
        return [(written.token_ids, written.finish_reason) for written in generate(engine, prompts, wishes)]

    plain, fast = engine(), engine(async_scheduling=overlapped)
    recorder = Again()
    fast.executor.capture(recorder)
    expected = run(plain)
    assert run(fast) == expected
    assert plain.stats.num_preemptions > 0
    assert fast.stats.num_preemptions > 0
    assert {reason for _, reason in expected} == {"stop", "length"}
    assert set(recorder.sizes) == {1, 2, 4, 6}
    assert fast.stats.num_graph_steps == len(recorder.sizes)
    assert fast.stats.num_graph_steps + fast.stats.steps_in_pieces.total() == fast.stats.num_steps
    assert "a prompt in the step" in fast.stats.steps_in_pieces
    assert recorder.num_replays == 3 * fast.stats.steps_in_pieces.total(), "two attentions lie between three pieces"
    assert not fast.stats.steps_without_graph


class Short(Again):
    """Memory for batches of up to four."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        if run.__self__.size > 4:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().record(run)


def test_sizes_for_which_memory_is_short_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    made = engine()
    backends = {spec: Walk(spec, made.selection.layout, 8) for spec in made.executor.attention.specs}
    captured = DecodeGraphs(graph_step(made.executor.attention, 8, 64))
    with caplog.at_level("INFO", "headway"):
        captured.capture([1, 2, 4, 6, 8], lambda size: [backends], Short())
    assert [re.sub(r"in \d+\.\d s", "in 0.0 s", record.message.split(":", 1)[1]) for record in caplog.records] == [
        " too little memory for batches of 8, 6, which are launched kernel by kernel",
        " 3 decode graphs captured, 3 batch sizes up to 4, in 0.0 s and 0 MB: walk",
    ]
    sizes = [captured.for_step(step_of(*[(1, 8)] * n, continues=True), lambda size: backends)[0] for n in (1, 2, 3, 4, 5)]
    assert [graph and graph.size for graph in sizes] == [1, 2, 4, 4, None]


class Uncapturable(Walk):
    name = "uncapturable"
    graph_level = GraphLevel.NONE


def test_a_backend_that_cannot_be_captured_is_named_with_the_cost(caplog: pytest.LogCaptureFixture) -> None:
    made = engine()
    backends = {spec: Uncapturable(spec, made.selection.layout, 8) for spec in made.executor.attention.specs}
    captured = DecodeGraphs(graph_step(made.executor.attention, 8, 64))
    with caplog.at_level("INFO", "headway"):
        captured.capture([1, 2, 4], lambda size: [backends], Again())
    (record,) = caplog.records
    assert "uncapturable cannot be captured (graph_level: needs DECODE or higher, got NONE" in record.message
    assert re.search(r"takes the host \d+\.\d ms$", record.message)
    assert captured.for_step(step_of((1, 8), continues=True), lambda size: backends) == (None, "no graph was captured")


class Prompted(Walk):
    name = "prompted"
    graph_level = GraphLevel.UNIFORM


def test_a_prompt_takes_the_next_captured_length_whoever_is_fastest_at_its_own() -> None:
    made = engine()

    def fastest(length: int) -> Backends:
        kind = Walk if length % 16 else Prompted  # which has no graph of a prompt
        return {spec: kind(spec, made.selection.layout, 8) for spec in made.executor.attention.specs}

    captured = PrefillGraphs(graph_step(made.executor.attention, 8, 64))
    captured.capture([8, 16, 32], fastest, Again())
    found = [captured.for_step(step_of((length, 0))) for length in (1, 9, 16, 17, 32, 33)]
    assert [graph and graph.size for graph in found] == [None, 16, 16, 32, 32, None]
    assert captured.for_step(step_of((9, 4))) is None
    assert captured.for_step(step_of((9, 0), (9, 0))) is None


def test_graph_levels_decide_what_a_backend_captures() -> None:
    class Exact(Walk):
        capabilities = replace(Walk.capabilities, exact_host_lengths=True)

    assert Walk.captures()
    assert str(Walk.captures(4)).startswith("no: graph_level: needs UNIFORM or higher, got DECODE")
    assert str(Exact.captures()).startswith("no: exact_host_lengths")
    assert Uncapturable.captures().reasons[0].got == "NONE"


def test_a_graph_draws_for_the_rows_that_want_it() -> None:
    """Beside greedy ones, in one pass; a row that leaves out unlikely tokens is drawn after the graph, and it alone."""
    changed: list[int] = []

    def choose(logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
        if logits.untyped_storage().nbytes() == 4 * len(logits) * (TinyModel.vocab_size + 1):  # nobody's column beside the others
            changed.append(len(logits))
        return torch.where(scales == 0, greedy(logits), draw(logits, scales, keys))

    settings = [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.5}, {"top_k": 4}]
    wishes = [
        SamplingParams(max_tokens=9 - 2 * (seed == 3), seed=seed, ignore_eos=True, **each) for seed, each in enumerate(settings)
    ]
    prompts = [[3, 1], [4, 1, 5], [9, 2, 6], [5]]
    made = engine()
    registry = registering(walk=Walk)
    fast = made_engine(TinyModel(), registry, made.config, sampling=SamplingOps(choose=choose))
    fast.executor.capture(Again())
    expected = tokens_of(generate(made, prompts, wishes))
    assert tokens_of(generate(fast, prompts, wishes)) == expected
    assert changed == [1] * 7, "while the row with top_k runs; the two steps after it draw inside"
    assert fast.stats.steps_after_model == {"top_k or top_p": 7}
    assert not fast.stats.steps_waiting
    assert fast.stats.num_graph_steps == 8
    changed.clear()
    inside = made_engine(TinyModel(), registry, made.config, sampling=SamplingOps(choose=choose, filter=torch_filter))
    inside.executor.capture(Again())
    assert tokens_of(generate(inside, prompts, wishes)) == expected
    assert not changed
    assert not inside.stats.steps_after_model


class Uniform(PlainBackend):
    graph_level = GraphLevel.UNIFORM


class Counting(Tape):
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


def uniform_engine(**options: object) -> EngineLoop:
    config = EngineConfig(attn_backend="plain", block_size=8, max_num_batched_tokens=40, max_model_len=48, max_num_seqs=4)
    return made_engine(TinyModel(), registering(plain=Uniform), replace(config, kv_cache_memory=30 * 8 * 512, **options))


@pytest.mark.parametrize("wish", [{"temperature": 0}, {"seed": 3}], ids=str)
def test_a_lone_prompt_is_one_graph_and_writes_the_same_tokens(wish: dict[str, float]) -> None:
    plain, fast = uniform_engine(), uniform_engine(async_scheduling=True)
    recorder = Counting()
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
    made = uniform_engine()
    recorder = Counting()
    made.executor.capture(recorder)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    generate(made, [[1] * 9, [2] * 9], params)  # two prompts in one step
    generate(made, [[3] * 45], params)  # in two chunks: what is sampled comes after the second
    generate(made, [[1] * 9 + [4] * 9], params)  # extends what is cached
    assert not any(kind == "PrefillGraph" for kind, _ in recorder.runs)
    assert made.stats.steps_in_pieces == {"a prompt in the step": 4}


def test_prompts_whose_graph_does_not_fit_run_piecewise(caplog: pytest.LogCaptureFixture) -> None:
    made = uniform_engine()
    recorder = Counting(fits=16)
    with caplog.at_level("INFO", "headway"):
        made.executor.capture(recorder)
    assert "too little memory for a prompt of 40 tokens" in caplog.text
    assert "2 prefill graphs captured" in caplog.text
    generate(made, [[1] * 20], SamplingParams(max_tokens=1, ignore_eos=True))
    assert made.stats.steps_in_pieces.total() == 1


def test_backend_captured_for_decode_alone_has_no_prefill_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Uniform, "graph_level", GraphLevel.DECODE)
    made = uniform_engine()
    made.executor.capture(Counting())
    generate(made, [[1] * 20], SamplingParams(max_tokens=3, ignore_eos=True))
    assert made.stats.steps_in_pieces == {"a prompt in the step": 1}
    assert made.stats.num_graph_steps == 2


def test_sizes_waste_less_than_half_a_step() -> None:
    assert piecewise_sizes(5) == [8]
    assert piecewise_sizes(100) == [8, 16, 32, 64, 96, 104]
    assert piecewise_sizes(16384)[-5:] == [1024, 1280, 1536, 1792, MAX_TOKENS]
    waste = [next(size for size in piecewise_sizes(16384) if size >= count) / count for count in range(100, MAX_TOKENS + 1)]
    assert max(waste) < 1.5


def piecewise_engine(**options: object) -> EngineLoop:
    config = EngineConfig(attn_backend="sdpa.math", block_size=8, max_model_len=64, max_num_seqs=6, kv_cache_memory=40 * 8 * 512)
    return made_engine(TinyModel(), create_registry(load_entry_points=False), replace(config, **options))


def test_steps_of_prompts_extends_and_decodes_are_the_same_in_pieces_and_larger_ones_are_counted() -> None:
    prompts = [[number] * (3 + 7 * number) for number in range(1, 8)] + [[5, 6, 7] * 6]
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * len(prompts)
    plain, fast = piecewise_engine(max_num_batched_tokens=24), piecewise_engine(max_num_batched_tokens=24)
    tape = PiecesTape()
    fast.executor.capture(tape)
    expected = tokens_of(generate(plain, prompts, params))
    assert tokens_of(generate(fast, prompts, params)) == expected
    stats = fast.stats
    assert stats.num_graph_steps == 0, "sdpa.math needs exact lengths, so no decode is captured"
    assert stats.steps_in_pieces.total() == stats.num_steps
    assert set(stats.steps_in_pieces) == {"a prompt in the step", "no graph was captured"}
    assert tape.num_replays == 3 * stats.num_steps


def test_a_step_of_more_tokens_than_the_largest_pieces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.core.engine.execution.graph_set.MAX_TOKENS", 16)
    made = piecewise_engine(max_num_batched_tokens=64)
    made.executor.capture(PiecesTape())
    generate(made, [[1] * 40], SamplingParams(max_tokens=2, ignore_eos=True))
    assert made.stats.steps_without_graph == {"more than 16 tokens": 1}
    assert made.stats.steps_in_pieces == {"no graph was captured": 1}


def pieces_of(model: object) -> PiecewiseGraphs:
    return PiecewiseGraphs(model, piecewise_engine().executor.attention, torch.device("cpu"))  # type: ignore[arg-type]


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
    assert "too little memory for piecewise graphs of 64, 32 tokens" in caplog.text
    assert re.search(r"piecewise graphs of up to 16 tokens captured in \d+\.\d s", caplog.text)


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


@pytest.mark.parametrize(
    "shapes",
    [decode_shapes(graph_step(), 3), prefill_shapes(graph_step(), 7), verify_shapes(graph_step(), 1, 2)],
    ids=["decode", "prefill", "verify"],
)
def test_fields_are_aligned_and_lie_apart(shapes: Shapes) -> None:
    inputs = StaticInputs(graph_step(), [shapes])
    planes = [plane for field, shape in zip(inputs.fields(shapes), shapes, strict=True) for plane in (field if shape[0] else ())]
    for field in inputs.fields(shapes):
        assert field.data_ptr() % 16 == 0
    for number, plane in enumerate(planes):
        plane.fill_(number)
    assert all((plane == number).all() for number, plane in enumerate(planes))


@torch.inference_mode()
def test_graphs_compute_their_logits_into_one_buffer() -> None:
    """That of the largest, though a backend that was refused may have tried a batch of one before."""
    made = engine()
    step = graph_step(made.executor.attention, 8, 64)
    inputs = DecodeInputs(step, [decode_shapes(step, 6)])
    backends = {spec: Walk(spec, made.selection.layout, 8) for spec in made.executor.attention.specs}
    graphs = [DecodeGraph(step, inputs, size, backends) for size in (1, 6, 4, 2)]
    assert step.logits is not None
    assert step.logits.shape == (6, 50)
    for graph in graphs:
        step.logits.fill_(77)
        graph.run()
        assert (step.logits != 77).all(-1).tolist() == [row < graph.size for row in range(6)]
