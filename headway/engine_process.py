"""An engine in a process of its own: the parent's side."""

from __future__ import annotations

import logging
import pickle
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final, NamedTuple, TypeVar

from headway.core.contract.errors import ConfigError
from headway.core.system.child import how_it_ended
from headway.driver import EngineDriver, Listener
from headway.engine_host import EngineDeadError, Task, give_up
from headway.engine_messages import Answered, Asked, Dead, Failed, Ready, Start, Stepped
from headway.engine_spawn import Spawned, spawn_engine
from headway.heap import freeze_heap
from headway.intake import Intake
from headway.models.loader import read_tokenizer
from headway.request_names import RequestNames

log = logging.getLogger("headway")

T = TypeVar("T")

_UNSENDABLE: Final = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises."""
_END_SECONDS: Final = 20.0
"""For the process to end by itself: a step may run, and files may have to be written."""


class TextFacts(NamedTuple):
    """A headway.intake.TextModel without its weights."""

    name: str
    folder: Path
    tokenizer: Any


class EngineProcess:
    """Runs an engine in a child process; an `EngineHost`.

    The child ends with this process, whatever ends that.
    """

    def __init__(self, make: Callable[[], EngineDriver], spawned: Spawned | None = None) -> None:
        """Load the model there, and wait for it.

        make: called in the child, `partial(driver_of, args)`. spawned: the child, if it was begun already.

        :raises HeadwayError: anything the caller can put right.
        :raises EngineDeadError: the process has ended instead.
        """
        self._process, self._wire = spawned or spawn_engine()
        self._guard = Lock()
        """Of `_error` and `_waiting`."""
        self._error: EngineDeadError | None = None
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = count()
        self._listeners: list[Listener] = []
        self._died: list[Callable[[EngineDeadError], None]] = []
        self._num_sequences = 0, 0
        self.names = RequestNames()
        try:
            ready = self._begin(make)
            tokenizer = read_tokenizer(ready.folder) if ready.has_tokenizer else None
        except BaseException:
            self._end()
            raise
        self.model, self.facts = TextFacts(ready.name, ready.folder, tokenizer), ready.facts
        self.intake = Intake(self.model, ready.facts.limits)
        freeze_heap()
        Thread(target=self._read, name="headway-engine-process", daemon=True).start()

    @property
    def error(self) -> EngineDeadError | None:
        """See EngineHost."""
        return self._error

    @property
    def num_sequences(self) -> tuple[int, int]:
        """See EngineHost; after the last step that has brought something, or the last task."""
        return self._num_sequences

    def listen(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        """See EngineHost. Both are called in a thread of this process."""
        self._died.append(died)
        self._listeners.append(listener)

    def leave(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        """See EngineHost."""
        self._listeners.remove(listener)
        unfinished()  # the engine has ended, and they with it

    def call(self, task: Task[T]) -> Future[T]:
        """See EngineHost."""
        return self._ask(task, aside=False)

    def aside(self, task: Task[T]) -> Future[T]:
        """See EngineHost."""
        return self._ask(task, aside=True)

    def stop(self) -> None:
        """See EngineHost."""
        self._fail(EngineDeadError("the engine was shut down"))
        self._end()

    def _begin(self, make: Callable[[], EngineDriver]) -> Ready:
        try:
            self._wire.send(Start(make, log.getEffectiveLevel()))
            answer = self._wire.receive()
        except (EOFError, OSError):
            raise self._how_it_ended() from None
        except _UNSENDABLE as error:
            raise _unsendable("its options", error) from error
        if isinstance(answer, Failed):
            raise answer.raised()
        assert isinstance(answer, Ready)
        return answer

    def _ask(self, task: Task[T], aside: bool) -> Future[T]:
        try:
            data = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        except _UNSENDABLE as error:
            raise _unsendable("what it is asked for", error) from error
        future: Future[T] = Future()
        with self._guard:
            if self._error is not None:
                raise EngineDeadError(str(self._error)) from self._error.__cause__
            number = next(self._numbers)
            self._waiting[number] = future
        with suppress(OSError):  # it has just ended: `_read` tells everybody
            self._wire.send(Asked(number, data, aside))
        return future

    def _read(self) -> None:
        """Hand on what the process tells, until it ends."""
        try:
            while True:
                message = self._wire.receive()
                if isinstance(message, Stepped):
                    self._hear(message)
                elif isinstance(message, Dead):
                    self._fail(_dead(message.message, RuntimeError(message.cause)))
                else:
                    self._resolve(message)
        except (EOFError, OSError):
            if self._error is None:
                self._fail(self._how_it_ended())
        except BaseException as fault:  # whatever it is, somebody waits for this thread
            self._fail(_dead(f"what the engine's process told could not be handed on: {type(fault).__name__}: {fault}", fault))
            self._wire.close()

    def _hear(self, step: Stepped) -> None:
        self._num_sequences = step.num_sequences
        deltas = step.outputs()
        for listener in list(self._listeners):
            for key, index in listener(deltas):
                give_up(self, key, index)

    def _resolve(self, message: Answered | Failed) -> None:
        assert message.number is not None
        with self._guard:
            future = self._waiting.pop(message.number, None)
        if isinstance(message, Answered):
            self._num_sequences = message.num_sequences
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(message, Failed):
            future.set_exception(message.raised())
            return
        try:
            future.set_result(pickle.loads(message.result))
        except Exception as error:  # a class that is found in the child alone
            future.set_exception(error)

    def _fail(self, error: EngineDeadError) -> None:
        """Nothing is asked from now on; whoever waits is told, and the clients where a fault is the reason."""
        with self._guard:
            if self._error is not None:
                return
            self._error = error
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        if error.__cause__ is not None:
            log.error("%s", error)
            for died in self._died:
                died(error)

    def _how_it_ended(self) -> EngineDeadError:
        how = f"the engine's process {how_it_ended(self._process.wait())}"
        said = f"{how}; its last lines on stderr may say why, and so may dmesg where memory was short"
        return _dead(said, RuntimeError(how))

    def _end(self) -> None:
        """End the process: by itself if it can, and wait for that."""
        self._wire.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the engine's process has not ended within %g s and is killed", _END_SECONDS)
            self._process.kill()
            self._process.wait()


def _dead(said: str, cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(said)
    error.__cause__ = cause
    return error


def _unsendable(what: str, error: Exception) -> ConfigError:
    need = "objects that can be handed to another process, such as functions of a module"
    return ConfigError(f"the engine's process: {what}", need, str(error), "own_process=False runs the engine in this one")
