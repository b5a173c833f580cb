"""What the server itself costs: streams over an engine that takes no time to think.

    python -m headway.bench.studies.servers.overhead --streams 64 --tokens 500 --step-ms 2.3
    python -m headway.bench.studies.servers.overhead --streams 16 --tokens 4 --step-ms 2 --prompt-ms 1.6 --rounds 50

A stand-in for the engine gives every stream a token at a fixed rate, in one call per step as the real one does; a client in
another process reads all streams and counts. The stand-in has a process of its own, as the engine of a server has, or with
`--in-thread` one of the server's. Tells tokens a second, what they are of those that the stand-in's steps allow, how
much later than the stand-in's own first token clients see theirs, and the CPU time of the server's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, TypeVar

from headway.async_llm import AsyncLLM
from headway.core.engine.data.request_limits import CheckedRequest, RequestLimits
from headway.core.engine.data.stats import EngineSnapshot, EngineStats, StepClock
from headway.core.engine.data.step import OutputDelta
from headway.hosting.driver import EngineDriver
from headway.hosting.process_host import EngineProcess
from headway.hosting.thread_host import EngineThread
from headway.models.loader import read_tokenizer
from headway.requests.rules import RequestRules

T = TypeVar("T")


class PacedEngine:
    """Gives every request a token a step, and a step lasts as long as it is told to."""

    def __init__(
        self, vocab_size: int, step_seconds: float, work_seconds: float, prompt_seconds: float = 0.0, launches: int = 1
    ) -> None:
        """work_seconds: of a step, that it computes in Python; the rest it waits, as for a device. prompt_seconds: that a step
        takes longer for each prompt in it. launches: times that its work lets the interpreter's lock go."""
        self.limits = RequestLimits(32768, vocab_size, "")
        pool = SimpleNamespace(page_format=SimpleNamespace(block_size=16), num_pages=1)
        self.capacity = SimpleNamespace(pool=pool, max_num_seqs=4096)
        self.scheduler = SimpleNamespace(waiting=[], running=[])
        self.selection = "a stand-in"
        self.executor = SimpleNamespace(call_when_lost=lambda tell: None, shutdown=lambda: None)
        self.stats = EngineStats()
        self.clock = StepClock(self.stats)
        self.step_seconds = step_seconds
        self._work = work_seconds
        self._prompt = prompt_seconds
        self._launches = launches
        self._num_new = 0
        self._live: dict[str, list[int]] = {}
        self._due = 0.0
        self.num_steps = 0
        self.late_seconds = 0.0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request runs."""
        return bool(self._live)

    def add_request(self, request_id: str, request: CheckedRequest) -> None:
        """Begin a request."""
        self._live[request_id] = [request.params.max_tokens or 16, len(request.prompt_token_ids)]
        self._num_new += 1

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request."""
        self._live.pop(request_id, None)

    def step(self) -> list[OutputDelta]:
        """A token for everybody."""
        began = time.perf_counter()
        for _ in range(self._launches):
            ends = time.perf_counter() + self._work / self._launches
            while time.perf_counter() < ends:
                pass
            os.stat("/")  # which lets the lock go for a moment, as the launch of a kernel does
        self._due = max(self._due, began - self.step_seconds) + self.step_seconds + self._prompt * self._num_new
        self._num_new = 0
        time.sleep(max(self._due - time.perf_counter(), 0.0))
        self.num_steps += 1
        deltas = []
        for request_id, state in list(self._live.items()):
            state[0] -= 1
            token = 40 + (state[0] * 7) % 200
            deltas.append(OutputDelta(request_id, 0, (token,), None if state[0] else "length", admitted_time=began))
            if not state[0]:
                del self._live[request_id]
        return deltas

    def first_seconds(self, num_prompts: int) -> float:
        """Seconds of a step with these prompts, after which each has its first token."""
        return self.step_seconds + self._prompt * num_prompts

    def snapshot(self) -> EngineSnapshot:
        """A snapshot of an engine that holds nothing."""
        return EngineSnapshot(time.perf_counter(), len(self._live), 0, 1, 0, 0, self.stats)


def paced_driver(folder: Path | None, step_seconds: float, work_seconds: float, *others: Any) -> EngineDriver:
    """A PacedEngine as an engine's process has one. folder: of a tokenizer; None for token ids. others: as PacedEngine's."""
    tokenizer = None if folder is None else read_tokenizer(folder)
    files = folder or Path("/nonexistent")
    parts = {"folder": files, "tokenizer": tokenizer, "tokenizer_folder": folder}
    model = SimpleNamespace(name="paced", eos_token_ids=(), rounding="", **parts)
    engine = PacedEngine(1000 if tokenizer is None else len(tokenizer), step_seconds, work_seconds, *others)
    device = SimpleNamespace(type="cpu")
    assembly: Any = SimpleNamespace(model=model, engine=engine, stats_log=None, device=device, rules=RequestRules())
    return EngineDriver(assembly)


