"""Forms in llguidance's notation, and llguidance's reasons in one line. The engine and the process that tries forms share it."""

from __future__ import annotations

import json
from typing import Any, Final

from headway.core.contract.errors import HeadwayError
from headway.core.sampling.ecma_regex import rust_regex
from headway.core.sampling.guidance_notation import guidance_json, guidance_lark
from headway.core.sampling.structural_tag import structural_tag_text
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.text import harmless

_LONGEST_REASON: Final = 240
"""Characters of a reason; llguidance's quotes the whole of a regular expression that it refuses."""
_SPACE: Final = r"[ \t\n\r]?"
"""Space between the parts of JSON, unless a form says otherwise: a small model may write spaces without end."""


class GrammarError(HeadwayError):
    """A form that cannot be compiled, or a grammar that cannot go on; it ends the request alone."""


def grammar_text(form: StructuredOutputsParams) -> str:
    """The form in llguidance's own notation.

    :raises ValueError: a grammar in llama.cpp's notation that is not one, a schema that is not JSON, or a regular expression that
        is not one of ECMA's.
    """
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(rust_regex(form.regex))
    if form.choice is not None:  # one terminal: as alternatives of a rule, 2,000 are llguidance's limit for the first token
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, form.choice))}")
    spaces: dict[str, Any] = {"whitespace_flexible": False}
    if not form.disable_any_whitespace:
        spaces = {"whitespace_pattern": rust_regex(_SPACE if form.whitespace_pattern is None else form.whitespace_pattern)}
    if form.grammar is not None:
        return guidance_lark(grammar_from("grammar", form.grammar), spaces)
    closed = form.disable_additional_properties
    if form.structural_tag is not None:
        return structural_tag_text(form.structural_tag, spaces, closed)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_json_schema(
        guidance_json({"type": "object"} if form.json is None else form.json, spaces, closed)
    )


def brief_reason(text: str) -> str:
    """llguidance's reason in one line: its first, and where that only announces it the one that begins with "error:".

    A long one is cut in the middle, because the reason stands at the end.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["llguidance gives no reason"]
    reason = next((line for line in lines if line.startswith("error:")), "") if lines[0].endswith(":") else ""
    line = harmless(f"{lines[0]} {reason}".strip())
    half = _LONGEST_REASON // 2
    return line if len(line) <= _LONGEST_REASON else f"{line[:half]}...{line[-half:]}"
