"""What the server itself costs: streams over an engine that takes no time to think.

    python -m headway.bench.serve.overhead --streams 64 --tokens 500 --step-ms 2

A stand-in for the engine gives every stream a token at a fixed rate, in one call per step as the real one does; a client in
another process reads all streams and counts. Tells chunks a second, and how far the steps fell behind their rate.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

from headway.async_llm import AsyncLLM
from headway.core.engine.deltas import OutputDelta
from headway.core.engine.limits import PromptLimits
from headway.core.engine.stats import EngineSnapshot, EngineStats
from headway.core.sampling.params import SamplingParams
from headway.driver import EngineDriver


class PacedEngine:
    """Gives every request a token a step, and a step lasts as long as it is told to."""

    def __init__(self, vocab_size: int, step_seconds: float, work_seconds: float) -> None:
        """work_seconds: of a step, that it computes in Python; the rest it waits, as for a device."""
        self.limits = PromptLimits(32768, vocab_size, "")
        self.capacity = SimpleNamespace(pool=SimpleNamespace(page_format=SimpleNamespace(block_size=16)))
        self.scheduler = SimpleNamespace(waiting=[], running=[])
        self.stats = EngineStats()
        self._step, self._work = step_seconds, work_seconds
        self._live: dict[str, list[int]] = {}
        self._due = 0.0
        self.num_steps, self.late_seconds = 0, 0.0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request runs."""
        return bool(self._live)

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams, priority: int = 0) -> None:
        """Begin a request."""
        self._live[request_id] = [params.max_tokens or 16, len(prompt)]

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request."""
        self._live.pop(request_id, None)

    def step(self) -> list[OutputDelta]:
        """A token for everybody."""
        began = time.perf_counter()
        while time.perf_counter() - began < self._work:
            pass
        self._due = max(self._due, began - self._step) + self._step
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

    def snapshot(self) -> EngineSnapshot:
        """Of nothing."""
        return EngineSnapshot(time.perf_counter(), len(self._live), 0, 1, 0, 0, self.stats)


def paced_llm(tokenizer: Any, step_seconds: float, work_seconds: float) -> AsyncLLM:
    """An AsyncLLM over a PacedEngine. tokenizer: None for token ids alone."""
    vocab_size = 1000 if tokenizer is None else len(tokenizer)
    model = SimpleNamespace(name="paced", folder=Path("/nonexistent"), tokenizer=tokenizer)
    engine = PacedEngine(vocab_size, step_seconds, work_seconds)
    device = SimpleNamespace(type="cpu")
    llm: AsyncLLM = AsyncLLM.__new__(AsyncLLM)
    llm._start(EngineDriver(SimpleNamespace(model=model, engine=engine, stats_log=None, device=device)))  # type: ignore[arg-type]
    return llm


CLIENT = """
import json, selectors, socket, sys, time
port, streams, tokens = map(int, sys.argv[1:])
body = json.dumps({"prompt": [1] * 16, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body)
chosen = selectors.DefaultSelector()
socks, chunks, size, first = [], 0, 0, None
for _ in range(streams):
    sock = socket.create_connection(("127.0.0.1", port)); socks.append(sock); chosen.register(sock, selectors.EVENT_READ)
start = time.perf_counter()
for sock in socks: sock.sendall(head + body)
left = streams
while left:
    for key, _ in chosen.select():
        data = key.fileobj.recv(1 << 20)
        first = first or time.perf_counter()
        size += len(data); chunks += data.count(b"data: {")
        if data.endswith(b"0\\r\\n\\r\\n") or not data:
            left -= 1; chosen.unregister(key.fileobj)
end = time.perf_counter()
print(json.dumps({"seconds": end - first, "first": first - start, "chunks": chunks, "bytes": size}))
"""
"""A client that does as little as can be, so that the server is what is measured."""


def measure(llm: AsyncLLM, streams: int, tokens: int) -> dict[str, float]:
    """Chunks and tokens a second through a server, read by a client in a process of its own."""
    from headway.server.launch import SWITCH_INTERVAL, Server
    from headway.server.service import ServerOptions

    sys.setswitchinterval(SWITCH_INTERVAL)
    server = Server(llm, ServerOptions(), port=0)
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with socket.create_connection(("127.0.0.1", server.port)):
        pass
    steps = llm.engine.num_steps  # type: ignore[attr-defined]
    used = time.process_time()
    command = [sys.executable, "-c", CLIENT, *map(str, (server.port, streams, tokens))]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    used = time.process_time() - used
    steps = llm.engine.num_steps - steps  # type: ignore[attr-defined]
    server.should_exit = True
    thread.join()
    seconds, total = found["seconds"], streams * tokens
    return {
        "tokens_per_second": total / seconds,
        "chunks_per_second": found["chunks"] / seconds,
        "tokens_per_chunk": total / found["chunks"],
        "step_ms": 1e3 * seconds / max(steps, 1),
        "cpu_us_per_token": 1e6 * used / total,
        "bytes_per_token": found["bytes"] / total,
    }


def main() -> None:
    """Measure once, and print a line of JSON."""
    parser = argparse.ArgumentParser(description="What the HTTP server costs, without an engine.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--work-ms", type=float, default=0.0, help="of a step, in Python: what an engine's host work takes")
    parser.add_argument("--tokenizer", help="folder of a tokenizer; none: texts are empty")
    asked = parser.parse_args()
    tokenizer = None
    if asked.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(asked.tokenizer)
    llm = paced_llm(tokenizer, 1e-3 * asked.step_ms, 1e-3 * asked.work_ms)
    found = measure(llm, asked.streams, asked.tokens)
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