def _steps(engine: Any) -> int:
    return int(engine.num_steps)


def _step_seconds(engine: Any) -> float:
    return float(engine.step_seconds)


def _first_seconds(engine: Any, streams: int) -> float:
    return float(engine.first_seconds(streams))


CLIENT = """
import json, selectors, socket, sys, time
port, streams, tokens, rounds, prompt = map(int, sys.argv[1:])
body = json.dumps({"prompt": [1] * prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\n"
head += b"content-length: %d\\r\\n\\r\\n" % len(body)
found = {"seconds": 0.0, "chunks": 0, "bytes": 0, "first": []}
for _ in range(rounds):
    chosen, sent, first = selectors.DefaultSelector(), {}, {}
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        chosen.register(sock, selectors.EVENT_READ); sent[sock] = 0.0
    for sock in sent: sent[sock] = time.perf_counter(); sock.sendall(head + body)
    left = streams
    while left:
        for key, _ in chosen.select():
            data = key.fileobj.recv(1 << 20)
            new = data.count(b"data: {"); found["chunks"] += new; found["bytes"] += len(data)
            if new and key.fileobj not in first: first[key.fileobj] = time.perf_counter()
            if data.endswith(b"0\\r\\n\\r\\n") or not data:
                left -= 1; chosen.unregister(key.fileobj); key.fileobj.close()
    found["seconds"] += time.perf_counter() - min(first.values())
    found["first"].append(sum(first[sock] - sent[sock] for sock in sent) / streams)
    time.sleep(0.02)
print(json.dumps(found))
"""
"""A client that does as little as can be, so that the server is what is measured."""


def measure(llm: AsyncLLM, streams: int, tokens: int, rounds: int = 1, prompt: int = 16) -> dict[str, float]:
    """Chunks and tokens a second through a server, read by a client in a process of its own; see `main` for the rest."""
    from headway.machine.memory import SWITCH_INTERVAL
    from headway.server.launch import Server
    from headway.server.options import ServerOptions

    sys.setswitchinterval(SWITCH_INTERVAL)
    server = Server(llm, ServerOptions(), port=0)
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with socket.create_connection(("127.0.0.1", server.port)):
        pass
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)

    def ask(function: Callable[[Any], T]) -> T:
        return asyncio.run(llm.query(function))

    steps, used = ask(_steps), time.clock_gettime(clock)
    command = [sys.executable, "-c", CLIENT, *map(str, (server.port, streams, tokens, rounds, prompt))]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    used = time.clock_gettime(clock) - used
    steps, step_seconds = ask(_steps) - steps, ask(_step_seconds)
    first_seconds = ask(partial(_first_seconds, streams=streams))
    server.should_exit = True
    thread.join()
    seconds, total = found["seconds"], streams * tokens * rounds
    return {
        "tokens_per_second": total / seconds,
        "of_paced": total / seconds * step_seconds / streams,
        "tokens_per_chunk": total / found["chunks"],
        "step_ms": 1e3 * seconds / max(steps, 1),
        "first_token_over_ms": 1e3 * (statistics.median(found["first"]) - first_seconds),
        "server_us_per_token": 1e6 * used / total,
        "server_us_per_request": 1e6 * used / streams / rounds,
        "bytes_per_token": found["bytes"] / total,
    }


def main() -> None:
    """Measure once, and print a line of JSON."""
    parser = argparse.ArgumentParser(description="What the HTTP server costs, without an engine.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--work-ms", type=float, default=0.0, help="of a step, in Python: what an engine's host work takes")
    parser.add_argument("--launches", type=int, default=1, help="times that this work lets the interpreter's lock go")
    parser.add_argument("--prompt-ms", type=float, default=0.0, help="of a step, longer for each prompt in it")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=1, help="times that all streams begin at once")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer; none: texts are empty")
    parser.add_argument("--in-thread", action="store_true", help="the stand-in in a thread of the server, and not in a process")
    asked = parser.parse_args()
    times = 1e-3 * asked.step_ms, 1e-3 * asked.work_ms, 1e-3 * asked.prompt_ms
    make = partial(paced_driver, asked.tokenizer, *times, asked.launches)
    llm = AsyncLLM.over(EngineThread(make()) if asked.in_thread else EngineProcess(make))
    found = measure(llm, asked.streams, asked.tokens, asked.rounds, asked.prompt_len)
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    from headway.bench.studies.servers import overhead  # by this name the other process finds what is here

    overhead.main()
