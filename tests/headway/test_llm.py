"""The public API: vLLM's offline shape, its figures, and calls that come within a step."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import pytest
from torch import Tensor

from headway import LLM, AsyncLLM, EngineSnapshot, RequestOutput, RequestOutputKind, SamplingParams
from headway.core.contract.errors import ConfigError
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.data.step import OutputDelta
from headway.core.sampling.sampler import TORCH_SAMPLING
from headway.hosting import assembly
from headway.hosting.driver import FairLock
from headway.hosting.stats_report import stats_line, stats_page
from headway.models.layers.decoder import Decoder
from sandbox import run_python
from server_clients import read

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path) -> LLM:
    return LLM(str(tiny_model_folder), kv_cache_memory="8MiB", num_threads=1, block_size=16)


def prompts(llm: LLM) -> list[list[int]]:
    return [[1, 2, 3, 4], [5], list(range(1, 30))]


def test_a_start_says_where_its_seconds_went(llm: LLM) -> None:
    parts = llm.start_times
    assert {"weights", "measuring attention", "memory and graphs"} <= parts.seconds.keys()
    assert 0 < sum(parts.seconds.values()) <= parts.whole
    assert str(parts).endswith(f"the rest {parts.whole - sum(s for s in parts.seconds.values() if s >= 0.1):.1f}")


@pytest.mark.parametrize("quantised", [False, True])
def test_a_model_runs_before_attention_is_measured_but_not_before_its_products_are(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    """Its kernels are compiled by that; products over quantised weights would arrange them for a way that may not be chosen."""
    order: list[str] = []

    def note(name: str, result: object) -> Callable[..., object]:
        return lambda *_, **__: (order.append(name), result)[1]

    monkeypatch.setattr(assembly, "sampling_of", note("run", TORCH_SAMPLING))
    monkeypatch.setattr(assembly, "costs_for", note("attention", None))
    monkeypatch.setattr(assembly, "choose_linear_kernels", note("products", None))
    monkeypatch.setattr(Decoder, "linear_choices", [None] if quantised else [])
    LLM(str(tiny_model_folder), kv_cache_memory="8MiB", num_threads=1, block_size=16)
    order = list(dict.fromkeys(order))  # times of states are asked for as those of attention
    assert order == (["attention", "products", "run"] if quantised else ["run", "attention", "products"])


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_params(llm: LLM) -> None:
    wishes = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    outputs = llm.generate(prompts(llm), wishes, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts(llm)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert all(0 < output.metrics.time_to_first_token < 60 for output in outputs)
    with pytest.raises(ConfigError, match="one for each of the 3 prompts"):
        llm.generate(prompts(llm), wishes[:2], use_tqdm=False)


def test_a_stream_and_other_calls_may_interleave(llm: LLM) -> None:
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0] for prompt in ([1, 2, 3], [9, 8], [4])]
    first, second = llm.stream([1, 2, 3], GREEDY), llm.stream([9, 8], GREEDY)
    texts = [next(first)[0], next(second)[0]]
    (between,) = llm.generate([[4]], GREEDY, use_tqdm=False)
    texts = [text + "".join(piece for piece, _ in stream) for text, stream in zip(texts, (first, second), strict=True)]
    assert [*texts, between.outputs[0].text] == [completion.text for completion in alone]
    assert not llm.engine.has_unfinished


def test_threads_share_the_batch_and_get_their_own_outputs(llm: LLM) -> None:
    """Two calls of generate and a stream, at once, many times over: texts, tokens and what is left behind."""
    prompts = [[1, 2, 3], [9, 8], [4], list(range(40, 60)), [7, 7]]
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    answers: dict[int, list[tuple[str, list[int]]]] = {}
    faults: list[BaseException] = []

    def call(number: int) -> None:
        try:
            for _ in range(3):
                if number == 2:
                    pieces = list(llm.stream(prompts[4], GREEDY))
                    texts = [("".join(text for text, _ in pieces), pieces[-1][1].outputs[0].token_ids)]
                else:
                    mine = llm.generate(prompts[2 * number : 2 * number + 2], GREEDY, use_tqdm=False)
                    texts = [(output.outputs[0].text, output.outputs[0].token_ids) for output in mine]
                answers.setdefault(number, []).extend(texts)
        except BaseException as error:  # shown by the thread that waits
            faults.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    before = llm.engine.stats.snapshot()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    whole = [(completion.text, completion.token_ids) for completion in alone]
    assert answers == {0: whole[:2] * 3, 1: whole[2:4] * 3, 2: whole[4:] * 3}
    assert (llm.engine.stats - before).num_steps < 3 * 3 * 8, "they never ran in one batch"
    assert not llm.engine.has_unfinished
    llm.engine.blocks.check_integrity([])


def test_turns_are_taken_in_order_and_an_interrupt_gives_its_turn_back() -> None:
    turns, order = FairLock(), []

    def take(name: str) -> None:
        with turns:
            order.append(name)

    with turns:
        threads = [threading.Thread(target=take, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c"]
    with pytest.raises(KeyboardInterrupt), turns:
        raise KeyboardInterrupt
    with turns:
        pass


@pytest.mark.parametrize(("strokes", "whole_steps"), [(1, 3), (2, 2)])
def test_ctrl_c_waits_for_the_end_of_a_step_and_the_second_does_not(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, strokes: int, whole_steps: int
) -> None:
    """Else it would leave the engine half-way: pages without an owner, tokens of the next call that are another's."""
    ids, real, begun, ended = [list(range(1, 30)), [5]], llm.engine.step, [], []
    expected = [output.outputs[0].token_ids for output in llm.generate(ids, GREEDY, use_tqdm=False)]

    def step() -> list[OutputDelta]:
        begun.append(1)
        if len(begun) == 3:
            for _ in range(strokes):
                os.kill(os.getpid(), signal.SIGINT)
        deltas = real()
        ended.append(1)
        return deltas

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ids, GREEDY, use_tqdm=False)
    assert (len(begun), len(ended)) == (3, whole_steps)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_pages
    assert [output.outputs[0].token_ids for output in llm.generate(ids, GREEDY, use_tqdm=False)] == expected


