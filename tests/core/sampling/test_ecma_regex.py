"""Patterns in forms are ECMA's, wherever they stand; what grammars cannot follow is refused in words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install 'headway[structured]'")

from llguidance import LLMatcher, LLTokenizer

from headway.core.sampling.ecma_regex import rust_regex
from headway.core.sampling.grammar import grammar_text
from headway.core.sampling.structured import StructuredOutputsParams

BYTES = LLTokenizer("byte")
ARABIC_THREE, KELVIN, LONG_S = "\u0663", "\u212a", "\u017f"


def accepts(text: str, **form: Any) -> bool:
    """Return whether a text has a form."""
    matcher = LLMatcher(BYTES, grammar_text(StructuredOutputsParams(**form)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(token) for token in BYTES.tokenize_bytes(text.encode())) and matcher.is_accepting()


PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r"\d", ["3"], [ARABIC_THREE, "\uff13"]),
    (r"\D", [ARABIC_THREE, "\n"], ["3"]),
    (r"\w", ["a", "_", "0"], ["é", KELVIN]),
    (r"\W", ["é", KELVIN], ["a", "_"]),
    (r"\s", [" ", "\u00a0", "\ufeff", "\u2028"], ["\u0085", "\u180e", "a"]),
    (r"\S", ["\u0085", "a"], ["\ufeff"]),
    (r"[\d.]", ["3", "."], [ARABIC_THREE]),
    (r"[^\w]", ["é", "-"], ["a"]),
    (r"[\s\S]", ["a", "\n", "😀"], [""]),
    (r"[\w-.]+", ["a-."], ["é", "/"]),
    (r"[^]", ["\n", "a"], [""]),
    (r"[a&&b]+", ["&&ab"], ["c"]),
    ("[[]", ["["], ["]"]),
    (r"\\d", [r"\d"], ["3", "\\3"]),
    (r"\[\d\]", ["[3]"], [f"[{ARABIC_THREE}]"]),
    (r"\p{L}\P{L}", ["é3", "a" + ARABIC_THREE], ["33", "éé"]),
    (r"\p{Script=Greek}", ["α"], ["a"]),
    (".", ["a", "\u0085"], ["\n", "\r", "\u2028", "\u2029"]),
    ("(?s).", ["\n", "\u2028"], [""]),
    ("(?i)ok", ["ok", "OK"], ["o" + KELVIN]),
    ("(?i)[a-z]", ["K", "s"], [KELVIN, LONG_S]),
    ("(?i)[^k]", [KELVIN, "a"], ["k", "K"]),
    ("(?i)[à-ý]σ", ["Éς", "éΣ"], ["eσ"]),
    ("(?i:a)b", ["Ab"], ["AB"]),
    ("((?i)a)b", ["Ab"], ["AB"]),
    (r"(?u)\d", ["3", ARABIC_THREE], ["a"]),
    (r"(?u:\d)\d", [ARABIC_THREE + "3"], [ARABIC_THREE * 2]),
    ("(?iu)k", ["K", KELVIN], ["a"]),
    (r"\x41\u0042\u{43}\cJ\/\-\"", ['ABC\n/-"'], ["ABC"]),
    (r"\ud83d\ude00[\ud83d\ude00-\u{1f610}]", ["😀😁"], ["😀a"]),
    (r"[\b]\0", ["\b\0"], ["b0"]),
    ("{a}{2}x{", ["{a}}x{"], ["{aa}x{"]),
    ("(?<year>[0-9])(?P<more>x)", ["1x"], ["x1"]),
    ("^(?:a|b)$", ["a"], ["^a$"]),
    ("a+?b*?", ["aab", "a"], ["b"]),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS, ids=[pattern for pattern, _, _ in PATTERNS])
def test_a_pattern_means_what_it_means_in_ecma_script(pattern: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(text, regex=pattern)] == []
    assert [text for text in bad if accepts(text, regex=pattern)] == []


@pytest.mark.parametrize(
    ("pattern", "words"),
    {
        "a(?=b)": "needs no look-around, which grammars cannot follow, got (?=b at character 1",
        "(?<!a)b": "needs no look-around",
        r"(a)\1": r"needs no backreferences, which grammars cannot follow, got \1 at character 4",
        r"(?<n>a)\k<n>": "needs no backreferences",
        r"\bword\b": r"needs no word boundaries, which grammars cannot follow, got \b",
        r"\B": "needs no word boundaries",
        "(?m)^a$": "needs no anchors of lines",
        r"\Aa": "needs ECMA's anchors, ^ and $",
        r"\q": "needs an escape of ECMA's",
        "a\\": "got a backslash at the end",
        "a{,3}": "needs a least number in a quantifier",
        "a**": "needs something before a quantifier to repeat, got '*'",
        "|*": "needs something before a quantifier",
        "(a": "needs a ) for each (",
        "a)": "needs a ( for each )",
        "[a": "needs a ] for each [, got an unclosed character class",
        "[]": "needs a character in each class",
        "[z-a]": "needs ranges from a smaller character to a larger",
        "[[:alpha:]]": "needs ECMA's classes",
        "(?U)a": "needs flags of i, m, s, u, x",
        "(?>a)": "needs a group such as",
        r"\ud83d": "needs Unicode characters",
    }.items(),
)
def test_what_grammars_cannot_follow_is_refused_in_words(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^regular expression: .*{re.escape(words)}"):
        rust_regex(pattern)


def in_lark(pattern: str) -> dict[str, Any]:
    return {"grammar": f"start: WORD // not a /\\d/\nWORD: /{pattern}/"}


def in_tag(content: dict[str, Any]) -> dict[str, Any]:
    return {"structural_tag": {"format": content}}


def in_schema(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"json": schema},
        in_tag({"type": "json_schema", "json_schema": schema}),
        {"grammar": f"start: %json {json.dumps(schema)}"},
        in_tag({"type": "grammar", "grammar": f"start: %json {json.dumps(schema)}"}),
    ]


def test_a_pattern_is_ecma_s_wherever_it_stands() -> None:
    lark = in_lark(r"\d\/")
    for form in ({"regex": r"\d/"}, lark, in_tag({"type": "regex", "pattern": r"\d/"}), in_tag({"type": "grammar", **lark})):
        assert accepts("3/", **form)
        assert not accepts(f"{ARABIC_THREE}/", **form)
    for form in in_schema({"$ref": "#/$defs/enum", "$defs": {"enum": {"type": "string", "pattern": r"^\d$"}}}):
        assert accepts('"3"', **form)
        assert not accepts(f'"{ARABIC_THREE}"', **form)
    named = {"type": "object", "patternProperties": {r"^\d$": {"type": "null"}, "^[a-z]$": True}, "additionalProperties": False}
    for form in in_schema(named):
        assert accepts('{"3":null}', **form)
        assert not accepts(f'{{"{ARABIC_THREE}":null}}', **form)
    assert accepts("[\u00a01]", json={"type": "array"}, whitespace_pattern=r"\s?")
    assert not accepts("[\u00851]", json={"type": "array"}, whitespace_pattern=r"\s?")


def test_what_is_no_pattern_of_a_schema_stays_as_it_is() -> None:
    value = {"pattern": r"\d", "properties": {"a": 1}}
    for form in in_schema({"const": value, "default": {"pattern": "["}}):
        assert accepts('{"pattern":"\\\\d","properties":{"a":1}}', disable_additional_properties=True, **form)
    schema = {"type": "object", "properties": {"pattern": {"const": r"\d"}, "properties": {"properties": {"a": {}}}}}
    text = '{"pattern":"\\\\d","properties":{"a":1}}'
    assert accepts(text, json=schema, disable_additional_properties=True)
    for closed in (text.replace('"a"', '"b"'), text.replace("}}", '},"b":1}')):
        assert accepts(closed, json=schema)
        assert not accepts(closed, json=schema, disable_additional_properties=True)


def test_case_in_a_grammar_is_that_of_ascii() -> None:
    for flagged in ('"ok"i', "/ok/i", "/(?i)ok/"):
        assert accepts("OK", grammar=f"start: {flagged}")
        assert not accepts("o" + KELVIN, grammar=f"start: {flagged}")
    assert accepts("a/b#c\\", grammar='start: "a/b#c" /[\\\\]/ # a comment with "\n')
    assert accepts(ARABIC_THREE, grammar=r"start: /\d/u")


@pytest.mark.parametrize("form", [*in_schema({"type": "object"}), {"json_object": True}])
def test_json_has_at_most_one_space_between_its_parts(form: dict[str, Any]) -> None:
    for text in ('{"a":1}', '{ "a"\t:\n1\r}', '{"a": [1, 2]}'):
        assert accepts(text, **form)
    for text in ('{  "a":1}', '{"a": \n1}', '{"a":1,\n\n"b":1}', '{"a":[ \t]}', '{"a":1  }'):
        assert not accepts(text, **form)
        assert accepts(text, whitespace_pattern=r"[ \t\n\r]*", **form)
    assert not accepts('{"a": 1}', disable_any_whitespace=True, **form)
    assert accepts('{"a":"two  spaces"}', disable_any_whitespace=True, **form)


def test_flags_that_a_grammar_gives_are_refused_like_those_of_a_pattern() -> None:
    with pytest.raises(ValueError, match="needs flags of i, m, s, u, x, got 'q'"):
        rust_regex("a", "q")
