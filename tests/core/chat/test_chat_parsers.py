"""What each family writes is read the same however it is split, and what is no call is never lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from headway.core.chat.builtin import ALIASES, BUILTIN
from headway.core.contract.text_plugins import ChatContext, ChatPiece

PARSERS = {(info.reads, info.name): info for info in BUILTIN}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
CONTEXT = ChatContext(tools={"f": SCHEMA})
BEGIN, CALL, SEP, END, LAST = (f"<｜tool▁{word}｜>" for word in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
K = [f"<|tool_{word}|>" for word in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")]
DSML = "｜DSML｜"

Found = tuple[str, str, list[tuple[str, str]]]
"""Content, reasoning, and the name and arguments of each call."""
CASES: dict[str, tuple[str, str, str, Found]] = {
    "two calls behind a word": (
        "calls",
        "hermes",
        'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"y", "n": [1, {}]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"q": 1}, "name": "g"}</tool_call>',
        ("Well.", "", [("f", '{"a": "x}\\"y", "n": [1, {}]}'), ("g", '{"q": 1}')]),
    ),
    "a list, and words behind": (
        "calls",
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call> bye',
        (" bye", "", [("f", "{}"), ("g", "{}")]),
    ),
    "arguments as a text": (
        "calls",
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("f", '{"a": 1}')]),
    ),
    "a mark alone": ("calls", "hermes", "a <tool_call>b</tool_call> c", ("a <tool_call>b</tool_call> c", "", [])),
    "an object of another kind": ("calls", "hermes", 'a <tool_call>{"b": 1} c', ('a <tool_call>{"b": 1} c', "", [])),
    "broken off": ("calls", "hermes", 'a <tool_call>{"name": "f", "arguments": {"a', ("a", "", [("f", '{"a')])),
    "a call and junk in a list": (
        "calls",
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"b": 1}]</tool_call>',
        (', {"b": 1}]', "", [("f", "{}")]),
    ),
    "llama": (
        "calls",
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "llama's tag": ("calls", "llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', ("", "", [("f", "{}")])),
    "llama's answer in JSON": ("calls", "llama3_json", ' {"answer": 3} yes', (' {"answer": 3} yes', "", [])),
    "mistral's list": (
        "calls",
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "mistral's heads": (
        "calls",
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123xyz[ARGS]{}',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "mistral's mark alone": ("calls", "mistral", "x [TOOL_CALLS] oh", ("x [TOOL_CALLS] oh", "", [])),
    "deepseek": (
        "calls",
        "deepseek_v3",
        f'ok{BEGIN}{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{END}\n{CALL}function{SEP}g\n```json\n{{}}\n```{END}{LAST}',
        ("ok", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "deepseek v3.1": ("calls", "deepseek_v31", f'{BEGIN}{CALL}f{SEP}{{"a": 1}}{END}{LAST}', ("", "", [("f", '{"a": 1}')])),
    "deepseek v3.2": (
        "calls",
        "deepseek_v32",
        f'<{DSML}function_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="a" string="true">x y</{DSML}parameter>\n'
        f'<{DSML}parameter name="z" string="false">[1]</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
        ("", "", [("f", '{"a": "x y", "z": [1]}')]),
    ),
    "kimi": (
        "calls",
        "kimi_k2",
        f'hi{K[0]}{K[1]}functions.f:0{K[2]}{{"a": 1}}{K[3]}{K[1]}functions.g:1{K[2]}{{}}{K[3]}{K[4]}',
        ("hi", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "glm": (
        "calls",
        "glm45",
        '<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>5 "q"</arg_value>\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n'
        "</tool_call>\n<tool_call>g</tool_call>",
        ("", "", [("f", '{"a": "5 \\"q\\"", "n": 7}'), ("g", "{}")]),
    ),
    "qwen3-coder": (
        "calls",
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\none\ntwo\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>",
        ("", "", [("f", '{"a": "one\\ntwo", "n": 7}')]),
    ),
    "qwen3-coder, broken off": (
        "calls",
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\none\ntw",
        ("", "", [("f", '{"a": "one\\ntw')]),
    ),
    "minimax": (
        "calls",
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">7</parameter>\n</invoke>\n</minimax:tool_call>',
        ("", "", [("f", '{"n": 7}')]),
    ),
    "granite": ("calls", "granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', ("", "", [("f", '{"a": 1}')])),
    "jamba": ("calls", "jamba", '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>', ("", "", [("f", "{}")])),
    "phi": ("calls", "phi4_mini_json", 'functools[{"name": "f", "arguments": {}}]', ("", "", [("f", "{}")])),
    "python": ("calls", "pythonic", '[f(a=1, b="x"), g()]', ("", "", [("f", '{"a": 1, "b": "x"}'), ("g", "{}")])),
    "no python": ("calls", "llama4_pythonic", "[no call", ("[no call", "", [])),
    "harmony's call": (
        "calls",
        "openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        '<|message|>{"a":1}<|call|>',
        ("", "hm", [("f", '{"a":1}')]),
    ),
    "harmony's answer": (
        "calls",
        "openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi there",
        ("Hi there", "hm", []),
    ),
    "reasoning": ("reasoning", "qwen3", "<think>\nhm hm\n</think>\n\nYes", ("Yes", "hm hm", [])),
    "no reasoning": ("reasoning", "qwen3", "Yes </think>", ("Yes </think>", "", [])),
    "reasoning without its first mark": ("reasoning", "deepseek_r1", "hm</think>Yes", ("Yes", "hm", [])),
    "reasoning without an end": ("reasoning", "deepseek_r1", "hm\nhm", ("", "hm\nhm", [])),
    "reasoning that a call ends": ("reasoning", "kimi_k2", f"<think>hm{K[0]}a", (f"{K[0]}a", "hm", [])),
    "magistral": ("reasoning", "mistral", "[THINK]hm[/THINK]Yes", ("Yes", "hm", [])),
}


def joined(pieces: Iterable[ChatPiece]) -> Found:
    """The answer, whose calls begin one after the other."""
    text = {"content": "", "reasoning": ""}
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind == "call":
            assert piece.call == len(calls)
            assert piece.id
            calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            name, arguments = calls[piece.call]
            calls[piece.call] = (name, arguments + piece.text)
        else:
            text[piece.kind] += piece.text
    return text["content"], text["reasoning"], calls


def read(reads: str, name: str, parts: Iterable[str], prompt: str = "") -> Found:
    parser = PARSERS[reads, name].make(ChatContext(prompt, CONTEXT.tools))
    found = [piece for part in parts for piece in parser.feed(part)]
    return joined([*found, *parser.end()])


@pytest.mark.parametrize(("reads", "name", "text", "expected"), CASES.values(), ids=CASES)
def test_a_text_is_read_whole_and_by_the_character(reads: str, name: str, text: str, expected: Found) -> None:
    assert read(reads, name, [text]) == expected
    assert read(reads, name, text) == expected


def test_every_parser_has_an_example() -> None:
    same = {("calls", "pythonic"), ("reasoning", "openai_gptoss"), ("reasoning", "glm45"), ("reasoning", "deepseek_v3")}
    examples = {(reads, name) for reads, name, _, _ in CASES.values()}
    assert set(PARSERS) - examples <= same | {("reasoning", "minimax_m2")}
    assert set(ALIASES.values()) <= {name for _, name in PARSERS}


@seed(1)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), case=st.sampled_from(sorted(CASES)))
def test_where_a_text_is_split_changes_nothing(data: Any, case: str) -> None:
    """Also for a text with a part taken out, which is most often malformed."""
    reads, name, text, _ = CASES[case]
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    text = text[:first] + text[last:] if data.draw(st.booleans()) else text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(reads, name, parts) == read(reads, name, [text])


@seed(1)
@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.sampled_from(["<tool_call>", "{", '{"name"', ":", '"f"', "}", "[", "]", "x ", "\n", "; "]), max_size=12).map(
        "".join
    ),
    name=st.sampled_from(["hermes", "llama3_json", "mistral", "granite"]),
)
def test_nothing_is_lost_of_a_text_without_a_call(text: str, name: str) -> None:
    content, _, calls = read("calls", name, [text])
    assert calls or content == text


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("assistant:<think>\n", "hm</think>Yes", ("Yes", "hm", [])),
        ("assistant:<think>\n\n</think>\n\n", "Yes", ("Yes", "", [])),
        ("assistant:", "Yes", ("Yes", "", [])),
    ],
)
def test_the_prompt_says_whether_the_reasoning_has_begun(prompt: str, text: str, expected: Found) -> None:
    assert read("reasoning", "qwen3", [text], prompt) == expected


def test_ids_have_the_family_s_form() -> None:
    def one(name: str, text: str) -> str:
        parser = PARSERS["calls", name].make(CONTEXT)
        return next(piece.id for piece in [*parser.feed(text), *parser.end()] if piece.kind == "call")

    assert one("hermes", CASES["two calls behind a word"][2]).startswith("call_")
    made = one("mistral", CASES["mistral's list"][2])
    assert (len(made), made.isalnum()) == (9, True)
    assert one("kimi_k2", CASES["kimi"][2]) == "functions.f:0"
