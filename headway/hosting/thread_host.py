"""An engine in a thread of this process, which steps the engine while there is work, and does tasks between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, Final, TypeVar

import torch

from headway.core.engine.data.executor import ExecutorLostError
from headway.hosting.driver import EngineDriver, Listener
from headway.hosting.host import EngineDeadError, EngineFacts, Task
from headway.machine.memory import give_back

log = logging.getLogger("headway")

_IDLE: Final = 1.0
"""Seconds without work after which freed memory is given back, once, where the engine runs on a CPU."""

T = TypeVar("T")
Call = tuple[Task[Any], "Future[Any]"]


class EngineThread:
    """Steps an engine in a thread of this process; an `EngineHost`. Tasks are queued, so that nobody waits for a step to hand one
    in."""

    def __init__(self, driver: EngineDriver, *, owned: bool = True) -> None:
        """owned: the engine ends with this host; else another one, or an LLM, has it too."""
        self.driver = driver
        self._owned = owned
        self.model = driver.assembly.model
        self.validator = driver.validator
        self.names = driver.names
        self.facts = EngineFacts.of(driver)
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._guard = Lock()
        """Protects `_error`, so that no task is queued after the queue was emptied for the last time."""
        self._error: EngineDeadError | None = None
        self._began: float | None = None
        """When the thread turned to the step, and the tasks before it, that it is at; None: it waits for work."""
        self._died: list[Callable[[EngineDeadError], None]] = []
        self._concurrent = ThreadPoolExecutor(1, "headway-concurrent")
        self.thread = Thread(target=self._run, name="headway-engine", daemon=True)
        self.thread.start()
        driver.engine.executor.call_when_lost(self._lost)

    @property
    def error(self) -> EngineDeadError | None:
        """See EngineHost."""
        return self._error

    @property
    def num_sequences(self) -> tuple[int, int]:
        """See EngineHost."""
        scheduler = self.driver.engine.scheduler
        return len(scheduler.running), len(scheduler.waiting)

    @property
    def is_restarting(self) -> bool:
        """See EngineHost. A thread is not started again."""
        return False

    @property
    def stalled_seconds(self) -> float:
        """See EngineHost."""
        began = self._began
        return 0.0 if began is None or self._error is not None else time.monotonic() - began

    def check_caller(self) -> None:
        """See EngineHost."""
        self.driver.lock.check_not_mine()

    def add_client(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        """See EngineHost. Both are called in the engine's thread."""
        self._died.append(died)
        self.driver.add_listener(listener)

    def run_between_steps(self, task: Task[T]) -> Future[T]:
        """See EngineHost."""
        future: Future[T] = Future()
        with self._guard:
            self._check()
            self._calls.put((task, future))
        return future

    def run_concurrently(self, task: Task[T]) -> Future[T]:
        """See EngineHost."""
        with self._guard:
            self._check()
            return self._concurrent.submit(task, self.driver)

    def remove_client(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        """See EngineHost."""
        self.driver.remove_listener(listener)
        with self.driver.lock:
            for key in unfinished():
                self.driver.engine.abort(key)

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after the step that runs, and wait for that; requests that are left are not ended."""
        with self._guard:
            if self._error is None:
                self._error = EngineDeadError("the engine was shut down")
                self._calls.put(None)
        self._concurrent.shutdown(wait=False, cancel_futures=True)
        if current_thread() is not self.thread:
            self.thread.join(timeout)
            if self._owned:
                self.driver.engine.executor.shutdown()
            if self.driver.on_cpu:
                give_back()  # the thread's own compiled products were freed with it

    def _run(self) -> None:
        driver, engine, busy = self.driver, self.driver.engine, False
        torch.set_num_threads(torch.get_num_threads())  # OpenMP has a number of threads for each thread of ours
        if driver.assembly.device.type == "cuda":
            torch.cuda.set_device(driver.assembly.device)
        try:
            while True:
                self._began = None if not busy else time.monotonic()
                calls, stopped = self._next_calls(wait=not busy)
                self._began = time.monotonic()
                with driver.lock:
                    for task, future in calls:
                        _serve(task, driver, future)
                    if stopped:
                        return
                    if engine.has_unfinished:
                        driver.step()
                    busy = engine.has_unfinished
        except BaseException as fault:  # whatever it is, clients wait for this thread
            self._end_by(fault)

    def _next_calls(self, wait: bool) -> tuple[list[Call], bool]:
        """Return the calls queued since the last step, and whether the thread is to end. wait: block until there is one."""
        calls: list[Call] = []
        idle = _IDLE if self.driver.on_cpu else None
        while True:
            try:
                call = self._calls.get(block=wait, timeout=idle)
            except Empty:
                if not wait:
                    return calls, False
                give_back()
                idle = None
                continue
            if call is None:
                return calls, True
            calls.append(call)
            wait = False

    def _lost(self, fault: ExecutorLostError) -> None:
        """Called in another thread when the engine can run no step any more, while its own may wait for work, or for a device."""
        self._end_by(fault)
        self._calls.put(None)

    def _end_by(self, fault: BaseException) -> None:
        lost = isinstance(fault, ExecutorLostError)  # which names all that there is to know, and may have been told by `_lost`
        error = EngineDeadError(str(fault) if lost else f"the engine's thread has ended: {type(fault).__name__}: {fault}")
        error.__cause__ = fault
        with self._guard:
            if self._error is not None:
                return
            self._error = error
            calls, _ = self._next_calls(wait=False)
        log.error("%s", error, exc_info=None if lost else fault)
        for _, future in calls:
            future.set_exception(error)
        for died in self._died:
            died(error)

    def _check(self) -> None:
        """:raises EngineDeadError: the engine has ended."""
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error.__cause__


def _serve(task: Task[T], driver: EngineDriver, future: Future[T]) -> None:
    """Do a task and fulfil its future, also with what the task raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(task(driver))
    except Exception as error:
        future.set_exception(error)
