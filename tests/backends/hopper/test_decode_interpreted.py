"""decode.cu and latent.cu beside float64, run by the host."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from backend_cases import spec
from decode_writes import LENGTHS, error_after_writing, new_token_case, write_and_decode
from headway.core.contract.layout import HND, LATENT, NHD, CacheLayout, LayerCache, write_rows
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, parse_case, reference, reference_with_lse, relative_error, run_backend
from host_hopper import (
    HostAttention,
    HostDecode,
    HostLatent,
    attention_by_the_host,
    decode_by_the_host,
    heads_of,
    latent_by_the_host,
)

BF16, FP16 = torch.bfloat16, torch.float16
IN_TURN, FROM_THE_LAST, SOME = 0, 1, 2
"""Orders in which the host runs threads."""


def layer(heads: str = "16/8/128", dtype: torch.dtype = BF16, **changes: object) -> AttentionSpec:
    return heads_of(heads, dtype, **{"scale": int(heads.rpartition("/")[2]) ** -0.5, **changes})


def case_of(
    step: str, asked: AttentionSpec, layout: CacheLayout = NHD, block_size: int = 16, verify: int = 1, **options: int
) -> Case:
    """Decoding sequences over a cache that is NaN where it holds nothing."""
    options = {"seed": random.randrange(2**31), "decode_query_len": verify, **options}
    return make_case(parse_case(step, verify), asked, layout, block_size, write_rows, poison=math.nan, **options)


def check(monkeypatch: pytest.MonkeyPatch, case: Case, order: int, multiprocessors: int = 132, **options: str) -> int:
    """Returns the most blocks of threads of a launch."""
    made = decode_by_the_host(monkeypatch, order, multiprocessors)
    view = case.metadata.decode
    assert view.num_tokens == len(case.q)
    assert HostDecode.supports(case.spec, case.cache.layout, case.cache.block_size, view.phase)
    assert HostDecode.accepts(case.cache)
    lse = torch.full((case.spec.num_heads, len(case.q)), math.nan)
    answer = run_backend(HostDecode(case.spec, case.cache.layout, case.cache.block_size, options), case, lse)
    expected, sums = reference_with_lse(case)
    assert relative_error(answer, expected, case) < HostDecode.tolerance[case.spec.dtype]
    assert float((lse - sums).abs().max()) < 2e-3
    return max(blocks for kernel in made for blocks, _, _ in kernel.launches)


FEATURES = {
    "plain": layer(),
    "float16, hnd": layer("16/2/128", FP16),
    "window": layer("8/4/64", sliding_window=70),
    "soft-cap": layer("4/2/256", softcap=20.0),
    "sinks": layer("8/1/64", sinks=tuple(0.3 * i for i in range(8))),
    "heads of 80": layer("4/4/80"),
    "heads of 192": layer("2/2/192"),
    "heads of 512": layer("16/2/512"),
    "groups of 12": layer("24/2/128"),
    "groups of 40": layer("40/1/64", FP16),
}


@pytest.mark.parametrize("order", [IN_TURN, FROM_THE_LAST])
@pytest.mark.parametrize("name", FEATURES)
def test_matches_float64(monkeypatch: pytest.MonkeyPatch, name: str, order: int) -> None:
    layout = HND if "hnd" in name else NHD
    check(monkeypatch, case_of("1q1s300_1q1s64_1q1s2_1q1s17", FEATURES[name], layout, 16 if order else 48), order)


def test_keys_of_one_sequence_are_cut_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, case_of("1q1s2900", layer("4/2/128")), SOME, num_splits="17") == 2 * 17
    assert check(monkeypatch, case_of("1q1s2500_1q1s70", layer("4/2/64", FP16)), IN_TURN, num_splits="5") > 10
    check(monkeypatch, case_of("1q1s900_1q1s70", layer("6/2/512", sinks=(0.3,) * 6)), IN_TURN, num_splits="5")


def test_a_chunk_of_thousands_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, case_of("1q1s4600", layer("2/1/64")), IN_TURN, num_splits="1")


def test_several_tokens_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, case_of("1q3s130_1q3s20", layer("8/2/128"), verify=3), IN_TURN)
    check(monkeypatch, case_of("1q8s200", layer("16/2/128", sliding_window=40), verify=8), SOME)


@pytest.mark.parametrize("order", [IN_TURN, SOME])
@pytest.mark.parametrize(("name", "block_size"), [("plain", 16), ("float16, hnd", 48), ("sinks", 256), ("heads of 512", 16)])
def test_new_tokens_are_written(monkeypatch: pytest.MonkeyPatch, name: str, block_size: int, order: int) -> None:
    decode_by_the_host(monkeypatch, order)
    asked = FEATURES[name]
    case = new_token_case(LENGTHS, asked, HND if "hnd" in name else NHD, block_size)
    for spoiled in (math.nan, 3e4):
        backend = HostDecode(asked, case.cache.layout, block_size)
        assert (
            error_after_writing(case, lambda made=backend: write_and_decode(made, case), spoiled) < backend.tolerance[asked.dtype]
        )


def test_a_captured_plan_serves_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured for two sequences of 4,000 tokens and replayed for others, one of which is padding."""
    decode_by_the_host(monkeypatch, IN_TURN)
    case = case_of("1q2s400_1q2s30", layer("8/2/64"), verify=2, padding_rows=1)
    view = case.metadata.decode
    backend = HostDecode(case.spec, NHD, 16)
    plan = backend.plan_for_capture(dataclasses.replace(view, seq_lens_cpu=torch.full_like(view.seq_lens_cpu, 4000)))
    assert plan.chunks.split
    backend.plan_for_replay(plan, view)
    for each in (backend, HostDecode(case.spec, NHD, 16)):  # a plan serves all layers of a kind
        out = torch.full_like(case.q, math.nan)
        each.decode(case.q, case.cache, plan, out)
        assert relative_error(out, reference(case), case) < HostDecode.tolerance[BF16]


