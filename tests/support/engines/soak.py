"""A process that does work of all kinds at once for a long time, reloads its engine, and writes down how much memory it holds.

    python soak.py MODEL_FOLDER OUT.json SECONDS RELOAD_SECONDS

Times in seconds since the start, memory in MiB.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import torch

from headway import LLM, AsyncLLM, SamplingParams
from headway.contract import HeadwayError
from headway.core.sampling.params import StructuredOutputsParams
from server_clients import ask_all, read, work
from server_thread import Running, running

FAULTS = 0.002
"""Share of steps in which the device fails."""
LEAST_ROUNDS = 4
"""Minimum number of rounds per engine, however busy the machine is."""
MAX_MODEL_LEN = 256
OPTIONS: dict[str, Any] = {
    "num_threads": 1,
    "block_size": 16,
    "max_model_len": MAX_MODEL_LEN,
    "kv_cache_memory": "192KiB",  # 48 blocks: a dozen sequences push each other out
    "preemption_mode": "swap",
    "kv_offload_size": "2MiB",
    "speculate": "ngram",
    "scheduling_policy": "priority",
}
"""Options of an engine that uses every feature."""

BAD_BODIES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"prompt": [1, 2], "temperature": -1}, 400),
    ({"prompt": [1, 2], "top_p": 7}, 400),
    ({"prompt": [1, 2], "max_tokens": "many"}, 400),
    ({"prompt": [1] * (MAX_MODEL_LEN + 1)}, 400),
    ({"prompt": [10**9]}, 400),
    ({"prompt": [1, 2], "model": "nobody's"}, 404),
)
BAD_FORMS = (
    StructuredOutputsParams(json={"type": "strin"}),
    StructuredOutputsParams(json={"$ref": "#/nowhere"}),
    StructuredOutputsParams(regex="(["),
)


def raising(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that fails at its third token."""
    if len(tokens) == 2:
        raise RuntimeError("this processor always fails")
    return logits


