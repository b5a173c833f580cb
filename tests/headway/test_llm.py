"""The public API: vLLM's offline shape."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest

from headway import LLM, RequestOutput, RequestOutputKind, SamplingParams
from headway.core.contract.errors import ConfigError
from headway.core.engine.data.step import OutputDelta
from headway.core.sampling.sampler import TORCH_SAMPLING
from headway.hosting import assembly
from headway.hosting.driver import FairLock
from headway.models.layers.decoder import Decoder

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path) -> LLM:
    return LLM(str(tiny_model_folder), kv_cache_memory="8MiB", num_threads=1, block_size=16)


def prompts(llm: LLM) -> list[list[int]]:
    return [[1, 2, 3, 4], [5], list(range(1, 30))]


def test_texts_and_token_ids_are_prompts_alone_and_in_lists(llm: LLM) -> None:
    text = llm.tokenizer.decode([1, 2, 3])
    ids = llm.tokenizer(text)["input_ids"]
    (from_text,) = llm.generate(text, GREEDY, use_tqdm=False)
    (from_ids,) = llm.generate(ids, GREEDY, use_tqdm=False)
    both = llm.generate([text, ids], GREEDY, use_tqdm=False)
    assert isinstance(from_text, RequestOutput)
    assert (from_text.prompt, from_ids.prompt) == (text, None)
    assert from_text.prompt_token_ids == from_ids.prompt_token_ids == ids
    assert [output.outputs[0].token_ids for output in both] == [from_text.outputs[0].token_ids] * 2
    assert llm.generate([], GREEDY, use_tqdm=False) == []


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
        return lambda *_: (order.append(name), result)[1]

    monkeypatch.setattr(assembly, "sampling_of", note("run", TORCH_SAMPLING))
    monkeypatch.setattr(assembly, "costs_for", note("attention", None))
    monkeypatch.setattr(assembly, "choose_products", note("products", None))
    monkeypatch.setattr(Decoder, "linear_choices", [None] if quantised else [])
    LLM(str(tiny_model_folder), kv_cache_memory="8MiB", num_threads=1, block_size=16)
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


def test_two_calls_share_the_prefix_cache(llm: LLM) -> None:
    long = list(range(60, 99))
    (first,) = llm.generate([[*long, 41]], GREEDY, use_tqdm=False)
    (second,) = llm.generate([[*long, 42]], GREEDY, use_tqdm=False)
    (off,) = LLM(llm.model.name, kv_cache_memory="8MiB", num_threads=1, enable_prefix_caching=False).generate(
        [[*long, 42]], GREEDY, use_tqdm=False
    )
    assert (first.num_cached_tokens, second.num_cached_tokens, off.num_cached_tokens) == (0, 39, 0)
    assert second.outputs[0].token_ids == off.outputs[0].token_ids


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
