"""The plugins over FlashInfer and fla: what each hands to its library, over stand-ins where it is not there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fake_fla
from backend_cases import CASES, case_of, spec
from fake_flashinfer import modules
from headway.core.contract.errors import HeadwayError
from headway.core.contract.layout import HND, LATENT, NHD, CacheLayout
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.state import KEY_VALUE, VALUE_KEY, StateBackend, StateLayout, StateSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.oracle.cases import reference, relative_error, run_backend
from headway.core.oracle.state_cases import make_state_case
from headway.core.sampling.params import SamplingParams
from headway.registry import create_registry
from headway.registry.plugin_sources import load_file
from headway.testing.diagnosis.states import Judge
from headway.testing.kit.checking import Wanted, check
from headway.testing.kit.kit import Kit
from headway.testing.kit.subject import subject_of
from stateful_model import MODELS
from tiny_engine import generate, made_engine, tokens_of

FILE = Path(__file__).resolve().parent.parent / "examples" / "headway-flashinfer" / "headway_flashinfer.py"
LATENT_LAYER = spec(num_heads=3, num_kv_heads=1, head_dim=576, v_head_dim=512, value_in_key=True)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return load_file(FILE)


CHANGED = {"sliding_window": 7, "softcap": 20.0}


@pytest.mark.parametrize(
    ("name", "layout", "changes"), [*((name, NHD, {}) for name in CASES), ("verify", HND, {}), ("decode ragged", HND, CHANGED)]
)
def test_it_computes_every_phase(plugin: ModuleType, name: str, layout: CacheLayout, changes: dict[str, Any]) -> None:
    layer = spec(num_heads=4, num_kv_heads=2, head_dim=64, **changes)
    made = case_of(name, layer, layout, padding_rows=2)
    backend = plugin.FlashInfer(layer, layout, 16)
    assert relative_error(run_backend(backend, made), reference(made), made) < 2e-6


@pytest.mark.parametrize("name", ["decode ragged", "verify"])
def test_it_computes_latent_attention(plugin: ModuleType, name: str) -> None:
    made = case_of(name, LATENT_LAYER, LATENT)
    backend = plugin.FlashInfer(LATENT_LAYER, LATENT, 16)
    assert relative_error(run_backend(backend, made), reference(made), made) < 2e-6


def step(query_lens: list[int], contexts: list[int]) -> AttentionMetadata:
    blocks = [list(range(8 * row, 8 * row + 8)) for row in range(len(query_lens))]
    return AttentionMetadata.build(query_lens, contexts, blocks, 16, torch.device("cpu"))


def test_both_parts_of_a_step_keep_their_plans(plugin: ModuleType) -> None:
    backend = plugin.FlashInfer(spec(num_heads=4, num_kv_heads=2, head_dim=64), NHD, 16)
    mixed = step([5, 3, 1], [20, 40, 31])
    first, second = backend.plan(mixed.prefill), backend.plan(mixed.decode)
    assert (first[0], second[0]) == (plugin.PAGED, plugin.DECODE)
    assert first[1].lens == [25, 43]
    assert second[1].lens == [32]
    assert [each.tolist() for each in second[1].pages] == [[16, 17]]
    assert backend.plan(step([7], [20]).prefill)[1] is first[1], "wrappers and their memory are made once"


@pytest.mark.parametrize(
    ("heads", "options", "expected"),
    [
        (8, {}, ("fa2", True)),
        (2, {}, ("auto", False)),
        (2, {"decode": "fa3"}, ("fa3", True)),
        (8, {"decode": "cuda_cores"}, ("auto", False)),
    ],
)
def test_kernels_of_decode_follow_the_heads(
    plugin: ModuleType, heads: int, options: dict[str, str], expected: tuple[str, bool]
) -> None:
    backend = plugin.FlashInfer(spec(num_heads=heads, num_kv_heads=2, head_dim=64), HND, 16, options)
    wrapper = backend.plan(step([1], [31]))[1]
    assert (wrapper.options["backend"], wrapper.options["use_tensor_cores"]) == expected
    assert wrapper.kv_layout == "HND"
    assert backend.plan(step([9], [0]))[1].kv_layout == "NHD", "this step's k and v are rows of tokens"


def test_an_option_that_cannot_work_is_refused(plugin: ModuleType) -> None:
    with pytest.raises(HeadwayError, match="flashinfer.decode: needs one of auto, fa2, fa3, cuda_cores, got 'fa4'"):
        plugin.FlashInfer(spec(num_heads=4, num_kv_heads=2, head_dim=64), NHD, 16, {"decode": "fa4"})


def test_it_claims_what_the_library_computes(plugin: ModuleType) -> None:
    def reasons(phase: Phase = Phase.DECODE, layout: CacheLayout = LATENT, **changes: object) -> str:
        layer = spec(**{"num_heads": 3, "num_kv_heads": 1, "dtype": torch.bfloat16, "device": torch.device("cuda"), **changes})
        return str(plugin.FlashInfer.supports(layer, layout, 16, phase))

    absorbed: dict[str, Any] = {"head_dim": 576, "v_head_dim": 512, "value_in_key": True}
    assert reasons(**absorbed) == reasons(Phase.EXTEND, **absorbed) == "yes"
    assert "absorbed latent attention" in reasons(Phase.PREFILL, **absorbed)
    assert "head_dim/v_head_dim" in reasons(head_dim=80, v_head_dim=64, value_in_key=True)
    assert "absorbed latent attention" in reasons(**absorbed, sliding_window=4)
    assert reasons(layout=NHD, head_dim=128) == "yes"
    assert "sinks" in reasons(layout=NHD, head_dim=128, sinks=(0.0, 0.0, 0.0))
    expanded: dict[str, Any] = {"head_dim": 192, "v_head_dim": 128}
    assert reasons(Phase.PREFILL, NHD, **expanded, dense=True) == "yes"
    assert "needs prefill, with values of 128" in reasons(Phase.EXTEND, NHD, **expanded)


def test_it_says_what_a_release_lacks(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert plugin.FlashInfer.available()
    plugin.wrapper_class.cache_clear()
    monkeypatch.setattr(sys.modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper, "plan", lambda self, metadata: None)
    assert "plan of this release takes no kv_data_type, logits_soft_cap, q_data_type" in str(plugin.FlashInfer.available())


def test_plugins_are_short() -> None:
    for path in FILE.parent.parent.glob("headway-*/*.py"):
        assert len(path.read_text().splitlines()) <= 150, path.name


FLA = Path(__file__).resolve().parent.parent / "examples" / "headway-fla" / "headway_fla.py"
KINDS = ("gated_delta", "kda", "mamba2", "lightning")


@pytest.fixture
def fla_plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, module in fake_fla.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fake_fla, "CALLS", [])
    return load_file(FLA)


def layer(kind: str, **changes: Any) -> StateSpec:
    delta = kind in ("gated_delta", "kda")
    sizes = {"num_heads": 4, "num_key_heads": 2, "key_dim": 16, "value_dim": 8}
    numbers = {"scale": 1.0 if kind == "mamba2" else 0.2, "qk_norm": delta, "beta_scale": 2.0 if delta else 1.0}
    return StateSpec(kind, **{**sizes, **numbers, **changes})


def on_a_cpu(fla_plugin: ModuleType, **claims: Any) -> type[StateBackend]:
    """The plugin's class, which claims what its stand-ins compute here."""
    chosen = replace(fla_plugin.Fla.capabilities, devices=("cpu",), **claims)
    body = {"available": classmethod(lambda cls: StateBackend.available()), "capabilities": chosen}
    return type("OnCpu", (fla_plugin.Fla,), body)


