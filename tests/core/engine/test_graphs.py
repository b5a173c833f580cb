"""What a captured decode step is fed: the same numbers that a step's metadata holds, and padding that disturbs nobody."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, BackendInfo, Backends, GraphLevel
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.engine.attention import PagedAttention
from headway.core.engine.blocks import BlockManager
from headway.core.engine.config import EngineConfig
from headway.core.engine.engine import Engine
from headway.core.engine.graphs import DecodeGraph, DecodeGraphs, _Inputs, capture_sizes
from headway.core.engine.scheduler import Scheduled, Scheduler
from headway.core.engine.sequence import Sequence
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import greedy
from headway.registry import create_registry, hookimpl
from tiny import TinyModel

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
ROWS = 8


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (1000, [1, 2, 4, *range(8, 257, 8)])],
)
def test_batch_sizes(max_num_seqs: int, sizes: list[int]) -> None:
    assert capture_sizes(max_num_seqs) == sizes


def graphs() -> DecodeGraphs:
    attention = PagedAttention([], [], lambda *_: None)
    return DecodeGraphs(TinyModel(), attention, greedy, torch.zeros(ROWS + 1, dtype=torch.int64), BLOCK_SIZE, MAX_MODEL_LEN)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=6),
    spare=st.integers(0, 6),
    overlapped=st.booleans(),
)
def test_a_replay_is_fed_what_the_metadata_says(prompts: list[list[int]], spare: int, overlapped: bool) -> None:
    """Through admission, growth, preemption and readmission in another row."""
    scheduler = Scheduler(BlockManager(MAX_MODEL_LEN // BLOCK_SIZE + spare, BLOCK_SIZE, False), 64, ROWS)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=15)
        scheduler.add(Sequence(str(number), 0, prompt, params, frozenset(), MAX_MODEL_LEN))
    captured, flying = graphs(), []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        if step and all(share.num_new_tokens == 1 and share.context_len for share in step):
            check(captured, step)
        scheduler.launched(step)
        read, flying = (flying, step) if overlapped else (step, [])
        for share in read:
            if share.samples:
                share.seq.num_pending -= 1
                if not share.seq.finished:
                    share.seq.append(len(share.seq.token_ids) % 7)
        scheduler.remove_finished()


def check(captured: DecodeGraphs, step: list[Scheduled]) -> None:
    count, width = len(step), captured._width
    longs = numpy.full((2, ROWS), 99, dtype=numpy.int64)
    ints = numpy.full((2, ROWS), 99, dtype=numpy.int32)
    table = numpy.full((ROWS, width), 99, dtype=numpy.int32)
    captured.fill(longs, ints, table, step)
    (rows, slots), (positions, seq_lens) = longs.tolist(), ints.tolist()
    metadata = AttentionMetadata.build(
        [1] * count, [share.context_len for share in step], [share.seq.blocks for share in step], BLOCK_SIZE
    )
    assert slots == metadata.slot_mapping.tolist() + [-1] * (ROWS - count)
    assert seq_lens == metadata.kv_lens + [0] * (ROWS - count)
    assert positions[:count] == metadata.context_lens.tolist()
    for row, share in enumerate(step):
        assert table[row, : len(share.seq.blocks)].tolist() == share.seq.blocks
    assert rows[:count] == [share.seq.row for share in step]
    assert set(rows[count:]) <= {ROWS}, "padding writes its token beside everybody's"
    assert not table[count:].any(), "padding points at a block that exists"


def test_only_a_step_of_decodes_within_the_captured_sizes_is_replayed() -> None:
    captured = graphs()
    captured._size_of = [1, 1, 2]
    seq = Sequence("r", 0, [1] * 9, SamplingParams(), frozenset(), MAX_MODEL_LEN)
    seq.newest_at = 8
    decode, prefill, extend = Scheduled(seq, 1, 8, True), Scheduled(seq, 9, 0, True), Scheduled(seq, 3, 6, True)
    assert captured.size_for([decode]) == 1
    assert captured.size_for([decode] * 2) == 2
    assert captured.size_for([decode] * 3) is None
    assert captured.size_for([prefill]) is None
    assert captured.size_for([extend, decode]) is None
    seq.newest_at = -1
    assert captured.size_for([decode]) is None, "its token never was on the device"


class Walk(AttentionBackend):
    """Reads what a graph's kernels may: the metadata's tensors, when it runs."""

    name = "walk"
    capabilities = Capabilities(phases=frozenset(Phase), devices=("cpu",))
    graph_level = GraphLevel.DECODE

    def plan(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def decode(self, q: Tensor, cache: LayerCache, plan: AttentionMetadata, out: Tensor) -> None:
        group = self.spec.group_size
        for row, kv_len in enumerate(plan.seq_lens.tolist()):
            if kv_len == 0:
                out[row] = math.nan  # nobody reads what padding computes
                continue
            places = torch.arange(kv_len)
            slots = plan.block_table[row, places // plan.block_size].long() * plan.block_size + places % plan.block_size
            k, v = (rows.repeat_interleave(group, dim=1) for rows in cache.gather(slots))
            weights = (torch.einsum("hd,nhd->hn", q[row], k) * self.spec.scale).softmax(-1)
            out[row] = torch.einsum("hn,nhd->hd", weights, v)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: AttentionMetadata, out: Tensor) -> None:
        starts = plan.query_start_loc.tolist()
        for row, (first, last) in enumerate(pairwise(starts)):
            for token in range(first, last):
                kv_len = int(plan.seq_lens[row]) - (last - 1 - token)
                one = SimpleNamespace(seq_lens=torch.tensor([kv_len]), block_table=plan.block_table[row : row + 1])
                one.block_size = plan.block_size
                self.decode(q[token : token + 1], cache, one, out[token : token + 1])  # type: ignore[arg-type]


class WalkPlugin:
    @hookimpl
    def headway_register_backends(self) -> list[BackendInfo]:
        return [BackendInfo("walk", "for tests", lambda: Walk, api_version=2)]


def engine(**options: object) -> Engine:
    config = EngineConfig(attn_backend="walk", block_size=8, max_num_batched_tokens=24, max_model_len=64, max_num_seqs=6)
    registry = create_registry([WalkPlugin()], load_entry_points=False)
    return Engine(TinyModel(), registry, replace(config, kv_cache_memory=9 * 8 * 512, **options))


def with_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give a CPU's engine graphs that run their step instead of replaying it. Returns where their sizes are noted."""
    runner, sizes = engine._runner, []
    graphs = DecodeGraphs(TinyModel(), runner._attention, greedy, runner._newest, 8, 64)
    inputs = _Inputs(6, graphs._width, torch.device("cpu"))
    backends = runner._selector.backends_for(Phase.DECODE)

    def replay(graph: DecodeGraph, step: list[Scheduled]) -> tuple[Tensor, Tensor]:
        graph.load(step)
        runner._attention.begin_graph(graph._metadata, backends)
        _, tokens = graph.run()
        sizes.append(graph.size)
        assert graphs._logits is not None
        return graphs._logits[: len(step)], tokens[: len(step)]

    monkeypatch.setattr(DecodeGraph, "replay", replay)
    for size in (6, 4, 2, 1):
        graphs._graphs[size, "walk"] = DecodeGraph(graphs, inputs, size, backends)
    graphs._size_of = [1, 1, 2, 4, 4, 6, 6]
    runner._graphs = graphs
    return sizes


