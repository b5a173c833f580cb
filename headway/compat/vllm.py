"""vLLM's offline API: a program for vLLM runs with `vllm` replaced by `headway.compat.vllm` in its imports.

`LLM`, `AsyncLLM`, `LLMEngine` and `EngineArgs` accept vLLM's options in addition to Headway's. Importing this module creates
vLLM's modules, such as `headway.compat.vllm.sampling_params`, from the table MODULES. Names without an equivalent raise an
error with the reason.
"""

# ruff: noqa: F401 -- programs import the names from here

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import logging
import random
import socket
import sys
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Final, Self, TypeVar, Union, get_args, get_origin

import numpy
import torch

from headway import async_llm, engine_args, llm, llm_engine
from headway.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from headway.compat.vllm_views import CompilationConfig, UsageContext, VllmConfig
from headway.compat.vllm_views import EngineCounter as Counter
from headway.compat.vllm_views import EngineGauge as Gauge
from headway.compat.vllm_views import EngineHistogram as Histogram
from headway.compat.vllm_views import EngineMetric as Metric
from headway.compat.vllm_views import EngineVector as Vector
from headway.compat.vllm_words import ACCEPTED_OPTIONS, LLM_OPTIONS, NO_TRANSFER, SHORT_FLAGS, TEXT_ONLY, from_vllm, of_each
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError, HeadwayError, refuse_unknown
from headway.core.sampling.batch_processors import BatchLogitsProcessor as LogitsProcessor
from headway.core.sampling.batch_processors import BatchUpdate, MoveDirectionality, process_dict_updates
from headway.core.sampling.batch_processors import RequestLogitsProcessors as AdapterLogitsProcessor
from headway.core.sampling.logprobs import Logprob
from headway.core.sampling.params import LogitsProcessor as RequestLogitsProcessor
from headway.core.sampling.params import RequestOutputKind, SamplingParams
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.json_text import parse_json
from headway.hosting.host import EngineDeadError
from headway.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from headway.requests.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
from headway.requests.prompts import Message as ChatCompletionMessageParam
from headway.requests.prompts import Prompt as PromptType
from headway.version import __version__

GuidedDecodingParams = StructuredOutputsParams

C = TypeVar("C", bound=type)
_OWN: Final = {each.name: each for each in dataclasses.fields(engine_args.EngineArgs)}


class VllmEngineArgs(engine_args.EngineArgs):
    """Model options under Headway's or vLLM's names. vLLM's are translated, ignored if they have no effect, or rejected."""

    def __init__(self, *model: object, **options: object) -> None:
        """Translate and check the options. :raises ConfigError: if a name is unknown or a value is invalid."""
        translated = from_vllm(options, frozenset(_OWN))
        refuse_unknown("LLM", translated, _OWN, LLM_OPTIONS)
        engine_args.check_model(model)
        super().__init__(*model, **translated)  # type: ignore[arg-type]

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Add a command-line flag for each option, including vLLM's, to an argparse parser. `from_cli_args` reads the parsed
        flags."""
        group = parser.add_argument_group("model and engine")
        for name, text in engine_args.help_texts().items():
            if name not in ("registry", "backends", "plugins", "logits_processors"):
                _add_flag(parser, group, name, text)
        for name in sorted((ACCEPTED_OPTIONS | set(LLM_OPTIONS)) - set(_OWN)):
            if (flag := _flag(name)) not in parser._option_string_actions:
                parser.add_argument(flag, nargs="?", const=True, default=None, type=_value, help=argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Return the options in a namespace that has the flags of `add_cli_args`; other entries are ignored. Raises the same
        errors as `of`."""
        known = {*_OWN, *ACCEPTED_OPTIONS, *LLM_OPTIONS}
        return cls(**{name: value for name, value in vars(args).items() if name in known})


