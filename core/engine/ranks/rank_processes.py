"""The processes of the ranks beside rank 0: their start, what they are handed, and their end with this object or this process."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.engine.data.executor import ExecutorLostError
from headway.core.engine.ranks.rank_messages import MakeRank, RankChoices, RankJoins, RankReady, StartRank, pickled
from headway.core.engine.ranks.rank_watch import RankProcess, RankWatch
from headway.core.system.child import module_path, python_command
from headway.core.system.shared_ring import RingSize, RingWriter, shared_memory
from headway.core.system.wire import Wire

if TYPE_CHECKING:
    from headway.core.engine.ranks.torch_ranks import TorchRanks

log = logging.getLogger("headway")


class RankProcesses:
    """Ranks 1 and above of an engine whose rank 0 is in this process.

    Started, they import what they need. Then rank 0 calls `join`, makes its own executor, hands out with `choose` what all must
    agree in, and with `wait_ready` lets the others come. They end with this object, with this process, and with one another.
    """

    def __init__(self, size: int, module: str, devices: list[str], num_threads: int | None = None) -> None:
        """Start the processes.

        size: ranks, rank 0 among them. module: what each process runs, with the arguments of `rank_loop.run_rank`.
        devices: of each rank. num_threads: torch's threads of each; None: torch's own number.

        :raises OSError: the system starts no more processes.
        """
        self.size = size
        self._devices = devices
        self._num_threads = num_threads
        self._shape = RingSize(size - 1)
        memory = shared_memory(self._shape.num_bytes)
        wake_pipes: list[int] = []
        started: list[tuple[subprocess.Popen[bytes], Wire]] = []
        try:
            for _ in range(1, size):
                process, wire, wake = _spawn(module, memory, num_threads)
                started.append((process, wire))
                wake_pipes.append(wake)
            self._ring = RingWriter(memory, self._shape, wake_pipes)
        except BaseException:
            for process, wire in started:
                wire.close()
                process.kill()
            for wake in wake_pipes:
                os.close(wake)
            raise
        finally:
            os.close(memory)
        self.progress = self._ring.progress_of(-1)
        """Signs of life of rank 0."""
        listed = [
            RankProcess(number, process, wire, self._ring.progress_of(number - 1))
            for number, (process, wire) in enumerate(started, start=1)
        ]
        self._wires = [wire for _, wire in started]
        self.pids = [process.pid for process, _ in started]
        """Process ids of ranks 1 and above."""
        self._watch = RankWatch(listed, self.progress)
        self._end = weakref.finalize(self, _end, self._watch, wake_pipes)

    def join(self, make: MakeRank) -> TorchRanks:
        """Have each process make its rank's executor, and meet them. make: picklable.

        :raises ConfigError: `make` cannot be handed to another process.
        :raises ExecutorLostError: a rank has ended or failed.
        """
        try:
            made = pickled(make)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            need = "options that can be handed to another process, such as classes and functions of a module"
            raise ConfigError(f"tensor_parallel_size={self.size}", need, str(error)) from error
        try:
            return self._meet(made)
        except RuntimeError as error:  # of torch, where a rank has ended while it met the others
            self.fail(error)

    def _meet(self, made: bytes) -> TorchRanks:
        """Hand the processes what they need, and make the group with them. made: a pickled `MakeRank`."""
        import torch

        from headway.core.engine.ranks.torch_ranks import TorchRanks, make_store

        store = make_store(self.size)
        for number, wire in enumerate(self._wires, start=1):
            level = logging.DEBUG if log.isEnabledFor(logging.DEBUG) else max(log.getEffectiveLevel(), logging.WARNING)
            start = StartRank(made, number, self._shape, store.port, self._devices[number], self._num_threads, level)
            with suppress(OSError):  # it has ended, which the watch tells of
                wire.send(start)
        self._await(RankJoins)
        device = torch.device(self._devices[0])
        ranks: TorchRanks = self._watch.unless_lost(lambda: TorchRanks(store, 0, self.size, device, self.progress))
        self._watch.abort = ranks.abort
        self.check()  # a rank that was lost before that has ended nothing here
        return ranks

    def choose(self, choices: object) -> None:
        """Hand the ranks what rank 0 has chosen for all."""
        for wire in self._wires:
            with suppress(OSError):  # as above
                wire.send(RankChoices(choices))

    def wait_ready(self, facts: object) -> None:
        """Wait until every rank waits for steps, and begin to look for signs of life.

        facts: what must be equal on all ranks.

        :raises HeadwayError: a rank has ended or failed, or differs.
        """
        for rank, ready in self._await(RankReady).items():
            if ready.facts != facts:
                raise HeadwayError(f"rank {rank} differs from rank 0: {ready.facts}, not {facts}; this is a fault of Headway")
        self._watch.ready = True

    def _await(self, kind: type[Any]) -> dict[int, Any]:
        """Wait for a message of each rank, and return the messages by rank."""
        found: dict[int, Any] = {}
        while len(found) < self.size - 1:
            rank, message = self._watch.next_message()
            assert isinstance(message, kind), message
            found[rank] = message
        return found

    @property
    def are_ready(self) -> bool:
        """Whether all ranks wait for steps."""
        return self._watch.ready

    def send(self, step: bytes) -> None:
        """Hand all ranks a step.

        :raises ExecutorLostError: a rank is lost.
        """
        self.check()
        self._ring.write(step, self.check)

    def check(self) -> None:
        """:raises ExecutorLostError: a rank is lost."""
        lost = self._watch.lost
        if lost is not None:
            raise lost

    def fail(self, error: BaseException) -> NoReturn:
        """Rank 0 has failed: end all ranks.

        :raises ExecutorLostError: always: with the rank, step and cause of the first failure.
        """
        from headway.core.engine.ranks.torch_ranks import MeetingError

        if isinstance(error, ExecutorLostError):
            raise error
        raise self._watch.explain(error, isinstance(error, MeetingError)) from error

    def call_when_lost(self, tell: Callable[[ExecutorLostError], None]) -> None:
        """Call a bound method, in a thread of the watch, when a rank is lost, unless its object is gone by then."""
        method = weakref.WeakMethod(tell)

        def tell_if_there(lost: ExecutorLostError) -> None:
            found = method()
            if found is not None:
                found(lost)

        self._watch.call_when_lost(tell_if_there)

    def end(self) -> None:
        """End all ranks, and wait for that."""
        self._end()


def _spawn(module: str, memory: int, num_threads: int | None) -> tuple[subprocess.Popen[bytes], Wire, int]:
    """Start one rank's process; returns it, its wire, and the end of a pipe that wakes it."""
    near, far = socket.socketpair()
    asleep, wake = os.pipe()
    os.set_blocking(wake, False)
    threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    try:
        process = subprocess.Popen(
            python_command(module, str(far.fileno()), str(memory), str(asleep)),
            pass_fds=[far.fileno(), memory, asleep],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for rank 0
            env={**os.environ, "PYTHONPATH": module_path(), **threads},
        )
    except BaseException:
        near.close()
        os.close(wake)
        raise
    finally:
        far.close()
        os.close(asleep)
    return process, Wire(near), wake


def _end(watch: RankWatch, wake_pipes: list[int]) -> None:
    watch.end()
    for wake in wake_pipes:
        os.close(wake)