@torch.inference_mode()
def test_graphs_compute_their_logits_into_one_buffer() -> None:
    """That of the largest, though a backend that was refused may have tried a batch of one before."""
    runner = engine()._runner
    captured = DecodeGraphs(TinyModel(), runner._attention, greedy, runner._newest, 8, 64)
    inputs, backends = _Inputs(6, captured._width, torch.device("cpu")), runner._selector.backends_for(Phase.DECODE)
    made = [DecodeGraph(captured, inputs, size, backends) for size in (1, 6, 4, 2)]
    assert captured._logits is not None
    assert captured._logits.shape == (6, 50)
    for graph in made:
        captured._logits.fill_(77)
        runner._attention.begin_graph(graph._metadata, backends)
        graph.run()
        assert (captured._logits != 77).all(-1).tolist() == [row < graph.size for row in range(6)]


@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("wish", [{"temperature": 0}, {"seed": 3}, {"seed": 3, "top_k": 5}], ids=str)
def test_steps_through_static_inputs_write_the_same_tokens(
    overlapped: bool, wish: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through padding, preemption, prefix hits, and sequences that end by a token while the next step is under way."""

    def run(engine: Engine) -> list[tuple[list[int], str | None]]:
        random = Random(1)
        seqs = []
        for number in range(20):
            prompt = [random.randrange(50) for _ in range(random.randint(1, 30))] if number % 4 else [7] * 17
            stops = random.sample(range(50), 8) if number % 3 == 0 else []
            most = random.randint(8, 30) if number < 19 else 33  # the last goes on alone
            params = SamplingParams(max_tokens=most, stop_token_ids=stops, **wish)
            seqs += engine.add_request(str(number), prompt, params)
        while engine.has_unfinished:
            engine.step()
        engine.blocks.check_integrity([])
        return [(seq.output_token_ids, seq.finish_reason) for seq in seqs]

    plain, fast = engine(), engine(async_scheduling=overlapped)
    sizes = with_graphs(fast, monkeypatch)
    expected = run(plain)
    assert run(fast) == expected
    assert plain.scheduler.num_preemptions > 0
    assert fast.scheduler.num_preemptions > 0
    assert {reason for _, reason in expected} == {"stop", "length"}
    assert set(sizes) == {1, 2, 4, 6}


class Captured:
    """Stands for a captured graph."""

    def __init__(self, owner: DecodeGraphs, inputs: _Inputs, size: int, backends: Backends) -> None:
        if size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def capture(self, pool: object, stream: object) -> None:
        pass


def test_sizes_for_which_memory_is_short_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headway.core.engine.graphs.DecodeGraph", Captured)
    for name, answer in (("graph_pool_handle", None), ("Stream", None), ("empty_cache", None), ("mem_get_info", (0, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    backends = engine()._runner._selector.backends_for(Phase.DECODE)
    captured = graphs()
    with caplog.at_level("INFO", "headway"):
        captured.capture([1, 2, 4, 6, 8], lambda size: [backends])
    assert [record.message.split(":", 1)[1] for record in caplog.records] == [
        " no memory for batches of 8, 6: those are launched kernel by kernel",
        " 3 of decode captured, 3 batch sizes up to 4, in 0.0 s and 0 MB: walk",
    ]
    assert captured._size_of == [1, 1, 2, 4, 4]


class Uncapturable(Walk):
    name = "uncapturable"
    graph_level = GraphLevel.NONE


def test_a_backend_that_cannot_be_captured_is_named_with_the_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, answer in (("graph_pool_handle", None), ("Stream", None), ("mem_get_info", (0, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    made = engine()
    spec = made._runner._attention.specs[0]
    backends = {spec: Uncapturable(spec, made.selection.layout, 8)}
    runner = made._runner
    captured = DecodeGraphs(TinyModel(), runner._attention, greedy, runner._newest, 8, 64)
    with caplog.at_level("INFO", "headway"):
        captured.capture([1, 2, 4], lambda size: [backends])
    (record,) = caplog.records
    assert "uncapturable cannot be captured (graph_level: needs DECODE or higher, got NONE" in record.message
    assert re.search(r"takes the host \d+\.\d ms$", record.message)
    assert captured.size_for([]) is None
