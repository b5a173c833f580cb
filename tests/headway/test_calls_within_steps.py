"""Code that a step calls, and that calls the engine: it would wait for itself, so it gets an error instead."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from torch import Tensor

from async_reading import read
from headway import LLM, AsyncLLM, SamplingParams
from headway.core.contract.errors import ConfigError

PLAIN = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
WORDS = "a call within a step"


def calling(function: Callable[[], object]) -> SamplingParams:
    """A request whose logits processor calls a function and leaves the logits as they are."""

    def process(output: list[int], logits: Tensor) -> Tensor:
        function()
        return logits

    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logits_processors=[process])


def test_a_processor_that_calls_its_llm_ends_its_request_with_an_error(llm: LLM) -> None:
    calls: list[Callable[[], object]] = [
        lambda: llm.generate([5], PLAIN, use_tqdm=False),
        lambda: list(llm.stream([5], PLAIN)),
        llm.stats,
        llm.abort,
    ]
    outputs = llm.generate([[5, 6]] * 5, [*map(calling, calls), PLAIN], use_tqdm=False)
    for output in outputs[:4]:
        assert output.outputs[0].finish_reason == "error"
        assert WORDS in (output.outputs[0].error or "")
    assert outputs[4].outputs[0].finish_reason == "length"
    assert not llm.engine.has_unfinished


def test_a_processor_that_calls_an_async_llm_of_its_engine_ends_its_request_with_an_error(llm: LLM, served: AsyncLLM) -> None:
    def call() -> None:
        asyncio.run(read(served.generate([5], PLAIN)))

    (beside,) = llm.generate([[5, 6]], calling(call), use_tqdm=False)
    assert WORDS in (beside.outputs[0].error or "")
    last = asyncio.run(read(served.generate([5, 6], calling(call))))[-1]
    assert WORDS in (last.outputs[0].error or "")


def test_a_signals_handler_within_a_step_gets_an_error_and_the_step_goes_on(llm: LLM) -> None:
    said: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        with pytest.raises(ConfigError, match=WORDS) as caught:
            llm.generate([5], PLAIN, use_tqdm=False)
        said.append(str(caught.value))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        (output,) = llm.generate([[5, 6]], calling(lambda: signal.raise_signal(signal.SIGUSR1)), use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert output.outputs[0].finish_reason == "length"
    assert len(said) == 4


def test_a_stream_that_is_given_up_within_a_step_ends_after_it(llm: LLM) -> None:
    streams: list[Any] = [llm.stream([7, 8], PLAIN)]
    next(streams[0])  # its request runs
    (output,) = llm.generate([[5, 6]], calling(streams.clear), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert not llm.engine.has_unfinished
