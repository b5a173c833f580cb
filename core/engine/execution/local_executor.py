"""Executor for one process and one device: sets up the cache, the backends and the model, and runs steps."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.adapters import HostAdapter, LoRARequest, ModelAdapters, adapters_of
from headway.core.contract.backend import StepLimits
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.model import Model, latent_layers
from headway.core.contract.operation import STATE
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.contract.support import YES
from headway.core.engine.data import pool
from headway.core.engine.data.adapters import AdapterLoad
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import CACHE, WEIGHTS, Capacity, ExecutorLostError
from headway.core.engine.data.page_mover import MakePageMover
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.step import StepInput
from headway.core.engine.execution.attention import PagedAttention
from headway.core.engine.execution.captured_step import CudaGraphRecorder, GraphRecorder, name_of
from headway.core.engine.execution.graph_set import capture_sizes, piecewise_sizes
from headway.core.engine.execution.host_rows import HostRows, Launched
from headway.core.engine.execution.memory import ReleasedMemory, StatePlan, gathered, plan_pool
from headway.core.engine.execution.model_runner import CompilationWatch, ModelRunner
from headway.core.engine.execution.warmup import WarmUp
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.core.select.choice import plan_text
from headway.core.select.costs import CostTable
from headway.core.select.kernels import Kernels
from headway.core.select.request import LayerSpecs, Workload
from headway.core.select.selector import Selector
from headway.core.system.held_tensors import held_tensors

log = logging.getLogger("headway")


class AdapterStore:
    """LoRA adapters in host memory, in the format of a model's slots, keyed by digest.

    On rank 0, an adapter is read before the requests that use it run. Other ranks read an adapter when a step needs it in a slot.
    """

    def __init__(self, adapters: ModelAdapters, most: int, follows: bool = False) -> None:
        """most: number of unused adapters to cache (max_cpu_loras). follows: True on ranks above 0, which read on demand."""
        self.slots = adapters
        self._most = most
        self.num_slots = adapters.num_slots
        self._follows = follows
        self._cache: OrderedDict[bytes, HostAdapter] = OrderedDict()
        """Adapters by digest, most recently used last."""

    @classmethod
    def of(cls, model: object, most: int, follows: bool) -> AdapterStore | None:
        """Return a store for the slots of a model, or None if the model has none. most, follows: see `__init__`."""
        slots = adapters_of(model)
        return None if slots is None else cls(slots, most, follows)

    def read(self, request: LoRARequest) -> HostAdapter:
        """Return the adapter of a request; see `ModelAdapters.read`. Any thread may call this."""
        return self.slots.read(request)

    def keep(self, request: LoRARequest, adapter: HostAdapter | None = None, digest: bytes | None = None) -> HostAdapter:
        """Return an adapter from host memory, from `adapter`, or from its files; see `AdapterReader.keep`."""
        found = adapter or (None if digest is None else self._cache.get(digest))
        if found is None:
            found = self.slots.read(request)
            log.info("adapter %s: read from %s", request.lora_name, request.lora_path)
        if digest is not None and found.digest != digest:
            need = "the files that were read when it was loaded"
            raise ConfigError(f"adapter {request.lora_name}", need, "others in their place", "unload it, and load it again")
        self._cache[found.digest] = found
        self._cache.move_to_end(found.digest)
        return found

    def trim(self, wanted: Iterable[bytes] = ()) -> None:
        """Evict the least recently used adapters beyond the limit, except `wanted`; see `AdapterReader.trim`."""
        must_stay = set(wanted)
        spare = [digest for digest in self._cache if digest not in must_stay]
        for digest in spare[: max(len(self._cache) - self._most, 0)]:
            del self._cache[digest]

    def put(self, loads: Iterable[AdapterLoad]) -> None:
        """Copy adapters into slots, before the step that needs them is launched.

        :raises HeadwayError: if an adapter must be read from its files again, and reading it fails.
        """
        for slot, request, digest in loads:
            self.slots.put(slot, self.keep(request, digest=digest))
        if self._follows:
            self.trim()


_MOST_ROUNDS = 3
"""Maximum number of warm-up rounds. Usually the second round compiles nothing. The limit ends the warm-up even if a kernel is
compiled in every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedParts:
    """Parts of an engine that its executor is made from, too."""

    model: Model
    source: Kernels
    """Registry of kernels, with all backends."""
    sampling: SamplingOps = TORCH_SAMPLING
    """Sampling kernels. The default is torch's operations."""
    costs: Mapping[AttentionSpec, CostTable] | None = None
    """Measured times of each distinct layer, which `auto` uses. None means that `auto` uses the order that rank hooks propose."""
    state_costs: Mapping[StateSpec, CostTable] | None = None
    """Measured times of each distinct layer with a state, which `auto` uses."""
    compile_ahead: CompileAhead | None = None
    """Function that returns a context in which kernels are compiled ahead. None means that kernels are not compiled ahead."""
    hosts: HostRows | None = None
    """Object that runs grammars and named logits processors. None if the engine has neither."""
    ranks: Ranks = ONE_RANK
    """Connection to all ranks. The rank with the least memory limits all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceParts(SharedParts):
    """Parts from which the executor of one device is made. All ranks of an engine make their executors from identical parts, at
    the same time."""

    layers: LayerSpecs
    config: EngineConfig
    """Engine options, with the defaults for the device filled in."""
    max_decode_len: int = 1
    """Maximum number of query tokens of a decode, drafts included."""


class LocalExecutor:
    """Runs steps on one device, in the order in which they are launched. It owns the model, the backends and the cache."""

    def __init__(self, parts: DeviceParts, make_mover: MakePageMover | None = None) -> None:
        """make_mover: function that makes the page mover for offloading, or None.

        :raises HeadwayError: if options conflict. The message says how to resolve the conflict.
        """
        model, layers, config = parts.model, parts.layers, parts.config
        self._parts = parts
        self._recorder: Callable[[], GraphRecorder] | None = None  # torch frees a recorder's memory with the old graphs
        self._released: dict[str, ReleasedMemory] = {}
        """Released memory of the parts that sleep, keyed by part."""
        self._device = layers.device
        self.selector = select_backends(layers, parts.source, config, parts.costs, parts.compile_ahead)
        self.selection = self.selector.selection
        """The backend of each phase, with the layout and block size."""
        if config.deterministic:
            self.selection = replace(self.selection, why="deterministic: pinned")
        layouts = [self.selector.layout_of(spec) for spec in layers.cached]
        states = StatePlan.of(model, parts.source.of(STATE), config, parts.state_costs, parts.max_decode_len)
        size, max_model_len, slots = plan_pool(model, layers, layouts, self.selector, states, config, parts.ranks)
        self.capacity = Capacity(size, config.max_num_seqs, max_model_len, slots)
        self.caches = pool.allocate(layers.cached, layouts, size)
        """One cache per layer."""
        saved = None if states is None or slots is None else states.allocate(slots)
        self.mover = None if make_mover is None else make_mover(self.caches, size, None if saved is None else saved.memory)
        """Page mover, which copies pages and states out of device memory. None without offloading."""
        _check_caches(self.selector, layers.cached, self.caches)
        writers = {layout.name: parts.source.layout(layout.name).writer(self._device) for layout in layouts}
        self.attention = PagedAttention(
            layers,
            self.caches,
            [writers[layout.name] for layout in layouts],
            groups=size.page_format.groups,
            latents=latent_layers(model),
            gathering=self.selector.gathering,
            states=saved,
        )
        """Attention function that the model calls. Outside of steps, only the shapes of its results are valid."""
        self._hosts = parts.hosts or HostRows(None, {})
        self.adapters = AdapterStore.of(model, config.max_cpu_loras or config.max_loras, follows=parts.ranks.rank > 0)
        """Adapters in host memory. None if the model has no adapter slots."""
        limits = StepLimits(config.step_tokens, config.max_num_seqs, max_model_len, parts.max_decode_len)
        self.runner = ModelRunner(
            model=model,
            attention=self.attention,
            selector=self.selector,
            sampling=parts.sampling,
            limits=limits,
            groups=size.page_format.groups,
            hosts=self._hosts,
            ranks=parts.ranks,
        )
        self.warmup = WarmUp(self.runner, model, self.attention, self.selector, limits, size, parts.ranks)
        self.plan = [*(self.selector.plan() if layers.cached else ()), *(states.selector.plan("state") if states else ())]
        """Choice for each kind of layer and phase."""
        _log_setup(self, layers, layouts)

    def capture(self, recorder: GraphRecorder | None = None) -> None:
        """Compile all kernels that requests may need, and capture CUDA graphs if the device and the options allow it.

        The engine is ready afterwards. recorder: recorder to use for the graphs instead of CUDA graphs, on any device.
        """
        config = self._parts.config
        if self.attention.debug or config.record_tensors:
            log.warning("HEADWAY_DEBUG=1 or record_tensors: every layer is read on the host, so CUDA graphs are off")
        elif recorder is not None:
            self._recorder = lambda: recorder
        elif self._device.type == "cuda" and not config.enforce_eager:
            self._recorder = CudaGraphRecorder
        self._prepare()

    def _prepare(self) -> None:
        watch = CompilationWatch()
        if self._parts.compile_ahead is not None:
            began = time.perf_counter()
            with self._parts.compile_ahead():
                self.warmup.run()
            log.info("warm-up: %d kernels compiled or loaded in %.1f s", len(watch.take()), time.perf_counter() - began)
        if self._recorder is not None:
            self._capture_graphs(self._recorder())
            if compiled := watch.take():
                log.info("CUDA graphs: kernels compiled during capture: %s", ", ".join(compiled))
        if self._parts.compile_ahead is not None:
            self._settle(watch)
        self.runner.compilations = watch

    def retune(self, costs: Mapping[AttentionSpec, CostTable] | None) -> None:
        """Choose the attention backends anew by these times, with the same layouts and block size, and capture graphs again. No
        step may run, and no page may hold a prompt."""
        self.selector.renew(costs)
        self.selection = self.selector.selection
        _check_caches(self.selector, self._parts.layers.cached, self.caches)
        self.runner.release_graphs()
        self._prepare()

    def _capture_graphs(self, recorder: GraphRecorder) -> None:
        sizes = self._parts.config.cudagraph_capture_sizes or capture_sizes(self._parts.config.max_num_seqs)
        self.runner.capture(sizes, piecewise_sizes(self._parts.config.step_tokens), recorder, self._parts.max_decode_len)

    def sleep(self, lost: Sequence[Tensor]) -> None:
        """Free the memory of weights and cache between two steps. No step may be launched until both are awake.

        CUDA graphs contain addresses of weights and cache, so they are captured again after waking. lost: weights that are zero
        after waking and must be loaded again. All other weights are saved in host memory.

        :raises ConfigError: if this executor cannot sleep.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.runner.release_graphs()
        states = self.attention.states
        caches = held_tensors(self.caches, None if states is None else states.memory).values()
        self._released = {
            CACHE: ReleasedMemory(lost=caches),
            WEIGHTS: ReleasedMemory(stored=held_tensors(self._parts.model).values(), lost=lost),
        }
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, part: str) -> None:
        """Allocate the memory of WEIGHTS or CACHE again. The cache is empty after waking."""
        self._released.pop(part).restore()
        if part == WEIGHTS and (adapters := adapters_of(self._parts.model)) is not None:
            adapters.arrange()
        if not self._released and self._recorder is not None:
            self._capture_graphs(self._recorder())

    def _settle(self, watch: CompilationWatch) -> None:
        for number in range(_MOST_ROUNDS):
            began = time.perf_counter()
            watch.take()
            self.warmup.run(complete=number > 0)
            compiled = watch.take()
            log.info("warm-up: every kind of step ran in %.1f s, %d kernels compiled", time.perf_counter() - began, len(compiled))
            if not max(gathered(self._parts.ranks, [len(compiled)], self._device)[0]):
                return
        log.warning("warm-up: %s compiled in every round; requests may wait for compilation", ", ".join(sorted(set(compiled))))

    def observe(self, look: Callable[[NDArray[numpy.int32], Tensor], None] | None) -> None:
        """Set a function to call in every step with the sampling rows, int32 [rows], and their logits, [rows, vocab_size].

        The next step overwrites the logits. `look` = None stops the calls.
        """
        self.runner.observe = look

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        """Start any work that a request needs before its first step; see `HostRows.prepare`."""
        return self._hosts.prepare(params)

    def launch(self, step: StepInput) -> Launched:
        """Start a step. On a CPU, the step has run when this method returns. Errors of a backend are passed on.

        The step's row changes take effect even if an error is raised.
        """
        if self.mover is not None:
            self.mover.before(step)
        if step.adapter_loads and self.adapters is not None:
            self.adapters.put(step.adapter_loads)
        return self.runner.launch(step)

    def failed(self, error: Exception) -> None:
        """Handle the error of a step, which was raised at the step's launch or while waiting for it. If this method returns,
        later steps may run.

        :raises ExecutorLostError: if no other step can run.
        """

    def call_when_lost(self, report: Callable[[ExecutorLostError], None]) -> None:
        """Register a bound method, which is called in any thread when no further step can run. With one process, it is never
        called."""

    def shutdown(self) -> None:
        """Stop the processes of other ranks, if any. No step may be launched afterwards."""

    @property
    def facts(self) -> tuple[object, ...]:
        """Values that must match on every rank: memory, lengths, chosen backends."""
        chosen, slots = self.selection, self.capacity.states
        served = tuple((phase.value, tuple(chosen.all_for(phase))) for phase in chosen.names)
        num_slots = 0 if slots is None else slots.num_slots
        return self.capacity.pool.num_pages, self.capacity.max_model_len, num_slots, chosen.block_size, chosen.layout.name, served


