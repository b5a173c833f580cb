"""The rules of docs/design.md that a machine can hold: imports only go down, files stay short, importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "core": {"core"},
    "registry": {"registry", "core"},
    "backends": {"backends", "registry", "core"},
    "models": {"models", "core"},
    "bench": {"bench", "backends", "models", "registry", "core", "llm", "outputs", "threads"},
}
SOURCES = sorted(path for folder in (*MAY_IMPORT, "headway") for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The parts of headway that a file imports."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "headway" else [f"headway.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("headway.")}
    return parts


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_only_go_down(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        beyond = imported(path) - MAY_IMPORT[folder]
        assert not beyond, f"{path.relative_to(ROOT)} imports headway.{beyond.pop()}"


def test_the_hookimpl_marker_is_all_that_backends_take_from_the_registry() -> None:
    for path in (ROOT / "backends").rglob("*.py"):
        taken = [
            (node.module, alias.name)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headway.registry")
            for alias in node.names
        ]
        assert set(taken) <= {("headway.registry.hookspecs", "hookimpl")}, path


def test_files_stay_short() -> None:
    long = {str(path.relative_to(ROOT)): lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > 300}
    assert not long


def test_importing_headway_and_listing_backends_loads_no_kernel_library() -> None:
    code = """
import sys, headway
from headway.registry import create_registry
create_registry(load_entry_points=False)
heavy = {"triton", "flash_attn", "xformers", "flashinfer", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
