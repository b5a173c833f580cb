"""The backends over other people's libraries, without the libraries: arguments, refusals, and numbers through stand-ins."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import backend_cases
import fake_libraries
from backend_cases import CASES, SPECS, VERIFY, spec
from fake_libraries import FlashAttn2, FlashAttn4, TorchVarlen, XFormers
from headway.backends import xformers
from headway.backends.flash_attn import FlashAttention2
from headway.backends.flash_attn_4 import FlashAttention4
from headway.backends.sdpa import SDPA, SDPAMath
from headway.backends.varlen import PARAMETERS
from headway.backends.varlen import TorchVarlen as TorchVarlenBackend
from headway.backends.xformers import XFormersAttention
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import BackendError, ConfigError
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheGeometry, write_rows
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Reason, Support
from headway.core.oracle.cases import Case, make_case, parse_case, reference, reference_with_lse, relative_error, run_backend
from headway.kernels.runtime.probe import declares, find
from headway.registry import Registry
from headway.registry.builtin import RANK

FAKES = {FlashAttention2: FlashAttn2, FlashAttention4: FlashAttn4, TorchVarlenBackend: TorchVarlen, XFormersAttention: XFormers}
LIBRARIES = {"flash_attn": "flash_attn", "flash_attn_4": "flash_attn", "xformers": "xformers"}
BACKENDS = list(FAKES)
GPU = torch.device("cuda")
BLOCK = 256
FINITE_POISON = 3e4
"""For backends that need finite rows past a sequence's end; NaN for all others."""


@pytest.fixture(autouse=True)
def fresh_probes():
    yield
    xformers.load_operator.cache_clear()
    xformers.operator_works.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, fake: object) -> None:
    for name, module in fake_libraries.modules(fake).items():
        monkeypatch.setitem(sys.modules, name, module)
    xformers.load_operator.cache_clear()
    xformers.operator_works.cache_clear()


@pytest.fixture(params=BACKENDS, ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[type[AttentionBackend], object]:
    """A backend's class, and its library's stand-in, already installed."""
    fake = FAKES[request.param]()
    install(monkeypatch, fake)
    return request.param, fake


def on_gpu(layer: AttentionSpec, **changes: object) -> AttentionSpec:
    return dataclasses.replace(layer, device=GPU, dtype=torch.bfloat16, **changes)


def case_of(name: str, layer: AttentionSpec, kind: type[AttentionBackend], block_size: int = BLOCK, **options: object) -> Case:
    poison = FINITE_POISON if kind.capabilities.reads_whole_blocks else math.nan
    return backend_cases.case_of(name, layer, block_size=block_size, **{"poison": poison, **options})


def refusals(kind: type[AttentionBackend], case: Case) -> list[Reason]:
    views = [view for view in (case.metadata.prefill, case.metadata.decode) if view is not None]
    supports = [kind.supports(on_gpu(case.spec), NHD, case.cache.block_size, view.phase) for view in views]
    return [reason for support in supports for reason in support.reasons]


def first_of_library(support: Support) -> Reason:
    """The first reason that is not the lack of a GPU."""
    return next(reason for reason in support.reasons if reason.what != "device")


def check(kind: type[AttentionBackend], case: Case, **options: str) -> None:
    made = kind(case.spec, NHD, case.cache.block_size, options)
    assert relative_error(run_backend(made, case), reference(case), case) < 1e-6


# Numbers: order of arguments, meaning of the window, block tables, bottom-right causality, scale.


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("spec_name", SPECS)
def test_matches_float64_where_it_claims_to(backend: tuple, case_name: str, spec_name: str) -> None:
    kind, _ = backend
    case = case_of(case_name, SPECS[spec_name], kind)
    refused = refusals(kind, case)
    if refused:
        assert all(reason.what in {"head_dim", "softcap", "alibi_slopes", "sinks", "sliding_window"} for reason in refused)
    else:
        check(kind, case)


@pytest.mark.parametrize(
    ("case_name", "padding_rows"),
    [
        *((name, 0) for name in ("2q300s900_1q7s256_1q1s257_3q1s513", "1q513_1q1_1q256", "3q4s700", "3q1")),
        *((name, 3) for name in ("decode ragged", "verify")),
    ],
)
def test_several_blocks_a_sequence_and_rows_of_padding(backend: tuple, case_name: str, padding_rows: int) -> None:
    kind, _ = backend
    check(kind, case_of(case_name, spec(), kind, padding_rows=padding_rows))


@pytest.mark.parametrize("features", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"sinks": (0.5, -1.0, 2.0, 0.0)}])
@pytest.mark.parametrize("kind", [SDPA, SDPAMath])
def test_queries_before_the_first_key_give_zeros(kind: type[SDPA], features: dict[str, object]) -> None:
    """Lengths that `build` refuses: sequences shorter than their queries, next to longer ones and to padding."""
    layer = spec(**features)
    queries, contexts, tables = [4, 4, 4, 4], [9, -2, 3, -4], [[0, 1], [2], [3], [4]]
    (metadata,) = AttentionMetadata.build_groups(queries, contexts, [tables], 8, "cpu", 4, [5])
    cache = NHD.allocate(CacheGeometry.of(layer, 5, 8))
    for tensor in cache.tensors.values():
        tensor.normal_()
    q = torch.randn(16, layer.num_heads, layer.head_dim)
    lse = torch.full((layer.num_heads, 16), math.nan)
    case = Case(layer, metadata, cache, q, q[:, : layer.num_kv_heads], q[:, : layer.num_kv_heads])
    out = run_backend(kind(layer, NHD, 8), case, lse)
    right, sums = reference_with_lse(case)
    assert bool((right[[4, 5, 12, 13, 14, 15]] == 0).all())
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-4, atol=1e-5)
    assert bool(run_backend(kind(layer, NHD, 8), case).isfinite().all())


