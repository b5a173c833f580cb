"""Files that the user names with --plugin are tried and measured like installed plugins; one that misbehaves is an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headway.core.contract.errors import PluginError
from headway.registry import create_registry
from headway.registry.isolation import Verdict
from headway.registry.plugin_sources import PluginFile, PluginSource
from headway.tuning.isolated.child import judge
from headway.tuning.isolated.measure_in_child import can_measure_in_child, third_party_files
from hostile_plugins import HOSTILE, source
from sandbox import BROKEN, BROKEN_SAYS, TOY, run_headway, save_tiny_model

FAULTS = ("segfaults-on-import", "exits-on-import", "os-exits-in-decode", "sleeps-on-import", "prints-in-plan")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADWAY_TRUST_PLUGINS", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tried_toy.py").write_text(TOY)
    yield tmp_path
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def hostile(folder: Path, name: str) -> str:
    file = folder / f"{name.replace('-', '_')}.py"
    file.write_text(source(name))
    return file.name


@pytest.mark.slow
def test_files_and_classes_of_files_are_tried(folder: Path) -> None:
    targets = [hostile(folder, "segfaults-on-import"), "tried_toy.py", "tried_toy.py:ToyDecode"]
    found = [judge(PluginFile.of(target), "cpu", 20.0) for target in targets]
    assert [found[number].fault for number in (1, 2)] == ["", ""]
    assert found[0].fault == "ends the process in its import: it was killed by SIGSEGV"


def test_a_fault_is_an_error_in_one_line_and_is_not_remembered(folder: Path) -> None:
    answers = [Verdict("hangs in its import: told"), Verdict("exits: told"), Verdict(date="today")]

    def trial(listed: Sequence[PluginSource]) -> list[Verdict]:
        return [answers.pop(0) for _ in listed]

    for words in ("plugin tried_toy.py: hangs in its import: told (tried", "plugin tried_toy.py: exits: told (tried"):
        with pytest.raises(PluginError) as refused:
            create_registry(["tried_toy.py"], trial=trial, load_entry_points=False)
        assert str(refused.value).startswith(words)
        assert ("HEADWAY_PLUGIN_TIMEOUT" in str(refused.value)) == ("hangs" in words)
        assert "\n" not in str(refused.value)
    for _ in range(2):  # the second finds what is remembered
        (record,) = create_registry(["tried_toy.py"], trial=trial, load_entry_points=False).plugins
        assert (record.state, record.tried, record.target) == ("loaded", "today", str(folder / "tried_toy.py"))
    assert answers == []


@pytest.mark.parametrize("name", ["wrong_signature", "unknown_hook"])
def test_a_file_whose_hooks_are_none_is_an_error_in_one_line(folder: Path, name: str) -> None:
    (folder / "mine.py").write_text(BROKEN[name])
    with pytest.raises(PluginError) as refused:
        create_registry(["mine.py"], load_entry_points=False)
    assert all(word in str(refused.value) for word in ("mine", *BROKEN_SAYS[name])), refused.value
    assert "\n" not in str(refused.value)


def test_a_file_is_the_same_plugin_however_its_path_is_written(folder: Path) -> None:
    ways = ("tried_toy.py", str(folder / "tried_toy.py"), f"../{folder.name}/tried_toy.py")
    assert len({PluginFile.of(way).digest() for way in ways}) == 1
    before = PluginFile.of("tried_toy.py").digest()
    assert PluginFile.of("tried_toy.py:Toy").digest() != before
    (folder / "tried_toy.py").write_text(f"{TOY}\n")
    assert PluginFile.of("tried_toy.py").digest() != before


def test_a_files_backends_are_measured_in_a_child_and_an_objects_are_not(folder: Path) -> None:
    registry = create_registry(["tried_toy.py"], load_entry_points=False)
    names = ["sdpa", "toy", "toy.decode"]
    assert third_party_files(registry, names) == dict.fromkeys(("toy", "toy.decode"), str(folder / "tried_toy.py"))
    assert can_measure_in_child(registry, names)
    handed = create_registry([PluginFile.of("tried_toy.py").load()], load_entry_points=False)
    assert not third_party_files(handed, names)
    assert not can_measure_in_child(handed, names)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAULTS)
def test_a_command_names_a_file_that_misbehaves_and_ends(folder: Path, name: str) -> None:
    file = hostile(folder, name)
    done = run_headway("backends", "--plugin", file, cwd=folder)
    assert (done.code, done.out) == (2, "")
    tried, refused = done.err.splitlines()
    assert tried.startswith("headway: trying in a process of its own, once: plugin ")
    assert refused.startswith(f"headway: error: plugin {file}: ")
    assert HOSTILE[name][2] in refused


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_shape_that_ends_the_process_costs_the_files_backend_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_AUTOTUNE_BUDGET", raising=False)
    model = str(save_tiny_model(folder / "model"))
    options = ("--plugin", hostile(folder, "segfaults-at-a-shape"), "--autotune-budget", "3", "--max-tokens", "8", "--ignore-eos")
    done = run_headway("generate", "--model", model, *options, "the quick fox", cwd=folder)
    assert done.code == 0, done
    assert "auto leaves out segfaults-at-a-shape: crashed the measuring process" in done.err
    assert "prefill: sdpa" in done.err
    again = run_headway("generate", "--model", model, *options, "the quick fox", cwd=folder)
    assert again.code == 0, again
    assert "auto leaves out segfaults-at-a-shape: crashed the measuring process" in again.err, "the reason is kept"
    assert "it is measured again" not in again.err, "the file is what it was"
