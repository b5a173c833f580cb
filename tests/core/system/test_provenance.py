"""Results name the code that made them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.system import provenance
from headway.core.system.provenance import PTXAS, Origin, compiler_versions


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
    assert str(Origin.here()).endswith(f"commit {found.commit} plus uncommitted changes")


def test_outside_a_checkout_the_commit_comes_from_the_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Origin.here()
    assert found.version
    assert found.commit is None
    monkeypatch.setenv("HEADWAY_COMMIT", "0123456789abcdef")
    assert Origin.here().commit == "0123456789ab"


def test_sources_that_are_not_installed_are_named_by_their_commit_alone() -> None:
    assert str(Origin(version="unknown", commit="abc")) == "headway, commit abc"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_the_ptxas_is_the_one_that_triton_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    bundled = compiler_versions(capability)[PTXAS]
    assert bundled.partition(" ")[0].count(".") == 2

    def stub(name: str, version: str) -> dict[str, str]:
        """Versions with a ptxas of this version, which counts its calls."""
        path = tmp_path / name
        printed = f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}"
        path.write_text(
            f"#!/bin/sh\necho call >> {path}.calls\necho 'ptxas: NVIDIA (R) Ptx optimizing assembler'\necho '{printed}'\n"
        )
        path.chmod(0o755)
        # Triton reads one variable or the other, by the GPU.
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
        monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(path))
        return compiler_versions(capability)

    assert stub("one", "12.8.61")[PTXAS] == f"12.8.61 ({tmp_path / 'one'})"
    assert stub("two", "12.8.93")[PTXAS] == f"12.8.93 ({tmp_path / 'two'})"
    assert stub("elsewhere", "12.8.61")[PTXAS] == f"12.8.61 ({tmp_path / 'elsewhere'})"
    calls = (tmp_path / "two.calls").read_text()
    compiler_versions(capability)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "two"))
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(tmp_path / "two"))
    assert compiler_versions(capability)[PTXAS] == f"12.8.93 ({tmp_path / 'two'})"
    assert (tmp_path / "two.calls").read_text() == calls, "asked once in a process"
    (tmp_path / "silent").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "silent").chmod(0o755)
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: type("Tool", (), {"path": str(tmp_path / "silent")}))
    assert PTXAS not in compiler_versions(capability)


def test_without_compilers_there_are_no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "triton.backends.nvidia.compiler", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    assert compiler_versions((9, 0)) == {}