def _translating(kind: C) -> C:
    """Return a subclass of `kind`, with the same name, that also accepts vLLM's options."""

    @engine_args.takes_arguments_of(engine_args.EngineArgs)
    @functools.wraps(kind.__init__)  # type: ignore[misc]
    def __init__(self: object, *model: object, **options: object) -> None:
        args = VllmEngineArgs(*model, **options)
        super(made, self).__init__(**{name: getattr(args, name) for name in _OWN})

    made: Any = type(kind.__name__, (kind,), {"__init__": __init__, "__doc__": kind.__doc__, "__module__": __name__})
    found: C = made
    return found


EngineArgs = AsyncEngineArgs = VllmEngineArgs
LLM = _translating(llm.LLM)
LLMEngine = _translating(llm_engine.LLMEngine)
AsyncLLM = AsyncLLMEngine = _translating(async_llm.AsyncLLM)


class FlexibleArgumentParser(ArgumentParser):
    """A parser whose flags may be written with underscores instead of hyphens."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse known arguments as ArgumentParser does; `parse_args` calls this too."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_hyphened(each) for each in given], namespace)


def _hyphened(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _add_flag(parser: ArgumentParser, group: Any, name: str, text: str) -> None:
    """Add an option's flag to a parser's group, unless the parser already has it."""
    if _flag(name) not in parser._option_string_actions:
        default = {} if _OWN[name].default is dataclasses.MISSING else _OWN[name].default
        flags = [_flag(name), *(short for short, flag in SHORT_FLAGS.items() if flag == _flag(name))]
        group.add_argument(*flags, default=default, help=text.replace("%", "%%"), **_reading(name))


def _reading(name: str) -> dict[str, Any]:
    """Return the argparse arguments for the type of an option's value."""
    hint = get_args(engine_args.option_types()[name])[0]
    kinds = [each for each in (get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)) if each is not NoneType]
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(each) in (Sequence, Mapping, Iterable) for each in kinds) and str not in kinds:
        return {"type": _value}
    numbers = [each for each in kinds if each in (int, float)]
    return {"type": numbers[0] if numbers and str not in kinds else str}


def _value(text: str) -> Any:
    """Return a flag's value: parsed JSON, such as true, 16 or {"method": "ngram"}, or else the text."""
    try:
        return parse_json(text, "option")
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def random_uuid() -> str:
    """Return a new request id."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def set_random_seed(seed: int | None) -> None:
    """Seed Python, numpy and torch; None does nothing. An engine's sampling depends only on its `seed` option."""
    if seed is not None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)


class Platform:
    """Platform queries about the devices that torch finds on this machine."""

    @property
    def device_type(self) -> str:
        """Type of the device: "cuda" or "cpu"."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def is_cuda(self) -> bool:
        """Return whether there is an NVIDIA GPU."""
        return self.device_type == "cuda" and torch.version.hip is None

    def is_cuda_alike(self) -> bool:
        """Return whether there is a GPU."""
        return self.device_type == "cuda"

    def is_cpu(self) -> bool:
        """Return whether there is no GPU."""
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        """Return whether there is an AMD GPU."""
        return self.device_type == "cuda" and torch.version.hip is not None

    is_tpu = is_xpu = staticmethod(lambda: False)
    seed_everything = staticmethod(set_random_seed)


current_platform = Platform()


def init_logger(name: str) -> logging.Logger:
    """Return Python's logger of this name."""
    return logging.getLogger(name)


def get_tokenizer(tokenizer_name: str, *_: object, **__: object) -> Any:
    """Return a model's transformers tokenizer; further arguments are ignored. :raises ModelError: if the tokenizer cannot be
    read."""
    from headway.models.checkpoints.locate import locate
    from headway.models.checkpoints.tokenizer import read_transformers_tokenizer

    return read_transformers_tokenizer(locate(tokenizer_name, weights=False))


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """Return the chat template in a file, or the argument itself if no file has this name."""
    if chat_template is None:
        return None
    path = Path(chat_template)
    return path.read_text() if len(str(path)) < 256 and path.is_file() else str(chat_template)


def destroy_model_parallel() -> None:
    """Do nothing: the ranks of an LLM end with the LLM."""


