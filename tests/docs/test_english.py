"""Expressions that pages, docstrings and helps of options avoid: their numbers may only fall."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_tools"))
import english  # noqa: E402

LIMITS: dict[str, tuple[int, int]] = {
    "question word": (0, 2),
    "none:": (0, 4),
    "0:": (0, 8),
    "x: of": (0, 1),
    "beside": (3, 0),
    "alone": (3, 1),
    "alike": (0, 1),
    "a second": (0, 2),
    "of its own": (0, 7),
    "product of": (0, 3),
    "lots": (0, 2),
    "panels": (0, 3),
    "is no": (0, 23),
    "those of": (0, 25),
    "behind": (1, 2),
    "spare": (0, 2),
    "do without": (0, 1),
    "where it is": (0, 2),
    "most": (0, 1),
    "long sentence": (2, 0),
}
"""Expression -> how often pages and how often docstrings and helps may have it, if ever. Lower a limit when there are fewer."""
LINES = """
beside the kernel, which is told of the rows
stands alone  # english: ok
a launch a layer
"""


def test_expressions_only_become_fewer() -> None:
    found = english.counts()
    assert LIMITS.keys() <= found.keys()
    more = {name: each for name, each in found.items() if any(map(int.__gt__, each, LIMITS.get(name, (0, 0))))}
    assert not more, f"expression: (pages, sources), above its limit: {more}: python docs/_tools/english.py PATH lists them"


def test_an_expression_is_found_on_its_line(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"```\nalone\n```{LINES}")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).write_text("")
    found = {(each.name, int(each.where.rpartition(":")[2])) for each in english.find(english.pages(tmp_path), docs=True)}
    assert found == {("beside", 4), ("told", 4), ("a second", 6)}


def test_docstrings_fields_and_helps_are_searched(tmp_path: Path) -> None:
    folder = tmp_path / "core"
    folder.mkdir()
    (folder / "a.py").write_text('"""What it is."""\n\nN = 1\n"""Whether.\n\nNone: not."""\n\nx(help="Beside, beside")\n')
    found = [(each.name, int(each.where.rpartition(":")[2])) for each in english.find(english.sources(tmp_path), docs=False)]
    assert sorted(found) == [("beside", 8), ("none:", 6), ("question word", 1), ("question word", 4)]


def test_a_long_sentence_is_counted_by_its_words() -> None:
    long = "One " + "word " * english.LONG + "`code that is one word`."
    found = [english.words(each) > english.LONG for each in english.sentences(f"Short one. {long}\n\n- item\n")]
    assert found == [False, True, False]


def test_subjects_of_commits_are_short() -> None:
    git = ["git", "log", "--since=2026-11-28T22:00Z", "--no-merges", "--format=%s"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no history here")
    long = [subject for subject in done.stdout.splitlines() if len(subject) > 72]
    assert not long