def test_rows_that_are_parts_of_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries at odd elements are copied first, and so is an output that lies so."""
    decode_by_the_host(monkeypatch, IN_TURN)
    case = case_of("2q1s100", layer("4/2/64"))
    view = case.metadata.decode
    assert view is not None
    q = torch.full((len(case.q), 4, 67), math.nan, dtype=BF16)[..., 1:65].copy_(case.q)
    out = torch.full((len(case.q), 4, 67), math.nan, dtype=BF16)[..., 1:65]
    backend = HostDecode(case.spec, NHD, 16)
    backend.decode(q, case.cache, backend.plan(view), out)
    assert relative_error(out, reference(case), case) < HostDecode.tolerance[BF16]


PROMPTS = {
    "without context": ("1q70_1q3", layer("16/2/512"), 16, None),
    "extends": ("1q20s220_1q33_1q2s65", layer("16/2/512"), 16, None),
    "window": ("1q40s240", layer("8/1/512", sliding_window=50), 256, "3"),
    "soft-cap": ("1q100s330", layer("8/2/512", softcap=20.0), 48, None),
    "sinks": ("1q30s130_1q5s300", layer("7/1/512", sinks=tuple(0.3 * i for i in range(7))), 32, "2"),
    "float16": ("1q130s194", layer("2/2/512", FP16, sliding_window=100), 64, "4"),
}


@pytest.mark.parametrize("order", [IN_TURN, FROM_THE_LAST, SOME])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_with_heads_of_512_match_float64(monkeypatch: pytest.MonkeyPatch, name: str, order: int) -> None:
    step, asked, block_size, splits = PROMPTS[name]
    attention_by_the_host(monkeypatch, order)
    case = case_of(step, asked, HND if name == "window" else NHD, block_size)
    backend = HostAttention(asked, case.cache.layout, block_size, {"num_splits": splits} if splits else None)
    expected, sums = reference_with_lse(case)
    for _ in range(2):  # counters that a step leaves behind would spoil the next
        lse = torch.full((asked.num_heads, len(case.q)), math.nan)
        assert relative_error(run_backend(backend, case, lse), expected, case) < backend.tolerance[asked.dtype]
        assert float((lse - sums).abs().max()) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("order", [IN_TURN, FROM_THE_LAST, SOME])
@pytest.mark.parametrize("number", range(8))
def test_random_steps_match_float64(monkeypatch: pytest.MonkeyPatch, number: int, order: int) -> None:
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    head_dim, kv_heads, group = (
        draw.choice((64, 80, 96, 112, 128, 192, 256)),
        draw.choice((1, 2, 3)),
        draw.choice((1, 2, 4, 7, 8, 16)),
    )
    verify, block_size = draw.choice((1, 1, 2, 5)), draw.choice((16, 32, 48, 64, 256))
    changes = draw.choice(({}, {"sliding_window": draw.randint(1, 200)}, {"softcap": 15.0}))
    asked = layer(f"{group * kv_heads}/{kv_heads}/{head_dim}", draw.choice((BF16, FP16)), **changes)
    step = "_".join(f"1q{verify}s{verify + int(2 ** draw.uniform(0, 10))}" for _ in range(draw.randint(1, 4)))
    print(f"seed {seed}: {step}, {asked}, blocks of {block_size}")
    splits = {} if number % 2 else {"num_splits": str(draw.choice((1, 2, 9)))}
    check(monkeypatch, case_of(step, asked, draw.choice((NHD, HND)), block_size, verify, seed=seed), order, **splits)


LATE, EARLY, AT_ONCE = 0, 1, 2
"""Orders in which the host runs threads: copies and products arrive as late as they may; copies as early; products as early."""


def latent_case(
    step: str, num_heads: int, block_size: int, verify: int = 1, dtype: torch.dtype = BF16, sharp: float = 1, **options: int
) -> Case:
    """A step of an absorbed layer of DeepSeek, over a cache that is NaN where it holds nothing. sharp: how large scores are."""
    heads = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "value_in_key": True}
    layer = spec(**heads, dtype=dtype, scale=sharp / math.sqrt(192))
    options = {"seed": random.randrange(2**31), "decode_query_len": verify, **options}
    return make_case(parse_case(step, verify), layer, LATENT, block_size, write_rows, poison=math.nan, **options)


def check_latent(monkeypatch: pytest.MonkeyPatch, case: Case, order: int, **options: str) -> list[tuple[int, int, int]]:
    """Returns the grids that were launched."""
    made = latent_by_the_host(monkeypatch, order)
    for view in (case.metadata.prefill, case.metadata.decode):
        assert view is None or HostLatent.supports(case.spec, case.cache.layout, case.cache.block_size, view.phase)
    assert HostLatent.accepts(case.cache)
    lse = torch.full((case.spec.num_heads, len(case.q)), math.nan)
    answer = run_backend(HostLatent(case.spec, LATENT, case.cache.block_size, options), case, lse)
    expected, sums = reference_with_lse(case)
    assert relative_error(answer, expected, case) < HostLatent.tolerance[case.spec.dtype]
    assert float((lse - sums).abs().max()) < 2e-3
    return [grid for kernel in made for grid in kernel.launches]


UNCUT = {"num_splits": "1"}
"""No merge, of which the interpreter takes a hundredth of a second for each row."""


@pytest.mark.parametrize(
    ("step", "num_heads", "block_size", "order", "verify"),
    [
        ("1q1s300_1q1s64_1q1s2", 128, 16, LATE, 1),
        ("1q1s400_1q5s140", 128, 64, EARLY, 1),
        ("1q1s400", 128, 256, AT_ONCE, 1),
        ("2q1s190_1q1s65", 16, 64, EARLY, 1),
        ("1q3s130", 64, 48, AT_ONCE, 3),
        ("1q7s140_1q2s70", 32, 256, LATE, 1),
    ],
)
def test_latents_match_float64(
    monkeypatch: pytest.MonkeyPatch, step: str, num_heads: int, block_size: int, order: int, verify: int
) -> None:
    check_latent(monkeypatch, latent_case(step, num_heads, block_size, verify), order, **UNCUT)


@pytest.mark.parametrize("order", [LATE, EARLY])
def test_sums_follow_a_maximum_that_grows(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    check_latent(monkeypatch, latent_case("2q1s500", 64, 64, sharp=8), order, **UNCUT)


def test_latents_of_one_sequence_are_cut_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = check_latent(monkeypatch, latent_case("1q1s1000_1q1s70", 16, 64, dtype=FP16), EARLY)
    assert min(clusters for clusters, _, _ in grids) > 2


def test_a_captured_plan_of_latents_serves_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured for two sequences of 4,000 tokens and replayed for others, one of which is padding."""
    latent_by_the_host(monkeypatch, AT_ONCE)
    case = latent_case("1q2s400_1q2s30", 32, 16, verify=2, padding_rows=1)
    view = case.metadata.decode
    long = dataclasses.replace(view, seq_lens_cpu=torch.full_like(view.seq_lens_cpu, 4000))
    backend = HostLatent(case.spec, LATENT, 16)
    plan = backend.plan_for_capture(long)
    assert plan.chunks.split
    backend.plan_for_replay(plan, view)
    out = case.q.new_full((*case.q.shape[:2], 512), torch.nan)
    for each in (backend, HostLatent(case.spec, LATENT, 16)):  # a plan serves all layers of a kind
        each.decode(case.q, case.cache, plan, out.fill_(math.nan))
        assert relative_error(out, reference(case), case) < HostLatent.tolerance[BF16]