@pytest.mark.parametrize("window", [None, 6])
def test_queries_that_see_later_keys(backend: tuple, window: int | None) -> None:
    kind, _ = backend
    case = case_of("prefill", spec(causal=False, dense=True, sliding_window=window), kind)
    refused = {reason.what for reason in refusals(kind, case)}
    if not kind.capabilities.non_causal:
        assert "causal" in refused
    elif refused:
        assert refused == {"sliding_window"}
    else:
        check(kind, case)


def test_non_contiguous_queries(backend: tuple) -> None:
    kind, _ = backend
    case = case_of("mixed", spec(), kind)
    wide = torch.cat([case.q, case.k, case.v], dim=1)
    q, k, v = wide.split([case.q.shape[1], case.k.shape[1], case.v.shape[1]], dim=1)
    check(kind, dataclasses.replace(case, q=q, k=k, v=v))


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.5},
        {"sliding_window": 3},
        {"softcap": 0.7},
        {"alibi_slopes": (0.9, 0.5, 0.3, 0.1)},
        {"sinks": (1.0, 2, 0.5, 3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_accepted_option_changes_the_output_and_another_is_refused(backend: tuple, change: dict[str, object]) -> None:
    kind, _ = backend
    plain, changed = (case_of("mixed", layer, kind) for layer in (spec(), spec(**change)))
    (name,) = change
    if name != "scale" and name not in kind.capabilities.features:
        refused = kind.supports(on_gpu(changed.spec), NHD, BLOCK, Phase.DECODE)
        assert [reason.what for reason in refused.reasons] == [name]
        return
    outs = [run_backend(kind(case.spec, NHD, BLOCK), case) for case in (plain, changed)]
    assert relative_error(outs[1], outs[0].double(), changed) > 1e-3


def test_calls_get_the_metadatas_own_tensors(backend: tuple) -> None:
    """A captured graph reads lengths and block tables where the engine updates them in place."""
    kind, _ = backend
    case = case_of("decode ragged", spec(), kind)
    made = kind(case.spec, NHD, BLOCK)
    plan, out = made.plan(case.metadata), torch.empty_like(case.q)
    for kv_lens in ([2, 15, 16, 17, 49], [1, 1, 9, 12, 30]):
        smaller = AttentionMetadata.build(
            [1] * 5, [length - 1 for length in kv_lens], case.metadata.block_table_cpu.tolist(), BLOCK
        )
        case.metadata.seq_lens.copy_(smaller.seq_lens)
        if kind is XFormersAttention:  # the stand-in looks at the host's copy too
            plan[0].bias.k_seqinfo.seqlen_py[:] = kv_lens
        made.decode(case.q, case.cache, plan, out)
        now = dataclasses.replace(case, metadata=smaller)
        assert relative_error(out, reference(now), now) < 1e-6


# What each calls.


@pytest.mark.parametrize(
    ("case_name", "calls"),
    [
        ("prefill", ["varlen_fwd"]),
        ("extend", ["varlen_fwd"]),
        ("decode ragged", ["fwd_kvcache"]),
        ("3q4s21", ["fwd_kvcache"]),
        ("verify", ["varlen_fwd"]),
    ],
)
def test_flash_attn_calls(monkeypatch: pytest.MonkeyPatch, case_name: str, calls: list[str]) -> None:
    fake = FlashAttn2()
    install(monkeypatch, fake)
    monkeypatch.setitem(VERIFY, "3q4s21", 8)
    check(FlashAttention2, case_of(case_name, spec(), FlashAttention2))
    assert fake.names == calls


@pytest.mark.parametrize(("layer", "rows"), [(spec(), 2), (spec(sliding_window=5), 1), (spec(num_heads=2), 1)], ids=str)
def test_flash_attn_folds_heads_of_a_group_into_rows(monkeypatch: pytest.MonkeyPatch, layer: AttentionSpec, rows: int) -> None:
    fake = FlashAttn2()
    install(monkeypatch, fake)
    check(FlashAttention2, case_of("decode", layer, FlashAttention2))
    assert fake.calls[0][1]["q"].shape[1] == rows


@pytest.mark.parametrize("poison", [FINITE_POISON, math.nan])
def test_flash_attn_4_needs_finite_rows_in_a_sequences_last_block(monkeypatch: pytest.MonkeyPatch, poison: float) -> None:
    install(monkeypatch, FlashAttn4())
    case = case_of("mixed", spec(), FlashAttention4, block_size=128, poison=poison)
    error = relative_error(run_backend(FlashAttention4(case.spec, NHD, 128), case), reference(case), case)
    assert error < 1e-6 if poison == FINITE_POISON else math.isnan(error)


def test_torch_varlen_copies_only_where_the_library_would_not_write_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = TorchVarlen()
    install(monkeypatch, fake)
    for name, layer in (("decode", spec()), ("decode", spec(num_heads=2)), ("extend", spec())):
        check(TorchVarlenBackend, case_of(name, layer, TorchVarlenBackend))
    assert fake.names == ["varlen_attn", "varlen_attn_out", "varlen_attn_out"]


def test_the_installed_torch_takes_what_torch_varlen_passes() -> None:
    module = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(module, "varlen_attn_out") or not set(inspect.signature(module.varlen_attn).parameters) >= PARAMETERS:
        pytest.skip("this torch's varlen_attn reads no paged cache")
    for name in ("varlen_attn", "varlen_attn_out"):
        real, ours = (inspect.signature(getattr(owner, name)).parameters for owner in (module, TorchVarlen()))
        assert list(real) == list(ours)


def test_xformers_names_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = XFormers()
    install(monkeypatch, fake)
    check(XFormersAttention, case_of("1q9_1q6", spec(), XFormersAttention))
    check(XFormersAttention, case_of("1q9_1q6", spec(), XFormersAttention), prefill_op="cutlass")
    check(XFormersAttention, case_of("mixed", spec(), XFormersAttention))
    check(XFormersAttention, case_of("verify", spec(), XFormersAttention))
    counts = [len(operator.calls) for operator in (fake.flash, fake.cutlass, fake.triton_splitk)]
    assert counts == [2, 1, 3]  # verify: one call for each run of sequences with equal query lengths
    names = [XFormersAttention.kernel(on_gpu(spec()), phase) for phase in Phase]
    assert names == ["fa2F (xformers)", "fa2F (xformers)", "triton_splitKF (xformers)"]


def test_xformers_rounds_the_width_of_a_block_table_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = XFormers()
    install(monkeypatch, fake)
    case = case_of("2q1s700", spec(), XFormersAttention, block_size=64)  # 11 blocks
    check(XFormersAttention, case)
    (call,) = fake.triton_splitk.calls
    assert call.attn_bias.block_tables.shape == (2, 16)


def test_xformers_refuses_what_its_operators_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, XFormers(flash_reads_blocks=False))
    layer = on_gpu(spec())
    assert XFormersAttention.supports(layer, NHD, 64, Phase.DECODE)
    refused = XFormersAttention.supports(layer, NHD, 64, Phase.EXTEND)
    assert [reason.what for reason in refused.reasons] == ["xformers.ops.fmha.flash", "block_size"]
    assert "flash-attn" in refused.reasons[0].hint
    refused = XFormersAttention.supports(on_gpu(spec(head_dim=96)), NHD, 64, Phase.DECODE)
    assert str(refused) == "no: head_dim: needs 16 or 32 or 64 or 128 or 256 in decode, got 96"
    assert XFormersAttention.supports(on_gpu(spec(head_dim=96)), NHD, 64, Phase.PREFILL)
    case = make_case([(17, 40)], spec(), NHD, 64, write_rows, decode_query_len=32)
    with pytest.raises(BackendError, match="at most 16 query tokens"):
        XFormersAttention(spec(), NHD, 64).plan(case.metadata)


def test_xformers_falls_on_cutlass_without_flash_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = XFormers()
    fake.flash.built = fake.triton_splitk.built = False
    install(monkeypatch, fake)
    assert XFormersAttention.kernel(on_gpu(spec()), Phase.PREFILL) == "cutlassF-pt (xformers)"
    check(XFormersAttention, case_of("prefill", spec(), XFormersAttention))
    (reason,) = XFormersAttention.supports(on_gpu(spec()), NHD, 64, Phase.DECODE).reasons
    assert reason.what == "xformers.ops.fmha.triton_splitk.FwOp"
    with pytest.raises(ConfigError, match="cutlass or flash"):
        XFormersAttention(spec(), NHD, 64, {"prefill_op": "ck"})
    with pytest.raises(ConfigError, match="works here"):
        XFormersAttention(spec(), NHD, 64, {"prefill_op": "flash"})


# Claims and refusals.


def test_claims(backend: tuple) -> None:
    kind, _ = backend
    layer, multiple = on_gpu(spec()), kind.capabilities.block_multiple
    assert all(kind.supports(layer, NHD, BLOCK, phase) for phase in Phase)
    for phase in (Phase.EXTEND, Phase.DECODE):
        assert not kind.supports(layer, NHD, multiple // 2, phase)
        assert not kind.supports(layer, HND, BLOCK, phase)
    for changed in (
        dataclasses.replace(layer, dtype=torch.float32),
        dataclasses.replace(layer, head_dim=36),
        dataclasses.replace(layer, head_dim=264),
        dataclasses.replace(layer, kv_dtype=torch.float8_e4m3fn),
        spec(dtype=torch.bfloat16),
    ):
        assert not any(kind.supports(changed, NHD, BLOCK, phase) for phase in Phase), changed


def test_prefill_without_context_needs_no_layout_and_no_block_size(backend: tuple) -> None:
    kind, _ = backend
    assert kind.supports(on_gpu(spec()), VLLM_5D, 16, Phase.PREFILL)
    case = make_case(parse_case("1q9_1q20"), spec(), VLLM_5D, 8, write_rows, poison=math.nan)
    assert relative_error(run_backend(kind(case.spec, VLLM_5D, 8), case), reference(case), case) < 1e-6


def test_every_kernel_is_named(backend: tuple) -> None:
    kind, _ = backend
    names = [kind.kernel(on_gpu(spec()), phase) for phase in Phase]
    assert all("(" in name for name in names)


@pytest.mark.parametrize(
    ("capability", "head_dim", "block_size", "phase", "what"),
    [
        ((9, 0), 128, 128, Phase.DECODE, ()),
        ((9, 0), 72, 128, Phase.DECODE, ()),
        ((9, 0), 72, 256, Phase.DECODE, ("head_dim",)),
        ((9, 0), 72, 16, Phase.PREFILL, ()),
        ((9, 0), 192, 256, Phase.EXTEND, ()),
        ((10, 0), 192, 128, Phase.PREFILL, ("head_dim",)),
        ((10, 0), 256, 128, Phase.PREFILL, ()),
        ((8, 0), 128, 128, Phase.PREFILL, ("compute capability",)),
        ((12, 0), 128, 128, Phase.PREFILL, ("compute capability",)),
    ],
)
def test_flash_attn_4_by_generation(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    head_dim: int,
    block_size: int,
    phase: Phase,
    what: tuple[str, ...],
) -> None:
    monkeypatch.setattr("headway.backends.flash_attn_4.capability", lambda device: capability)
    refused = FlashAttention4.supports(on_gpu(spec(head_dim=head_dim)), NHD, block_size, phase)
    assert tuple(reason.what for reason in refused.reasons) == what


@pytest.mark.parametrize("kind", [FlashAttention2, TorchVarlenBackend], ids=lambda kind: kind.name)
def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, kind: type[AttentionBackend]) -> None:
    monkeypatch.setattr("headway.kernels.runtime.probe.capability", lambda device: (7, 5))
    refused = kind.supports(on_gpu(spec()), NHD, BLOCK, Phase.DECODE)
    assert str(refused) == "no: compute capability: needs 8.0 or newer, got 7.5"


# Availability.


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_on_a_cpu_only_the_gpu_is_missing_where_the_library_is_there(backend: tuple) -> None:
    kind, _ = backend
    assert [reason.what for reason in kind.available().reasons] == ["device"]


def test_available_on_a_gpu(backend: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _ = backend
    monkeypatch.setattr(sys.modules[kind.__module__], "has_gpu", lambda: YES)
    assert kind.available()


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_named_with_what_installs_it(registry: Registry, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in [LIBRARIES[name], *(module for module in sys.modules if module.startswith(f"{LIBRARIES[name]}."))]:
        monkeypatch.setitem(sys.modules, known, None)  # not to be imported, whether it is installed or not
    reason = first_of_library(registry.backend(name).available())
    assert "ModuleNotFoundError" in reason.got
    assert "pip install" in reason.hint


def test_the_folder_of_flash_attn_4_is_no_flash_attn_2_and_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FlashAttn4())
    assert first_of_library(FlashAttention2.available()).what == "flash_attn.flash_attn_interface.flash_attn_gpu"
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    install(monkeypatch, FlashAttn2())
    assert first_of_library(FlashAttention4.available()).what == "flash_attn.cute.interface._flash_attn_fwd"


def test_flash_attn_without_its_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FlashAttn2())
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    reason = first_of_library(FlashAttention2.available())
    assert reason.need == "to be importable"
    assert "prebuilt wheel" in reason.hint


def test_flash_attn_with_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FlashAttn2()
    fake.fwd_kvcache = type("Old", (), {"__doc__": "fwd_kvcache(arg0: Tensor, arg1: Tensor)"})()
    del fake.calls
    install(monkeypatch, fake)
    assert first_of_library(FlashAttention2.available())[:3] == ("flash_attn_2_cuda.fwd_kvcache", "20 arguments", "2")
    fake.fwd_kvcache = None
    assert "build without it" in first_of_library(FlashAttention2.available()).got


def test_an_old_copy_of_flash_attn_4_is_told_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FlashAttn4())
    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_fwd", lambda q, k, v, out=None: None)
    reason = first_of_library(FlashAttention4.available())
    assert "page_table" in reason.need
    assert "flash_attn.cute" in reason.what


