"""Plugins without a distribution: files, classes in files, classes at hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headway.contract import ALL_PHASES, AttentionBackend, CacheLayout, Capabilities, Phase
from headway.core.contract.errors import HeadwayError
from headway.core.contract.spec import AttentionSpec
from headway.registry import Registry, create_registry
from sandbox import TOY

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
