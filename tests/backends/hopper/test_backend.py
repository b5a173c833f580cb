"""What `hopper` claims and refuses, and on a GPU what it answers."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.backends.hopper import backend as attention
from headway.backends.hopper import backend as module
from headway.backends.hopper import schedule, tiles
from headway.backends.hopper.backend import HopperAttention, HopperKernels
from headway.backends.hopper.schedule import Problem, choose
from headway.backends.hopper.tiles import ARCH, SHARED_BYTES, AttentionTile, tiles_of, variant_of
from headway.core.contract.backend import StepLimits, lattice
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheGeometry, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.oracle import attend
from headway.kernels.runtime.nvrtc.compiler import Compiler

pytest.importorskip("cuda.bindings")

SPEC = AttentionSpec(32, 8, 128, 0.1, torch.bfloat16, torch.device("cuda"))


def _reasons(spec: AttentionSpec = SPEC, layout: CacheLayout = NHD, block_size: int = 16, phase: Phase = Phase.EXTEND) -> str:
    return str(HopperAttention.supports(spec, layout, block_size, phase))


def test_another_generation_is_refused_in_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "capability", lambda device: (10, 0))
    support = HopperAttention.supports(SPEC, NHD, 16, Phase.PREFILL)
    assert len(support.reasons) == 1
    assert "9.0" in str(support)
    assert "10.0" in str(support)
    assert "triton" in str(support)


def test_what_it_does_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    assert HopperAttention.supports(SPEC, NHD, 16, Phase.EXTEND)
    assert HopperAttention.supports(SPEC, VLLM_5D, 8, Phase.PREFILL), "a prompt reads no cache"
    change = dataclasses.replace
    assert "phase" in _reasons(phase=Phase.DECODE)
    assert "kv_layout" in _reasons(layout=VLLM_5D)
    assert "block_size" in _reasons(block_size=8)
    assert "dtype" in _reasons(change(SPEC, dtype=torch.float32))
    assert "kv_cache_dtype" in _reasons(change(SPEC, kv_dtype=torch.float8_e4m3fn))
    assert "head_dim" in _reasons(change(SPEC, head_dim=72, v_head_dim=72))
    assert "scale" in _reasons(change(SPEC, scale=-1.0))
    assert "alibi_slopes" in _reasons(change(SPEC, alibi_slopes=(0.5,) * 32))
    assert "kv head" in _reasons(change(SPEC, num_heads=71, num_kv_heads=1))


def test_a_cache_whose_rows_are_scattered_is_refused() -> None:
    geometry = CacheGeometry.of(dataclasses.replace(SPEC, device=torch.device("cpu")), 4, 16)
    whole = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    wide = torch.zeros(4, 16, 8, 132, dtype=torch.bfloat16)[..., :128]
    assert HopperAttention.accepts(LayerCache({"key": whole, "value": whole}, NHD, geometry))
    support = HopperAttention.accepts(LayerCache({"key": whole, "value": wide}, NHD, geometry))
    assert "value" in str(support)
    assert "16 bytes" in str(support)


def test_options_are_numbers() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        module.count_of("hopper", {"num_splits": "none"}, "num_splits")


STEPS = [
    ([1000, 3, 260], [0, 0, 0]),
    ([200, 64, 5], [3000, 0, 700]),
    ([40, 17], [9000, 100]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "features", [{}, {"sliding_window": 130}, {"softcap": 20.0}, {"sinks": tuple(i / 4 for i in range(14))}], ids=str
)
@pytest.mark.parametrize("layout", [NHD, HND], ids=lambda layout: layout.name)
@pytest.mark.parametrize("num_splits", [None, "5"])
def test_answers_match_the_oracle(features: dict[str, object], layout: CacheLayout, num_splits: str | None) -> None:
    """One instance, several steps: counters that a step leaves behind would spoil the next."""
    spec = AttentionSpec(14, 2, 128, 0.09, torch.bfloat16, torch.device("cuda"), **features)  # type: ignore[arg-type]
    if not (support := HopperAttention.available()):
        pytest.skip(str(support))
    backend = HopperAttention(spec, layout, 32, {"num_splits": num_splits} if num_splits else None)
    for query_lens, contexts in STEPS * 2:
        lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
        tables, used = [], 0
        for length in lens:
            tables.append(list(range(used, used - (-length // 32))))
            used = tables[-1][-1] + 1
        geometry = CacheGeometry.of(spec, used, 32)
        shape = layout.shape("key", geometry)
        cache = LayerCache(
            {name: torch.full(shape, torch.nan, dtype=spec.dtype, device="cuda") for name in ("key", "value")}, layout, geometry
        )
        keys, values = ([torch.randn(n, 2, 128, dtype=spec.dtype, device="cuda") for n in lens] for _ in range(2))
        for table, k, v in zip(tables, keys, values, strict=True):
            for name, rows in (("key", k), ("value", v)):
                logical = cache.logical_key if name == "key" else cache.logical_value
                index = torch.arange(len(rows), device="cuda")
                logical[torch.tensor(table, device="cuda")[index // 32], index % 32] = rows.unsqueeze(-1)
        new_k, new_v = (torch.cat([x[-n:] for x, n in zip(each, query_lens, strict=True)]) for each in (keys, values))
        q = torch.randn(sum(query_lens), 14, 128, dtype=spec.dtype, device="cuda")
        out = torch.full_like(q, torch.nan)
        metadata = AttentionMetadata.build(query_lens, contexts, tables, 32, "cuda")
        backend.prefill(q, new_k, new_v, cache, backend.plan(metadata), out)
        for queries, answer, k, v in zip(q.split(query_lens), out.split(query_lens), keys, values, strict=True):
            expected, _ = attend(spec, queries, k.double(), v.double(), len(k) - len(queries))
            error = (answer.double() - expected).norm() / expected.norm()
            assert error < HopperAttention.tolerance[spec.dtype]


CSRC = Path(tiles.__file__).parent / "csrc"
PAIRS = [(dim, dim) for dim in tiles.HEAD_DIMS] + list(tiles.UNEQUAL)
EVERYDAY = [(128, 128)]
KINDS = [pair if pair in EVERYDAY else pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS]
FORMATS = {"int": "i", "float": "f", "long long": "q"}


def _spec(pair: tuple[int, int], **others: object) -> AttentionSpec:
    return AttentionSpec(8, 2, pair[0], 0.1, torch.bfloat16, v_head_dim=pair[1], **others)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("pair", KINDS, ids=str)
def test_every_kind_compiles(compiler: Compiler, pair: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headway")
    chosen = tiles_of(*pair)
    plain, full = _spec(pair), _spec(pair, sliding_window=100, softcap=30.0)
    for spec, tile, block_size in ((plain, chosen.wide, None), (plain, chosen.narrow, 16), (full, chosen.wide, 48)):
        assert variant_of(spec, tile, block_size).compile(ARCH, compiler).startswith(b"\x7fELF")
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_shared_memory_suffices(pair: tuple[int, int]) -> None:
    chosen = tiles_of(*pair)
    assert max(tile.shared_bytes(*pair) for tile in (chosen.wide, chosen.narrow)) <= SHARED_BYTES
    assert chosen.narrow.rows >= tiles.MAX_GROUP, "a group must fit a tile"


def test_the_arguments_are_packed_as_they_are_declared() -> None:
    source = (CSRC / "shape.cuh").read_text()
    body = re.sub(r"//.*", "", source.split("struct Arguments {")[1].split("};")[0])
    declared = ""
    for statement in filter(None, map(str.strip, body.split(";"))):
        kind = "Q" if "*" in statement else next(code for name, code in FORMATS.items() if statement.startswith(name))
        declared += kind * (statement.count(",") + 1)
    packed = re.sub(r"(\d+)(\D)", lambda found: found[2] * int(found[1]), attention.ARGUMENTS.format.lstrip("="))
    assert packed == declared


def test_an_item_has_as_many_numbers_as_its_struct() -> None:
    body = (CSRC / "shape.cuh").read_text().split("struct Item {")[1].split("};")[0]
    assert len(re.findall(r"^\s*int \w+;", body, re.MULTILINE)) == schedule.ITEM_INTS


LENGTHS = st.lists(st.tuples(st.integers(1, 700), st.one_of(st.just(0), st.integers(1, 6000))), min_size=1, max_size=6)


def _problem(lengths: list[tuple[int, int]], group: int = 4, heads: int = 8, window: int | None = None) -> Problem:
    queries = [q for q, _ in lengths]
    kv_lens = numpy.array([sum(each) for each in lengths])
    return Problem(numpy.cumsum([0, *queries]), numpy.array(queries), kv_lens, group, heads, window, 512, 132)


@settings(max_examples=80, deadline=None)
@given(
    lengths=LENGTHS,
    group=st.sampled_from([1, 2, 4, 7, 8]),
    heads=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([64, 128, 256]),
    window=st.one_of(st.none(), st.integers(1, 900)),
    num_splits=st.one_of(st.none(), st.integers(1, 40)),
)
def test_each_row_meets_each_key_once(
    lengths: list[tuple[int, int]], group: int, heads: int, head_dim: int, window: int | None, num_splits: int | None
) -> None:
    tiles = tiles_of(head_dim, head_dim)
    schedule = choose(_problem(lengths, group, heads, window), (tiles.wide, tiles.narrow), num_splits)
    tile = schedule.tile
    rows = tile.rows // group * group
    seen = [numpy.zeros((q * group, -(-(q + c) // tile.keys)), dtype=numpy.int64) for q, c in lengths]
    partials: set[int] = set()
    tickets: dict[tuple[int, int], set[int]] = {}
    starts = numpy.cumsum([0] + [q for q, _ in lengths])
    for start, query_len, kv_len, seq, number, first, last, splits, split, partial, ticket, _ in schedule.items.tolist():
        assert (start, query_len, kv_len) == (starts[seq], lengths[seq][0], sum(lengths[seq]))
        assert first < last
        seen[seq][number * rows : (number + 1) * rows, first:last] += 1
        if splits > 1:
            assert 0 <= partial + split < schedule.num_partials
            assert partial + split not in partials
            partials.add(partial + split)
            tickets.setdefault((seq, number), set()).add(ticket)
    assert len(partials) == schedule.num_partials
    assert all(len(each) == 1 for each in tickets.values())
    assert len(set.union(set(), *tickets.values())) == len(tickets) == schedule.num_tickets
    for (query_len, context), met in zip(lengths, seen, strict=True):
        assert met.max() == 1
        for row in range(query_len * group):
            sees = context + row // group + 1
            lowest = 0 if window is None else max(sees - window, 0)
            assert met[row, lowest // tile.keys : -(-sees // tile.keys)].all()


@pytest.mark.parametrize(("queries", "context", "most"), [(200, 5000, 1.35), (512, 60000, 1.15), (64, 30000, 1.3)])
def test_few_rows_are_cut_so_that_the_gpu_is_occupied(queries: int, context: int, most: float) -> None:
    tiles = tiles_of(128, 128)
    schedule = choose(_problem([(queries, context)]), (tiles.wide, tiles.narrow))
    lengths = schedule.items[:, 6] - schedule.items[:, 5]
    free = [0.0] * 132
    for length in sorted(numpy.tile(lengths, 8).tolist(), reverse=True):
        free[free.index(min(free))] += length
    assert max(free) <= most * lengths.sum() * 8 / 132


def test_many_rows_are_not_cut() -> None:
    tiles = tiles_of(128, 128)
    schedule = choose(_problem([(8192, 0)]), (tiles.wide, tiles.narrow))
    assert schedule.tile == tiles.wide
    assert schedule.num_partials == 0


def test_padding_sequences_have_no_items() -> None:
    metadata = AttentionMetadata.build([1], [-1], [[]], 16)
    spec = AttentionSpec(32, 8, 128, 1.0, torch.bfloat16)
    assert len(choose(Problem.of(metadata, spec, 132), (AttentionTile(2, 128, 2),)).items) == 0


CPU = torch.device("cpu")


class Silent:
    """A kernel that is asked for and does nothing."""

    def allow_shared(self, shared_bytes: int) -> None:
        """As much as wanted."""

    def __call__(self, *launch: object) -> None:
        """Launch."""


LIMITS = StepLimits(max_num_tokens=4096, max_num_seqs=64, max_model_len=16384)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 1, 256)])
def test_no_step_takes_a_kernel_that_the_warm_up_has_not_met(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    met: set[Any] = set()

    def load(variant: Any, *rest: object) -> Silent:
        met.add(variant)
        return Silent()

    monkeypatch.setattr(attention, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    layer = HopperKernels(AttentionSpec(num_heads, num_kv_heads, head_dim, 0.1, torch.bfloat16, CPU), 16)

    def plan(query_lens: list[int], context_lens: list[int]) -> None:
        ends = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        tables = [list(range(-(-end // 16))) for end in ends]
        step = AttentionMetadata.build(query_lens, context_lens, tables, 16, CPU)
        for view in filter(None, (step.prefill, step.decode)):
            layer.plan(view)

    for phase in (Phase.PREFILL, Phase.EXTEND):
        for step in lattice(phase, LIMITS):
            plan([each.query_len for each in step], [each.context_len for each in step])
    warmed = set(met)
    assert len(warmed) == 4, "wide and narrow tiles, with and without a cache"
    draw = random.Random(3)
    for _ in range(60):
        count = draw.choice((1, 2, 5, 30))
        lengths = [draw.randint(2, LIMITS.max_num_tokens // count) for _ in range(count)]
        plan(lengths, [draw.choice((0, draw.randint(1, 12000))) for _ in lengths])
    assert met == warmed
