"""Engine driver: the lock that clients hold to step a shared engine, and the listeners that receive each step's outputs."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock, current_thread, get_ident, main_thread
from types import FrameType
from typing import Any
from weakref import ref

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.step import OutputDelta
from headway.engine_args import EngineArgs
from headway.hosting.assembly import Assembly, assemble
from headway.machine.process import TRIM_INTERVAL, trim_memory
from headway.requests.validation import RequestNames, RequestValidator, TextModel


class HeldInterrupts:
    """Delay of SIGINT while an engine's step runs in the main thread, the only thread that Python interrupts.

    An exception between two instructions of a step could leak pages, or leave a step that the device has run but the scheduler
    does not know about. A second Ctrl-C is delivered at once, because the step may hang.
    """

    def __init__(self) -> None:
        self._handler: Any = None  # The replaced handler; None if SIGINT is not delayed
        self._pending = False

    def hold(self) -> None:
        """Start delaying the first SIGINT."""
        found = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        if callable(found):
            self._handler = found
            self._pending = False
            try:
                signal.signal(signal.SIGINT, self._note)
            except ValueError:  # an interpreter within this one
                self._handler = None

    def release(self) -> None:
        """Stop delaying, and handle the SIGINT that was delayed, if any."""
        if current_thread() is not main_thread() or self._handler is None:
            return
        handler = self._handler
        self._handler = None
        signal.signal(signal.SIGINT, handler)
        if self._pending:
            handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._handler(number, frame)
        self._pending = True


class FairLock:
    """First-come, first-served lock for `with`. Ctrl-C is delayed until the main thread has released the lock.

    A threading.Lock may go repeatedly to the thread that just released it, so a call that steps an engine in a loop could starve
    all others. A thread that acquires a FairLock again gets an error instead of a deadlock. Such a thread runs a logits processor
    or a signal handler that calls the engine within a step.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._taken = False
        self._callers: set[int] = set()  # The threads that have the lock or wait for it
        self._waiting: deque[Lock] = deque()
        self._interrupts = HeldInterrupts()

    @property
    def is_mine(self) -> bool:
        """True if this thread has the lock or waits for it."""
        return get_ident() in self._callers

    def check_not_mine(self) -> None:
        """Check that this thread may wait for the engine. :raises ConfigError: if the thread would wait for itself."""
        if self.is_mine:
            need = "calls between its steps, or from a thread that the step does not wait for"
            raise ConfigError("the engine", need, "a call within a step, by a logits processor or the handler of a signal")

    def __enter__(self) -> None:
        self.check_not_mine()
        try:
            self._callers.add(get_ident())
            self._interrupts.hold()
            self._take()
        except BaseException:  # an interrupt
            self._callers.discard(get_ident())
            raise

    def __exit__(self, *_: object) -> None:
        self._pass_on()
        self._callers.discard(get_ident())
        self._interrupts.release()

    def _take(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            turn = Lock()  # released when this thread is the next one
            turn.acquire()
            self._waiting.append(turn)
        try:
            self._interrupts.release()
            turn.acquire()
            self._interrupts.hold()
        except BaseException:  # an interrupt during the wait
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self._pass_on()  # the lock was passed on already
            raise

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


Listener = Callable[[list[OutputDelta]], Iterable[tuple[str, int | None]]]
"""Function to call with the outputs of each step, including outputs for other clients' requests. Returns the completions to abort
as pairs of request id and index; an index of None means all completions of the request."""


class EngineDriver:
    """An engine that several clients share. A step by any client advances the requests of all clients."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.engine = assembly.engine
        model = assembly.model
        self.text_model = TextModel(model.name, model.folder, model.tokenizer)
        self.validator = RequestValidator(self.text_model, assembly.engine.limits, assembly.rules)
        self.lock = FairLock()
        """Lock that a caller of the engine holds for at most one step at a time."""
        self._listeners: tuple[Listener, ...] = ()
        self._guard = Lock()
        self.names = RequestNames()
        self.task_state: dict[str, Any] = {}
        """Name -> object that a task stores for later tasks; see headway.hosting.host."""
        self.on_cpu = assembly.device.type == "cpu"
        """True if activations and compiled kernels use this process's memory. Freed memory is then returned to the system at
        intervals."""
        self._deferred: list[Callable[[], None]] = []  # Calls by the step's thread, delayed to the end of the step
        self._next_trim = time.perf_counter() + TRIM_INTERVAL

    def add_listener(self, listener: Listener) -> None:
        """Call a listener after every step from now on."""
        with self._guard:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop calling a listener."""
        with self._guard:
            self._listeners = tuple(each for each in self._listeners if each != listener)

    def call_between_steps(self, function: Callable[[], None]) -> None:
        """Call a function while no step runs: at once, or at the end of the step if called within one."""
        if self.lock.is_mine:
            self._deferred.append(function)
            return
        with self.lock:
            function()

    def step(self) -> None:
        """Run one step of the engine. The caller must hold `lock`."""
        deltas = self.engine.step()
        while self._deferred:
            self._deferred.pop()()
        if self.assembly.stats_log is not None:
            self.assembly.stats_log.stepped(self.engine)
        started = time.perf_counter()
        self.engine.clock.enter("outputs")
        stopped = [each for listen in self._listeners for each in listen(deltas)]
        self.engine.clock.leave()
        for request_id, index in stopped:
            self.engine.abort(request_id, index)
        if self.on_cpu and started >= self._next_trim:
            trim_memory()
            self._next_trim = started + TRIM_INTERVAL


def record_on_signal(driver: EngineDriver) -> None:
    """Write a record between two steps whenever this process gets SIGUSR2. Does nothing outside of the main thread."""
    found = ref(driver)

    def record(*_: object) -> None:
        if (driver := found()) is not None:
            driver.call_between_steps(partial(driver.engine.record_fault, "SIGUSR2", 0.0))

    if current_thread() is main_thread():
        signal.signal(signal.SIGUSR2, record)


def driver_of(args: EngineArgs) -> EngineDriver:
    """Make an engine and its driver; see `assemble`."""
    return EngineDriver(assemble(args))
