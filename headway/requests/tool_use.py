"""Tools of a request, tool_choice, and grammars for answers with tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import NoneType
from typing import Any, Final, Literal

from headway.core.chat.builtin import BUILTIN, HERMES
from headway.core.contract.errors import ConfigError
from headway.core.contract.text_plugins import CallSyntax, ChatParserInfo
from headway.core.sampling.guidance_notation import format_of
from headway.core.sampling.structured import StructuredOutputsParams, may_be_closed
from headway.core.system.text import shown

Choice = Literal["none", "auto", "required"]
NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameter schema for a tool that declares no parameters. Calls of such a tool have the arguments {}."""
_CHOICES = 'none, auto, required or {"type": "function", "function": {"name": NAME}}'


@dataclass(frozen=True)
class ToolUse:
    """Checked tools and tool choice of a request."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that may be called: {"type": "function", "function": {"name", "description", "parameters", "strict"}}.

    Each tool's parameters are the JSON schema of an object.
    """
    choice: Choice = "none"
    parallel: bool = True
    """True if an answer may have several calls. A tool_choice that names a tool allows only one."""

    @classmethod
    def of(cls, tools: Sequence[Any] | None, tool_choice: Any = None, parallel_tool_calls: bool | None = None) -> ToolUse:
        """Return a request's tools, checked. :raises ConfigError: if a name, schema or choice is invalid."""
        listed = [_tool(tool, f"tools.{number}") for number, tool in enumerate(tools or ())]
        names = [tool["function"]["name"] for tool in listed]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("tools", "names that differ", f"two tools called {shown(name)}")
        choice, chosen = _choice(tool_choice, bool(listed))
        for name in chosen or ():
            if name not in names:
                raise ConfigError("tool_choice", f"one of the tools ({', '.join(names) or 'there are none'})", shown(name))
        if choice == "required" and not listed:
            raise ConfigError("tool_choice", "tools beside it", "none")
        kept = [tool for tool in listed if chosen is None or tool["function"]["name"] in chosen]
        one = parallel_tool_calls is False or (isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function")
        return cls(tuple(kept) if choice != "none" else (), choice if kept else "none", not one)

    @cached_property
    def schemas(self) -> dict[str, Any]:
        """Tool name -> JSON schema of its parameters."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    @cached_property
    def strict(self) -> frozenset[str]:
        """Names of the tools whose calls must match their schema."""
        return frozenset(tool["function"]["name"] for tool in self.tools if tool["function"].get("strict"))


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        got = tool.get("type") if isinstance(tool, Mapping) else tool
        place = f"{where}.type" if isinstance(tool, Mapping) else where
        raise ConfigError(place, "function, the one type of tools that models call here", shown(got, 80))
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ConfigError(f"{where}.function", 'an object such as {"name": "f", "parameters": {...}}', shown(function, 80))
    check_function(function, f"{where}.function")
    checked: Mapping[str, Any] = with_parameters({"type": "function", **tool})
    return checked


def check_function(function: Mapping[str, Any], place: str, parameters: str = "parameters") -> None:
    """Check a function's fields. place: path of the function. parameters: name of the field for parameters. :raises ConfigError:
    if a field is invalid."""
    name, description, strict = (function.get(field) for field in ("name", "description", "strict"))
    if not isinstance(name, str) or not 0 < len(name) <= 256 or any(sign.isspace() or sign in "\"'<>{}" for sign in name):
        raise ConfigError(f"{place}.name", "a name without blanks, quotes and brackets", shown(name, 80))
    if not isinstance(description, (str, NoneType)):
        raise ConfigError(f"{place}.description", "a text", shown(description, 80))
    if not isinstance(strict, (bool, NoneType)):
        raise ConfigError(f"{place}.strict", "true or false", shown(strict, 80))
    schema = function.get(parameters)
    if schema is not None and not (isinstance(schema, Mapping) and schema.get("type", "object") == "object"):
        raise ConfigError(f"{place}.{parameters}", "a JSON schema of an object", shown(schema, 80))
    properties = (schema or {}).get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(each, (Mapping, bool)) for each in properties.values()):
        raise ConfigError(f"{place}.{parameters}.properties", "an object of JSON schemas", shown(properties, 80))


def with_parameters(tool: Any) -> Any:
    """Return a tool whose parameters are an object schema; {} and null become a schema without properties. Invalid tools are
    returned unchanged."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(schema or {}, Mapping):
        return tool
    return {**tool, "function": {**function, "parameters": {"type": "object", **schema} if schema else NO_PARAMETERS}}


def _choice(given: Any, any_tools: bool) -> tuple[Choice, list[str] | None]:
    """Return the choice (none, auto or required) and the names of the allowed tools; None means all tools."""
    if given is None:
        return ("auto" if any_tools else "none"), None
    if given in ("none", "auto", "required"):
        return given, None
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise ConfigError("tool_choice.type" if isinstance(given, Mapping) else "tool_choice", _CHOICES, shown(given, 80))
    if given["type"] == "function":
        return "required", [_name_in(given, "tool_choice")]
    if given["type"] != "allowed_tools":
        raise ConfigError("tool_choice", _CHOICES, shown(given, 80))
    allowed, place = given.get("allowed_tools"), "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise ConfigError(place, 'an object such as {"mode": "auto", "tools": [...]}', shown(allowed, 80))
    if allowed.get("mode") not in ("auto", "required"):
        raise ConfigError(f"{place}.mode", "auto or required", shown(allowed.get("mode"), 80))
    tools = allowed.get("tools")
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ConfigError(f"{place}.tools", "a list of tools", shown(tools, 80))
    return allowed["mode"], [_name_in(tool, f"{place}.tools.{number}") for number, tool in enumerate(tools)]


def _name_in(choice: Any, place: str) -> str:
    """Return the name of the function that a tool choice names. place: path of the choice in the request."""
    if isinstance(choice, Mapping) and choice.get("type", "function") != "function":
        raise ConfigError(f"{place}.type", "function", shown(choice["type"], 80))
    for name in ("function", "name"):
        if not isinstance(choice, Mapping):
            raise ConfigError(place, _CHOICES, shown(choice, 80))
        choice, place = choice.get(name), f"{place}.{name}"
    if not isinstance(choice, str):
        raise ConfigError(place, "the name of a tool", shown(choice, 80))
    return choice


Part = dict[str, Any]
_SPACE = r"\s{0,4}"  # White space between reasoning and answer; bounded, since a small model may write spaces without end
_MORE: Final = ("additionalProperties", "required")
_OF_NOTHING: Final = frozenset(("type", "properties", "title", "description", "$schema", *_MORE))
"""Keywords that a schema without properties may have; any other keyword might allow properties."""


class ToolForms:
    """Factory for the structured outputs of one model's answers."""

    def __init__(self, calls: ChatParserInfo, reasoning: ChatParserInfo | None, tokens: Mapping[str, int]) -> None:
        """tokens: added tokens of the tokenizer; a grammar must refer to them as tokens."""
        self._calls = calls
        self._tokens = tokens
        self._reasoning = None if reasoning is None else reasoning.reasoning
        names = sorted(tokens, key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    @staticmethod
    def writer_of(calls: ChatParserInfo) -> ChatParserInfo:
        """Return a parser whose syntax a grammar can write: the given one if possible, else the built-in Hermes parser."""
        if calls.syntaxes:
            return calls
        return next(info for info in BUILTIN if info.reads == "calls" and HERMES in info.syntaxes)

    def form(self, given: StructuredOutputsParams | None, use: ToolUse, prompt: str) -> StructuredOutputsParams | None:
        """Return the structured output of an answer. given: structured output that the request asks for, which applies to answers
        that are not calls. prompt: rendered prompt.

        :raises ConfigError: if a structured output is combined with a required tool call.
        """
        if use.choice == "required":
            if given is not None:
                raise ConfigError("tool_choice", "auto or none beside response_format and structured_outputs", "required")
            form = self._after_reasoning(self._must_call(use, use.schemas), prompt, answer=False)
            return StructuredOutputsParams(structural_tag={"format": form})
        if use.choice == "auto" and use.strict and given is None:
            return StructuredOutputsParams(structural_tag={"format": self._may_call(use, prompt)})
        if given is None or (self._reasoning is None and use.choice == "none" and given.structural_tag is None):
            return given
        form = self._part_of(given)
        if use.choice == "auto" and self._calls.syntaxes:
            form = {"type": "or", "elements": [self._must_call(use, use.schemas), form]}
        tag = {"format": self._after_reasoning(form, prompt, answer=True)}
        return replace(given, json=None, regex=None, choice=None, grammar=None, json_object=None, structural_tag=tag)

    def _part_of(self, given: StructuredOutputsParams) -> Any:
        if given.structural_tag is not None:
            try:
                return self._resolved(format_of(given.structural_tag))  # type: ignore[arg-type]
            except ValueError as error:
                raise ConfigError("structured_outputs.structural_tag", "a structural tag", str(error)) from None
        if given.regex is not None:
            return {"type": "regex", "pattern": given.regex}
        if given.choice is not None:
            return {"type": "or", "elements": [_text(each) for each in given.choice]}
        if given.grammar is not None:
            return {"type": "grammar", "grammar": given.grammar}
        schema = {"type": "object"} if given.json is None else given.json
        return {"type": "json_schema", "json_schema": schema, "closed": given.disable_additional_properties}

    def _resolved(self, form: Any) -> Any:
        """Return a request's structural tag with token names in its texts replaced by tokens."""
        if isinstance(form, list):
            return [self._resolved(each) for each in form]
        if not isinstance(form, Mapping):
            return form
        resolved = {key: value if key == "json_schema" else self._resolved(value) for key, value in form.items()}
        for key in ("begin", "end"):
            if isinstance(resolved.get(key), str) and self._names is not None and self._names.search(resolved[key]):
                resolved[key] = self._text(resolved[key])
        if isinstance(resolved.get("triggers"), list):
            resolved["triggers"] = [self._trigger(each) if isinstance(each, str) else each for each in resolved["triggers"]]
        return resolved

    def _after_reasoning(self, form: Any, prompt: str, answer: bool) -> Any:
        """Return a grammar that begins after the reasoning, if the model may reason. answer: True unless the grammar is for a
        call."""
        marks = self._reasoning
        if marks is None:
            return form
        if answer and marks.answer:
            form = {"type": "sequence", "elements": [self._text(marks.answer), form]}
        begun = marks.begun(prompt)
        if begun is False:
            return form
        rest = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": self._text(marks.closes)}
        opened: Part = {"type": "sequence", "elements": [self._text(marks.opens), rest]}
        if begun or marks.assumed:
            opened = {"type": "sequence", "elements": [{"type": "optional", "element": self._text(marks.opens)}, rest]}
            return {"type": "sequence", "elements": [opened, _white_space(), form]}
        reasoned = {"type": "sequence", "elements": [opened, _white_space()]}
        return {"type": "sequence", "elements": [{"type": "optional", "element": reasoned}, form]}

    @property
    def _syntax(self) -> CallSyntax:
        syntaxes = self.writer_of(self._calls).syntaxes
        return next((each for each in syntaxes if not each.needs or each.needs in self._tokens), syntaxes[-1])

    def _must_call(self, use: ToolUse, schemas: Mapping[str, Any]) -> Part:
        syntax = self._syntax
        calls = {
            "type": "tags_with_separator",
            "tags": [self._tag(syntax, name, schema) for name, schema in schemas.items()],
            "separator": self._text(syntax.between or ""),
            "at_least_one": True,
            "stop_after_first": not use.parallel or syntax.between is None,
        }
        return {"type": "sequence", "elements": [self._text(syntax.before), calls, self._text(syntax.after)]}

    def _may_call(self, use: ToolUse, prompt: str) -> Part:
        """Return a grammar of free text in which each call of a strict tool matches its schema."""
        syntax, marks = self._syntax, self._reasoning
        free: dict[str, Any] = {"type": "object"}
        kept = {name for name, schema in use.schemas.items() if name in use.strict or _takes_nothing(schema)}
        schemas = {name: schema if name in kept else free for name, schema in use.schemas.items()}
        if marks is not None and marks.answer:  # answers have their own mark, which begins like the mark of calls
            answer = {"type": "sequence", "elements": [self._text(marks.answer), {"type": "any_text"}]}
            either = {"type": "or", "elements": [self._must_call(use, schemas), answer]}
            constrained: Part = self._after_reasoning(either, prompt, answer=False)
            return constrained
        tags = [self._tag(syntax, name, schema) for name, schema in schemas.items()]
        if syntax.before.startswith(syntax.trigger):  # the mark occurs once, before the first call
            elements = [*self._must_call(use, schemas)["elements"][1:]]
            tags = [{"begin": self._begin(syntax.before), "content": {"type": "sequence", "elements": elements}, "end": ""}]
        triggers = [self._trigger(syntax.trigger)]
        return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": not use.parallel}

    def _tag(self, syntax: CallSyntax, name: str, schema: Any) -> Part:
        json_schema = {"type": "json_schema", "json_schema": schema, "closed": may_be_closed(schema)}
        return {
            "type": "tag",
            "begin": self._begin(syntax.head.replace("NAME", name)),
            "content": _text("{}") if _takes_nothing(schema) else json_schema,
            "end": self._text(syntax.tail),
        }

    def _begin(self, text: str) -> str | Part:
        """Return the beginning of a tag as a text, or as a sequence of texts, tokens and digits."""
        before, number, after_number = text.partition("NUMBER")
        parts = [self._text(before), *([{"type": "regex", "pattern": "[0-9]{1,3}"}, self._text(after_number)] if number else [])]
        flat = [part for each in parts for part in (each["elements"] if each["type"] == "sequence" else [each])]
        alone = len(flat) == 1 and flat[0]["type"] == "const_string"
        return str(flat[0]["value"]) if alone else {"type": "sequence", "elements": flat}

    def _trigger(self, text: str) -> str | Part:
        """Return a tag's trigger: the token with which it begins, or a text."""
        whole = self._text(text)
        first: Part = next(iter(whole.get("elements", ())), whole)
        return first if first["type"] == "token" else text

    def _text(self, text: str) -> Part:
        pieces = [piece for piece in self._names.split(text) if piece] if self._names is not None else [text]
        parts = [{"type": "token", "token": self._tokens[each]} if each in self._tokens else _text(each) for each in pieces]
        return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _takes_nothing(schema: Mapping[str, Any]) -> bool:
    """Return whether a tool's calls can only have the arguments {}: its schema has no properties and allows no others."""
    return schema.keys() <= _OF_NOTHING and schema.get("properties") == {} and not any(map(schema.get, _MORE))


def _text(text: str) -> Part:
    return {"type": "const_string", "value": text}


def _white_space() -> Part:
    return {"type": "regex", "pattern": _SPACE}
