"""Every field that a plugin hands in, wrong: one line names the plugin, the field and what it holds."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
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
from headway.core.contract.errors import HeadwayError
from headway.core.contract.layout import write_rows
from headway.core.contract.spec import AttentionSpec
from headway.registry import Registry, create_registry, hookimpl
from headway.registry.plugin_sources import installed_plugins
from sandbox import BROKEN, BROKEN_SAYS, TOY, install, run_headway

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
        (Plugin(backends=[SDPA]), "item 0 of headway_register_backends() must be a BackendInfo, got ABCMeta"),
        (Plugin(layouts=5), "headway_register_layouts() must return a list of LayoutInfo, got 5"),
        (Plugin(layouts=[info()]), "item 0 of headway_register_layouts() must be a LayoutInfo, got BackendInfo"),
        (
            Plugin([info(name="")]),
            "BackendInfo.name must be a text without blanks, commas or equals signs, of at most 64 characters, got ''",
        ),
        (Plugin([info(name="a" * 10**5)]), "of at most 64 characters, got 'aaaa"),
        (Plugin([info(name=3)]), "BackendInfo.name must be a text without blanks"),
        (Plugin([info(name="auto")]), "BackendInfo.name must be none of the words auto and reference, got 'auto'"),
        (Plugin([info(load=SDPA.name)]), "backend 'mine': BackendInfo.load must be callable"),
        (Plugin([info(summary=None)]), "backend 'mine': BackendInfo.summary must be a text, got None"),
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
        ("phases", frozenset({"decode"})),
        ("phases", frozenset()),
        ("layouts", ["nhd"]),
        ("dtypes", ("float32",)),
        ("kv_dtypes", ("fp8_e4m3",)),
        ("devices", "cpu"),
        ("block_multiple", 0),
        ("head_dims", (64, -1)),
        ("v_head_dims", ((192,),)),
        ("max_group_size", 0),
        ("features", frozenset({"sink"})),
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


WITHOUT_HOOK = TOY.replace("@hookimpl\n", "")
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def registry_of(*plugins: object) -> Registry:
    return create_registry(plugins, load_entry_points=False)


def test_a_file_with_hooks_is_a_plugin(folder: Path) -> None:
    (folder / "toy_file.py").write_text(TOY)
    registry = registry_of("toy_file.py")
    entry = registry.backends["toy.decode"]
    assert entry.owner.startswith("toy_file.py@")
    assert registry.supports("toy.decode", SPEC, registry.layout("hnd").layout, 64, Phase.DECODE)


def test_another_text_of_a_file_is_another_owner_so_that_its_tables_are_stale(folder: Path) -> None:
    path = folder / "toy_file.py"
    owners = []
    for text in (TOY, TOY + "\n# changed\n", TOY):
        path.write_text(text)
        owners.append(registry_of(path).backends["toy"].owner)
    assert owners[0] == owners[2] != owners[1]


def test_a_class_of_a_file_needs_no_hook(folder: Path) -> None:
    (folder / "toy_file.py").write_text(WITHOUT_HOOK)
    registry = registry_of("toy_file.py:ToyDecode")
    assert "toy" not in registry.backends
    assert registry.backends["toy.decode"].owner.startswith("toy_file.py@")


def test_a_file_may_import_what_lies_beside_it_and_puts_no_other_module_aside(folder: Path) -> None:
    (folder / "json.py").write_text(TOY.replace("import torch\n", "import torch\nfrom beside_it import NOTHING\n"))
    (folder / "beside_it.py").write_text("NOTHING = None\n")
    known = sys.modules["json"]
    assert "toy" in registry_of("json.py").backends
    assert sys.modules["json"] is known


OWN = CacheLayout("slots_outermost", {"key": ("slot", "block", "head", "dim"), "value": ("slot", "block", "head", "dim")})


class Alone(AttentionBackend):
    """Attends to nothing."""

    name = "alone"
    capabilities = Capabilities(phases=ALL_PHASES, layouts=(OWN,), devices=("cpu",))

    def plan(self, metadata: object) -> None: ...

    def prefill(self, q: object, k: object, v: object, cache: object, plan: object, out: torch.Tensor) -> None: ...

    def decode(self, q: object, cache: object, plan: object, out: torch.Tensor) -> None: ...


def test_a_class_is_a_plugin_with_the_layouts_that_it_reads() -> None:
    registry = registry_of(Alone)
    assert registry.backends["alone"].info.summary == "Attends to nothing."
    assert registry.backend("alone") is Alone
    layout = registry.layout("slots_outermost").layout
    assert registry.supports("alone", SPEC, layout, 16, Phase.DECODE)
    assert callable(registry.layout("slots_outermost").load_writer(torch.device("cpu")))


def test_a_class_whose_layouts_are_names_is_told_so() -> None:
    class Named(Alone):
        capabilities = Capabilities(phases=ALL_PHASES, layouts=("nhd",), devices=("cpu",))  # type: ignore[arg-type]

    with pytest.raises(
        HeadwayError, match=r"capabilities.layouts must be a tuple of CacheLayout, or None for any, got \('nhd',\)"
    ):
        registry_of(Named).backend("alone")


BAD = {
    "missing.py": (None, ("missing.py", "there is no such file")),
    "folder": (None, ("'folder'", "FILE.py or FILE.py:CLASS")),
    "bad_syntax.py": ("def f(:\n", ("plugin bad_syntax.py: SyntaxError", "bad_syntax.py, line 1")),
    "raises.py": ("x = 1\nimport no_such_library\n", ("plugin raises.py: ModuleNotFoundError", "no_such_library", "(line 2)")),
    "exits.py": ("import sys\nsys.exit(3)\n", ("plugin exits.py: SystemExit: 3 (line 2)",)),
    "hookless.py": (WITHOUT_HOOK, ("implements no hook", "headway.hookimpl", "hookless.py:CLASS")),
    "hookless.py:Nobody": (WITHOUT_HOOK, ("one of Toy, ToyDecode", "'Nobody'")),
    "signature.py": (BROKEN["wrong_signature"], ("signature.py", *BROKEN_SAYS["wrong_signature"])),
    "hook.py": (BROKEN["unknown_hook"], ("hook.py", *BROKEN_SAYS["unknown_hook"])),
    "nameless.py:Toy": (WITHOUT_HOOK.replace('name = "toy"', ""), ("class Toy", "`name`")),
    "taken.py": (TOY.replace('"toy"', '"sdpa"'), ("'sdpa'", "taken.py", "already taken by built-in", "rename one of them")),
    "taken.py:Toy": (WITHOUT_HOOK.replace('name = "toy"', 'name = "sdpa"'), ("'sdpa'", "already taken by built-in")),
}


@pytest.mark.parametrize("given", BAD)
def test_a_refused_file_says_why_in_one_line_and_costs_nothing_else(folder: Path, given: str) -> None:
    text, words = BAD[given]
    name = given.partition(":")[0]
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(HeadwayError) as refused:
        registry_of(given)
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)
    if text is None or "SystemExit" in words[0] or "Error" in words[0]:
        assert Path(name).stem not in sys.modules
    assert "toy" not in registry_of().backends


MALFORMED = "[headway]\nthis line has no equals sign\n"


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    folder = tmp_path / "plugins"
    folder.mkdir()
    return folder


def create(plugins: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> Registry:
    monkeypatch.syspath_prepend(str(plugins))
    return create_registry(**options)


def test_an_entry_point_is_found_with_its_distribution(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(plugins, "headway_toy", TOY, version="2.5")
    registry = create(plugins, monkeypatch)
    assert not registry.failures
    assert registry.backends["toy"].owner == "headway_toy 2.5"
    assert registry.availability("toy")


def test_a_blocked_entry_point_is_left_alone(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(plugins, "headway_blocked", 'raise AssertionError("imported all the same")\n')
    registry = create(plugins, monkeypatch, block=["headway_blocked"])
    assert not registry.failures


def test_a_distribution_that_is_on_the_path_twice_counts_once(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(plugins, "headway_twice", TOY)
    monkeypatch.syspath_prepend(str(plugins))
    monkeypatch.syspath_prepend(f"{plugins}/../{plugins.name}")
    assert [point.name for point in installed_plugins("headway") if point.name == "headway_twice"] == ["headway_twice"]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_registers_nothing(registry: Registry, plugins: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(plugins, f"broken_{name}", BROKEN[name])
    broken = create(plugins, monkeypatch)
    (failure,) = broken.failures
    assert (failure.name, failure.owner) == (f"broken_{name}", f"broken_{name} 1.0")
    for word in BROKEN_SAYS[name]:
        assert word in str(failure)
    assert list(broken.backends) == list(registry.backends)


def test_metadata_that_cannot_be_read_does_not_stop_start_up(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(plugins, "broken_metadata", "", entry_points=MALFORMED)
    install(plugins, "headway_good", TOY)
    registry = create(plugins, monkeypatch)
    assert registry.backends["toy"].owner == "headway_good 1.0"


def test_an_entry_point_to_nothing_is_a_record(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        plugins, "broken_point", "", entry_points="[headway]\na = broken_point:missing\nb = no_such_module\nc = not a module\n"
    )
    failures = create(plugins, monkeypatch).failures
    assert sorted(failure.name for failure in failures) == ["a", "b", "c"]
    assert {failure.owner for failure in failures} == {"broken_point 1.0"}


def test_one_entry_point_name_in_two_distributions_costs_only_the_second(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(plugins, "first_of_two", TOY, entry_points="[headway]\nfast = first_of_two\n")
    install(plugins, "second_of_two", TOY.replace('"toy', '"yot'), entry_points="[headway]\nfast = second_of_two\n")
    registry = create(plugins, monkeypatch)
    (failure,) = registry.failures
    brought = {"toy", "toy.decode", "yot", "yot.decode"} & set(registry.backends)
    assert brought in ({"toy", "toy.decode"}, {"yot", "yot.decode"})
    assert failure.owner == ("second_of_two 1.0" if "toy" in brought else "first_of_two 1.0")
    for word in ("'fast'", "first_of_two 1.0", "second_of_two 1.0"):
        assert word in str(failure)
    assert "<module" not in str(failure)


@pytest.mark.slow
def test_every_failure_is_listed_from_outside(plugins: Path, tmp_path: Path) -> None:
    for name, source in {**{f"broken_{name}": text for name, text in BROKEN.items()}, "headway_toy": TOY}.items():
        install(plugins, name, source)
    listed = run_headway("backends", plugins=plugins, cwd=tmp_path, columns=200)
    assert listed.code == 0, listed
    for name in BROKEN:
        (line,) = [line for line in listed.out.splitlines() if line.startswith(f"plugin not loaded: broken_{name} ")]
        assert f"(from broken_{name} 1.0)" in line
        for word in BROKEN_SAYS[name]:
            assert word in line or word in listed.out
    (row,) = [line for line in listed.out.splitlines() if re.match(r"\W*toy\s", line)]
    assert "headway_toy 1.0" in row

    answer = run_headway("backends", "--json", plugins=plugins, cwd=tmp_path)
    parsed = json.loads(answer.out)
    assert {failure["plugin"] for failure in parsed["failures"]} == {f"broken_{name}" for name in BROKEN}
    assert {row["kind"] for row in parsed["backends"] if row["name"].startswith("toy")} == {"headway_toy 1.0"}
    unknown = run_headway("generate", "--attn-backend", "nope", "fox", plugins=plugins, cwd=tmp_path)
    assert (unknown.code, unknown.err.count("plugin that failed to load: ")) == (2, len(BROKEN))
