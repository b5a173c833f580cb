"""Where an engine runs, as the clients of an AsyncLLM see it: in a thread of their process, or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from headway.core.engine.limits import PromptLimits
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.driver import EngineDriver, Listener
from headway.intake import Intake, TextModel
from headway.request_names import RequestNames

T = TypeVar("T")
Task = Callable[[EngineDriver], T]
"""What an engine's host is asked to do. A host in another process is sent it: a function of a module, or a partial of one."""


class EngineDeadError(RuntimeError):
    """What runs the engine has ended, by a fault (its cause) or by a shutdown."""


class EngineFacts(NamedTuple):
    """What stays true of an engine while it runs."""

    limits: PromptLimits
    block_size: int
    """Tokens of a block of the cache."""
    num_blocks: int
    max_num_seqs: int
    """Sequences that a step serves at most."""
    device: str
    selection: str
    """The backends that were chosen, and why."""

    @classmethod
    def of(cls, driver: EngineDriver) -> EngineFacts:
        """Those of a driver's engine."""
        engine = driver.engine
        pool, most = engine.capacity.pool, engine.capacity.max_num_seqs
        facts = engine.limits, pool.page_format.block_size, pool.num_pages, most
        return cls(*facts, str(driver.assembly.device), str(engine.executor.selector.selection))


class EngineHost(Protocol):
    """Runs one engine. Calls never wait for its steps; any thread may make them."""

    facts: EngineFacts
    intake: Intake
    names: RequestNames

    @property
    def model(self) -> TextModel:
        """What the engine computes."""

    @property
    def error(self) -> EngineDeadError | None:
        """Why it has ended; None while it runs."""

    @property
    def num_sequences(self) -> tuple[int, int]:
        """Sequences that run, and those that wait, as far as is known here."""

    def listen(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        """Have a client hear of every step from now on, and of the end that a fault brings."""

    def call(self, task: Task[T]) -> Future[T]:
        """Have a task done between two steps of the engine.

        :raises EngineDeadError: it has ended.
        """

    def aside(self, task: Task[T]) -> Future[T]:
        """Have a task done beside the engine's steps, which it must not change. It raises as `call`."""

    def stop(self) -> None:
        """End after the step that runs, and wait for that."""

    def leave(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        """After `stop`: the client hears of no more, and the requests that it names are ended."""


def add_request(key: str, prompt: Sequence[int], params: SamplingParams, priority: int) -> Task[None]:
    """The task of queueing a request."""
    return partial(_add, key=key, prompt=prompt, params=params, priority=priority)


def give_up(host: EngineHost, key: str, index: int | None) -> None:
    """Have a host end a completion of a request, or (None) all of it; one that has ended needs nobody to say so."""
    with suppress(EngineDeadError):
        host.call(partial(_abort, key=key, index=index))


def look(function: Callable[[EngineLoop], T]) -> Task[T]:
    """The task of calling a function with the engine."""
    return partial(_look, function=function)


def _add(driver: EngineDriver, key: str, prompt: Sequence[int], params: SamplingParams, priority: int) -> None:
    driver.engine.add_request(key, prompt, params, priority)


def _abort(driver: EngineDriver, key: str, index: int | None) -> None:
    driver.engine.abort(key, index)


def _look(driver: EngineDriver, function: Callable[[EngineLoop], T]) -> T:
    return function(driver.engine)
