"""Host of an engine in a child process, with optional restarts after a fault."""

from __future__ import annotations

import logging
import pickle
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from threading import Lock, Thread
from typing import Any, Final, NamedTuple, TypeVar

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.step import OutputDelta
from headway.core.system.child import Wire, how_it_ended
from headway.hosting.driver import EngineDriver, Listener
from headway.hosting.host import EngineDeadError, EngineHost, Task, abort_request
from headway.hosting.process_messages import (
    EngineFault,
    EngineReady,
    Failed,
    RunTask,
    SpawnedEngine,
    StartEngine,
    StepOutputs,
    TaskResult,
    spawn_engine,
)
from headway.machine.process import freeze_heap
from headway.models.checkpoints.tokenizer import read_tokenizer
from headway.requests.validation import RequestNames, RequestValidator, TextModel

log = logging.getLogger("headway")

T = TypeVar("T")

_UNSENDABLE: Final = (pickle.PicklingError, AttributeError, TypeError)  # pickle's exceptions for unpicklable objects
_END_SECONDS: Final = 20.0  # Seconds for the process to exit: it may have to finish a step and write files


class _WaitingTask(NamedTuple):
    future: Future[Any]
    since: float  # When, by time.monotonic
    concurrently: bool  # True if it runs during steps, False between two of them