destroy_distributed_environment = destroy_model_parallel


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage and release the device's cached memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


LACKING: Final = {
    **of_each("LoRAConfig", "not supported as an object: enable_lora, max_loras and max_lora_rank are options"),
    **of_each(
        "ImageAsset VideoAsset AudioAsset fetch_image fetch_audio fetch_video encode_image_base64 encode_audio_base64 "
        "MultiModalDataDict MultiModalDataBuiltins convert_image_mode rescale_image_size ExplicitEncoderDecoderPrompt",
        TEXT_ONLY,
    ),
    "DataPrompt": "not supported: prompts are texts, token ids or embeddings",
    **of_each("KVTransferConfig KVEventsConfig ECTransferConfig", NO_TRANSFER),
    **of_each("ModelRegistry", "not supported: a model of transformers runs by model_impl='transformers'"),
    **of_each(
        "AttentionConfig PoolerConfig ProfilerConfig StructuredOutputsConfig SpeculativeConfig KernelConfig",
        "not supported as an object: the option takes a dict",
    ),
    **of_each("WeightTransferConfig", "not supported: load the new weights with a new LLM"),
}
"""vLLM's name -> reason why the name is missing. A stand-in class is imported instead, which raises an error when it is used."""

MODULES: Final = {
    "assets": "",
    "assets.audio": "AudioAsset",
    "assets.image": "ImageAsset",
    "assets.video": "VideoAsset",
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "config": "AttentionConfig CompilationConfig ECTransferConfig KVEventsConfig KVTransferConfig KernelConfig PoolerConfig "
    "ProfilerConfig SpeculativeConfig StructuredOutputsConfig VllmConfig WeightTransferConfig LoRAConfig",
    "distributed": "cleanup_dist_env_and_memory destroy_distributed_environment destroy_model_parallel",
    "distributed.parallel_state": "cleanup_dist_env_and_memory destroy_distributed_environment destroy_model_parallel",
    "engine": "",
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints": "",
    "entrypoints.chat_utils": "ChatCompletionMessageParam load_chat_template",
    "entrypoints.llm": "LLM",
    "inputs": "DataPrompt EmbedsPrompt ExplicitEncoderDecoderPrompt PromptType TextPrompt TokensPrompt",
    "inputs.data": "EmbedsPrompt ExplicitEncoderDecoderPrompt PromptType TextPrompt TokensPrompt",
    "logger": "init_logger",
    "logprobs": "Logprob",
    "lora": "",
    "lora.request": "LoRARequest",
    "model_executor": "",
    "model_executor.utils": "set_random_seed",
    "multimodal": "MultiModalDataBuiltins MultiModalDataDict",
    "multimodal.image": "convert_image_mode rescale_image_size",
    "multimodal.utils": "encode_audio_base64 encode_image_base64 fetch_audio fetch_image fetch_video",
    "outputs": "ClassificationOutput ClassificationRequestOutput CompletionOutput EmbeddingOutput EmbeddingRequestOutput "
    "PoolingOutput PoolingRequestOutput RequestOutput ScoringOutput ScoringRequestOutput",
    "platforms": "current_platform",
    "pooling_params": "PoolingParams",
    "sampling_params": "BeamSearchParams GuidedDecodingParams RequestOutputKind SamplingParams StructuredOutputsParams",
    "sequence": "Logprob",
    "tokenizers": "get_tokenizer",
    "transformers_utils": "",
    "transformers_utils.tokenizer": "get_tokenizer",
    "usage": "",
    "usage.usage_lib": "UsageContext",
    "utils": "FlexibleArgumentParser random_uuid cleanup_dist_env_and_memory get_open_port",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.network_utils": "get_open_port",
    "utils.torch_utils": "set_random_seed",
    "v1": "",
    "v1.engine": "",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.exceptions": "EngineDeadError",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics": "",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
    "v1.sample": "",
    "v1.sample.logits_processor": "AdapterLogitsProcessor BatchUpdate LogitsProcessor MoveDirectionality RequestLogitsProcessor "
    "process_dict_updates",
    "v1.sample.logits_processor.builtin": "process_dict_updates",
    "v1.sample.logits_processor.interface": "BatchUpdate LogitsProcessor MoveDirectionality",
}
"""vLLM's module, without the prefix vllm -> the names that programs import from it."""