class MixedWork:
    """Rounds of requests for an LLM, its AsyncLLM and a server over it. Every answer is checked, and counted by kind."""

    def __init__(self, seed: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._known: dict[tuple[int, ...], str] = {}
        """Texts of greedy requests, as the first engine wrote them: later ones have the same model."""

    async def round(self, llm: LLM, served: Running) -> None:
        kinds: list[Callable[[LLM, Running], Awaitable[None]]] = [self._clients, self._refused, self._streams, self._ending]
        await asyncio.gather(*(kind(llm, served) for kind in kinds))

    async def _clients(self, llm: LLM, served: Running) -> None:
        """HTTP: answers read, closed and cancelled."""
        prompts, tokens = work(self._draw.randint(8, 40), self._draw.randrange(10**6))
        for plan in await ask_all(served.url, prompts, tokens, self._draw.randrange(10**6), faults=True):
            self.counts[f"HTTP, {plan}"] += 1

    async def _refused(self, llm: LLM, served: Running) -> None:
        """HTTP: bodies that are wrong, parameters out of range, prompts that are too long."""
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
            for body, status in BAD_BODIES:
                answer = await http.post("/v1/completions", json=body)
                assert (answer.status_code, set(answer.json())) == (status, {"error"}), answer.text
            answer = await http.post(
                "/v1/chat/completions", content=b'{"messages": [', headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400
        self.counts["HTTP, refused"] += len(BAD_BODIES) + 1

    async def _streams(self, llm: LLM, served: Running) -> None:
        """AsyncLLM streams: long prompts with common prefixes, several completions, draft tokens, some closed early."""
        await asyncio.gather(*(self._stream(served.llm) for _ in range(self._draw.randint(6, 18))))

    async def _stream(self, llm: AsyncLLM) -> None:
        draw = self._draw
        shared = [1 + number % 250 for number in range(draw.choice((0, 40, 90, 150)))]
        own = [draw.randrange(1, 300) for _ in range(draw.randint(1, 30))]
        prompt = shared + own * draw.choice((1, 1, 3))  # what is repeated is guessed
        most = min(draw.randint(1, 60), MAX_MODEL_LEN - len(prompt))
        params = SamplingParams(
            n=draw.choice((1, 1, 1, 3)),
            temperature=draw.choice((0, 1)),
            top_k=draw.choice((0, 20)),
            max_tokens=most,
            ignore_eos=True,
        )
        left = draw.randint(1, most) if draw.random() < 0.3 else None
        outputs = llm.generate(prompt, params, priority=draw.randint(0, 2))
        async for output in outputs:
            if left is not None and len(output.outputs[0].token_ids) >= left:
                await outputs.aclose()
                self.counts["stream, closed"] += 1
                return
        reasons = {one.finish_reason for one in output.outputs}
        assert reasons <= {"length", "error"}, reasons  # an error: the device's fault was this step's
        self.counts["stream, ended by a fault" if "error" in reasons else f"stream, n={params.n}"] += 1

    async def _ending(self, llm: LLM, served: Running) -> None:
        """Requests that end by their own fault, together with requests that do not."""
        for form in BAD_FORMS:
            await self._fails(served.llm, SamplingParams(structured_outputs=form))
        await self._fails(served.llm, SamplingParams(logits_processors=[raising], max_tokens=8, ignore_eos=True))
        form = StructuredOutputsParams(choice=["yes", "no"])
        output = (await read(served.llm.generate([5, 6], SamplingParams(structured_outputs=form, max_tokens=8))))[-1]
        assert output.outputs[0].text in ("yes", "no") or output.outputs[0].finish_reason == "error"
        self.counts["a choice"] += 1

    async def _fails(self, llm: AsyncLLM, params: SamplingParams) -> None:
        try:
            output = (await read(llm.generate([7, 8, 9], params)))[-1]
            assert output.outputs[0].finish_reason == "error"
        except HeadwayError:
            pass
        self.counts["failed for its own parameters"] += 1

    def compare(self, llm: LLM) -> None:
        """Check that the engine still gives its first outputs."""
        prompts = [[number, *range(3, 3 + 7 * number)] for number in range(1, 13)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert self._known.setdefault(tuple(prompt), output.outputs[0].text) == output.outputs[0].text
        self.counts["compared with the first engine"] += len(prompts)


class Sampler:
    """Writes down this process's memory every few seconds."""

    def __init__(self, interval: float) -> None:
        self.began, self.samples = time.monotonic(), list[dict[str, float]]()
        self._interval, self._end = interval, Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._interval):
            sample = {"seconds": round(time.monotonic() - self.began, 1)}
            for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
                name, *rest = line.split()
                if name in ("Rss:", "Pss:", "Anonymous:"):
                    sample[name[:-1].lower()] = round(int(rest[0]) / 1024, 1)
            self.samples.append(sample)


@contextmanager
def failing(llm: LLM, draw: random.Random, counts: Counter[str]) -> Iterator[None]:
    """Have the device fail in some steps."""
    executor = llm.engine.executor
    launch = executor.launch

    def launch_or_fail(step: Any) -> Any:
        if draw.random() < FAULTS:
            counts["steps that failed"] += 1
            raise RuntimeError("a fault of the device")
        return launch(step)

    executor.launch = launch_or_fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        del executor.launch


def one_engine(folder: str, work: MixedWork, ends: float, seed: int) -> weakref.ref[Any]:
    """Load an engine, work until a time, and close it; returns what is dead once all is given back."""
    llm = LLM(folder, **OPTIONS)
    work.compare(llm)
    with failing(llm, random.Random(seed), work.counts), running(llm) as served:
        for number in count():
            if number >= LEAST_ROUNDS and time.monotonic() >= ends:
                break
            asyncio.run(work.round(llm, served))
            served.wait_idle(60)  # all blocks are free, or it raises
            work.counts["rounds"] += 1
    stats = llm.engine.stats
    work.counts["steps"] += stats.num_steps
    work.counts["steps with guesses"] += stats.num_draft_steps
    work.counts["preemptions"] += stats.num_preemptions
    work.counts["engines"] += 1
    return weakref.ref(llm.engine)


def main(folder: str, out: str, seconds: float, reload: float) -> None:
    sampler, work = Sampler(min(2.0, seconds / 100)), MixedWork()
    ends = sampler.began + seconds
    reloads = []
    while time.monotonic() < ends or len(reloads) < 2:
        engine = one_engine(folder, work, min(ends, time.monotonic() + reload), work.counts["engines"])
        gc.collect()
        assert engine() is None, "an engine that was closed is held by something"
        reloads.append(round(time.monotonic() - sampler.began, 1))
        Path(out).write_text(json.dumps({"samples": sampler.samples, "reloads": reloads, "counts": work.counts}))
    sampler.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