class EngineProcess(EngineHost):
    """Host of an engine in a child process, which ends with this process. After a fault, the host may start a new engine."""

    def __init__(self, make: Callable[[], EngineDriver], spawned: SpawnedEngine | None = None, restarts: int = 0) -> None:
        """Start loading the model in the child, and wait until the child is ready.

        make: function that makes the engine in the child: `partial(driver_of, args)`.
        spawned: child that has already been started; None starts one.
        restarts: maximum number of restarts after faults.

        :raises HeadwayError: if an option is invalid.
        :raises EngineDeadError: if the child has ended.
        """
        self._make = make
        self._restarts = self._left = restarts
        self._guard = Lock()  # Protects `error`, `is_restarting`, `_stopped` and `_waiting`
        self._stopped = False
        self._fault: EngineDeadError | None = None  # Reason why the last engine ended
        self._waiting: dict[int, _WaitingTask] = {}
        self._numbers = count()
        self._clients: list[tuple[Listener, Callable[[EngineDeadError], None]]] = []
        self.names = RequestNames()
        self._load(spawned or spawn_engine())
        self.validator = RequestValidator(self.model, self.facts.limits, self.facts.rules)

    def _load(self, spawned: SpawnedEngine) -> None:
        """Load the model in a child, and start reading the child's messages. Raises the same errors as `__init__`."""
        self._process = spawned.process
        self._wire = spawned.wire
        self._num_sequences = 0, 0
        self._heard = time.monotonic()  # Time of the last message; a child that steps sends at least one per second
        try:
            ready = self._begin()
            tokenizer = None if ready.tokenizer_folder is None else read_tokenizer(ready.tokenizer_folder)
        except BaseException:
            self._end()
            raise
        self.model = TextModel(ready.name, ready.folder, tokenizer)
        self.facts = ready.facts
        freeze_heap()
        with self._guard:
            if not self._stopped:
                self.error = None
                self.is_restarting = False
        Thread(target=self._read, args=(self._wire,), name="headway-engine-process", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the current or last child."""
        return self._process.pid

    @property
    def num_sequences(self) -> tuple[int, int]:
        """Numbers of running and waiting sequences after the last step with outputs, or the last task."""
        return self._num_sequences

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the engine last made progress; queued tasks count as work. 0.0 while it has no work."""
        with self._guard:
            waiting = [task.since for task in self._waiting.values() if not task.concurrently]
        if self.error is not None or not (waiting or sum(self._num_sequences)):
            return 0.0
        began = self._heard if sum(self._num_sequences) else max(self._heard, min(waiting))
        return time.monotonic() - began

    def check_caller(self) -> None:
        """Do nothing: no step runs in this process."""

    def add_client(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        """Call `listener` after every step from now on, and `died` whenever an engine ends."""
        self._clients.append((listener, died))

    def remove_client(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        self._clients = [each for each in self._clients if each[0] != listener]
        unfinished()  # the requests ended with the engine

    def run_between_steps(self, task: Task[T]) -> Future[T]:
        return self._send_task(task, concurrently=False)

    def run_concurrently(self, task: Task[T]) -> Future[T]:
        return self._send_task(task, concurrently=True)

    def stop(self) -> None:
        with self._guard:
            self._stopped = True
            if self.is_restarting:
                self._give_up()
        self._fail(EngineDeadError("the engine was shut down"))
        self._end()

    def _begin(self) -> EngineReady:
        try:
            self._wire.send(StartEngine(self._make, log.getEffectiveLevel()))
            answer = self._wire.receive()
        except (EOFError, OSError):
            raise self._how_it_ended() from None
        except _UNSENDABLE as error:
            raise _unsendable("its options", error) from error
        if isinstance(answer, Failed):
            raise answer.exception()
        assert isinstance(answer, EngineReady)
        return answer

    def _send_task(self, task: Task[T], concurrently: bool) -> Future[T]:
        try:
            data = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        except _UNSENDABLE as error:
            raise _unsendable("its task", error) from error
        future: Future[T] = Future()
        with self._guard:
            self.check_alive()
            number = next(self._numbers)
            self._waiting[number] = _WaitingTask(future, time.monotonic(), concurrently)
        with suppress(OSError):  # the process has just ended; `_read` reports that
            self._wire.send(RunTask(number, data, concurrently))
        return future

    def _read(self, wire: Wire) -> None:
        try:
            while True:
                message = wire.receive()
                if wire is not self._wire:  # a later child has replaced it
                    return
                self._heard = time.monotonic()
                if isinstance(message, StepOutputs):
                    self._pass_on(message)
                elif isinstance(message, EngineFault):
                    self._fail(_dead(message.message, RuntimeError(message.cause)))
                else:
                    self._resolve(message)
        except (EOFError, OSError):
            if self.error is None and wire is self._wire:
                self._fail(self._how_it_ended())
        except BaseException as fault:  # any fault, because clients wait for this thread
            self._fail(_dead(f"a message of the engine's process could not be handled: {type(fault).__name__}: {fault}", fault))
            wire.close()

    def _pass_on(self, step: StepOutputs) -> None:
        self._num_sequences = step.num_sequences
        deltas = [OutputDelta(*each) for each in step.deltas]
        for listener, _ in list(self._clients):
            for key, index in listener(deltas):
                abort_request(self, key, index)

    def _resolve(self, message: TaskResult | Failed) -> None:
        assert message.number is not None
        with self._guard:
            task = self._waiting.pop(message.number, None)
        if isinstance(message, TaskResult):
            self._num_sequences = message.num_sequences
        if task is None or not task.future.set_running_or_notify_cancel():
            return
        future = task.future
        if isinstance(message, Failed):
            future.set_exception(message.exception())
            return
        try:
            future.set_result(pickle.loads(message.result))
        except Exception as error:  # of a class that only the child can import
            future.set_exception(error)

    def _fail(self, error: EngineDeadError) -> None:
        """Reject new tasks and fail waiting tasks. After a fault, notify the clients, and start a new engine if any restarts
        remain."""
        with self._guard:
            if self.error is not None:
                return
            is_fault = error.__cause__ is not None
            self.error = self._fault = error
            self.is_restarting = is_fault and self._left > 0 and not self._stopped
            if self.is_restarting:
                times = f"{self._restarts - self._left + 1} of {self._restarts} times"
                said = f"the engine has ended and is being started again ({times}): {error}"
                self.error = _dead(said, error.__cause__ or error)
            waiting = self._waiting
            self._waiting = {}
        for future, _, _ in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        if is_fault:
            log.error("%s", error)
            for _, died in self._clients:
                died(error)
        if self.is_restarting:
            Thread(target=self._start_again, name="headway-restart", daemon=True).start()

    def _start_again(self) -> None:
        self._end()  # the process may survive its engine's failure
        while self._left and not self._stopped:
            began = time.perf_counter()
            log.warning("%s", self.error)
            self._left -= 1
            try:
                self._load(spawn_engine())
            except Exception as error:  # the next attempt may succeed
                log.error("engine: the restart failed: %s", error)
                continue
            if self._stopped:
                self._end()
            else:
                log.warning("engine: restarted in %.1f s", time.perf_counter() - began)
            return
        with self._guard:
            self._give_up()

    def _give_up(self) -> None:
        """Stop restarting; the caller must hold `_guard`."""
        self.error = self._fault
        self.is_restarting = False

    def _how_it_ended(self) -> EngineDeadError:
        how = f"the engine's process {how_it_ended(self._process.wait())}"
        return _dead(f"{how}; its last lines on stderr may say why, and so may dmesg where memory was short", RuntimeError(how))

    def _end(self) -> None:
        """Close the wire and wait for the child to exit; kill it after `_END_SECONDS`."""
        self._wire.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("engine: the process did not end within %g s; killing it", _END_SECONDS)
            self._process.kill()
            self._process.wait()


def _dead(text: str, cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(text)
    error.__cause__ = cause
    return error


def _unsendable(what: str, error: Exception) -> ConfigError:
    need = "objects that can be handed to another process, such as functions of a module"
    return ConfigError(f"the engine's process: {what}", need, str(error), "own_process=False runs the engine in this process")
