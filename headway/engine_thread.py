"""A thread that steps an engine while there is work, and does what others ask of the engine between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, Final, TypeVar

import torch

from headway.core.engine.loop import EngineLoop
from headway.driver import EngineDriver
from headway.heap import give_back

log = logging.getLogger("headway")

_IDLE: Final = 1.0
"""Seconds without work after which freed memory is given back, once; on a CPU, whose activations and compiled products are this
process's memory."""

T = TypeVar("T")
Call = tuple[Callable[[EngineLoop], Any], "Future[Any]"]


class EngineDeadError(RuntimeError):
    """The thread that runs the engine has ended, by a fault in the engine (its cause) or by a shutdown."""


class EngineThread:
    """Steps an engine in the background. Calls are queued and served between steps, so nobody waits to hand something in."""

    def __init__(self, driver: EngineDriver, died: Callable[[EngineDeadError], None]) -> None:
        """died: called in the thread when a fault in the engine has ended it, to tell everybody who waits for outputs."""
        self._driver, self._died = driver, died
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._guard = Lock()
        """Of `_error`: nothing is queued after the queue was emptied for the last time."""
        self._error: EngineDeadError | None = None
        self._thread = Thread(target=self._run, name="headway-engine", daemon=True)
        self._thread.start()

    @property
    def error(self) -> EngineDeadError | None:
        """Why it has ended; None while it runs."""
        return self._error

    def call(self, function: Callable[[EngineLoop], T]) -> Future[T]:
        """Have the thread call a function with the engine before its next step.

        :raises EngineDeadError: it has ended.
        """
        future: Future[T] = Future()
        with self._guard:
            if self._error is not None:
                raise EngineDeadError(str(self._error)) from self._error.__cause__
            self._calls.put((function, future))
        return future

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after the step that it is in, and wait for that; requests that it leaves are not ended."""
        with self._guard:
            if self._error is None:
                self._error = EngineDeadError("the engine was shut down")
                self._calls.put(None)
        if current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._driver.on_cpu:
                give_back()  # the thread's own compiled products went with it

    def _run(self) -> None:
        driver, engine, busy = self._driver, self._driver.engine, False
        torch.set_num_threads(torch.get_num_threads())  # OpenMP counts its threads for each of ours
        if driver.assembly.device.type == "cuda":
            torch.cuda.set_device(driver.assembly.device)
        try:
            while True:
                calls, stopped = self._next_calls(wait=not busy)
                with driver.turns:
                    for function, future in calls:
                        _serve(function, engine, future)
                    if stopped:
                        return
                    if engine.has_unfinished:
                        driver.step()
                    busy = engine.has_unfinished
        except BaseException as fault:  # whatever it is, somebody waits for this thread
            self._end_by(fault)

    def _next_calls(self, wait: bool) -> tuple[list[Call], bool]:
        """What was asked since the last step, and whether the thread is to end. wait: until there is something."""
        calls: list[Call] = []
        idle = _IDLE if self._driver.on_cpu else None
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

    def _end_by(self, fault: BaseException) -> None:
        log.exception("the engine's thread has ended", exc_info=fault)
        error = EngineDeadError(f"the engine's thread has ended: {type(fault).__name__}: {fault}")
        error.__cause__ = fault
        with self._guard:
            self._error = error
            calls, _ = self._next_calls(wait=False)
        for _, future in calls:
            future.set_exception(error)
        self._died(error)


def _serve(function: Callable[[EngineLoop], T], engine: EngineLoop, future: Future[T]) -> None:
    """Call a function; its fault is its caller's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(engine))
    except Exception as error:
        future.set_exception(error)
