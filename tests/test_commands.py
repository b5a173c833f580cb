"""The commands that people and CI type to test: what each of them runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def recipe(target: str) -> tuple[list[str], list[str]]:
    """What a target of the Makefile depends on, and its commands."""
    found = re.search(rf"^{target}:([^#\n]*).*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    assert found is not None, target
    return found[1].split(), [line.strip() for line in found[2].splitlines()]


def test_the_readmes_test_command_is_make_test() -> None:
    commands = re.findall(r"^\$ (make \S*test\S*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert "make test" in commands


def test_the_everyday_subset_and_the_rest_are_the_whole() -> None:
    assert recipe("test")[1] == ['$(PYTEST) -m "not slow"']
    assert recipe("test-slow")[1] == ["$(PYTEST) -m slow"]
    assert recipe("test-all") == (["test", "test-slow"], [])


def test_tests_run_in_processes_of_one_thread() -> None:
    assert re.search(r"^PYTEST := OMP_NUM_THREADS=1 .*--numprocesses=\$\(WORKERS\) --dist=loadgroup$", MAKEFILE, re.MULTILINE)


def test_ci_runs_the_whole_and_the_checks() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^for target in test test-slow; do$", text, re.MULTILINE)
    assert re.search(r"^make check$", text, re.MULTILINE)
    assert re.search(r"^make docs$", text, re.MULTILINE)


def test_the_site_is_built_without_a_warning() -> None:
    assert any("mkdocs build" in line and "--strict" in line for line in recipe("docs")[1])
