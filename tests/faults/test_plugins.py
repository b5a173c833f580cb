"""Plugins that misbehave in their trial, in their files and while they are measured: the process goes on, and says which."""

from __future__ import annotations

import base64
import json
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headway import create_registry
from headway.core.contract.errors import ConfigError, PluginError
from headway.core.system.child import ChildDied
from headway.core.system.json_files import write_json
from headway.registry import Registry, isolation
from headway.registry import create_registry as untried_registry
from headway.registry.isolation import Verdict, verdicts
from headway.registry.plugin_sources import PluginFile, PluginSource, installed_plugins
from headway.registry.records import PluginPolicy
from headway.tuning.isolated import measure_in_child as apart
from headway.tuning.isolated.child import judge
from headway.tuning.isolated.measure_in_child import CRASHED, HUNG, can_measure_in_child, measure_in_child, third_party_files
from headway.tuning.isolated.trial import try_plugins
from headway.tuning.measure.run import CrossoverOptions
from hostile_plugins import HARMLESS, HOSTILE, LATE, install_hostile, source
from sandbox import TOY, run_headway, save_tiny_model
from tables import SPEC, a_table

QUICK = [name for name in HOSTILE if not any(word in name for word in ("hangs", "spins", "sleeps", "its-parent"))]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(4321)  # another seed than a hostile plugin's, whatever a test before has set
    for name in (*HOSTILE, *HARMLESS, *LATE):  # of the test before
        sys.modules.pop(name.replace("-", "_"), None)
    return folder


def found(plugins: Path) -> dict[str, PluginSource]:
    return {
        plugin.name.replace("_", "-"): plugin
        for plugin in installed_plugins("headway")
        if plugin.file and plugins in plugin.file.parents
    }


def tried(plugins: Path, *names: str, seconds: float = 20.0) -> dict[str, Verdict]:
    """The verdicts of the process that tries a plugin, run here: it forks itself."""
    for name in names:
        install_hostile(plugins, name)
    return {name: judge(plugin, "cpu", seconds) for name, plugin in found(plugins).items()}


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_way_to_end_or_mislead_the_process_is_a_fault(plugins: Path, share: int) -> None:
    answers = tried(plugins, *QUICK[::share], *HARMLESS)
    assert set(answers) == {*QUICK[::share], *HARMLESS}
    for name in QUICK[::share]:
        assert HOSTILE[name][2] in answers[name].fault, name
    for name in HARMLESS:
        assert answers[name].fault == ""
        assert HARMLESS[name][2] in " ".join(answers[name].remarks)
    assert "a warning" in answers["warns-on-import"].details
    assert share > 1 or "Fatal Python error: Segmentation fault" in answers["segfaults-in-prefill"].details


def test_a_distribution_whose_metadata_cannot_be_read_stops_nobody(plugins: Path) -> None:
    install_hostile(plugins, "well-behaved")
    (info,) = plugins.glob("*.dist-info")
    (info / "METADATA").write_bytes(b"\xff\x00 no metadata")
    registry = create_registry()
    (failure,) = [each for each in registry.failures if str(plugins) in each.owner]
    assert "UnicodeDecodeError" in str(failure)
    assert "sdpa.math" in registry.backends


def test_a_plugin_that_hangs_says_where(plugins: Path) -> None:
    verdict = tried(plugins, "hangs-when-asked", seconds=2.0)["hangs-when-asked"]
    assert verdict.fault == "hangs in available() of backend hangs-when-asked: no answer within 2 s"
    assert "in available" in verdict.details


@pytest.mark.slow  # a process, and another one after it
def test_a_plugin_that_kills_the_process_that_tries_it_is_at_fault(plugins: Path) -> None:
    for name in ("kills-its-parent", "well-behaved"):
        install_hostile(plugins, name)
    listed = found(plugins)
    verdicts_of = dict(zip(listed, try_plugins(list(listed.values())), strict=True))
    assert verdicts_of["kills-its-parent"].fault.startswith("crashed during its trial: the process was killed by SIGKILL")
    assert verdicts_of["well-behaved"].fault == ""