def test_an_llm_is_freed_with_its_last_holder_without_a_collection(tiny_model_folder: Path) -> None:
    """What is frozen for the collector's sake must hold no cycle, or the memory of the cache would never come back."""
    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1, block_size=16)
    assert gc.get_freeze_count() > 0
    llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    left = [ref(each) for each in (llm, llm.engine, llm.engine.executor.caches[0], llm.model.decoder)]
    gc.disable()
    try:
        del llm
        assert [each() for each in left] == [None] * 4
    finally:
        gc.enable()


def test_a_stream_of_several_prompts_and_completions_brings_each_its_own(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1, seed=3, max_tokens=8, ignore_eos=True)
    delta = replace(params, output_kind=RequestOutputKind.DELTA)
    whole = llm.generate(prompts(llm), params, use_tqdm=False)
    last: dict[int, RequestOutput] = {}
    news: dict[tuple[int, int], str] = {}
    for index, output in llm.stream(prompts(llm), [params, delta, params]):
        assert output.prompt_token_ids == prompts(llm)[index]
        for completion in output.outputs:
            news[index, completion.index] = news.get((index, completion.index), "") + completion.text
        assert index not in last or not last[index].finished
        last[index] = output
    assert all(output.finished for output in last.values())
    for index in (0, 2):
        assert [each.text for each in last[index].outputs] == [each.text for each in whole[index].outputs]
    assert [news[1, number] for number in range(2)] == [each.text for each in whole[1].outputs]
    assert not llm.engine.has_unfinished


def test_stream_continues_after_an_abort_of_one_request(llm: LLM) -> None:
    whole = llm.generate(prompts(llm), GREEDY, use_tqdm=False)
    ends: dict[int, tuple[str, str | None]] = {}
    for index, output in llm.stream(prompts(llm), GREEDY):
        ends[index] = output.outputs[0].text, output.outputs[0].finish_reason
        if index == 1 and not output.finished:
            llm.abort(output.request_id)
    assert ends[1][1] == "abort"
    assert [ends[index] for index in (0, 2)] == [(whole[index].outputs[0].text, "length") for index in (0, 2)]
    llm.abort(["no such request"])
    llm.engine.blocks.check_integrity([])


def test_priority_policy_serves_lower_priorities_first(llm: LLM, tiny_model_folder: Path) -> None:
    with pytest.raises(ConfigError, match='priority: needs 0.*first come.*scheduling_policy="priority"'):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[0, 1])
    assert not llm.engine.has_unfinished
    with pytest.raises(ConfigError, match="priority: needs one, or one for each of the 2 prompts, got 3"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[0, 1, 2])
    with pytest.raises(ConfigError, match="scheduling_policy: needs fcfs or priority, got 'lifo'"):
        LLM(str(tiny_model_folder), scheduling_policy="lifo")
    one = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1, max_num_seqs=1, scheduling_policy="priority")
    order: list[int] = []
    for index, output in one.stream([[1], [2], [3], [4]], GREEDY, priority=[2, 1, 0, 1]):
        if output.finished:
            order.append(index)
    assert order == [2, 1, 3, 0]


