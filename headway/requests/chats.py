"""What a model's chats look like: how tools and messages become a prompt and a form, and how the answer's text is read.

No HTTP: every endpoint that holds a conversation goes through a `ChatFormat`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from headway.core.chat.builtin import ALIASES, BUILTIN
from headway.core.contract.chat_parsers import ChatContext, ChatParser, ChatParserInfo, ChatPiece
from headway.core.contract.errors import ConfigError, made_by
from headway.core.sampling.params import SamplingParams
from headway.core.system.logs import warn_once
from headway.requests.chat_template import described, prepared, template_text
from headway.requests.tool_use import ToolForms, ToolUse

Reads = Literal["calls", "reasoning"]
_GENERAL = "hermes"
"""The parser of calls where a model's template names no format."""


@dataclass
class ToolCall:
    """A call of a tool."""

    id: str
    name: str
    arguments: str = ""
    """JSON, as the model wrote it."""


@dataclass
class ChatText:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[ChatPiece]) -> None:
        """Take in pieces."""
        for piece in pieces:
            if piece.kind == "content":
                self.content += piece.text
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            elif piece.kind == "call":
                self.calls.append(ToolCall(piece.id, piece.text))
            else:
                self.calls[piece.call].arguments += piece.text


class ChatReader:
    """Reads the text of one completion as it comes."""

    def __init__(
        self,
        reasoning: ChatParser | None,
        calls: ChatParser | None,
        *,
        one_call: bool = False,
        hidden: re.Pattern[str] | None = None,
        marks: Sequence[str] = (),
    ) -> None:
        """hidden: special tokens that stand in the text and are no part of the format. marks: of the format of calls."""
        self._parsers = [parser for parser in (reasoning, calls) if parser is not None]
        self._one_call = one_call
        self._hidden = hidden
        self._marks = marks
        self.has_calls = False
        """Whether a call has begun."""
        self.num_dropped = 0
        """Calls beyond the one that the request allows."""
        self.is_malformed = False
        """Whether a mark of the format is left in the content: what looked like a call was none."""

    def feed(self, text: str) -> list[ChatPiece]:
        """Read on; returns what is certain by now."""
        if self._hidden is not None:
            text = self._hidden.sub("", text)
        return self._noted(_through(self._parsers, [ChatPiece("content", text)], ended=False))

    def end(self) -> list[ChatPiece]:
        """Take note that the text has ended; returns the rest."""
        return self._noted(_through(self._parsers, [], ended=True))

    def _noted(self, pieces: list[ChatPiece]) -> list[ChatPiece]:
        kept = []
        for piece in pieces:
            self.has_calls = self.has_calls or piece.kind == "call"
            if self._one_call and piece.call > 0:
                self.num_dropped += piece.kind == "call"
                continue
            if piece.kind == "content" and not self.is_malformed:
                self.is_malformed = any(mark in piece.text for mark in self._marks)
            kept.append(piece)
        return kept


def _through(parsers: Sequence[ChatParser], pieces: list[ChatPiece], ended: bool) -> list[ChatPiece]:
    """Pass content through each parser in turn."""
    for parser in parsers:
        passed: list[ChatPiece] = []
        for piece in pieces:
            passed += parser.feed(piece.text) if piece.kind == "content" and piece.text else [piece] * bool(piece.text)
        if ended:
            passed += parser.end()
        pieces = passed
    return [piece for piece in pieces if piece.text]


def read_whole(reader: ChatReader, text: str) -> ChatText:
    """Read a whole text."""
    found = ChatText()
    found.add(reader.feed(text))
    found.add(reader.end())
    return found


