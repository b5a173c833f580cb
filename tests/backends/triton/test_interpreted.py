"""The Triton kernels against float64 under the interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from backend_cases import CASES, LAYOUTS, SPECS, case_of, spec
from decode_writes import LENGTHS, error_after_writing, new_token_case, write_and_decode
from headway.backends.triton import configs
from headway.backends.triton.backend import TritonAttention
from headway.backends.triton.write_kernel import Writer
from headway.core.contract import layout as layouts
from headway.core.contract.errors import BackendError, ConfigError
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import HND, LATENT, NHD, NHD_INT8, VLLM_5D, CacheGeometry, CacheLayout, LayerCache
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, parse_case, reference, reference_with_lse, relative_error, run_backend
from headway.testing.kit.checks.answers import dependent, invariance_case
from latent_layers import IN_KEY, UNEQUAL, assert_small, dense_errors, errors_of, strided
from shared_plans import errors_over_shared_plans

FP8 = torch.float8_e4m3fn
LAYERS = {name: layer for name, layer in SPECS.items() if layer.head_dim in TritonAttention.capabilities.head_dims}


def rare(value: object) -> object:
    """A value of a parameter that the everyday subset leaves out."""
    return pytest.param(value, marks=pytest.mark.slow)


def error_of(case: Case, **options: str) -> float:
    for view in (case.metadata.prefill, case.metadata.decode):
        if view is not None:
            support = TritonAttention.supports(case.spec, case.cache.layout, case.cache.block_size, view.phase)
            assert support, str(support)
    backend = TritonAttention(case.spec, case.cache.layout, case.cache.block_size, options)
    return relative_error(run_backend(backend, case), reference(case), case)


GRID = [(spec_name, case_name) for spec_name in LAYERS for case_name in CASES]


def everyday(spec_name: str, case_name: str) -> bool:
    """Every case of one layer, and every layer in one case that has all phases."""
    return spec_name == "gqa 2" or case_name == "mixed"


@pytest.mark.parametrize(
    ("spec_name", "case_name"), [pytest.param(*cell, marks=[] if everyday(*cell) else pytest.mark.slow) for cell in GRID]
)
def test_matches_float64(case_name: str, spec_name: str) -> None:
    assert error_of(case_of(case_name, LAYERS[spec_name])) < 2e-6


@pytest.mark.parametrize("layout", [NHD, VLLM_5D, rare(HND)], ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec_name", ["gqa 2", rare("window")])
def test_a_tile_of_keys_out_of_several_blocks(spec_name: str, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where tiles have 64 keys; also where blocks lie an odd number of elements apart."""
    config = configs.PrefillConfig(block_m=16, block_n=32, num_warps=4, num_stages=1)
    monkeypatch.setattr(configs, "INTERPRETER", dataclasses.replace(configs.INTERPRETER, extend=config, extend_gather=config))
    case = case_of("mixed", LAYERS[spec_name], layout)
    assert error_of(case) < 2e-6
    if layout is NHD:
        apart = [
            F.pad(tensor.flatten(1), (0, 1))[:, :-1].unflatten(1, tensor.shape[1:])
            for tensor in (case.cache.key, case.cache.value)
        ]
        assert apart[0].stride(0) % 2 == 1
        odd = LayerCache.wrap(dict(zip(("key", "value"), apart, strict=True)), NHD, case.spec)
        assert error_of(dataclasses.replace(case, cache=odd)) < 2e-6


@pytest.mark.parametrize("splits", [rare({}), {"extend_splits": "3"}], ids=str)
@pytest.mark.parametrize("window", [rare(None), rare(1), 37, rare(60)])
def test_queries_that_see_later_keys(window: int | None, splits: dict[str, str]) -> None:
    layer = spec(causal=False, dense=True, sliding_window=window)
    assert error_of(case_of("1q70_1q5_1q1", layer), **splits) < 2e-6


