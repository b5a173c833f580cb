"""Syntax trees of Headway's source files, and their imports, for tests of the code's structure."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "kernels", "registry", "backends", "models", "testing", "tuning", "plan", "headway", "server", "cli", "bench")


def module_of(path: Path) -> str:
    """The dotted name, without the leading `headway`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "headway" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's tree, walked once."""
    return tuple(ast.walk(tree_of(path)))


SOURCES = {module_of(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """Headway's files that a file imports anywhere."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] != "headway":
                continue
            parts = name.split(".")[1:]
            while parts and ".".join(parts) not in SOURCES:
                parts.pop()  # a name in a file
            found.add(".".join(parts))
    return found - {module_of(path)}


@functools.cache
def all_imports() -> dict[str, set[str]]:
    """Module -> the files that it imports. Read by the first test that asks, so that collecting the tests parses nothing."""
    return {module: imported(path) for module, path in SOURCES.items()}


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether Triton compiles a function; a kernel is a unit, which calls do not shorten."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
