"""Parsers of chats: from the text that a model writes to its content, its reasoning and its calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol
from uuid import uuid4


class ChatPiece(NamedTuple):
    """A part of an answer. Pieces come in the order of the text; joined by kind and call they are the answer."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    """"call" begins a call, "arguments" goes on with one."""
    text: str
    """A part of the content or of the reasoning, the name of the function that is called, or a part of its arguments' JSON."""
    call: int = -1
    """Number of the call, from 0; of "call" and "arguments"."""
    id: str = ""
    """The call's id, of "call"."""


class ChatParser(Protocol):
    """Reads one completion as it comes. However a text is split, the pieces, joined, must be the same, and nothing may be lost:
    what is no call in the end is content."""

    def feed(self, text: str) -> Sequence[ChatPiece]:
        """Read on; returns the pieces that are certain by now."""

    def end(self) -> Sequence[ChatPiece]:
        """Take note that the text has ended; returns the rest."""


@dataclass(frozen=True, slots=True)
class ChatContext:
    """What a parser may know of the request that it reads the answer to."""

    prompt: str = ""
    """The prompt in the chat template; empty where token ids were given alone."""
    tools: Mapping[str, Mapping[str, Any]] | None = None
    """Name of each tool -> the JSON schema of its parameters."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls: what a grammar lets a model write where a tool must be called, or its schema be kept."""

    head: str
    """What stands before a call's arguments; NAME stands for the function's name, NUMBER for digits."""
    tail: str
    """What stands after them."""
    trigger: str
    """The start of `head` that nothing but a call begins with."""
    before: str = ""
    """What stands before the first call."""
    between: str | None = ""
    """What stands between two calls; None: an answer has one call."""
    after: str = ""
    """What stands after the last call."""
    needs: str = ""
    """A token that the tokenizer must have; else the next syntax is taken."""


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """The marks around a family's reasoning."""

    opens: str = "<think>"
    closes: str = "</think>"
    assumed: bool = False
    """Whether a text without the first mark is reasoning, too, unless the prompt has closed it."""
    ends_before: tuple[str, ...] = ()
    """Marks that end the reasoning and belong to what follows."""
    answer: str = ""
    """What stands between the reasoning and an answer that is no call."""

    def begun(self, prompt: str) -> bool | None:
        """Whether the reasoning has begun with the prompt; False: it has ended with it; None: neither."""
        tail = prompt.rstrip()
        if tail.endswith(self.opens):
            return True
        return False if tail.endswith(self.closes) else None


def call_id(name: str, number: int) -> str:
    """An id for a call of a function."""
    return f"call_{uuid4().hex[:24]}"


def recognizes_none(template: str) -> bool:
    """False: the parser is used where it is named."""
    return False


@dataclass(frozen=True)
class ChatParserInfo:
    """Registration of a parser by a plugin."""

    name: str
    """The name that `--tool-call-parser` or `--reasoning-parser` takes."""
    summary: str
    """One line that says whose format it reads."""
    reads: Literal["calls", "reasoning"]
    make: Callable[[ChatContext], ChatParser]
    """Makes the parser of one completion. One of calls gets the text without the reasoning."""
    recognizes: Callable[[str], bool] = recognizes_none
    """Whether a model with this chat template writes the format. The first that says so is taken."""
    syntaxes: tuple[CallSyntax, ...] = ()
    """How calls are written, the preferred first; none: they are written as those of `hermes` where a grammar decides."""
    reasoning: ReasoningSyntax | None = None
    """How reasoning is marked, so that a form which an answer must have begins behind it; None: forms begin at once."""
    make_id: Callable[[str, int], str] = call_id
    """Makes the id of a call from the function's name and the call's number."""
    marks: tuple[str, ...] = ()
    """Texts that the format consists of. Where one is a special token of the tokenizer, special tokens stay in the text."""
    whole: bool = False
    """Whether the parser reads the whole text, reasoning, content and calls; it is then used for every chat."""
