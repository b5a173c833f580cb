"""What `LLM` and `LLMEngine` tell of their engine, and do to it between two steps."""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from headway.compat.vllm.calls import missing_attribute
from headway.compat.vllm.metrics import EngineMetric, metrics_of
from headway.core.contract.adapters import LoRARequest
from headway.core.engine.data.stats import EngineSnapshot
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.hosting import live_model
from headway.hosting.driver import EngineDriver
from headway.hosting.host import Task
from headway.hosting.profiling import MOST_STEPS, ProfileRequest, StepsProfile, start_profile, stop_profile, write_trace
from headway.models.loader import LoadedModel

log = logging.getLogger("headway")

T = TypeVar("T")


class EngineAccess(ABC):
    """The engine behind a client, under vLLM's names where it has them."""

    tokenizer: Any
    """transformers' tokenizer of the model; None where it was loaded without one."""

    @property
    @abstractmethod
    def driver(self) -> EngineDriver:
        """The engine's driver, which several clients may share."""

    @property
    def engine(self) -> EngineLoop:
        """The engine; raises as `driver`."""
        return self.driver.engine

    @property
    def model(self) -> LoadedModel:
        """The model that generates text; raises as `driver`."""
        return self.driver.assembly.model

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model recommends; `generate` and `chat` use them if none are given."""
        return self.driver.validator.default_params()

    def stats(self) -> EngineSnapshot:
        """The engine's figures, at this moment and since its start, read between two steps."""
        with self.driver.lock:
            return self.engine.snapshot()

    def get_metrics(self) -> list[EngineMetric]:
        """The figures of `stats` that vLLM has names for, each as an object with a name and a value."""
        return metrics_of(self.stats(), self.model.name)

    def reset_prefix_cache(self, *_: object, **__: object) -> bool:
        """Forget the prompts that the cache holds; True, as vLLM's returns."""
        with self.driver.lock:
            self.engine.blocks.forget_prefixes(everywhere=True)
        return True

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and cache back until `wake_up`; requests are refused meanwhile.

        level: 1 keeps the weights in the host's memory, 2 reads them from the model's files on waking. The prompts in the cache
        are forgotten. On a GPU, waking captures CUDA graphs anew; on a CPU the weights of level 1 stay where they are.

        :raises ConfigError: a request is unfinished, the engine has several ranks, or level 2 of quantised weights or experts.
        """
        with self.driver.lock:
            live_model.sleep(self.driver, level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back. tags: "weights", "kv_cache" or both, for who wakes one after the other; None: both."""
        with self.driver.lock:
            live_model.wake_up(self.driver, tags)

    def is_sleeping(self) -> bool:
        """Whether weights or cache sleep."""
        return live_model.is_sleeping(self.driver)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function with the engine's worker, or a method of the worker, between two steps; a list of the one result.

        The worker has `model_runner.model.load_weights(pairs of name and tensor)`, `device`, `rank`, `reload_weights`, and the
        methods of the class that worker_extension_cls names. timeout is not read: the call is made in this process.

        :raises ConfigError: the engine has several ranks, or the worker no such method.
        """
        with self.driver.lock:
            return live_model.collective_rpc(self.driver, method, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the worker's model; see `collective_rpc`."""
        with self.driver.lock:
            return live_model.apply_model(self.driver, func)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now, before requests name it; True, as vLLM's returns.

        :raises ConfigError: it cannot be served, or the engine was started without enable_lora.
        """
        adapter = self.engine.adapter_table.reader.read(lora_request)
        with self.driver.lock:
            self.engine.adapter_table.add(lora_request, adapter)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that use it go on with it. False: none has this number."""
        with self.driver.lock:
            return self.engine.adapter_table.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that have been read."""
        with self.driver.lock:
            return {each.lora_int_id for each in self.engine.adapter_table.known}

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to trace steps, at most a thousand; `stop_profile` writes the trace.

        The trace goes into the folder that the environment variable VLLM_TORCH_PROFILER_DIR names, else into headway-profile.
        """
        folder = Path(os.environ.get("VLLM_TORCH_PROFILER_DIR") or "headway-profile") / (profile_prefix or "")
        request = ProfileRequest(skip_steps=0, num_steps=MOST_STEPS)
        self.driver.call_between_steps(partial(start_profile, self.driver, folder.expanduser(), request))

    def stop_profile(self) -> StepsProfile | None:
        """End the trace, write it, log its path, and return where the time of a step went; None: none was begun."""
        if "profiler" not in self.driver.task_state:
            return None
        with self.driver.lock:
            found = stop_profile(self.driver)
        found.trace = write_trace(self.driver)
        log.info("profile: %d steps, %s", found.steps, found.trace or "no trace")
        return found

    def __getattr__(self, name: str) -> NoReturn:
        """Called for attributes that are lacking: for those of vLLM's the error names what comes nearest."""
        raise missing_attribute(name, type(self).__name__)

    def get_tokenizer(self, *_: object) -> Any:
        """The tokenizer; see `tokenizer`."""
        return self.tokenizer


class AsyncModelAccess(ABC):
    """What an asynchronous client does to the model of its engine, where that runs."""

    def __getattr__(self, name: str) -> NoReturn:
        """Called for attributes that are lacking: for those of vLLM's the error names what comes nearest."""
        raise missing_attribute(name, type(self).__name__)

    @abstractmethod
    async def run_task(self, task: Task[T], *, concurrently: bool = False) -> T:
        """Call a task with the engine's driver and return its result."""

    async def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and cache back until `wake_up`; see LLM.sleep. Requests must have ended before."""
        await self.run_task(partial(live_model.sleep, level=level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back; see LLM.wake_up."""
        await self.run_task(partial(live_model.wake_up, tags=tags))

    async def is_sleeping(self) -> bool:
        """Whether weights or cache sleep."""
        return await self.run_task(live_model.is_sleeping)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function with the engine's worker, or a method of the worker; see LLM.collective_rpc.

        An engine in another process needs a function of a module, and values that can be pickled. timeout: seconds to wait.
        """
        call = self.run_task(partial(live_model.collective_rpc, method=method, args=args, kwargs=kwargs))
        return await asyncio.wait_for(call, timeout)
