"""AsyncLLM: streams that come and go beside each other, what ends them, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, pairwise
from threading import Thread, current_thread
from types import SimpleNamespace
from typing import cast
from weakref import ref

import pytest

from headway import LLM, AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams, StructuredOutputsParams
from headway.core.contract.errors import ConfigError, PromptError
from headway.hosting.host import EngineThread
from server_clients import plain, read

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def _raising(token_ids: list[int], logits: object) -> object:
    if len(token_ids) == 3:
        raise ValueError("no such row")
    return logits


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_random_cancellations_lose_duplicate_or_mix_no_tokens(llm: LLM, served: AsyncLLM, count: int) -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(1, 300) for _ in range(draw.randint(1, 24))] for _ in range(count)]
    wishes = [SamplingParams(temperature=0, max_tokens=draw.randint(1, 16), ignore_eos=True) for _ in prompts]
    alone = llm.generate(prompts, wishes, use_tqdm=False)
    plans = [draw.choice(["read", "read", "close", "cancel", "abort"]) for _ in prompts]
    kinds = [RequestOutputKind.DELTA if number % 2 else RequestOutputKind.CUMULATIVE for number in range(count)]

    async def one(number: int) -> tuple[list[int], str | None, list[list[int]]]:
        """The tokens of a request, how it ended, and the tokens of each of its outputs."""
        params = SamplingParams(temperature=0, max_tokens=wishes[number].max_tokens, ignore_eos=True, output_kind=kinds[number])
        await asyncio.sleep(random.Random(number).random() * 0.2)
        most, pieces, reason = random.Random(number).randint(1, 8), [], None
        stream = served.generate(prompts[number], params, f"r{number}")
        async for output in stream:
            assert output.request_id == f"r{number}"
            assert output.prompt_token_ids == prompts[number]
            (completion,) = output.outputs
            pieces.append(completion.token_ids)
            reason = completion.finish_reason
            if plans[number] != "read" and len(pieces) == most:
                if plans[number] == "close":
                    await stream.aclose()
                elif plans[number] == "cancel":
                    asyncio.current_task().cancel()  # type: ignore[union-attr]
                    await asyncio.sleep(0)
                else:
                    await served.abort(f"r{number}")
        tokens = list(chain(*pieces)) if kinds[number] is RequestOutputKind.DELTA else pieces[-1]
        return tokens, reason, pieces

    ended = {"read": 0, "close": 0, "cancel": 0, "abort": 0}
    for number, result in enumerate(await asyncio.gather(*map(one, range(count)), return_exceptions=True)):
        whole = alone[number].outputs[0].token_ids
        if isinstance(result, BaseException):
            assert isinstance(result, asyncio.CancelledError), result
            assert plans[number] == "cancel"
            ended["cancel"] += 1
            continue
        tokens, reason, pieces = result
        assert tokens == whole[: len(tokens)]
        assert reason in ("length", "abort", None)
        assert reason is not None or plans[number] == "close"
        assert reason != "length" or tokens == whole
        assert reason != "abort" or plans[number] == "abort"
        if kinds[number] is RequestOutputKind.CUMULATIVE:
            assert [len(each) for each in pieces] == sorted(
                {len(each) for each in pieces} if reason != "abort" else map(len, pieces)
            )
        ended["read" if reason == "length" else plans[number]] += 1
    assert min(ended.values()) >= count // 40, ended


async def test_output_kind_selects_cumulative_delta_or_final(llm: LLM, served: AsyncLLM) -> None:
    prompt = [1, 2, 3]
    params = {
        kind: SamplingParams(n=2, temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, output_kind=kind)
        for kind in RequestOutputKind
    }
    (whole,) = llm.generate([prompt], params[RequestOutputKind.FINAL_ONLY], use_tqdm=False)
    read_all = await asyncio.gather(*(read(served.generate(prompt, params[kind])) for kind in RequestOutputKind))
    found = dict(zip(RequestOutputKind, read_all, strict=True))
    (last,) = found[RequestOutputKind.FINAL_ONLY]
    assert plain(last) == plain(found[RequestOutputKind.CUMULATIVE][-1]) == plain(whole)
    texts = [output.outputs[0].text for output in found[RequestOutputKind.CUMULATIVE]]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    news = [completion for output in found[RequestOutputKind.DELTA] for completion in output.outputs]
    for index, completion in enumerate(whole.outputs):
        mine = [new for new in news if new.index == index]
        assert "".join(new.text for new in mine) == completion.text
        assert [token for new in mine for token in new.token_ids] == completion.token_ids
        assert [list(each) for new in mine for each in new.logprobs or ()] == [[token] for token in completion.token_ids]
        assert [new.finish_reason for new in mine if new.finish_reason] == ["length"]


async def test_bad_request_is_refused_before_anything_is_queued(llm: LLM, served: AsyncLLM) -> None:
    bad = {
        "prompt 0: needs at most 255 tokens": ([1] * 300, GREEDY, None, 0),
        "at least one token": ([], GREEDY, None, 0),
        "prompt 0: needs token ids from 0 to 299": ([300], GREEDY, None, 0),
        "max_logprobs=20": ([1], SamplingParams(logprobs=21), None, 0),
        "best_of": ([1], SamplingParams(best_of=2), None, 0),
        "request_id: needs an id not in use": ([1], GREEDY, "taken", 0),
        "priority: needs a whole number": ([1], GREEDY, None, 0.5),
        "logits_processors: needs a function, or a name": ([1], SamplingParams(logits_processors=["nobody's"]), None, 0),
    }
    good = asyncio.create_task(read(served.generate([1, 2, 3], LONG, "taken")))
    await asyncio.sleep(0.01)
    for match, (prompt, params, request_id, priority) in bad.items():
        with pytest.raises(ConfigError, match=match):
            await read(served.generate(prompt, params, request_id, priority=priority))  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="prompt 1: needs at least one token"):
        await served.check([[1], []], GREEDY)
    assert (await good)[-1].outputs[0].finish_reason == "length"
    assert (await read(served.generate([1], GREEDY, "taken")))[-1].finished, "an id is free once its request has ended"


async def test_a_fault_inside_a_request_ends_it_alone(llm: LLM, served: AsyncLLM) -> None:
    (alone,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    wrong = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="(a"))
    raises = SamplingParams(temperature=0, max_tokens=8, logits_processors=[_raising])
    ended = await asyncio.gather(*(read(served.generate([1, 2, 3], params)) for params in (GREEDY, wrong, raises)))
    good, uncompiled, raised = (outputs[-1] for outputs in ended)
    assert plain(good) == plain(alone)
    for output, words in ((uncompiled, "regular expression"), (raised, "no such row")):
        assert output.outputs[0].finish_reason == "error"
        assert words in str(output.outputs[0].error)


def test_chat_renders_the_template_off_the_loop(llm: LLM, served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "the quick fox"}]
    (whole,) = llm.chat(messages, GREEDY, use_tqdm=False)
    threads: list[str] = []
    tokenizer = served.model.tokenizer
    render = tokenizer.apply_chat_template

    def noted(*given: object, **options: object) -> object:
        threads.append(threading.current_thread().name)
        return render(*given, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", noted)
    outputs = asyncio.run(read(served.chat(messages, GREEDY)))
    assert plain(outputs[-1]) == plain(whole)
    assert outputs[-1].prompt == whole.prompt
    assert threads[0].startswith("headway-tokenise")


async def test_llm_and_async_llm_share_an_engine(llm: LLM, served: AsyncLLM) -> None:
    (alone,) = llm.generate([[7, 8, 9]], LONG, use_tqdm=False)
    before = llm.engine.stats.snapshot()
    stream = asyncio.create_task(read(served.generate([7, 8, 9], LONG)))
    mine, streamed = await asyncio.to_thread(llm.generate, [[7, 8, 9]], LONG, False), await stream
    assert plain(mine[0]) == plain(streamed[-1]) == plain(alone)
    assert (llm.engine.stats - before).num_steps < 110, "they never ran in one batch"


async def test_a_fault_in_the_engine_ends_every_stream_with_the_cause(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    served = AsyncLLM.from_llm(llm)
    tasks = [asyncio.create_task(read(served.generate([1, number], LONG))) for number in range(1, 4)]
    while served.num_running < 3 and not any(task.done() for task in tasks):
        await asyncio.sleep(0.001)
    monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)
    for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10):
        assert isinstance(result, EngineDeadError)
        assert isinstance(result.__cause__, ZeroDivisionError)
    assert (served.errored, served.is_running) == (True, False)
    with pytest.raises(EngineDeadError, match="division by zero"):
        await read(served.generate([1], GREEDY))
    with pytest.raises(EngineDeadError, match="division by zero"):
        await served.stats()
    monkeypatch.undo()
    served.shutdown()
    llm.engine.abort_all()
    assert not llm.engine.has_unfinished


async def test_draining_lets_requests_end_and_a_shutdown_ends_them(llm: LLM) -> None:
    async with AsyncLLM.from_llm(llm) as served:
        ends = asyncio.create_task(read(served.generate([1, 2, 3], GREEDY)))
        await asyncio.sleep(0.01)
        assert await served.drain(timeout=10)
        assert (await ends)[-1].outputs[0].finish_reason == "length"
        with pytest.raises(EngineDeadError, match="drained"):
            await read(served.generate([1], GREEDY))
    async with AsyncLLM.from_llm(llm) as served:
        cut = asyncio.create_task(read(served.generate([1, 2, 3], LONG)))
        while not served.num_running:
            await asyncio.sleep(0.001)
        assert not await served.drain(timeout=0)
    assert (await cut)[-1].outputs[0].finish_reason == "abort"
    assert (served.is_running, served.errored) == (False, False)
    assert not llm.engine.has_unfinished


def test_requests_of_a_closed_event_loop_are_aborted(llm: LLM, served: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    (request,) = loop.run_until_complete(served.check([[1, 2, 3]], LONG))

    async def begin() -> None:
        served.submit(request)

    loop.run_until_complete(begin())
    loop.close()

    async def wait() -> None:
        while served.num_unfinished_requests or served.num_running:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(wait(), 10))


async def test_a_reused_request_id_gets_no_token_of_the_earlier_request(llm: LLM, served: AsyncLLM) -> None:
    """A request may end, by a stop text or because it was closed, during a step that brings another token."""
    prompts = [[number, 9, 2] for number in range(1, 21)]
    alone = [output.outputs[0] for output in llm.generate(prompts, LONG, use_tqdm=False)]

    async def stopped(prompt: list[int], stop: str) -> str:
        params = replace(LONG, stop=stop, output_kind=RequestOutputKind.DELTA)
        return "".join([output.outputs[0].text async for output in served.generate(prompt, params, "mine")])

    async def given_up(prompt: list[int]) -> list[int]:
        async with aclosing(served.generate(prompt, LONG, "mine")) as outputs:
            async for output in outputs:
                if len(output.outputs[0].token_ids) >= 3:
                    return output.outputs[0].token_ids
        return []

    for prompt, whole in zip(prompts, alone, strict=True):
        stop = whole.text[5:8]
        assert await stopped(prompt, stop) == whole.text[: whole.text.index(stop)]
        found = await given_up(prompt)
        assert found == whole.token_ids[: len(found)]


def test_an_async_llm_that_is_dropped_ends_its_thread(llm: LLM) -> None:
    served = AsyncLLM.from_llm(llm)
    asyncio.run(read(served.generate([1, 2, 3], GREEDY)))
    left, thread = ref(served), cast("EngineThread", served.host).thread
    del served
    gc.collect()
    thread.join(10)
    assert (left(), thread.is_alive()) == (None, False)


async def test_stats_are_read_between_two_steps(served: AsyncLLM) -> None:
    before = await served.stats()
    stream = served.generate([1, 2, 3], LONG)
    await anext(stream)
    during = await served.stats()
    assert (before.num_running, during.num_running, during.num_waiting) == (0, 1, 0)
    assert during.num_used_blocks > before.num_used_blocks == 0
    assert during.totals.num_steps > before.totals.num_steps
    await stream.aclose()


def test_resetting_the_prefix_cache_forgets_what_is_on_disk(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(served.engine.blocks, "keeper", SimpleNamespace(forgotten=forgotten.append))
    assert asyncio.run(served.reset_prefix_cache())
    assert forgotten == [True]


async def test_freed_memory_is_given_back_once_when_there_is_no_work(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[Thread] = []  # hosts of other tests give memory back as well
    monkeypatch.setattr("headway.hosting.host.trim_memory", lambda: callers.append(current_thread()))
    monkeypatch.setattr("headway.hosting.host._IDLE", 0.3)  # far above what a loaded machine puts between two calls
    async with AsyncLLM.from_llm(llm) as served:
        await read(served.generate([1, 2, 3], GREEDY))
        await served.stats()  # the last call: from here on there is nothing to do
        callers.clear()
        thread = cast("EngineThread", served.host).thread
        while thread not in callers:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.7)
        assert callers.count(thread) == 1
        callers.clear()
    assert current_thread() in callers  # and when the thread has ended
