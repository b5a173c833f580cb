"""Ends of an AsyncLLM, its streams and its thread, of which nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing
from dataclasses import replace
from threading import Thread, current_thread
from types import SimpleNamespace
from typing import cast
from weakref import ref

import pytest

from headway import LLM, AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams
from headway.hosting.host import EngineThread
from server_clients import read

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


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
