"""The FlashInfer plugin over stand-ins for the library: what it plans and runs is what the signatures of 0.6.4 take."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from backend_cases import CASES, VERIFY, spec
from fake_flashinfer import modules
from headway.core.contract.errors import HeadwayError
from headway.core.contract.layout import HND, LATENT, NHD, CacheLayout, write_rows
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, parse_case, reference, relative_error, run_backend
from headway.registry.plugin_sources import load_file
from latent_layers import case_of

FILE = Path(__file__).resolve().parent.parent / "examples" / "headway-flashinfer" / "headway_flashinfer.py"
LATENT_LAYER = spec(num_heads=3, num_kv_heads=1, head_dim=576, v_head_dim=512, value_in_key=True)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return load_file(FILE)


def case(name: str, layer: AttentionSpec, layout: CacheLayout) -> Case:
    verify = VERIFY.get(name, 1)
    lens = parse_case(CASES[name], verify)
    return make_case(lens, layer, layout, 16, write_rows, poison=float("nan"), padding_rows=2, decode_query_len=verify)


CHANGED = {"sliding_window": 7, "softcap": 20.0}


@pytest.mark.parametrize(
    ("name", "layout", "changes"), [*((name, NHD, {}) for name in CASES), ("verify", HND, {}), ("decode ragged", HND, CHANGED)]
)
def test_it_computes_every_phase(plugin: ModuleType, name: str, layout: CacheLayout, changes: dict[str, Any]) -> None:
    layer = spec(num_heads=4, num_kv_heads=2, head_dim=64, **changes)
    made = case(name, layer, layout)
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
