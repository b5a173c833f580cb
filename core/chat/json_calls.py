"""Parsers of tool calls with JSON arguments. The function's name is in the same JSON object or in a head before the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from headway.core.chat.text_source import PieceWriter, TextSource, Waiting, loaded_text

_NAMES: Final = frozenset(("name", "function_name", "tool_name"))
_ARGUMENTS: Final = frozenset(("arguments", "parameters", "args"))
_SIGNS: Final = " \t\r\n],;"  # Characters allowed between calls of a list
_LONGEST_HEAD: Final = 512  # Maximum characters before a call's arguments; a longer head is content


@dataclass(frozen=True)
class JsonCalls:
    """Parser of {"name": ..., "arguments": {...}}, or a list of such objects, after a mark."""

    opens: tuple[str, ...]
    """Marks before calls."""
    closes: tuple[str, ...] = ()
    """Optional marks after calls."""
    bare: bool = False
    """True if an answer may be calls without any mark."""

    def __call__(self, source: TextSource, writer: PieceWriter) -> Waiting:
        if self.bare:
            source.record()
            yield from source.space()
            if (yield from source.peek()) in ("{", "["):
                yield from self._calls(source, writer)
            else:
                writer.content(source.recorded())
        while mark := (yield from source.until(self.opens, writer.content)):
            source.record()
            yield from self._calls(source, writer, mark)

    def _calls(self, source: TextSource, writer: PieceWriter, mark: str = "") -> Waiting:
        """Read calls; other text becomes content. Call `source.record` first."""
        before = writer.num_calls
        yield from source.space()
        yield from json_calls(source, writer)
        yield from _close(source, writer, self.closes, mark, writer.num_calls > before)


def _close(source: TextSource, writer: PieceWriter, closes: tuple[str, ...], mark: str, any_calls: bool) -> Waiting:
    """Read the closing mark that may follow calls. Text since `source.record` that is not part of a call becomes content."""
    junk = source.recorded()
    if not any_calls:
        writer.content(mark + junk)
        return
    if junk.strip(_SIGNS):
        writer.content(junk)
    source.record()
    yield from source.space()
    if not (yield from source.starts(closes)):
        writer.content(source.recorded())


def json_calls(source: TextSource, writer: PieceWriter) -> Waiting:
    """Read one call, a list of calls, or calls separated by semicolons. Call `source.record` first: text that is not part of a
    call stays recorded."""
    listed = (yield from source.peek()) == "["
    if listed:
        source.skip()
    while True:
        yield from source.space()
        if (yield from source.peek()) != "{" or not (yield from json_call(source, writer)):
            break
        source.record()
        yield from source.space()
        if (yield from source.peek()) != ("," if listed else ";"):
            break
        source.skip()
    if listed and (yield from source.peek()) == "]":
        source.skip()


def json_call(source: TextSource, writer: PieceWriter) -> Generator[None, None, bool]:
    """Read an object that names a function and its arguments. Returns False, and writes nothing, if it names no function."""
    source.skip()
    name, early, given = None, "", False
    while True:
        yield from source.space()
        sign = yield from source.peek()
        if sign in (",", "}"):
            source.skip()
            if sign == "}":
                break
            continue
        key = yield from source.json_string()
        yield from source.space()
        if key is None or (yield from source.peek()) != ":":
            break
        source.skip()
        yield from source.space()
        if key in _NAMES and name is None:
            name = yield from source.json_string()
            if not name:
                return False
            writer.call(name)
            if given:
                writer.arguments(early)
        elif key in _ARGUMENTS and not given:
            early, given = (yield from _arguments(source, writer if name else None)), True
        else:
            yield from source.json_text(lambda _: None)
    if name and not given:
        writer.arguments("{}")
    return bool(name)


def _arguments(source: TextSource, writer: PieceWriter | None) -> Generator[None, None, str]:
    """Read a call's arguments: a JSON object, or a string that contains one. If writer is None because the function's name is not
    known yet, return the arguments instead of writing them."""
    parts: list[str] = []
    if writer is not None and (yield from source.peek()) in ("{", "["):
        yield from source.json_text(writer.arguments)
        return ""
    yield from source.json_text(parts.append)
    text = "".join(parts)
    text = "{}" if text in ("null", "") else text
    if text.startswith('"'):
        text = loaded_text(text) or text
    if writer is not None:
        writer.arguments(text)
    return text


@dataclass(frozen=True)
class HeadedCalls:
    """Parser of a function name, some marks, and an object of arguments."""

    opens: tuple[str, ...]
    """Marks that begin a call."""
    head: re.Pattern[str]
    """Pattern of the text between the opening mark and the arguments, with a group `name` and optionally a group `id`."""
    closes: tuple[str, ...] = ()
    """Optional marks after the arguments."""
    ignored: tuple[str, ...] = ()
    """Marks before and after the whole sequence of calls. The parser ignores them."""
    lists: bool = False
    """True if the opening mark may also be followed by JSON objects that name the function, as in `JsonCalls`, instead of a
    head."""

    def __call__(self, source: TextSource, writer: PieceWriter) -> Waiting:
        while mark := (yield from source.until((*self.opens, *self.ignored), writer.content)):
            if mark in self.opens:
                yield from self._call(source, writer, mark)

    def _call(self, source: TextSource, writer: PieceWriter, mark: str) -> Waiting:
        before = writer.num_calls
        source.record()
        yield from source.space()
        if self.lists and (yield from source.peek()) in ("[", "{"):
            yield from json_calls(source, writer)
        else:
            yield from self._headed(source, writer)
        yield from _close(source, writer, self.closes, mark, writer.num_calls > before)

    def _headed(self, source: TextSource, writer: PieceWriter) -> Waiting:
        parts: list[str] = []
        while len(head := "".join(parts)) < _LONGEST_HEAD:
            sign = yield from source.peek()
            if sign == "{":
                found = self.head.fullmatch(head)
                if found is not None:
                    writer.call(found["name"], found.groupdict().get("id") or "")
                    yield from source.json_text(writer.arguments)
                    source.record()
                return
            if not sign:
                return
            parts.append(source.skip())


def as_json(text: str) -> str:
    """Return a text escaped as in a JSON string, without the enclosing quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
