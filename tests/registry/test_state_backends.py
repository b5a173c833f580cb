"""Backends for layers with a state in the Registry: what it lists, loads, orders and refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.backends.states.torch_states import TorchStates
from headway.contract import (
    KEY_VALUE,
    STATE_KINDS,
    VALUE_KEY,
    AttentionBackend,
    Phase,
    PluginError,
    StateBackend,
    StateBackendInfo,
    StateCapabilities,
    StateLayout,
    StateSpec,
    UnknownBackendError,
)
from headway.registry import Registry, create_registry, hookimpl
from headway.registry.records import BUILTIN_OWNER

LAYER = StateSpec("gated_delta", 4, 2, 8, 8)
OWN_LAYOUT = StateLayout("own", ("slot", "value", "head", "key"))


class Plugin:
    """A plugin with these answers."""

    def __init__(self, backends: object = (), layouts: object = (), order: Any = None) -> None:
        self.backends, self.layouts, self.order = backends, layouts, order

    @hookimpl
    def headway_register_state_backends(self) -> Any:
        return self.backends

    @hookimpl
    def headway_register_state_layouts(self) -> Any:
        return self.layouts

    @hookimpl
    def headway_rank_state_backends(self, candidates: Sequence[str]) -> Any:
        return self.order and self.order(candidates)


def named(name: str, **body: Any) -> type[StateBackend]:
    return type("Mine", (TorchStates,), {"name": name, **body})


def info(name: Any = "mine", load: Any = None, **changes: Any) -> StateBackendInfo:
    return StateBackendInfo(name, "of a test", load or (lambda: named(name)), **{"api_version": 3, **changes})


def make(plugin: object) -> Registry:
    return create_registry({"toy": plugin}, load_entry_points=False)


def test_the_built_in_backend_serves_every_kind_on_this_machine(registry: Registry) -> None:
    assert registry.states.entries["torch"].owner == BUILTIN_OWNER
    assert registry.states.backend("torch") is TorchStates
    assert registry.states.backend("torch").capabilities.kinds == set(STATE_KINDS)
    assert list(registry.states.layouts.values())[:2] == [KEY_VALUE, VALUE_KEY]
    assert all(registry.states.supports("torch", LAYER, VALUE_KEY, phase) for phase in Phase)


def test_a_plugin_brings_backends_and_layouts_and_is_listed_with_both() -> None:
    registry = make(Plugin([info("mine"), info("lazy", lambda: pytest.fail("nobody asked for it"))], [OWN_LAYOUT]))
    assert registry.states.layouts["own"] == OWN_LAYOUT
    assert registry.states.supports("mine", LAYER, OWN_LAYOUT, Phase.DECODE)
    assert registry.states.entries["mine"].owner == "toy"
    assert registry.brought["toy"].state_backends == ("mine", "lazy")
    assert registry.brought["toy"].state_layouts == ("own",)


def test_a_class_alone_is_registered_with_the_layout_that_it_reads(tmp_path: Path) -> None:
    reader = named("alone", capabilities=StateCapabilities(frozenset({"conv"}), (OWN_LAYOUT,), devices=("cpu",)))
    registry = create_registry([reader], load_entry_points=False)
    assert registry.states.backend("alone") is reader
    assert registry.states.layouts["own"] == OWN_LAYOUT
    support = registry.states.supports("alone", LAYER, KEY_VALUE, Phase.PREFILL)
    assert [reason.what for reason in support.reasons] == ["kind", "state_layout"]

    file = tmp_path / "in_a_file.py"
    file.write_text(
        "from headway.backends.states.torch_states import TorchStates\n\nclass Filed(TorchStates):\n    name = 'filed'\n"
    )
    registry = create_registry([f"{file}:Filed"], load_entry_points=False)
    assert registry.states.availability("filed")


def test_third_parties_are_asked_for_the_order_and_the_baseline_is_last() -> None:
    candidates = ["torch", "mine", "lazy"]
    assert make(Plugin([info("mine")])).states.rank(LAYER, Phase.DECODE, candidates) == ["mine", "lazy", "torch"]
    assert make(Plugin(order=sorted)).states.rank(LAYER, Phase.DECODE, candidates) == ["lazy", "mine", "torch"]
    assert make(Plugin(order=lambda known: known[:1])).states.rank(LAYER, Phase.DECODE, candidates)[-1] == "torch"


def test_unknown_names_are_answered_with_those_there_are(registry: Registry) -> None:
    with pytest.raises(UnknownBackendError, match=r"state backend: asked for 'trch'(.|\n)*Nearest: torch"):
        registry.states.backend("trch")
    with pytest.raises(UnknownBackendError):
        registry.states.availability("trch")


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (Plugin(backends=None), "headway_register_state_backends() must return a list of StateBackendInfo, got None"),
        (Plugin([TorchStates]), "item 0 of headway_register_state_backends() must be a StateBackendInfo"),
        (Plugin([info(api_version=2)]), "state backend 'mine' is written for api_version 2, Headway has 3: install"),
        (Plugin([info("torch")]), "state backend name 'torch' of toy is already taken by built-in"),
        (Plugin([info(), info()]), "state backend name 'mine' of toy is already taken by toy"),
        (Plugin(layouts=["own"]), "item 0 of headway_register_state_layouts() must be a StateLayout, got str 'own'"),
        (Plugin(layouts=[StateLayout("auto", OWN_LAYOUT.recurrent)]), "StateLayout.name must be none of the words auto"),
        (Plugin(layouts=[StateLayout("mine")]), "state layout 'mine' is already registered as 'key_value'"),
        (Plugin(layouts=[OWN_LAYOUT, OWN_LAYOUT]), "state layout 'own' is already registered as 'own'"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_a_hook_hands_in_is_checked_and_taken_whole_or_not(registry: Registry, plugin: Plugin, words: str) -> None:
    fresh = create_registry(load_entry_points=False)
    with pytest.raises(PluginError, match=re.escape(words)):
        fresh.add_plugin("toy", "toy", plugin)
    assert list(fresh.states.entries) == list(registry.states.entries)
    assert list(fresh.states.layouts) == ["key_value", "value_key"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kinds", frozenset({"rwkv"})),
        ("kinds", frozenset()),
        ("layouts", (OWN_LAYOUT.recurrent,)),
        ("phases", frozenset({"decode"})),
        ("convolution", 1),
        ("state_dtypes", ("float32",)),
        ("devices", "cpu"),
        ("key_dims", 128),
        ("value_dims", (0,)),
        ("max_draft_tokens", -1),
    ],
    ids=str,
)
def test_a_claim_of_the_wrong_kind_is_named(field: str, value: object) -> None:
    claims = StateCapabilities(**{"kinds": frozenset(STATE_KINDS), "devices": ("cpu",), field: value})
    registry = make(Plugin([info(load=lambda: named("mine", capabilities=claims))]))
    with pytest.raises(PluginError, match=rf"^state backend mine of toy: capabilities\.{field} must be "):
        registry.states.backend("mine")
    assert not registry.states.availability("mine")


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (lambda: TorchStates, "state backend mine of toy: name must be 'mine' as in its StateBackendInfo, got"),
        (lambda: AttentionBackend, "load() must return a subclass of StateBackend"),
        (lambda: named("mine", scan=StateBackend.scan), "capabilities.phases names prefill, but class Mine has no scan()"),
        (lambda: named("mine", step=StateBackend.step), "capabilities.phases names decode, but class Mine has no step()"),
        (lambda: named("mine", graph_level=2.5), "graph_level must be a GraphLevel"),
        (lambda: named("mine", tolerance={torch.float32: 0}), "tolerance must be a mapping"),
        (lambda: named("mine", plan=StateBackend.plan, __abstractmethods__=frozenset({"plan"})), "lacks plan"),
    ],
)
def test_a_class_that_is_not_whole_is_named(loaded: Any, words: str) -> None:
    registry = make(Plugin([info(load=loaded)]))
    with pytest.raises(PluginError, match=re.escape(words)):
        registry.states.backend("mine")
