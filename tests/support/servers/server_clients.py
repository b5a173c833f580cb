"""Clients of a server, many at once, some of whom go away."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
from itertools import pairwise
from typing import Any

import httpx

PLANS = ("read", "read", "whole", "close", "cancel")


class ServerError(Exception):
    """What the server answers that has met a fault."""


async def ask(http: httpx.AsyncClient, plan: str, prompt: list[int], tokens: int, draw: random.Random) -> tuple[str, int]:
    """What a client gets who reads to the end ("read", "whole"), or goes away while tokens come or before; and its [DONE]s."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": plan != "whole"}
    if plan == "whole":
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code == 500:
            raise ServerError(answer.text)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], 1
    if plan == "cancel":
        try:
            async with asyncio.timeout(draw.random() * 0.05):
                await http.post("/v1/completions", json=body)
        except TimeoutError:
            pass
        return "", 0
    text, done, most, id = "", 0, draw.randint(1, 8), None
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 500:  # before its first token
            raise ServerError(await answer.aread())
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line:
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ServerError(chunk)
                id = id or chunk["id"]
                assert chunk["id"] == id
                text += chunk["choices"][0]["text"]
                most -= 1
                if plan == "close" and not most:
                    break
    return text, done


async def ask_all(
    url: str, prompts: list[list[int]], tokens: list[int], seed: int = 0, faults: bool = False
) -> list[tuple[str, str, int]]:
    """What became of each: its plan, its text, its [DONE]s. faults: the server may answer that it has met one: "fault", "", 0."""
    draw = random.Random(seed)
    plans = [draw.choice(PLANS) for _ in prompts]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        asked = [ask(http, *each, random.Random(n)) for n, each in enumerate(zip(plans, prompts, tokens, strict=True))]
        found = await asyncio.gather(*asked, return_exceptions=True)
    ended = []
    for plan, each in zip(plans, found, strict=True):
        if faults and isinstance(each, ServerError):
            ended.append(("fault", "", 0))
        elif isinstance(each, BaseException):
            raise each
        else:
            ended.append((plan, *each))
    return ended


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
