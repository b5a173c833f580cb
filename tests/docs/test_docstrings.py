"""Docstrings begin as a sentence does: with a subject or a verb, not with a preposition or a pronoun without its noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "registry", "backends", "models", "testing", "tuning", "plan", "headway", "bench")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
FRAGMENT = re.compile(r"(Of|Those|By|In|That|It|They|Its|Their)\b")


def first_lines(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The first line of each docstring, and of each text below a field or a constant."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                yield getattr(node, "lineno", 1), text.splitlines()[0]
            for field, below in pairwise(node.body):
                if isinstance(field, (ast.Assign, ast.AnnAssign)) and isinstance(below, ast.Expr):
                    value = below.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield below.lineno, value.value.strip().splitlines()[0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_docstring_begins_with_a_subject_or_a_verb(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == folder
        for line, text in first_lines(ast.parse(path.read_text()))
        if FRAGMENT.match(text)
    ]
    assert not found, "\n".join(found)
