"""Startup of a pooling model, and its two clients: `PoolingClient` for an `LLM`, `AsyncPooling` for an event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from headway.core.contract.backend import StepLimits
from headway.core.contract.errors import ConfigError
from headway.core.engine.execution.local_executor import select_backends
from headway.core.pooling.engine import EncodedText, PoolingEngine
from headway.core.select.request import LayerSpecs
from headway.core.system.part_clock import PartClock
from headway.engine_args import EngineArgs, PoolingModel
from headway.hosting.assembly import checked_registry, choose_weight_kernels
from headway.hosting.host import EngineDeadError
from headway.hosting.rank_assembly import named_experts
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.machine.process import bound_kernel_caches, freeze_heap, set_threads
from headway.models.encoders.pooling.detect import PoolingTask
from headway.models.encoders.pooling.loader import LoadedPoolingModel, load_pooling_model
from headway.models.loader import LoadOptions
from headway.pooling.jobs import PoolingJob, PoolingJobs
from headway.registry import Registry
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.measure.device import resolve_device
from headway.tuning.measure.self_test import check_named
from headway.tuning.measure.timing import SharedBudget

log = logging.getLogger("headway")

_GENERATING: dict[str, object] = {
    "attention_rules": {},
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
"""Option that only generation models support -> values that pooling models accept."""


class PoolingAssembly(NamedTuple):
    """A loaded model with an engine that is ready for texts."""

    registry: Registry
    device: torch.device
    num_threads: int | None
    """Number of CPU threads. None on a GPU."""
    model: LoadedPoolingModel
    engine: PoolingEngine
    start: PartClock


def assemble_pooling(args: EngineArgs, found: PoolingModel, registry: Registry | None = None) -> PoolingAssembly:
    """Load a model and create its engine. registry: result of `checked_registry`; None creates a registry. :raises HeadwayError:
    if an option is invalid."""
    _refuse_generating(args)
    registry = checked_registry(args) if registry is None else registry
    config = args.engine_config()
    request = config.backend_request
    device = resolve_device(args.device)
    clock = PartClock()
    ahead, num_threads = clock.within("compiling", compile_ahead(device)), None
    if device.type == "cpu":
        bound_kernel_caches()
        num_threads = set_threads(args.num_threads)
    with clock.part("weights"):
        model = _load(args, found, registry, device)
    model = replace(model, max_length=_max_length(args.max_model_len, model))
    layers = LayerSpecs(list(model.network.attention_specs))
    check_named(registry, request.names, layers.cached)
    table = TableRequest([Path(path) for path in args.crossover_table or ()], args.autotune_budget, args.tune)
    budget, products, experts = SharedBudget(table.seconds(device)), model.network.linear_choices, model.network.expert_kinds
    budget.expect((len(layers.counts) if layers.auto_phases(request) else 0) + len(experts) + bool(products))
    with clock.part("measuring attention"):
        costs = costs_for(layers, registry, request, table, ahead, budget)
    choose_weight_kernels(registry, products, experts, budget, clock, ahead)
    selector = select_backends(layers, registry, config, costs)
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


def _load(args: EngineArgs, found: PoolingModel, registry: Registry, device: torch.device) -> LoadedPoolingModel:
    kernels, experts = registry.linear_kernels(device, args.linear_kernel), named_experts(args, registry, device)
    return load_pooling_model(
        found.folder,
        found.task,
        name=args.model,
        dtype=args.dtype,
        device=device,
        load_format=args.load_format,
        skip_tokenizer_init=args.skip_tokenizer_init,
        options=LoadOptions(kernels=kernels, experts=experts),
    )


def _max_length(requested: int | None, model: LoadedPoolingModel) -> int:
    if requested is not None and requested > model.max_length:
        raise ConfigError("max_model_len", f"at most {model.max_length}, which {model.name} was made for", requested)
    return requested or model.max_length


def _refuse_generating(args: EngineArgs) -> None:
    """Check the options. :raises ConfigError: if an option is set that pooling models do not support."""
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
"""Task -> (what the model does, methods that return its results), as text for error messages."""


class PoolingClient:
    """Client of a pooling model that runs the jobs of an `LLM`."""

    def __init__(self, assembly: PoolingAssembly) -> None:
        self.assembly = assembly
        self.model = assembly.model
        self.engine = assembly.engine
        self.jobs = PoolingJobs(assembly.model)
        self._lock = Lock()

    def run(self, job: PoolingJob[Output], use_tqdm: bool = False) -> list[Output]:
        """Run a job to completion. Return its outputs. :raises BackendError: if a backend raised an error."""
        with self._lock, tqdm(total=len(job.texts), desc="Processed texts", disable=not use_tqdm) as bar:
            rows = self.engine.run(job.texts, bar.update)
        return job.finish(rows)

    def generates_not(self) -> ConfigError:
        """Return the error for a call that only a generation model supports."""
        does, methods = _INSTEAD[self.model.task]
        got = f"{self.model.name}, which {does}"
        return ConfigError("LLM", "a model that generates text", got, f"{methods} answer for it; runner='generate' insists")


_TOKENISERS = 2  # Threads that tokenize; the tokenizer's native code releases the GIL
_BATCHES = 4  # Batches of tokens per round: enough to group similar lengths, few enough not to delay short requests


@dataclass(eq=False)
class _Waiting:
    """A request with unfinished texts."""

    texts: Sequence[EncodedText]
    future: Future[list[Tensor]]
    rows: list[Tensor] = field(default_factory=list)
    begun: int = 0  # Number of texts passed to the engine


class AsyncPooling:
    """Runner of a `PoolingClient`'s engine in its own thread. Waiting requests alternate, text by text."""

    def __init__(self, client: PoolingClient) -> None:
        self.model = client.model
        self.jobs = client.jobs
        self.stats = client.engine.stats
        self._engine = client.engine
        self._waiting: deque[_Waiting] = deque()
        self._changed = Condition()
        self._stopped = False
        self._since: float | None = None  # Start time of the current round
        self._tokenisers = ThreadPoolExecutor(_TOKENISERS, "headway-tokenise")
        self._thread = Thread(target=self._run, name="headway-pooling", daemon=True)
        self._thread.start()

    async def run(self, make: Callable[[], PoolingJob[Output]]) -> tuple[list[Output], int]:
        """Run a job in a thread. Return its outputs and number of tokens.

        :raises HeadwayError: if an argument is invalid or a backend raised an error.
        :raises EngineDeadError: if the engine has been stopped.
        """
        loop = asyncio.get_running_loop()
        self._check_running()
        job = await loop.run_in_executor(self._tokenisers, make)
        rows = await asyncio.wrap_future(self._queue(job.texts))
        return await loop.run_in_executor(self._tokenisers, partial(job.finish, rows)), job.num_tokens

    def check_health(self, step_timeout: float) -> None:
        """Check that the engine is alive. step_timeout: maximum seconds per round. :raises EngineDeadError: if the engine has
        been stopped or is stuck."""
        self._check_running()
        since = self._since
        if since is not None and time.monotonic() - since > step_timeout:
            seconds = time.monotonic() - since
            raise EngineDeadError(f"the engine is stuck: no batch has ended for {seconds:.0f} s (step_timeout={step_timeout:g})")

    @property
    def has_lost_engine(self) -> bool:
        """Always False: an error ends only the requests of its round, never the engine."""
        return False

    @property
    def failure(self) -> EngineDeadError | None:
        """Always None; see `has_lost_engine`."""
        return None

    def shutdown(self) -> None:
        """End all requests, and stop the engine after the current round."""
        with self._changed:
            self._stopped = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for each in left:
            _fail(each, EngineDeadError("the engine has been stopped"))
        self._tokenisers.shutdown(wait=False, cancel_futures=True)

    def _check_running(self) -> None:
        if self._stopped:
            raise EngineDeadError("the engine has been stopped")

    def _queue(self, texts: Sequence[EncodedText]) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        with self._changed:
            self._check_running()
            self._waiting.append(_Waiting(texts, future))
            self._changed.notify()
        return future

    def _run(self) -> None:
        """Run rounds until `shutdown`, as the thread's main function."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                batch = self._take()
            if not batch:
                continue
            self._since = time.monotonic()
            try:
                rows = self._engine.run([text for _, text in batch])
            except Exception as error:
                self._end([each for each, _ in batch], error)
            else:
                for (each, _), row in zip(batch, rows, strict=True):
                    each.rows.append(row)
                self._end([each for each, _ in batch], None)
            self._since = None

    def _take(self) -> list[tuple[_Waiting, EncodedText]]:
        """Return the texts of the next round, up to a token limit: one text per request, repeated while tokens remain."""
        batch: list[tuple[_Waiting, EncodedText]] = []
        tokens = 0
        most = _BATCHES * self._engine.limits.max_num_tokens
        self._waiting = deque(each for each in self._waiting if not each.future.cancelled())
        going = deque(each for each in self._waiting if each.begun < len(each.texts))
        while going and (not batch or tokens < most):
            each = going.popleft()
            text = each.texts[each.begun]
            each.begun += 1
            batch.append((each, text))
            tokens += len(text.token_ids)
            if each.begun < len(each.texts):
                going.append(each)
        return batch

    def _end(self, served: Sequence[_Waiting], error: Exception | None) -> None:
        """Finish the requests of a round whose rows are complete. If there is an error, end all requests of the round with the
        error."""
        done = [each for each in dict.fromkeys(served) if error is not None or len(each.rows) == len(each.texts)]
        with self._changed:
            self._waiting = deque(each for each in self._waiting if each not in done)
        for each in done:
            if error is not None:
                _fail(each, error)
            elif each.future.set_running_or_notify_cancel():
                each.future.set_result(each.rows)


def _fail(waiting: _Waiting, error: Exception) -> None:
    if waiting.future.set_running_or_notify_cancel():
        waiting.future.set_exception(error)
