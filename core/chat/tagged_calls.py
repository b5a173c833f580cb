"""Calls whose parameters stand between tags, each by itself: they become a JSON object as they come."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.chat.json_calls import as_json
from headway.core.chat.text_source import PieceWriter, TextSource, Waiting
from headway.core.contract.chat_parsers import ChatContext
from headway.core.system.json_text import parse_json


@dataclass(frozen=True)
class TagSyntax:
    """The tags of a family."""

    opens: str
    """What begins a call."""
    name: tuple[str, str]
    """What stands before and after a function's name; an empty text before: the name follows at once."""
    key: tuple[str, str]
    """What stands before and after a parameter's name."""
    value: tuple[str, str]
    """What stands between a parameter's name and its value, up to this mark (empty: nothing), and after the value."""
    closes: tuple[str, ...]
    """What may end a call."""
    around: tuple[str, ...] = ()
    """Marks around all calls."""


class TaggedCalls:
    """Reads calls in one family's tags."""

    def __init__(self, syntax: TagSyntax, context: ChatContext) -> None:
        self._syntax = syntax
        self._tools = context.tools or {}

    def __call__(self, source: TextSource, writer: PieceWriter) -> Waiting:
        """See `Program`."""
        syntax = self._syntax
        while mark := (yield from source.until((syntax.opens, *syntax.around), writer.content)):
            if mark != syntax.opens:
                continue
            source.keep()
            name, mark = yield from self._name(source)
            if not name:
                writer.content(syntax.opens + source.kept())
                continue
            source.kept()
            writer.call(name)
            yield from self._parameters(source, writer, _properties(self._tools.get(name)), mark)

    def _name(self, source: TextSource) -> Generator[None, None, tuple[str, str]]:
        """The function's name, and the mark that was read behind it; an empty name: there is none."""
        before, after = self._syntax.name
        if before:
            yield from source.space()
            if not (yield from source.starts((before,))):
                return "", ""
        parts: list[str] = []
        mark = yield from source.until((after, self._syntax.key[0], *self._syntax.closes), parts.append)
        name = "".join(parts).strip()
        return (name if mark and not set(name) & set("{}<>\n\"'") else ""), mark

    def _parameters(self, source: TextSource, writer: PieceWriter, properties: Mapping[str, Any], mark: str) -> Waiting:
        syntax, count = self._syntax, 0
        writer.arguments("{")
        while mark not in syntax.closes:
            if mark != syntax.key[0]:
                source.keep()
                yield from source.space()
                mark = yield from source.starts((syntax.key[0], *syntax.closes))
                space = source.kept()
                if not mark:  # what stands here belongs to no parameter
                    if not source.ended:
                        writer.arguments("}")
                    writer.content(space)
                    return
                continue
            parts: list[str] = []
            yield from source.until((syntax.key[1],), parts.append)
            key = "".join(parts).strip()
            writer.arguments(f"{', ' if count else ''}{json.dumps(key, ensure_ascii=False)}: ")
            count += 1
            if not (yield from self._value(source, writer, properties.get(key))):
                return  # the text has ended within the value, and so the object must not look complete
            mark = ""
        writer.arguments("}")

    def _value(self, source: TextSource, writer: PieceWriter, schema: Any) -> Generator[None, None, bool]:
        """Read a parameter's value, and hand on a text as it comes; False: the value has no end."""
        said: list[str] = []
        if self._syntax.value[0]:
            yield from source.until((self._syntax.value[0],), said.append)
        if (yield from source.peek()) == "\n":
            source.skip()
        end = self._syntax.value[1]
        ends = (f"\n{end}", end)
        if 'string="true"' in "".join(said) or _is_text(schema):
            writer.arguments('"')
            if not (yield from source.until(ends, lambda text: writer.arguments(as_json(text)))):
                return False
            writer.arguments('"')
            return True
        parts: list[str] = []
        found = yield from source.until(ends, parts.append)
        writer.arguments(_value_of("".join(parts)) if found else "".join(parts))
        return bool(found)


def _value_of(text: str) -> str:
    """A value as JSON: the text itself where it is JSON, else as a string."""
    try:
        return json.dumps(parse_json(text, "value", any_number=True), ensure_ascii=False, allow_nan=False)
    except ValueError:
        words = {"True": "true", "False": "false", "None": "null"}
        return words.get(text.strip()) or json.dumps(text, ensure_ascii=False)


def _properties(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found = (schema or {}).get("properties")
    return found if isinstance(found, Mapping) else {}


def _is_text(schema: Any) -> bool:
    """Whether a schema takes texts alone, so that a value needs no reading to be known for one."""
    if not isinstance(schema, Mapping):
        return False
    if schema.get("type") in ("string", ["string"]):
        return True
    options = schema.get("enum")
    return "type" not in schema and isinstance(options, list) and bool(options) and all(isinstance(each, str) for each in options)