@pytest.mark.slow
@pytest.mark.parametrize("order", [LATE, EARLY, AT_ONCE])
@pytest.mark.parametrize("number", range(12))
def test_random_steps_of_latents_match_float64(monkeypatch: pytest.MonkeyPatch, number: int, order: int) -> None:
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    heads, block_size = draw.choice((1, 8, 16, 20, 32, 48, 64, 96, 128)), draw.choice((16, 32, 48, 64, 128, 256))
    verify = draw.choice((1, 1, 2, 4, 8))
    groups = []
    for _ in range(draw.randint(1, 4)):
        query = draw.choice((1, verify, draw.randint(1, 12)))
        groups.append(f"1q{query}s{query + int(2 ** draw.uniform(0, 9.5))}")
    case = latent_case("_".join(groups), heads, block_size, verify, draw.choice((BF16, FP16)), draw.choice((1, 8)), seed=seed)
    print(f"seed {seed}: {'_'.join(groups)}, {heads} heads, blocks of {block_size}, {verify} tokens in decode")
    check_latent(monkeypatch, case, order, **({} if number % 4 == 0 else UNCUT))


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "order"), [(16, EARLY), (128, LATE), (128, EARLY)])
def test_thousands_of_keys(monkeypatch: pytest.MonkeyPatch, num_heads: int, order: int) -> None:
    check_latent(monkeypatch, latent_case("1q1s3001_2q1s5", num_heads, 64), order, **UNCUT)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_splits": "3"}, {"cluster": "1", "num_splits": "2"}], ids=str)
def test_options_change_no_answer(monkeypatch: pytest.MonkeyPatch, options: dict[str, str]) -> None:
    check_latent(monkeypatch, latent_case("2q1s260_1q1s2_1q5s90", 128, 64), LATE, **options)


@pytest.mark.slow
def test_latents_that_are_parts_of_longer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = latent_case("1q1s100_1q3s80", 16, 16)
    rows = torch.full((*case.cache.key.shape[:3], 640), math.nan, dtype=BF16)[..., 64:]
    rows.copy_(case.cache.key)
    q = torch.full((len(case.q), 16, 600), math.nan, dtype=BF16)[..., :576].copy_(case.q)
    check_latent(monkeypatch, dataclasses.replace(case, q=q, cache=LayerCache.wrap({"key": rows}, LATENT, case.spec)), EARLY)
