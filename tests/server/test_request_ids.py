"""Ids that clients and proxies choose, in answers, at the operator's paths and in headers; and each answer's own tokens."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import Random
from threading import Event
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
from headway.server.options import ServerOptions
from server_clients import PLANS, ask
from server_thread import Running, running

TEXT, CHAT, MESSAGES, TOKENS = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"
PROMPT = {"prompt": "the quick", "max_tokens": 2, "temperature": 0}
CONVERSATION = {"messages": [{"role": "user", "content": "the quick"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [(TEXT, PROMPT, "cmpl-abc-1"), (CHAT, CONVERSATION, "chatcmpl-abc-1"), (MESSAGES, CONVERSATION, "msg_abc-1")],
)
def test_the_header_is_what_an_id_is_made_of(served: Running, http: httpx.Client, path: str, body: Any, wanted: str) -> None:
    headers = {"X-Request-Id": "abc-1"}
    for _ in range(2):  # the id of an answer that has ended may come again
        answer = http.post(path, json={**body, "request_id": "other"}, headers=headers)
        assert answer.json()["id"] == wanted
        assert "x-request-id" not in answer.headers
    lines = http.post(path, json={**body, "stream": True}, headers=headers).text.splitlines()
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert wanted in {each.get("id") or each["message"]["id"] for each in told if "id" in each or "message" in each}


def test_a_body_names_its_request_where_no_header_does(served: Running, http: httpx.Client) -> None:
    assert http.post(TEXT, json={**PROMPT, "request_id": "mine"}).json()["id"] == "cmpl-mine"
    assert http.post(CHAT, json={**CONVERSATION, "request_id": "mine"}).json()["id"] == "chatcmpl-mine"
    first, second = (http.post(TEXT, json=PROMPT, headers={"X-Request-Id": ""}).json()["id"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize("name", ["a" * 257, "caf\u00e9"])
def test_a_name_that_no_header_carries_is_refused(served: Running, http: httpx.Client, name: str) -> None:
    for sent in ({"json": {**PROMPT, "request_id": name}}, {"json": PROMPT, "headers": {"X-Request-Id": name.encode()}}):
        answer = http.post(TEXT, **sent)
        assert answer.status_code == 400
        assert "request" in answer.json()["error"]["message"].partition(": needs at most 256 printable")[0].lower()


def test_requests_of_one_name_run_beside_each_other_and_are_ended_together(llm: LLM) -> None:
    body = {**PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with running(llm, ServerOptions(operator_paths=True)) as own, ThreadPoolExecutor(3) as threads:

        def stream(begun: Event) -> tuple[int, str]:
            with httpx.stream("POST", own.url + TEXT, json=body, headers={"X-Request-Id": "twin"}, timeout=30) as answer:
                parts = []
                for part in answer.iter_text():
                    parts.append(part)
                    begun.set()
                return answer.status_code, "".join(parts)

        begun = [Event() for _ in range(2)]
        both = [threads.submit(stream, each) for each in begun]
        assert all(each.wait(20) for each in begun)
        assert own.llm.num_unfinished_requests == 2
        assert httpx.post(f"{own.url}/abort_requests", json={"request_ids": ["cmpl-twin"]}).status_code == 200
        for status, text in (each.result(20) for each in both):
            assert status == 200
            assert '"id":"cmpl-twin"' in text
            assert '"code":"aborted"' in text


def test_token_ids_are_answered_under_the_callers_id(llm: LLM) -> None:
    ids, wanted = llm.tokenizer("the quick")["input_ids"], {"max_tokens": 400, "ignore_eos": True}
    body = {"request_id": "mine", "token_ids": ids, "sampling_params": wanted}
    with running(llm, ServerOptions(operator_paths=True)) as own, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(httpx.post, own.url + TOKENS, json=body, timeout=30)
        while not own.service.running:
            assert not waiting.done()
        assert httpx.post(f"{own.url}/abort_requests", json={"request_ids": ["mine"]}).status_code == 200
        assert waiting.result(20).status_code == 503
        short = {**body, "sampling_params": {"max_tokens": 1}}
        assert httpx.post(own.url + TOKENS, json=short).json()["request_id"] == "mine"


def test_answers_have_the_header_where_it_is_asked_for(llm: LLM) -> None:
    options = ServerOptions(served_model_names=("tiny",), enable_request_id_headers=True, api_key="secret")
    with running(llm, options) as own, httpx.Client(base_url=own.url, timeout=30) as http:
        key = {"Authorization": "Bearer secret"}
        made = http.post(TEXT, json=PROMPT, headers=key)
        assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"
        assert http.post(TEXT, json=PROMPT, headers={**key, "X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
        refused = http.post(TEXT, json=PROMPT, headers={"X-Request-Id": "abc"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (401, "abc")
        assert http.get("/health").headers["x-request-id"] != http.get("/health").headers["x-request-id"]


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
async def test_concurrent_answers_hold_their_own_tokens(world: tuple[World, Running], number: int) -> None:
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

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as http:
        room = asyncio.Semaphore(100)
        await asyncio.gather(*(one(http, room) for _ in range(number)))
    served.wait_idle(30)
    stats = made.engine.stats
    assert min(plans[plan] for plan in PLANS) >= 1
    assert min(stats.num_preemptions, stats.num_cached_tokens) > 0
    print(plans, stats.num_steps, "steps;", stats.num_preemptions, "preemptions;", stats.num_cached_tokens, "tokens found")
