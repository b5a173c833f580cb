"""Hundreds of clients of one server who read, leave, stall, break off and ask wrongly: no answer is another's, no block is left.

    python tests/support/servers/client_load.py MODEL --clients 500 --requests 8 --device cuda -- --load-format dummy

What follows `--` goes to `headway serve`. Prints one line; exit code 1: a wrong answer, a block that is left, or a traceback.
An answer is held to the one that the same request had alone before: in deterministic mode its tokens are the same in any batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

PLANS = {"read": 6, "whole": 4, "close": 4, "cancel": 2, "reset": 1, "half": 1, "stall": 1, "refused": 1}
"""What clients do, and how often: read a stream or a whole answer to its end, go away while tokens come or before, break the
connection, send half of a request, leave an answer unread for a while, or ask for what cannot be."""
LEAVING = ("close", "cancel", "reset", "half", "stall")
START_SECONDS = 600
IDLE_SECONDS = 60
"""Seconds after which a server without clients must have given everything back."""

Body = dict[str, Any]


def request(body: Body) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: load\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def bodies(count: int, seed: int) -> list[Body]:
    """Requests of all lengths, of which half are greedy and half are drawn by a seed."""
    draw, found = random.Random(seed), []
    for number in range(count):
        prompt = [draw.randrange(1, 300) for _ in range(draw.choice((1, 5, 16, 17, 60, 120)))]
        tokens = draw.choice((1, 2, 8, 24, 64))
        chosen = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        found.append({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **chosen})
    return found


async def tokens_of(reader: asyncio.StreamReader, most: int | None = None) -> tuple[int, list[int], bool]:
    """The status of an answer, its tokens, and whether it came to its end. most: events of a stream that are read."""
    status, tokens, events = int((await reader.readline()).split()[1]), [], 0
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            return status, tokens, True
        if line.startswith((b"data: {", b"{")):  # each event is a chunk of its own, so that no line is cut
            choices = json.loads(line.removeprefix(b"data: ")).get("choices", ())
            tokens += [token for choice in choices for token in choice.get("token_ids", ())]
            events += 1
            if not line.startswith(b"data: "):
                return status, tokens, True
        if events == most:
            break
    return status, tokens, False


async def ask(port: int, body: Body, plan: str, draw: random.Random) -> tuple[int, list[int], bool]:
    """Ask as a plan says; see `tokens_of`. The status of a client who leaves before an answer is 0."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        sent = request({**body, "stream": plan != "whole", **({"top_p": -1} if plan == "refused" else {})})
        writer.write(sent if plan != "half" else sent[: draw.randrange(1, len(sent))])
        await writer.drain()
        if plan in ("half", "cancel", "stall"):
            await asyncio.sleep(draw.random() * (1.0 if plan == "stall" else 0.1))
            return 0, [], False
        return await tokens_of(reader, draw.randint(1, 6) if plan in ("close", "reset") else None)
    finally:
        if plan == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


def is_right(plan: str, found: tuple[int, list[int], bool], expected: list[int]) -> bool:
    status, tokens, ended = found
    if plan == "refused":
        return status == 400
    if plan in ("read", "whole"):
        return (status, tokens, ended) == (200, expected, True)
    return status in (0, 200) and expected[: len(tokens)] == tokens


async def client(port: int, known: list[tuple[Body, list[int]]], count: int, seed: int) -> Counter[str]:
    """One client's requests, one after the other."""
    draw, counts = random.Random(seed), Counter[str]()
    for _ in range(count):
        (body, expected), plan = draw.choice(known), draw.choices(list(PLANS), list(PLANS.values()))[0]
        counts.update(("requests", plan, *(("aborted",) if plan in LEAVING else ())))
        try:
            found = await asyncio.wait_for(ask(port, body, plan, draw), 300)
            right = is_right(plan, found, expected)
        except (OSError, TimeoutError, ValueError, IndexError, KeyError) as error:
            found, right = repr(error), False
        if not right:
            counts["wrong answers"] += 1
            print(f"{plan}, {body}: {found} in place of {expected}", file=sys.stderr)
    return counts


async def state(port: int) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /headway/state HTTP/1.1\r\nhost: load\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return dict(json.loads(answer.partition(b"\r\n\r\n")[2]))


async def left_behind(port: int) -> int:
    """Blocks that are in use, and sequences, once there were no clients for a while."""
    ends = time.monotonic() + IDLE_SECONDS
    while True:
        now = await state(port)
        left = int(now["blocks"]["used"] + now["running"] + now["waiting"])
        if not left or time.monotonic() > ends:
            return left
        await asyncio.sleep(0.1)


async def load(port: int, clients: int, count: int, seed: int) -> Counter[str]:
    """Have clients ask a server. Returns what they met, by kind."""
    known = []
    for body in bodies(48, seed):
        status, expected, ended = await ask(port, body, "whole", random.Random(0))
        assert (status, len(expected), ended) == (200, body["max_tokens"], True), (status, expected)
        known.append((body, expected))
    found = await asyncio.gather(*(client(port, known, count, seed + number) for number in range(clients)))
    total = sum(found, Counter[str]())
    total["blocks left"] = await left_behind(port)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--requests", type=int, default=8, help="of each client")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    asked, options = parser.parse_args(given[:end]), given[end + 1 :]
    own = ["--device", asked.device, "--port", "0", "--deterministic", "--max-queue", str(2 * asked.clients)]
    command = [sys.executable, "-m", "headway", "serve", asked.model, *own, *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as errors, subprocess.Popen(command, stderr=errors) as server:
            try:
                ends = time.monotonic() + START_SECONDS
                while not (url := re.search(r"listening on http://127\.0\.0\.1:(\d+)", log.read_text())):
                    if server.poll() is not None or time.monotonic() > ends:
                        print(log.read_text(), file=sys.stderr)
                        return 1
                    time.sleep(0.1)
                began = time.monotonic()
                counts = asyncio.run(load(int(url[1]), asked.clients, asked.requests, asked.seed))
                seconds = time.monotonic() - began
            finally:
                server.terminate()
        said = log.read_text()
    faults = said.count("Traceback")
    if faults:
        print(said[-4000:], file=sys.stderr)
    told = [f"{counts[what]} {what}" for what in ("requests", "aborted", "wrong answers", "blocks left")]
    print(f"{asked.clients} clients: {', '.join(told)}, {faults} tracebacks, {seconds:.1f} s")
    return int(bool(counts["wrong answers"] or counts["blocks left"] or faults))


if __name__ == "__main__":
    sys.exit(main())
