"""The interface of an engine's host, the thread or process that runs an engine for AsyncLLM; its tasks and its adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from headway.core.contract.adapters import LoRARequest
from headway.core.engine.data.request_limits import CheckedRequest, RequestLimits
from headway.core.engine.loop import EngineLoop
from headway.hosting.driver import EngineDriver, Listener
from headway.requests.validation import RequestNames, RequestRules, RequestValidator, TextModel

T = TypeVar("T")
Task = Callable[[EngineDriver], T]
"""Work on an engine that its host is sent: a function of a module or a partial of one, where the host is in another process."""


class EngineDeadError(RuntimeError):
    """The thread or process of the engine has ended, by a fault (the cause of this error) or by a shutdown."""


class EngineFacts(NamedTuple):
    """Facts about an engine that never change after its start."""

    limits: RequestLimits
    block_size: int
    """Tokens of a block of the cache."""
    num_blocks: int
    max_num_seqs: int
    """Sequences that a step serves at most."""
    device: str
    selection: str
    """The chosen backends, and the reasons."""
    rules: RequestRules = RequestRules()
    """What the options say of requests."""
    eos_token_ids: frozenset[int] = frozenset()
    """The tokens that end the model's texts."""
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


class EngineHost(Protocol):
    """Runs one engine. Any thread may call a host, and no call but `stop` waits for a step."""

    validator: RequestValidator
    names: RequestNames

    @property
    def model(self) -> TextModel:
        """The model that the engine runs."""

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine."""

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine has ended; None while it runs."""

    @property
    def num_sequences(self) -> tuple[int, int]:
        """Sequences that run, and that wait, as far as is known in this process."""

    @property
    def is_restarting(self) -> bool:
        """Whether an engine that has ended is being started again."""

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the engine was last seen to come to the end of a step; 0.0 while there is nothing for it to do."""

    def check_caller(self) -> None:
        """Check that the calling thread may wait for the engine.

        :raises ConfigError: it runs a step of the engine itself, which calls a logits processor or the handler of a signal.
        """

    def add_client(self, listener: Listener, died: Callable[[EngineDeadError], None]) -> None:
        """Call `listener` after every step from now on, and `died` where a fault ends the engine."""

    def run_between_steps(self, task: Task[T]) -> Future[T]:
        """Queue a task that is done between two steps of the engine.

        :raises EngineDeadError: the engine has ended.
        """

    def run_concurrently(self, task: Task[T]) -> Future[T]:
        """Queue a task that is done while the engine steps, and must not change the engine.

        :raises EngineDeadError: the engine has ended.
        """

    def stop(self) -> None:
        """End the engine after the step that runs, and wait for that."""

    def remove_client(self, listener: Listener, unfinished: Callable[[], Sequence[str]]) -> None:
        """Remove a client, after `stop`, and end the requests that are `unfinished`."""


def add_request(key: str, request: CheckedRequest) -> Task[None]:
    """Make the task that queues a request in the engine."""
    return partial(_add, key=key, request=request)


def abort_request(host: EngineHost, key: str, index: int | None) -> None:
    """Have a host end one completion of a request, or (None) all of them; nothing happens where the engine has ended."""
    with suppress(EngineDeadError):
        host.run_between_steps(partial(_abort, key=key, index=index))


def query(function: Callable[[EngineLoop], T]) -> Task[T]:
    """Make the task that calls a function with the engine and returns the function's result."""
    return partial(_query, function=function)


def _add(driver: EngineDriver, key: str, request: CheckedRequest) -> None:
    driver.engine.add_request(key, request)


def _abort(driver: EngineDriver, key: str, index: int | None) -> None:
    driver.engine.abort(key, index)


def _query(driver: EngineDriver, function: Callable[[EngineLoop], T]) -> T:
    return function(driver.engine)


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