@dataclass(frozen=True)
class ChatFormat:
    """How one model writes its chats."""

    calls: ChatParserInfo
    reasoning: ChatParserInfo | None
    template: str
    """The model's chat templates as one text."""
    tokens: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Added tokens of the tokenizer, by name."""
    special: frozenset[str] = frozenset()
    """Added tokens that a tokenizer leaves out of a text."""
    auto: bool = True
    """Whether calls are read where a request leaves it to the model to make some."""
    why: str = ""
    """What has decided, in words."""

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        auto: bool = True,
        parsers: Sequence[ChatParserInfo] = (),
        template: str | None = None,
    ) -> ChatFormat:
        """Find out how a model writes. tool_parser, reasoning_parser: names; None: by the model's chat template, "none": no
        reasoning is looked for. parsers: those of plugins, which are asked before the built-in ones. template: in place of the
        model's own.

        :raises ConfigError: no parser has such a name.
        """
        template = template_text(tokenizer) if template is None else template
        known = [*parsers, *BUILTIN]
        calls = _named(known, "calls", tool_parser) or _recognized(known, "calls", template)
        reasoning = None
        if reasoning_parser != "none":
            reasoning = _named(known, "reasoning", reasoning_parser) or _recognized(known, "reasoning", template)
        if calls is not None and calls.whole:
            reasoning = calls
        elif reasoning is not None and reasoning.whole:
            calls = reasoning
        tokens = dict(tokenizer.get_added_vocab()) if hasattr(tokenizer, "get_added_vocab") else {}
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        special = frozenset(str(token) for token in added.values() if getattr(token, "special", False))
        by = {False: "by the model's template", True: "as asked for"}
        found = calls or next(each for each in BUILTIN if (each.reads, each.name) == ("calls", _GENERAL))
        shown = "" if "tools" in template else ", tools are described in the first message"
        why = f"calls of tools: {found.name} ({by[tool_parser is not None] if calls else 'the template names no format'}{shown})"
        why += f"; reasoning: {reasoning.name} ({by[reasoning_parser is not None]})" if reasoning else "; no reasoning"
        return cls(found, reasoning, template, tokens, special, auto, why)

    @property
    def shows_tools(self) -> bool:
        """Whether the model's template writes tools into the prompt."""
        return "tools" in self.template

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], use: ToolUse
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as `chat_prompt` takes them.

        :raises ConfigError: a call in a message whose arguments are no JSON object.
        """
        listed = prepared(messages, self.template)
        if self.shows_tools:
            return listed, [dict(tool) for tool in use.tools] or None
        if use.tools:
            warn_once("the model's chat template has no tools: they are described in the first message")
        return described(listed, use.tools, self.template), None

    def params(self, params: SamplingParams, use: ToolUse, prompt: Mapping[str, Any]) -> SamplingParams:
        """Parameters for an answer in this format: forms begin behind the reasoning, and a call that must come has one.

        prompt: what `chat_prompt` returned.

        :raises ConfigError: a form of the answer beside a tool that must be called.
        """
        if not self.shows_tools and use.choice == "required":  # what was not learnt has no end: such models call again and again
            use = replace(use, parallel=False)
        forms = ToolForms(self.calls, self.reasoning, self.tokens)
        form = forms.form(params.structured_outputs, use, str(prompt.get("prompt") or ""))
        if form is not params.structured_outputs:
            params = replace(params, structured_outputs=form)
        if params.skip_special_tokens and self._keeps_special(use):
            params = replace(params, skip_special_tokens=False)
        return params

    def reader(self, use: ToolUse, prompt: str, skip_special_tokens: bool = True) -> ChatReader | None:
        """The reader of one completion; None: its text is its content.

        prompt: in the template. skip_special_tokens: as the request has it.
        """
        context = ChatContext(prompt, use.schemas)
        active = self._parsers_for(use)
        if not active:
            return None
        made = {
            info.reads: made_by(f"parser of {info.reads} {info.name}", partial(info.make, context), "feed", "end")
            for info in active
        }
        hidden = None
        if skip_special_tokens and self._keeps_special(use):
            marks = {mark for info in active for mark in info.marks}
            names = [re.escape(token) for token in self.special if not any(token in mark for mark in marks)]
            hidden = re.compile("|".join(names)) if names else None
        marks_of_calls = tuple(mark for info in active if info.reads == "calls" for mark in info.marks)
        return ChatReader(
            made.get("reasoning"), made.get("calls"), one_call=not use.parallel, hidden=hidden, marks=marks_of_calls
        )

    def _parsers_for(self, use: ToolUse) -> list[ChatParserInfo]:
        """The parsers that read the answer to a request."""
        if self.calls.whole:
            return [self.calls]
        reads_calls = use.choice == "required" or (use.choice == "auto" and self.auto)
        calls = ToolForms.writer_of(self.calls) if use.choice == "required" else self.calls
        return [info for info in (self.reasoning, calls if reads_calls else None) if info is not None]

    def _keeps_special(self, use: ToolUse) -> bool:
        """Whether special tokens are a part of the format."""
        return any(token in mark for info in self._parsers_for(use) for mark in info.marks for token in self.special)


def check_names(tool_parser: str | None, reasoning_parser: str | None, parsers: Sequence[ChatParserInfo]) -> None:
    """Check names of parsers before a model is loaded; see `ChatFormat.of`.

    :raises ConfigError: no parser has such a name.
    """
    known = [*parsers, *BUILTIN]
    _named(known, "calls", tool_parser)
    _named(known, "reasoning", None if reasoning_parser == "none" else reasoning_parser)


def _named(known: Sequence[ChatParserInfo], reads: Reads, name: str | None) -> ChatParserInfo | None:
    """:raises ConfigError: no parser has the name."""
    if name is None:
        return None
    name = ALIASES.get(name, name) if reads == "calls" else name
    found = next((info for info in known if (info.reads, info.name) == (reads, name)), None)
    if found is None:
        option = "--tool-call-parser" if reads == "calls" else "--reasoning-parser"
        names = ", ".join(sorted({info.name for info in known if info.reads == reads}))
        raise ConfigError(option, f"one of {names}", repr(name), "a plugin may bring others (headway_register_chat_parsers)")
    return found


def _recognized(known: Sequence[ChatParserInfo], reads: Reads, template: str) -> ChatParserInfo | None:
    return next((info for info in known if info.reads == reads and info.recognizes(template)), None)
