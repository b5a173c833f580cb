"""Logits processors of plugins, by name, and functions in the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams, create_registry, hookimpl
from headway.contract import LogitsProcessorInfo, PluginError
from headway.core.contract.errors import ConfigError


def only(arguments: Mapping[str, Any]) -> Any:
    """Makes a processor that lets one token come, and the end of text after three."""

    def process(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        wanted = 0 if len(output) == 3 else prompt[0] + arguments.get("step", 1) * (len(output) + 1)
        masked = torch.full_like(logits, -torch.inf)
        masked[wanted] = 0.0
        return masked

    return process


class Plugin:
    name = "count_up"

    @hookimpl
    def headway_register_logits_processors(self) -> list[LogitsProcessorInfo]:
        return [LogitsProcessorInfo(self.name, "counts up from the prompt", lambda: only)]


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path) -> LLM:
    return LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1, plugins=[Plugin()])


def test_a_plugins_processor_is_asked_by_name_and_reads_extra_args(llm: LLM) -> None:
    wishes = [
        SamplingParams(logits_processors=["count_up"], extra_args={"step": 10}),
        SamplingParams(logits_processors=["count_up"], n=2),
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    ]
    first, second, plain = llm.generate([[20, 3]] * 3, wishes, use_tqdm=False)
    assert first.outputs[0].token_ids == [30, 40, 50, 0]
    assert [one.token_ids for one in second.outputs] == [[21, 22, 23, 0]] * 2
    assert plain.outputs[0].token_ids == llm.generate([[20, 3]], wishes[2], use_tqdm=False)[0].outputs[0].token_ids
    assert llm.engine.stats.steps_waiting["logits_processors"] > 0


def test_logits_processor_takes_two_or_three_parameters(llm: LLM) -> None:
    def two(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(7 + len(output)), len(logits)) * 1e4

    outputs = llm.generate(
        [[5]] * 2,
        [SamplingParams(logits_processors=[two], max_tokens=3), SamplingParams(logits_processors=[only({})], max_tokens=3)],
        use_tqdm=False,
    )
    assert [output.outputs[0].token_ids for output in outputs] == [[7, 8, 9], [6, 7, 8]]


def test_complex_logits_end_their_request(llm: LLM) -> None:
    """torch would drop the imaginary part."""
    params = SamplingParams(max_tokens=2, logits_processors=[lambda _, logits: logits + 1j])
    (found,) = llm.generate("the fox", params, use_tqdm=False)
    assert found.outputs[0].finish_reason == "error"
    assert "must return real numbers, not torch.complex64" in str(found.outputs[0].error)


def test_an_unknown_name_is_refused_with_those_that_are_known(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"a name that a plugin registered \(count_up\), got 'count_down'"):
        llm.generate("the", SamplingParams(logits_processors=["count_down"]), use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "load", "words"),
    [("", lambda: only, "name"), ("x", "not callable", "load must be callable"), (3, lambda: only, "name")],
)
def test_a_plugin_with_a_wrong_field_is_refused_whole(name: Any, load: Any, words: str) -> None:
    class Wrong:
        @hookimpl
        def headway_register_logits_processors(self) -> list[LogitsProcessorInfo]:
            return [LogitsProcessorInfo(name, "", load)]

    with pytest.raises(PluginError, match=words):
        create_registry([Wrong()], load_entry_points=False)


def test_two_plugins_may_not_use_one_name() -> None:
    with pytest.raises(PluginError, match="'count_up' is already taken"):
        create_registry({"one": Plugin(), "two": Plugin()}, load_entry_points=False)


@pytest.mark.parametrize("error", [RuntimeError("two\nlines"), SystemExit(3), None])
def test_a_processor_that_cannot_be_made_ends_its_request_alone(tiny_model_folder: Path, error: BaseException | None) -> None:
    def maker(arguments: Mapping[str, Any]) -> Any:
        if error is not None:
            raise error

    class Failing(Plugin):
        @hookimpl
        def headway_register_logits_processors(self) -> list[LogitsProcessorInfo]:
            return [LogitsProcessorInfo("late", "", lambda: maker), LogitsProcessorInfo("early", "", lambda: maker({}))]

    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1, plugins=[Failing()])
    failed, served = llm.generate(
        [[5]] * 2, [SamplingParams(max_tokens=2, logits_processors=["late"]), SamplingParams(max_tokens=2)], use_tqdm=False
    )
    assert failed.outputs[0].finish_reason == "error"
    assert str(failed.outputs[0].error).startswith("logits processor 'late' cannot be made: ")
    assert "\n" not in str(failed.outputs[0].error)
    assert served.outputs[0].finish_reason in ("length", "stop")
    with pytest.raises(PluginError, match="^logits_processors: the maker of 'early' cannot be made: "):
        llm.generate([[5]], SamplingParams(logits_processors=["early"]), use_tqdm=False)