def select_backends(
    layers: LayerSpecs,
    source: Kernels,
    config: EngineConfig,
    costs: Mapping[AttentionSpec, CostTable] | None,
    compile_ahead: CompileAhead | None = None,
) -> Selector:
    """Return the selector of backends. The kernels of all backends are compiled together."""
    with compile_ahead() if compile_ahead is not None else nullcontext():
        return Selector(
            source,
            layers,
            config.backend_request,
            kv_layout=config.kv_layout,
            block_size=config.block_size,
            options=config.attn_options,
            costs=costs,
            workload=Workload.parse(config.workload),
        )


def _check_caches(selector: Selector, specs: Sequence[AttentionSpec], caches: Sequence[LayerCache]) -> None:
    """Check that every backend that may be called can read the caches of its layers.

    :raises UnsupportedError: if a backend cannot read a layer's cache.
    """
    for backends in selector.instances.values():
        for spec, cache in zip(specs, caches, strict=True):
            backend = backends.get(spec)  # a latent layer's prompts are computed without a cache
            support = backend.accepts(cache) if backend is not None else YES
            if not support:
                raise UnsupportedError(f"attention backend {name_of(backends)} (kv_layout={cache.layout.name})", support.reasons)


def _log_setup(executor: LocalExecutor, layers: LayerSpecs, layouts: Sequence[CacheLayout]) -> None:
    selector, selection, capacity = executor.selector, executor.selection, executor.capacity
    log.info("attention: %s", selection)
    log.info("plan:\n%s", plan_text(executor.plan))
    for spec, dense in layers.expanded.items():
        gathering = selector.gathering.get(spec)
        after = f", and long chunks after a context use {gathering.name}" if gathering is not None else ""
        log.info("latent attention: prompts are expanded to %s%s; all other steps use the absorbed form", dense, after)
    others = {layout.name for layout in layouts} - {selection.layout.name}
    if others:
        log.info("cache groups: some layers use kv_layout=%s", ", ".join(sorted(others)))
    _log_pool(capacity.pool, selection.block_size, capacity.max_model_len)


def _log_pool(size: PoolSize, block_size: int, max_model_len: int) -> None:
    groups, gib = size.page_format.groups, size.num_bytes / pool.GIB
    windows = ", ".join(
        f"{len(group.layers)} layers {'keep all tokens' if group.window is None else f'see {group.window}'}: "
        f"pages of {group.page_size}"
        for group in groups
    )
    log.info(
        "pool: %d pages, blocks of %d tokens, %.2f GiB, %d sequences of %d tokens; %s",
        size.num_pages,
        block_size,
        gib,
        size.num_sequences(max_model_len),
        max_model_len,
        windows,
    )
