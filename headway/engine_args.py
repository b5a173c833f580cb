"""Options of `LLM`. The keywords of `LLM`, the command-line options and docs/options.md are generated from `EngineArgs`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, NamedTuple, ParamSpec, get_args, get_type_hints

from headway.compat.vllm_words import FLAGS, VALUES
from headway.core.contract.errors import ConfigError, HeadwayError, refuse_unknown
from headway.core.contract.layer import INVARIANCES, Invariance
from headway.core.engine.data.config import EngineConfig
from headway.core.system.text import shown
from headway.models.checkpoints.locate import ALIASES, ModelOrigin, locate
from headway.models.encoders.pooling.detect import RUNNERS, TASKS, PoolingTask, pooling_task

if TYPE_CHECKING:
    from headway.core.contract.kernel import Kernel
    from headway.registry import Registry


P = ParamSpec("P")
log = logging.getLogger("headway")

TUNE = ("idle", "start", "never")
"""Words of the option `tune`: when kernels are measured for `auto`."""


@dataclass(frozen=True)
class EngineArgs(EngineConfig):
    """Options for loading and running a model; None selects the default. `headway.compat.vllm.EngineArgs` also takes vLLM's."""

    model: Annotated[str, "Model: smollm2, a folder with safetensors, a .gguf file, or a Hugging Face Hub id."] = "smollm2"
    _: dataclasses.KW_ONLY
    tokenizer: Annotated[
        str | None, "Tokenizer to use instead of the model's: a folder, a .gguf file, or a Hugging Face Hub id."
    ] = None
    revision: Annotated[str | None, "Branch, tag or commit of a model on the Hugging Face Hub. Default: the main branch."] = None
    download_dir: Annotated[str | None, "Folder for files downloaded from the Hub. Default: the cache of huggingface_hub."] = None
    hf_overrides: Annotated[
        Mapping[str, Any] | None,
        "Values that override config.json; a value for text_config is merged into it.",
    ] = None
    generation_config: Annotated[
        str, "Default sampling parameters: auto (the model's recommendation) or vllm (vLLM's defaults)."
    ] = "auto"
    dtype: Annotated[str, "Element type: auto, float32 (float), bfloat16 or float16 (half)."] = "auto"
    device: Annotated[str, "Device: auto, cpu, cuda or cuda:N."] = "auto"
    load_format: Annotated[
        str,
        "Weights: auto (the model's files) or dummy (random weights in the model's shapes; built-in shapes: qwen3-0.6b, "
        "gemma-4-e2b, llama-3-8b, llama-3-70b, qwen3-30b-a3b, gpt-oss-20b and qwen3-next-80b-a3b).",
    ] = "auto"
    attention_rules: Annotated[
        Mapping[str, Any],
        "Attention rules: all, a kind of layers, layers.N or layers.N-M -> an AttentionRule, FILE.py:CLASS, or the name of a "
        "plugin's rule.",
    ] = dataclasses.field(default_factory=dict)
    experts_kernel: Annotated[
        str,
        "Kernel for expert layers (MoE): auto or NAME. Layers that the named kernel does not support use the kernel that "
        "auto selects.",
    ] = "auto"
    linear_kernel: Annotated[
        str,
        "Kernel for linear layers: auto or NAME. Layers that the named kernel does not support use the kernel that auto selects.",
    ] = "auto"
    quantization: Annotated[
        str | None,
        "Format to quantize linear layers to while loading: fp8, with one scale per row. Default: the checkpoint's format.",
    ] = None
    speculative_model: Annotated[
        str | None,
        "Draft model for speculative decoding: a smaller model with the same vocabulary, in any form that model accepts.",
    ] = None
    model_impl: Annotated[
        str, "Model implementation: headway (Headway's decoder), transformers, or auto (the first that supports the model)."
    ] = "auto"
    torch_compile: Annotated[
        bool | None,
        "Apply torch.compile to a transformers implementation. Default: only on a GPU, unless enforce_eager is set.",
    ] = None
    runner: Annotated[
        str, "Model runner: generate (text), pooling (embeddings and scores), or auto (detected from the model's files)."
    ] = "auto"
    task: Annotated[str, "Task of the model, more specific than runner: generate, embed, score, reward or auto."] = "auto"
    skip_tokenizer_init: Annotated[bool, "Do not load a tokenizer: prompts and outputs are token ids only."] = False
    num_threads: Annotated[int | None, "Number of CPU threads. Default: one per free core."] = None
    crossover_table: Annotated[
        str | Sequence[str] | None,
        "Crossover table for auto to use, or several for several kinds of layers. Default: the table of this machine.",
    ] = None
    tune: Annotated[
        str | None,
        "When to measure kernels for auto: start (before the first request), idle (a start uses shipped or derived times, which "
        "are checked while no request runs) or never. Default: idle on a GPU, else start.",
    ] = None
    tune_share: Annotated[float, "Maximum share of the idle time that tune=idle uses to measure, above 0 and at most 1."] = 0.5
    autotune_budget: Annotated[
        float | None, "Maximum seconds to measure at the first start. 0 disables it. Default: 20 on a GPU, 3 on a CPU."
    ] = None
    log_stats_interval: Annotated[float | None, "Seconds between statistics lines in the log. Default: no statistics."] = None
    plugins: Annotated[
        Iterable[object],
        "Plugins to register in addition to installed plugins: objects with hooks, backend classes, files that contain either, "
        "as FILE.py or FILE.py:CLASS, or hub kernels, as hub:FOLDER or hub:OWNER/NAME[@VERSION].",
    ] = ()
    backends: Annotated[
        Iterable[type[Kernel]], "Backend and kernel classes to register like plugins; attn_backend selects one by name."
    ] = ()
    logits_processors: Annotated[
        Iterable[object],
        "Logits processors to apply to every batch: classes in vLLM's v1 form, or their paths as MODULE:CLASS.",
    ] = ()
    worker_extension_cls: Annotated[str, "Class, as MODULE.CLASS, whose methods LLM.collective_rpc can also call."] = ""
    plugin_policy: Annotated[
        str | None, "Installed plugins to use: all, none, allow=A,B or block=A,B. Default: $HEADWAY_PLUGINS, else all."
    ] = None
    require_passport: Annotated[
        bool, "Refuse each plugin and hub kernel without a passport (headway check --passport) for its code and this device."
    ] = False
    registry: Annotated[Registry | None, "Plugin registry to use instead of a new one."] = None

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if getattr(self, each.name) is None and each.default is not None:
                factory = each.default_factory
                self._set(each.name, each.default if factory is dataclasses.MISSING else factory())
        self._set("dtype", str(self.dtype).removeprefix("torch."))  # torch.float16 as well as "float16"
        for option, words in VALUES.items():
            given = getattr(self, option)
            self._set(option, words.get(given, given) if isinstance(given, str) else given)
        self._set("logits_processors", tuple(self.logits_processors))
        if not isinstance(self.attention_rules, Mapping) or not all(isinstance(key, str) for key in self.attention_rules):
            raise ConfigError("attention_rules", 'a mapping such as {"all": MyRule()}', shown(self.attention_rules))
        if any(isinstance(each, type) for each in self.attention_rules.values()):  # other processes get instances
            from headway.registry.registry import builtin_registry

            rule_of = builtin_registry().attention_rule
            found = {key: rule_of(each) if isinstance(each, type) else each for key, each in self.attention_rules.items()}
            self._set("attention_rules", found)
        super().__post_init__()
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise ConfigError("hf_overrides", "a mapping", shown(self.hf_overrides), "a function is not supported")
        self._check_draft()
        if self.tokenizer == self.model:
            self._set("tokenizer", None)
        if isinstance(self.plugins, (str, PathLike)) or not isinstance(self.plugins, Iterable):
            raise ConfigError("plugins", 'a list, such as ["my_backend.py"]', shown(self.plugins))
        for option, known in (("runner", RUNNERS), ("task", TASKS), ("generation_config", ("auto", "vllm"))):
            if getattr(self, option) not in known:
                raise ConfigError(option, " or ".join(known), shown(getattr(self, option)))
        if self.registry is not None and not hasattr(self.registry, "failures"):
            raise ConfigError("registry", "a Registry or None", shown(self.registry))
        if self.registry is not None and (self.plugins or self.backends or self.require_passport):
            got, hint = "plugins, backends or require_passport beside it", "create_registry(plugins) takes them"
            raise ConfigError("registry", "a Registry alone", got, hint)
        self._set("crossover_table", _table_paths(self.crossover_table))
        threads, budget = self.num_threads, self.autotune_budget
        if threads is not None and threads < 1:
            raise ConfigError("num_threads", "a whole number of at least 1", repr(threads))
        if threads is not None and threads > (os.cpu_count() or threads):
            raise ConfigError("num_threads", f"at most {os.cpu_count()}, the machine's cores", repr(threads))
        if budget is not None and budget < 0:
            raise ConfigError("autotune_budget", "a number of seconds of at least 0", repr(budget))
        self._check_tune(budget)
        interval = self.log_stats_interval
        if interval is not None and interval <= 0:
            raise ConfigError("log_stats_interval", "a number of seconds above 0", repr(interval))

    def _check_tune(self, budget: float | None) -> None:
        if self.tune not in (None, *TUNE):
            raise ConfigError("tune", " or ".join(TUNE), shown(self.tune))
        if self.tune == "never" and budget:
            raise ConfigError("tune=never", "autotune_budget 0, or none", repr(budget), "leave one of them out")
        if self.deterministic and budget:
            raise ConfigError("deterministic", "autotune_budget 0, or none", repr(budget), "leave one of them out")
        if not 0 < self.tune_share <= 1:
            raise ConfigError("tune_share", "a number above 0 and at most 1", repr(self.tune_share))
        if self.tune in ("start", "never") and self.tune_share != EngineArgs.tune_share:
            raise ConfigError(f"tune={self.tune}", "no tune_share", self.tune_share, "tune=idle uses it")

    def _check_draft(self) -> None:
        if self.speculative_model is None:
            named = {"attn_backend": self.backend_request.names_kind("draft"), "kv_cache_dtype": "draft=" in self.kv_cache_dtype}
            for option in (option for option, given in named.items() if given):
                raise ConfigError(f"{option} draft", "a draft model, which has these layers", "none", "speculative_model='NAME'")
            return
        if self.speculate is not None:
            hint = "leave one of them out"
            raise ConfigError("speculative_model", "no other source of guesses", f"speculate={self.speculate} beside it", hint)
        if self.tensor_parallel_size > 1:
            hint = "speculate='suffix' needs no model"
            raise ConfigError("speculative_model", "tensor_parallel_size=1", self.tensor_parallel_size, hint)
        if self.invariance is Invariance.BATCH:
            need = "steps whose shape changes no bit, which deterministic forbids"
            raise ConfigError("speculative_model", need, self.speculative_model)

    @classmethod
    def of(cls, *model: object, **options: Any) -> EngineArgs:
        """Return the options given as a call's arguments. deterministic may also be a level.

        :raises ConfigError: if an option is unknown or invalid.
        """
        refuse_unknown("LLM", options, [each.name for each in dataclasses.fields(cls)], FLAGS)
        if isinstance(level := options.get("deterministic"), str):
            if level not in INVARIANCES:
                raise ConfigError("deterministic", "True, False, 'batch' or 'full'", repr(level))
            if options.get("deterministic_level", level) != level:
                raise ConfigError("deterministic_level", f"the level of deterministic={level!r}", options["deterministic_level"])
            options = {**options, "deterministic": True, "deterministic_level": level}
        check_model(model)
        return cls(*model, **options)  # type: ignore[arg-type]

    def compiles_on(self, device_type: str) -> bool | None:
        """Return the effective value of `torch_compile`. The default is None (compile if possible) for device_type cuda without
        enforce_eager, and False otherwise."""
        tried = device_type == "cuda" and not self.enforce_eager
        return self.torch_compile if self.torch_compile is not None or tried else False

    @property
    def origin(self) -> ModelOrigin:
        """The options that determine the model's files."""
        return ModelOrigin(self.revision, self.download_dir, self.hf_overrides)

    def make_registry(self) -> Registry:
        """Return the given `registry`, or a new one with `plugins`, `backends` and hub kernels in `attn_backend`. A hub kernel
        that fails in its trial is left out, and `attn_backend` then names auto instead. :raises HeadwayError: if a plugin or
        backend is invalid."""
        from headway.registry.plugin_sources import HUB
        from headway.tuning.isolated.trial import create_registry

        if self.registry is not None:
            return self.registry
        request, plugins = self.backend_request, self.plugins if isinstance(self.plugins, Mapping) else list(self.plugins)
        named = dict.fromkeys((request.prefill, request.decode, *(name for _, _, name in request.kinds)))
        hub = [name for name in named if name.startswith(HUB)]
        added = [*_classes(self.backends), *(name for name in hub if name not in plugins)]
        plugins = [*plugins, *added] if added else plugins
        made = create_registry(plugins, policy=self.plugin_policy, require_passport=self.require_passport, device=self.device)
        if left_out := [failure.name for failure in made.failures if failure.name in hub]:
            log.warning("attention backend %s is left out, and auto chooses instead", ", ".join(left_out))
            self._set("attn_backend", request.pinned("auto", left_out))
        return made

    def engine_config(self) -> EngineConfig:
        """Return the subset of the options that the engine reads."""
        return EngineConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EngineConfig)})


