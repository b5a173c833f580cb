"""The fla plugin over stand-ins for the library, and on a GPU over the library: prompts, checkpoints, claims, an engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fake_fla
from headway.core.contract.metadata import Phase
from headway.core.contract.state import KEY_VALUE, VALUE_KEY, StateLayout, StateSpec
from headway.core.contract.state_backend import StateBackend
from headway.core.engine.data.config import EngineConfig
from headway.core.oracle.state_cases import make_state_case
from headway.core.sampling.params import SamplingParams
from headway.registry import create_registry
from headway.registry.plugin_sources import load_file
from headway.testing.diagnosis.state_verdict import Judge
from headway.testing.kit.checking import Wanted, check
from headway.testing.kit.state_kit import StateKit
from headway.testing.kit.state_subject import state_subject_of
from made_engine import made_engine
from run_engine import generate
from stateful_model import MODELS

FILE = Path(__file__).resolve().parent.parent / "examples" / "headway-fla" / "headway_fla.py"
KINDS = ("gated_delta", "kda", "mamba2", "lightning")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, module in fake_fla.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fake_fla, "CALLS", [])
    return load_file(FILE)


def layer(kind: str, **changes: Any) -> StateSpec:
    delta = kind in ("gated_delta", "kda")
    sizes = {"num_heads": 4, "num_key_heads": 2, "key_dim": 16, "value_dim": 8}
    numbers = {"scale": 1.0 if kind == "mamba2" else 0.2, "qk_norm": delta, "beta_scale": 2.0 if delta else 1.0}
    return StateSpec(kind, **{**sizes, **numbers, **changes})


def on_a_cpu(plugin: ModuleType, **claims: Any) -> type[StateBackend]:
    """The plugin's class, which claims what its stand-ins compute here."""
    chosen = replace(plugin.Fla.capabilities, devices=("cpu",), **claims)
    body = {"available": classmethod(lambda cls: StateBackend.available()), "capabilities": chosen}
    return type("OnCpu", (plugin.Fla,), body)


@pytest.mark.parametrize("layout", [KEY_VALUE, VALUE_KEY], ids=lambda layout: layout.name)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_extensions_leave_outputs_states_and_checkpoints(plugin: ModuleType, kind: str, layout: StateLayout) -> None:
    spec = layer(kind, dt_limits=(0.05, 2.0) if kind == "mamba2" else (0.0, float("inf")))
    case = make_state_case([(70, 90), (3, 3), (130, 130), (64, 64), (9, 12)], spec, layout, strided=True)
    Judge.of(case).run(plugin.Fla(spec, layout))
    assert fake_fla.CALLS == [[64, 3, 64, 64, 9], [6, 64], [2]], "up to a checkpoint, then on to the next"


def test_states_in_16_bits_and_inputs_too(plugin: ModuleType) -> None:
    for kind in KINDS:
        spec = layer(kind, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
        Judge.of(make_state_case([(20, 30), (66, 66)], spec, KEY_VALUE, in_place=False)).run(plugin.Fla(spec, KEY_VALUE))


def test_without_checkpoints_there_is_one_call_over_the_tokens_where_they_lie(plugin: ModuleType) -> None:
    spec = layer("kda")
    backend = plugin.Fla(spec, KEY_VALUE)
    case = make_state_case([(70, 90), (3, 3), (64, 64)], spec, KEY_VALUE, checkpoints=False)
    assert case.metadata.prefill is not None
    (call,) = backend.plan(case.metadata.prefill).calls
    assert call.tokens == slice(0, 137)
    Judge.of(case).run(backend)


def test_rows_of_padding_are_left_alone(plugin: ModuleType) -> None:
    spec = layer("gated_delta")
    case = make_state_case([(20, 40), (9, 9)], spec, KEY_VALUE)
    assert case.metadata.prefill is not None
    slots = torch.tensor([-1, int(case.metadata.slots_cpu[1])], dtype=torch.int32)
    case = replace(case, metadata=replace(case.metadata, slots=slots, slots_cpu=slots))
    Judge.of(case).run(plugin.Fla(spec, KEY_VALUE))
    assert fake_fla.CALLS == [[9]]


def test_it_says_what_it_does_not_serve(plugin: ModuleType) -> None:
    def said(kind: str = "gated_delta", phase: Phase = Phase.PREFILL, **changes: Any) -> str:
        sizes = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, "device": torch.device("cuda")}
        return str(plugin.Fla.supports(layer(kind, **{**sizes, **changes}), VALUE_KEY, phase))

    assert {said(kind) for kind in KINDS} == {"yes"}
    assert said(phase=Phase.EXTEND) == "yes"
    assert "phase: needs prefill or extend, got decode" in said(phase=Phase.DECODE)
    assert "convolution: needs a recurrence alone" in said(conv_channels=1024, conv_width=4)
    assert "dtype: needs bfloat16, got float32" in said(dtype=torch.float32)
    assert "key_dim: needs 64 or 128, got 32" in said(key_dim=32)
    assert "beta_scale: needs 1 or 2, got 1.5" in said(beta_scale=1.5)
    assert "qk_norm" in said("lightning", qk_norm=True)


def test_it_says_what_a_release_lacks(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert plugin.Fla.available()
    plugin.kernel.cache_clear()
    monkeypatch.setattr(sys.modules["fla.ops.kda"], "chunk_kda", lambda q, k, v, g, beta, cu_seqlens, state_v_first: None)
    lacks = "chunk_kda of this release takes no cu_seqlens_cpu, use_beta_sigmoid_in_kernel; that of fla-core 0.6.0 does"
    assert lacks in str(plugin.Fla.available())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device: needs a CUDA GPU, got none" in str(plugin.Fla.available())


@pytest.mark.slow
def test_the_kit_finds_its_claims_kept(plugin: ModuleType) -> None:
    kit = StateKit(state_subject_of(on_a_cpu(plugin, key_dims=(16,), value_dims=(16,)), torch.device("cpu")))
    cells = [cell for cell in kit.cells(quick=True) if cell.check in ("claims", "refuse", "tolerance", "answer")]
    results = [kit.run(cell) for cell in cells]
    assert [result for result in results if result.status != "passed"] == []
    assert {result.feature for result in results if result.check == "answer"} == set(KINDS)


def test_an_engine_has_others_decode_and_convolve(plugin: ModuleType) -> None:
    found = on_a_cpu(plugin, dtypes=(torch.float32,), key_dims=None, value_dims=None)
    registry = create_registry([found], load_entry_points=False)
    model = MODELS["gated delta"]
    config = EngineConfig(
        attn_backend="sdpa", state_backend="prefill=fla,decode=torch", kv_cache_memory=2**21, max_num_batched_tokens=80
    )
    engine = made_engine(model, registry, config)
    prompts = [[number % 50 for number in range(start, start + length)] for start, length in ((0, 3), (5, 150), (5, 140))]
    params = SamplingParams(temperature=0, max_tokens=8)
    written = generate(engine, prompts, params)
    assert [each.token_ids for each in written] == [model.greedy(prompt, 8) for prompt in prompts]
    assert fake_fla.CALLS


@pytest.mark.gpu
@pytest.mark.slow
def test_the_library_keeps_the_contract() -> None:
    pytest.importorskip("fla")
    report = check(Wanted(f"{FILE}:Fla", device="cuda", quick=True))
    if report.unavailable:
        pytest.skip(report.unavailable)
    assert not report.failed
