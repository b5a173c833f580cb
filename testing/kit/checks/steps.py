"""One instance over many steps: growing sequences, turns with another backend, repetition, memory, waiting for the device."""

from __future__ import annotations

import ctypes
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import psutil
import torch

from headway.core.oracle.cells import CheckCell, Finding, Skipped, placed
from headway.core.oracle.steps import Before, Lens, Tokens, Turn, bits, first_step
from headway.testing.kit.session import Session
from headway.testing.kit.stage import Stage, close_all, open_all, synchronize, without_stray_reads
from headway.testing.kit.subject import BASELINE

STEPS = 50
_WATCHED = frozenset({0, 1, 2, 3, 4, 5, 9, 19, 33, 48, 49})
THOUSANDTH = 1_003
_NOISE_BYTES = 32 * 2**20
"""Growth of a process that says nothing: allocators keep what they once had."""


def thousand(stage: Stage, cell: CheckCell) -> str:
    """The thousandth step is as right as the first: what counts steps, or fills up, shows late."""
    lens: Lens = [(5, 0, 0), (1, 20, 0), (1, cell.block_size, 0)]
    session = stage.session(cell, [lens] * 4, extra_tokens=4 * cell.block_size, layers=1)
    done = 0
    for number in (0, 299, 999, THOUSANDTH - 1):
        work = open_all(session, lens)
        if number > done:  # steps that are not judged: the same one again and again
            idle = session.lay_out(work)
            before = Before(idle)
            for _ in range(number - done):
                session.run(idle)
            session.finish(idle, work, before, checked=False)
        with placed(f"step {number + 1} of one instance"):
            session.step(work)
        close_all(session, [turn.seq for turn in work])
        done = number + 1
    return ""


@without_stray_reads
def steps(stage: Stage, cell: CheckCell, poison: float) -> None:
    """Fifty steps in which sequences come, grow in chunks, decode and go, and their blocks become other sequences'."""
    room: list[Lens] = [[(1, 400, 0)] * 4, [(40, 0, 0)] * 4]
    session = stage.session(cell, room, poison=poison, extra_tokens=6 * (cell.block_size + STEPS))
    running: list[Tokens] = []
    for number in range(STEPS):
        work = [Turn(seq) for seq in running]
        if number % 7 == 0:
            work.insert(0, Turn(session.open(0), 5 + number % 3 * 9))
        elif number % 7 == 3:
            share = max(running, key=lambda seq: seq.length, default=None)
            context = max(cell.block_size, 1) if share is None or share.length <= cell.block_size else share.length - 1
            work.insert(0, Turn(session.open(min(context, 90), share), 3 + number % 4))
        with placed(f"step {number + 1} of one instance"):
            session.step(work, checked=number in _WATCHED)
        running = [turn.seq for turn in work]
        if len(running) > 5:
            gone = running.pop(0)
            shared = {block for seq in running for block in seq.blocks}
            session.close(Tokens([block for block in gone.blocks if block not in shared]))


@without_stray_reads
def turns(stage: Stage, cell: CheckCell, poison: float) -> None:
    """The subject and the baseline serve one cache by turns, also within a step."""
    lens: Lens = [(9, 0, 0), (20, 2 * cell.block_size, 0), (5, cell.block_size + 3, 0), (1, 33, 0), (1, cell.block_size, 0)]
    session = stage.session(cell, [lens], poison=poison, extra_tokens=6 * len(lens) * cell.block_size)
    subject = session.prefill, session.decode
    baseline = stage.backend(cell, BASELINE)
    work = open_all(session, lens)
    seqs = [turn.seq for turn in work]
    for prefill, decode in (subject, (baseline, subject[1]), (subject[0], baseline), (baseline, baseline), subject):
        session.prefill = prefill
        session.decode = decode
        session.step(work)
        work = [Turn(seq, 4 if number < 2 else 1) for number, seq in enumerate(seqs)]


def repeat(stage: Stage, cell: CheckCell) -> str:
    """The same step again and again has the same bits."""
    lens = first_step(cell.phase, cell.block_size)
    session = stage.session(cell, [lens])
    step = session.lay_out(open_all(session, lens))
    found = []
    for _ in range(4):
        for given in step.inputs:
            given.guarded.fill_(torch.nan)
        session.run(step)
        found.append([given.out.clone() for given in step.inputs])
    for turn, outs in enumerate(found[1:], start=2):
        for layer, (out, first) in enumerate(zip(outs, found[0], strict=True)):
            if not torch.equal(bits(out), bits(first)):
                count, most = int((bits(out) != bits(first)).sum()), float((out - first).abs().nan_to_num(0.0).max())
                raise Finding(
                    f"the same step has the same bits each time; run {turn} differs from the first in {count} of {out.numel()} "
                    f"elements of layer {layer}, by up to {most:.2g}",
                    guess="non-deterministic",
                )
    return ""


