"""The hosts of an engine, which run it for AsyncLLM: their interface, their tasks, and the host that is a thread."""

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
"""Work on an engine that its host is sent: a function of a module or a partial of one, where the host is in another process."""


class EngineDeadError(RuntimeError):
    """The thread or process of the engine has ended, by a fault (the cause of this error) or by a shutdown."""


class EngineFacts(NamedTuple):
    """Facts about an engine that never change after its start."""

    limits: RequestLimits
    block_size: int
    num_blocks: int
    max_num_seqs: int
    device: str
    selection: str
    """The chosen backends, and the reasons."""
    rules: RequestRules = RequestRules()
    """What the options say of requests."""
    eos_token_ids: frozenset[int] = frozenset()
    rounding: str = ""
    """What products round of their activations on this processor, in words; empty: nothing."""

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
    """Runs one engine. Any thread may call a host, and no call but `stop` waits for a step."""

    model: TextModel
    facts: EngineFacts
    validator: RequestValidator
    names: RequestNames
    error: EngineDeadError | None = None
    """Why the engine has ended; None while it runs."""
    is_restarting = False
    """True while an engine that has ended is being started again."""

    @property
    @abstractmethod
    def num_sequences(self) -> tuple[int, int]:
        """Sequences that run, and that wait, as far as is known in this process."""

    @property
    @abstractmethod
    def stalled_seconds(self) -> float:
        """Seconds since the engine was last seen to come to the end of a step; 0.0 while there is nothing for it to do."""

    @abstractmethod
    def check_caller(self) -> None:
        """Check that this thread may wait. :raises ConfigError: it runs a step, from a logits processor or a signal handler."""

    def check_alive(self) -> None:
        """:raises EngineDeadError: the engine has ended."""
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error.__cause__

    @abstractmethod
    def add_client(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        """Call `listener` after every step from now on, and `died` where a fault ends the engine, in some thread."""

    @abstractmethod
    def run_between_steps(self, task: Task[T]) -> Future[T]:
        """Queue a task that is done between two steps of the engine. :raises EngineDeadError: the engine has ended."""

    @abstractmethod
    def run_concurrently(self, task: Task[T]) -> Future[T]:
        """Queue a task that runs beside steps and must not change the engine. :raises EngineDeadError: the engine has ended."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine after the step that runs, and wait for that."""

    @abstractmethod
    def remove_client(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        """Remove a client, after `stop`, and end the requests that are `unfinished`."""


def query(function: Callable[[EngineLoop], T]) -> Task[T]:
    """Make the task that calls a function with the engine and returns the function's result."""
    return partial(_query, function=function)


def _query(driver: EngineDriver, function: Callable[[EngineLoop], T]) -> T:
    return function(driver.engine)


def abort_request(host: EngineHost, key: str, index: int | None) -> None:
    """Have a host end one completion of a request, or (None) all of them; nothing happens where the engine has ended."""
    with suppress(EngineDeadError):
        host.run_between_steps(query(partial(EngineLoop.abort, request_id=key, index=index)))


def add_adapter(host: EngineHost, lora_request: LoRARequest) -> None:
    """Have an engine read an adapter, and wait for that. Raises as `AsyncLLM.add_lora`."""
    host.run_between_steps(partial(keep_adapter, lora_request=lora_request)).result()


def read_adapter(driver: EngineDriver, lora_request: LoRARequest) -> None:
    """Read an adapter and leave it for `keep_adapter`; a task."""
    driver.task_state[f"adapter {lora_request.lora_int_id}"] = driver.engine.adapter_table.reader.read(lora_request)


def keep_adapter(driver: EngineDriver, lora_request: LoRARequest) -> None:
    """Let requests name an adapter, which is read now unless `read_adapter` has; a task."""
    driver.engine.adapter_table.add(lora_request, driver.task_state.pop(f"adapter {lora_request.lora_int_id}", None))


def remove_adapter(engine: EngineLoop, lora_id: int) -> bool:
    """Forget an adapter; False if none has this number."""
    return engine.adapter_table.remove(lora_id)


def adapter_ids(engine: EngineLoop) -> set[int]:
    """Return the numbers of the adapters that have been read."""
    return {each.lora_int_id for each in engine.adapter_table.known}


_IDLE: Final = 1.0  # Seconds without work after which freed memory is given back, once, where the engine runs on a CPU

Call = tuple[Task[Any], "Future[Any]"]


class EngineThread(EngineHost):
    """Steps an engine in a thread of this process. Tasks are queued, so that nobody waits for a step to hand one in."""

    def __init__(self, driver: EngineDriver, *, owned: bool = True) -> None:
        """owned: the engine ends with this host; else another one, or an LLM, has it too."""
        self.driver = driver
        self._owned = owned
        self.model = driver.text_model
        self.validator = driver.validator
        self.names = driver.names
        self.facts = EngineFacts.of(driver)
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._guard = Lock()  # Protects `error`, so that no task is queued after the queue was emptied for the last time
        self._began: float | None = None  # When the thread turned to the step that it is at; None: it waits for work
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
        """End the thread after the step that runs, and wait for that; requests that are left are not ended."""
        with self._guard:
            if self.error is None:
                self.error = EngineDeadError("the engine was shut down")
                self._calls.put(None)
        self._concurrent.shutdown(wait=False, cancel_futures=True)
        if current_thread() is not self.thread:
            self.thread.join()
            if self._owned:
                self.driver.engine.executor.shutdown()
            if self.driver.on_cpu:
                trim_memory()  # the thread's own compiled products were freed with it

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
                trim_memory()
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
