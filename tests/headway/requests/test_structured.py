"""Structured outputs: whatever the model would rather say, the text has the form; a form that cannot be had ends its request."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install 'headway[structured]'")
jsonschema = pytest.importorskip("jsonschema")

from headway import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams  # noqa: E402
from headway.core.contract.errors import ConfigError  # noqa: E402
from headway.core.engine.data.config import EngineConfig  # noqa: E402
from headway.core.engine.execution.host_rows import HostRows  # noqa: E402
from headway.core.sampling.grammar import GrammarCompiler  # noqa: E402
from sandbox import save_tiny_model  # noqa: E402
from schemas import SchemaMaker  # noqa: E402
from tiny_engine import Told, generate, made_engine  # noqa: E402

MOST = 1500
"""Tokens of the longest JSON."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_tiny_model(tmp_path_factory.mktemp("long"), positions=2 * MOST)
    return LLM(str(folder), kv_cache_memory="64MiB", num_threads=1, async_scheduling=True)


def ask(llm: LLM, forms: list[StructuredOutputsParams], **wish: Any) -> list[CompletionOutput]:
    """One completion in each form, by a model that talks nonsense but likes to come to an end."""
    tokenizer = llm.get_tokenizer()
    ends = {token: 6.0 for word, token in tokenizer.get_vocab().items() if word in '",]}'}
    bias = {**ends, tokenizer.eos_token_id: 12.0}
    wishes = [
        SamplingParams(**{"max_tokens": MOST, **wish}, seed=seed, logit_bias=bias, structured_outputs=form)
        for seed, form in enumerate(forms)
    ]
    outputs = llm.generate([[1 + seed % 200, 7] for seed in range(len(forms))], wishes, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def check_schemas(llm: LLM, seeds: range) -> None:
    schemas = [SchemaMaker(seed).make() for seed in seeds]
    forms = [StructuredOutputsParams(json=schema, disable_any_whitespace=bool(seed % 3)) for seed, schema in enumerate(schemas)]
    for seed, schema, one in zip(seeds, schemas, ask(llm, forms), strict=True):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert (one.finish_reason, one.error) == ("stop", None), (seed, schema, one.text[-200:])
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["uuid", "ipv4"]))
        errors = [error.message for error in validator.iter_errors(json.loads(one.text))]
        assert not errors, (seed, schema, one.text, errors)


def test_every_completion_is_valid_under_its_schema(llm: LLM) -> None:
    check_schemas(llm, range(16))


@pytest.mark.slow
@pytest.mark.parametrize("first", [16, *(pytest.param(each, marks=pytest.mark.soak) for each in range(80, 528, 64))])
def test_five_hundred_schemas(llm: LLM, first: int) -> None:
    check_schemas(llm, range(first, first + 64))


def test_regular_expressions_choices_grammars_and_objects(llm: LLM) -> None:
    lark = 'start: "(" expression ")"\nexpression: NUMBER | NUMBER OPERATOR expression\nNUMBER: /[0-9]{1,3}/\nOPERATOR: /[+*-]/'
    gbnf = 'root ::= "<" ("a" | "b") ">"'
    forms = [
        *[StructuredOutputsParams(regex=r"[a-c]{2,4}-\d+x")] * 4,
        *[StructuredOutputsParams(choice=["yes", "no", "perhaps not"])] * 4,
        *[StructuredOutputsParams(grammar=lark)] * 4,
        StructuredOutputsParams(grammar=gbnf),
        StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
    ]
    outputs = ask(llm, forms)
    assert [one.finish_reason for one in outputs] == ["stop"] * len(forms)
    texts = [one.text for one in outputs]
    assert all(re.fullmatch(r"[a-c]{2,4}-\d+x", text) for text in texts[:4])
    assert set(texts[4:8]) <= {"yes", "no", "perhaps not"}
    assert len(set(texts[4:8])) > 1
    assert all(re.fullmatch(r"\(\d{1,3}([+*-]\d{1,3})*\)", text) for text in texts[8:12])
    assert texts[12] in ("<a>", "<b>")
    assert isinstance(json.loads(texts[13]), dict)


def test_a_form_is_kept_to_its_end_beside_ignore_eos(llm: LLM) -> None:
    """The text goes on as long as the form lets it, and ends with the form."""
    endless = StructuredOutputsParams(regex="[ab]{3,}")
    forms = [StructuredOutputsParams(choice=["a", "ab"]), StructuredOutputsParams(regex="[ab]{2,4}"), endless]
    one, other, longest = ask(llm, forms, ignore_eos=True, max_tokens=40)
    assert (one.text, one.finish_reason) == ("ab", "stop")
    assert (len(other.text), other.finish_reason) == (4, "stop")
    assert (len(longest.token_ids), longest.finish_reason) == (40, "length")
    assert re.fullmatch("[ab]{3,}", longest.text)
    (short,) = ask(llm, [endless], max_tokens=40)
    assert short.finish_reason == "stop"