@pytest.mark.parametrize("case_name", ["mixed", rare("verify")])
@pytest.mark.parametrize("block_size", [rare(16), 48])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layouts_and_block_sizes(layout: CacheLayout, block_size: int, case_name: str) -> None:
    assert error_of(case_of(case_name, spec(), layout, block_size)) < 2e-6


@pytest.mark.parametrize(
    "head_dim", [8, *map(rare, (24, 64)), 80, rare(96), 128, *map(rare, (136, 200, 256)), 264, 320, rare(504), 512]
)
@pytest.mark.parametrize("case_name", ["mixed"])
def test_head_dims(head_dim: int, case_name: str) -> None:
    assert error_of(case_of(case_name, spec(head_dim=head_dim), VLLM_5D)) < 2e-6


@pytest.mark.parametrize("options", [{}, {"num_splits": "3"}], ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, rare(136), 320, rare(512)])
@pytest.mark.parametrize("kind", ["int8", "sinks", "value of 40"])
def test_head_dims_with_features(head_dim: int, kind: str, options: dict[str, str]) -> None:
    """Rows that pairs of elements fill too little, that take two tiles, or whose partial results a second launch merges."""
    changes = {"int8": {"kv_dtype": torch.int8}, "sinks": {"sinks": (0.3, -1.0) * 2, "sliding_window": 21}}
    layer = spec(head_dim=head_dim, **changes.get(kind, {"v_head_dim": 40}))
    case = case_of("2q4s21_1q8s70_3q1s65_1q9", layer, NHD_INT8 if kind == "int8" else NHD)
    assert error_of(case, **options) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec_name", ["gqa 2", "window softcap alibi"])
@pytest.mark.parametrize("case_name", ["mixed", rare("extend")])
def test_half_precision(dtype: torch.dtype, spec_name: str, case_name: str) -> None:
    layer = dataclasses.replace(LAYERS[spec_name], dtype=dtype)
    assert error_of(case_of(case_name, layer)) < TritonAttention.tolerance[dtype]


@pytest.mark.parametrize("group", [rare(1), rare(4), 7, rare(8)])
@pytest.mark.parametrize("case_name", ["2q4s21_1q8s70_3q1s65", "1q13"])
def test_group_sizes(group: int, case_name: str) -> None:
    layer = spec(num_heads=2 * group, num_kv_heads=2)
    case = make_case(parse_case(case_name, 8), layer, NHD, 16, layouts.write_rows, decode_query_len=8, poison=math.nan)
    assert error_of(case) < 2e-6


@pytest.mark.parametrize("num_splits", ["1", rare("2"), "3", rare("16")])
def test_any_number_of_splits_gives_the_same(num_splits: str) -> None:
    case = case_of("2q1s16_1q1s17_1q1s95_1q1s300", spec(sinks=(0.3, -1.0, 2.0, 0.0)), padding_rows=2)
    assert error_of(case, num_splits=num_splits) < 2e-6


SPLIT_EXTENDS = {
    "plain": {},
    "window": {"sliding_window": 70},
    "softcap alibi sinks": {"softcap": 2.0, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625), "sinks": (0.3, -1.0, 2.0, 0.0)},
    "fp8": {"kv_dtype": FP8, "k_scale": 0.02, "v_scale": 0.05},
    "int8": {"kv_dtype": torch.int8, "softcap": 2.0},
}


SHARED_KEYS = [
    (NHD_INT8 if name == "int8" else (NHD, HND, VLLM_5D)[number % 3], name, extend_splits)
    for number, (name, extend_splits) in enumerate(itertools.product(SPLIT_EXTENDS, ("1", "2", "5", "100")))
]
"""Every feature in every number of splits, each of which meets every layout."""


