"""A third-party backend that is named is tried before it serves."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from headway.core.contract.backend import API_VERSION, BackendInfo
from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import AttentionSpec
from headway.registry import Registry, create_registry, hookimpl
from headway.testing.broken.attention import PLANTED, PlainBackend
from headway.tuning.measure.self_test import SKIP, check_named

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.21, softcap=1.5, device=torch.device("cpu"))


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
        check_named(registry, ["drops-softcap"], [SPEC])
    monkeypatch.setenv(SKIP, "1")
    check_named(registry, ["drops-softcap"], [SPEC])


def test_a_right_one_is_tried_once_a_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    check_named(registry_of(PlainBackend, "third 1.0"), ["plain", "sdpa", "auto"], [SPEC, SPEC])
    assert len(list(tmp_path.rglob("*.passed"))) == 1
    check_named(registry_of(PlainBackend, "third 1.0"), ["plain"], [SPEC])
    assert len(list(tmp_path.rglob("*.passed"))) == 1
    check_named(registry_of(PlainBackend, "third 1.1"), ["plain"], [SPEC])
    assert len(list(tmp_path.rglob("*.passed"))) == 2
