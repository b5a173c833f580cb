"""Results name the code that made them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headway.core.system import provenance
from headway.core.system.provenance import Origin


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the package seems to lie."""
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "core" / "system" / "provenance.py"))
    monkeypatch.delenv("HEADWAY_COMMIT", raising=False)
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_checkout_gives_its_commit_and_modified_files(place: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", *identity, *words], cwd=place, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (place / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "first")
    found = Origin.here()
    assert found.commit == git("rev-parse", "HEAD")[:12]
    assert not found.modified
    (place / "file").write_text("two")
    assert Origin.here().modified
    assert str(Origin.here()).endswith(f"commit {found.commit} with changes")


def test_outside_a_checkout_the_commit_comes_from_the_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Origin.here()
    assert found.version
    assert found.commit is None
    monkeypatch.setenv("HEADWAY_COMMIT", "0123456789abcdef")
    assert Origin.here().commit == "0123456789ab"


def test_sources_that_are_not_installed_are_named_by_their_commit_alone() -> None:
    assert str(Origin(version="unknown", commit="abc")) == "headway, commit abc"