def check_model(given: Sequence[object]) -> None:
    """Check that there is at most one positional argument, the model. :raises ConfigError: if there are several."""
    if len(given) > 1:
        raise ConfigError("LLM", "one argument without a name, the model", f"{len(given)} of them")


class PoolingModel(NamedTuple):
    """Folder and task of a pooling model."""

    folder: Path
    task: PoolingTask


def find_pooling_model(args: EngineArgs) -> PoolingModel | None:
    """Return folder and task of the model if it is a pooling model, else None. Reads small files. :raises HeadwayError: if the
    model is not found."""
    is_pooling = args.runner != "auto" or args.task != "auto"
    if args.model in ALIASES and not is_pooling:
        return None
    if is_pooling and pooling_task(Path(), args.runner, args.task) is None:
        return None
    task = pooling_task(locate(args.model, weights=False, origin=args.origin), args.runner, args.task)
    return None if task is None else PoolingModel(locate(args.model, args.load_format != "dummy", args.origin), task)


@functools.cache
def option_types() -> Mapping[str, Any]:
    """Return option name -> annotation, which contains the help text. The result is cached, since reading all annotations takes
    milliseconds."""
    later = {name: type(name, (), {}) for name in ("Registry", "Kernel")}
    later["BackendRequest"] = str  # the text form, so that its command-line option takes a text
    return get_type_hints(EngineArgs, localns=later, include_extras=True)