_CHANCES = 3
"""Later stretches of steps, all of which must grow before that counts as a leak."""


def memory(stage: Stage, cell: CheckCell) -> str:
    """Memory does not grow from step to step."""
    return no_growth(_Stepper(stage, cell).steps, stage.subject.device)


def no_growth(steps: Callable[[int], None], device: torch.device) -> str:
    """Run many steps and hold their memory to what the first ones took. steps: runs so many more.

    :raises Finding: memory grows.
    """
    steps(10)
    grown = _growth(steps, STEPS - 10, device)
    for _ in range(_CHANCES):  # caches fill up and stop; what never stops is a leak
        if not any(grown.of.values()):
            break
        steps(150)
        grown = _growth(steps, 2 * STEPS, device)
    for name, size in grown.of.items():
        if size:
            raise Finding(
                f"memory must not grow from step to step; {name} grew by {size / 1024:.0f} KiB in {grown.steps} steps",
                guess="keeps memory of every step",
            )
    return f"no growth over {STEPS} steps"


class _Growth:
    """Bytes by which some steps grew what; 0 where that says nothing."""

    def __init__(self, steps: int, tensors: int, python: int, native: int, process: int) -> None:
        self.steps = steps
        self.of = {
            "tensors": tensors if tensors >= 64 * steps else 0,
            "Python objects": python if python >= 1024 * steps else 0,
            "native memory (malloc)": native if native >= 2048 * steps else 0,
            "the process": process if process > _NOISE_BYTES else 0,
        }


class _Stepper:
    """Runs steps of ever new lengths that nobody keeps a word of but the backend."""

    def __init__(self, stage: Stage, cell: CheckCell) -> None:
        lens: Lens = [(8, 30, 0), (12, 0, 0), (1, 40, 0), (1, 20, 0)]
        self.session: Session = stage.session(cell, [lens] * 2, extra_tokens=4 * cell.block_size)
        self.number = 0

    def steps(self, count: int) -> None:
        session = self.session
        for _ in range(count):
            self.number += 1
            shift = self.number % 19
            work = open_all(session, [(8, 11 + shift, 0), (2 + shift % 11, 0, 0), (1, 3 + shift, 0), (1, 2 * shift + 2, 0)])
            session.run(session.lay_out(work))
            close_all(session, [turn.seq for turn in work])


def _growth(steps: Callable[[int], None], count: int, device: torch.device) -> _Growth:
    """Bytes that are there after some steps and were not before."""
    before = _native_bytes()
    steps(count)
    native = _native_bytes() - before
    tracemalloc.start()
    earlier = _tensor_bytes(device), tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss
    steps(count)
    later = _tensor_bytes(device), tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss
    tracemalloc.stop()
    tensors, python, process = (b - a for a, b in zip(earlier, later, strict=True))
    return _Growth(count, tensors, python, native, process)


class _MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def _native_bytes() -> int:
    """Bytes that malloc has handed out, to torch and Python among others; 0 where the C library does not tell."""
    gc.collect()
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    ask.restype = _MallocInfo
    told = ask()
    return int(told.uordblks + told.hblkhd)


def _tensor_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated(device))
    storages = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def sync(stage: Stage, cell: CheckCell) -> str:
    """No call waits for the device; on a CPU there is none to wait for."""
    if stage.subject.device.type != "cuda":
        raise Skipped("a CPU has no queue to wait for")
    lens = first_step(cell.phase, cell.block_size)
    session = stage.session(cell, [lens])
    step = session.lay_out(open_all(session, lens))
    session.run(step)  # compiles
    with torch.inference_mode():
        session.begin(step)
        with no_waiting("prefill and decode"):
            session.run_layers(step)
    return ""


@contextmanager
def no_waiting(what: str) -> Iterator[None]:
    """Hold calls to it that they do not wait for the GPU. what: their names.

    :raises Finding: one waits, or raises something else.
    """
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except Exception as error:
        raise Finding(
            f"{what} must not wait for the device: {' '.join(str(error).split())[:200]}",
            guess="waits for the device (.item(), .cpu(), a boolean of a tensor, indexing with a mask)",
        ) from None
    finally:
        torch.cuda.set_sync_debug_mode("default")


def cold(stage: Stage, cell: CheckCell) -> str:
    """How long the first step of a fresh process takes, compilation included, and the second."""
    lens = first_step(cell.phase, cell.block_size)
    taken = []
    for _ in range(2):
        started = time.perf_counter()
        session = stage.session(cell, [lens])
        session.run(session.lay_out(open_all(session, lens)))
        synchronize(stage.subject.device)
        taken.append(time.perf_counter() - started)
    return f"first call {taken[0]:.2f} s, second {taken[1]:.3f} s"