REQUESTS = """
import sys
from headway import LLM, SamplingParams

llm = LLM(sys.argv[1], device=sys.argv[2], autotune_budget=0, num_threads=1)
before = set(sys.modules)
plain = SamplingParams(temperature=0, max_tokens=4)
drawn = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=1, n=2, max_tokens=4)
counted = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.1, logprobs=2, prompt_logprobs=1, max_tokens=4)
llm.generate(["Hello", "The capital of France is"], [plain, counted], use_tqdm=False)
llm.chat([{"role": "user", "content": "Hello"}], drawn, use_tqdm=False)
for _ in llm.stream("Hello", plain):
    pass
# Standard modules (a codec, a lock) take microseconds.
later = sorted(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names)
assert not later, f"{len(later)} modules imported after the start: {later[:9]}"
"""


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_is_imported_after_the_start(device: str, tmp_path: Path) -> None:
    script = tmp_path / "requests.py"
    script.write_text(REQUESTS)
    result = run_python(str(script), "smollm2", device, cwd=tmp_path)
    assert result.code == 0, result.err


NONE = EngineSnapshot(0.0, 0, 0, 512, 0, 0, EngineStats())


def test_the_numbers_of_a_snapshot_are_those_of_the_engine(tiny_model_folder: Path) -> None:
    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1, block_size=16, attn_backend="sdpa")
    prompt = list(range(1, 34))
    start = llm.stats()
    assert (start.num_running, start.num_used_blocks, start.num_cached_blocks) == (0, 0, 0)
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    during = llm.stats()
    assert (during.num_running, during.num_waiting, during.num_used_blocks) == (1, 0, 3)
    assert len(list(stream)) == 7
    llm.generate([prompt], GREEDY, use_tqdm=False)
    end = llm.stats()
    assert (end.num_running, end.num_used_blocks, end.num_blocks) == (0, 0, llm.engine.blocks.num_pages)
    assert end.num_cached_blocks == 3
    done = end.totals - start.totals
    assert (done.num_output_tokens, done.num_prompt_tokens, done.num_cached_tokens) == (16, 66, 32)
    page = "\n".join(stats_page(end, start))
    for words in ("66 tokens, 32 of them (48%)", "16 tokens in", "s of work", "0 running, 0 waiting", "16 sdpa", "3 cached"):
        assert words in page
    line = stats_line(end, during)
    assert line.startswith("run 0 | ")
    assert "hits 97%" in line  # of the second prompt alone
    assert line.endswith("sdpa")


def test_the_line_fits_80_columns_and_leaves_out_zeros() -> None:
    assert stats_line(NONE, NONE) == "run 0 | 0.0 tok/s | blocks 0%, cached 0%"
    many = EngineStats(
        num_output_tokens=10**9,
        num_prompt_tokens=10**9,
        num_cached_tokens=10**9,
        num_preemptions=10**7,
        num_draft_tokens=10**9,
        num_accepted_tokens=10**9,
        steps_by_backend=Counter({"a_backend_with_a_long_name": 3, "another_of_the_kind": 2}),
        steps_without_graph=Counter({"more tokens than were captured": 10**7}),
    )
    line = stats_line(EngineSnapshot(1.0, 10**6, 10**7, 10**7, 10**7, 10**7, many), NONE)
    assert len(line) <= 80
    assert line.startswith("run 1,000,000 wait 10,000,000 | 1,000,000,000 tok/s")
    page = "\n".join(stats_page(EngineSnapshot(1.0, 1, 0, 10, 1, 0, many), NONE))
    assert "outside a graph: 10,000,000 more tokens than were captured" in page


def test_offloaded_blocks_are_shown_where_there_are_any() -> None:
    now = EngineSnapshot(1.0, 0, 0, 512, 0, 256, EngineStats(), num_offloaded_blocks=1234)
    assert stats_line(now, NONE) == "run 0 | 0.0 tok/s | blocks 0%, cached 50%, host 1,234"
    assert "blocks     0 of 512 used, 256 cached; 1,234 in host memory" in stats_page(now, NONE)
    assert "host" not in "\n".join([stats_line(NONE, NONE), *stats_page(NONE, NONE)])


def test_a_line_is_logged_once_in_an_interval(tiny_model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="log_stats_interval: needs a number of seconds above 0, got 0"):
        LLM(str(tiny_model_folder), log_stats_interval=0)
    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1, log_stats_interval=1e-6)
    assert not logging.getLogger("headway").isEnabledFor(logging.INFO)  # as in commands without -v
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    lines = [record.message for record in caplog.records if " tok/s | blocks " in record.message]
    assert len(lines) == 8
    assert all(line.startswith("run ") for line in lines)


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
