"""Checks for every kind of kernel: refusals, declared tolerance, bitwise repeatability, memory, and host-device
synchronization."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import psutil
import torch

from headway.core.contract.spec import DTYPE_NAMES
from headway.core.engine.execution.captured_step import CudaGraphRecorder
from headway.core.oracle.cells import Finding, KitCell, Skipped, check_refusal
from headway.core.oracle.steps import bits
from headway.testing.kit.stage import Grid, Stage

_STEPS = 50
_RUNS = 4
_NOISE_BYTES = 32 * 2**20
"""Maximum growth in process memory, in bytes, that is ignored because allocators cache freed memory."""


def claims(stage: Grid[Any, Any]) -> None:
    """Check the class against the contract as far as possible without running the kernel.

    :raises Finding: if a claimed dtype has no tolerance, or if no layer is accepted.
    """
    for dtype in stage.subject.claims.dtypes:
        if dtype not in stage.subject.backend.tolerance:
            raise Finding(f"tolerance has no number for {DTYPE_NAMES.get(dtype, dtype)}, which is claimed")
    if not stage.rows:
        axes = ", ".join(axis.replace("_", " ") for axis in stage.values)
        raise Finding(f"it accepts no layer of the kit's; needs at least one of the values that it claims of: {axes}")


def refuse(stage: Stage[Any, Any], cell: Any) -> str:
    """Check that an unclaimed value is refused, and that the reasons state the needed value and the given value."""
    answers = stage.answers(cell)
    if any(answers):
        value = getattr(cell, cell.about)
        raise Finding(f"{cell.about}={value} must be refused: nothing claims it", guess="accepts what it does not claim")
    for support in answers:
        check_refusal(support)
    return str(answers[0]).removeprefix("no: ")


def tolerance(stage: Grid[Any, Any], cell: Any) -> str:
    """Check that the declared tolerance does not exceed the contract's maximum, which float32 arithmetic meets."""
    dtype = stage.spec(cell).dtype
    declared, most = float(stage.subject.backend.tolerance[dtype]), stage.most_tolerance(dtype)
    if not 0 < declared <= most:
        raise Finding(
            f"tolerance for {cell.dtype} must be at most {most:.2g}, which float32 inside keeps; declared is {declared:.2g}",
            guess="a tolerance that would let wrong answers pass",
        )
    return f"declared {declared:.2g}, at most {most:.2g}"


def repeat(stage: Stage[Any, Any], cell: KitCell) -> str:
    """Check that repeating a step gives the same bits."""
    run = stage.once(cell)
    first = run()
    for turn in range(2, _RUNS + 1):
        for place, (out, right) in enumerate(zip(run(), first, strict=True)):
            if not torch.equal(bits(out), bits(right)):
                count, most = int((bits(out) != bits(right)).sum()), float((out - right).abs().nan_to_num(0.0).max())
                raise Finding(
                    f"the same step has the same bits each time; run {turn} differs from the first in {count} of {out.numel()} "
                    f"elements of result {place}, by up to {most:.2g}",
                    guess="non-deterministic",
                )
    return ""


def memory(stage: Stage[Any, Any], cell: KitCell) -> str:
    """Check that memory does not grow from step to step."""
    return _no_growth(stage.many(cell), stage.subject.device)


def sync(stage: Stage[Any, Any], cell: KitCell) -> str:
    """Check that no call waits for the device. Skipped on a CPU."""
    if stage.subject.device.type != "cuda":
        raise Skipped("a CPU has no queue to wait for")
    with torch.inference_mode():
        names, launch = stage.launches(cell)
        with _no_waiting(names):
            launch()
    return ""


@contextmanager
def _no_waiting(what: str) -> Iterator[None]:
    """Check that calls inside the context do not wait for the GPU. what: names of the calls.

    :raises Finding: if a call waits, or raises any other error.
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


_CHANCES = 3
"""Maximum number of additional series of steps after a series in which memory grew. Only growth in all series counts as a
leak."""


def _no_growth(steps: Callable[[int], None], device: torch.device) -> str:
    """Check that memory does not grow over many steps after the first steps. steps: function that runs a given number of further
    steps.

    :raises Finding: if memory grows.
    """
    steps(10)
    grown = _growth(steps, _STEPS - 10, device)
    for _ in range(_CHANCES):  # caches fill up and stop growing; a leak does not stop
        if not any(grown.of.values()):
            break
        steps(150)
        grown = _growth(steps, 2 * _STEPS, device)
    for name, size in grown.of.items():
        if size:
            raise Finding(
                f"memory must not grow from step to step; {name} grew by {size / 1024:.0f} KiB in {grown.steps} steps",
                guess="keeps memory of every step",
            )
    return f"no growth over {_STEPS} steps"


class _Growth:
    """Growth in bytes over some steps, for each kind of memory. Insignificant growth is 0."""

    def __init__(self, steps: int, tensors: int, python: int, native: int, process: int) -> None:
        self.steps = steps
        self.of = {
            "tensors": tensors if tensors >= 64 * steps else 0,
            "Python objects": python if python >= 1024 * steps else 0,
            "native memory (malloc)": native if native >= 2048 * steps else 0,
            "the process": process if process > _NOISE_BYTES else 0,
        }


def _growth(steps: Callable[[int], None], count: int, device: torch.device) -> _Growth:
    """Return the growth of memory over `count` steps."""
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
    """Result structure of glibc's mallinfo2."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def _native_bytes() -> int:
    """Return the number of bytes allocated by malloc, including torch's and Python's; 0 if the C library cannot report it."""
    gc.collect()
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    ask.restype = _MallocInfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


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


class Recorded:
    """Captured calls over static tensors: a CUDA graph on a GPU, plain calls on a CPU."""

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        """Make the calls once, so that their kernels are compiled, and capture the calls.

        :raises Finding: if the calls cannot be captured.
        """
        self._run = run
        run()
        try:
            self._replay = CudaGraphRecorder().record(run) if device.type == "cuda" else None
        except Exception as error:
            raise Finding(
                f"graph_level says that this can be captured: {' '.join(str(error).split())[:200]}",
                guess="allocates or waits for the device inside a capture",
            ) from None

    def replay(self) -> None:
        """Run the captured calls again, and wait until they are complete."""
        if self._replay is None:
            with torch.inference_mode():
                self._run()
            return
        self._replay()
        torch.cuda.synchronize()
