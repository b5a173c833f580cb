"""What is done to engines of several ranks on purpose: ranks are killed in the middle of steps, devices are taken away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import psutil
import torch

from headway.bench.studies.ranks.results import RankFault
from headway.bench.studies.ranks.tokens import RanksUnderTest, run_engines

MOST_SECONDS: Final = 10.0
"""The longest from the end of a rank until the error is told and every other process has ended."""
_WRITES: Final = 1.5
"""The longest for which an engine writes before a rank is killed."""


def kill_ranks(folder: Path, place: RanksUnderTest, count: int, seed: int) -> Iterator[RankFault]:
    """Kill a random rank of each of `count` engines after a random time, and start one more.

    Every engine is the next start after the one before, and must write what the first has written.
    """
    draw = Random(seed)
    kills: list[tuple[int, float] | None] = [(draw.randrange(place.ranks), draw.uniform(0, _WRITES)) for _ in range(count)]
    expected: list[Any] = []
    with ThreadPoolExecutor(place.jobs) as pool:
        for fault, tokens in pool.map(lambda kill: _kill(folder, place, kill), [*kills, None]):
            expected += [tokens] if tokens and not expected else []
            if fault.ok and tokens != expected[0]:
                fault = fault.model_copy(update={"ok": False, "error": "its tokens differ from those of the first start"})
            yield fault


def _kill(folder: Path, place: RanksUnderTest, kill: tuple[int, float] | None) -> tuple[RankFault, Any]:
    """Start an engine, and kill one of its ranks while it writes; the fault, and the tokens that it wrote before.

    kill: which rank, after how many seconds; None: none is killed.
    """
    what = "a start after all kills" if kill is None else f"rank {kill[0]} is killed"
    pids: Sequence[int] = ()
    tokens, text, killed = None, "", time.monotonic()
    for event in run_engines(folder, place, forever=kill is not None):
        if event["event"] == "wrote":
            pids, tokens = event["pids"], event["tokens"]
            if kill is not None:
                time.sleep(kill[1])
                os.kill(pids[kill[0]], signal.SIGKILL)
            killed = time.monotonic()
        elif event["event"] in ("lost", "error"):
            text = event["text"]
    _wait_for_end(pids, killed + MOST_SECONDS)
    fault = RankFault(what=what, after_seconds=kill[1] if kill else 0.0, seconds=time.monotonic() - killed, text=text)
    error = _judge(fault, kill, place, pids, tokens)
    return fault.model_copy(update={"ok": not error, "error": error}), tokens


def _judge(fault: RankFault, kill: tuple[int, float] | None, place: RanksUnderTest, pids: Sequence[int], tokens: Any) -> str:
    """What is wrong with the end of an engine; empty: nothing."""
    expected = "" if not kill or not kill[0] else f"rank {kill[0]} of {place.ranks} failed "
    if tokens is None:
        return "it did not start"
    if "\n" in fault.text or not fault.text.startswith(expected) or bool(fault.text) != bool(expected):
        return f"needs one line that begins with {expected!r}" if expected else "needs nobody to tell of it"
    if any(map(_lives, pids)):
        return "a process is left"
    return "" if kill is None or fault.seconds < MOST_SECONDS else f"it took more than {MOST_SECONDS:g} s"


def refuse(folder: Path, place: RanksUnderTest) -> RankFault:
    """Start with too few devices: a GPU that CUDA_VISIBLE_DEVICES hides, or one rank more than the machine has cores."""
    if place.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        left = visible.split(",")[: place.ranks - 1]
        what, size, environment = f"CUDA_VISIBLE_DEVICES={','.join(left)}", place.ranks, {"CUDA_VISIBLE_DEVICES": ",".join(left)}
        expected = f"tensor_parallel_size: needs at most {len(left)}, the GPUs that torch sees, got {size} "
    else:
        count = os.cpu_count() or 1
        what, size, environment = f"{count + 1} ranks", count + 1, {}
        expected = f"tensor_parallel_size: needs at most {count}, the machine's cores, got {size} "
    began, text = time.monotonic(), ""
    for event in run_engines(folder, place, environment, sizes=[size]):
        text = text or event.get("text", "")
    seconds = time.monotonic() - began
    error = "" if text.startswith(expected) and "\n" not in text else f"needs one line that begins with {expected!r}"
    return RankFault(what=what, seconds=seconds, text=text, ok=not error, error=error)


def without_peers(folder: Path, place: RanksUnderTest) -> RankFault:
    """Start where GPUs are not to reach each other's memory: the same tokens, by NCCL."""
    environment = {"NCCL_P2P_DISABLE": "1"}
    wrote: dict[int, Any] = {}
    began, text = time.monotonic(), ""
    for event in run_engines(folder, place, environment, sizes=[1, place.ranks]):
        if event["event"] == "wrote":
            wrote[event["size"]] = event["tokens"]
        else:
            text = text or event.get("text", "")
    same = len(wrote) == 2 and wrote[1] == wrote[place.ranks]
    error = "" if same else "its tokens differ from those of one rank" if len(wrote) == 2 else "it has not written"
    return RankFault(what="NCCL_P2P_DISABLE=1", seconds=time.monotonic() - began, text="" if same else text, ok=same, error=error)


def _wait_for_end(pids: Sequence[int], until: float) -> None:
    while any(map(_lives, pids)) and time.monotonic() < until:
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose parent has not asked how does not."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def names_in_shm() -> set[str]:
    """What lies in /dev/shm."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
