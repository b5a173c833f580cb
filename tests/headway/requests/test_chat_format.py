"""A request's tools and messages in the format of a model, and its forms as a grammar sees them; no engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

pytest.importorskip("llguidance", reason="needs llguidance: pip install 'headway[structured]'")

from llguidance import LLMatcher, LLTokenizer

from headway import SamplingParams, StructuredOutputsParams, create_registry, hookimpl
from headway.contract import CallSyntax, ChatContext, ChatParser, ChatParserInfo, ChatPiece, ConfigError, PluginError
from headway.core.sampling.grammar import grammar_text
from headway.requests.chats import ChatFormat, ChatText
from headway.requests.tool_use import ToolUse

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
FREE = {"type": "function", "function": {"name": "h", "parameters": {"type": "object"}}}
STRICT = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}, TOOLS[1], FREE]
MUST, MAY, NONE = ToolUse.of(TOOLS, "required"), ToolUse.of(STRICT), ToolUse()
ONE = ToolUse.of(TOOLS, {"type": "function", "function": {"name": "f"}})
DEEPSEEK = [f"<｜tool▁{word}｜>" for word in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
KIMI = [
    f"<|tool_{word}|>" for word in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
]
HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>"]
QWEN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


def tokenizer_with(template: str, special: Sequence[str] = (), added: Sequence[str] = ()) -> Any:
    """A tokenizer of bytes, and of these tokens."""
    made = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<eos>", *special)])
    made.add_tokens([AddedToken(name, special=False) for name in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {
    "hermes": tokenizer_with("tools <tool_call> <think>", (), QWEN),
    "llama3_json": tokenizer_with("tools <|start_header_id|> parameters", ("<|python_tag|>",)),
    "mistral": tokenizer_with("tools [TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]")),
    "mistral, old": tokenizer_with("tools [TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "deepseek_v3": tokenizer_with(f"tools {DEEPSEEK[0]} ```json </think>", DEEPSEEK, QWEN[2:]),
    "kimi_k2": tokenizer_with(f"tools {KIMI[0]}", KIMI),
    "openai": tokenizer_with("tools " + " ".join(HARMONY), HARMONY),
    "glm45": tokenizer_with("tools <arg_key> <think>", (), QWEN),
    "plain": tokenizer_with("{{ messages }}"),
}


def accepts(name: str, use: ToolUse, text: str, prompt: str = "", given: StructuredOutputsParams | None = None) -> bool:
    """Whether the form of an answer lets a model write a text, and end with it."""
    tokenizer = TOKENIZERS[name]
    params = ChatFormat.of(tokenizer).params(SamplingParams(structured_outputs=given), use, {"prompt": prompt})
    known = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=[tokenizer.eos_token_id])
    matcher = LLMatcher(known, grammar_text(params.structured_outputs), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


def deepseek(*calls: str) -> str:
    inside = "\n".join(f"{DEEPSEEK[1]}function{DEEPSEEK[2]}f\n```json\n{call}\n```{DEEPSEEK[3]}" for call in calls)
    return f"{DEEPSEEK[0]}{inside}{DEEPSEEK[4]}"


def kimi(*calls: str) -> str:
    inside = "".join(f"{KIMI[1]}functions.f:{number}{KIMI[2]}{call}{KIMI[3]}" for number, call in enumerate(calls))
    return f"{KIMI[0]}{inside}{KIMI[4]}"


HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
MISTRAL = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
OLDER = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("name", "text", "num_calls"),
    [
        ("hermes", CALL, 1),
        ("hermes", f"{CALL}\n{CALL}", 2),
        ("hermes", f"<think>\nhm\n</think>\n\n{CALL}", 1),
        ("llama3_json", f"{LLAMA}; {LLAMA}", 2),
        ("mistral", MISTRAL, 2),
        ("mistral, old", OLDER, 2),
        ("deepseek_v3", "hm</think>\n" + deepseek('{"a": 1}', '{"a": 2}'), 2),
        ("kimi_k2", kimi('{"a": 1}', '{"a": 2}'), 2),
        ("openai", HARMONY_CALL, 1),
        ("openai", ANALYSIS + HARMONY_CALL, 1),
        ("glm45", CALL, 1),
        ("plain", CALL, 1),
    ],
)
def test_a_call_that_must_come_has_the_family_s_form(name: str, text: str, num_calls: int) -> None:
    assert accepts(name, MUST, text)
    found = reading(name, MUST, text)
    assert (found.content, len(found.calls)) == ("", num_calls)
    assert json.loads(found.calls[0].arguments) == {"a": 1}
    assert not accepts(name, MUST, text.replace('{"a": 1}', '{"a": "x"}'))
    assert not accepts(name, MUST, "Hello")


WRITERS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": ARGUMENTS}',
    "mistral": "[TOOL_CALLS]f[ARGS]ARGUMENTS",
    "mistral, old": '[TOOL_CALLS][{"name": "f", "arguments": ARGUMENTS}]',
    "deepseek_v3": "hm</think>" + deepseek("ARGUMENTS"),
    "kimi_k2": kimi("ARGUMENTS"),
    "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>ARGUMENTS",
    "glm45": '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>',
}
OTHER: dict[str, Any] = {"name": "other", "parameters": {"allOf": [{"properties": {"b": {}}}]}}
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "f"}}]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_tool_without_parameters_takes_none(name: str, choice: Any) -> None:
    for given in ({}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}):
        tools = [{"type": "function", "function": {"name": "f", **given}}, {"type": "function", "function": OTHER}]
        use, text = ToolUse.of(tools, choice), WRITERS[name]
        assert accepts(name, use, text.replace("ARGUMENTS", "{}")), given
        assert [call.arguments for call in reading(name, use, text.replace("ARGUMENTS", "{}")).calls] == ["{}"]
        for arguments in ('{"a": 1}', "{ }", "{\n}", "[]", "null", '{"": {}}'):
            assert not accepts(name, use, text.replace("ARGUMENTS", arguments)), (given, arguments)
    for given in ({"type": "object"}, {"additionalProperties": True}, {"additionalProperties": True, "properties": {}}):
        use = ToolUse.of([{"type": "function", "function": {"name": "f", "parameters": given}}], choice)
        assert accepts(name, use, text.replace("ARGUMENTS", '{"a": 1}')), given
        assert not accepts(name, use, text.replace("ARGUMENTS", "1")), given


def reading(name: str, use: ToolUse, text: str, prompt: str = "") -> ChatText:
    reader = ChatFormat.of(TOKENIZERS[name]).reader(use, prompt)
    assert reader is not None
    return ChatText.of([*reader.feed(text), *reader.end()])


def test_one_call_alone_may_come_where_no_others_are_wanted() -> None:
    assert accepts("hermes", ONE, CALL)
    assert not accepts("hermes", ONE, f"{CALL}\n{CALL}")
    assert accepts("hermes", MUST, f"{CALL}\n{CALL}")
    assert not accepts("plain", MUST, f"{CALL}\n{CALL}")  # a model that was never taught when to end
    assert [call.name for call in reading("hermes", ToolUse.of(TOOLS, "auto", False), f"{CALL}\n{CALL}").calls] == ["f"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<think>x</think>Hi {CALL} and {CALL}"),
        ("hermes", CALL.replace('"f"', '"h"').replace("1", '"x"')),
        ("hermes", CALL.replace('"f"', '"g"').replace('{"a": 1}', "{}")),
        ("llama3_json", LLAMA),
        ("mistral", f"Hi{MISTRAL}"),
        ("mistral, old", f"Hi{OLDER}"),
        ("deepseek_v3", "hm</think>Hi" + deepseek('{"a": 1}')),
        ("kimi_k2", "Hi" + kimi('{"a": 1}')),
        ("openai", ANALYSIS + HARMONY_CALL),
        ("openai", ANALYSIS + "<|channel|>final<|message|>Hi"),
        ("plain", f"Hi {CALL}"),
        ("plain", "Hi"),
    ],
)
def test_text_is_free_up_to_the_call_of_a_strict_tool(name: str, text: str) -> None:
    assert accepts(name, MAY, text)
    if '{"a": 1}' in text:
        assert not accepts(name, MAY, text.replace('{"a": 1}', '{"a": "x"}', 1))


def test_a_form_begins_behind_the_reasoning() -> None:
    form = StructuredOutputsParams(json={"type": "integer"})
    for text, prompt in (("<think>x</think>\n12", ""), ("12", ""), ("x</think>12", "<think>\n"), ("12", "<think></think>")):
        assert accepts("hermes", NONE, text, prompt, form)
        assert reading("hermes", NONE, text, prompt).content == "12"
    assert not accepts("hermes", NONE, "<think>x</think>a", "", form)
    assert accepts("hermes", ToolUse.of(TOOLS), CALL, "", form)  # the answer has the form, or is a call
    assert accepts("openai", NONE, ANALYSIS + "<|channel|>final<|message|>12", "", form)
    for other in (StructuredOutputsParams(regex="[a-c/]+"), StructuredOutputsParams(choice=["a/b", "c"])):
        assert accepts("hermes", NONE, "<think>x</think>\na/b", "", other)


def test_structural_tags_in_both_notations() -> None:
    older = {"structures": [{"begin": "<f=", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f="]}
    assert accepts("plain", NONE, "so <f=5</f> it is", given=StructuredOutputsParams(structural_tag=json.dumps(older)))
    tag = {"begin": "<tool_call>x", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</tool_call>"}
    newer = {"format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}}
    for name in ("hermes", "plain"):  # with a token of that name, and without
        assert accepts(name, NONE, 'a<tool_call>x{"a":5}</tool_call>b', given=StructuredOutputsParams(structural_tag=newer))
    with pytest.raises(ConfigError, match=r"structural_tag: needs a structural tag, got .*format, or structures"):
        accepts("plain", NONE, "", given=StructuredOutputsParams(structural_tag={"triggers": []}))


def test_special_tokens_stay_where_the_format_consists_of_them() -> None:
    for name, stay in (("kimi_k2", True), ("hermes", False)):
        assert ChatFormat.of(TOKENIZERS[name]).params(SamplingParams(), MUST, {}).skip_special_tokens is not stay
    assert reading("kimi_k2", ToolUse.of(TOOLS), "a<eos>b" + kimi("{}")).content == "ab"


def test_a_template_without_tools_gets_a_description() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    messages, tools = ChatFormat.of(TOKENIZERS["plain"]).conversation(asked, ToolUse.of(TOOLS))
    assert tools is None
    assert messages[0]["role"] == "system"
    assert '{"name": "g", "parameters": {"type": "object", "properties": {}, ' in messages[0]["content"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == CALL
    assert "42" in messages[3]["content"]
    messages, tools = ChatFormat.of(TOKENIZERS["hermes"]).conversation(asked, ToolUse.of(TOOLS))
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (messages[1]["content"], tools) == ("", list(MUST.tools))


def test_a_template_that_joins_arguments_to_texts_gets_texts() -> None:
    template = "tools {{ '<x>' + tool['function']['arguments'] + '</x>' }}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages, _ = ChatFormat.of(tokenizer_with(template)).conversation([{"role": "assistant", "tool_calls": [call]}], NONE)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


class Shouting:
    """A family that calls the function f by "!" and argues no further."""

    def feed(self, text: str) -> list[ChatPiece]:
        return [ChatPiece("call", "f", 0, "1"), ChatPiece("arguments", "{}", 0)] if "!" in text else [ChatPiece("content", text)]

    def end(self) -> list[ChatPiece]:
        return []


def shouting(context: ChatContext) -> ChatParser:
    return Shouting()


def test_a_plugin_brings_a_parser() -> None:
    info = ChatParserInfo(
        "shouting", "calls by a sign", "calls", shouting, lambda template: "!" in template, (CallSyntax("!", "", trigger="!"),)
    )

    class Plugin:
        @hookimpl
        def headway_register_chat_parsers(self) -> list[ChatParserInfo]:
            return [info]

    registry = create_registry({"shouts": Plugin()}, load_entry_points=False)
    brought = registry.chat_parsers["calls", "shouting"]
    assert registry.brought["shouts"].chat_parsers == ("shouting",)
    for chats in (
        ChatFormat.of(tokenizer_with("tools !"), parsers=[brought]),
        ChatFormat.of(TOKENIZERS["hermes"], tool_parser="shouting", parsers=[brought]),
    ):
        reader = chats.reader(ToolUse.of(TOOLS), "")
        assert reader is not None
        assert [call.name for call in ChatText.of([*reader.feed("do!"), *reader.end()]).calls] == ["f"]
    with pytest.raises(PluginError, match="already registered"):
        create_registry([Plugin(), Plugin()], load_entry_points=False)
    with pytest.raises(ConfigError, match=r"--tool-call-parser: needs one of .*hermes"):
        ChatFormat.of(TOKENIZERS["hermes"], tool_parser="shouting")
