"""A process that does mixed work for a long time, reloads its engine now and then, and writes down how much memory it holds.

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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

from headway import LLM
from mixed_work import OPTIONS, MixedWork
from server_thread import running

FAULTS = 0.002
"""Share of steps in which the device fails."""
LEAST_ROUNDS = 4
"""Of each engine, however busy the machine is."""


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
