"""What `LLM` and `LLMEngine` tell of their engine, and do to it between two steps."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from headway.core.contract.adapters import LoRARequest
from headway.core.engine.loop import EngineLoop
from headway.core.engine.state.stats import EngineSnapshot
from headway.core.sampling.params import SamplingParams
from headway.hosting.driver import EngineDriver
from headway.hosting.profiling import MOST_STEPS, ProfileRequest, StepsProfile, start_profile, stop_profile, write_trace
from headway.models.loader import LoadedModel
from headway.vllm_api.calls import missing_attribute
from headway.vllm_api.metrics import EngineMetric, metrics_of

log = logging.getLogger("headway")


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
        """The parameters that the model's generation_config.json recommends, which `generate` takes where none are given."""
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
