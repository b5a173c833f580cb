"""The Registry in process: what it lists, what it refuses, and that a refused plugin leaves no trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backend_cases import spec
from headway.backends.sdpa import SDPA
from headway.core.contract.backend import API_VERSION, BackendInfo
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.errors import ConfigError, PluginError, UnknownBackendError
from headway.core.contract.layout import HND, NHD, CacheLayout, LayoutInfo, write_rows
from headway.core.contract.metadata import Phase
from headway.core.contract.support import Support
from headway.core.system.logs import warn_once
from headway.registry import Registry, create_registry, hookimpl
from headway.registry.records import BUILTIN_OWNER
from sandbox import run_python

KERNEL_LIBRARIES = ("triton", "flash_attn", "xformers", "cutlass", "flashinfer", "transformers", "vllm")
LOADED_LATE = (*KERNEL_LIBRARIES, "torch.nn.attention.varlen", "headway.backends.flash", "headway.backends.xformers")
"""What modules' names begin with that nobody needs before a backend is chosen."""


def refuse_to_load() -> type[SDPA]:
    raise AssertionError("nobody asked for this backend")


def info(name: str, load: Callable[[], object] = refuse_to_load, **changes: object) -> BackendInfo:
    return BackendInfo(name, f"{name} of a test", load, **{"api_version": API_VERSION, **changes})


def layout(name: str, *axes: str) -> LayoutInfo:
    order = axes or ("head", "block", "slot", "dim")
    return LayoutInfo(CacheLayout(name, {"key": order, "value": order}), lambda device: write_rows)


class Plugin:
    """A plugin object with the given answers."""

    def __init__(self, backends: Sequence[object] = (), layouts: Sequence[object] = (), rank: object = None) -> None:
        self.backends, self.layouts, self.order = backends, layouts, rank
        self.asked: list[tuple[Phase, tuple[str, ...]]] = []

    @hookimpl
    def headway_register_layouts(self) -> Sequence[object]:
        return self.layouts

    @hookimpl
    def headway_register_backends(self) -> Sequence[object]:
        return self.backends

    @hookimpl
    def headway_rank_backends(self, spec: object, phase: Phase, candidates: Sequence[str]) -> object:
        self.asked.append((phase, candidates))
        return self.order(candidates) if callable(self.order) else self.order


def make(*plugins: object, **named: object) -> Registry:
    return create_registry(named or plugins, load_entry_points=False)


def test_built_ins_come_first_and_are_named_so(registry: Registry) -> None:
    with_plugin = make(mine=Plugin([info("aaa")], [layout("aaa")]))
    assert list(with_plugin.backends) == [*registry.backends, "aaa"]
    assert list(with_plugin.layouts) == ["nhd", "hnd", "vllm_5d", "latent", "nhd_int8", "aaa"]
    assert {"sdpa", "sdpa.math"} <= set(registry.backends)
    assert {entry.owner for entry in registry.backends.values()} == {BUILTIN_OWNER}
    assert with_plugin.backends["aaa"].owner == "mine"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("statement", ["import headway", "import headway.registry; headway.registry.create_registry()"])
def test_listing_imports_no_kernel_library(statement: str, tmp_path: Path) -> None:
    listed = f"print(*(name for name in sys.modules if name.startswith({LOADED_LATE})))"
    code = f"import sys, {statement.removeprefix('import ')}; {listed}"
    result = run_python("-c", code, cwd=tmp_path)
    assert (result.code, result.out.split()) == (0, []), result


def test_listing_names_loads_no_backend_and_a_backend_is_loaded_once() -> None:
    loads, lazy = [], type("Lazy", (SDPA,), {"name": "lazy"})

    def load() -> type[SDPA]:
        loads.append(1)
        return lazy

    registry = make(mine=Plugin([info("lazy", load), info("other")]))
    assert "lazy" in registry.backends
    registry.attention.rank(spec(), Phase.DECODE, list(registry.backends))
    assert not loads
    assert registry.availability("lazy")
    assert registry.supports("lazy", spec(), NHD, 16, Phase.DECODE)
    assert registry.backend("lazy") is lazy
    assert loads == [1]


