"""The parent's side of an engine in a child process, and of one that is started again after a fault."""

from __future__ import annotations

import logging
import pickle
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final, NamedTuple, TypeVar

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.step import OutputDelta
from headway.core.system.child import how_it_ended
from headway.hosting.driver import EngineDriver, Listener
from headway.hosting.host import EngineDeadError, EngineFacts, Task, abort_request
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
from headway.machine.memory import freeze_heap
from headway.models.checkpoints.tokenizer import read_tokenizer
from headway.requests.validation import RequestNames, RequestValidator, TextModel

log = logging.getLogger("headway")

T = TypeVar("T")

_UNSENDABLE: Final = (pickle.PicklingError, AttributeError, TypeError)
"""Exceptions of pickle for an object that cannot be pickled."""
_END_SECONDS: Final = 20.0
"""Seconds for the process to end by itself: a step may run, and files may have to be written."""


class TextFacts(NamedTuple):
    """A headway.requests.validation.TextModel without its weights."""

    name: str
    folder: Path
    tokenizer: Any


class _WaitingTask(NamedTuple):
    """A task that the child has been sent."""

    future: Future[Any]
    since: float
    """When, by time.monotonic."""
    concurrently: bool
    """Whether it is done beside the steps, and not between two of them."""


class EngineProcess:
    """Runs an engine in a child process; an `EngineHost`. The child ends with this process, whatever ends that."""

    def __init__(self, make: Callable[[], EngineDriver], spawned: SpawnedEngine | None = None) -> None:
        """Have the child load the model, and wait for that.

        make: makes the engine, in the child; `partial(driver_of, args)`. spawned: the child, if it was started already.

        :raises HeadwayError: anything the caller can put right.
        :raises EngineDeadError: the process has ended.
        """
        process, wire = spawned or spawn_engine()
        self._process = process
        self._wire = wire
        self._guard = Lock()
        """Protects `_error` and `_waiting`."""
        self._error: EngineDeadError | None = None
        self._waiting: dict[int, _WaitingTask] = {}
        self._heard = time.monotonic()
        """When the child sent its last message; while it steps, there is one each second at least."""
        self._numbers = count()
        self._listeners: list[Listener] = []
        self._died: list[Callable[[EngineDeadError], None]] = []
        self._num_sequences = 0, 0
        self.names = RequestNames()
        try:
            ready = self._begin(make)
            tokenizer = None if ready.tokenizer_folder is None else read_tokenizer(ready.tokenizer_folder)
        except BaseException:
            self._end()
            raise
        self.model = TextFacts(ready.name, ready.folder, tokenizer)
        self.facts = ready.facts
        self.validator = RequestValidator(self.model, ready.facts.limits, ready.facts.rules)
        freeze_heap()
        Thread(target=self._read, name="headway-engine-process", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def error(self) -> EngineDeadError | None:
        """See EngineHost."""
        return self._error

    @property
    def num_sequences(self) -> tuple[int, int]:
        """Sequences that run and that wait, as of the last step that had outputs, or the last task; see EngineHost."""
        return self._num_sequences

    @property
    def is_restarting(self) -> bool:
        """See EngineHost. This process is not started again."""
        return False

    @property
    def stalled_seconds(self) -> float:
        """See EngineHost. A task that is to be done between two steps is work, too."""
        with self._guard:
            waiting = [task.since for task in self._waiting.values() if not task.concurrently]
        if self._error is not None or not (waiting or sum(self._num_sequences)):
            return 0.0
        began = self._heard if sum(self._num_sequences) else max(self._heard, min(waiting))
        return time.monotonic() - began

    def check_caller(self) -> None:
        """See EngineHost. No step runs in this process."""

    def add_client(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        """See EngineHost. Both are called in a thread of this process."""
        self._died.append(died)
        self._listeners.append(listener)

    def remove_client(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        """See EngineHost."""
        self._listeners.remove(listener)
        unfinished()  # the engine has ended, and they with it

    def run_between_steps(self, task: Task[T]) -> Future[T]:
        """See EngineHost."""
        return self._send_task(task, concurrently=False)

    def run_concurrently(self, task: Task[T]) -> Future[T]:
        """See EngineHost."""
        return self._send_task(task, concurrently=True)

    def stop(self) -> None:
        """See EngineHost."""
        self._fail(EngineDeadError("the engine was shut down"))
        self._end()

    def _begin(self, make: Callable[[], EngineDriver]) -> EngineReady:
        try:
            self._wire.send(StartEngine(make, log.getEffectiveLevel()))
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
            if self._error is not None:
                raise EngineDeadError(str(self._error)) from self._error.__cause__
            number = next(self._numbers)
            self._waiting[number] = _WaitingTask(future, time.monotonic(), concurrently)
        with suppress(OSError):  # the process has just ended: `_read` tells everybody
            self._wire.send(RunTask(number, data, concurrently))
        return future

    def _read(self) -> None:
        """Handle the messages of the child, until the child ends."""
        try:
            while True:
                message = self._wire.receive()
                self._heard = time.monotonic()
                if isinstance(message, StepOutputs):
                    self._pass_on(message)
                elif isinstance(message, EngineFault):
                    self._fail(_dead(message.message, RuntimeError(message.cause)))
                else:
                    self._resolve(message)
        except (EOFError, OSError):
            if self._error is None:
                self._fail(self._how_it_ended())
        except BaseException as fault:  # whatever it is, somebody waits for this thread
            self._fail(_dead(f"a message of the engine's process could not be handled: {type(fault).__name__}: {fault}", fault))
            self._wire.close()

    def _pass_on(self, step: StepOutputs) -> None:
        self._num_sequences = step.num_sequences
        deltas = [OutputDelta(*each) for each in step.deltas]
        for listener in list(self._listeners):
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
        """Take no more tasks; fail those that wait, and tell the clients where a fault is the reason."""
        with self._guard:
            if self._error is not None:
                return
            self._error = error
            waiting = self._waiting
            self._waiting = {}
        for future, _, _ in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        if error.__cause__ is not None:
            log.error("%s", error)
            for died in self._died:
                died(error)

    def _how_it_ended(self) -> EngineDeadError:
        how = f"the engine's process {how_it_ended(self._process.wait())}"
        return _dead(f"{how}; its last lines on stderr may say why, and so may dmesg where memory was short", RuntimeError(how))

    def _end(self) -> None:
        """Close the wire and wait for the child to end; kill the child after `_END_SECONDS`."""
        self._wire.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the engine's process has not ended within %g s and is killed", _END_SECONDS)
            self._process.kill()
            self._process.wait()


def _dead(text: str, cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(text)
    error.__cause__ = cause
    return error


def _unsendable(what: str, error: Exception) -> ConfigError:
    need = "objects that can be handed to another process, such as functions of a module"
    return ConfigError(f"the engine's process: {what}", need, str(error), "own_process=False runs the engine in this process")


class RestartingEngine:
    """Runs an engine in a child process, and starts another one where a fault ends it; an `EngineHost`.

    Requests that the fault has ended are not run again. New ones are refused until the model is loaded.
    """

    def __init__(self, first: EngineProcess, make: Callable[[], EngineDriver], restarts: int) -> None:
        """make: makes an engine like the first one, in a child process. restarts: how often another engine is started."""
        self._engine = first
        self._make = make
        self._left = restarts
        self._restarts = restarts
        self.names = first.names
        self.validator = first.validator
        self._guard = Lock()
        """Protects `_engine`, `_stopped` and the change of `_restarting` from None."""
        self._stopped = False
        self._restarting: EngineDeadError | None = None
        """Why there is no engine at the moment, while another one is being started."""
        self._clients: list[tuple[Listener, Callable[[EngineDeadError], None]]] = []
        self._watch(first)

    @property
    def model(self) -> TextModel:
        """See EngineHost."""
        return self._engine.model

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine that runs, or ran last."""
        return self._engine.facts

    @property
    def pid(self) -> int:
        """Process id of the engine that runs, or ran last."""
        return self._engine.pid

    @property
    def error(self) -> EngineDeadError | None:
        """See EngineHost; while another engine is being started, that it is."""
        return self._restarting or self._engine.error

    @property
    def is_restarting(self) -> bool:
        """See EngineHost."""
        fault = self._engine.error
        expected = fault is not None and fault.__cause__ is not None and self._left > 0 and not self._stopped
        return self._restarting is not None or expected  # `_ended` may not have been called yet

    @property
    def num_sequences(self) -> tuple[int, int]:
        """See EngineHost."""
        return self._engine.num_sequences

    @property
    def stalled_seconds(self) -> float:
        """See EngineHost."""
        return self._engine.stalled_seconds

    def check_caller(self) -> None:
        """See EngineHost."""
        self._engine.check_caller()

    def add_client(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        """See EngineHost. `died` is called for each engine that ends."""
        self._clients.append((listener, died))
        self._engine.add_client(listener, died)

    def remove_client(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        """See EngineHost."""
        self._clients = [each for each in self._clients if each[0] != listener]
        self._engine.remove_client(listener, unfinished)

    def run_between_steps(self, task: Task[T]) -> Future[T]:
        """See EngineHost."""
        self._check()
        return self._engine.run_between_steps(task)

    def run_concurrently(self, task: Task[T]) -> Future[T]:
        """See EngineHost."""
        self._check()
        return self._engine.run_concurrently(task)

    def stop(self) -> None:
        """See EngineHost."""
        with self._guard:
            self._stopped = True
            engine = self._engine
        self._restarting = None
        engine.stop()

    def _check(self) -> None:
        """:raises EngineDeadError: another engine is being started."""
        error = self._restarting
        if error is not None:
            raise EngineDeadError(str(error)) from error.__cause__

    def _ended(self, error: EngineDeadError) -> None:
        """A fault has ended the engine; called in a thread of the engine's host, or by `_watch`."""
        with self._guard:
            if not self._left or self._stopped or self._restarting is not None:
                return
            self._restarting = self._reason(error)
        Thread(target=self._start_again, name="headway-restart", daemon=True).start()

    def _watch(self, engine: EngineProcess) -> None:
        """Have `_ended` called when a fault ends an engine, also if it has done so already."""
        engine.add_client(_hear_nothing, self._ended)
        if engine.error is not None:
            self._ended(engine.error)

    def _reason(self, error: EngineDeadError) -> EngineDeadError:
        number = self._restarts - self._left + 1
        text = f"the engine has ended and is being started again ({number} of {self._restarts} times): {error}"
        reason = EngineDeadError(text)
        reason.__cause__ = error.__cause__ or error
        return reason

    def _start_again(self) -> None:
        ended = self._engine
        ended.stop()  # a process whose engine has failed may live on
        while self._left and not self._stopped:
            began = time.perf_counter()
            log.warning("%s", self._restarting)
            self._left -= 1
            try:
                engine = EngineProcess(self._make)
            except Exception as error:  # whatever the start meets; the next attempt may not
                log.error("the engine could not be started again: %s", error)
                continue
            log.warning("the engine runs again after %.1f s", time.perf_counter() - began)
            self._take_over(engine)
            return
        self._restarting = None

    def _take_over(self, engine: EngineProcess) -> None:
        for listener, died in self._clients:
            engine.add_client(listener, died)
        with self._guard:
            stopped = self._stopped
            if not stopped:
                self._engine = engine
                self._restarting = None
        if stopped:
            engine.stop()
        else:
            self._watch(engine)


def _hear_nothing(_: object) -> tuple[()]:
    return ()
