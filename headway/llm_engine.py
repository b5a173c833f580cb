"""`LLMEngine`, which runs requests one step at a time, and the engine access that `LLM` and `LLMEngine` share."""

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
    """Access to a client's engine. Methods that vLLM also has use vLLM's names."""

    tokenizer: Any
    """The model's tokenizer, with the attributes of transformers tokenizers; None if the model was loaded without one."""

    @property
    @abstractmethod
    def driver(self) -> EngineDriver:
        """The engine's driver, which several clients may share."""

    @property
    def engine(self) -> EngineLoop:
        """The engine. Raises the same errors as `driver`."""
        return self.driver.engine

    @property
    def model(self) -> LoadedModel:
        """The model that generates text. Raises the same errors as `driver`."""
        return self.driver.assembly.model

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's recommended parameters, which `generate` and `chat` use by default."""
        return self.driver.validator.default_params()

    def stats(self) -> EngineSnapshot:
        """Return the engine's current statistics and its totals since the start, read between two steps."""
        with self.driver.lock:
            return self.engine.snapshot()

    def get_metrics(self) -> list[EngineMetric]:
        """Return the statistics that vLLM names, each as an object with a name and a value."""
        return metrics_of(self.stats(), self.model.name)

    def record(self) -> Path:
        """Write the last steps to a file for `headway replay`, between two steps, and return its path; see docs/recorder.md.

        :raises ConfigError: if record_steps is 0, or record_folder cannot be written to.
        """
        with self.driver.lock:
            return self.engine.record()

    def tune(self, seconds: float) -> None:
        """Measure kernels for at most this many seconds, for the steps that have run, and take faster ones. Requires tune="idle".

        :raises ConfigError: if the engine was not made for it, a request is unfinished, or seconds is not a number of at least 0.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise ConfigError("tune()", "a number of seconds of at least 0", repr(seconds))
        tuner = self.driver.assembly.tuner
        if tuner is None:
            need = "tune='idle', and an engine without deterministic and crossover_table that chooses a backend"
            raise ConfigError("tune()", need, "other options", "LLM(..., tune='idle')")
        with self.driver.lock:
            if self.engine.has_unfinished:
                raise ConfigError("tune()", "an engine without requests", "unfinished ones", "let them end, or abort them")
            tuner.run(seconds)

    def reset_prefix_cache(self, *_: object, **__: object) -> bool:
        """Forget all cached prompts. Return True, as vLLM does."""
        with self.driver.lock:
            self.engine.forget_prefixes(everywhere=True)
        return True

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV cache until `wake_up`. Requests are rejected while the engine sleeps, and cached
        prompts are forgotten.

        level: 1 copies the weights to host memory; 2 reads the weights again from the model's files on waking. On a CPU, level 1
        leaves the weights in memory. On a GPU, waking captures CUDA graphs again.
        :raises ConfigError: if a request is unfinished, the engine has several ranks, or level is 2 and the model has quantized
        weights or experts.
        """
        with self.driver.lock:
            live_model.sleep(self.driver, level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the freed memory again. tags: "weights", "kv_cache" or both; None means both."""
        with self.driver.lock:
            live_model.wake_up(self.driver, tags)

    def is_sleeping(self) -> bool:
        """Return whether the weights or the KV cache are asleep (freed)."""
        return live_model.is_sleeping(self.driver)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function with the engine's worker, or a worker's method by name, between two steps. Return a list with the one
        result.

        The worker has `model_runner.model.load_weights(pairs of name and tensor)`, `device`, `rank`, `reload_weights`, and the
        methods of worker_extension_cls. timeout is ignored, because the call runs in this process.
        :raises ConfigError: if the engine has several ranks or the worker does not have the method.
        """
        with self.driver.lock:
            return live_model.collective_rpc(self.driver, method, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the worker's model; see `collective_rpc`."""
        with self.driver.lock:
            return live_model.collective_rpc(self.driver, lambda worker: func(worker.get_model()))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. Return True, as vLLM does. :raises ConfigError: if the adapter is not supported or enable_lora is
        off."""
        adapter = self.engine.adapter_table.reader.read(lora_request)
        with self.driver.lock:
            self.engine.adapter_table.add(lora_request, adapter)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter by its id; running requests keep using the adapter. Return whether it existed."""
        with self.driver.lock:
            return self.engine.adapter_table.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of the loaded adapters."""
        with self.driver.lock:
            return {each.lora_int_id for each in self.engine.adapter_table.known}

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Trace up to 1,000 steps until `stop_profile`, into $VLLM_TORCH_PROFILER_DIR or else headway-profile."""
        folder = Path(os.environ.get("VLLM_TORCH_PROFILER_DIR") or "headway-profile") / (profile_prefix or "")
        request = ProfileRequest(skip_steps=0, num_steps=MOST_STEPS)
        self.driver.call_between_steps(partial(start_profile, self.driver, folder.expanduser(), request))

    def stop_profile(self) -> StepsProfile | None:
        """End the trace, write it, and log its path. Return the profile of the steps, or None if no trace was started."""
        if "profiler" not in self.driver.task_state:
            return None
        with self.driver.lock:
            found = stop_profile(self.driver)
        found.trace = write_trace(self.driver)
        log.info("profile: %d steps, %s", found.steps, found.trace or "no trace")
        return found

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error for a missing attribute, with a hint if vLLM has the attribute."""
        raise missing_attribute(name, type(self).__name__)

    def get_tokenizer(self, *_: object) -> Any:
        """Return the model's transformers tokenizer; None if the model was loaded without one."""
        return transformers_tokenizer(self.tokenizer)


class LLMEngine(EngineAccess):
    """A model with its engine, which the caller steps. Methods have the names of vLLM's LLMEngine."""

    @takes_arguments_of(EngineArgs)
    def __init__(self, *model: object, **options: object) -> None:
        """Load a model and set up its engine. Options: see `LLM`. :raises HeadwayError: if an option is invalid."""
        self._start(driver_of(EngineArgs.of(*model, **options)))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: object, **__: object) -> Self:
        """Return an engine with these options. Further arguments, for vLLM's processes and reports, are ignored."""
        return cls.over(driver_of(engine_args))

    @classmethod
    def over(cls, driver: EngineDriver) -> Self:
        """Return an LLMEngine for a running engine; requests of its other clients share the batch."""
        made = cls.__new__(cls)
        made._start(driver)
        return made

    def _start(self, driver: EngineDriver) -> None:
        self._driver = driver
        self.tokenizer = driver.assembly.model.tokenizer
        self._processor = OutputProcessor(self.tokenizer)
        self._requests: dict[str, tuple[str, RequestState]] = {}  # request id -> the engine's name for it, and its state
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
        """Queue a request, whose outputs `step` returns. Return the request's id.

        prompt, params, lora_request: see LLM.generate. priority: see scheduling_policy. arrival_time: ignored. others,
        positional: arguments of vLLM; unsupported ones are rejected.
        :raises PromptError: if the prompt is empty or too long.
        :raises ConfigError: if the id is in use, or a parameter or keyword is invalid.
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
        except BaseException:  # the engine rejected it, or an interrupt
            self._forget(request_id)
            raise
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step. Return an output for each request with new content, as its output_kind says."""
        with self.driver.lock:
            if self.engine.has_unfinished:
                self.driver.step()
            outputs = [state.next_output() for _, state in self._requests.values() if state.has_news]
        for output in outputs:
            if output.finished:
                self._forget(output.request_id)
        return outputs

    def abort_request(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests and drop their outputs. Unknown and finished ids are ignored."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            if each in self._requests:
                key = self._requests[each][0]
                with self.driver.lock:
                    self.engine.abort(key)
                self._forget(each)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` will return more outputs."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output `step` has not returned."""
        return len(self._requests)

    def do_log_stats(self) -> None:
        """Do nothing: log_stats_interval enables statistics in the log."""

    @property
    def vllm_config(self) -> VllmConfig:
        """Options and model sizes under vLLM's names."""
        settings = self.driver.assembly.settings
        assert settings is not None, "assemble() makes them"
        return settings

    model_config = property(attrgetter("vllm_config.model_config"))
    cache_config = property(attrgetter("vllm_config.cache_config"))
    scheduler_config = property(attrgetter("vllm_config.scheduler_config"))
    parallel_config = property(attrgetter("vllm_config.parallel_config"))

    @property
    def model_executor(self) -> Any:
        """Object with `driver_worker` and `collective_rpc`, for programs that update weights."""
        return SimpleNamespace(driver_worker=worker_of(self.driver), collective_rpc=self.collective_rpc)

    def get_model_config(self) -> Any:
        """Return `model_config`, the model's sizes and options."""
        return self.model_config

    def _forget(self, request_id: str) -> None:
        key, _ = self._requests.pop(request_id)
        self._processor.remove(key)
        self.driver.names.release(request_id)
