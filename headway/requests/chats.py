"""Chat formats of models: messages for a template, tools in prompts and grammars, and parsing of answers.

The module is independent of HTTP: every endpoint with conversations uses a `ChatFormat`. It does not import torch, so that a
server can check parser names before loading anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

from headway.core.chat.builtin import ALIASES, BUILTIN
from headway.core.contract.errors import ConfigError, PromptError, made_by
from headway.core.contract.text_plugins import ChatContext, ChatParser, ChatParserInfo, ChatPiece
from headway.core.sampling.params import SamplingParams
from headway.core.system.json_text import parse_json
from headway.core.system.logs import warn_once
from headway.core.system.text import shown
from headway.requests.tool_use import ToolForms, ToolUse

Messages = Sequence[Mapping[str, Any]]
_WRITES_TEXT: Final = re.compile(r"\+\s*\w+(?:\['function'\]|\.function)?(?:\['arguments'\]|\.arguments)(?!\s*\|)")
"""Matches a template that concatenates a call's arguments to a text, as DeepSeek V3's does. Such a template needs the arguments
as text."""
TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> the field that has the part's text."""
_NO_SYSTEM: Final = re.compile(r"system role.{0,20}not supported", re.IGNORECASE)
"""Matches the error text of a template that does not support system messages."""
_DESCRIPTION: Final = """\
You may call functions to help with the user's request. These are the functions, as JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between these marks, once for each call:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>
The results follow between <tool_response> and </tool_response>. Call no function where none is needed."""


def template_text(tokenizer: Any) -> str:
    """Return a tokenizer's chat templates as one text; empty if it has none."""
    given = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, given.values())) if isinstance(given, Mapping) else str(given)


def text_field(part: Mapping[str, Any], name: str, place: str, optional: bool = False) -> str:
    """Return a text field of a part. place: path of the part. optional: return "" if the field is absent or null. :raises
    PromptError: if the field is not a text."""
    value = part.get(name)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise PromptError(f"{place}.{name}", "a text", shown(value, 60) if name in part else "none")
    return value


def prepared(messages: Messages, template: str) -> list[dict[str, Any]]:
    """Return messages for a template. Missing content of an assistant message becomes "", call arguments become objects (or text
    if the template needs text), and reasoning gets both of its names.

    The role developer becomes system if the template does not know developer.
    :raises PromptError: if a message or a part of it is invalid; the error has its path.
    """
    as_text = _WRITES_TEXT.search(template) is not None
    role = "developer" if "developer" in template else "system"
    return [_prepared(message, f"messages.{number}", as_text, role) for number, message in enumerate(messages)]


def _prepared(message: Any, place: str, as_text: bool, developer: str) -> dict[str, Any]:
    """Check a message and return it for a template. developer: role to use for developer messages."""
    if not isinstance(message, Mapping):
        raise PromptError(place, 'a message such as {"role": "user", "content": "Hello"}', shown(message, 60))
    made = dict(message)
    role = text_field(message, "role", place)
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        text_field(message, name, place, optional=True)
    if role == "developer":
        made["role"] = developer
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if made.get(name) is not None and made.get(other) is None:
            made[other] = made[name]
    calls = made.get("tool_calls")
    if calls is None:
        made.pop("tool_calls", None)
    elif isinstance(calls, Sequence) and not isinstance(calls, str):
        made["tool_calls"] = [_call(call, f"{place}.tool_calls.{number}", as_text) for number, call in enumerate(calls)]
    else:
        raise PromptError(f"{place}.tool_calls", "a list of calls", shown(calls, 60))
    if made.get("content") is None and (role == "assistant" or calls is not None):
        made["content"] = ""
    _check_content(made.get("content"), f"{place}.content")
    return made


