"""Clients of a server, many at once, some of whom go away; reading asynchronous streams."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from headway import RequestOutput
from headway.core.contract.text_plugins import ChatPiece
from headway.outputs import CompletionOutput
from headway.server.openai.chat import ChatAnswer

PLANS = ("read", "read", "whole", "whole", "close", "cancel")


class ServerError(Exception):
    """Response of a server that has met a fault."""


async def ask(http: httpx.AsyncClient, plan: str, body: dict[str, Any], draw: random.Random) -> tuple[list[list[int]], bool]:
    """The tokens of each completion that a client gets who reads to the end ("read", "whole"), or goes away while they come
    ("close") or at any time ("cancel"); and whether that was all. body: asks for `n` completions and their token ids."""
    found: list[list[int]] = [[] for _ in range(body["n"])]
    most = draw.randint(1, 10) if plan == "close" else -1
    try:
        async with (
            asyncio.timeout(draw.random() * 0.3 if plan == "cancel" else None),
            http.stream("POST", "/v1/completions", json={**body, "stream": plan != "whole"}) as answer,
        ):
            if answer.status_code != 200:
                text = (await answer.aread()).decode()
                assert answer.status_code == 500, text
                raise ServerError(text)
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return found, True
                chunk = json.loads(line.removeprefix("data: ") or "{}")
                if "error" in chunk:
                    raise ServerError(chunk)
                for choice in chunk.get("choices", ()):
                    found[choice["index"]] += choice.get("token_ids", ())
                    most -= 1
                if most == 0 or plan == "whole":
                    return found, plan == "whole"
    except TimeoutError:
        assert plan == "cancel"
    return found, False


async def ask_all(url: str, prompts: list[list[int]], tokens: list[int], seed: int = 0, faults: bool = False) -> list[str]:
    """The plan of each client; one who reads to the end has got all. faults: the server may answer that it has met one."""
    draw, limits = random.Random(seed), httpx.Limits(max_connections=None, max_keepalive_connections=50)
    plans = [draw.choice(PLANS) for _ in prompts]
    usual = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "n": 1}

    async def one(http: httpx.AsyncClient, number: int) -> str:
        body = {**usual, "prompt": prompts[number], "max_tokens": tokens[number]}
        try:
            found, ended = await ask(http, plans[number], body, random.Random(number))
        except ServerError:
            assert faults
            return "fault"
        assert len(found[0]) == tokens[number] if ended else plans[number] in ("close", "cancel")
        return plans[number]

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        return list(await asyncio.gather(*(one(http, number) for number in range(len(prompts)))))


def work(count: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(1, 300) for _ in range(draw.randint(1, 24))] for _ in range(count)]
    return prompts, [draw.randint(1, 24) for _ in prompts]


def posted(call: str) -> Any:
    """Send the request that a curl command in a shell would send; return the JSON of its answer."""
    _, url, *options = shlex.split(call)
    headers = dict(value.split(": ", 1) for flag, value in pairwise(options) if flag == "-H")
    (body,) = [value for flag, value in pairwise(options) if flag == "-d"]
    return httpx.post(url, content=body, headers=headers, timeout=60).raise_for_status().json()


def chat(http: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The greedy answer of eight tokens to a conversation."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    return dict(http.post("/v1/chat/completions", json=body).json())


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of the events of a stream, each of which is named by its type."""
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def always_read(monkeypatch: pytest.MonkeyPatch, pieces: list[ChatPiece]) -> None:
    """Replace the parser by one that finds these text segments and calls in every response."""

    def read(answer: ChatAnswer, index: int, new: CompletionOutput) -> tuple[list[ChatPiece], str | None]:
        return (pieces, "tool_calls") if new.finish_reason else ([], None)

    monkeypatch.setattr(ChatAnswer, "read", read)


async def read(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in stream]


def plain(output: RequestOutput) -> list[tuple[int, str, list[int], str | None]]:
    """Completions without their log-probabilities, whose last bits depend on the batch."""
    return [(each.index, each.text, each.token_ids, each.finish_reason) for each in output.outputs]
