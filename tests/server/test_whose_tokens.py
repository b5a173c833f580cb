"""Many clients before a device that knows whose token each slot of the cache holds: every answer is its own, to the token."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from fake_device import STOP, VOCABULARY, WORDS, FakeDevice, History
from headway import LLM
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import Capacity
from headway.core.engine.data.groups import CacheGroup, PageFormat
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.request_limits import RequestLimits
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.sampler import seed_of
from headway.hosting.driver import EngineDriver
from server_clients import PLANS, ask
from server_thread import Running, running

MAX_MODEL_LEN = 96


class World:
    """Requests of which it is known what must come back: the seed decides."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.draw = Random(seed)
        self.histories: dict[int, History] = {}
        self.seeds = count(8, 8)
        self.stems = [[self.draw.randrange(WORDS) for _ in range(60)] for _ in range(4)]
        pages = PageFormat((CacheGroup(8),), 8, page_bytes=1)
        capacity = Capacity(PoolSize(60, pages, 48), 24, MAX_MODEL_LEN)  # five of the longest: sequences are preempted
        self.device = FakeDevice(capacity, self.histories, Random(seed))
        config = EngineConfig(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=48, max_num_seqs=24, async_scheduling=True)
        limits = RequestLimits(MAX_MODEL_LEN, VOCABULARY, "")
        self.engine = EngineLoop(self.device, config, limits, frozenset({STOP}))
        self.device.selector, self.device.selection = llm.engine.executor.selector, llm.engine.selection  # which the page asks
        assembly = llm.driver.assembly._replace(engine=cast("Any", self.engine))
        self.llm = cast("LLM", SimpleNamespace(driver=EngineDriver(assembly)))

    def request(self) -> dict[str, Any]:
        """The body of one; many prompts begin alike."""
        draw, seed, n = self.draw, next(self.seeds), self.draw.choice([1, 1, 1, 2, 3])
        stem = draw.choice(self.stems)
        prompt = [*stem[: draw.randint(0, 60)], *(draw.randrange(WORDS) for _ in range(draw.randint(1, 20)))]
        for index in range(n):
            self.histories[seed_of(seed, index)] = History(prompt, seed + index, MAX_MODEL_LEN)
        asked = {"prompt": prompt, "seed": seed, "n": n, "max_tokens": draw.randint(1, 50), "return_token_ids": True}
        return {**asked, "temperature": 0.7, "ignore_eos": draw.random() < 0.5, "model": "tiny"}

    def expected(self, body: dict[str, Any]) -> list[list[int]]:
        """The tokens of each of its completions."""
        start = len(body["prompt"])
        found = []
        for index in range(body["n"]):
            own = self.histories[seed_of(body["seed"], index)].tokens[start:][: body["max_tokens"]].tolist()
            found.append(own if body["ignore_eos"] or STOP not in own else own[: own.index(STOP) + 1])
        return found


@pytest.fixture
def world(llm: LLM) -> Iterator[tuple[World, Running]]:
    made = World(llm, 0)
    with running(made.llm) as served:
        yield made, served
    engine = made.engine
    assert engine.blocks.num_free == engine.blocks.num_pages


@pytest.mark.parametrize("number", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_concurrent_answers_hold_their_own_tokens(world: tuple[World, Running], number: int) -> None:
    made, served = world
    plans: Counter[str] = Counter()

    async def one(http: httpx.AsyncClient, room: asyncio.Semaphore) -> None:
        async with room:
            body, plan, draw = made.request(), made.draw.choice(PLANS), Random(made.draw.random())
            tokens, ended = await ask(http, plan, body, draw)
        whole = made.expected(body)
        assert tokens == whole if ended else all(own == all_[: len(own)] for own, all_ in zip(tokens, whole, strict=True))
        assert ended or plan in ("close", "cancel")
        plans[plan] += 1

    async def everybody() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as http:
            room = asyncio.Semaphore(100)
            await asyncio.gather(*(one(http, room) for _ in range(number)))

    asyncio.run(everybody())
    served.wait_idle(30)
    stats = made.engine.stats
    assert min(plans[plan] for plan in PLANS) >= 1
    assert min(stats.num_preemptions, stats.num_cached_tokens) > 0
    print(plans, stats.num_steps, "steps;", stats.num_preemptions, "preemptions;", stats.num_cached_tokens, "tokens found")
