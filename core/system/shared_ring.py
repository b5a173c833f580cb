"""Ring buffer of slots in shared memory: one process writes messages, and several processes each read all messages, in order.

A waiting reader polls for a moment and then sleeps until the writer wakes it through a pipe. The memory and the pipes have no
names: nothing remains once the last process that uses them ends, for any reason.
"""

from __future__ import annotations

import mmap
import os
import select
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Final, NamedTuple

import numpy
from numpy.typing import NDArray

_LINE: Final = 8  # 64-bit numbers per cache line: processes write to separate cache lines
_WRITTEN, _READ, _ASLEEP, _BEATS, _STEPS, _DONE, _CALLS = range(7)
"""Indexes of the numbers in a process's line. The writer's line contains the number of messages written. A reader's line contains
the number of messages read, whether the reader sleeps, and its `LifeSigns`."""
_HEADER: Final = 16  # Bytes before the content of a slot: lengths of the whole message and of the part in the slot
_PAUSE: Final = 0.0002  # Seconds between two checks of a writer that waits for a slot
_NAP: Final = 0.2  # Maximum seconds that a reader sleeps before it checks again

_let_others_run: Final[Callable[[], object]] = getattr(os, "sched_yield", partial(time.sleep, 0))
_fence_lock: Final = Lock()


def _fence() -> None:
    """Order earlier memory writes before later ones. A lock is the only memory fence in Python."""
    with _fence_lock:
        pass


class RingSize(NamedTuple):
    """Shape of a ring. All processes of the ring must use the same shape."""

    num_readers: int
    num_slots: int = 8
    slot_bytes: int = 64 * 1024
    """Bytes of a message that fit in a slot. A longer message takes several slots."""

    @property
    def num_bytes(self) -> int:
        """Size of the ring's memory in bytes."""
        return (1 + self.num_readers) * _LINE * 8 + self.num_slots * (_HEADER + self.slot_bytes)


def shared_memory(num_bytes: int) -> int:
    """Return the file descriptor of new unnamed memory for sharing with other processes. The caller closes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("headway-ring")
    else:
        with tempfile.TemporaryFile() as file:  # unnamed too
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, num_bytes)
    return descriptor


class LifeSigns:
    """Heartbeat and progress of one reader's process, as counters that only grow. The writer's process reads them."""

    def __init__(self, line: NDArray[numpy.int64]) -> None:
        self._line = line

    def beat(self) -> None:
        """Record a heartbeat; called by a separate thread."""
        self._line[_BEATS] += 1

    def begin_step(self) -> None:
        """Record that a step begins."""
        self._line[_STEPS] += 1

    def end_step(self) -> None:
        """Record that the current step has been launched."""
        self._line[_DONE] += 1

    def call(self) -> None:
        """Record that a collective call begins."""
        self._line[_CALLS] += 1

    @property
    def beats(self) -> int:
        """Number of heartbeats so far."""
        return int(self._line[_BEATS])

    @property
    def place(self) -> tuple[int, int, int]:
        """Progress of the process: steps begun, steps launched, collective calls."""
        steps, done, calls = self._line[_STEPS : _CALLS + 1].tolist()
        return steps, done, calls

    @property
    def step_text(self) -> str:
        """Text that names the current or last step of the process."""
        steps, done, _ = self.place
        return f"in step {steps}" if steps > done else f"after step {steps}" if steps else "before the first step"


class _Ring:
    def __init__(self, descriptor: int, size: RingSize) -> None:
        self._size = size
        self._memory = mmap.mmap(descriptor, size.num_bytes)
        numbers = numpy.frombuffer(self._memory, dtype=numpy.int64, count=(1 + size.num_readers) * _LINE)
        self._lines = numbers.reshape(1 + size.num_readers, _LINE)  # The writer's line, then one per reader
        self._first_slot = numbers.nbytes

    def progress_of(self, reader: int) -> LifeSigns:
        """Return the heartbeat and progress of a reader. reader: -1 means the writer."""
        return LifeSigns(self._lines[1 + reader])

    def _slot(self, message: int) -> int:
        return self._first_slot + message % self._size.num_slots * (_HEADER + self._size.slot_bytes)


class RingWriter(_Ring):
    """The only writer of a ring."""

    def __init__(self, descriptor: int, size: RingSize, wake_pipes: list[int]) -> None:
        """descriptor: file descriptor from `shared_memory`. wake_pipes: descriptor of the write end of each reader's pipe."""
        super().__init__(descriptor, size)
        self._wake_pipes = wake_pipes
        self._reads = self._lines[1:, _READ]
        self._asleep = self._lines[1:, _ASLEEP]
        self._written = 0

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Write a message. Wait while all slots contain messages that a reader has not read yet.

        check: called repeatedly during the wait. If it raises an exception, the message is dropped.
        """
        view = memoryview(message)
        for start in range(0, max(len(message), 1), self._size.slot_bytes):
            self._write_part(len(message), view[start : start + self._size.slot_bytes], check)

    def _write_part(self, total: int, part: memoryview, check: Callable[[], None]) -> None:
        while self._written - int(self._reads.min()) >= self._size.num_slots:
            check()
            time.sleep(_PAUSE)
        slot = self._slot(self._written)
        self._memory[slot : slot + _HEADER] = total.to_bytes(8, "little") + len(part).to_bytes(8, "little")
        self._memory[slot + _HEADER : slot + _HEADER + len(part)] = part
        _fence()
        self._written += 1
        self._lines[0, _WRITTEN] = self._written
        _fence()
        if self._asleep.any():
            for reader in numpy.flatnonzero(self._asleep.copy()):  # numpy raises if a reader wakes meanwhile
                with suppress(OSError):  # a full pipe wakes the reader too, and a closed one is not the writer's concern
                    os.write(self._wake_pipes[reader], b"!")


class RingReader(_Ring):
    """One of the readers of a ring."""

    def __init__(self, descriptor: int, size: RingSize, reader: int, wake_pipe: int, spin_seconds: float) -> None:
        """reader: index from 0. wake_pipe: descriptor of the read end of the reader's pipe. spin_seconds: seconds of polling
        before the reader sleeps."""
        super().__init__(descriptor, size)
        self._line = self._lines[1 + reader]
        self._wake_pipe = wake_pipe
        self._spin_seconds = spin_seconds
        self._read = 0
        self.progress = self.progress_of(reader)
        """Heartbeat and progress of this reader's process, which the process updates."""

    def read(self) -> bytes:
        """Wait for the next message and return it."""
        total, message = self._read_part()
        while len(message) < total:
            message += self._read_part()[1]
        return message

    def _read_part(self) -> tuple[int, bytes]:
        self._wait()
        slot = self._slot(self._read)
        header = self._memory[slot : slot + _HEADER]
        total, length = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
        part = self._memory[slot + _HEADER : slot + _HEADER + length]
        _fence()
        self._read += 1
        self._line[_READ] = self._read
        return total, part

    def _wait(self) -> None:
        until = time.perf_counter() + self._spin_seconds
        while self._lines[0, _WRITTEN] <= self._read:
            if time.perf_counter() < until:
                _let_others_run()
                continue
            self._line[_ASLEEP] = 1
            _fence()
            if self._lines[0, _WRITTEN] <= self._read:
                ready, _, _ = select.select([self._wake_pipe], [], [], _NAP)
                if ready:
                    os.read(self._wake_pipe, 4096)
            self._line[_ASLEEP] = 0
        _fence()
