"""The load on servers: when requests are sent, what is made of the answers, and a run against a server that answers by rule."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from statistics import mean, pstdev
from typing import Any

import pytest

from headway.bench.serve.client import Client, ServerAnswer
from headway.bench.serve.load import Length, Load, arrivals, conversations, parse_mix
from headway.bench.serve.results import Spread
from headway.bench.serve.run import Sending, ServePlan, run_cell
from headway.core.contract.errors import ConfigError
from ruled_server import PAUSE, Answers, ruled_server


@pytest.fixture
def url() -> Iterator[str]:
    with ruled_server() as found:
        yield found


def run(url: str, load: Load, plan: ServePlan, endpoint: Any = "completions", **limits: float) -> Any:
    return asyncio.run(run_cell(Client(url), load, plan, Sending("ruled", endpoint), limits))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_keep_the_rate_and_vary_as_they_are_told(burstiness: float) -> None:
    times = arrivals(4000, 8.0, burstiness)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0
    assert mean(gaps) == pytest.approx(1 / 8, rel=0.01)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrivals(3, float("inf"), 1.0) == [0, 0, 0]


def test_mixes_prefixes_and_turns() -> None:
    assert parse_mix("128/64:3, 4096/256") == [Length(128, 64, 3.0), Length(4096, 256, 1.0)]
    for wrong in ("", "128", "0/4", "8/8:0", "8/8:-1", "a/b", "8/8;9/9"):
        with pytest.raises(ConfigError, match="--mix"):
            parse_mix(wrong)
    load = Load(400, parse_mix("8/4:3,32/2"), shared_prefix=16, num_prefixes=2, turns=3)
    talks = conversations(load)
    assert talks == conversations(load)
    assert len({tuple(talk.prefix) for talk in talks}) == 2
    assert {tuple(map(len, talk.messages)) for talk in talks} == {(8, 8, 8), (32, 32, 32)}
    assert sum(talk.output_len == 4 for talk in talks) == pytest.approx(300, abs=40)


def test_times_are_those_of_the_server(url: str) -> None:
    cell = run(url, Load(6, parse_mix("5/4")), ServePlan("offline"), ttft=1e6, tpot=1e6)
    assert (cell.completed, cell.failed, cell.prompt_tokens, cell.output_tokens) == (6, 0, 30, 24)
    assert 1e3 * PAUSE <= cell.time_to_first_token_ms.p50 < 4e3 * PAUSE
    assert 1e3 * PAUSE * 0.9 <= cell.time_per_output_token_ms.p50 < 2e3 * PAUSE
    assert cell.end_to_end_ms.mean >= 4e3 * PAUSE
    assert cell.goodput == pytest.approx(cell.requests_per_second)
    none = run(url, Load(2, parse_mix("5/4")), ServePlan("offline"), e2e=PAUSE)
    assert (none.goodput, none.good_share) == (0, 0)


def test_naive_is_one_by_one_and_online_follows_the_clock(url: str) -> None:
    assert run(url, Load(3, parse_mix("5/2")), ServePlan("naive")).seconds >= 3 * 2 * PAUSE
    online = run(url, Load(8, parse_mix("5/2")), ServePlan("online", 40.0))
    assert online.rate == 40
    assert online.seconds >= 7 / 40 * 0.5
    assert online.lateness_ms.p50 < 100


def test_a_conversation_grows_by_its_answers(url: str) -> None:
    run(url, Load(1, parse_mix("5/2"), shared_prefix=3, turns=3), ServePlan("offline"))
    prompts = [body["prompt"] for body in Answers.asked]
    assert [len(prompt) for prompt in prompts] == [8, 15, 22]
    assert prompts[1][:8] == prompts[0]
    assert prompts[1][8:10] == [100, 101]
    chat = run(url, Load(1, parse_mix("5/2"), shared_prefix=3, turns=2), ServePlan("offline"), "chat")
    assert [each["role"] for each in Answers.asked[-1]["messages"]] == ["system", "user", "assistant", "user"]
    assert chat.output_tokens == 4


def test_failures_are_counted_by_reason_and_have_no_times(url: str) -> None:
    async def ask() -> tuple[ServerAnswer, ServerAnswer]:
        nobody = Client("http://127.0.0.1:9")
        return await Client(url).ask("/v1/completions", {"prompt": [7], "max_tokens": 1}), await nobody.ask("/v1/models")

    refused, unreachable = asyncio.run(ask())
    assert (refused.status, refused.error[:10]) == (429, "status 429")
    assert "refused" in unreachable.error.lower() or "Connect" in unreachable.error
    cell = run("http://127.0.0.1:9", Load(3, parse_mix("5/2")), ServePlan("offline"), ttft=5.0)
    assert (cell.completed, cell.failed, sum(cell.errors.values()), cell.good_share) == (0, 3, 3, 0)
    assert cell.time_to_first_token_ms is None


def test_quantiles() -> None:
    assert Spread.of([]) is None
    found = Spread.of([0.001 * each for each in range(101)])
    assert (found.mean, found.p50, found.p95, found.p99) == pytest.approx((50, 50, 95, 99))
