"""Watching over the ranks: one that dies, raises or hangs ends all of them, and the engine is told which, where and why."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Final, NamedTuple, TypeVar

from headway.core.engine.data.executor import ExecutorLostError
from headway.core.engine.ranks.rank_messages import RankFailed
from headway.core.system.child import how_it_ended
from headway.core.system.shared_ring import LifeSigns
from headway.core.system.wire import Wire

log = logging.getLogger("headway")
Result = TypeVar("Result")

SILENT_SECONDS: Final = 6.0
"""Seconds without a sign of life, or at one place while rank 0 waits, after which a rank counts as stuck."""
START_SILENT_SECONDS: Final = 60.0
"""Seconds without a sign of life after which a rank that starts counts as stuck: a library may keep Python's lock for long."""
_TICK: Final = 0.25
"""Seconds between two looks at the signs of life."""
_GRACE: Final = 1.0
"""Seconds in which a rank that has ended may show up as the reason for which another one has failed."""
_END_SECONDS: Final = 2.0
"""Seconds for a rank to end by itself when its wire is closed."""

_WAS_ENDED: Final = "the ranks were ended"
_AT_START: Final = "at its start"


class RankProcess(NamedTuple):
    """The process of one rank."""

    rank: int
    process: subprocess.Popen[bytes]
    wire: Wire
    progress: LifeSigns


class _Fault(NamedTuple):
    """Why the ranks must end."""

    rank: int
    where: str
    cause: str
    traceback: str = ""


class RankWatch:
    """Hears what ranks say and looks for their signs of life, in threads, until it is ended or a rank is lost."""

    def __init__(self, ranks: list[RankProcess], own: LifeSigns) -> None:
        """ranks: all but rank 0. own: rank 0's signs of life."""
        self._ranks = ranks
        self._own = own
        self._heard: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        """(rank, message), with None for the end of a rank's wire."""
        self._messages: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        """What of it the start waits for; None: a rank is lost."""
        self._guard = Lock()
        self._lost: str | None = None
        self._settled = Event()
        """Set when a fault has been told, or the ranks were ended."""
        self._ended = False
        self._tell: list[Callable[[ExecutorLostError], None]] = []
        self.abort: Callable[[], None] | None = None
        """Makes rank 0's calls fail that wait for the others."""
        self.ready = False
        """Whether the ranks wait for steps, so that rank 0 and the others should never be apart for long."""
        for each in ranks:
            Thread(target=self._listen, args=(each,), name=f"headway-rank-{each.rank}", daemon=True).start()
        Thread(target=self._watch, name="headway-ranks", daemon=True).start()

    @property
    def lost(self) -> ExecutorLostError | None:
        """Why no step can run any more; None while all ranks live. A new object each time, which holds no frames of others."""
        return None if self._lost is None else ExecutorLostError(self._lost)

    def next_message(self) -> tuple[int, Any]:
        """Wait for the next message of a rank's start.

        :raises ExecutorLostError: a rank has ended or failed.
        """
        found = self._messages.get()
        if found is None:
            raise self.lost or ExecutorLostError(_WAS_ENDED)
        return found

    def unless_lost(self, meet: Callable[[], Result]) -> Result:
        """Return what a call returns in which the ranks of a start meet.

        It runs in a thread of its own, which is left behind where a rank is lost: until the group is made, nothing can end a
        library's wait for a process that is gone.

        :raises ExecutorLostError: a rank has ended or failed.
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

    def call_when_lost(self, tell: Callable[[ExecutorLostError], None]) -> None:
        """Call a function, in a thread of the watch, when a rank is lost; at once if one is."""
        with self._guard:
            self._tell.append(tell)
            lost = self.lost
        if lost is not None:
            tell(lost)

    def explain(self, error: BaseException, of_another: bool) -> ExecutorLostError:
        """Rank 0 has failed: end the ranks, and return why, which may be another rank.

        of_another: `error` tells that another rank is gone, as a rule.
        """
        self._settled.wait(_GRACE + _END_SECONDS if of_another else _TICK)
        self._lose(_Fault(0, self._where(self._own), f"{type(error).__name__}: {error}"))
        return self.lost or ExecutorLostError(_WAS_ENDED)

    def end(self) -> None:
        """End all ranks, and wait for that."""
        with self._guard:
            self._ended = True
        self._settled.set()
        self._heard.put((0, None))
        for each in self._ranks:
            each.wire.close()
        until = time.monotonic() + _END_SECONDS
        for each in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.01, until - time.monotonic()))
        self._kill()

    def _listen(self, rank: RankProcess) -> None:
        """Pass on what a rank says, until its process ends."""
        with suppress(EOFError, OSError, ValueError):
            while True:
                self._heard.put((rank.rank, rank.wire.receive()))
        self._heard.put((rank.rank, None))

    def _watch(self) -> None:
        silence = _Silence(self._ranks, self._own)
        while not self._settled.is_set():
            try:
                rank, message = self._heard.get(timeout=_TICK)
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
        """The fault that a rank's failure or end shows. Whether another rank's end was the reason shows a moment later."""
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
                rank, message = self._heard.get(timeout=max(0.0, until - time.monotonic()))
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
        """End all ranks, and tell everybody why."""
        with self._guard:
            if self._ended or self._lost is not None:
                return
            text = f"rank {fault.rank} of {len(self._ranks) + 1} failed {fault.where}: {fault.cause}"
            self._lost = f"{text}; all ranks have been ended, and the engine with them"
            tell = list(self._tell)
        if self.ready:  # before, whoever starts the ranks tells of it
            log.error("%s", text)
        if fault.traceback:
            log.info("rank %d raised:\n%s", fault.rank, fault.traceback)
        self._kill()
        if self.abort is not None:
            with suppress(Exception):  # whatever torch thinks of a group whose other ranks are gone
                self.abort()
        self._messages.put(None)
        self._settled.set()
        for each in tell:
            each(ExecutorLostError(self._lost))

    def _kill(self) -> None:
        for each in self._ranks:
            with suppress(ProcessLookupError):
                each.process.kill()
        for each in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(_END_SECONDS)


class _Silence:
    """How long each rank has given no sign of life, or has stood still while rank 0 was ahead of it.

    Time counts in ticks of the watch, so that a machine or a process that is stopped as a whole wakes with nothing counted.
    """

    def __init__(self, ranks: list[RankProcess], own: LifeSigns) -> None:
        self._ranks = ranks
        self._own = own
        self._beats = {each.rank: (-1, 0.0) for each in ranks}
        self._places: dict[int, tuple[tuple[int, ...], float]] = {each.rank: ((), 0.0) for each in ranks}
        self._looked = time.monotonic()

    def look(self, ready: bool) -> _Fault | None:
        """The fault of a rank that is stuck. ready: whether all ranks wait for steps."""
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
