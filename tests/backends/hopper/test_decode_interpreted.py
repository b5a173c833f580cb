"""The source of decode.cu beside float64, run by the host."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from backend_cases import spec
from decode_writes import LENGTHS, error_after_writing, new_token_case, write_and_decode
from headway.core.contract.layout import HND, NHD, CacheLayout, write_rows
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, parse_case, reference, reference_with_lse, relative_error, run_backend
from host_decode import HostDecode, run_by_the_host

BF16, FP16 = torch.bfloat16, torch.float16
IN_TURN, FROM_THE_LAST, SOME = 0, 1, 2
"""Orders in which the host runs threads."""


def layer(heads: str = "16/8/128", dtype: torch.dtype = BF16, **changes: object) -> AttentionSpec:
    num_heads, num_kv_heads, head_dim = map(int, heads.split("/"))
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    return spec(**{**sizes, "scale": head_dim**-0.5, "dtype": dtype, **changes})


def case_of(
    step: str, asked: AttentionSpec, layout: CacheLayout = NHD, block_size: int = 16, verify: int = 1, **options: int
) -> Case:
    """Decoding sequences over a cache that is NaN where it holds nothing."""
    options = {"seed": random.randrange(2**31), "decode_query_len": verify, **options}
    return make_case(parse_case(step, verify), asked, layout, block_size, write_rows, poison=math.nan, **options)


def check(monkeypatch: pytest.MonkeyPatch, case: Case, order: int, multiprocessors: int = 132, **options: str) -> int:
    """Returns the most blocks of threads of a launch."""
    made = run_by_the_host(monkeypatch, order, multiprocessors)
    view = case.metadata.decode
    assert view is not None
    assert view.num_tokens == len(case.q)
    assert HostDecode.supports(case.spec, case.cache.layout, case.cache.block_size, view.phase)
    assert HostDecode.accepts(case.cache)
    lse = torch.full((case.spec.num_heads, len(case.q)), math.nan)
    answer = run_backend(HostDecode(case.spec, case.cache.layout, case.cache.block_size, options), case, lse)
    expected, sums = reference_with_lse(case)
    assert relative_error(answer, expected, case) < HostDecode.tolerance[case.spec.dtype]
    assert float((lse - sums).abs().max()) < 2e-3
    return max(kernel.blocks for kernel in made)


FEATURES = {
    "plain": layer(),
    "float16, hnd": layer("16/2/128", FP16),
    "window": layer("8/4/64", sliding_window=70),
    "soft-cap": layer("4/2/256", softcap=20.0),
    "sinks": layer("8/1/64", sinks=tuple(0.3 * i for i in range(8))),
    "heads of 80": layer("4/4/80"),
    "heads of 192": layer("2/2/192"),
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


def test_a_chunk_of_thousands_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, case_of("1q1s4600", layer("2/1/64")), IN_TURN, num_splits="1")


def test_several_tokens_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, case_of("1q3s130_1q3s20", layer("8/2/128"), verify=3), IN_TURN)
    check(monkeypatch, case_of("1q8s200", layer("16/2/128", sliding_window=40), verify=8), SOME)


@pytest.mark.parametrize("order", [IN_TURN, SOME])
@pytest.mark.parametrize(("name", "block_size"), [("plain", 16), ("float16, hnd", 48), ("sinks", 256)])
def test_new_tokens_are_written(monkeypatch: pytest.MonkeyPatch, name: str, block_size: int, order: int) -> None:
    run_by_the_host(monkeypatch, order)
    asked = FEATURES[name]
    case = new_token_case(LENGTHS, asked, HND if "hnd" in name else NHD, block_size)
    for spoiled in (math.nan, 3e4):
        backend = HostDecode(asked, case.cache.layout, block_size)
        assert (
            error_after_writing(case, lambda made=backend: write_and_decode(made, case), spoiled) < backend.tolerance[asked.dtype]
        )


def test_a_captured_plan_serves_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured for two sequences of 4,000 tokens and replayed for others, one of which is padding."""
    run_by_the_host(monkeypatch, IN_TURN)
    case = case_of("1q2s400_1q2s30", layer("8/2/64"), verify=2, padding_rows=1)
    view = case.metadata.decode
    assert view is not None
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
    run_by_the_host(monkeypatch, IN_TURN)
    case = case_of("2q1s100", layer("4/2/64"))
    view = case.metadata.decode
    assert view is not None
    q = torch.full((len(case.q), 4, 67), math.nan, dtype=BF16)[..., 1:65].copy_(case.q)
    out = torch.full((len(case.q), 4, 67), math.nan, dtype=BF16)[..., 1:65]
    backend = HostDecode(case.spec, NHD, 16)
    backend.decode(q, case.cache, backend.plan(view), out)
    assert relative_error(out, reference(case), case) < HostDecode.tolerance[BF16]


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