@pytest.mark.parametrize("layout", [KEY_VALUE, VALUE_KEY], ids=lambda layout: layout.name)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_leave_outputs_states_and_checkpoints(fla_plugin: ModuleType, kind: str, layout: StateLayout) -> None:
    spec = layer(kind, dt_limits=(0.05, 2.0) if kind == "mamba2" else (0.0, float("inf")))
    case = make_state_case([(70, 90), (3, 3), (130, 130), (64, 64), (9, 12)], spec, layout, strided=True)
    Judge.of(case).run(fla_plugin.Fla(spec, layout))
    assert fake_fla.CALLS == [[64, 3, 64, 64, 9], [6, 64], [2]], "up to a checkpoint, then on to the next"


def test_states_in_16_bits_and_inputs_too(fla_plugin: ModuleType) -> None:
    for kind in KINDS:
        spec = layer(kind, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
        Judge.of(make_state_case([(20, 30), (66, 66)], spec, KEY_VALUE, in_place=False)).run(fla_plugin.Fla(spec, KEY_VALUE))


def test_without_checkpoints_there_is_one_call_over_the_tokens_where_they_lie(fla_plugin: ModuleType) -> None:
    spec = layer("kda")
    backend = fla_plugin.Fla(spec, KEY_VALUE)
    case = make_state_case([(70, 90), (3, 3), (64, 64)], spec, KEY_VALUE, checkpoints=False)
    assert case.metadata.prefill is not None
    (call,) = backend.plan(case.metadata.prefill).calls
    assert call.tokens == slice(0, 137)
    Judge.of(case).run(backend)


def test_rows_of_padding_are_left_alone(fla_plugin: ModuleType) -> None:
    spec = layer("gated_delta")
    case = make_state_case([(20, 40), (9, 9)], spec, KEY_VALUE)
    assert case.metadata.prefill is not None
    slots = torch.tensor([-1, int(case.metadata.slots_cpu[1])], dtype=torch.int32)
    case = replace(case, metadata=replace(case.metadata, slots=slots, slots_cpu=slots))
    Judge.of(case).run(fla_plugin.Fla(spec, KEY_VALUE))
    assert fake_fla.CALLS == [[9]]


def test_it_says_what_it_does_not_serve(fla_plugin: ModuleType) -> None:
    def said(kind: str = "gated_delta", phase: Phase = Phase.PREFILL, **changes: Any) -> str:
        sizes = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, "device": torch.device("cuda")}
        return str(fla_plugin.Fla.supports(layer(kind, **{**sizes, **changes}), VALUE_KEY, phase))

    assert {said(kind) for kind in KINDS} == {"yes"}
    assert said(phase=Phase.EXTEND) == "yes"
    assert "phase: needs prefill or extend, got decode" in said(phase=Phase.DECODE)
    assert "convolution: needs a recurrence alone" in said(conv_channels=1024, conv_width=4)
    assert "dtype: needs bfloat16, got float32" in said(dtype=torch.float32)
    assert "key_dim: needs 64 or 128, got 32" in said(key_dim=32)
    assert "beta_scale: needs 1 or 2, got 1.5" in said(beta_scale=1.5)
    assert "qk_norm" in said("lightning", qk_norm=True)


