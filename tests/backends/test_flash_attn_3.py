"""`flash_attn_3` over stand-ins for its homes: numbers, plans, what is called, what is refused."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

import backend_cases
from backend_cases import CASES, SPECS, spec
from fake_flash_attn_3 import ARGUMENTS, HOMES, FlashAttn3
from headway.backends import flash_attn_3 as module
from headway.backends.flash_attn_3 import FlashAttention3, Library, Operators
from headway.core.contract.backend import StepLimits, fits
from headway.core.contract.errors import BackendError
from headway.core.contract.layout import HND, LATENT, NHD, VLLM_5D, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.core.oracle.cases import Case, reference, relative_error, run_backend
from headway.core.oracle.cells import CheckCell
from headway.testing.kit.kit import Kit
from headway.testing.kit.subject import load_subject
from latent_layers import errors_of, strided
from tiny_engine import registering

GPU = torch.device("cuda")
CLAIMS = FlashAttention3.capabilities
POISON = 3e4
"""It reads whole blocks, whose slots are finite."""
case_of = functools.partial(backend_cases.case_of, poison=POISON)
ABSORBED = spec(num_heads=3, num_kv_heads=1, head_dim=576, v_head_dim=512, value_in_key=True)
EXPANDED = spec(head_dim=192, v_head_dim=128)


def install(monkeypatch: pytest.MonkeyPatch, fake: FlashAttn3) -> FlashAttn3:
    found = Library("a stand-in", Path("/nowhere"), Operators.of(fake.namespace))
    monkeypatch.setattr(module, "find_library", lambda: (found, YES))
    return fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FlashAttn3:
    return install(monkeypatch, FlashAttn3())


def check(case: Case) -> None:
    made = FlashAttention3(case.spec, case.cache.layout, case.cache.block_size)
    assert relative_error(run_backend(made, case), reference(case), case) < 1e-6


def on_gpu(layer: AttentionSpec, **changes: object) -> AttentionSpec:
    return dataclasses.replace(layer, device=GPU, dtype=torch.bfloat16, **changes)


@pytest.fixture(autouse=True)
def claims_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins compute on a CPU, in float32."""
    claims = dataclasses.replace(FlashAttention3.capabilities, devices=("cpu", "cuda"), dtypes=(torch.float32, torch.bfloat16))
    monkeypatch.setattr(FlashAttention3, "capabilities", claims)


# Numbers.


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("case_name", CASES)
def test_every_home_matches_float64(monkeypatch: pytest.MonkeyPatch, home: str, case_name: str) -> None:
    install(monkeypatch, FlashAttn3(home))
    check(case_of(case_name, spec()))


@pytest.mark.parametrize("case_name", ["mixed", "decode ragged", "verify"])
@pytest.mark.parametrize("layer", ["mha", "mqa", "window", "window 1", "softcap", "gqa 8, head_dim 80"])
def test_features_match_float64(fake: FlashAttn3, layer: str, case_name: str) -> None:
    check(case_of(case_name, SPECS[layer]))


@pytest.mark.parametrize("window", [None, 6])
def test_queries_that_see_later_keys(fake: FlashAttn3, window: int | None) -> None:
    check(case_of("prefill", spec(causal=False, dense=True, sliding_window=window)))