def test_a_torch_whose_varlen_reads_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("torch.nn.attention.varlen")
    old.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: None
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", old)
    reasons = [reason for reason in TorchVarlenBackend.available().reasons if reason.what != "device"]
    assert "block_table" in reasons[0].need
    assert "torch>=2.13" in reasons[0].hint


def test_torch_varlen_is_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_varlen.py").write_text("raise RuntimeError\ndef attend(q, *, block_table=None): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert declares("some_varlen", "attend", "a hint", ["block_table", "q"])
    assert "the parameters scale" in str(declares("some_varlen", "attend", "a hint", ["block_table", "scale"]))
    assert "no such function" in str(declares("some_varlen", "other", "a hint", []))
    assert "no such function" in str(declares("no_varlen", "attend", "a hint", []))
    assert "ModuleNotFoundError" in str(declares("no_package.varlen", "attend", "a hint", []))


def test_a_library_that_exits_while_it_loads_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(name: str) -> None:
        raise SystemExit(f"{name} wants out")

    monkeypatch.setattr("headway.kernels.runtime.probe.import_module", leave)
    found, support = find("anything", "at_all", "a hint")
    assert found is None
    assert support.reasons[0].got == "SystemExit: anything wants out"


# The order without measurements.


@pytest.mark.parametrize("phase", Phase)
def test_the_order_on_a_gpu_names_every_built_in_and_ends_with_the_baseline(registry: Registry, phase: Phase) -> None:
    names = list(registry.backends)
    order = registry.attention.rank(on_gpu(spec()), phase, [*names, "somebody's"])
    ranked = RANK["cuda"][phase]
    assert set(ranked) <= set(names)
    assert order[: len(ranked) - 1] == list(ranked[:-1])
    assert order[-1] == "sdpa.math"
    assert order[0] == ("triton" if phase is Phase.DECODE else "hopper")


def test_the_order_on_another_device_is_that_of_registration_with_the_baseline_last(registry: Registry) -> None:
    assert registry.attention.rank(spec(), Phase.DECODE, ["sdpa.math", "b", "sdpa", "a"]) == ["b", "sdpa", "a", "sdpa.math"]