@pytest.mark.parametrize(
    ("layout", "name", "extend_splits"),
    [pytest.param(*each, marks=() if each[1:] == ("softcap alibi sinks", "5") else pytest.mark.slow) for each in SHARED_KEYS],
    ids=lambda value: value.name if isinstance(value, CacheLayout) else value,
)
def test_programs_that_share_the_keys_of_a_query_tile_give_the_same(layout: CacheLayout, name: str, extend_splits: str) -> None:
    case = case_of("1q30s160_1q3s17_1q1s1", spec(**SPLIT_EXTENDS[name]), layout, 16)
    backend = TritonAttention(case.spec, layout, 16, {"extend_splits": extend_splits})
    assert (backend.plan(case.metadata.prefill).schedule.merges > 0) == (extend_splits != "1")
    lse = torch.full((case.spec.num_heads, len(case.q)), math.nan)
    out = run_backend(backend, case, lse)
    expected, sums = reference_with_lse(case)
    assert relative_error(out, expected, case) < 2e-6
    assert float((lse - sums).abs().max()) < 2e-5


@pytest.mark.slow
def test_many_results_of_a_decode_are_merged_in_two_goes() -> None:
    case = case_of("1q1s400_1q1s100_1q1s130_1q1s5", spec(sinks=(0.3, -1.0, 2.0, 0.0)))
    backend = TritonAttention(case.spec, NHD, 16, {"num_splits": "64"})
    for _ in range(2):  # a second time: the counters are back at zero
        assert relative_error(run_backend(backend, case), reference(case), case) < 2e-6
    assert not backend.decode_kernels.workspace.counters(1).any()


def error_of_writing(
    layer: AttentionSpec, layout: CacheLayout = NHD, block_size: int = 16, spoiled: float = math.nan, **options: str
) -> float:
    case = new_token_case(LENGTHS, layer, layout, block_size)
    backend = TritonAttention(layer, layout, block_size, options)
    return error_after_writing(case, lambda: write_and_decode(backend, case), spoiled)


