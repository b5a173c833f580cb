"""`LLMEngine`: requests by id, and a step at a time; and what `LLM` and `LLMEngine` show of their engine."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Self, TypeVar

from headway.compat.vllm_views import EngineMetric, VllmConfig, metrics_of
from headway.compat.vllm_words import check_keywords, missing_attribute
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError
from headway.core.engine.data.stats import EngineSnapshot
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.engine_args import EngineArgs, takes_arguments_of
from headway.hosting import live_model
from headway.hosting.driver import EngineDriver, driver_of
from headway.hosting.live_model import worker_of
from headway.hosting.profiling import MOST_STEPS, ProfileRequest, StepsProfile, start_profile, stop_profile, write_trace
from headway.models.checkpoints.tokenizer import transformers_tokenizer
from headway.models.loader import LoadedModel
from headway.outputs import RequestOutput
from headway.requests.prompts import Prompt, list_of_one
from headway.requests.request_state import OutputProcessor, Progress, RequestState

log = logging.getLogger("headway")

T = TypeVar("T")


class EngineAccess(ABC):
    """The engine behind a client, under vLLM's names where it has them."""

    tokenizer: Any
    """The model's tokenizer, with the attributes of transformers'; None if the model was loaded without one."""

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
            self.engine.forget_prefixes(everywhere=True)
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
            return live_model.collective_rpc(self.driver, lambda worker: func(worker.get_model()))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now; return True, as vLLM does. :raises ConfigError: it cannot be served, or enable_lora is off."""
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
        """Trace at most a thousand steps until `stop_profile`, into $VLLM_TORCH_PROFILER_DIR, else headway-profile."""
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
        """Return transformers' tokenizer of the model; None if the model was loaded without one."""
        return transformers_tokenizer(self.tokenizer)


class LLMEngine(EngineAccess):
    """A model and its engine, whose steps the caller runs. Methods are named as those of vLLM's LLMEngine."""

    @takes_arguments_of(EngineArgs)
    def __init__(self, *model: object, **options: object) -> None:
        """Load a model and set up its engine; options as LLM's. :raises HeadwayError: a mistake of the caller, in one line."""
        self._start(driver_of(EngineArgs.of(*model, **options)))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: object, **__: object) -> Self:
        """Make an engine with these options; arguments beside them concern vLLM's processes and reports, and are not read."""
        return cls.over(driver_of(engine_args))

    @classmethod
    def over(cls, driver: EngineDriver) -> Self:
        """Make an LLMEngine over an engine that runs already; its other clients' requests share the batch."""
        made = cls.__new__(cls)
        made._start(driver)
        return made

    def _start(self, driver: EngineDriver) -> None:
        self._driver = driver
        self.tokenizer = driver.assembly.model.tokenizer
        self._processor = OutputProcessor(self.tokenizer)
        self._requests: dict[str, tuple[str, RequestState]] = {}  # Request id -> the engine's name for it, and its state
        driver.add_listener(self._processor.process)

    @property
    def driver(self) -> EngineDriver:
        return self._driver

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *positional: object,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        prompt_text: str | None = None,
        **others: object,
    ) -> str:
        """Queue a request; `step` returns its outputs. Returns the id.

        prompt, params, lora_request: see LLM.generate. priority: see scheduling_policy. arrival_time is not read: a request
        arrives now. others, positional: arguments of vLLM's; those that ask for something are refused.

        :raises PromptError: an empty or too long prompt.
        :raises ConfigError: the id is taken, or a parameter or a keyword cannot work.
        """
        adapters = [each for each in positional if isinstance(each, LoRARequest)]  # vLLM has it after arrival_time
        lora_request = lora_request or next(iter(adapters), None)
        if any(each is not None and not isinstance(each, float | LoRARequest) for each in positional):
            raise ConfigError(
                "LLMEngine.add_request", "keywords after request_id, prompt and params", f"{len(positional)} arguments more"
            )
        check_keywords("LLMEngine.add_request", others, ("request_id", "prompt", "params", "priority", "arrival_time"))
        driver = self.driver
        (request,) = driver.validator.check(list_of_one(prompt), params, priority, lora_request=lora_request, streamed=True)
        name = driver.names.claim(request_id)
        state = self._processor.add(request_id, request, Progress(), name.key)
        self._requests[request_id] = (name.key, state)
        try:
            with driver.lock:
                driver.engine.add_request(name.key, request)
        except BaseException:  # a refusal of the engine, an interrupt
            self._forget(request_id)
            raise
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step, and return an output of each request that has something new, by its output_kind."""
        with self.driver.lock:
            if self.engine.has_unfinished:
                self.driver.step()
            outputs = [state.next_output() for _, state in self._requests.values() if state.has_news]
        for output in outputs:
            if output.finished:
                self._forget(output.request_id)
        return outputs

    def abort_request(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests, whose outputs are dropped; one that is unknown or has ended is left alone."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            if each in self._requests:
                key = self._requests[each][0]
                with self.driver.lock:
                    self.engine.abort(key)
                self._forget(each)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has outputs to come."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output `step` has not returned."""
        return len(self._requests)

    def do_log_stats(self) -> None:
        """Nothing: log_stats_interval has the log tell statistics."""

    @property
    def vllm_config(self) -> VllmConfig:
        """The options and the model's sizes under vLLM's names."""
        settings = self.driver.assembly.settings
        assert settings is not None, "assemble() makes them"
        return settings

    model_config = property(attrgetter("vllm_config.model_config"))
    cache_config = property(attrgetter("vllm_config.cache_config"))
    scheduler_config = property(attrgetter("vllm_config.scheduler_config"))
    parallel_config = property(attrgetter("vllm_config.parallel_config"))

    @property
    def model_executor(self) -> Any:
        """What programs that change weights look for: `driver_worker`, and `collective_rpc`."""
        return SimpleNamespace(driver_worker=worker_of(self.driver), collective_rpc=self.collective_rpc)

    def get_model_config(self) -> Any:
        """The same as `model_config`."""
        return self.model_config

    def _forget(self, request_id: str) -> None:
        key, _ = self._requests.pop(request_id)
        self._processor.remove(key)
        self.driver.names.release(request_id)