@pytest.mark.parametrize("home", ["vllm", "sgl"])
def test_sinks_match_float64(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    install(monkeypatch, FlashAttn3(home))
    check(case_of("mixed", spec(sinks=(0.25, -1.0, 2.0, 0.0))))  # numbers that bfloat16 holds


@pytest.mark.parametrize("case_name", ["prefill", "mixed", "verify"])
@pytest.mark.parametrize(("layer", "layout"), [(EXPANDED, NHD), (EXPANDED, HND), (ABSORBED, LATENT)], ids=str)
def test_unequal_heads_and_the_log_sum_exp(fake: FlashAttn3, layer: AttentionSpec, layout: CacheLayout, case_name: str) -> None:
    error, lse = errors_of(FlashAttention3, case_of(case_name, layer, layout))
    assert error < 1e-6
    assert lse < 2e-5


def test_a_cache_in_foreign_memory(fake: FlashAttn3) -> None:
    case = strided(case_of("mixed", spec(), NHD))
    for tensor in case.cache.tensors.values():
        tensor.nan_to_num_(POISON)
    assert FlashAttention3.accepts(case.cache)
    check(case)


# Plans.


def test_the_split_is_planned_once_for_all_layers(fake: FlashAttn3) -> None:
    case = case_of("decode ragged", spec())
    made, out = FlashAttention3(case.spec, NHD, 16), torch.empty_like(case.q)
    plan = made.plan(case.metadata)
    for _ in range(3):
        made.decode(case.q, case.cache, plan, out)
    assert fake.names == ["get_scheduler_metadata", "fwd", "fwd", "fwd"]
    plans = [given["scheduler_metadata"] for name, given in fake.calls if name == "fwd"]
    assert all(each is not None and each.data_ptr() == plans[0].data_ptr() for each in plans)


def test_a_prompt_needs_no_plan_of_a_split(fake: FlashAttn3) -> None:
    check(case_of("prefill", spec()))
    assert fake.names == ["fwd"]


def test_a_home_without_a_planner_plans_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FlashAttn3("sgl"))
    check(case_of("decode", spec()))
    assert fake.names == ["fwd"]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_captured_step_plans_anew_in_each_replay_and_once(fake: FlashAttn3, layers: int) -> None:
    """The stand-in refuses a plan that was made for other lengths."""
    case = case_of("decode ragged", spec())
    caches = [case.cache, LayerCache(case.cache.tensors, NHD, case.cache.geometry)][:layers]
    made, out = FlashAttention3(case.spec, NHD, 16), torch.empty_like(case.q)
    plan = made.plan_for_capture(case.metadata)
    assert fake.names == []
    for kv_lens in ([2, 15, 16, 17, 49], [1, 1, 9, 12, 30], [2, 15, 16, 17, 49]):
        now = AttentionMetadata.build([1] * 5, [length - 1 for length in kv_lens], case.metadata.block_table_cpu.tolist(), 16)
        case.metadata.seq_lens.copy_(now.seq_lens)
        made.plan_for_replay(plan, now)
        for cache in caches:
            made.decode(case.q, cache, plan, out)
        lengths = dataclasses.replace(case, metadata=now)
        assert relative_error(out, reference(lengths), lengths) < 1e-6
    assert fake.names == ["get_scheduler_metadata", *["fwd"] * layers] * 3