@pytest.mark.parametrize("dtype", [torch.float32, rare(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("block_size", [16, rare(48)])
@pytest.mark.parametrize("layout", [VLLM_5D, rare(NHD), rare(HND)], ids=lambda layout: layout.name)
def test_decode_writes_the_new_token(layout: CacheLayout, block_size: int, dtype: torch.dtype) -> None:
    error = error_of_writing(spec(dtype=dtype), layout, block_size, num_splits="3")
    assert error < TritonAttention.tolerance[dtype]


@pytest.mark.parametrize("spec_name", [rare(name) for name in LAYERS if name != "gqa 2"])
def test_decode_that_writes_computes_every_feature(spec_name: str) -> None:
    assert error_of_writing(LAYERS[spec_name], VLLM_5D, num_splits="2") < 2e-6


@pytest.mark.parametrize("num_splits", [rare("1"), "5", rare("32")])
def test_decode_that_writes_takes_any_number_of_splits(num_splits: str) -> None:
    assert error_of_writing(spec(sinks=(0.3, -1.0, 2.0, 0.0)), spoiled=3e38, num_splits=num_splits) < 2e-6


def test_more_query_heads_than_a_tile_holds_write_one_token() -> None:
    assert error_of_writing(spec(num_heads=80, num_kv_heads=1)) < 2e-6


def test_decode_writes_where_it_keeps_cache_and_bits() -> None:
    assert TritonAttention(spec(), NHD, 16).decode_writes
    assert not TritonAttention(spec(kv_dtype=FP8), NHD, 16).decode_writes
    assert not TritonAttention(spec(kv_dtype=torch.int8), NHD_INT8, 16).decode_writes
    assert not TritonAttention(spec(invariance=Invariance.BATCH), NHD, 16).decode_writes
    with pytest.raises(ConfigError, match="needs 1, in deterministic mode, got 3"):
        TritonAttention(spec(invariance=Invariance.BATCH), NHD, 16, {"extend_splits": "3"})


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("case_name", ["decode ragged", rare("extend"), rare("prefill")])
def test_fp8_cache(layout: CacheLayout, case_name: str) -> None:
    assert error_of(case_of(case_name, spec(kv_dtype=FP8, k_scale=0.02, v_scale=0.05), layout)) < 2e-6


INT8_LAYERS = {
    "plain": {},
    "window softcap alibi": {"sliding_window": 9, "softcap": 2.0, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    "sinks, head_dim 80, longer value": {"sinks": (0.3, -1.0, 2.0, 0.0), "head_dim": 80, "v_head_dim": 96},
}


@pytest.mark.parametrize("block_size", [16, rare(48)])
@pytest.mark.parametrize("case_name", ["mixed", "verify", rare("prefill"), rare("decode ragged"), rare("extend")])
@pytest.mark.parametrize("name", INT8_LAYERS)
def test_int8_cache(name: str, case_name: str, block_size: int) -> None:
    layer = spec(kv_dtype=torch.int8, **INT8_LAYERS[name])
    assert_small(errors_of(TritonAttention, case_of(case_name, layer, NHD_INT8, block_size)))


@pytest.mark.slow
@pytest.mark.parametrize("values", [1.0, 1e-3], ids="values of {}".format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int8_cache_in_half_precision(dtype: torch.dtype, values: float) -> None:
    """Small values have small scales, which weights in float16 could not take without losing their digits."""
    lens = parse_case("1q30s300_2q1s200", 1)
    write = layouts.write_rows
    case = make_case(
        lens,
        spec(dtype=dtype, kv_dtype=torch.int8),
        NHD_INT8,
        16,
        lambda k, v, *rest: write(k, v * values, *rest),
        poison=math.nan,
    )
    assert error_of(case) < TritonAttention.tolerance[dtype]


@pytest.mark.slow
def test_int8_scales_are_read_by_strides_and_any_split() -> None:
    """Another order of the scales, the 5-d cache, and programs that share a sequence's keys."""
    tokens = ("block", "slot", "head")
    layout = CacheLayout(
        "mine", {**VLLM_5D.tensors, "key_scale": ("block", "head", "slot"), "value_scale": tokens}, 16, NHD_INT8.dtypes
    )
    case = case_of("2q1s70_1q1s300_1q5s40", spec(kv_dtype=torch.int8), layout)
    for splits in ("1", "5"):
        backend = TritonAttention(case.spec, layout, 16, {"num_splits": splits})
        assert relative_error(run_backend(backend, case), reference(case), case) < 2e-6


@pytest.mark.parametrize("tokens", [rare(1), 5, rare(300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_writer_writes_what_the_readable_one_writes(layout: CacheLayout, dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    geometry = CacheGeometry(24, 16, 2, 80, dtype, torch.device("cpu"))
    scales = (0.5, 0.25) if dtype == FP8 else (1.0, 1.0)
    k, v = (torch.randn(tokens, 2, 80, generator=generator).mul(3) for _ in range(2))
    if dtype == FP8:  # the interpreter loses the carry when it rounds to fp8: numbers that need no rounding
        k, v = (t.to(FP8).float() * scale for t, scale in zip((k, v), scales, strict=True))
    k, v = k.to(torch.bfloat16), v.to(torch.bfloat16)
    slots = torch.randperm(24 * 16, generator=generator)[:tokens]
    slots[tokens // 2] = -1
    caches = [layout.allocate(geometry, *scales) for _ in range(2)]
    Writer()(k, v, caches[0], slots)
    layouts.write_rows(k, v, caches[1], slots)
    for ours, theirs in ((caches[0].key, caches[1].key), (caches[0].value, caches[1].value)):
        assert torch.equal(ours.float(), theirs.float())
    assert tokens == 1 or caches[0].key.float().abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, rare(torch.bfloat16), rare(torch.float16)], ids=str)
def test_writers_leave_the_same_bits_in_an_int8_cache(dtype: torch.dtype) -> None:
    """Ties between two numbers, rows of zeros, of the smallest numbers and of none that is finite among them."""
    generator = torch.Generator().manual_seed(1)
    geometry = CacheGeometry(24, 16, 2, 80, torch.int8, torch.device("cpu"))
    k, v = (
        torch.randn(300, 2, 80, generator=generator) * 10.0 ** torch.randint(-4, 4, (300, 2, 1), generator=generator)
        for _ in "kv"
    )
    k[::7], v[::5] = 0.0, torch.randint(-254, 255, v[::5].shape, generator=generator) / 2
    v[::5, :, 0] = 127.0
    k[3, 0, 5], k[4, 1, 79], v[9, 0, 0], v[11] = math.nan, math.inf, -math.inf, 1e-40
    k, v = k.to(dtype), v.to(dtype)
    slots = torch.randperm(24 * 16, generator=generator)[:300]
    slots[150] = -1
    caches = [NHD_INT8.allocate(geometry) for _ in range(2)]
    Writer()(k, v, caches[0], slots)
    layouts.write_rows(k, v, caches[1], slots)
    for name, tensor in caches[0].tensors.items():
        assert torch.equal(tensor, caches[1].tensors[name]), name
    assert caches[0].gather(slots[3:4])[0][0, 0].isnan().all()


def test_writer_saturates() -> None:
    cache = NHD.allocate(CacheGeometry(1, 16, 1, 32, FP8, torch.device("cpu")))
    k = torch.tensor([1e4, -1e4]).repeat(16).view(1, 1, 32)
    Writer()(k, k, cache, torch.tensor([3]))
    assert cache.gather(torch.tensor([3]))[0].float().flatten()[:2].tolist() == [448.0, -448.0]


@pytest.mark.parametrize("phase_case", ["decode", "extend"])
def test_debug_names_the_wrong_block(monkeypatch: pytest.MonkeyPatch, phase_case: str) -> None:
    monkeypatch.setenv("HEADWAY_DEBUG", "1")
    case = case_of(phase_case, spec())
    backend = TritonAttention(case.spec, NHD, 16)
    run_backend(backend, case)
    for wrong in (-7, 99):
        case.metadata.block_table_cpu[1, 0] = wrong
        with pytest.raises(BackendError, match=rf"row 1: needs blocks 0.*, got {wrong}"):
            run_backend(backend, case)
        if phase_case == "decode":
            with pytest.raises(BackendError, match=rf"row 1: needs blocks 0.*, got {wrong}"):
                write_and_decode(backend, case)


def test_refusals() -> None:
    def reason(layer: AttentionSpec, block_size: int = 16) -> str:
        return str(TritonAttention.supports(layer, NHD, block_size, Phase.DECODE))

    assert "head_dim: needs a multiple of 8 up to 512, got 20" in reason(spec(head_dim=20))
    assert reason(spec(head_dim=576)).endswith("head_dim: needs a multiple of 8 up to 512, got 576")
    assert "head_dim/v_head_dim: needs at most 576/512, got 584/64" in reason(spec(head_dim=584, v_head_dim=64))
    assert "block_size: needs a multiple of 16, got 8" in reason(spec(), 8)
    assert "dtype" in reason(spec(dtype=torch.float64))
    assert "scale: needs a positive number" in reason(spec(scale=-1.0))
    with pytest.raises(ConfigError, match="num_splits"):
        TritonAttention(spec(), NHD, 16, {"num_splits": "0"})
    with pytest.raises(ConfigError, match="extend_splits"):
        TritonAttention(spec(), NHD, 16, {"extend_splits": "many"})


@pytest.mark.slow
@pytest.mark.parametrize("layout", [NHD, VLLM_5D], ids=lambda layout: layout.name)
def test_a_sequences_bits_are_its_own_where_that_is_asked_for(layout: CacheLayout) -> None:
    case = invariance_case(LAYERS["gqa 2"], layout, 16, layouts.write_rows)
    assert not dependent(TritonAttention(case.spec, layout, 16), case)


def test_a_captured_plan_is_cut_anew_for_each_replay() -> None:
    case = case_of("1q1s600_3q1s40", spec())
    step = case.metadata
    lens = step.seq_lens.clone()
    backend = TritonAttention(case.spec, NHD, 16)
    longest = torch.full_like(step.seq_lens_cpu, 8192)
    plan = backend.plan_for_capture(dataclasses.replace(step, seq_lens_cpu=longest))
    assert plan.chunks.splits > 1
    step.seq_lens.zero_()  # a replay of padding only, then one of the case's own lengths
    backend.plan_for_replay(plan, dataclasses.replace(step, seq_lens_cpu=step.seq_lens))
    assert (plan.chunks.table[:, 0] == -1).all()
    step.seq_lens.copy_(lens)
    backend.plan_for_replay(plan, step)
    seqs = plan.chunks.table[:, 0]
    counts = seqs[seqs >= 0].bincount()
    assert counts.sum() < len(seqs), "a table for longer ones"
    assert counts[1:].tolist() == [1, 1, 1], "short sequences are not cut"
    assert counts[0] > 4
    out = torch.full_like(case.q, math.nan)
    backend.decode(case.q, case.cache, plan, out)
    assert relative_error(out, reference(case), case) < 2e-6


@pytest.mark.parametrize("case_name", [rare("prefill"), "mixed", rare("verify")])
@pytest.mark.parametrize(
    ("layer", "layout"), [("expanded", VLLM_5D), ("192/128", NHD), ("longer value", HND), ("expanded, window softcap sinks", NHD)]
)
def test_unequal_heads(layer: str, layout: CacheLayout, case_name: str) -> None:
    assert_small(errors_of(TritonAttention, case_of(case_name, UNEQUAL[layer], layout)), 3e-6)


def test_a_layer_without_a_cache() -> None:
    assert_small(dense_errors(TritonAttention, NHD), 3e-6)


@pytest.mark.slow
def test_the_heads_of_a_latent_share_its_rows_and_programs_its_keys() -> None:
    layer = spec(num_heads=20, num_kv_heads=1, head_dim=160, v_head_dim=128, value_in_key=True)
    case = case_of("1q1s400_2q1s33_1q1s1", layer, LATENT)
    expected, sums = reference_with_lse(case)
    for splits in ("1", "3", "40"):
        backend = TritonAttention(layer, LATENT, 16, {"num_splits": splits})
        lse = torch.full((20, len(case.q)), math.nan)
        assert relative_error(run_backend(backend, case, lse), expected, case) < 2e-6
        assert float((lse - sums).abs().max()) < 1e-5
    several = case_of("1q3s70_2q2s40", dataclasses.replace(layer, sinks=tuple(0.1 * n for n in range(20))), LATENT, verify=3)
    assert relative_error(run_backend(TritonAttention(several.spec, LATENT, 16), several), reference(several), several) < 2e-6


@pytest.mark.parametrize(
    ("layer", "case_name"),
    [
        *product(IN_KEY, ["mixed"]),
        *(pytest.param(layer, "verify", marks=pytest.mark.slow) for layer in IN_KEY),
        ("absorbed", "prefill"),
    ],
)
def test_values_inside_keys(layer: str, case_name: str) -> None:
    assert_small(errors_of(TritonAttention, case_of(case_name, IN_KEY[layer], LATENT)), 3e-6)


@pytest.mark.parametrize("case_name", ["mixed", "decode ragged"])
def test_a_cache_in_foreign_memory(case_name: str) -> None:
    assert_small(errors_of(TritonAttention, strided(case_of(case_name, spec(), NHD))))


def test_the_log_sum_exp_of_split_sequences() -> None:
    case = case_of("2q1s200_1q1s3", spec(sinks=(0.3, -1.0, 2.0, 0.0)))
    backend = TritonAttention(case.spec, NHD, 16, {"num_splits": "4"})
    lse = torch.full((case.spec.num_heads, len(case.q)), math.nan)
    out = run_backend(backend, case, lse)
    expected, sums = reference_with_lse(case)
    assert relative_error(out, expected, case) < 2e-6
    assert float((lse - sums).abs().max()) < 1e-5


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("name", ["mixed", rare("decode ragged"), rare("extend"), rare("verify")])
def test_layers_of_a_kind_share_a_plan_and_have_sinks_and_scales_of_their_own(name: str, kv_dtype: torch.dtype | None) -> None:
    layer = spec(kv_dtype=kv_dtype, sinks=(0.0,) * 4)
    assert max(errors_over_shared_plans(TritonAttention, layer, name)) < 2e-6