def test_a_backend_for_a_cpu_alone_is_not_probed_for_a_gpu() -> None:
    class Elsewhere(SDPA):
        name = "elsewhere"
        capabilities = replace(SDPA.capabilities, devices=("cpu",))

        @classmethod
        def available(cls) -> Support:
            raise AssertionError("a compiler would run for a minute")

    registry = make(mine=Plugin([info("elsewhere", lambda: Elsewhere)]))
    assert "elsewhere" not in registry.able(torch.device("cuda"))
    on_gpu = spec(device=torch.device("cuda"))
    assert registry.supports("elsewhere", on_gpu, NHD, 16, Phase.DECODE).brief == "device: needs cpu, got cuda"
    assert {"sdpa", "sdpa.math"} <= set(registry.able(torch.device("cpu")))
    assert "hopper" not in registry.able(torch.device("cpu"))


def test_an_unknown_name_is_answered_with_every_name_its_state_and_every_failure() -> None:
    def missing() -> type[SDPA]:
        raise ImportError("No module named 'libkernel'")

    registry = make(mine=Plugin([info("broken", missing, extra="libkernel>=2")]))
    with pytest.raises(UnknownBackendError) as caught:
        registry.backend("brokn")
    with pytest.raises(UnknownBackendError, match="'flsh'"):
        registry.availability("flsh")
    text = str(caught.value)
    assert "'brokn', which nobody registered. Nearest: broken. Registered here:" in text
    assert re.search(r"^ +sdpa +available$", text, re.MULTILINE)
    assert re.search(r"^ +broken +unavailable.*libkernel.*pip install 'libkernel>=2'", text, re.MULTILINE)


def test_an_unknown_layout_is_answered_with_those_there_are(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"kv_layout: needs auto or one of nhd, hnd, vllm_5d, latent, nhd_int8, got 'nope'"):
        registry.layout("nope")


@pytest.mark.parametrize("taken", ["sdpa", "first"])
def test_a_taken_backend_name_names_both_owners(taken: str) -> None:
    owner = BUILTIN_OWNER if taken == "sdpa" else "earlier"
    with pytest.raises(PluginError) as caught:
        make(earlier=Plugin([info("first")]), later=Plugin([info(taken)]))
    for word in (repr(taken), owner, "later", "rename"):
        assert word in str(caught.value)


def test_a_plugin_that_uses_a_name_twice_is_refused() -> None:
    with pytest.raises(PluginError, match="'twice'"):
        make(mine=Plugin([info("twice"), info("twice")]))


@pytest.mark.parametrize(
    "clash",
    [layout("nhd", "slot", "block", "head", "dim"), layout("other", *NHD.tensors["key"])],
    ids=["same name, other axes", "same axes, other name"],
)
def test_a_layout_that_exists_is_refused(clash: LayoutInfo) -> None:
    with pytest.raises(PluginError, match=rf"{clash.layout.name!r}.*'nhd'"):
        make(mine=Plugin(layouts=[clash]))


@pytest.mark.parametrize("second", [layout("mine", *HND.tensors["key"][::-1]), layout("other")], ids=["same name", "same axes"])
def test_a_plugin_that_brings_one_layout_twice_is_refused(second: LayoutInfo) -> None:
    with pytest.raises(PluginError, match="mine"):
        make(mine=Plugin(layouts=[layout("mine"), second]))


@pytest.mark.parametrize("version", [1, 4])
def test_a_wrong_api_version_names_both_numbers(version: int) -> None:
    assert API_VERSION == 3
    with pytest.raises(
        PluginError, match=rf"api_version {version}, Headway has 3 and serves those for 2: install .* made for api_version 3"
    ):
        make(mine=Plugin([info("aaa", api_version=version)]))


def test_a_backend_for_the_contract_before_is_served() -> None:
    """What 3 brought is for layers with a state; nothing of attention changed."""
    older = make(mine=Plugin([info("older", lambda: type("Older", (SDPA,), {"name": "older"}), api_version=2)]))
    assert older.supports("older", spec(), NHD, 16, Phase.DECODE)


def wrong_signature() -> object:
    class Wrong(Plugin):
        @hookimpl
        def headway_register_backends(self, surprise: object) -> list[BackendInfo]:
            return [info("good")]

    return Wrong(layouts=[layout("mine")], rank=sorted)


def unknown_hook() -> object:
    class Unknown(Plugin):
        @hookimpl
        def headway_register_engines(self) -> list[BackendInfo]:
            return []

    return Unknown([info("good")], [layout("mine")], rank=sorted)


