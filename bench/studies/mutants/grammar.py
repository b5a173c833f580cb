"""Mistakes by rule: each operator, comparison, index, number, type, name and statement of a class, changed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_BINARY: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
    ast.BitOr: (ast.BitAnd,),
}
_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_NAMES: dict[str, tuple[str, ...]] = {
    "num_heads": ("num_kv_heads",),
    "k_scale": ("v_scale",),
    "v_scale": ("k_scale",),
    "v_head_dim": ("head_dim",),
    "logical_value": ("logical_key",),
    "logical_key": ("logical_value",),
    "seq_lens": ("context_lens", "seq_lens_cpu"),
    "amax": ("amin",),
    "maximum": ("minimum",),
    "sum": ("mean",),
    "exp": ("exp2",),
    "log": ("log2",),
    "tanh": ("sigmoid",),
    "zeros": ("ones",),
}
_DROPPED = frozenset({"float", "clone", "clamp", "long", "transpose", "flatten"})
"""Methods whose call is left out."""


@dataclass(frozen=True)
class Mistake:
    """A text with one change."""

    kind: str
    """operator, mask, index, number, type, name, statement or condition."""
    where: str
    """The method, and the line before and after."""
    text: str


def mistakes(text: str, class_name: str) -> Iterator[Mistake]:
    """Every mistake of the grammar in the methods of a class, one at a time."""
    tree = ast.parse(text)
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    for method in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
        yield from _in_method(tree, method)


def _in_method(tree: ast.Module, method: ast.FunctionDef) -> Iterator[Mistake]:
    for statement in ast.walk(method):
        for field in ("body", "orelse"):
            body = getattr(statement, field, None)
            if isinstance(body, list):
                yield from _without_statements(tree, method, body)
    for node in list(ast.walk(method)):
        for kind, name, value in _changes(node):
            old = getattr(node, name)
            before = _line(node)
            setattr(node, name, value)
            yield _mistake(tree, kind, method, f"{before}  ->  {_line(node)}")
            setattr(node, name, old)


def _without_statements(tree: ast.Module, method: ast.FunctionDef, body: list[ast.stmt]) -> Iterator[Mistake]:
    for number, statement in enumerate(list(body)):
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_docstring or isinstance(statement, ast.Return | ast.For | ast.FunctionDef):
            continue
        body[number] = ast.Pass()
        yield _mistake(tree, "statement", method, f"without {ast.unparse(statement).splitlines()[0]}")
        body[number] = statement


def _changes(node: ast.AST) -> Iterator[tuple[str, str, object]]:
    """(kind, field, new value) of each change that the grammar knows for a node."""
    if isinstance(node, ast.BinOp):
        yield from (("operator", "op", new()) for new in _BINARY.get(type(node.op), ()))
    elif isinstance(node, ast.Compare):
        yield from (("mask", "ops", [new()]) for new in _COMPARED.get(type(node.ops[0]), ()))
    elif isinstance(node, ast.If | ast.IfExp):
        yield from (("condition", "test", ast.Constant(value)) for value in (True, False))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "operator", "op", ast.UAdd()
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        yield from (("number", "value", node.value + step) for step in (1, -1))
    elif isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            end = getattr(node, name)
            if end is not None:
                yield from (("index", name, ast.BinOp(end, op, ast.Constant(1))) for op in (ast.Add(), ast.Sub()))
    elif isinstance(node, ast.Attribute):
        yield from (("name", "attr", other) for other in _NAMES.get(node.attr, ()))
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[str, str, object]]:
    if not isinstance(node.func, ast.Attribute):
        return
    if node.func.attr in _DROPPED:  # x.float() becomes x.view_as(x), which is x
        same = ast.Attribute(node.func.value, "view_as", ast.Load())
        yield "type", "func", ast.Lambda(_ANY, ast.Call(same, [node.func.value], []))
    if node.func.attr == "float":
        for name in ("bfloat16", "half"):
            rounded = ast.Call(ast.Attribute(node.func.value, name, ast.Load()), [], [])
            yield "type", "func", ast.Attribute(rounded, "float", ast.Load())


_ANY = ast.arguments([], [], ast.arg("_"), [], [], ast.arg("__"), [])


def _mistake(tree: ast.Module, kind: str, method: ast.FunctionDef, where: str) -> Mistake:
    text = ast.unparse(ast.fix_missing_locations(tree))
    return Mistake(kind, f"{method.name}: {where}", text)


def _line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]
