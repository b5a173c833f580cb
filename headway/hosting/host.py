"""Engine hosts for AsyncLLM: their interface, their tasks, and the host that runs the engine in a thread."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, Final, NamedTuple, TypeVar

import torch

from headway.core.contract.adapters import LoRARequest
from headway.core.engine.data.executor import ExecutorLostError
from headway.core.engine.data.request_limits import RequestLimits
from headway.core.engine.loop import EngineLoop
from headway.hosting.driver import EngineDriver, Listener
from headway.machine.process import trim_memory
from headway.requests.validation import RequestNames, RequestRules, RequestValidator, TextModel

log = logging.getLogger("headway")

T = TypeVar("T")
Task = Callable[[EngineDriver], T]
"""Function that a host calls with its engine's driver. For an engine in another process, the function must be a module-level
function or a partial of one."""


class EngineDeadError(RuntimeError):
    """Error for an engine whose thread or process has ended, because of a fault (this error's cause) or a shutdown."""


class EngineFacts(NamedTuple):
    """Facts about an engine that do not change after its start."""

    limits: RequestLimits
    block_size: int
    num_blocks: int
    max_num_seqs: int
    device: str
    selection: str
    """Text that names the chosen backends and the reasons."""
    rules: RequestRules = RequestRules()
    """Rules for requests, as set by the options."""
    eos_token_ids: frozenset[int] = frozenset()
    rounding: str = ""
    """Description of how this CPU's kernels round activations; empty if they do not."""

    @classmethod
    def of(cls, driver: EngineDriver) -> EngineFacts:
        """Read the facts about a driver's engine."""
        engine, pool = driver.engine, driver.engine.capacity.pool
        return cls(
            limits=engine.limits,
            block_size=pool.page_format.block_size,
            num_blocks=pool.num_pages,
            max_num_seqs=engine.capacity.max_num_seqs,
            device=str(driver.assembly.device),
            selection=str(engine.selection),
            rules=driver.assembly.rules,
            eos_token_ids=driver.assembly.model.eos_token_ids,
            rounding=driver.assembly.model.rounding,
        )


class EngineHost(ABC):
    """Interface to one running engine. Any thread may call a host; only `stop` waits for a step."""

    model: TextModel
    facts: EngineFacts
    validator: RequestValidator
    names: RequestNames
    error: EngineDeadError | None = None
    """Reason why the engine has ended. None while it runs."""
    is_restarting = False
    """True while a replacement for an engine that ended is being started."""

    @property
    @abstractmethod
    def num_sequences(self) -> tuple[int, int]:
        """Numbers of running and waiting sequences, as far as this process knows."""

    @property
    @abstractmethod
    def stalled_seconds(self) -> float:
        """Seconds since the engine last finished a step; 0.0 while it has no work."""

    @abstractmethod
    def check_caller(self) -> None:
        """Check that this thread may wait for a step. :raises ConfigError: if the call comes from within a step."""

    def check_alive(self) -> None:
        """Check that the engine runs. :raises EngineDeadError: if it has ended."""
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error.__cause__

    @abstractmethod
    def add_client(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        """Call `listener` after every step from now on, and `died`, in any thread, if a fault ends the engine."""

    @abstractmethod
    def run_between_steps(self, task: Task[T]) -> Future[T]:
        """Queue a task to run between two steps of the engine. :raises EngineDeadError: if the engine has ended."""

    @abstractmethod
    def run_concurrently(self, task: Task[T]) -> Future[T]:
        """Queue a task to run during steps; it must not change the engine. :raises EngineDeadError: if the engine has ended."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine after the running step, and wait until it has ended."""

    @abstractmethod
    def remove_client(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        """Remove a client after `stop`, and abort its requests. unfinished: function that returns the engine's names for the
        client's unfinished requests."""


def query(function: Callable[[EngineLoop], T]) -> Task[T]:
    """Return a task that calls a function with the engine and returns its result."""
    return partial(_query, function=function)


def _query(driver: EngineDriver, function: Callable[[EngineLoop], T]) -> T:
    return function(driver.engine)


def abort_request(host: EngineHost, key: str, index: int | None) -> None:
    """Abort one completion of a request, or all completions if `index` is None. Do nothing if the engine has ended."""
    with suppress(EngineDeadError):
        host.run_between_steps(query(partial(EngineLoop.abort, request_id=key, index=index)))


def add_adapter(host: EngineHost, lora_request: LoRARequest) -> None:
    """Load an adapter into an engine, and wait until the adapter is loaded. Raises the same errors as `AsyncLLM.add_lora`."""
    host.run_between_steps(partial(register_adapter, lora_request=lora_request)).result()


def read_adapter(driver: EngineDriver, lora_request: LoRARequest) -> None:
    """Read an adapter from disk and store it for `register_adapter`. Runs as a task."""
    driver.task_state[f"adapter {lora_request.lora_int_id}"] = driver.engine.adapter_table.reader.read(lora_request)


def register_adapter(driver: EngineDriver, lora_request: LoRARequest) -> None:
    """Make an adapter available to requests. Read the adapter from disk first unless `read_adapter` has done so. Runs as a
    task."""
    driver.engine.adapter_table.add(lora_request, driver.task_state.pop(f"adapter {lora_request.lora_int_id}", None))


def remove_adapter(engine: EngineLoop, lora_id: int) -> bool:
    """Remove an adapter. Return False if no adapter has this id."""
    return engine.adapter_table.remove(lora_id)


def adapter_ids(engine: EngineLoop) -> set[int]:
    """Return the ids of the adapters that have been read."""
    return {each.lora_int_id for each in engine.adapter_table.known}


_IDLE: Final = 1.0  # Idle seconds after which a CPU engine returns freed memory once

Call = tuple[Task[Any], "Future[Any]"]


class EngineThread(EngineHost):
    """Host that steps an engine in a thread of this process. Tasks are queued, so callers do not wait for a step."""

    def __init__(self, driver: EngineDriver, *, owned: bool = True) -> None:
        """owned: True if the engine ends with this host; False if another host or an LLM uses it too."""
        self.driver = driver
        self._owned = owned
        self.model = driver.text_model
        self.validator = driver.validator
        self.names = driver.names
        self.facts = EngineFacts.of(driver)
        self._tuner = driver.assembly.tuner if owned else None
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._guard = Lock()  # Protects `error`, so that no task is queued after the last one was taken
        self._began: float | None = None  # Start of the current step; None if the thread waits for work
        self._died: list[Callable[[EngineDeadError], None]] = []
        self._concurrent = ThreadPoolExecutor(1, "headway-concurrent")
        self.thread = Thread(target=self._run, name="headway-engine", daemon=True)
        self.thread.start()
        driver.engine.executor.call_when_lost(self._lost)

    @property
    def num_sequences(self) -> tuple[int, int]:
        scheduler = self.driver.engine.scheduler
        return len(scheduler.running), len(scheduler.waiting)

    @property
    def stalled_seconds(self) -> float:
        began = self._began
        return 0.0 if began is None or self.error is not None else time.monotonic() - began

    def check_caller(self) -> None:
        self.driver.lock.check_not_mine()

    def add_client(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        self._died.append(died)
        self.driver.add_listener(listener)

    def run_between_steps(self, task: Task[T]) -> Future[T]:
        future: Future[T] = Future()
        with self._guard:
            self.check_alive()
            self._calls.put((task, future))
        return future

    def run_concurrently(self, task: Task[T]) -> Future[T]:
        with self._guard:
            self.check_alive()
            return self._concurrent.submit(task, self.driver)

    def remove_client(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        self.driver.remove_listener(listener)
        with self.driver.lock:
            for key in unfinished():
                self.driver.engine.abort(key)

    def stop(self) -> None:
        """End the thread after the running step, and wait until it has ended. Unfinished requests are not aborted."""
        with self._guard:
            if self.error is None:
                self.error = EngineDeadError("the engine was shut down")
                self._calls.put(None)
        self._concurrent.shutdown(wait=False, cancel_futures=True)
        if self._tuner is not None:
            self._tuner.close()
        if current_thread() is not self.thread:
            self.thread.join()
            if self._owned:
                self.driver.engine.executor.shutdown()
            if self.driver.on_cpu:
                trim_memory()  # its per-thread compiled kernels were freed

    def _run(self) -> None:
        driver, engine, busy = self.driver, self.driver.engine, False
        torch.set_num_threads(torch.get_num_threads())  # OpenMP's thread count is set per calling thread
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
                        if self._tuner is not None:
                            self._tuner.busy()
                        driver.step()
                    busy = engine.has_unfinished
        except BaseException as fault:  # any fault, because clients wait for this thread
            engine.record_fault(f"the engine ended: {type(fault).__name__}")
            self._end_by(fault)

    def _next_calls(self, wait: bool) -> tuple[list[Call], bool]:
        """Return the calls queued since the last step, and whether the thread must end. wait: True to wait for a call."""
        calls: list[Call] = []
        idle = _IDLE if self.driver.on_cpu else None
        while True:
            try:
                pauses = [each for each in (idle, self._tune() if wait else None) if each is not None]
                call = self._calls.get(block=wait, timeout=min(pauses, default=None))
            except Empty:
                if not wait:
                    return calls, False
                if idle is not None:
                    trim_memory()
                    idle = None
                continue
            if call is None:
                return calls, True
            calls.append(call)
            wait = False

    def _tune(self) -> float | None:
        """Measure kernels while no request runs. Return the seconds until this must be called again, or None for never."""
        if self._tuner is None or self.driver.engine.has_unfinished or self.driver.engine.asleep:
            return None
        try:
            with self.driver.lock:
                return self._tuner.idle()
        except Exception as error:  # requests need none of it
            log.warning("auto: measuring while idle has ended: %s: %s", type(error).__name__, error)
            self._tuner.close()
            self._tuner = None
            return None

    def _lost(self, fault: ExecutorLostError) -> None:
        """End the host. Called from a different thread when the engine can run no more steps; the engine's own thread may be
        blocked."""
        self._end_by(fault)
        self._calls.put(None)

    def _end_by(self, fault: BaseException) -> None:
        lost = isinstance(fault, ExecutorLostError)  # complete in itself, and perhaps reported by `_lost` already
        error = EngineDeadError(str(fault) if lost else f"the engine's thread has ended: {type(fault).__name__}: {fault}")
        error.__cause__ = fault
        with self._guard:
            if self.error is not None:
                return
            self.error = error
            calls, _ = self._next_calls(wait=False)
        log.error("%s", error, exc_info=None if lost else fault)
        for _, future in calls:
            future.set_exception(error)
        for died in self._died:
            died(error)


def _serve(task: Task[T], driver: EngineDriver, future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(task(driver))
    except Exception as error:
        future.set_exception(error)