@functools.cache
def help_texts() -> Mapping[str, str]:
    """Return option name -> its help text, in the order of the documentation: model and machine first."""
    hints = option_types()
    own = [field.name for field in dataclasses.fields(EngineArgs)]
    engine = [field.name for field in dataclasses.fields(EngineConfig)]
    return {name: get_args(hints[name])[1] for name in (*(name for name in own if name not in engine), *engine)}


def takes_arguments_of(args: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that gives an `__init__` method the parameters of `args`, for type checkers, editors, help() and error
    messages."""

    def decorate(function: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(args).parameters

        @functools.wraps(function)
        def __init__(*given: Any, **options: Any) -> None:
            try:
                function(*given, **options)
            except HeadwayError as error:
                error.name_arguments(parameters)
                raise

        __init__.__signature__ = inspect.Signature([own, *parameters.values()])  # type: ignore[attr-defined]
        return __init__

    return decorate


def _table_paths(given: object) -> tuple[str, ...] | None:
    """Return the option `crossover_table` as paths. :raises ConfigError: if the option is neither a path nor a list of paths."""
    if given is None:
        return None
    listed = [given] if isinstance(given, (str, PathLike)) else list(given) if isinstance(given, (list, tuple)) else []
    if not listed or not all(isinstance(each, (str, PathLike)) for each in listed):
        raise ConfigError("crossover_table", "the path of a file, or a list of such paths", shown(given))
    return tuple(str(each) for each in listed)


def _classes(backends: object) -> list[type[Kernel]]:
    """Return the option `backends` as a list. :raises ConfigError: if the option is not a list of kernel classes."""
    from headway.core.contract.operation import KINDS

    bases = tuple(kind.kernel for kind in KINDS)
    need = f"a list of subclasses of {' or '.join(base.__name__ for base in bases)}"
    hint = "plugins=[...] takes files and objects with hooks"
    if not isinstance(backends, Iterable) or isinstance(backends, str):
        raise ConfigError("backends", need, shown(backends), hint)
    found = list(backends)
    for each in found:
        if not (isinstance(each, type) and issubclass(each, bases)):
            raise ConfigError("backends", need, f"{shown(each)} among them", hint)
    return found
