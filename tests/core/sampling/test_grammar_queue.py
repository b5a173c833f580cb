"""Forms on their way to a grammar: small ones at once, large ones after a trial, and none that nobody waits for any more."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install 'headway[structured]'")

from transformers import AutoTokenizer

from headway import StructuredOutputsParams
from headway.core.contract.errors import ConfigError
from headway.core.sampling.grammar import GrammarCompiler, GrammarError
from headway.core.sampling.grammar_queue import SMALL_FORM_BYTES, GrammarQueue
from headway.core.sampling.structured import MOST_FORM_BYTES, MOST_SCHEMA_LEVELS
from sandbox import save_tiny_model


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
    keys = {StructuredOutputsParams(json={"properties": each}).key for each in (one, other)}
    assert len(keys) == 2


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