def test_the_library_chooses_splits_until_their_memory_is_too_much(fake: FlashAttn3, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, case = spec(num_heads=8, num_kv_heads=1), case_of("5q1s40", spec(num_heads=8, num_kv_heads=1))
    run_backend(FlashAttention3(layer, NHD, 16), case)
    assert fake.calls[-1][1]["num_splits"] == 0
    each = 5 * 8 * 33 * 4
    monkeypatch.setattr(module, "WORKSPACE", 7 * each)
    made = FlashAttention3(layer, NHD, 16)
    run_backend(made, case)
    assert [given["num_splits"] for _, given in fake.calls[-2:]] == [7, 7]
    assert made.workspace_bytes(5, 5) == 7 * each
    monkeypatch.setattr(module, "WORKSPACE", each - 1)
    run_backend(made, case)
    assert fake.calls[-1][1]["num_splits"] == 1


def test_no_split_is_asked_for_where_the_plan_would_make_none(fake: FlashAttn3) -> None:
    """132 multiprocessors: what the longest sequence takes one of them, against what all work takes all of them."""
    layer = spec(num_heads=4, num_kv_heads=2)
    for text, splits in (
        ("66q1s40", 1),  # 66 sequences of 2 kv heads are 132 programs of the same length
        ("65q1s40", 0),
        ("80q1s40_1q1s300", 0),  # one that is long
        ("2q2000s2050_1q1s9", 0),  # 32 tiles of queries for each kv head and sequence: 128 programs
        ("3q2000s2050_1q1s9", 1),
    ):
        fake.calls.clear()
        case = case_of(text, layer)
        made = FlashAttention3(layer, NHD, 16)
        views = [view for view in (case.metadata.prefill, case.metadata.decode) if view is not None]
        asked = [made.plan(view).arguments[made.operators.forward.place["num_splits"]] for view in views]
        assert asked[0] == splits, text
        assert {given["num_splits"] for _, given in fake.calls} == set(asked)
        captured = made.plan_for_capture(views[-1])
        assert captured.arguments[made.operators.forward.place["num_splits"]] == 0  # its lengths change


def test_a_warm_up_meets_every_choice_of_the_library_in_few_steps(fake: FlashAttn3) -> None:
    """Its kernels differ by rows of at most 64 or more than 128, by a single query, and by split keys."""
    made = FlashAttention3(spec(num_heads=32, num_kv_heads=8, head_dim=128), NHD, 16)
    limits = StepLimits(8192, 256, 40960)
    steps = {phase: list(made.warmup_steps(phase, limits)) for phase in Phase}
    for phase, found in steps.items():
        assert 0 < len(found) < 120
        assert len(found) == len(set(map(tuple, found)))
        for step in found:
            assert fits(step, limits)
            assert all(Phase.of(each.query_len, each.context_len) is phase for each in step)
    rows = {4 * step[0].query_len for step in steps[Phase.EXTEND]}
    assert min(rows) <= 64 < 128 < max(rows)
    asked = set()
    for lengths in steps[Phase.EXTEND]:
        query_lens, context_lens, _ = zip(*lengths, strict=True)
        step = AttentionMetadata.build(query_lens, context_lens, [[0]] * len(lengths), 2**17)
        asked.add(made.num_splits(step, lengths_hold=True))
    assert asked == {0, 1}
    tiny = StepLimits(4, 2, 8)
    assert all(len(step) <= 2 for phase in Phase for step in made.warmup_steps(phase, tiny))


# Claims and refusals.


def test_claims(fake: FlashAttn3) -> None:
    layer = on_gpu(spec())
    for layout in (NHD, HND):
        assert all(FlashAttention3.supports(layer, layout, 16, phase) for phase in Phase)
    assert not FlashAttention3.supports(layer, VLLM_5D, 16, Phase.DECODE)
    assert FlashAttention3.supports(layer, VLLM_5D, 16, Phase.PREFILL)
    assert FlashAttention3.supports(on_gpu(ABSORBED), LATENT, 16, Phase.DECODE)
    for changed, what in (
        ({"head_dim": 36}, "head_dim"),
        ({"head_dim": 264}, "head_dim"),
        ({"v_head_dim": 16}, "head_dim/v_head_dim"),
        ({"alibi_slopes": (1.0,) * 4}, "alibi_slopes"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv_cache_dtype"),
    ):
        refused = FlashAttention3.supports(on_gpu(spec(**changed)), NHD, 16, Phase.DECODE)
        assert [reason.what for reason in refused.reasons] == [what]


@pytest.mark.parametrize(
    ("layer", "layout", "what"),
    [
        (on_gpu(spec(num_kv_heads=1, head_dim=48, v_head_dim=32, value_in_key=True)), LATENT, "head_dim/v_head_dim"),
        (on_gpu(spec(num_kv_heads=1, head_dim=64, value_in_key=True)), LATENT, "head_dim/v_head_dim"),
        (on_gpu(spec(head_dim=576, v_head_dim=512)), NHD, "head_dim/v_head_dim"),
        (on_gpu(spec(num_heads=128, sinks=(1.0,) * 128)), NHD, "sinks"),
    ],
)
def test_what_the_library_has_no_kernel_for(fake: FlashAttn3, layer: AttentionSpec, layout: CacheLayout, what: str) -> None:
    assert what in [reason.what for reason in FlashAttention3.supports(layer, layout, 16, Phase.DECODE).reasons]


def test_a_layer_on_another_gpu_of_the_machine_is_refused(fake: FlashAttn3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "capability", lambda device: (8, 0))
    (reason,) = FlashAttention3.supports(on_gpu(spec()), NHD, 16, Phase.DECODE).reasons
    assert str(reason) == "compute capability: needs 9.x (Hopper), got 8.0"


def test_sinks_are_refused_where_they_would_lose_bits_or_the_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = on_gpu(spec(sinks=(1.0,) * 4))
    install(monkeypatch, FlashAttn3("upstream"))
    (reason,) = FlashAttention3.supports(layer, NHD, 16, Phase.DECODE).reasons
    assert str(reason) == "sinks: needs a library whose operator takes s_aux, got that of a stand-in"
    install(monkeypatch, FlashAttn3("sgl"))
    assert FlashAttention3.supports(layer, NHD, 16, Phase.DECODE)
    wide = dataclasses.replace(layer, dtype=torch.float32)
    assert "bfloat16" in str(FlashAttention3.supports(wide, NHD, 16, Phase.DECODE))


def test_a_home_without_q_v_serves_no_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FlashAttn3("upstream", leave_out="q_v"))
    assert [reason.what for reason in FlashAttention3.supports(on_gpu(ABSORBED), LATENT, 16, Phase.DECODE).reasons] == [
        "value_in_key"
    ]
    check(case_of("mixed", spec()))


def test_memory_that_tma_cannot_load_is_refused(fake: FlashAttn3) -> None:
    layer = spec(head_dim=24)
    memory = torch.zeros(4, 16, 2, 25)
    cache = LayerCache.wrap({"key": memory[..., :24], "value": memory[..., 1:]}, NHD, layer)
    refused = FlashAttention3.accepts(cache)
    assert refused.reasons[0].what == "cache, key"
    assert "16 bytes" in refused.reasons[0].need


def test_a_cache_that_is_not_read_is_not_looked_at(fake: FlashAttn3) -> None:
    case = case_of("prefill", spec(), VLLM_5D)
    assert FlashAttention3.accepts(case.cache)
    check(case)


@pytest.mark.parametrize("missing", ["page_table", "scheduler_metadata", "softcap"])
def test_a_build_without_an_argument_that_is_needed_is_named(missing: str) -> None:
    fake = FlashAttn3(leave_out=missing)
    with pytest.raises(BackendError, match=f"has no argument {missing}"):
        Operators.of(fake.namespace)


def test_a_build_that_wants_an_argument_nobody_knows_is_named() -> None:
    library = torch.library.Library("fake_fa3_newer", "DEF")
    library.define(f"fwd({ARGUMENTS['vllm']}, int speed) -> Tensor[]")
    with pytest.raises(BackendError, match="wants speed"):
        Operators.of("fake_fa3_newer")


def test_the_kernel_says_where_it_comes_from(fake: FlashAttn3) -> None:
    assert FlashAttention3.kernel(on_gpu(spec()), Phase.DECODE) == ("FlashAttnFwdSm90 (FlashAttention 3 of a stand-in, paged)")


# The kit, over the stand-in: what a GPU is held to, but for the device's own checks.


class OnCpu(FlashAttention3):
    name = "fa3_on_cpu"
    capabilities = dataclasses.replace(CLAIMS, devices=("cpu",))

    @classmethod
    def available(cls) -> Support:
        return YES


@functools.cache
def kit() -> tuple[Kit, list[CheckCell]]:
    """The kit over the stand-in, and its quick cells, which take seconds to list."""
    made = Kit(load_subject("fa3_on_cpu", torch.device("cpu"), registering(fa3_on_cpu=OnCpu)))
    return made, made.cells(quick=True)


CHECKS = ["claims", "lse", "answer", "graph", "bounds", "options", "repeat", "refuse", "tolerance", "turns"]


@pytest.mark.slow
@pytest.mark.xdist_group("kit of flash_attn_3")
@pytest.mark.parametrize("check", CHECKS)
def test_the_quick_cells_of_the_kit_pass(fake: FlashAttn3, check: str) -> None:
    made, listed = kit()
    cells = [cell for cell in listed if cell.check == check]
    results = [made.run(cell) for cell in (cells[::3] if check == "answer" else cells)]
    assert results
    assert [(result.cell, result.reason) for result in results if result.status == "failed"] == []


# The library itself.


@pytest.mark.gpu
@pytest.mark.parametrize("case_name", ["64q1s700", "mixed", "verify"])
def test_the_real_library_computes_right_and_is_captured(monkeypatch: pytest.MonkeyPatch, case_name: str) -> None:
    monkeypatch.setattr(FlashAttention3, "capabilities", CLAIMS)
    found = FlashAttention3.available()
    if not found:
        pytest.skip(str(found))
    layer = on_gpu(spec(num_heads=8, head_dim=128))
    case = case_of(case_name, layer)
    made = FlashAttention3(layer, NHD, 16)
    assert relative_error(run_backend(made, case), reference(case), case) < FlashAttention3.tolerance[torch.bfloat16]
    if case.metadata.num_prefills:
        return
    plan, out = made.plan_for_capture(case.metadata), torch.empty_like(case.q)
    made.decode(case.q, case.cache, plan, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            made.decode(case.q, case.cache, plan, out)
    shorter = case.metadata.seq_lens // 2 + 4
    case.metadata.seq_lens.copy_(shorter)
    graph.replay()
    lens = shorter.tolist()
    query_lens = case.metadata.query_lens
    now = dataclasses.replace(
        case,
        metadata=AttentionMetadata.build(
            query_lens,
            [length - n for length, n in zip(lens, query_lens, strict=True)],
            case.metadata.block_table_cpu.tolist(),
            16,
            GPU,
            8,
        ),
    )
    assert relative_error(out, reference(now), now) < FlashAttention3.tolerance[torch.bfloat16]
