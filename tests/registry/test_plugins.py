"""Plugins as they really come: distributions with an entry point, found by a new process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headway.registry import Registry, create_registry
from headway.registry.plugin_sources import installed_plugins
from sandbox import BROKEN, BROKEN_SAYS, TOY, install, run_headway, save_tiny_model

EXITS = "import sys\nsys.exit(3)\n"
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
def test_a_broken_plugin_is_a_record_and_registers_nothing(
    registry: Registry, plugins: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(plugins, f"broken_{name}", BROKEN[name])
    broken = create(plugins, monkeypatch)
    (failure,) = broken.failures
    assert (failure.name, failure.owner) == (f"broken_{name}", f"broken_{name} 1.0")
    for word in BROKEN_SAYS[name]:
        assert word in str(failure)
    assert list(broken.backends) == list(registry.backends)


def test_a_plugin_that_exits_on_import_is_a_record(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(plugins, "broken_exit", EXITS)
    try:
        (failure,) = create(plugins, monkeypatch).failures
    except SystemExit:
        pytest.fail("the plugin's sys.exit() ended headway")
    assert "SystemExit" in str(failure)


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


@pytest.fixture
def all_together(plugins: Path) -> Path:
    """One good plugin and all broken ones."""
    install(plugins, "headway_toy", TOY)
    for name, source in BROKEN.items():
        install(plugins, f"broken_{name}", source)
    return plugins


@pytest.mark.slow
def test_every_failure_is_listed_from_outside(all_together: Path, tmp_path: Path) -> None:
    plugins = all_together
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


@pytest.mark.slow
def test_generation_goes_on_beside_broken_plugins(all_together: Path, tmp_path: Path) -> None:
    plugins = all_together
    unknown = run_headway("generate", "--attn-backend", "nope", "fox", plugins=plugins, cwd=tmp_path)
    assert unknown.code == 2
    assert unknown.err.count("plugin that failed to load: ") == len(BROKEN)

    model = str(save_tiny_model(tmp_path / "model"))
    texts = {}
    for wish in ("toy", "prefill=sdpa,decode=toy.decode", "sdpa.math"):
        done = run_headway(
            "generate", "--model", model, "--attn-backend", wish, "--max-tokens", "24", "--ignore-eos", "the quick fox",
            plugins=plugins, cwd=tmp_path,
        )  # fmt: skip
        assert done.code == 0, done
        assert "24 tokens" in done.err
        texts[wish] = done.out
    assert texts["toy"].strip()
    assert texts["toy"] == texts["prefill=sdpa,decode=toy.decode"] == texts["sdpa.math"]
