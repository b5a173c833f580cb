"""What `hopper` claims and refuses, and on a GPU what it answers."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from pathlib import Path
from struct import Struct
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.backends.hopper import backend as attention
from headway.backends.hopper import decode, latent, schedule, tiles
from headway.backends.hopper.backend import HopperAttention, HopperKernels
from headway.backends.hopper.decode import HopperDecoding
from headway.backends.hopper.latent import HopperLatent
from headway.backends.hopper.schedule import Problem, choose
from headway.backends.hopper.tiles import ARCH, SHARED_BYTES, AttentionTile, tiles_of, variant_of
from headway.core.contract.backend import AttentionBackend, StepLimits, lattice
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND, LATENT, NHD, VLLM_5D, CacheGeometry, CacheLayout, LayerCache, write_rows
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import make_case, reference, relative_error, run_backend
from headway.kernels.runtime.nvrtc.compiler import Compiler
from headway.registry import Registry

pytest.importorskip("cuda.bindings")

SPEC = AttentionSpec(32, 8, 128, 0.1, torch.bfloat16, torch.device("cuda"))


def _reasons(spec: AttentionSpec = SPEC, layout: CacheLayout = NHD, block_size: int = 16, phase: Phase = Phase.EXTEND) -> str:
    return str(HopperAttention.supports(spec, layout, block_size, phase))


def test_another_generation_is_refused_in_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "capability", lambda device: (10, 0))
    support = HopperAttention.supports(SPEC, NHD, 16, Phase.PREFILL)
    assert len(support.reasons) == 1
    assert "9.0" in str(support)
    assert "10.0" in str(support)
    assert "triton" in str(support)


def test_what_it_does_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "capability", lambda device: (9, 0))
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


@pytest.mark.parametrize("backend", [HopperAttention, HopperDecoding, HopperLatent])
def test_a_cache_whose_rows_are_scattered_is_refused(backend: type[AttentionBackend]) -> None:
    layout, name, heads, width = (LATENT, "key", 1, 576) if backend is HopperLatent else (NHD, "value", 8, 128)
    changes = {"head_dim": 576, "v_head_dim": 512, "num_kv_heads": 1, "value_in_key": True} if backend is HopperLatent else {}
    spec = dataclasses.replace(SPEC, device=torch.device("cpu"), **changes)
    cache = layout.allocate(CacheGeometry.of(spec, 2, 16))
    assert backend.accepts(cache)
    wide = torch.zeros(2, 16, heads, width + 4, dtype=torch.bfloat16)[..., :width]
    support = str(backend.accepts(LayerCache({**cache.tensors, name: wide}, layout, cache.geometry)))
    assert f"cache, {name}: needs rows in one piece, at multiples of 16 bytes" in support


@pytest.mark.parametrize(("name", "backend"), [("hopper_decode", HopperDecoding), ("hopper_mla", HopperLatent)])
def test_the_registry_takes_their_claims(registry: Registry, name: str, backend: type[AttentionBackend]) -> None:
    assert registry.backend(name) is backend
    if not torch.cuda.is_available():
        assert str(registry.availability(name)) == "no: device: needs a CUDA GPU, got none"


def test_options_are_integers() -> None:
    assert HopperAttention.count_option({"num_splits": "12"}, "num_splits") == 12
    assert HopperAttention.count_option({"num_splits": 3}, "num_splits", 3) == 3  # type: ignore[dict-item] -- natural in Python
    for wrong in ("none", "0", "-1", "1.5", "\u00b2", "", "9" * 5000, True):
        with pytest.raises(ConfigError, match="an integer of at least 1: splits of the longest"):
            HopperAttention.count_option({"num_splits": wrong}, "num_splits")  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="from 1 to 2"):
        HopperLatent.count_option({"cluster": "3"}, "cluster", 2)


STEPS = [[(1000, 1000), (3, 3), (260, 260)], [(200, 3200), (64, 64), (5, 705)], [(40, 9040), (17, 117)]]
"""New tokens of each sequence, and how long it is then."""


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
    for lens in STEPS * 2:
        case = make_case(lens, spec, layout, 32, write_rows, poison=math.nan)
        assert relative_error(run_backend(backend, case), reference(case), case) < HopperAttention.tolerance[spec.dtype]


CSRC = Path(tiles.__file__).parent / "csrc"
PAIRS = [(dim, dim) for dim in (*tiles.HEAD_DIMS, tiles.WIDE_HEAD_DIM)] + list(tiles.UNEQUAL)
FORMATS = {"int": "i", "float": "f", "long long": "q"}


def _spec(pair: tuple[int, int], group: int = 4, **others: object) -> AttentionSpec:
    return AttentionSpec(2 * group, 2, pair[0], 0.1, torch.bfloat16, v_head_dim=pair[1], **others)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.sampled(3, then="soak")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_kind_compiles(compiler: Compiler, pair: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headway")
    plain, full = _spec(pair), _spec(pair, sliding_window=100, softcap=30.0)
    chosen = tiles_of(plain)
    for spec, tile, block_size in ((plain, chosen.wide, None), (plain, chosen.narrow, 16), (full, chosen.wide, 48)):
        assert variant_of(spec, tile, block_size).compile(ARCH, compiler).startswith(b"\x7fELF")
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


@pytest.mark.parametrize("group", [1, 7, 12, 48, 64])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_shared_memory_suffices(pair: tuple[int, int], group: int) -> None:
    chosen = tiles_of(_spec(pair, group))
    assert max(tile.shared_bytes(*pair) for tile in (chosen.wide, chosen.narrow)) <= SHARED_BYTES
    assert chosen.narrow.rows >= tiles.MAX_GROUP, "a group must fit a tile"


@pytest.mark.parametrize("group", range(1, 65))
def test_a_tile_copies_all_tokens_to_which_its_rows_belong(group: int) -> None:
    for tile in (tiles_of(_spec((128, 128), group)).wide, tiles_of(_spec((64, 64), group)).narrow):
        used, space = tile.rows_used(group), tile.rows + tile.padding
        for first in (number * used for number in range(group)):
            assert (first + used - 1) // group - first // group < tile.tokens(group) <= space // group
        assert used == tile.rows or tile.padding == used % group == 0
    assert tiles_of(_spec((128, 128), 12)).wide.rows_used(12) == 128


@pytest.mark.parametrize(
    ("source", "struct", "packed"),
    [
        ("shape.cuh", "Arguments", attention.ARGUMENTS),
        ("decode.cu", "DecodeArguments", decode.ARGUMENTS),
        ("latent.cuh", "LatentArguments", latent.ARGUMENTS),
    ],
)
def test_the_arguments_are_packed_as_they_are_declared(source: str, struct: str, packed: Struct) -> None:
    body = re.sub(r"//.*", "", (CSRC / source).read_text().split(f"struct {struct} {{")[1].split("};")[0])
    declared = ""
    for statement in filter(None, map(str.strip, body.split(";"))):
        kind = "Q" if "*" in statement else next(code for name, code in FORMATS.items() if statement.startswith(name))
        declared += kind * (statement.count(",") + 1)
    assert re.sub(r"(\d+)(\D)", lambda found: found[2] * int(found[1]), packed.format.lstrip("=")).rstrip("x") == declared


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
    group=st.sampled_from([1, 2, 4, 7, 12]),
    heads=st.sampled_from([1, 2, 8, 70]),
    head_dim=st.sampled_from([64, 128, 256, 512]),
    window=st.one_of(st.none(), st.integers(1, 900)),
    num_splits=st.one_of(st.none(), st.integers(1, 40)),
)
def test_each_row_meets_each_key_once(
    lengths: list[tuple[int, int]], group: int, heads: int, head_dim: int, window: int | None, num_splits: int | None
) -> None:
    tiles = tiles_of(_spec((head_dim, head_dim), group))
    schedule = choose(_problem(lengths, group, heads, window), (tiles.wide, tiles.narrow), num_splits)
    tile = schedule.tile
    rows = tile.rows_used(group) * max(tile.cluster, 1)
    seen = [numpy.zeros((heads, q * group, -(-(q + c) // tile.keys)), dtype=numpy.int64) for q, c in lengths]
    partials: set[int] = set()
    counters: dict[tuple[int, int, int], set[int]] = {}
    starts = numpy.cumsum([0] + [q for q, _ in lengths])
    for start, query_len, kv_len, seq, number, first, last, splits, split, partial, head in schedule.items.tolist():
        assert (start, query_len, kv_len) == (starts[seq], lengths[seq][0], sum(lengths[seq]))
        assert first < last
        seen[seq][head, number * rows : (number + 1) * rows, first:last] += 1
        if splits > 1:
            assert 0 <= partial + split < schedule.num_partials
            assert partial + split not in partials
            partials.add(partial + split)
            counters.setdefault((seq, number, head), set()).add(partial)
    assert len(partials) == schedule.num_partials
    assert all(len(each) == 1 for each in counters.values())
    assert len(set.union(set(), *counters.values())) == len(counters)
    for (query_len, context), met in zip(lengths, seen, strict=True):
        assert met.max() == 1
        for row in range(query_len * group):
            sees = context + row // group + 1
            lowest = 0 if window is None else max(sees - window, 0)
            assert met[:, row, lowest // tile.keys : -(-sees // tile.keys)].all()


@pytest.mark.parametrize(
    ("heads", "queries", "context", "most"),
    [
        ("32/8/128", 200, 5000, 1.35),
        ("32/8/128", 512, 60000, 1.08),
        ("32/8/128", 64, 30000, 1.3),
        ("40/10/128", 900, 50000, 1.05),
        ("40/10/128", 3072, 9216, 1.08),
        ("14/2/64", 900, 50000, 1.08),
        ("96/8/128", 170, 4130, 1.1),
    ],
)
def test_all_programs_end_at_nearly_the_same_time(heads: str, queries: int, context: int, most: float) -> None:
    num_heads, num_kv_heads, dim = map(int, heads.split("/"))
    group = num_heads // num_kv_heads
    tiles = tiles_of(_spec((dim, dim), group))
    schedule = choose(_problem([(queries, context)], group, num_kv_heads), (tiles.wide, tiles.narrow))
    lengths = schedule.items[:, 6] - schedule.items[:, 5]
    free = [0.0] * 132
    for length in lengths.tolist():
        free[free.index(min(free))] += length
    assert max(free) <= most * lengths.sum() / 132


def test_many_rows_are_not_cut() -> None:
    tiles = tiles_of(_spec((128, 128)))
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


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (14, 2, 64), (8, 1, 256), (16, 2, 512)])
def test_no_step_takes_a_kernel_unmet_in_warm_up(
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
