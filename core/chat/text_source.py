"""Reader of streamed text, and runner of the programs that parse it.

A program is a generator that yields when it needs more text. Its output depends only on the text, not on how the text is split
into chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Final

from headway.core.contract.text_plugins import ChatPiece, call_id
from headway.core.system.json_text import parse_json

Waiting = Generator[None, None, None]
_ESCAPES: Final = {code: f"\\u{code:04x}" for code in range(32)}  # Control characters as JSON escapes; models write them raw
_SPACE: Final = re.compile(r"\s*")
_SCALAR: Final = re.compile(r"[-+.\w]*")
_PLAIN: Final = re.compile(r'[^"\\]*')
_BETWEEN: Final = re.compile(r'[^"{}\[\]]*')


class PieceWriter:
    """Collects the pieces of a parsed answer, and counts its tool calls."""

    def __init__(self, make_id: Callable[[str, int], str] = call_id) -> None:
        self._make_id = make_id
        self._pieces: list[ChatPiece] = []
        self._space = ""  # White space that is content unless a call follows
        self.num_calls = 0

    def content(self, text: str) -> None:
        """Append to the content."""
        text = self._space + text
        retained = text.rstrip()
        self._space = text[len(retained) :]
        if retained:
            self._pieces.append(ChatPiece("content", retained))

    def reasoning(self, text: str) -> None:
        """Append to the reasoning."""
        if text:
            self._pieces.append(ChatPiece("reasoning", text))

    def call(self, name: str, own_id: str = "") -> None:
        """Begin a tool call. own_id: ID that the model wrote for the call. Empty means that an ID is made."""
        self._space = ""
        number = self.num_calls
        self.num_calls += 1
        self._pieces.append(ChatPiece("call", name, number, own_id or self._make_id(name, number)))

    def arguments(self, text: str) -> None:
        """Append to the arguments of the newest call."""
        if text:
            self._pieces.append(ChatPiece("arguments", text, self.num_calls - 1))

    def finish(self) -> None:
        """Append pending white space to the content if the answer has no calls."""
        if self._space and not self.num_calls:
            self._pieces.append(ChatPiece("content", self._space))
        self._space = ""

    def take(self) -> list[ChatPiece]:
        """Return the pieces written since the last `take`, with adjacent pieces of the same kind joined."""
        joined: list[ChatPiece] = []
        for piece in self._pieces:
            last = joined[-1] if joined else None
            if last is not None and piece.kind != "call" and (last.kind, last.call) == (piece.kind, piece.call):
                joined[-1] = last._replace(text=last.text + piece.text)
            else:
                joined.append(piece)
        self._pieces.clear()
        return joined


class TextSource:
    """Received text that has not been read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._read: list[str] | None = None
        self.ended = False

    def add(self, text: str) -> None:
        """Append received text."""
        self._text += text

    def record(self) -> None:
        """Start to record the text that is read, because it may turn out to be content."""
        self._read = []

    def recorded(self) -> str:
        """Return the text that was read since `record`, and stop recording."""
        read = self._read or []
        self._read = None
        return "".join(read)

    def _take(self, size: int) -> str:
        taken = self._text[:size]
        self._text = self._text[size:]
        if self._read is not None:
            self._read.append(taken)
        return taken

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it. Empty at the end of the text."""
        while not self._text and not self.ended:
            yield
        return self._text[:1]

    def skip(self) -> str:
        """Read the character that `peek` returned."""
        return self._take(1)

    def everything(self, write: Callable[[str], None]) -> Waiting:
        """Pass all remaining text to `write` as it arrives, until the text ends."""
        while True:
            write(self._take(len(self._text)))
            if self.ended:
                return
            yield

    def space(self) -> Waiting:
        """Read white space."""
        while True:
            found = _SPACE.match(self._text)
            self._take(found.end() if found else 0)
            if self._text or self.ended:
                return
            yield

    def starts(self, options: Sequence[str]) -> Generator[None, None, str]:
        """Read and return the longest of the options with which the text begins. Empty if the text begins with none of them."""
        while not self.ended and any(len(each) > len(self._text) and each.startswith(self._text) for each in options):
            yield
        found = max((each for each in options if self._text.startswith(each)), key=len, default="")
        self._take(len(found))
        return found

    def until(self, marks: tuple[str, ...], write: Callable[[str], None]) -> Generator[None, None, str]:
        """Pass the text before the first of the marks to `write`, then read and return the mark. Empty if the text ends without a
        mark."""
        pattern, starts, longest = _search(marks)
        while True:
            found = pattern.search(self._text)
            if found is not None and (self.ended or not self._may_grow(found, marks)):
                write(self._take(found.start()))
                return self._take(len(found[0]))
            if found is None:
                held = next((size for size in range(min(longest - 1, len(self._text)), 0, -1) if self._text[-size:] in starts), 0)
                sure = len(self._text) - (0 if self.ended else held)
                if sure:
                    write(self._take(sure))
                if self.ended:
                    return ""
            yield

    def _may_grow(self, found: re.Match[str], marks: Sequence[str]) -> bool:
        """Return whether more text may turn the mark at `found` into a longer mark."""
        rest = self._text[found.start() :]
        return any(len(each) > len(rest) and each.startswith(rest) for each in marks)

    def json_text(self, write: Callable[[str], None]) -> Generator[None, None, bool]:
        """Pass one JSON value to `write` as it arrives. Returns False if the text does not begin with a JSON value, or ends
        within it.

        Only brackets and quotes are matched; the text between them is not checked.
        """
        first = yield from self.peek()
        if first == '"':
            return (yield from self._string(write))
        if first in ("{", "["):
            return (yield from self._nested(write))
        return (yield from self._scalar(write))

    def _scalar(self, write: Callable[[str], None]) -> Generator[None, None, bool]:
        any_read = False
        while True:
            found = _SCALAR.match(self._text)
            taken = self._take(found.end() if found else 0)
            any_read = any_read or bool(taken)
            write(taken)
            if self._text or self.ended:
                return any_read
            yield

    def _string(self, write: Callable[[str], None]) -> Generator[None, None, bool]:
        write(self.skip())
        while True:
            found = _PLAIN.match(self._text)
            write(self._take(found.end() if found else 0))
            if self._text[:1] == '"':
                write(self.skip())
                return True
            if len(self._text) >= 2:  # an escape
                write(self._take(2))
            elif self.ended:
                write(self._take(1))
                return False
            else:
                yield

    def _nested(self, write: Callable[[str], None]) -> Generator[None, None, bool]:
        depth = 0
        while True:
            found = _BETWEEN.match(self._text)
            write(self._take(found.end() if found else 0))
            sign = self._text[:1]
            if sign == '"':
                if not (yield from self._string(write)):
                    return False
            elif sign:
                write(self.skip())
                depth += 1 if sign in "{[" else -1
                if depth == 0:
                    return True
            elif self.ended:
                return False
            else:
                yield

    def json_string(self) -> Generator[None, None, str | None]:
        """Read a JSON string and return its text, or None if the text does not begin with a valid JSON string."""
        parts: list[str] = []
        if (yield from self.peek()) != '"' or not (yield from self._string(parts.append)):
            return None
        return loaded_text("".join(parts))


def loaded_text(text: str) -> str | None:
    """Return the string that a JSON string literal represents, or None if the text is not such a literal."""
    try:
        read: str = parse_json(text.translate(_ESCAPES), "string", str)
    except ValueError:
        return None
    return read


@lru_cache(maxsize=256)
def _search(marks: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """Return a pattern that finds the first mark (the longest at its position), the proper prefixes of the marks, and the length
    of the longest mark."""
    ordered = sorted(marks, key=len, reverse=True)
    starts = frozenset(mark[:end] for mark in marks for end in range(1, len(mark)))
    return re.compile("|".join(map(re.escape, ordered))), starts, max(map(len, marks))


Program = Callable[[TextSource, PieceWriter], Waiting]


class ProgramParser:
    """Chat parser that runs a program over the received text."""

    def __init__(self, program: Program, make_id: Callable[[str, int], str] = call_id) -> None:
        self._source = TextSource()
        self._writer = PieceWriter(make_id)
        self._running = self._run(program)

    def feed(self, text: str) -> list[ChatPiece]:
        self._source.add(text)
        self._go_on()
        return self._writer.take()

    def end(self) -> list[ChatPiece]:
        self._source.ended = True
        self._go_on()
        self._writer.finish()
        return self._writer.take()

    def _run(self, program: Program) -> Waiting:
        yield from program(self._source, self._writer)
        yield from self._source.everything(self._writer.content)  # text that the program has left unread

    def _go_on(self) -> None:
        next(self._running, None)
