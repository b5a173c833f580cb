"""Docstrings begin as a sentence does: with a subject or a verb, not with a preposition or a pronoun without its noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from source_trees import ROOT, SOURCES, tree_of

pytestmark = pytest.mark.xdist_group("structure")
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


def test_a_docstring_begins_with_a_subject_or_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in SOURCES.values()
        for line, text in first_lines(tree_of(path))
        if FRAGMENT.match(text)
    ]
    assert not found, "\n".join(found)


def methods_of(cls: ast.ClassDef, documented: bool = False) -> set[str]:
    """The public methods of a class, or those with a docstring."""
    methods = [each for each in cls.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {each.name for each in methods if each.name[0] != "_" and (not documented or ast.get_docstring(each))}


def calls_of(protocol: ast.ClassDef) -> set[str]:
    """The methods of a Protocol that are no properties, which a class may have as attributes."""
    return {each.name for each in protocol.body if isinstance(each, ast.FunctionDef) and not each.decorator_list}


def test_a_public_method_has_a_docstring_of_its_own_or_of_what_it_overrides() -> None:
    """In place of ruff's D102, which knows no base classes: a method of a Protocol needs no second description either."""
    classes = {node.name: node for path in SOURCES.values() for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
    protocols = [name for name, cls in classes.items() if any(ast.unparse(base) == "Protocol" for base in cls.bases)]
    missing = []
    for name, cls in classes.items():
        above = [name]
        for each in above:  # which grows by the bases of what it holds
            bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in classes[each].bases]
            above += [base for base in bases if base in classes and base not in above]
        own = set().union(*(methods_of(classes[each]) for each in above))
        above += [each for each in protocols if calls_of(classes[each]) <= own]
        known = set().union(*(methods_of(classes[each], documented=True) for each in above))
        missing += [f"{name}.{each}" for each in methods_of(cls) - known if name[0] != "_"]
    assert not missing
