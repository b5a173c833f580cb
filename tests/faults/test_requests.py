"""A request fails alone: a call is checked before any of its requests is queued, and a fault in a step ends no other request."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from headway import LLM, SamplingParams
from headway.core.contract.errors import ConfigError, HeadwayError, PromptError
from headway.core.sampling.logits_shaper import LogitsShaper
from headway.requests.validation import default_params
from sandbox import save_tiny_model

GOOD = SamplingParams(max_tokens=3, temperature=0)
NUMBERS = [0, 1, -1, -2, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, 0.0, 1e-300, 5e-324, 1e39, 1e308, 1.5, float("nan")]
OTHERS: list[Any] = [float("inf"), -float("inf"), True, False, "", "a", "\ud800", "3", b"", b"ab", 1j, object(), len, None]
ARRAYS = [numpy.float32(1), numpy.int64(3), numpy.array([1, 2]), numpy.array([]), torch.tensor([1, 2])]
LISTS: list[Any] = [
    [],
    [None],
    [1],
    [-1],
    [2**63],
    [1.5],
    ["a"],
    ["\ud800"],
    [b"ab"],
    [True],
    [[]],
    [[1]],
    [[2**63]],
    range(10**30),
]
MAPPINGS: list[Any] = [{}, {1: 1}, {1: float("nan")}, {"1": 1}, {2**63: 1}, {-1: 1}, {1: None}, {1}, iter([1])]
FUNCTIONS: list[Any] = [[lambda ids, logits: 1 / 0], [lambda ids, logits: None], [lambda ids, logits: logits * float("nan")]]
VALUES = [*NUMBERS, *OTHERS, *ARRAYS, *LISTS, *MAPPINGS, *FUNCTIONS]
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


def new_llm(folder: Path) -> LLM:
    return LLM(str(save_tiny_model(folder)), attn_backend="sdpa", num_threads=1, kv_cache_memory=2**21, max_num_seqs=8)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return new_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return list(llm.generate("the quick", GOOD, use_tqdm=False)[0].outputs[0].token_ids)


def beside_a_good_one(llm: LLM, params: SamplingParams, expected: list[int]) -> str | None:
    """Run a request beside a good one, whose tokens must not change. Returns the error that ended the request, if any."""
    good, other = llm.generate(["the quick", "a dog"], [GOOD, params], use_tqdm=False)
    assert good.outputs[0].error is None, f"the good one ended with: {good.outputs[0].error}"
    assert list(good.outputs[0].token_ids) == expected
    return next((each.error or "" for each in other.outputs if each.finish_reason == "error"), None)


@pytest.mark.parametrize(
    "field", [pytest.param(name, marks=() if name in ("top_k", "min_tokens") else pytest.mark.slow) for name in FIELDS]
)
def test_absurd_parameters_are_refused_by_name_or_are_harmless(llm: LLM, expected: list[int], field: str) -> None:
    for value in VALUES:
        given = {"max_tokens": 2, field: value}
        if field == "max_tokens" and (value is None or (type(value) is int and value > 2)):
            continue  # they mean what they say: to the model's length
        try:
            params = SamplingParams(**given)
            beside_a_good_one(llm, params, expected)
        except HeadwayError as error:
            said = str(error)
            assert field in said
            assert "\n" not in said
            assert len(said) < 500
        assert not llm.engine.has_unfinished


def test_a_bad_second_prompt_leaves_the_first_unqueued(llm: LLM) -> None:
    before = llm.engine.stats.num_prompt_tokens
    for bad in (
        SamplingParams(stop_token_ids=[2**40]),
        SamplingParams(logprobs=10**6),
        SamplingParams(logits_processors=["nobody"]),
    ):
        with pytest.raises(ConfigError):
            llm.generate(["the quick", "a dog"], [GOOD, bad], use_tqdm=False)
        assert not llm.engine.has_unfinished
    with pytest.raises(ConfigError, match="needs SamplingParams, got a NoneType"):
        llm.generate(["the quick", "a dog"], [GOOD, None], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="priority"):
        llm.generate(["the quick", "a dog"], GOOD, use_tqdm=False, priority=[0, "x"])  # type: ignore[list-item]
    assert llm.engine.stats.num_prompt_tokens == before


def test_invalid_sampling_defaults_of_a_model_are_refused_with_the_file_name(tmp_path: Path) -> None:
    for value in (float("nan"), -1, "hot", True):
        (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
        with pytest.raises(ConfigError, match=r"generation_config\.json: temperature: needs a number"):
            default_params(tmp_path)


def test_a_built_in_model_has_a_recommendation_that_its_own_file_overrules(tmp_path: Path) -> None:
    assert default_params(tmp_path, "smollm2").temperature == 0
    assert default_params(tmp_path, "another") == default_params(tmp_path) == SamplingParams()
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.4, "top_p": 0.8}))
    assert default_params(tmp_path, "smollm2") == default_params(tmp_path) == SamplingParams(temperature=0.4, top_p=0.8)


def test_lone_surrogates_are_refused(llm: LLM) -> None:
    with pytest.raises(PromptError, match="Unicode"):
        llm.generate("caf\udce9", GOOD, use_tqdm=False)


def test_a_fault_in_one_row_ends_that_request_alone(tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = new_llm(tmp_path)  # which has never begun a row that changes logits
    start = LogitsShaper.start

    def failing(self: LogitsShaper, row: int, params: SamplingParams, *others: Any) -> None:
        if params.top_k == 7:
            raise OverflowError("too much for the device")
        start(self, row, params, *others)

    monkeypatch.setattr(LogitsShaper, "start", failing)
    said = beside_a_good_one(llm, SamplingParams(top_k=7, max_tokens=4), expected)
    assert "OverflowError: too much for the device" in said
    assert beside_a_good_one(llm, SamplingParams(top_k=8, max_tokens=4), expected) is None
