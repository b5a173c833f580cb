"""Forms of answers with calls of tools, as structural tags: a grammar begins behind the reasoning, or behind a family's mark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from headway.core.chat.builtin import BUILTIN, HERMES
from headway.core.contract.chat_parsers import CallSyntax, ChatParserInfo
from headway.core.contract.errors import ConfigError
from headway.core.sampling.guidance_notation import format_of
from headway.core.sampling.structured import StructuredOutputsParams, may_be_closed
from headway.requests.tool_use import ToolUse

Part = dict[str, Any]
_SPACE = r"\s{0,4}"
"""White space between the reasoning and the answer: a small model may write spaces without end."""
_MORE: Final = ("additionalProperties", "required")
_OF_NOTHING: Final = frozenset(("type", "properties", "title", "description", "$schema", *_MORE))
"""Keywords of a schema that names no property; with others it may allow some."""


class ToolForms:
    """Makes the forms of one model's answers."""

    def __init__(self, calls: ChatParserInfo, reasoning: ChatParserInfo | None, tokens: Mapping[str, int]) -> None:
        """tokens: added tokens of the tokenizer, which a grammar must name where a text holds one."""
        self._calls = calls
        self._tokens = tokens
        self._reasoning = None if reasoning is None else reasoning.reasoning
        names = sorted(tokens, key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    @staticmethod
    def writer_of(calls: ChatParserInfo) -> ChatParserInfo:
        """The parser of calls that a grammar has written: the family's own where its syntax can be written by one."""
        if calls.syntaxes:
            return calls
        return next(info for info in BUILTIN if info.reads == "calls" and HERMES in info.syntaxes)

    def form(self, given: StructuredOutputsParams | None, use: ToolUse, prompt: str) -> StructuredOutputsParams | None:
        """The form of an answer. given: what the request asks of an answer that is no call. prompt: in the chat template.

        :raises ConfigError: a form of the answer beside a tool that must be called.
        """
        if use.choice == "required":
            if given is not None:
                raise ConfigError("tool_choice", "auto or none beside response_format and structured_outputs", "required")
            form = self._behind_reasoning(self._must_call(use, use.schemas), prompt, answer=False)
            return StructuredOutputsParams(structural_tag={"format": form})
        if use.choice == "auto" and use.strict and given is None:
            return StructuredOutputsParams(structural_tag={"format": self._may_call(use, prompt)})
        if given is None or (self._reasoning is None and use.choice == "none" and given.structural_tag is None):
            return given
        form = self._part_of(given)
        if use.choice == "auto" and self._calls.syntaxes:
            form = {"type": "or", "elements": [self._must_call(use, use.schemas), form]}
        tag = {"format": self._behind_reasoning(form, prompt, answer=True)}
        return replace(given, json=None, regex=None, choice=None, grammar=None, json_object=None, structural_tag=tag)

    def _part_of(self, given: StructuredOutputsParams) -> Any:
        """A form as a part of a structural tag."""
        if given.structural_tag is not None:
            try:
                return self._told(format_of(given.structural_tag))  # type: ignore[arg-type]
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

    def _told(self, form: Any) -> Any:
        """A structural tag of a request's, whose texts name tokens."""
        if isinstance(form, list):
            return [self._told(each) for each in form]
        if not isinstance(form, Mapping):
            return form
        told = {key: value if key == "json_schema" else self._told(value) for key, value in form.items()}
        for key in ("begin", "end"):
            if isinstance(told.get(key), str) and self._has_token(told[key]):
                told[key] = self._text(told[key])
        if isinstance(told.get("triggers"), list):
            told["triggers"] = [self._trigger(each) if isinstance(each, str) else each for each in told["triggers"]]
        return told

    def _behind_reasoning(self, form: Any, prompt: str, answer: bool) -> Any:
        """A form that begins behind the reasoning, where the model may reason. answer: it is no call's."""
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
        """Free text in which each call of a strict tool keeps its schema."""
        syntax, marks = self._syntax, self._reasoning
        free: dict[str, Any] = {"type": "object"}
        kept = {name for name, schema in use.schemas.items() if name in use.strict or _takes_nothing(schema)}
        schemas = {name: schema if name in kept else free for name, schema in use.schemas.items()}
        if marks is not None and marks.answer:  # answers have a mark of their own, and it begins as that of calls does
            answer = {"type": "sequence", "elements": [self._text(marks.answer), {"type": "any_text"}]}
            either = {"type": "or", "elements": [self._must_call(use, schemas), answer]}
            behind: Part = self._behind_reasoning(either, prompt, answer=False)
            return behind
        tags = [self._tag(syntax, name, schema) for name, schema in schemas.items()]
        if syntax.before.startswith(syntax.trigger):  # the mark stands once, before the first call
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
        """The beginning of a tag: a text, or parts of which some are tokens or digits."""
        before, number, behind = text.partition("NUMBER")
        parts = [self._text(before), *([{"type": "regex", "pattern": "[0-9]{1,3}"}, self._text(behind)] if number else [])]
        flat = [part for each in parts for part in (each["elements"] if each["type"] == "sequence" else [each])]
        alone = len(flat) == 1 and flat[0]["type"] == "const_string"
        return str(flat[0]["value"]) if alone else {"type": "sequence", "elements": flat}

    def _has_token(self, text: str) -> bool:
        return self._names is not None and self._names.search(text) is not None

    def _trigger(self, text: str) -> str | Part:
        """A trigger: the token that it begins with, or a text."""
        whole = self._text(text)
        first: Part = next(iter(whole.get("elements", ())), whole)
        return first if first["type"] == "token" else text

    def _text(self, text: str) -> Part:
        """A text in which the names of tokens are tokens."""
        pieces = [piece for piece in self._names.split(text) if piece] if self._names is not None else [text]
        parts = [{"type": "token", "token": self._tokens[each]} if each in self._tokens else _text(each) for each in pieces]
        return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _takes_nothing(schema: Mapping[str, Any]) -> bool:
    """Return whether a tool's calls can only have the arguments {}: it names no property, and allows no other."""
    return schema.keys() <= _OF_NOTHING and schema.get("properties") == {} and not any(map(schema.get, _MORE))


def _text(text: str) -> Part:
    return {"type": "const_string", "value": text}


def _white_space() -> Part:
    return {"type": "regex", "pattern": _SPACE}