def test_it_says_what_a_release_of_fla_lacks(fla_plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fla_plugin.Fla.available()
    fla_plugin.kernel.cache_clear()
    monkeypatch.setattr(sys.modules["fla.ops.kda"], "chunk_kda", lambda q, k, v, g, beta, cu_seqlens, state_v_first: None)
    lacks = "chunk_kda of this release takes no cu_seqlens_cpu, use_beta_sigmoid_in_kernel; that of fla-core 0.6.0 does"
    assert lacks in str(fla_plugin.Fla.available())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device: needs a CUDA GPU, got none" in str(fla_plugin.Fla.available())


@pytest.mark.slow
def test_the_kit_finds_its_claims_kept(fla_plugin: ModuleType) -> None:
    kit = Kit(subject_of(on_a_cpu(fla_plugin, key_dims=(16,), value_dims=(16,)), torch.device("cpu")))
    cells = [cell for cell in kit.cells(quick=True) if cell.check in ("claims", "refuse", "tolerance", "answer")]
    results = [kit.run(cell) for cell in cells]
    assert [result for result in results if result.status != "passed"] == []
    assert {result.feature for result in results if result.check == "answer"} == set(KINDS)


def test_an_engine_has_others_decode_and_convolve(fla_plugin: ModuleType) -> None:
    found = on_a_cpu(fla_plugin, dtypes=(torch.float32,), key_dims=None, value_dims=None)
    registry = create_registry([found], load_entry_points=False)
    model = MODELS["gated delta"]
    config = EngineConfig(
        attn_backend="sdpa", state_backend="prefill=fla,decode=torch", kv_cache_memory=2**21, max_num_batched_tokens=80
    )
    engine = made_engine(model, registry, config)
    prompts = [[number % 50 for number in range(start, start + length)] for start, length in ((0, 3), (5, 150), (5, 140))]
    written = generate(engine, prompts, SamplingParams(temperature=0, max_tokens=8))
    assert tokens_of(written) == [model.greedy(prompt, 8) for prompt in prompts]
    assert fake_fla.CALLS


@pytest.mark.gpu
@pytest.mark.slow
def test_the_library_keeps_the_contract() -> None:
    pytest.importorskip("fla")
    report = check(Wanted(f"{FLA}:Fla", device="cuda", quick=True))
    if report.unavailable:
        pytest.skip(report.unavailable)
    assert not report.failed
