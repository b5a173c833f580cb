"""Every option of `LLM`, once: its keywords, the command line's flags and docs/options.md come from `EngineArgs`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, get_args, get_type_hints

from headway.core.contract.errors import ConfigError
from headway.core.contract.unknown import refuse_unknown
from headway.core.engine.config import EngineConfig
from headway.core.system.text import shown

if TYPE_CHECKING:
    from headway.core.contract.backend import AttentionBackend
    from headway.registry import Registry

P = ParamSpec("P")


@dataclass(frozen=True)
class EngineArgs(EngineConfig):
    """What it takes to load a model and to run it: the engine's options (`EngineConfig`), and those of model and machine."""

    model: Annotated[str, "smollm2, a folder with safetensors, a .gguf file, or a Hugging Face hub id."] = "smollm2"
    _: dataclasses.KW_ONLY
    dtype: Annotated[str, "Element type: auto, float32 (float), bfloat16 or float16 (half)."] = "auto"
    device: Annotated[str, "auto, cpu, cuda or cuda:N."] = "auto"
    load_format: Annotated[
        str,
        "auto, or dummy: random weights in a model's shapes (qwen3-0.6b, qwen3-30b-a3b and llama-3-8b ship with Headway).",
    ] = "auto"
    model_impl: Annotated[
        str, "What computes the model: headway (its own decoder), transformers (its code), or auto: the first that can."
    ] = "auto"
    torch_compile: Annotated[
        bool | None, "Compile the layers of a model that transformers computes. Default: on a GPU without enforce_eager."
    ] = None
    skip_tokenizer_init: Annotated[bool, "Load no tokenizer: token ids in and out, no text."] = False
    num_threads: Annotated[int | None, "CPU threads. Default: one per free core."] = None
    crossover_table: Annotated[str | None, "File of measured times that auto obeys. Default: this machine's own."] = None
    autotune_budget: Annotated[
        float | None, "Seconds that auto may measure at the first start; 0: none. Default: 20 on a GPU, 10 on a CPU."
    ] = None
    log_stats_interval: Annotated[float | None, "Seconds between two lines of statistics in the log. Default: none."] = None
    plugins: Annotated[
        Iterable[object],
        "Registered beside the installed plugins: objects with hook implementations, backend classes, or files with either, as "
        "FILE.py or FILE.py:CLASS.",
    ] = ()
    backends: Annotated[
        Iterable[type[AttentionBackend]], "Classes of attention backends, registered as plugins are; attn_backend names one."
    ] = ()
    plugin_policy: Annotated[
        str | None, "Installed plugins to use: all, none, allow=A,B or block=A,B. Default: HEADWAY_PLUGINS, else all."
    ] = None
    registry: Annotated[Registry | None, "A Registry to use in place of a new one."] = None

    def __post_init__(self) -> None:
        name = str(self.dtype).removeprefix("torch.")  # a torch.dtype is as good as its name
        object.__setattr__(self, "dtype", {"half": "float16", "float": "float32"}.get(name, name))
        super().__post_init__()
        if isinstance(self.plugins, (str, PathLike)) or not isinstance(self.plugins, Iterable):
            raise ConfigError("plugins", 'a list, such as ["my_backend.py"]', shown(self.plugins))
        if self.registry is not None and not hasattr(self.registry, "failures"):
            raise ConfigError("registry", "a Registry or None", shown(self.registry))
        if self.registry is not None and (self.plugins or self.backends):
            raise ConfigError(
                "registry", "a Registry alone", "plugins or backends beside it", "create_registry(plugins) takes them"
            )
        threads, budget = self.num_threads, self.autotune_budget
        if threads is not None and threads < 1:
            raise ConfigError("num_threads", "a whole number of at least 1", repr(threads))
        if threads is not None and threads > (os.cpu_count() or threads):
            raise ConfigError("num_threads", f"at most {os.cpu_count()}, the machine's cores", repr(threads))
        if budget is not None and budget < 0:
            raise ConfigError("autotune_budget", "a number of seconds of at least 0", repr(budget))
        interval = self.log_stats_interval
        if interval is not None and interval <= 0:
            raise ConfigError("log_stats_interval", "a number of seconds above 0", repr(interval))

    @classmethod
    def of(cls, *model: object, **options: Any) -> EngineArgs:
        """From the arguments of a call.

        :raises ConfigError: an option that does not exist, with the nearest that does; or one with a value that cannot work.
        """
        options = {name: value for name, value in options.items() if not _asks_for_nothing(name, value)}
        refuse_unknown("LLM", options, [field.name for field in dataclasses.fields(cls)], VLLM_OPTIONS)
        if len(model) > 1:
            raise ConfigError("LLM", "one argument without a name, the model", f"{len(model)} of them")
        return cls(*model, **options)  # type: ignore[arg-type]

    def compiles_on(self, device_type: str) -> bool | None:
        """`torch_compile`, where it is not said: False, or None, which is to try. device_type: as in torch.device.type."""
        tried = device_type == "cuda" and not self.enforce_eager
        return self.torch_compile if self.torch_compile is not None or tried else False

    def make_registry(self) -> Registry:
        """The registry given; else a new one, with what is given to it.

        :raises HeadwayError: something of that cannot be registered.
        """
        from headway.registry import create_registry

        if self.registry is not None:
            return self.registry
        backends = _classes(self.backends)
        return create_registry([*self.plugins, *backends] if backends else self.plugins, policy=self.plugin_policy)

    def engine_config(self) -> EngineConfig:
        """The part of the options that the engine reads."""
        return EngineConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EngineConfig)})


