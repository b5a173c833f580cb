"""`LLMEngine`: requests by id, and a step at a time."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Self

from headway.compat.vllm.calls import check_keywords
from headway.compat.vllm.configs import VllmConfig
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError
from headway.core.sampling.params import SamplingParams
from headway.engine_access import EngineAccess
from headway.engine_args import EngineArgs, takes_arguments_of
from headway.hosting.driver import EngineDriver, driver_of
from headway.hosting.live_model import worker_of
from headway.outputs import RequestOutput
from headway.requests.prompts import Prompt, list_of_one
from headway.requests.request_state import OutputProcessor, Progress, RequestState


class LLMEngine(EngineAccess):
    """A model and its engine, whose steps the caller runs. Methods are named as those of vLLM's LLMEngine."""

    @takes_arguments_of(EngineArgs)
    def __init__(self, *model: object, **options: object) -> None:
        """Load a model and set its engine up. The options are those of LLM.

        :raises HeadwayError: anything the caller can put right, in one line.
        """
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
        self._requests: dict[str, tuple[str, RequestState]] = {}
        """Request id -> the engine's name for it, and its state."""
        driver.add_listener(self._processor.process)

    @property
    def driver(self) -> EngineDriver:
        """See EngineAccess."""
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

    @property
    def model_config(self) -> Any:
        """The part of `vllm_config` that is of the model."""
        return self.vllm_config.model_config

    @property
    def cache_config(self) -> Any:
        """The part of `vllm_config` that is of the cache."""
        return self.vllm_config.cache_config

    @property
    def scheduler_config(self) -> Any:
        """The part of `vllm_config` that is of the scheduler."""
        return self.vllm_config.scheduler_config

    @property
    def parallel_config(self) -> Any:
        """The part of `vllm_config` that is of the ranks."""
        return self.vllm_config.parallel_config

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