def test_neither_neighbours_nor_overlap_nor_preemption_change_a_form(llm: LLM) -> None:
    forms = [StructuredOutputsParams(json=SchemaMaker(seed).make(), disable_any_whitespace=True) for seed in range(40, 46)]
    forms += [StructuredOutputsParams(regex="([abc][xyz]){30}")] * 6
    together = ask(llm, forms)
    tight = LLM(
        llm.model.name, kv_cache_memory="56KiB", max_model_len=200, num_threads=1, block_size=8, max_num_batched_tokens=16
    )
    again = ask(tight, forms)
    assert [one.token_ids[:190] for one in again] == [one.token_ids[:190] for one in together]
    assert tight.engine.stats.num_preemptions > 0
    assert tight.engine.stats.steps_waiting["structured_outputs"] > 0


def test_drafts_change_no_token_under_a_grammar(llm: LLM) -> None:
    """Right ones, ones that the grammar forbids, and ones that it allows and the model does not draw."""
    form, prompt = StructuredOutputsParams(json=SchemaMaker(3).make(), disable_any_whitespace=True), [5, 6, 7]
    params = SamplingParams(seed=9, max_tokens=60, structured_outputs=form, logit_bias={1: 3.0})
    expected = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids

    def propose(tokens: Sequence[int]) -> list[int]:
        at = len(tokens) - len(prompt)
        return [*expected[at : at + at % 4], at % 90][:6]

    eos = llm.model.eos_token_ids
    hosts = HostRows(GrammarCompiler(llm.get_tokenizer(), llm.model.decoder.vocab_size, eos), {})
    config = EngineConfig(kv_cache_memory="1MiB", block_size=8)
    engine = made_engine(
        llm.model.decoder, llm.registry, config, eos_token_ids=eos, proposer=Told(propose), measured=False, hosts=hosts
    )
    (written,) = generate(engine, [prompt], params)
    assert written.token_ids == expected
    assert engine.stats.num_steps < len(expected)


def test_a_form_that_cannot_be_compiled_ends_its_request_alone(llm: LLM) -> None:
    bad = {
        "Invalid type: strin": StructuredOutputsParams(json={"type": "strin"}),
        "unclosed character class": StructuredOutputsParams(regex="[a-"),
        'unknown name: "nobody"': StructuredOutputsParams(grammar="start: nobody"),
        "'/nowhere' does not exist": StructuredOutputsParams(json={"$ref": "#/nowhere"}),
        "Unimplemented keys": StructuredOutputsParams(json={"type": "array", "uniqueItems": True, "items": {"type": "null"}}),
    }
    good = StructuredOutputsParams(choice=["yes", "no"])
    outputs = ask(llm, [*bad.values(), good])
    for one, words in zip(outputs, bad, strict=False):
        assert (one.finish_reason, one.token_ids) == ("error", [])
        assert words in (one.error or ""), one.error
        assert "\n" not in (one.error or "")
    assert outputs[-1].text in ("yes", "no")
    assert not llm.engine.has_unfinished


def test_excluded_tokens_end_the_request_with_an_error(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]), bad_words=["y", "yes"])
    (one,) = llm.generate("a", params, use_tqdm=False)[0].outputs
    assert one.finish_reason == "error"
    assert "leaves no token" in (one.error or "")


def test_several_completions_follow_the_grammar_each_by_itself(llm: LLM) -> None:
    params = SamplingParams(
        n=3, best_of=5, seed=3, max_tokens=60, structured_outputs=StructuredOutputsParams(regex=r"[abc]{5}\.[0-9]{3}"), logprobs=1
    )
    (output,) = llm.generate("several", params, use_tqdm=False)
    assert all(re.fullmatch(r"[abc]{5}\.[0-9]{3}", one.text) for one in output.outputs)
    scores = [one.cumulative_logprob for one in output.outputs]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag, got none"),
        ({"json": {}, "regex": "a"}, "exactly one of .*got json, regex"),
        ({"json": "{"}, "structured_outputs.json: needs JSON"),
        ({"json": 3}, "structured_outputs.json: needs a JSON schema"),
        *(
            ({"choice": each}, r"outputs\.choice: needs a list of texts that are not empty")
            for each in (301, {"a": 1}, "ab", [], [5])
        ),
        ({"regex": ""}, "structured_outputs.regex: needs a text"),
        ({"regex": "caf\udce9"}, "regex: needs a Unicode text"),
        ({"choice": ["caf\udce9"]}, "choice: needs Unicode"),
        ({"json": '{"allOf":[' * 10**5}, "more than 200 levels"),
        ({"json_object": False}, "structured_outputs.json_object: needs True"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag: needs JSON, got a text that is not JSON"),
        ({"structural_tag": "[]"}, "structured_outputs.structural_tag: needs a structural tag"),
    ],
    ids=str,
)
def test_invalid_structured_outputs_are_refused_at_once(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StructuredOutputsParams(**wish)


def test_without_llguidance_the_request_is_refused_with_what_installs_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr("headway.core.sampling.grammar.find_spec", lambda name: None)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ConfigError, match=re.escape("pip install 'headway[structured]'")):
        llm.generate(["fine", "not"], [replace(params, structured_outputs=None), params], use_tqdm=False)
    assert not llm.engine.has_unfinished