@functools.cache
def option_types() -> Mapping[str, Any]:
    """Option -> its annotation, text included. Reading all of them takes milliseconds, and every flag of a command asks."""
    later = {"Registry": type("Registry", (), {}), "AttentionBackend": type("AttentionBackend", (), {})}
    return get_type_hints(EngineArgs, localns=later, include_extras=True)


@functools.cache
def help_texts() -> Mapping[str, str]:
    """Option -> its text, in the order in which a person reads them: model and machine first."""
    hints = option_types()
    own = [field.name for field in dataclasses.fields(EngineArgs)]
    engine = [field.name for field in dataclasses.fields(EngineConfig)]
    return {name: get_args(hints[name])[1] for name in (*(name for name in own if name not in engine), *engine)}


def takes_arguments_of(args: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__` the parameters of `args`, for type checkers, editors and help()."""

    def decorate(function: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(args).parameters.values()
        function.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
        return function

    return decorate


def _classes(backends: object) -> list[type[AttentionBackend]]:
    """:raises ConfigError: what was given as `backends` is no list of backend classes."""
    from headway.core.contract.backend import AttentionBackend

    need, hint = "a list of subclasses of AttentionBackend", "plugins=[...] takes files and objects with hooks"
    if not isinstance(backends, Iterable) or isinstance(backends, str):
        raise ConfigError("backends", need, shown(backends), hint)
    found = list(backends)
    for each in found:
        if not (isinstance(each, type) and issubclass(each, AttentionBackend)):
            raise ConfigError("backends", need, f"{shown(each)} among them", hint)
    return found


_ONE_DEVICE: Final = "not supported yet, because Headway runs a model on one device"
_PLAIN_WEIGHTS: Final = "not supported yet, because Headway computes with float32, bfloat16 or float16 weights; see dtype"
_OWN_TOKENIZER: Final = "the tokenizer of the model's folder is used; skip_tokenizer_init=True loads none"
_OWN_CODE: Final = "not supported: Headway never runs code that a model brings; leave it out"

VLLM_OPTIONS: Final = {
    "attention_backend": "Headway calls it attn_backend",
    "attention_config": "Headway calls it attn_backend and attn_options",
    "kv_cache_memory_bytes": "Headway calls it kv_cache_memory",
    "num_gpu_blocks_override": "kv_cache_memory sets the size of the cache",
    "max_seq_len_to_capture": "cudagraph_capture_sizes says what is captured; enforce_eager=True captures nothing",
    "max_context_len_to_capture": "cudagraph_capture_sizes says what is captured; enforce_eager=True captures nothing",
    "compilation_config": "cudagraph_capture_sizes says what is captured; enforce_eager=True captures nothing",
    "cuda_graph_sizes": "Headway calls it cudagraph_capture_sizes",
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "enable_expert_parallel": _ONE_DEVICE,
    "distributed_executor_backend": _ONE_DEVICE,
    "disable_custom_all_reduce": _ONE_DEVICE,
    "quantization": _PLAIN_WEIGHTS,
    "quantization_param_path": _PLAIN_WEIGHTS,
    "calculate_kv_scales": "not supported yet: a fp8 cache has the checkpoint's scales, or 1; see kv_cache_dtype",
    "tokenizer": _OWN_TOKENIZER,
    "tokenizer_mode": _OWN_TOKENIZER,
    "tokenizer_revision": _OWN_TOKENIZER,
    "trust_remote_code": _OWN_CODE,
    "hf_overrides": "not supported: edit the config.json of the model's folder",
    "revision": "not supported yet: load the folder that huggingface-cli download --revision writes",
    "download_dir": "set the environment variable HF_HOME",
    "swap_space": "Headway calls it kv_offload_size: bytes, or a text such as '4GiB'; preemption_mode='swap' always swaps",
    "kv_offloading_size": "Headway calls it kv_offload_size: bytes, or a text such as '4GiB'",
    "kv_offloading_backend": "leave it out: kv_offload_size keeps blocks in the host's memory, kv_offload_dir on disk too",
    "cpu_offload_gb": "not supported yet, because weights and cache live on one device; a smaller kv_cache_memory makes room",
    "enable_lora": "not supported yet: merge the adapter into its model with peft's merge_and_unload()",
    "max_lora_rank": "not supported yet: merge the adapter into its model with peft's merge_and_unload()",
    "speculative_config": "Headway calls it speculate and num_speculative_tokens: speculate='ngram' or 'suffix'",
    "limit_mm_per_prompt": "not supported yet, because models read text alone",
    "disable_log_stats": "Headway calls it log_stats_interval: seconds between two lines of statistics in the log",
    "disable_log_requests": "leave it out: RequestOutput.metrics has the times of each request",
    "max_num_partial_prefills": "not supported: prompts are served one after the other; max_num_batched_tokens bounds a step",
    "long_prefill_token_threshold": "max_num_batched_tokens bounds the tokens of a step, and so the chunks of long prompts",
    "guided_decoding_backend": "leave it out: llguidance compiles all forms of structured outputs",
    "structured_outputs_config": "leave it out: llguidance compiles all forms of structured outputs",
    "generation_config": "leave it out: get_default_sampling_params() reads the model's own; SamplingParams override them",
    "logits_processors": "SamplingParams(logits_processors=[...]) takes functions, and names that plugins register",
    "enable_sleep_mode": "del llm frees the device's memory",
    "mm_processor_kwargs": "not supported yet, because models read text alone",
    "served_model_name": "not supported: the model's name is the one it was loaded by",
    "task": "leave it out: Headway generates text",
    "runner": "leave it out: Headway generates text",
    "batch_invariant": "Headway calls it deterministic",
}
"""Options of vLLM's LLM that Headway has by another name or not at all -> what to do."""

_NOTHING_ASKED: Final[dict[str, tuple[object, ...]]] = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), (1,)),
    **dict.fromkeys(("swap_space", "cpu_offload_gb"), (0,)),
    **dict.fromkeys(("trust_remote_code", "enable_lora", "enable_expert_parallel", "enable_sleep_mode"), (False,)),
    **dict.fromkeys(("task", "runner"), ("auto", "generate")),
    "tokenizer_mode": ("auto",),
    "disable_log_stats": (True,),
}
"""Options of vLLM's -> the values with which they ask for what Headway does anyway; None is one for all of them."""


def _asks_for_nothing(name: str, value: object) -> bool:
    return name in VLLM_OPTIONS and (
        value is None or any(value is each or value == each for each in _NOTHING_ASKED.get(name, ()))
    )