BROKEN_PLUGINS = {
    "taken backend name": lambda: Plugin([info("good"), info("sdpa")], [layout("mine")], sorted),
    "wrong api_version": lambda: Plugin([info("good"), info("other", api_version=7)], [layout("mine")], sorted),
    "taken layout": lambda: Plugin([info("good")], [layout("mine"), layout("nhd")], sorted),
    "not a BackendInfo": lambda: Plugin([info("good"), "flash"], [layout("mine")], sorted),
    "not a LayoutInfo": lambda: Plugin([info("good")], [layout("mine"), NHD], sorted),
    "wrong hook signature": wrong_signature,
    "unknown hook": unknown_hook,
}


@pytest.mark.parametrize("name", BROKEN_PLUGINS)
def test_a_failed_plugin_leaves_nothing_behind(registry: Registry, name: str) -> None:
    fresh = make()
    plugin = BROKEN_PLUGINS[name]()
    with pytest.raises(Exception):  # noqa: B017, PT011  (pluggy's own errors among them; what they say is tested elsewhere)
        fresh.add_plugin("mine", "mine 1.0", plugin)
    assert list(fresh.backends) == list(registry.backends)
    assert list(fresh.layouts) == list(registry.layouts)
    fresh.attention.rank(spec(), Phase.DECODE, ["sdpa.math", "sdpa"])
    assert not plugin.asked
    fresh.add_plugin("mine", "mine 1.1", Plugin([info("good")], [layout("mine")]))
    assert fresh.backends["good"].owner == "mine 1.1"


def test_a_plugin_that_cannot_be_hashed_is_named() -> None:
    class Equal:
        __hash__ = None  # type: ignore[assignment]  # as a dataclass has it that compares by its fields

        @hookimpl
        def headway_register_backends(self) -> list[BackendInfo]:
            return []

    with pytest.raises(PluginError, match=r"must be hashable: TypeError: .*; a dataclass needs eq=False or frozen=True"):
        create_registry([Equal()], load_entry_points=False)


def test_registering_a_plugin_a_second_time_does_not_take_its_hooks_away() -> None:
    plugin = Plugin([info("aaa")], rank=sorted)
    registry = make(mine=plugin)
    with pytest.raises(Exception):  # noqa: B017, PT011
        registry.add_plugin("again", "again 1.0", plugin)
    registry.attention.rank(spec(), Phase.DECODE, list(registry.backends))
    assert plugin.asked


def test_a_plugins_rank_hook_is_asked_before_the_built_in_order() -> None:
    plugin = Plugin([info("aaa")], rank=lambda names: sorted(names, reverse=True))
    names = ["sdpa", "sdpa.math", "aaa"]
    assert make(mine=plugin).attention.rank(spec(), Phase.DECODE, names) == ["sdpa.math", "sdpa", "aaa"]
    assert plugin.asked == [(Phase.DECODE, tuple(names))]


def test_a_rank_hook_that_answers_none_leaves_it_to_the_next() -> None:
    plugin = Plugin([info("aaa")], rank=None)
    assert make(mine=plugin).attention.rank(spec(), Phase.DECODE, ["sdpa.math", "aaa"]) == ["aaa", "sdpa.math"]
    assert plugin.asked


