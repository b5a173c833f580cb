"""Calls written as Python: [name(argument="value"), ...], as Llama 4 and some smaller models write them."""

from __future__ import annotations

import ast
import json
from typing import Any

from headway.core.chat.text_source import PieceWriter, TextSource, Waiting


def pythonic(source: TextSource, writer: PieceWriter) -> Waiting:
    """Read a list of calls, whose end must have come before it can be read; an answer that is none is content."""
    source.keep()
    yield from source.space()
    yield from source.starts(("<|python_start|>", "<|python_tag|>"))
    if (yield from source.peek()) != "[":
        writer.content(source.kept())
        yield from source.everything(writer.content)
        return
    parts: list[str] = []
    yield from source.everything(parts.append)
    text = "".join(parts)
    calls = _calls_of(text.strip().removesuffix("<|python_end|>").strip())
    if not calls:
        writer.content(source.kept())
    for name, arguments in calls:
        writer.call(name)
        writer.arguments(json.dumps(arguments, ensure_ascii=False))


def _calls_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The name and the arguments of each call; none where the text is anything else."""
    try:
        tree = ast.parse(text, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return [_call_of(each) for each in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _call_of(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """:raises ValueError: something else than a call of a name with named constants."""
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("no call with named arguments")
    values = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    json.dumps(values)
    return ast.unparse(node.func), values
