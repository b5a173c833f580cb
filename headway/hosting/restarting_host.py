"""An engine that is started again in a new process where a fault has ended the process before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock, Thread
from typing import TypeVar

from headway.hosting.driver import EngineDriver, Listener
from headway.hosting.host import EngineDeadError, EngineFacts, Task
from headway.hosting.process_host import EngineProcess
from headway.requests.validation import TextModel

log = logging.getLogger("headway")

T = TypeVar("T")


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
