"""The source of latent.cu beside float64, run by the host."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from backend_cases import spec
from headway.core.contract.layout import LATENT, LayerCache, write_rows
from headway.core.oracle.cases import Case, make_case, parse_case, reference, reference_with_lse, relative_error, run_backend
from host_latent import HostLatent, run_by_the_host

BF16, FP16 = torch.bfloat16, torch.float16
LATE, EARLY, AT_ONCE = 0, 1, 2
"""Orders in which the host runs threads: copies and products arrive as late as they may; copies as early; products as early."""


def case_of(
    step: str, num_heads: int, block_size: int, verify: int = 1, dtype: torch.dtype = BF16, sharp: float = 1, **options: int
) -> Case:
    """A step of an absorbed layer of DeepSeek, over a cache that is NaN where it holds nothing. sharp: how large scores are."""
    heads = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "value_in_key": True}
    layer = spec(**heads, dtype=dtype, scale=sharp / math.sqrt(192))
    options = {"seed": random.randrange(2**31), "decode_query_len": verify, **options}
    return make_case(parse_case(step, verify), layer, LATENT, block_size, write_rows, poison=math.nan, **options)


def check(monkeypatch: pytest.MonkeyPatch, case: Case, order: int, **options: str) -> list[tuple[int, int, int]]:
    """Returns the grids that were launched."""
    made = run_by_the_host(monkeypatch, order)
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
def test_matches_float64(
    monkeypatch: pytest.MonkeyPatch, step: str, num_heads: int, block_size: int, order: int, verify: int
) -> None:
    check(monkeypatch, case_of(step, num_heads, block_size, verify), order, **UNCUT)


@pytest.mark.parametrize("order", [LATE, EARLY])
def test_sums_follow_a_maximum_that_grows(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    check(monkeypatch, case_of("2q1s500", 64, 64, sharp=8), order, **UNCUT)


def test_keys_of_one_sequence_are_cut_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = check(monkeypatch, case_of("1q1s1000_1q1s70", 16, 64, dtype=FP16), EARLY)
    assert min(clusters for clusters, _, _ in grids) > 2


def test_a_captured_plan_serves_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured for two sequences of 4,000 tokens and replayed for others, one of which is padding."""
    run_by_the_host(monkeypatch, AT_ONCE)
    case = case_of("1q2s400_1q2s30", 32, 16, verify=2, padding_rows=1)
    view = case.metadata.decode
    assert view is not None
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
def test_random_steps_match_float64(monkeypatch: pytest.MonkeyPatch, number: int, order: int) -> None:
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    heads, block_size = draw.choice((1, 8, 16, 20, 32, 48, 64, 96, 128)), draw.choice((16, 32, 48, 64, 128, 256))
    verify = draw.choice((1, 1, 2, 4, 8))
    groups = []
    for _ in range(draw.randint(1, 4)):
        query = draw.choice((1, verify, draw.randint(1, 12)))
        groups.append(f"1q{query}s{query + int(2 ** draw.uniform(0, 9.5))}")
    case = case_of("_".join(groups), heads, block_size, verify, draw.choice((BF16, FP16)), draw.choice((1, 8)), seed=seed)
    print(f"seed {seed}: {'_'.join(groups)}, {heads} heads, blocks of {block_size}, {verify} tokens in decode")
    check(monkeypatch, case, order, **({} if number % 4 == 0 else UNCUT))


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "order"), [(16, EARLY), (128, LATE), (128, EARLY)])
def test_thousands_of_keys(monkeypatch: pytest.MonkeyPatch, num_heads: int, order: int) -> None:
    check(monkeypatch, case_of("1q1s3001_2q1s5", num_heads, 64), order, **UNCUT)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_splits": "3"}, {"cluster": "1", "num_splits": "2"}], ids=str)
def test_options_change_no_answer(monkeypatch: pytest.MonkeyPatch, options: dict[str, str]) -> None:
    check(monkeypatch, case_of("2q1s260_1q1s2_1q5s90", 128, 64), LATE, **options)


@pytest.mark.slow
def test_rows_that_are_parts_of_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("1q1s100_1q3s80", 16, 16)
    wide = torch.full((*case.cache.key.shape[:3], 640), math.nan, dtype=BF16)
    rows = wide[..., 64:]
    rows.copy_(case.cache.key)
    q = torch.full((len(case.q), 16, 600), math.nan, dtype=BF16)[..., :576].copy_(case.q)
    check(monkeypatch, dataclasses.replace(case, q=q, cache=LayerCache.wrap({"key": rows}, LATENT, case.spec)), EARLY)