@pytest.mark.parametrize("answer", [["sdpa"], ["sdpa", "sdpa"], ["sdpa", "sdpa.math", "flash"], "sdpa", ["sdpa", 1], 7], ids=repr)
def test_a_rank_that_is_no_order_is_named_and_passed_over(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    registry = make(mine=Plugin(rank=answer))
    assert registry.attention.rank(spec(), Phase.DECODE, ["sdpa.math", "sdpa"]) == ["sdpa", "sdpa.math"]
    assert "headway_rank_backends() of plugin 'mine' of mine is skipped: it must return an order" in caplog.text


@pytest.mark.parametrize("raised", [ZeroDivisionError("no measurements"), SystemExit("no measurements")], ids=repr)
def test_a_rank_hook_that_raises_is_named_and_passed_over(raised: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def fall_over(names: Sequence[str]) -> None:
        raise raised

    warn_once.cache_clear()
    registry = make(mine=Plugin(rank=fall_over))
    assert [registry.attention.rank(spec(), phase, ["sdpa"]) for phase in Phase] == [["sdpa"]] * len(Phase)
    assert caplog.text.count("plugin 'mine' of mine is skipped") == 1
    assert f"it raised {type(raised).__name__}: no measurements" in caplog.text


def test_a_backend_that_does_not_load_is_unavailable_with_its_reason_and_the_others_go_on() -> None:
    def missing() -> type[SDPA]:
        raise ImportError("No module named 'libkernel'")

    registry = make(
        mine=Plugin(
            [info("broken", missing, extra="libkernel>=2"), info("fine", lambda: type("Fine", (SDPA,), {"name": "fine"}))]
        )
    )
    for support in (registry.availability("broken"), registry.supports("broken", spec(), NHD, 16, Phase.DECODE)):
        (reason,) = support.reasons
        assert "libkernel" in reason.got
        assert reason.hint == "pip install 'libkernel>=2'"
    assert registry.availability("fine")
    assert registry.availability("sdpa")
    with pytest.raises(PluginError, match="broken of mine does not load: ImportError"):
        registry.backend("broken")


@pytest.mark.parametrize("probe", [False, True], ids=["its module", "its probe"])
def test_a_backend_whose_package_is_not_installed_says_so_and_what_installs_it(probe: bool) -> None:
    def missing(*_: object) -> type[SDPA]:
        raise ModuleNotFoundError("No module named 'libkernel.core'", name="libkernel.core")

    load = (lambda: answers(available=missing)) if probe else missing
    support = make(mine=Plugin([info("odd", load, extra="libkernel[cuda]")])).availability("odd")
    assert str(support) == "no: import: needs the package libkernel, got not installed (pip install 'libkernel[cuda]')"


@pytest.mark.parametrize("loaded", [None, SDPA(spec(), NHD, 16), int, "sdpa"], ids=["None", "an instance", "int", "a text"])
def test_load_must_return_a_backend_class(loaded: object) -> None:
    registry = make(mine=Plugin([info("odd", lambda: loaded)]))
    with pytest.raises(PluginError, match="odd of mine.*subclass of AttentionBackend"):
        registry.backend("odd")
    assert not registry.availability("odd")


def answers(**methods: object) -> type[SDPA]:
    return type("Odd", (SDPA,), {"name": "odd"} | {name: classmethod(method) for name, method in methods.items()})


def fall_over(*arguments: object) -> Support:
    raise OSError("libcuda.so.1 is not there")


def test_a_probe_that_raises_means_unavailable() -> None:
    support = make(mine=Plugin([info("odd", lambda: answers(available=fall_over))])).availability("odd")
    assert not support
    assert "libcuda.so.1 is not there" in str(support)


@pytest.mark.parametrize("answer", [True, False, None], ids=repr)
def test_a_probe_that_answers_no_support_object_is_told_so(answer: object) -> None:
    support = make(mine=Plugin([info("odd", lambda: answers(available=lambda cls: answer))])).availability("odd")
    assert isinstance(support, Support)
    assert not support
    assert "Support" in str(support)


def test_a_claim_that_raises_means_unsupported() -> None:
    registry = make(mine=Plugin([info("odd", lambda: answers(supports=fall_over))]))
    support = registry.supports("odd", spec(), NHD, 16, Phase.DECODE)
    assert not support
    assert "libcuda.so.1 is not there" in str(support)


def test_no_hint_names_a_layout_that_nobody_registered() -> None:
    mine = layout("mine")
    claims = Capabilities(ALL_PHASES, (mine.layout,), devices=("cpu",))
    reader = info("odd", lambda: type("Odd", (SDPA,), {"name": "odd", "capabilities": claims}))
    alone = make(mine=Plugin([reader])).supports("odd", spec(), NHD, 16, Phase.DECODE)
    beside = make(mine=Plugin([reader], layouts=[mine])).supports("odd", spec(), NHD, 16, Phase.DECODE)
    assert str(alone).endswith(
        "kv_layout: needs mine, got nhd (nobody has registered layout mine; headway plugins lists the plugins)"
    )
    assert str(beside).endswith("kv_layout: needs mine, got nhd (--kv-layout mine)")


def test_the_hint_of_a_block_size_is_one_that_an_engine_takes() -> None:
    claims = Capabilities(ALL_PHASES, devices=("cpu",), block_multiple=12)
    support = claims.check(spec(), NHD, 16, Phase.DECODE)
    assert str(support).endswith("block_size: needs a multiple of 12, got 16 (--block-size 24)")
