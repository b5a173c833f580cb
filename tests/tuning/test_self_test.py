"""The self-test that a backend must pass before `auto` takes it, and a third-party backend before it serves by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headway.core.contract.backend import API_VERSION, BackendInfo
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import decisive_sinks
from headway.registry import Registry, create_registry, hookimpl
from headway.testing.broken.attention import PLANTED, PlainBackend, PlainPlan
from headway.tuning.measure.self_test import SKIP, check_named, self_test

PLAIN = AttentionSpec(6, 3, 32, 0.2)
SPECS = [
    PLAIN,
    AttentionSpec(8, 2, 64, 1.0, torch.bfloat16),
    AttentionSpec(4, 4, 16, 0.0078, torch.float16, sliding_window=6),
    AttentionSpec(4, 2, 32, 0.2, softcap=1.5),
    AttentionSpec(4, 2, 32, 0.2, torch.bfloat16, sinks=decisive_sinks(4)),
]


def wrong(backend: type[PlainBackend], spec: AttentionSpec) -> str:
    registry = create_registry([backend], load_entry_points=False)
    return self_test(registry, backend.name, spec, [(registry.layouts["nhd"].layout, 16)])


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_right_backend_passes(spec: AttentionSpec) -> None:
    assert wrong(PlainBackend, spec) == ""


class DecodesWideHeads(PlainBackend):
    """Serves one phase, and no layer of these."""

    name = "decodes-wide-heads"
    capabilities = replace(PlainBackend.capabilities, phases=frozenset({Phase.DECODE}), head_dims=(256,))


def test_what_a_backend_lacks_is_told_of_a_phase_that_it_serves() -> None:
    assert wrong(DecodesWideHeads, PLAIN) == "head_dim: needs 256, got 32"


class AsksForOptions(PlainBackend):
    """Its options have no default, as the contract writes the call."""

    name = "asks-for-options"

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Mapping[str, str]) -> None:
        super().__init__(spec, layout, block_size, options)


def test_a_backend_is_always_handed_its_options() -> None:
    assert wrong(AsksForOptions, PLAIN) == ""


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.02, 0.05)])
def test_a_cache_of_eight_bits_is_tested(scales: tuple[float, float]) -> None:
    registry = create_registry(load_entry_points=False)
    spec = AttentionSpec(4, 2, 64, 0.125, torch.bfloat16, kv_dtype=torch.float8_e4m3fn, k_scale=scales[0], v_scale=scales[1])
    assert self_test(registry, "sdpa", spec, [(registry.layouts["nhd"].layout, 16)]) == ""


class WithoutTheMaximum(PlainBackend):
    """Exponentials of the scores as they are: infinite from 89 on."""

    name = "without-the-maximum"

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        large = scores.exp()
        return large / large.sum(-1, keepdim=True)


class FiniteMask(PlainBackend):
    """Hides keys by a number that is not small enough."""

    name = "finite-mask"

    def mask(self, scores: torch.Tensor, context: int) -> torch.Tensor:
        return super().mask(scores, context).clamp_min(-100.0)


class TakesEqualsForNone(PlainBackend):
    """A sum of weights near the number of keys is taken for an empty row."""

    name = "takes-equals-for-none"

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        return super().weights(scores) * (scores.masked_fill(scores.isinf(), 0).abs().amax(-1, keepdim=True) > 0)


class PlansByLengths(PlainBackend):
    """Keeps the plan of a decode, block table and all, for the next step of the same lengths."""

    name = "plans-by-lengths"

    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        plans = self.__dict__.setdefault("plans", {})
        return plans.setdefault((tuple(metadata.query_lens), tuple(metadata.kv_lens)), super().plan(metadata))


class ThreeKvHeads(PlainBackend):
    """Right with any number of kv heads but three."""

    name = "three-kv-heads"

    def kv_heads(self, device: torch.device) -> torch.Tensor:
        return super().kv_heads(device).flip(0) if self.spec.num_kv_heads == 3 else super().kv_heads(device)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (WithoutTheMaximum, "with high scores"),
        (FiniteMask, "with low scores"),
        (TakesEqualsForNone, "with equal scores"),
        (PlansByLengths, "in a step of the lengths of the one before over other blocks"),
        (ThreeKvHeads, "relative error"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_mistake_that_plain_numbers_do_not_show_is_found(backend: type[PlainBackend], words: str) -> None:
    assert words in wrong(backend, PLAIN)


NAMED = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.21, softcap=1.5, device=torch.device("cpu"))


def registry_of(found: type, owner: str) -> Registry:
    plugin = ModuleType("third_party")
    plugin.headway_register_backends = hookimpl(  # type: ignore[attr-defined]
        _named("headway_register_backends", [BackendInfo(found.name, "", lambda: found, api_version=API_VERSION)])
    )
    registry = create_registry(load_entry_points=False)
    registry.add_plugin("third", owner, plugin)
    return registry


def _named(name: str, answer: list[BackendInfo]):
    def hook():
        return answer

    hook.__name__ = name
    return hook


@pytest.mark.parametrize(
    ("owner", "command"),
    [
        ("third 1.0", "headway check drops-softcap says more"),
        ("mine.py@e660e93e", "headway check mine.py:DropsSoftcap says more"),
    ],
)
def test_a_wrong_one_is_refused_with_a_command_that_finds_it_and_may_be_let_through(
    owner: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    registry = registry_of(PLANTED["drops-softcap"], owner)
    with pytest.raises(ConfigError, match=f"right answers in its self-test.*{command}"):
        check_named(registry, ["drops-softcap"], [NAMED])
    monkeypatch.setenv(SKIP, "1")
    check_named(registry, ["drops-softcap"], [NAMED])


def test_a_right_one_is_tried_once_a_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    check_named(registry_of(PlainBackend, "third 1.0"), ["plain", "sdpa", "auto"], [NAMED, NAMED])
    assert len(list(tmp_path.rglob("*.passed"))) == 1
    check_named(registry_of(PlainBackend, "third 1.0"), ["plain"], [NAMED])
    assert len(list(tmp_path.rglob("*.passed"))) == 1
    check_named(registry_of(PlainBackend, "third 1.1"), ["plain"], [NAMED])
    assert len(list(tmp_path.rglob("*.passed"))) == 2