LACKING_MODULES: Final = {
    "assets": TEXT_ONLY,
    "multimodal": TEXT_ONLY,
    "lora": "not supported: lora.request has LoRARequest, and docs/lora.md says what adapters may be",
    "distributed": NO_TRANSFER,
    "model_executor": "not supported: docs/models.md says which models run; model_impl='transformers' runs those of transformers",
    "envs": "not supported: docs/options.md has the options; Headway reads no variables of vLLM's but VLLM_TORCH_PROFILER_DIR",
    "attention": "not supported: docs/backends.md says how a backend is written",
    "v1.attention": "not supported: docs/backends.md says how a backend is written",
    "v1.executor": "not supported: tensor_parallel_size starts a process for each rank",
    "v1.worker": "not supported: tensor_parallel_size starts a process for each rank",
    "entrypoints.openai": "not supported: `headway serve` has OpenAI's API",
    "reasoning": "not supported here: headway serve parses answers of chats",
    "tool_parsers": "not supported here: headway serve parses answers of chats",
    "plugins": "not supported: docs/backends.md says how a plugin is registered",
    "benchmarks": "headway bench throughput and headway bench serve measure",
}
"""vLLM's module -> reason why the module, or some of its names and submodules, are missing."""


class LackingError(HeadwayError, ValueError):
    """Error for the use of a vLLM name that has no equivalent in Headway."""


def _stand_in(name: str, reason: str) -> type:
    """Return a stand-in class for a missing name: usable in annotations, but any other use raises an error with the reason."""

    def refuse(*_: object, **__: object) -> Any:
        raise LackingError(f"{name}: {reason}")

    kind = type("Lacking", (type,), {"__getattr__": refuse, "__call__": refuse})
    made: type = kind(name, (), {"__module__": __name__, "__doc__": reason})
    return made


def _reason(module: str) -> str | None:
    """Return the reason why a module is missing, from the table's entry for it or its nearest parent. None without an entry."""
    parts = module.split(".")
    above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((LACKING_MODULES[each] for each in above if each in LACKING_MODULES), None)


class _Nowhere(list[str]):
    """The `__path__` of a module without submodules: searching it raises an error with the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def __iter__(self) -> Iterator[str]:
        raise ImportError(self._reason)


def _missing(module: str, reason: str | None) -> Callable[[str], Any]:
    """Return the `__getattr__` of a vLLM module. reason: why the module or some of its names are missing; None if the module is
    complete."""

    def missing(name: str) -> Any:
        if reason is not None and module not in MODULES and not name.startswith("__"):
            raise ImportError(f"{__name__}.{module}: {reason}")
        explanation = LACKING.get(name) or reason
        raise AttributeError(
            f"module '{__name__}.{module}' has no attribute {name!r}" + (f": {explanation}" if explanation else "")
        )

    return missing


def _register() -> None:
    """Create modules with the names of vLLM's modules and register them for import."""
    own = sys.modules[__name__]
    for name, why in LACKING.items():
        setattr(own, name, _stand_in(name, why))
    for module in sorted({*MODULES, *LACKING_MODULES}):
        names, reason = MODULES.get(module, "").split(), _reason(module)
        made = ModuleType(f"{__name__}.{module}", f"Names of vLLM's module {module}.")
        made.__dict__.update({name: getattr(own, name) for name in names})
        made.__dict__.update(__all__=names, __getattr__=_missing(module, reason))
        if reason is not None:
            made.__dict__["__path__"] = _Nowhere(f"{made.__name__}: {reason}")
        sys.modules[made.__name__] = made
        above, _, last = made.__name__.rpartition(".")
        setattr(sys.modules[above], last, made)


_register()
