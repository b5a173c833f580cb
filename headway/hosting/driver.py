"""One engine and its clients: the lock under which clients step the engine, and the listeners that hear what a step has added."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock, current_thread, get_ident, main_thread
from types import FrameType
from typing import Any

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.step import OutputDelta
from headway.engine_args import EngineArgs
from headway.hosting.assembly import Assembly, assemble
from headway.machine.process import TRIM_INTERVAL, trim_memory
from headway.requests.validation import RequestNames, RequestValidator, TextModel


class HeldInterrupts:
    """Holds SIGINT back in the main thread, the only one that Python interrupts, while an engine's step runs.

    An exception between any two instructions of a step would leave pages without an owner, or a step that the device has run and
    the scheduler knows nothing of. A second Ctrl-C comes through at once, for the step may hang.
    """

    def __init__(self) -> None:
        self._handler: Any = None  # The handler in whose place this one stands; None: SIGINT is not held back
        self._pending = False

    def hold(self) -> None:
        """Hold a first SIGINT back from now on."""
        found = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        if callable(found):
            self._handler = found
            self._pending = False
            try:
                signal.signal(signal.SIGINT, self._note)
            except ValueError:  # an interpreter within this one
                self._handler = None

    def release(self) -> None:
        """Hold back no more, and handle the SIGINT that has come meanwhile."""
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
    """A lock for `with`, first come first served. Ctrl-C waits until the main thread has released the lock.

    A threading.Lock may go again and again to the thread that has just released it: a call that steps an engine in a loop would
    keep all others out until it has finished. A thread that has the lock and enters it again would wait for itself, and gets
    an error: so do a logits processor and the handler of a signal that call the engine within its step.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._taken = False
        self._callers: set[int] = set()  # The threads that have the lock or wait for it
        self._waiting: deque[Lock] = deque()
        self._interrupts = HeldInterrupts()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the lock, or waits for it."""
        return get_ident() in self._callers

    def check_not_mine(self) -> None:
        """Check that this thread may wait for the engine. :raises ConfigError: it would wait for itself."""
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
            self._pass_on()  # the turn had come already
            raise

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


Listener = Callable[[list[OutputDelta]], Iterable[tuple[str, int | None]]]
"""Called with what each step has added, also to the requests of other clients. Returns the completions that the engine is to
end, each as request id and index (None: all of the request)."""


class EngineDriver:
    """The part of an engine that its clients share. Whichever client steps the engine, the requests of all advance."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.engine = assembly.engine
        model = assembly.model
        self.text_model = TextModel(model.name, model.folder, model.tokenizer)
        self.validator = RequestValidator(self.text_model, assembly.engine.limits, assembly.rules)
        self.lock = FairLock()
        """Held by whoever calls the engine, for a step at most."""
        self._listeners: tuple[Listener, ...] = ()
        self._guard = Lock()
        self.names = RequestNames()
        self.task_state: dict[str, Any] = {}
        """Objects that tasks leave for later tasks, by name; see headway.hosting.host."""
        self.on_cpu = assembly.device.type == "cpu"
        """True where activations and compiled products lie in this process's memory, which is then given back now and then."""
        self._deferred: list[Callable[[], None]] = []  # Calls that this step's own thread has left for the end of the step
        self._next_trim = time.perf_counter() + TRIM_INTERVAL

    def add_listener(self, listener: Listener) -> None:
        """Call a listener after every step from now on."""
        with self._guard:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Listener) -> None:
        """Call a listener no more."""
        with self._guard:
            self._listeners = tuple(each for each in self._listeners if each != listener)

    def call_between_steps(self, function: Callable[[], None]) -> None:
        """Call a function while no step runs: at once, or, within a step (as the garbage collector may), at the step's end."""
        if self.lock.is_mine:
            self._deferred.append(function)
            return
        with self.lock:
            function()

    def step(self) -> None:
        """Run one step of the engine. The caller holds `lock`."""
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


def driver_of(args: EngineArgs) -> EngineDriver:
    """Make an engine and its driver; see `assemble`."""
    return EngineDriver(assemble(args))