def _check_content(content: Any, place: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise PromptError(place, "a text or a list of parts", shown(content, 60))
    for number, part in enumerate(content):
        if isinstance(part, Mapping):
            kind = text_field(part, "type", f"{place}.{number}")
            if kind not in TEXTS:
                raise PromptError(f"{place}.{number}", f"a part that is a text ({', '.join(TEXTS)})", shown(kind, 60))
            text_field(part, TEXTS[kind], f"{place}.{number}")
        elif not isinstance(part, str):
            raise PromptError(f"{place}.{number}", 'a part such as {"type": "text", "text": "Hello"}', shown(part, 60))


def _call(call: Any, place: str, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        need = 'a call such as {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'
        raise PromptError(
            place if function is None else f"{place}.function", need, shown(call if function is None else function, 60)
        )
    if call.get("type") not in (None, "function"):
        raise PromptError(f"{place}.type", "function, the one type of calls that models make here", shown(call["type"], 60))
    text_field(call, "id", place, optional=True)
    text_field(function, "name", f"{place}.function")
    given = function.get("arguments")
    read = call_arguments(given, f"{place}.function.arguments")
    arguments = (given if isinstance(given, str) else json.dumps(read, ensure_ascii=False)) if as_text else read
    return {**call, "function": {**function, "arguments": arguments}}


def call_arguments(given: Any, place: str) -> Mapping[str, Any]:
    """Return a call's arguments, given as an object or as JSON; "" means no arguments. place: path of the arguments. :raises
    PromptError: if the arguments are invalid; the error has the path."""
    read = given
    if isinstance(given, str):
        try:
            read = parse_json(given or "{}", place, any_number=True)
        except ValueError:
            raise PromptError(place, "arguments that are JSON", shown(given, 60)) from None
    if not isinstance(read, Mapping):
        raise PromptError(place, "arguments that are a JSON object", shown(given, 60))
    return read


def described(messages: Messages, tools: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return messages for a template without tools: the first message describes the tools; calls and results become text."""
    listed = [_as_text(message) for message in messages]
    if not tools:
        return listed
    description = _DESCRIPTION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    role = "user" if _NO_SYSTEM.search(template) else "system"
    first = listed[0] if listed else {}
    if first.get("role") != role:
        return [{"role": role, "content": description}, *listed] if role == "system" else listed
    return [{**first, "content": _joined(description, first.get("content"))}, *listed[1:]]


def _joined(description: str, content: Any) -> Any:
    if isinstance(content, str):
        return f"{description}\n\n{content}"
    return [{"type": "text", "text": f"{description}\n"}, *content] if isinstance(content, Sequence) else description


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        content = message.get("content")
        return {"role": "user", "content": f"<tool_response>\n{_words(content)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    written = [
        "<tool_call>\n"
        + json.dumps({key: call["function"].get(key) for key in ("name", "arguments")}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in message["tool_calls"]
    ]
    said = _words(message.get("content"))
    return {"role": message.get("role"), "content": "\n".join([said, *written] if said else written)}


def _words(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


Reads = Literal["calls", "reasoning"]
_GENERAL = "hermes"  # Parser of tool calls if a model's template has no known format


@dataclass
class ToolCall:
    """A tool call."""

    id: str
    name: str
    arguments: str = ""
    """Arguments as JSON, exactly as the model wrote it."""


@dataclass
class ChatText:
    """A complete answer: content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[ChatPiece]) -> ChatText:
        """Return the answer that consists of these pieces."""
        found = cls()
        for piece in pieces:
            if piece.kind == "content":
                found.content += piece.text
            elif piece.kind == "reasoning":
                found.reasoning += piece.text
            elif piece.kind == "call":
                found.calls.append(ToolCall(piece.id, piece.text))
            else:
                found.calls[piece.call].arguments += piece.text
        return found


class ChatReader:
    """Parser of one completion's text as it grows."""

    def __init__(
        self,
        reasoning: ChatParser | None,
        calls: ChatParser | None,
        *,
        one_call: bool = False,
        hidden: re.Pattern[str] | None = None,
        marks: Sequence[str] = (),
    ) -> None:
        """hidden: pattern for special tokens in the text that are not part of the format. marks: markers of the tool-call
        format."""
        self._parsers = [parser for parser in (reasoning, calls) if parser is not None]
        self._one_call = one_call
        self._hidden = hidden
        self._marks = marks
        self.has_calls = False
        self.num_dropped = 0
        """Number of dropped calls, in addition to the one that the request allows."""
        self.is_malformed = False
        """True if the content contains a marker of the format: something that looked like a call was invalid."""

    def feed(self, text: str) -> list[ChatPiece]:
        """Parse more text. Return the pieces that later text can no longer change."""
        if self._hidden is not None:
            text = self._hidden.sub("", text)
        return self._noted(_through(self._parsers, [ChatPiece("content", text)], ended=False))

    def end(self) -> list[ChatPiece]:
        """Process the end of the text. Return the remaining pieces."""
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
    """Pass content through the parsers, one after another."""
    for parser in parsers:
        passed: list[ChatPiece] = []
        for piece in pieces:
            passed += parser.feed(piece.text) if piece.kind == "content" and piece.text else [piece] * bool(piece.text)
        if ended:
            passed += parser.end()
        pieces = passed
    return [piece for piece in pieces if piece.text]


@dataclass(frozen=True)
class ChatFormat:
    """Chat format of a model."""

    calls: ChatParserInfo
    reasoning: ChatParserInfo | None
    template: str
    """The model's chat templates as one text."""
    tokens: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Added tokens of the tokenizer, by name."""
    special: frozenset[str] = frozenset()
    """Added tokens that a tokenizer omits from decoded text."""
    auto: bool = True
    """True if calls are parsed for requests with tool_choice auto."""
    why: str = ""
    """Description of the format and how it was chosen."""

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
        """Return a model's chat format.

        tool_parser, reasoning_parser: names of parsers. None detects the parser from the chat template; "none" disables
        reasoning.
        parsers: plugins' parsers, which take precedence over built-in parsers.
        template: template that replaces the model's template.
        :raises ConfigError: if no parser has a given name.
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
        """True if the model's template writes tools into the prompt."""
        return "tools" in self.template

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], use: ToolUse
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return messages and tools for `chat_prompt`. :raises ConfigError: if a call's arguments are not a JSON object."""
        listed = prepared(messages, self.template)
        if self.shows_tools:
            return listed, [dict(tool) for tool in use.tools] or None
        if use.tools:
            warn_once("chat template: it does not support tools; the first message describes them")
        return described(listed, use.tools, self.template), None

    def params(self, params: SamplingParams, use: ToolUse, prompt: Mapping[str, Any]) -> SamplingParams:
        """Return parameters for an answer in this format. prompt: the result of `chat_prompt`.
        :raises ConfigError: if a structured output is combined with a required tool call."""
        if not self.shows_tools and use.choice == "required":  # models not trained for it never stop calling
            use = replace(use, parallel=False)
        forms = ToolForms(self.calls, self.reasoning, self.tokens)
        form = forms.form(params.structured_outputs, use, str(prompt.get("prompt") or ""))
        if form is not params.structured_outputs:
            params = replace(params, structured_outputs=form)
        if params.skip_special_tokens and self._keeps_special(use):
            params = replace(params, skip_special_tokens=False)
        return params

    def reader(self, use: ToolUse, prompt: str, skip_special_tokens: bool = True) -> ChatReader | None:
        """Return a parser for a completion; None if all text of the completion is content. prompt: rendered prompt.
        skip_special_tokens: value of the request's parameter."""
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
        if self.calls.whole:
            return [self.calls]
        reads_calls = use.choice == "required" or (use.choice == "auto" and self.auto)
        calls = ToolForms.writer_of(self.calls) if use.choice == "required" else self.calls
        return [info for info in (self.reasoning, calls if reads_calls else None) if info is not None]

    def _keeps_special(self, use: ToolUse) -> bool:
        """Return whether special tokens are part of the format."""
        return any(token in mark for info in self._parsers_for(use) for mark in info.marks for token in self.special)


def check_names(tool_parser: str | None, reasoning_parser: str | None, parsers: Sequence[ChatParserInfo]) -> None:
    """Check parser names before a model is loaded; see `ChatFormat.of`. :raises ConfigError: if no parser has such a name."""
    known = [*parsers, *BUILTIN]
    _named(known, "calls", tool_parser)
    _named(known, "reasoning", None if reasoning_parser == "none" else reasoning_parser)


def _named(known: Sequence[ChatParserInfo], reads: Reads, name: str | None) -> ChatParserInfo | None:
    """Return the parser with this name, or None if no name is given. :raises ConfigError: if no parser has the name."""
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
