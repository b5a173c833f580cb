"""Forms in llguidance's notation, and llguidance's reasons in one line. The engine and the process that tries forms share it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from headway.core.contract.errors import HeadwayError
from headway.core.sampling.structural_tag import structural_tag_text
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.text import harmless

_LONGEST_REASON: Final = 240
"""Characters of a reason; llguidance's quotes the whole of a regular expression that it refuses."""


class GrammarError(HeadwayError):
    """A form that cannot be compiled, or a grammar that cannot go on; it ends the request alone."""


def grammar_text(form: StructuredOutputsParams) -> str:
    """The form in llguidance's own notation.

    :raises ValueError: a grammar in llama.cpp's notation that is not one, or a schema that is not JSON.
    """
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:  # one terminal: as alternatives of a rule, 2,000 are llguidance's limit for the first token
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, form.choice))}")
    if form.grammar is not None:
        return grammar_from("grammar", form.grammar)
    spaces: Any = {"whitespace_flexible": not form.disable_any_whitespace}
    if form.whitespace_pattern is not None:
        spaces = {"whitespace_pattern": form.whitespace_pattern}
    if form.structural_tag is not None:
        tag: Any = _closed(form.structural_tag) if form.disable_additional_properties else form.structural_tag
        return structural_tag_text(tag, spaces)
    schema: Any = {"type": "object"} if form.json is None else form.json
    if form.disable_additional_properties:
        schema = _closed(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=spaces)


def _closed(schema: Any) -> Any:
    """Forbid additional properties wherever a schema names properties and says nothing of others."""
    if isinstance(schema, Mapping):
        closed = {key: _closed(value) for key, value in schema.items()}
        if "properties" in schema or "patternProperties" in schema:
            closed.setdefault("additionalProperties", False)
        return closed
    return [_closed(item) for item in schema] if isinstance(schema, list) else schema


def brief_reason(text: str) -> str:
    """llguidance's reason in one line: its first, and where that only announces it the one that begins with "error:".

    A long one is cut in the middle, because the reason stands at the end.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["llguidance gives no reason"]
    reason = next((line for line in lines if line.startswith("error:")), "") if lines[0].endswith(":") else ""
    line = harmless(f"{lines[0]} {reason}".strip())
    half = _LONGEST_REASON // 2
    return line if len(line) <= _LONGEST_REASON else f"{line[:half]}...{line[-half:]}"
