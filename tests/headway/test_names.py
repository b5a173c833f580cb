"""The names that others may import: docs/api.md lists them all, and examples and documents use no others."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from sandbox import run_python

ROOT = Path(__file__).resolve().parents[2]
STABLE = ("headway", "headway.contract", "headway.testing")
PAGE = (ROOT / "docs" / "api.md").read_text()


def listed(module: str) -> set[str]:
    """The names in the first column of a module's table."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(f"{module}\n")]
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("module", STABLE)
def test_the_page_lists_each_stable_name_and_each_exists(module: str) -> None:
    loaded = importlib.import_module(module)
    assert listed(module) == set(loaded.__all__)
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None


@pytest.mark.parametrize("module", STABLE)
def test_the_reference_has_each_stable_name(module: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{module.rpartition('.')[2]}.md").read_text()
    described = set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page, re.MULTILINE))
    assert described == {name for name in importlib.import_module(module).__all__ if name != "__version__"}


def test_examples_and_documents_import_stable_names_alone() -> None:
    texts = [*(ROOT / "examples").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for path in texts:
        for module, names in re.findall(r"^from (headway[\w.]*) import \(?([\w, ]+)", path.read_text(), re.MULTILINE):
            assert module in STABLE, f"{path.name} imports from {module}"
            known = getattr(importlib.import_module(module), "__all__", None)
            assert known is None or set(re.findall(r"\w+", names)) <= set(known), f"{path.name}: {names} of {module}"


def test_the_contract_loads_no_library_but_torch() -> None:
    code = """
import sys, headway.contract
heavy = {"transformers", "triton", "pluggy", "pydantic", "headway.registry", "headway.llm"} & set(sys.modules)
assert not heavy, heavy
"""
    result = run_python("-c", code, cwd=ROOT)
    assert result.code == 0, result
