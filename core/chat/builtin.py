"""The parsers that come with Headway, by the names that vLLM's users know."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from typing import Final

from headway.core.chat.harmony import harmony
from headway.core.chat.json_calls import HeadedCalls, JsonCalls
from headway.core.chat.pythonic import pythonic
from headway.core.chat.reasoning import ThinkReader
from headway.core.chat.tagged_calls import TaggedCalls, TagSyntax
from headway.core.chat.text_source import Program, ProgramParser
from headway.core.contract.chat_parsers import (
    CallSyntax,
    ChatContext,
    ChatParserInfo,
    ReasoningSyntax,
    call_id,
    recognizes_none,
)

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
    """An id as Mistral's templates demand it: 9 letters and digits."""
    return "".join(secrets.choice(_SIGNS) for _ in range(9))


def _kimi_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


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
        name,
        summary,
        "calls",
        lambda _: ProgramParser(program, make_id),
        recognizes,
        syntaxes,
        make_id=make_id,
        marks=marks,
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
"""How most families write calls."""
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
    ("[TOOL_CALLS]",),
    re.compile(r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\](?P<id>[^\[{]+))?(?:\[ARGS\])?\s*"),
    lists=True,
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
    _calls("kimi_k2", "Kimi K2", _kimi, _KIMI, _has(_KIMI[0]), (_K2,), _kimi_id),
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
"""The parsers, the more special before the more general: the first that recognizes a model's template is taken."""

ALIASES: Final = {
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "llama4_json": "llama3_json",
    "llama3": "llama3_json",
    "qwen25": "hermes",
}
"""Other names of parsers of calls."""
