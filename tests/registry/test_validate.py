"""Every field that a plugin hands in, wrong: one line names the plugin, the field and what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.backends.sdpa import SDPA
from headway.contract import (
    ALL_PHASES,
    API_VERSION,
    AttentionBackend,
    BackendInfo,
    CacheLayout,
    Capabilities,
    LayoutInfo,
    Phase,
    PluginError,
)
from headway.core.contract.layout import write_rows
from headway.registry import create_registry, hookimpl

AXES = ("head", "block", "slot", "dim")


class Plugin:
    """A plugin with these answers."""

    def __init__(self, backends: object = (), layouts: object = ()) -> None:
        self.backends, self.layouts = backends, layouts

    @hookimpl
    def headway_register_layouts(self) -> Any:
        return self.layouts

    @hookimpl
    def headway_register_backends(self) -> Any:
        return self.backends


def info(name: Any = "mine", load: Any = lambda: SDPA, **changes: Any) -> BackendInfo:
    return BackendInfo(name, **{"summary": "of a test", "load": load, "api_version": API_VERSION, **changes})


def refused(plugin: object) -> str:
    with pytest.raises(PluginError) as caught:
        create_registry({"toy": plugin}, load_entry_points=False)
    assert str(caught.value).startswith("plugin 'toy' of toy: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (Plugin(backends=None), "headway_register_backends() must return a list of BackendInfo, got None"),
        (Plugin(backends="flash"), "headway_register_backends() must return a list of BackendInfo, got 'flash'"),
        (Plugin(backends={"a": 1}), "headway_register_backends() must return a list of BackendInfo, got {'a': 1}"),
        (Plugin(backends=[SDPA]), "item 0 of headway_register_backends() must be a BackendInfo, got ABCMeta"),
        (Plugin(layouts=5), "headway_register_layouts() must return a list of LayoutInfo, got 5"),
        (Plugin(layouts=[info()]), "item 0 of headway_register_layouts() must be a LayoutInfo, got BackendInfo"),
        (
            Plugin([info(name="")]),
            "BackendInfo.name must be a text without blanks, commas or equals signs, of at most 64 characters, got ''",
        ),
        (Plugin([info(name="a b")]), "BackendInfo.name must be a text without blanks"),
        (Plugin([info(name="a" * 10**5)]), "of at most 64 characters, got 'aaaa"),
        (Plugin([info(name="a,b")]), "BackendInfo.name must be a text without blanks"),
        (Plugin([info(name=3)]), "BackendInfo.name must be a text without blanks"),
        (Plugin([info(name="auto")]), "BackendInfo.name must be none of the words auto and reference, got 'auto'"),
        (Plugin([info(load=SDPA.name)]), "backend 'mine': BackendInfo.load must be callable"),
        (Plugin([info(summary=None)]), "backend 'mine': BackendInfo.summary must be a text, got None"),
        (Plugin([info(api_version=1)]), f"backend 'mine' is written for api_version 1, Headway has {API_VERSION}"),
        (Plugin([info(api_version=True)]), "BackendInfo.api_version must be a whole number, as 3, got True"),
        (Plugin([info(api_version="2")]), "BackendInfo.api_version must be a whole number, as 3, got '2'"),
        (Plugin(layouts=[LayoutInfo(AXES, lambda device: write_rows)]), "LayoutInfo.layout must be a CacheLayout"),
        (
            Plugin(layouts=[LayoutInfo(CacheLayout("own", {"key": AXES, "value": AXES}), None)]),
            "layout 'own': LayoutInfo.load_writer must be callable, got None",
        ),
        (
            Plugin(layouts=[LayoutInfo(CacheLayout("auto", {"key": AXES, "value": AXES}), lambda device: write_rows)]),
            "CacheLayout.name must be none of the words auto and reference",
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_a_hook_hands_in_is_checked_when_it_registers(plugin: Plugin, words: str) -> None:
    assert words in refused(plugin)


def test_a_hook_that_raises_is_named_with_its_plugin() -> None:
    class Falls:
        @hookimpl
        def headway_register_backends(self) -> None:
            raise KeyError("no table")

    assert "headway_register_backends() raised KeyError: 'no table'" in refused(Falls())


GOOD: dict[str, Any] = {"phases": ALL_PHASES, "devices": ("cpu",)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("phases", ["decode"]),
        ("phases", frozenset({"decode"})),
        ("phases", frozenset()),
        ("layouts", ["nhd"]),
        ("layouts", ()),
        ("dtypes", torch.float32),
        ("dtypes", ("float32",)),
        ("kv_dtypes", ("fp8_e4m3",)),
        ("devices", "cpu"),
        ("devices", ()),
        ("block_multiple", 0),
        ("block_multiple", 16.0),
        ("head_dims", 64),
        ("head_dims", (64, -1)),
        ("v_head_dims", ((192,),)),
        ("max_group_size", 0),
        ("features", frozenset({"sink"})),
        ("features", {"sinks": True}),
        ("lse", "yes"),
        ("batch_invariant", 1),
    ],
    ids=str,
)
def test_a_claim_of_the_wrong_kind_is_named_when_the_class_is_loaded(field: str, value: object) -> None:
    claims = Capabilities(**{**GOOD, field: value})
    backend = type("Mine", (SDPA,), {"name": "mine", "capabilities": claims})
    registry = create_registry([Plugin([info(load=lambda: backend)])], load_entry_points=False)
    with pytest.raises(PluginError, match=rf"^backend mine of Plugin: capabilities\.{field} must be ") as caught:
        registry.backend("mine")
    assert "\n" not in str(caught.value)
    assert not registry.availability("mine")


class Plain(AttentionBackend):
    """Decode alone, with nothing wrong."""

    name = "mine"
    capabilities = Capabilities(phases=frozenset({Phase.DECODE}), devices=("cpu",))

    def plan(self, metadata: object) -> object:
        return metadata

    def decode(self, q: object, cache: object, plan: object, out: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "other"}, "name must be 'mine' as in its BackendInfo, got 'other'"),
        ({"capabilities": None}, "capabilities must be a Capabilities, got None"),
        ({"capabilities": Capabilities(**GOOD)}, r"phases names prefill, but class Changed has no prefill\(\)"),
        ({"graph_level": 1}, "graph_level must be a GraphLevel, got 1"),
        ({"options": {"splits"}}, "options must be a mapping of texts to texts"),
        ({"options": {"splits": 4}}, "options must be a mapping of texts to texts"),
        ({"tolerance": 1e-3}, "tolerance must be a mapping of torch.dtype to numbers above 0"),
        ({"tolerance": {torch.float32: float("inf")}}, "tolerance must be a mapping"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_a_class_that_does_not_keep_its_word_is_refused(changes: dict[str, Any], words: str) -> None:
    backend = type("Changed", (Plain,), changes)
    registry = create_registry([Plugin([info(load=lambda: backend)])], load_entry_points=False)
    with pytest.raises(PluginError, match=f"^backend mine of Plugin: .*{words}"):
        registry.backend("mine")


def test_the_plain_class_itself_is_taken() -> None:
    registry = create_registry([Plugin([info(load=lambda: Plain)])], load_entry_points=False)
    assert registry.backend("mine") is Plain
