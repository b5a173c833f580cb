"""The one reader of JSON: its limits, and errors that name the source, the place and what is needed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from headway.core.system.json_text import JsonError, parse_json, parse_model

VAST = "1" + "0" * 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "the body: needs a JSON object, got a text that is not JSON (line 1, column 0: EOF"),
        (b'{"a": 1,\n "b": }', "line 2, column 7: expected value"),
        (b'{"a": 1} x', "line 1, column 10: trailing"),
        (b'{"a": "\xff"}', "not JSON (line 1, column"),
        (b"\xff\xfe{\0}\0", "not JSON (line 1, column 1"),
        (b'{"a": "\\ud800"}', "not JSON (line 1, column"),
        ('{"a": "\udcff"}', "not JSON ('utf-8' codec"),
        (b'{"a": ' + b"[" * 250 + b"]" * 250 + b"}", "more than 200 levels of objects and arrays"),
        (b"[" * 10**6, "more than 200 levels"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "number out of range"),
        (b"[1]", "needs a JSON object, got a JSON array: [1]"),
        (b"null", "needs a JSON object, got null"),
        (b"true", "got a JSON boolean: True"),
        (b'{"a": NaN}', "the body: a: needs a number of at most 64 bits, got nan"),
        (b'{"a": [{"b": -Infinity}]}', "the body: a.0.b: needs a number of at most 64 bits, got -inf"),
        (b'{"a": {"b": 1e999}}', "a.b: needs a number"),
        (f'{{"a": [1, 2, {{"c": {VAST}}}]}}', f"a.2.c: needs a number of at most 64 bits, got {VAST}"),
        (f'{{"a": [{"1," * 50}-{VAST}]}}', "a.50: needs a number"),
        (f'{{"a": [{"1," * 50}-{VAST}, {VAST}]}}', "a.50: needs a number"),
        (f'{{"a": ["x", {"1," * 50} 9223372036854775808, -9223372036854775809]}}', "a.52: needs a number"),
        (b'{"a": 18446744073709551616}', "a: needs a number"),
        ('{"' + "k" * 10**5 + f'": {VAST}}}', "k: needs a number"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str | bytes, said: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(text, "the body", dict)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_what_json_allows_is_read() -> None:
    limits = {
        "least": -(2**63),
        "most": 2**64 - 1,
        "float": 1.7e308,
        "ids": list(range(100)),
        "mixed": [*range(30), 2**64 - 1, None],
    }
    for text in (json.dumps(limits), json.dumps(limits).encode(), b"\xef\xbb\xbf" + json.dumps(limits).encode(), "\ufeff{}"):
        assert parse_json(text, "text") in (limits, {})
    assert parse_json('{"a": 1, "a": 2}\r\n', "text") == {"a": 2}
    assert parse_json(b"[" * 190 + b"]" * 190, "text", list)
    assert parse_json('"\\ud83d\\ude00"', "text", str) == "\N{GRINNING FACE}"


def test_configurations_of_models_hold_numbers_that_python_writes() -> None:
    assert parse_json(f'{{"time_step_limit": [0.0, Infinity], "model_max_length": {VAST}}}', "config.json", any_number=True) == {
        "time_step_limit": [0.0, math.inf],
        "model_max_length": 10**30,
    }


class Inner(BaseModel):
    schema_: dict[str, Any] | None = Field(alias="schema", default=None)


class Outer(BaseModel):
    model_config = ConfigDict(extra="allow")

    count: int | None = None
    rate: float | None = None
    inner: Inner | None = None
    many: list[Inner] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ({"count": 10**30}, "count"),
        ({"rate": math.inf}, "rate"),
        ({"inner": {"schema": {"maximum": 10**30}}}, "inner.schema.maximum"),
        ({"many": [{}, {"schema": {"x": [math.nan]}}]}, "many.1.schema.x.0"),
        ({"further": {"a": [0, -(10**30)]}}, "further.a.1"),
    ],
)
def test_a_model_names_the_path_as_it_was_written(text: dict[str, Any], path: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_model(json.dumps(text), Outer)
    assert caught.value.reason.what == path
    assert parse_model(json.dumps(text), Outer, any_number=True)
