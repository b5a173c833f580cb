"""Patterns in forms are ECMA's, or are refused in words; and large forms are tried before they hold up a step."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install 'headway[structured]'")

from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer

from headway.core.contract.errors import ConfigError
from headway.core.sampling.ecma_regex import rust_regex
from headway.core.sampling.grammar import SMALL_FORM_BYTES, GrammarCompiler, GrammarError, GrammarQueue, grammar_text
from headway.core.sampling.structured import MOST_FORM_BYTES, MOST_SCHEMA_LEVELS, StructuredOutputsParams
from sandbox import save_tiny_model

BYTES = LLTokenizer("byte")
ARABIC_THREE, KELVIN, LONG_S = "\u0663", "\u212a", "\u017f"


def accepts(text: str, **form: Any) -> bool:
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


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("forms")))
    return GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def queue(compiler: GrammarCompiler) -> GrammarQueue:
    return GrammarQueue(compiler)


def chained_references(count: int) -> dict[str, Any]:
    """A schema of an integer, behind this many references."""
    links = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(count)}
    return {"$defs": {**links, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def chained_rules(count: int, notation: str = "lark") -> str:
    """A grammar of one letter, behind this many rules."""
    begin, is_, names = ("start", ":", "r") if notation != "gbnf" else ("root", " ::=", "r")
    if notation == "terminals":
        names = "R"
    rules = [f"{names}{number}{is_} {names}{number + 1}" for number in range(count)]
    return "\n".join([f"{begin}{is_} {names}0", *rules, f'{names}{count}{is_} "a"'])


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def slow_form(seed: int) -> StructuredOutputsParams:
    """A form that takes the process that tries it many seconds."""
    rules = [f'r{number} ::= "x" r{number + 1} | "y"' for number in range(4000)]  # whose conversion takes time by their square
    return StructuredOutputsParams(grammar="\n".join([f"root ::= r{seed}", *rules, 'r4000 ::= "a"']))


def test_forms_of_every_size_become_grammars(queue: GrammarQueue) -> None:
    wide = {f"property {number}": {"type": "string", "maxLength": number + 1} for number in range(400)}
    forms = [
        StructuredOutputsParams(regex="[ab]+"),
        StructuredOutputsParams(json={"type": "object", "properties": wide, "required": list(wide)}),
        StructuredOutputsParams(json=chained_references(1000)),
        StructuredOutputsParams(grammar=chained_rules(1000)),
        StructuredOutputsParams(json=nested(MOST_SCHEMA_LEVELS)),
        StructuredOutputsParams(choice=[f"answer {number}" for number in range(10_000)]),
    ]
    assert len(forms[0].key) <= SMALL_FORM_BYTES < len(forms[1].key)
    for form in forms:
        queue.add(form).result(30)
        assert not queue.grammar(form).fault


def test_a_choice_of_ten_thousand_allows_its_texts_alone(queue: GrammarQueue, compiler: GrammarCompiler) -> None:
    form = StructuredOutputsParams(choice=[f"x{number}" for number in range(10_000)])
    queue.add(form).result(30)
    (mask,) = compiler.masks([queue.grammar(form)])
    x = compiler.tokenizer.get_vocab()["x"]
    assert mask[x // 32] >> (x % 32) & 1
    assert sum(int(word).bit_count() for word in mask.view("uint32")) <= 12  # "x", and tokens of "x" and digits


def test_a_trial_ends_with_llguidances_reason(queue: GrammarQueue) -> None:
    spoiled = {**chained_references(500), "$ref": "#/nowhere"}
    with pytest.raises(GrammarError, match="'/nowhere' does not exist"):
        queue.add(StructuredOutputsParams(json=spoiled)).result(30)


def test_a_refused_regular_expression_is_cut(queue: GrammarQueue) -> None:
    for length in (1000, 100_000):
        with pytest.raises(GrammarError, match="unclosed character class") as caught:
            queue.add(StructuredOutputsParams(regex="a" * length + "[a-")).result(30)
        assert len(str(caught.value)) < 400


def test_small_forms_do_not_wait_for_large_ones_and_cancelled_ones_end(queue: GrammarQueue) -> None:
    slow = [queue.add(slow_form(seed)) for seed in range(6)]
    time.sleep(1)  # two of them are being tried
    began = time.monotonic()
    queue.add(StructuredOutputsParams(regex="[cd]+")).result(5)
    assert not any(ready.done() for ready in slow)
    assert all(ready.cancel() for ready in slow)
    large = StructuredOutputsParams(json=chained_references(200))
    assert len(large.key) > SMALL_FORM_BYTES
    queue.add(large).result(10)  # a process is started again, and the slow ones do not come before it
    assert time.monotonic() - began < 10


def test_a_grammar_that_is_no_longer_kept_is_compiled_again(compiler: GrammarCompiler) -> None:
    queue, first = GrammarQueue(compiler), StructuredOutputsParams(regex="first")
    queue.add(first).result(10)
    for number in range(300):
        queue.add(StructuredOutputsParams(regex=f"other {number}")).result(10)
    assert compiler.find(first) is None
    assert not queue.grammar(first).fault


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"json": nested(MOST_SCHEMA_LEVELS + 2)}, f"json: needs at most {MOST_SCHEMA_LEVELS} levels"),
        ({"json": nested(900)}, f"json: needs at most {MOST_SCHEMA_LEVELS} levels"),
        ({"json": {"enum": ["a" * MOST_FORM_BYTES]}}, f"json: needs at most {MOST_FORM_BYTES} bytes, got 10"),
        ({"regex": "a" * MOST_FORM_BYTES}, f"regex: needs at most {MOST_FORM_BYTES} bytes, got 10"),
        ({"choice": ["ab"] * MOST_FORM_BYTES}, f"choice: needs at most {MOST_FORM_BYTES} bytes, got 6"),
        ({"json": {"const": object()}}, "json: needs a JSON schema, got values that are not JSON"),
    ],
    ids=["a level too deep", "very deep", "a large schema", "a large expression", "many choices", "no JSON"],
)
def test_a_form_beyond_the_bounds_is_refused_at_once_with_what_was_got(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        StructuredOutputsParams(**wish)
    assert len(str(caught.value)) < 300


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema["not"] = schema
    with pytest.raises(ConfigError, match="levels of objects and arrays"):
        StructuredOutputsParams(json=schema)


def test_schemas_whose_properties_have_another_order_are_different_forms() -> None:
    one, other = ({name: {"type": "null"} for name in names} for names in ("ab", "ba"))
    assert len({StructuredOutputsParams(json={"properties": each}).key for each in (one, other)}) == 2


HOSTILE = {
    "references": {"json": chained_references(20_000)},
    "rules": {"grammar": chained_rules(50_000)},
    "terminals": {"grammar": chained_rules(50_000, "terminals")},
    "rules of GBNF": {"grammar": chained_rules(20_000, "gbnf")},
    "optional letters": {"regex": "a?" * 200_000},
    "optional properties": {"json": json.dumps({"properties": {f"p{number}": {} for number in range(30_000)}})},
    "anything of anything": {"json": {"anyOf": [{"enum": [f"{a}-{b}" for b in range(100)]} for a in range(800)]}},
    "counted": {"regex": "(" * 100 + "a" + "){1,1000}" * 100 + "b" * 5000},
}


@pytest.mark.slow
@pytest.mark.sampled(3, then="soak")
@pytest.mark.parametrize("wish", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_form_ends_alone_and_within_its_limits(compiler: GrammarCompiler, wish: dict[str, Any]) -> None:
    queue, began = GrammarQueue(compiler), time.monotonic()
    error = queue.add(StructuredOutputsParams(**wish)).exception(60)
    assert isinstance(error, GrammarError | None)
    assert len(str(error)) < 400
    assert "\n" not in str(error)
    assert time.monotonic() - began < 40
    queue.add(StructuredOutputsParams(json=chained_references(300))).result(20)
