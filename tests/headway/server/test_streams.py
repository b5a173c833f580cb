"""Many clients at once, some of whom go away: nothing is lost, doubled or mixed up, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from headway import LLM, SamplingParams
from sandbox import save_tiny_model
from serving import Running

PLANS = ("read", "read", "whole", "close", "cancel")


async def ask(http: httpx.AsyncClient, plan: str, prompt: list[int], tokens: int, draw: random.Random) -> tuple[str, int]:
    """What a client gets who reads to the end ("read", "whole"), or goes away while tokens come or before; and its [DONE]s."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": plan != "whole"}
    if plan == "whole":
        answer = await http.post("/v1/completions", json=body)
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
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line:
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                id = id or chunk["id"]
                assert chunk["id"] == id
                text += chunk["choices"][0]["text"]
                most -= 1
                if plan == "close" and not most:
                    break
    return text, done


async def ask_all(url: str, prompts: list[list[int]], tokens: list[int], seed: int = 0) -> list[tuple[str, str, int]]:
    """What became of each: its plan, its text, its [DONE]s."""
    draw = random.Random(seed)
    plans = [draw.choice(PLANS) for _ in prompts]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        asked = [ask(http, *each, random.Random(n)) for n, each in enumerate(zip(plans, prompts, tokens, strict=True))]
        return [(plan, *found) for plan, found in zip(plans, await asyncio.gather(*asked), strict=True)]


def work(count: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(1, 300) for _ in range(draw.randint(1, 24))] for _ in range(count)]
    return prompts, [draw.randint(1, 24) for _ in prompts]


@pytest.mark.parametrize("count", [24, pytest.param(300, marks=pytest.mark.slow)])
def test_streams_with_random_aborts_are_neither_lost_nor_doubled_nor_mixed_up(llm: LLM, served: Running, count: int) -> None:
    prompts, tokens = work(count)
    params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in tokens]
    alone = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    found = asyncio.run(ask_all(served.url, prompts, tokens))
    ended: Counter[str] = Counter()
    for (plan, text, done), whole in zip(found, alone, strict=True):
        assert whole.startswith(text)
        if plan in ("read", "whole"):
            assert (text, done) == (whole, 1)
        else:
            assert done == 0 or text == whole
        ended[plan] += 1
    assert min(ended[plan] for plan in PLANS) >= 1
    served.wait_idle(30)


@pytest.mark.slow
def test_the_command_serves_for_a_while_in_the_same_memory_and_stops_when_told(tmp_path: Path) -> None:
    """HEADWAY_SOAK_SECONDS=300 is the long form.

    Steps are small, because torch keeps about 1 MiB for each number of tokens that a CPU's products have met, with a server or
    without: 300 requests at once would meet new ones for many minutes.
    """
    seconds = float(os.environ.get("HEADWAY_SOAK_SECONDS", "40"))
    folder = save_tiny_model(tmp_path / "model", chat=True)
    options = ("--port", "0", "--num-threads", "1", "--kv-cache-memory", "8MiB", "--no-autotune")
    options = (*options, "--max-num-seqs", "16", "--max-num-batched-tokens", "32")
    command = [sys.executable, "-m", "headway", "serve", str(folder), *options]
    log = (tmp_path / "log").open("w+")
    with subprocess.Popen(command, stderr=log, env={**os.environ, "COLUMNS": "300"}) as process:
        try:
            ends = time.monotonic() + 120
            while not (url := re.search(r"listening on (http://127\.0\.0\.1:\d+)", (tmp_path / "log").read_text())):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < ends
                time.sleep(0.1)
            server, sizes, rounds = psutil.Process(process.pid), [], 0
            ends = time.monotonic() + seconds
            while time.monotonic() < ends or rounds < 6:
                for plan, _, done in asyncio.run(ask_all(url[1], *work(300, rounds), rounds)):
                    assert done == (plan in ("read", "whole")) or plan == "close"
                rounds += 1
                sizes.append(server.memory_info().rss / 2**20)
            half = len(sizes) // 2
            print(f"{rounds} rounds of 300 requests; MiB after each: {[round(size) for size in sizes]}")
            assert max(sizes[half:]) - max(sizes[:half]) < 12, sizes
            page = httpx.get(f"{url[1]}/metrics").text
            for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                assert re.search(rf"vllm:{gauge}\{{.*\}} 0.0", page), gauge
            process.send_signal(signal.SIGTERM)
            process.wait(20)
        finally:
            process.kill()
            log.close()
