"""gpt-oss's harmony format: messages in channels, of reasoning, of calls and for the reader."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final

from headway.core.chat.text_source import PieceWriter, TextSource, Waiting

_BODY: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADS: Final = ("<|start|>assistant", "<|start|>", "<|channel|>", " to=")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")


def harmony(source: TextSource, writer: PieceWriter) -> Waiting:
    """Read an assistant's messages. The prompt has ended with the start of the first."""
    while True:
        found = yield from source.starts(_HEADS)
        if not found:  # a text without any head
            mark = yield from source.until(_ENDS[:-1] + _HEADS, writer.content)
            if not mark:
                return
            if mark in _ENDS[:-1]:
                continue
            found = mark
        yield from _message(source, writer, found)


def _message(source: TextSource, writer: PieceWriter, start: str) -> Waiting:
    """Read a message whose head has begun."""
    parts = [start]
    if not (yield from source.until((_BODY,), parts.append)):
        writer.content("".join(parts).removeprefix("<|start|>assistant") if len(parts) > 1 else "")
        return
    head = "".join(parts)
    recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
    if recipient is not None:
        writer.call(recipient[1].removeprefix("functions."))
        begun = yield from _body(source, writer.arguments)
        if not begun:
            writer.arguments("{}")
    elif channel is not None and channel[1] == "analysis":
        yield from _body(source, writer.reasoning)
    else:
        yield from _body(source, writer.content)


def _body(source: TextSource, write: object) -> Generator[None, None, bool]:
    """Hand on a message's text; False: it has none."""
    seen: list[int] = []

    def note(text: str) -> None:
        seen.append(len(text))
        write(text)  # type: ignore[operator]

    mark = yield from source.until(_ENDS, note)
    if mark == "<|start|>":  # the next head, whose start is read already
        yield from source.starts(("assistant",))
    return any(seen)
