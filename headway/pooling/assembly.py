"""The start of a pooling model: from options to a loaded model, an engine for it, and the client of one process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from tqdm import tqdm

from headway.core.contract.backend import StepLimits
from headway.core.contract.errors import ConfigError
from headway.core.pooling.engine import PoolingEngine
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selection import Workload
from headway.core.select.selector import Selector
from headway.core.system.part_clock import PartClock
from headway.engine_args import PoolingModel
from headway.hosting.assembly import checked_registry
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.machine.memory import bound_kernel_caches, freeze_heap, set_threads
from headway.models.encoders.pooling.detect import PoolingTask
from headway.models.encoders.pooling.loader import LoadedPoolingModel, load_pooling_model
from headway.pooling.jobs import PoolingJob, PoolingJobs
from headway.registry import Registry
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.measure.device import resolve_device
from headway.tuning.measure.self_test import check_named

if TYPE_CHECKING:
    import torch

    from headway.engine_args import EngineArgs

log = logging.getLogger("headway")

_GENERATING = {
    "deterministic": False,
    "enable_lora": False,
    "logits_processors": ((),),
    "kv_cache_dtype": "auto",
    "kv_offload_size": None,
    "model_impl": ("auto", "headway"),
    "enable_prompt_embeds": False,
    "speculate": None,
    "speculative_model": None,
    "tensor_parallel_size": 1,
    "tokenizer": None,
}
"""Options that ask for what only a model that generates text has -> the values that ask for nothing."""


class PoolingAssembly(NamedTuple):
    """A loaded model with an engine that is ready for texts."""

    registry: Registry
    device: torch.device
    num_threads: int | None
    """CPU threads; None on a GPU."""
    model: LoadedPoolingModel
    engine: PoolingEngine
    start: PartClock
    """Where the seconds of this start went."""


def assemble_pooling(args: EngineArgs, found: PoolingModel, registry: Registry | None = None) -> PoolingAssembly:
    """Load a model and make its engine. registry: of `checked_registry`, where that was asked for before.

    :raises HeadwayError: a mistake that the caller can put right, in one line.
    """
    _refuse_generating(args)
    config = args.engine_config()
    registry = checked_registry(args) if registry is None else registry
    request = config.backend_request
    device = resolve_device(args.device)
    clock = PartClock()
    ahead, num_threads = clock.within("compiling", compile_ahead(device)), None
    if device.type == "cpu":
        bound_kernel_caches()
        num_threads = set_threads(args.num_threads)
    with clock.part("weights"):
        model = load_pooling_model(
            found.folder,
            found.task,
            name=args.model,
            dtype=args.dtype,
            device=device,
            load_format=args.load_format,
            skip_tokenizer_init=args.skip_tokenizer_init,
        )
    model = replace(model, max_length=_max_length(args.max_model_len, model))
    layers = LayerSpecs(list(model.network.attention_specs))
    check_named(registry, request.names, layers.cached)
    table = TableRequest([Path(path) for path in args.crossover_table or ()], args.autotune_budget)
    with clock.part("measuring attention"):
        costs = costs_for(layers, registry, request, table, ahead)
    selector = Selector(
        registry,
        layers,
        request,
        kv_layout=config.kv_layout,
        block_size=config.block_size,
        options=config.attn_options,
        costs=costs,
        workload=Workload.parse(config.workload),
    )
    log.info("attention: %s", selector.selection)
    limits = StepLimits(config.for_device(device).step_tokens, config.max_num_seqs, model.max_length)
    with clock.part("memory and graphs"):
        engine = PoolingEngine(model.network, layers, selector, limits)
        if device.type == "cuda":
            engine.warm_up()
    freeze_heap()
    clock.end()
    log.info("ready in %s", clock)
    return PoolingAssembly(registry, device, num_threads, model, engine, clock)


def _max_length(asked: int | None, model: LoadedPoolingModel) -> int:
    if asked is not None and asked > model.max_length:
        raise ConfigError("max_model_len", f"at most {model.max_length}, which {model.name} was made for", asked)
    return asked or model.max_length


def _refuse_generating(args: EngineArgs) -> None:
    """:raises ConfigError: an option that a model which is pooled does not have."""
    for name, neutral in _GENERATING.items():
        value = getattr(args, name)
        if value not in (neutral if isinstance(neutral, tuple) else (neutral,)):
            raise ConfigError(name, "a model that generates text", f"{args.model}, which is pooled", f"leave {name} out")


Output = TypeVar("Output")

_INSTEAD: Final[Mapping[PoolingTask, tuple[str, str]]] = {
    "embed": ("embeds texts", "embed and score"),
    "score": ("scores documents", "score and classify"),
    "reward": ("rewards tokens", "reward and encode"),
}
"""Task -> what a model with it does, and the methods that ask for it."""


class PoolingClient:
    """Runs the jobs of an `LLM`."""

    def __init__(self, assembly: PoolingAssembly) -> None:
        self.assembly = assembly
        self.model = assembly.model
        self.engine = assembly.engine
        self.jobs = PoolingJobs(assembly.model)
        self._lock = Lock()

    def run(self, job: PoolingJob[Output], use_tqdm: bool = False) -> list[Output]:
        """Run a job to its end.

        :raises BackendError: a backend raised.
        """
        with self._lock, tqdm(total=len(job.texts), desc="Processed texts", disable=not use_tqdm) as bar:
            rows = self.engine.run(job.texts, bar.update)
        return job.finish(rows)

    def generates_not(self) -> ConfigError:
        """The error of a call that only a model which generates text can answer."""
        does, methods = _INSTEAD[self.model.task]
        got = f"{self.model.name}, which {does}"
        return ConfigError("LLM", "a model that generates text", got, f"{methods} answer for it; runner='generate' insists")
