"""Processes of the other ranks, and the watchdog that stops all of them when one fails."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.engine.data.executor import ExecutorLostError
from headway.core.engine.ranks.rank_messages import MakeRank, RankChoices, RankFailed, RankJoins, RankReady, StartRank, pickled
from headway.core.system.child import Wire, how_it_ended, module_path, python_command
from headway.core.system.shared_ring import LifeSigns, RingSize, RingWriter, shared_memory

if TYPE_CHECKING:
    from headway.core.engine.ranks.torch_ranks import TorchRanks

log = logging.getLogger("headway")

Result = TypeVar("Result")

SILENT_SECONDS: Final = 6.0
"""Seconds without a heartbeat, or without progress while rank 0 is ahead, after which a rank counts as stuck."""
START_SILENT_SECONDS: Final = 60.0
"""Seconds without a heartbeat after which a starting rank counts as stuck. The limit is long, because a library may block the GIL
for a long time."""
_TICK: Final = 0.25  # Seconds between two checks of the heartbeats
_GRACE: Final = 1.0  # Seconds to wait for the end of another rank, which may be the cause of a failure
_END_SECONDS: Final = 2.0  # Seconds for a rank to exit after its wire is closed

_WAS_ENDED: Final = "the ranks were ended"
_AT_START: Final = "at its start"


class RankProcess(NamedTuple):
    """Process of one rank, and the connections to it."""

    rank: int
    process: subprocess.Popen[bytes]
    wire: Wire
    progress: LifeSigns


class _Fault(NamedTuple):
    rank: int
    where: str
    cause: str
    traceback: str = ""


class RankWatch:
    """Watchdog threads that receive the ranks' messages and check their heartbeats, until the ranks are stopped or a rank is
    lost."""

    def __init__(self, ranks: list[RankProcess], own: LifeSigns) -> None:
        """ranks: processes of all ranks except rank 0. own: heartbeat and progress of rank 0."""
        self._ranks = ranks
        self._own = own
        self._received: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # (rank, message), with None for the end of a rank's wire
        self._messages: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()  # Messages for the start; None if a rank is lost
        self._guard = Lock()
        self._lost: str | None = None
        self._settled = Event()  # Set when a fault has been reported or the ranks have been stopped
        self._ended = False
        self._callbacks: list[Callable[[ExecutorLostError], None]] = []
        self.abort: Callable[[], None] | None = None
        """Function that makes rank 0's waiting collective calls fail. None before the group is made."""
        self.ready = False
        """True once all ranks wait for steps. From then on, a rank that makes no progress while rank 0 is ahead counts as
        stuck."""
        for each in ranks:
            Thread(target=self._listen, args=(each,), name=f"headway-rank-{each.rank}", daemon=True).start()
        Thread(target=self._watch, name="headway-ranks", daemon=True).start()

    @property
    def lost(self) -> ExecutorLostError | None:
        """Error that says why no further step can run, or None while no rank is lost. Each access makes a new error object."""
        return None if self._lost is None else ExecutorLostError(self._lost)

    def next_message(self) -> tuple[int, Any]:
        """Wait for the next message of a starting rank, and return it with the rank. :raises ExecutorLostError: if a rank has
        ended or failed."""
        found = self._messages.get()
        if found is None:
            raise self.lost or ExecutorLostError(_WAS_ENDED)
        return found

    def unless_lost(self, meet: Callable[[], Result]) -> Result:
        """Return the result of a collective call during the start.

        The call runs in a separate thread, which is abandoned if a rank is lost. Until the group is made, nothing else can
        interrupt a library's wait for a process that has exited.

        :raises ExecutorLostError: if a rank has ended or failed.
        """
        outcome: Future[Result] = Future()

        def run() -> None:
            try:
                outcome.set_result(meet())
            except BaseException as error:
                outcome.set_exception(error)
            self._messages.put((0, outcome))

        Thread(target=run, name="headway-ranks-meet", daemon=True).start()
        self.next_message()
        return outcome.result()

    def call_when_lost(self, callback: Callable[[ExecutorLostError], None]) -> None:
        """Call a function, in a watchdog thread, when a rank is lost, or at once if a rank is already lost."""
        with self._guard:
            self._callbacks.append(callback)
            lost = self.lost
        if lost is not None:
            callback(lost)

    def explain(self, error: BaseException, of_another: bool) -> ExecutorLostError:
        """Stop the ranks after a failure of rank 0, and return an error that names the first cause.

        of_another: True if `error` means that another rank has exited.
        """
        self._settled.wait(_GRACE + _END_SECONDS if of_another else _TICK)
        self._lose(_Fault(0, self._where(self._own), f"{type(error).__name__}: {error}"))
        return self.lost or ExecutorLostError(_WAS_ENDED)

    def end(self) -> None:
        """Stop all ranks, and wait until they have exited."""
        with self._guard:
            self._ended = True
        self._settled.set()
        self._received.put((0, None))
        for each in self._ranks:
            each.wire.close()
        until = time.monotonic() + _END_SECONDS
        for each in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.01, until - time.monotonic()))
        self._kill()

    def _listen(self, rank: RankProcess) -> None:
        with suppress(EOFError, OSError, ValueError):
            while True:
                self._received.put((rank.rank, rank.wire.receive()))
        self._received.put((rank.rank, None))

    def _watch(self) -> None:
        silence = _Silence(self._ranks, self._own)
        while not self._settled.is_set():
            try:
                rank, message = self._received.get(timeout=_TICK)
            except Empty:
                stuck = silence.look(ready=self.ready)
                if stuck is not None:
                    self._lose(stuck)
                continue
            if isinstance(message, RankFailed):
                self._lose(self._reason(rank, message))
            elif message is not None:
                self._messages.put((rank, message))
            elif rank:
                self._lose(self._reason(rank, None))

    def _reason(self, rank: int, message: RankFailed | None) -> _Fault:
        """Return the fault that caused a rank's failure or exit. Waits briefly for other messages, because another rank's exit
        may be the cause."""
        noticed: dict[int, _Fault] = {}
        until = time.monotonic() + _GRACE
        while True:
            if isinstance(message, RankFailed):
                fault = _Fault(rank, self._where(self._of(rank).progress), message.text, message.traceback)
                if not message.of_another:
                    return fault
                noticed.setdefault(rank, fault)
            elif message is None and rank and rank not in noticed:
                return self._death(rank)
            try:
                rank, message = self._received.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return next(iter(noticed.values()))

    def _death(self, rank: int) -> _Fault:
        lost = self._of(rank)
        try:
            how = how_it_ended(lost.process.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:
            how = "has closed its wire"
        hint = " (dmesg says so where memory was short)" if "SIGKILL" in how else ""
        return _Fault(rank, self._where(lost.progress), f"its process {lost.process.pid} {how}{hint}")

    def _where(self, progress: LifeSigns) -> str:
        return progress.step_text if self.ready else _AT_START

    def _of(self, rank: int) -> RankProcess:
        return next(each for each in self._ranks if each.rank == rank)

    def _lose(self, fault: _Fault) -> None:
        """Record a fault, stop all ranks, and notify every listener."""
        with self._guard:
            if self._ended or self._lost is not None:
                return
            text = f"rank {fault.rank} of {len(self._ranks) + 1} failed {fault.where}: {fault.cause}"
            self._lost = f"{text}; all ranks have been ended, and the engine with them"
            callback = list(self._callbacks)
        if self.ready:  # before that, the caller that starts the ranks reports it
            log.error("%s", text)
        if fault.traceback:
            log.info("rank %d raised:\n%s", fault.rank, fault.traceback)
        self._kill()
        if self.abort is not None:
            with suppress(Exception):  # torch may raise anything for a group whose other ranks are gone
                self.abort()
        self._messages.put(None)
        self._settled.set()
        for each in callback:
            each(ExecutorLostError(self._lost))

    def _kill(self) -> None:
        for each in self._ranks:
            with suppress(ProcessLookupError):
                each.process.kill()
        for each in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(_END_SECONDS)


class _Silence:
    """Time since each rank's last heartbeat and, while rank 0 is ahead of the rank, time since its last progress. Time for which
    this process was suspended does not count."""

    def __init__(self, ranks: list[RankProcess], own: LifeSigns) -> None:
        self._ranks = ranks
        self._own = own
        self._beats = {each.rank: (-1, 0.0) for each in ranks}
        self._places: dict[int, tuple[tuple[int, ...], float]] = {each.rank: ((), 0.0) for each in ranks}
        self._looked = time.monotonic()

    def look(self, ready: bool) -> _Fault | None:
        """Return the fault of a stuck rank, or None. ready: True if all ranks wait for steps."""
        limit = SILENT_SECONDS if ready else START_SILENT_SECONDS
        now = time.monotonic()
        passed = min(now - self._looked, 2 * _TICK)
        self._looked = now
        ahead = self._own.place
        for each in self._ranks:
            beats, silent = self._beats[each.rank]
            silent = silent + passed if each.progress.beats == beats else 0.0
            self._beats[each.rank] = each.progress.beats, silent
            place, still = self._places[each.rank]
            still = still + passed if each.progress.place == place < ahead and ready else 0.0
            self._places[each.rank] = each.progress.place, still
            if silent >= limit:
                cause = f"process {each.process.pid} has given no sign of life for {limit:g} s (stopped, or swapped out)"
                return _Fault(each.rank, each.progress.step_text if ready else _AT_START, cause)
            if still >= SILENT_SECONDS:
                cause = f"it has stood still for {SILENT_SECONDS:g} s while rank 0 waits for it {self._own.step_text}"
                return _Fault(each.rank, each.progress.step_text, cause)
        return None


class RankProcesses:
    """Ranks 1 and above of an engine whose rank 0 is in this process.

    The processes start and import their modules. Then rank 0 calls `join`, makes its own executor, sends the common choices with
    `choose`, and waits for the other ranks with `wait_ready`. All processes end if this object is deleted, or if this process or
    one of them ends.
    """

    def __init__(self, size: int, module: str, devices: list[str], num_threads: int | None = None) -> None:
        """Start the processes.

        size: number of ranks, rank 0 included. module: module that each process runs, with the arguments of `hosting.rank_child`.
        devices: device of each rank. num_threads: torch threads per process. None means torch's default.
        :raises OSError: if the system cannot start another process."""
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
        """Heartbeat and progress of rank 0."""
        listed = [
            RankProcess(number, process, wire, self._ring.progress_of(number - 1))
            for number, (process, wire) in enumerate(started, start=1)
        ]
        self._wires = [wire for _, wire in started]
        self.pids = [process.pid for process, _ in started]
        self._watch = RankWatch(listed, self.progress)
        self._end = weakref.finalize(self, _end, self._watch, wake_pipes)

    def join(self, make: MakeRank) -> TorchRanks:
        """Start making each process's executor, and join the ranks in a group. make: picklable.
        :raises ConfigError: if `make` cannot be passed to another process.
        :raises ExecutorLostError: if a rank has ended or failed."""
        try:
            made = pickled(make)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            need = "options that can be handed to another process, such as classes and functions of a module"
            raise ConfigError(f"tensor_parallel_size={self.size}", need, str(error)) from error
        try:
            return self._join_group(made)
        except RuntimeError as error:  # raised by torch if a rank ended while joining
            self.fail(error)

    def _join_group(self, made: bytes) -> TorchRanks:
        """Send the start messages to the processes, and make the group with them. made: pickled `MakeRank`."""
        import torch

        from headway.core.engine.ranks.torch_ranks import TorchRanks, make_store

        store = make_store(self.size)
        for number, wire in enumerate(self._wires, start=1):
            level = logging.DEBUG if log.isEnabledFor(logging.DEBUG) else max(log.getEffectiveLevel(), logging.WARNING)
            start = StartRank(made, number, self._shape, store.port, self._devices[number], self._num_threads, level)
            with suppress(OSError):  # the rank has ended, which the watchdog reports
                wire.send(start)
        self._await(RankJoins)
        device = torch.device(self._devices[0])
        ranks: TorchRanks = self._watch.unless_lost(lambda: TorchRanks(store, 0, self.size, device, self.progress))
        self._watch.abort = ranks.abort
        self.check()  # a rank lost before `abort` was set is reported here
        return ranks

    def choose(self, choices: object) -> None:
        """Send rank 0's choices to the other ranks."""
        for wire in self._wires:
            with suppress(OSError):  # the rank has ended, which the watchdog reports
                wire.send(RankChoices(choices))

    def wait_ready(self, facts: object) -> None:
        """Wait until every rank is ready with facts equal to `facts`, then start the progress checks.

        :raises HeadwayError: if a rank has ended, or its facts differ.
        """
        for rank, ready in self._await(RankReady).items():
            if ready.facts != facts:
                raise HeadwayError(f"rank {rank} differs from rank 0: {ready.facts}, not {facts}; this is a fault of Headway")
        self._watch.ready = True

    def _await(self, kind: type[Any]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        while len(found) < self.size - 1:
            rank, message = self._watch.next_message()
            assert isinstance(message, kind), message
            found[rank] = message
        return found

    @property
    def are_ready(self) -> bool:
        """True if all ranks wait for steps."""
        return self._watch.ready

    def send(self, step: bytes) -> None:
        """Send a step to all ranks. :raises ExecutorLostError: if a rank is lost."""
        self.check()
        self._ring.write(step, self.check)

    def check(self) -> None:
        """Check that no rank is lost. :raises ExecutorLostError: if a rank is lost."""
        lost = self._watch.lost
        if lost is not None:
            raise lost

    def fail(self, error: BaseException) -> NoReturn:
        """Stop all ranks after a failure of rank 0. :raises ExecutorLostError: always. The error names the first failed rank and
        the cause."""
        from headway.core.engine.ranks.torch_ranks import CollectiveError

        if isinstance(error, ExecutorLostError):
            raise error
        raise self._watch.explain(error, isinstance(error, CollectiveError)) from error

    def call_when_lost(self, callback: Callable[[ExecutorLostError], None]) -> None:
        """Register a bound method, which is called in a watchdog thread when a rank is lost, unless the method's object no longer
        exists."""
        method = weakref.WeakMethod(callback)

        def report_if_alive(lost: ExecutorLostError) -> None:
            found = method()
            if found is not None:
                found(lost)

        self._watch.call_when_lost(report_if_alive)

    def end(self) -> None:
        """Stop all ranks, and wait until they have exited."""
        self._end()


def _spawn(module: str, memory: int, num_threads: int | None) -> tuple[subprocess.Popen[bytes], Wire, int]:
    """Start one rank's process. Returns the process, its wire, and the pipe end that wakes it."""
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