def test_without_a_trial_what_was_never_tried_is_let_in_and_what_was_at_fault_is_not(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWAY_TRUST_PLUGINS")
    install_hostile(plugins, "well-behaved")
    assert "well-behaved" in untried_registry().backends
    verdicts(list(found(plugins).values()), lambda listed: [Verdict("crashes: told") for _ in listed])
    assert "well-behaved" not in untried_registry().backends


def test_a_verdict_is_remembered_until_a_file_changes(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_TRUST_PLUGINS")
    asked: list[str] = []

    def ask(listed: Sequence[PluginSource]) -> list[Verdict]:
        asked.extend(plugin.name for plugin in listed)
        return [Verdict("hangs in its import: as it is told here", date="today") for _ in listed]

    install_hostile(plugins, "well-behaved")
    (plugin,) = found(plugins).values()
    first = verdicts([plugin], ask)
    assert verdicts([plugin], ask) == verdicts([plugin], trial=None) == first
    assert asked == ["well_behaved"]
    verdicts([plugin], ask, retry=True)
    assert len(asked) == 2
    (plugins / "well_behaved.py").write_text("pass")
    verdicts([plugin], ask)
    assert len(asked) == 3
    for kept in (plugins.parent / "cache" / "plugins").iterdir():
        kept.write_text('{"fault": 3}')
    verdicts([plugin], ask)
    assert len(asked) == 4
    registry = create_registry()
    (failure,) = [each for each in registry.failures if each.name == "well_behaved"]
    assert str(failure).startswith("well_behaved (from well_behaved 1.0): hangs in its import: as it is told here (tried in")
    assert "headway plugins --retry" in str(failure)
    assert "HEADWAY_PLUGIN_TIMEOUT" in str(failure)
    (record,) = [each for each in registry.plugins if each.name == "well_behaved"]
    assert (record.state, record.file) == ("left out", str(plugins / "well_behaved.py"))


def test_a_verdict_on_a_gpu_holds_for_the_compiler_that_made_its_kernels(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_TRUST_PLUGINS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    tried: list[str] = []
    install_hostile(plugins, "well-behaved")
    for version in ("12.8.61", "12.8.61", "12.8.93"):
        monkeypatch.setattr(isolation, "compiler_versions", lambda capability, version=version: {"ptxas": version})
        verdicts(list(found(plugins).values()), lambda listed, version=version: [tried.append(version) or Verdict()])
    assert tried == ["12.8.61", "12.8.93"]


def test_without_plugins_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_TRUST_PLUGINS")
    assert verdicts([], trial=pytest.fail) == []


@pytest.mark.parametrize(
    ("policy", "states"),
    [
        ("all", ["loaded", "loaded"]),
        ("none", ["blocked", "blocked"]),
        ("allow=well-behaved", ["blocked", "loaded"]),
        ("block=Well.Behaved, nobody", ["loaded", "blocked"]),
    ],
)
def test_a_user_chooses_among_plugins(plugins: Path, monkeypatch: pytest.MonkeyPatch, policy: str, states: list[str]) -> None:
    for name in ("warns-on-import", "well-behaved"):
        install_hostile(plugins, name)

    def state(registry: Registry) -> list[str]:
        return [
            record.state for record in sorted(registry.plugins, key=lambda record: record.name) if str(plugins) in record.file
        ]

    assert state(create_registry(policy=policy)) == states
    monkeypatch.setenv("HEADWAY_PLUGINS", policy)
    assert state(create_registry()) == states


@pytest.mark.parametrize("policy", ["allow", "allow=", "only=a", "none=a", "a,b"])
def test_a_policy_that_says_nothing_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match="all, none, allow=A,B or block=A,B"):
        PluginPolicy.parse(policy)


OFTEN = {"sleeps-on-import", "kills-its-group", "segfaults-in-prefill"}
"""One of each kind of end: the others run in `make soak`, and all of them in one trial above."""


SLOW = (pytest.mark.slow,)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds of a start that tries a plugin in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("alone")
    install_hostile(folder, "well-behaved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_TRUST_PLUGINS", "0")
        patch.setenv("HEADWAY_CACHE", str(folder / "cache"))
        started = time.monotonic()
        run_headway("backends", plugins=folder, cwd=folder)
        return time.monotonic() - started


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name in OFTEN else (*SLOW, pytest.mark.soak)) for name in HOSTILE]
)
def test_one_hostile_plugin_holds_a_start_up_for_less_than_eight_seconds(
    plugins: Path, tmp_path: Path, name: str, usual: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_TRUST_PLUGINS", "0")
    install_hostile(plugins, name)
    started = time.monotonic()
    done = run_headway("backends", "--json", plugins=plugins, cwd=tmp_path)
    assert time.monotonic() - started < 8 + 2 * usual  # the trial ends after 5 s
    assert done.code == 0, done
    (failure,) = json.loads(done.out)["failures"]
    assert HOSTILE[name][2] in failure["error"]
    assert failure["owner"] == f"{name.replace('-', '_')} 1.0"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_default_start_goes_on_beside_all_of_them(plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_TRUST_PLUGINS", "0")
    for name in (*HOSTILE, *HARMLESS, *LATE):
        install_hostile(plugins, name)
    model = str(save_tiny_model(tmp_path / "model"))
    arguments = ("generate", "--model", model, "--max-tokens", "8", "--ignore-eos", "the quick fox")
    alone = run_headway(*arguments, "--plugins", "none", plugins=plugins, cwd=tmp_path)
    first, second = (run_headway(*arguments, plugins=plugins, cwd=tmp_path) for _ in range(2))
    assert first.code == second.code == alone.code == 0, first
    assert first.out == second.out == alone.out
    assert "plugin skipped" not in alone.err
    assert first.err.count("plugin skipped: ") == second.err.count("plugin skipped: ") == len(HOSTILE)
    assert "in a separate process" not in second.err
    shown = run_headway("plugins", plugins=plugins, cwd=tmp_path, columns=200)
    assert shown.out.count("  left out\n") == len(HOSTILE)
    assert shown.out.count("  loaded\n") == len(HARMLESS) + len(LATE)
    assert "backends: well-behaved" in shown.out


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
            untried_registry(["tried_toy.py"], trial=trial, load_entry_points=False)
        assert str(refused.value).startswith(words)
        assert ("HEADWAY_PLUGIN_TIMEOUT" in str(refused.value)) == ("hangs" in words)
        assert "\n" not in str(refused.value)
    for _ in range(2):  # the second finds what is remembered
        (record,) = untried_registry(["tried_toy.py"], trial=trial, load_entry_points=False).plugins
        assert (record.state, record.tried, record.target) == ("loaded", "today", str(folder / "tried_toy.py"))
    assert answers == []


def test_a_file_is_the_same_plugin_however_its_path_is_written(folder: Path) -> None:
    ways = ("tried_toy.py", str(folder / "tried_toy.py"), f"../{folder.name}/tried_toy.py")
    assert len({PluginFile.of(way).digest() for way in ways}) == 1
    before = PluginFile.of("tried_toy.py").digest()
    assert PluginFile.of("tried_toy.py:Toy").digest() != before
    (folder / "tried_toy.py").write_text(f"{TOY}\n")
    assert PluginFile.of("tried_toy.py").digest() != before


def test_a_files_backends_are_measured_in_a_child_and_an_objects_are_not(folder: Path) -> None:
    registry = untried_registry(["tried_toy.py"], load_entry_points=False)
    names = ["sdpa", "toy", "toy.decode"]
    assert third_party_files(registry, names) == dict.fromkeys(("toy", "toy.decode"), str(folder / "tried_toy.py"))
    assert can_measure_in_child(registry, names)
    handed = untried_registry([PluginFile.of("tried_toy.py").load()], load_entry_points=False)
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
    assert tried.startswith("headway: plugins: trying ")
    assert refused.startswith(f"headway: error: plugin {file}: ")
    assert HOSTILE[name][2] in refused


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in LATE if name != "exits-at-a-shape"])  # which raises, and is timed as it is
def test_a_shape_that_ends_the_process_costs_the_files_backend_alone(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWAY_AUTOTUNE_BUDGET", raising=False)
    model = str(save_tiny_model(folder / "model"))
    options = ("--plugin", hostile(folder, name), "--autotune-budget", "3", "--max-tokens", "8", "--ignore-eos")
    done = run_headway("generate", "--model", model, *options, "the quick fox", cwd=folder)
    assert done.code == 0, done
    said = f"auto: excluding {name}: {HUNG if name.startswith('hangs') else CRASHED} in "
    assert said in done.err
    assert LATE[name][2] in done.err
    assert "prefill: sdpa" in done.err
    again = run_headway("generate", "--model", model, *options, "the quick fox", cwd=folder)
    assert again.code == 0, again
    assert said in again.err, "the reason is kept"
    assert "measuring again" not in again.err, "the file is what it was"


class _Measuring:
    """In place of the process that measures: it dies as a test says, then writes a table and is done."""

    deaths: list[ChildDied]
    asked: list[CrossoverOptions]

    def __init__(self, command: object) -> None:
        pass

    def __enter__(self) -> _Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, request: dict[str, dict[str, str]], timeout: float) -> dict[str, object]:
        options: CrossoverOptions = pickle.loads(base64.b64decode(request["measure"]["options"]))
        self.asked.append(options)
        if self.deaths:
            raise self.deaths.pop(0)
        write_json(a_table(), options.output)
        return {"done": True}


@pytest.mark.parametrize(
    ("died", "said"),
    [
        (
            ChildDied("no answer within 15 s", "Fatal Python error: Aborted", timed_out=True),
            f"{HUNG} in its self-test: no answer",
        ),
        (ChildDied("the process was killed by SIGSEGV", "Fatal Python error: Segmentation fault"), f"{CRASHED} in its self-test"),
    ],
)
def test_a_hang_is_called_one_and_told_once(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, died: ChildDied, said: str
) -> None:
    monkeypatch.setattr(apart, "Child", _Measuring)
    _Measuring.deaths, _Measuring.asked = [died], []
    install_hostile(plugins, "hangs-at-a-shape")
    table = tmp_path / "table.json"
    write_json(a_table(command="of another version"), table)
    measure_in_child(CrossoverOptions(SPEC, ["sdpa", "hangs-at-a-shape"], output=table), untried_registry())
    first, second = _Measuring.asked
    (why,) = second.excluded.values()
    assert why.startswith(said)
    assert "Aborted" not in why
    assert caplog.text == "", "the start tells of it, once, when it reads the table"
    assert not first.resume
    assert not second.resume, "nothing was written by this run: what lies there is another's"
