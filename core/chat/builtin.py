"""Built-in chat parsers, named as in vLLM."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headway.core.chat.json_calls import HeadedCalls, JsonCalls, as_json
from headway.core.chat.text_source import PieceWriter, Program, ProgramParser, TextSource, Waiting
from headway.core.contract.text_plugins import CallSyntax, ChatContext, ChatParserInfo, ReasoningSyntax, call_id, recognizes_none
from headway.core.system.json_text import parse_json

_BODY: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADS: Final = ("<|start|>assistant", "<|start|>", "<|channel|>", " to=")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")


def harmony(source: TextSource, writer: PieceWriter) -> Waiting:
    """Parse an assistant's messages in the Harmony format. The start of the first message is the end of the prompt and not part
    of the text."""
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
    seen: list[int] = []

    def note(text: str) -> None:
        seen.append(len(text))
        write(text)  # type: ignore[operator]

    mark = yield from source.until(_ENDS, note)
    if mark == "<|start|>":  # the next head, whose start is read already
        yield from source.starts(("assistant",))
    return any(seen)


def pythonic(source: TextSource, writer: PieceWriter) -> Waiting:
    """Parse an answer that is a list of Python calls, once the list is complete. Any other answer becomes content."""
    source.record()
    yield from source.space()
    yield from source.starts(("<|python_start|>", "<|python_tag|>"))
    if (yield from source.peek()) != "[":
        writer.content(source.recorded())
        yield from source.everything(writer.content)
        return
    parts: list[str] = []
    yield from source.everything(parts.append)
    text = "".join(parts)
    calls = _calls_of(text.strip().removesuffix("<|python_end|>").strip())
    if not calls:
        writer.content(source.recorded())
    for name, arguments in calls:
        writer.call(name)
        writer.arguments(json.dumps(arguments, ensure_ascii=False))


def _calls_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the arguments of each call in a list of Python calls. Empty if the text is not such a list."""
    try:
        tree = ast.parse(text, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return [_call_of(each) for each in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _call_of(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a call.

    :raises ValueError: if the node is not a call with constant keyword arguments.
    """
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("no call with named arguments")
    values = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    json.dumps(values)
    return ast.unparse(node.func), values


class ThinkReader:
    """Parser that separates the reasoning from the content after it."""

    def __init__(self, tags: ReasoningSyntax, prompt: str) -> None:
        self._tags = tags
        self._begun = tags.begun(prompt)

    def __call__(self, source: TextSource, writer: PieceWriter) -> Waiting:
        tags, begun = self._tags, self._begun
        if begun is not False:
            source.record()
            yield from source.space()
            found = yield from source.starts((tags.opens,))
            before = source.recorded()
            if found or begun or tags.assumed:
                yield from self._reasoning(source, writer)
            else:
                writer.content(before)
        yield from source.everything(writer.content)

    def _reasoning(self, source: TextSource, writer: PieceWriter) -> Waiting:
        """Read the reasoning and its closing mark. White space before and after the reasoning and after the mark is dropped."""
        held = ""

        def write(text: str) -> None:
            nonlocal held
            text = held + text
            retained = text.rstrip()
            held = text[len(retained) :]
            writer.reasoning(retained)

        yield from source.space()
        mark = yield from source.until((self._tags.closes, *self._tags.ends_before), write)
        if mark in self._tags.ends_before:
            writer.content(mark)
        yield from source.space()


@dataclass(frozen=True)
class TagSyntax:
    """Tags that a model family uses to write tool calls."""

    opens: str
    """Mark that begins a call."""
    name: tuple[str, str]
    """Marks before and after a function's name. If the first mark is empty, the name directly follows the mark `opens`."""
    key: tuple[str, str]
    """Marks before and after a parameter's name."""
    value: tuple[str, str]
    """Marks before and after a parameter's value. The first is empty if no mark precedes the value."""
    closes: tuple[str, ...]
    """Marks that may end a call."""
    around: tuple[str, ...] = ()
    """Marks before and after the whole sequence of calls. The parser ignores them."""


class TaggedCalls:
    """Parser of tool calls written in the tags of one model family."""

    def __init__(self, syntax: TagSyntax, context: ChatContext) -> None:
        self._syntax = syntax
        self._tools = context.tools or {}

    def __call__(self, source: TextSource, writer: PieceWriter) -> Waiting:
        syntax = self._syntax
        while mark := (yield from source.until((syntax.opens, *syntax.around), writer.content)):
            if mark != syntax.opens:
                continue
            source.record()
            name, mark = yield from self._name(source)
            if not name:
                writer.content(syntax.opens + source.recorded())
                continue
            source.recorded()
            writer.call(name)
            known = (self._tools.get(name) or {}).get("properties")
            yield from self._parameters(source, writer, known if isinstance(known, Mapping) else {}, mark)

    def _name(self, source: TextSource) -> Generator[None, None, tuple[str, str]]:
        """Read a function's name and the mark after it, and return both. The name is empty if the text has no valid name."""
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
                source.record()
                yield from source.space()
                mark = yield from source.starts((syntax.key[0], *syntax.closes))
                space = source.recorded()
                if not mark:  # this text is not a parameter
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
                return  # the text ended within the value, so the object must look incomplete
            mark = ""
        writer.arguments("}")

    def _value(self, source: TextSource, writer: PieceWriter, schema: Any) -> Generator[None, None, bool]:
        """Read a parameter's value, passing a string on as it arrives. Returns False if the value is not terminated."""
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
    """Return a value as JSON: the text itself if it is JSON, else a JSON string."""
    try:
        return json.dumps(parse_json(text, "value", any_number=True), ensure_ascii=False, allow_nan=False)
    except ValueError:
        words = {"True": "true", "False": "false", "None": "null"}
        return words.get(text.strip()) or json.dumps(text, ensure_ascii=False)


def _is_text(schema: Any) -> bool:
    """Return whether the schema accepts only strings, so that a value can be streamed as a string."""
    if not isinstance(schema, Mapping):
        return False
    if schema.get("type") in ("string", ["string"]):
        return True
    options = schema.get("enum")
    return "type" not in schema and isinstance(options, list) and bool(options) and all(isinstance(each, str) for each in options)


_SIGNS: Final = string.ascii_letters + string.digits
_DEEPSEEK: Final = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI: Final = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_DSML: Final = "｜DSML｜"


def _mistral_id(name: str, number: int) -> str:
    """Return an id as Mistral's templates require it: 9 letters and digits."""
    return "".join(secrets.choice(_SIGNS) for _ in range(9))


def _has(*words: str) -> Callable[[str], bool]:
    return lambda template: all(word in template for word in words)


def _calls(
    name: str,
    summary: str,
    program: Program,
    marks: tuple[str, ...],
    recognizes: Callable[[str], bool] = recognizes_none,
    syntaxes: tuple[CallSyntax, ...] = (),
    make_id: Callable[[str, int], str] = call_id,
) -> ChatParserInfo:
    return ChatParserInfo(
        name, summary, "calls", lambda _: ProgramParser(program, make_id), recognizes, syntaxes, make_id=make_id, marks=marks
    )


def _tagged(name: str, summary: str, syntax: TagSyntax, recognizes: Callable[[str], bool] = recognizes_none) -> ChatParserInfo:
    marks = tuple(mark for mark in (syntax.opens, *syntax.around, *syntax.key, *syntax.value, *syntax.closes) if len(mark) > 2)
    return ChatParserInfo(
        name, summary, "calls", lambda context: ProgramParser(TaggedCalls(syntax, context)), recognizes, marks=marks
    )


def _thinks(
    name: str, summary: str, tags: ReasoningSyntax, recognizes: Callable[[str], bool] = recognizes_none
) -> ChatParserInfo:
    def make(context: ChatContext) -> ProgramParser:
        return ProgramParser(ThinkReader(tags, context.prompt))

    return ChatParserInfo(name, summary, "reasoning", make, recognizes, marks=(tags.opens, tags.closes), reasoning=tags)


HERMES: Final = CallSyntax('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", trigger="<tool_call>", between="\n")
"""Hermes call syntax, which most model families use."""
_MISTRAL_NEW: Final = CallSyntax("[TOOL_CALLS]NAME[ARGS]", "", trigger="[TOOL_CALLS]", needs="[ARGS]")
_MISTRAL_OLD: Final = CallSyntax(
    '{"name": "NAME", "arguments": ', "}", trigger="[TOOL_CALLS]", before="[TOOL_CALLS][", between=", ", after="]"
)
_LLAMA: Final = CallSyntax('{"name": "NAME", "parameters": ', "}", trigger='{"name": "', between="; ")
_GRANITE: Final = CallSyntax(
    '{"name": "NAME", "arguments": ', "}", trigger="<|tool_call|>", before="<|tool_call|>[", between=", ", after="]"
)
_V31: Final = CallSyntax(
    f"{_DEEPSEEK[1]}NAME{_DEEPSEEK[2]}", _DEEPSEEK[3], trigger=_DEEPSEEK[1], before=_DEEPSEEK[0], after=_DEEPSEEK[4]
)
_V3: Final = CallSyntax(
    f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}NAME\n```json\n",
    f"\n```{_DEEPSEEK[3]}",
    trigger=_DEEPSEEK[1],
    before=_DEEPSEEK[0],
    between="\n",
    after=_DEEPSEEK[4],
)
_K2: Final = CallSyntax(f"{_KIMI[1]}functions.NAME:NUMBER{_KIMI[2]}", _KIMI[3], trigger=_KIMI[1], before=_KIMI[0], after=_KIMI[4])
_HARMONY: Final = CallSyntax(
    "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    "",  # <|call|> ends the text
    trigger="<|channel|>commentary to=",
    between=None,
)
_ANALYSIS: Final = ReasoningSyntax(
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", answer="<|channel|>final<|message|>"
)
_deepseek: Final = HeadedCalls(
    (_DEEPSEEK[1],),
    re.compile(r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<｜]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"),
    (f"```{_DEEPSEEK[3]}", _DEEPSEEK[3]),
    (_DEEPSEEK[0], _DEEPSEEK[4]),
)
_kimi: Final = HeadedCalls(
    (_KIMI[1],),
    re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"),
    (_KIMI[3],),
    (_KIMI[0], _KIMI[4]),
)
_mistral: Final = HeadedCalls(
    ("[TOOL_CALLS]",), re.compile(r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\](?P<id>[^\[{]+))?(?:\[ARGS\])?\s*"), lists=True
)
_glm: Final = TagSyntax(
    "<tool_call>", ("", "\n"), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), ("</tool_call>",)
)
_coder: Final = TagSyntax(
    "<function=", ("", ">"), ("<parameter=", ">"), ("", "</parameter>"), ("</function>",), ("<tool_call>", "</tool_call>")
)
_dsml: Final = TagSyntax(
    f'<{_DSML}invoke name="',
    ("", '">'),
    (f'<{_DSML}parameter name="', '"'),
    (">", f"</{_DSML}parameter>"),
    (f"</{_DSML}invoke>",),
    (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
)
_minimax: Final = TagSyntax(
    '<invoke name="',
    ("", '">'),
    ('<parameter name="', '">'),
    ("", "</parameter>"),
    ("</invoke>",),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)

_think: Final = ReasoningSyntax()
_assumed: Final = ReasoningSyntax(assumed=True)
_is_llama: Final = re.compile(r"<\|python_tag\|>|<\|start_header_id\|>.*\"?parameters\"?", re.DOTALL)


def _harmony(name: str, reads: str) -> ChatParserInfo:
    return ChatParserInfo(
        name,
        "gpt-oss: the harmony format",
        reads,  # type: ignore[arg-type]
        lambda _: ProgramParser(harmony),
        _has("<|channel|>", "<|start|>"),
        (_HARMONY,),
        marks=("<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|return|>", "<|start|>"),
        reasoning=_ANALYSIS,
        whole=True,
    )


BUILTIN: Final[tuple[ChatParserInfo, ...]] = (
    _harmony("openai", "calls"),
    _calls("kimi_k2", "Kimi K2", _kimi, _KIMI, _has(_KIMI[0]), (_K2,), lambda name, number: f"functions.{name}:{number}"),
    _tagged("deepseek_v32", "DeepSeek V3.2: parameters in tags", _dsml, _has(_DSML)),
    _calls("deepseek_v3", "DeepSeek V3 and R1", _deepseek, _DEEPSEEK, _has(_DEEPSEEK[0], "```json"), (_V3,)),
    _calls("deepseek_v31", "DeepSeek V3.1", _deepseek, _DEEPSEEK, _has(_DEEPSEEK[0]), (_V31,)),
    _tagged("glm45", "GLM 4.5 to 4.7: parameters in tags", _glm, _has("<arg_key>")),
    _tagged("qwen3_coder", "Qwen3-Coder and Qwen3.5: parameters in tags", _coder, _has("<function=", "<parameter=")),
    _tagged("minimax_m2", "MiniMax M2: parameters in tags", _minimax, _has("<minimax:tool_call>")),
    _calls(
        "mistral",
        "Mistral",
        _mistral,
        ("[TOOL_CALLS]", "[ARGS]"),
        _has("[TOOL_CALLS]"),
        (_MISTRAL_NEW, _MISTRAL_OLD),
        _mistral_id,
    ),
    _calls(
        "granite",
        "Granite 3",
        JsonCalls(("<|tool_call|>", "<tool_call>"), bare=True),
        ("<|tool_call|>",),
        _has("<|tool_call|>"),
        (_GRANITE,),
    ),
    _calls("jamba", "Jamba", JsonCalls(("<tool_calls>",), ("</tool_calls>",)), ("<tool_calls>",), _has("<tool_calls>")),
    _calls("phi4_mini_json", "Phi 4 mini", JsonCalls(("functools",)), ("functools",), _has("functools")),
    _calls(
        "hermes",
        "Hermes, Qwen 2.5 and 3, and many others",
        JsonCalls(("<tool_call>",), ("</tool_call>",)),
        ("<tool_call>", "</tool_call>"),
        _has("<tool_call>"),
        (HERMES,),
    ),
    _calls("llama4_pythonic", "Llama 4: a list of calls in Python", pythonic, ("<|python_start|>",), _has("<|python_start|>")),
    _calls("pythonic", "a list of calls in Python", pythonic, ()),
    _calls(
        "llama3_json",
        "Llama 3.1 to 3.3",
        JsonCalls(("<|python_tag|>",), bare=True),
        ("<|python_tag|>",),
        lambda template: _is_llama.search(template) is not None,
        (_LLAMA,),
    ),
    _harmony("openai_gptoss", "reasoning"),
    _thinks("kimi_k2", "Kimi K2 Thinking", ReasoningSyntax(ends_before=_KIMI[:1]), _has(_KIMI[0], "<think>")),
    _thinks("glm45", "GLM 4.5 to 4.7", _think, _has("<arg_key>", "<think>")),
    _thinks("mistral", "Magistral", ReasoningSyntax("[THINK]", "[/THINK]"), _has("[THINK]")),
    _thinks("deepseek_v3", "DeepSeek V3.1 and later", _think, _has(_DEEPSEEK[0], "thinking")),
    _thinks("deepseek_r1", "DeepSeek R1 and QwQ: what comes first is reasoning", _assumed, _has(_DEEPSEEK[0], "</think>")),
    _thinks("qwen3", "Qwen3, and all that write <think>", _think, _has("<think>")),
    _thinks("minimax_m2", "MiniMax M2", _assumed),
)
"""Built-in parsers, specific ones first: the first that recognizes a model's template is selected."""

ALIASES: Final = {
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "llama4_json": "llama3_json",
    "llama3": "llama3_json",
    "qwen25": "hermes",
}
"""Aliases of tool call parsers: alias -> name of the parser."""
