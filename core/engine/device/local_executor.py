"""The executor of one process and one device: sets cache, backends and model up, and runs steps on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.backend import StepLimits
from headway.core.contract.compiled import CompileAhead
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.model import Model, StateLayer, latent_layers, state_layers
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.contract.support import YES
from headway.core.engine.device.compilation import CompilationWatch
from headway.core.engine.device.host_rows import HostRows
from headway.core.engine.device.launched import Launched
from headway.core.engine.device.memory import cache_memory, run_trial
from headway.core.engine.device.model_runner import ModelRunner
from headway.core.engine.device.warmup import WarmUp
from headway.core.engine.forward.attention import PagedAttention
from headway.core.engine.forward.latent import GATHERED_BYTES
from headway.core.engine.forward.states import LayersWithState
from headway.core.engine.graphs.captured_step import name_of
from headway.core.engine.graphs.cuda_graph import CudaGraphRecorder, GraphRecorder
from headway.core.engine.graphs.graph_set import capture_sizes
from headway.core.engine.graphs.piecewise import piecewise_sizes
from headway.core.engine.state import pool
from headway.core.engine.state.config import MAX_DRAFT_TOKENS, EngineConfig
from headway.core.engine.state.executor import Capacity, ExecutorLostError
from headway.core.engine.state.groups import PageFormat, page_format
from headway.core.engine.state.page_mover import STAGING_BYTES, MakePageMover
from headway.core.engine.state.pool import PoolSize
from headway.core.engine.state.state_slots import StateMemory, StateSlots, plan_slots
from headway.core.engine.state.step import StepInput
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.core.select.costs import CostTable
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selection import Selection
from headway.core.select.selector import Selector
from headway.core.select.startup import BackendSource
from headway.core.select.state_candidates import StateSource
from headway.core.select.state_selector import StateSelector
from headway.core.select.workload import Workload

log = logging.getLogger("headway")

_TRIAL = 1024
"""Tokens of a step that takes the kernels of the largest."""
_MOST_ROUNDS = 3
"""Rounds of warm-up: the first compiles, the second finds nothing; a kernel that is compiled in every step would keep the warm-up
from ending."""


class EngineSource(BackendSource, StateSource, Protocol):
    """The part of the Registry that an engine needs."""


class LocalExecutor:
    """The `Executor` of one process and one device. Only here are model, backends and cache in one place."""

    def __init__(
        self,
        model: Model,
        layers: LayerSpecs,
        source: EngineSource,
        config: EngineConfig,
        sampling: SamplingOps = TORCH_SAMPLING,
        costs: Mapping[AttentionSpec, CostTable] | None = None,
        state_costs: Mapping[StateSpec, CostTable] | None = None,
        compile_ahead: CompileAhead | None = None,
        max_decode_len: int = 1,
        hosts: HostRows | None = None,
        make_mover: MakePageMover | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """config: with its device's options filled in.

        sampling, costs, state_costs, compile_ahead, hosts: see `make_engine`. max_decode_len: query tokens of a decode, with
        drafts. make_mover: makes what keeps pages beyond the pool; None: nothing does. ranks: this one and the others, which make
        an executor at the same time and with equal arguments: what each can hold is what the least of them can.

        :raises HeadwayError: options that cannot work together, with what would.
        """
        self._config, self._compile_ahead, self._max_decode_len = config, compile_ahead, max_decode_len
        self._device, self._ranks = layers.device, ranks
        self.selector = _select(model, layers, source, config, costs, compile_ahead)
        self.selection = self.selector.selection
        """Which backend serves which phase, over which layout and block size."""
        if config.deterministic:
            self.selection = replace(self.selection, why="deterministic: pinned")
        layouts = [self.selector.layout_of(spec) for spec in layers.cached]
        states = _StatePlan.of(model, source, config, state_costs, max_decode_len)
        size, max_model_len, slots = _plan_pool(model, layers, layouts, self.selector, states, config, ranks)
        self.capacity = Capacity(size, config.max_num_seqs, max_model_len, slots)
        self.caches = pool.allocate(layers.cached, layouts, size)
        """One cache for each layer."""
        kept = None if states is None or slots is None else states.allocate(slots)
        self.mover = None if make_mover is None else make_mover(self.caches, size, None if kept is None else kept.memory)
        """Copies pages and states to memory beyond the device's."""
        _check_caches(self.selector, layers.cached, self.caches)
        writers = {layout.name: source.layout(layout.name).load_writer(self._device) for layout in layouts}
        self.attention = PagedAttention(
            layers,
            self.caches,
            [writers[layout.name] for layout in layouts],
            groups=size.page_format.groups,
            latents=latent_layers(model),
            gathering=self.selector.gathering,
            states=kept,
        )
        """What the model calls; outside of steps only its shapes may be asked for."""
        self._hosts = hosts or HostRows(None, {})
        self._runner = ModelRunner(
            model,
            self.attention,
            self.selector,
            sampling,
            block_size=self.selection.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            groups=size.page_format.groups,
            hosts=self._hosts,
            ranks=ranks,
        )
        limits = StepLimits(config.step_tokens, config.max_num_seqs, max_model_len, max_decode_len)
        self.warmup = WarmUp(self._runner, model, self.attention, self.selector, limits, size, ranks)
        _log_setup(self.selector, self.selection, layers, layouts, self.capacity)

    def capture(self, recorder: GraphRecorder | None = None) -> None:
        """Compile what requests may need, and capture CUDA graphs, where the device has them and no option excludes them.

        Then the engine is ready. recorder: records in place of CUDA's, on any device.
        """
        config, watch = self._config, CompilationWatch()
        if self._compile_ahead is not None:
            began = time.perf_counter()
            with self._compile_ahead():
                self.warmup.run()
            log.info("warm-up: %d kernels compiled or loaded in %.1f s", len(watch.take()), time.perf_counter() - began)
        if self.attention.debug:
            log.warning("HEADWAY_DEBUG=1: every layer is looked at for NaN, so no CUDA graphs")
        elif recorder is not None or (self._device.type == "cuda" and not config.enforce_eager):
            sizes = config.cudagraph_capture_sizes or capture_sizes(config.max_num_seqs)
            self._runner.capture(
                sizes, piecewise_sizes(config.step_tokens), recorder or CudaGraphRecorder(), self._max_decode_len
            )
            if compiled := watch.take():
                log.info("CUDA graphs: compiled for them: %s", ", ".join(compiled))
        if self._compile_ahead is not None:
            self._settle(watch)
        self._runner.watch_compilations(watch)

    def _settle(self, watch: CompilationWatch) -> None:
        """Run every kind of step until none of them compiles anything."""
        for _ in range(_MOST_ROUNDS):
            began = time.perf_counter()
            watch.take()
            self.warmup.run()
            compiled = watch.take()
            log.info("warm-up: every kind of step ran in %.1f s, %d kernels compiled", time.perf_counter() - began, len(compiled))
            if not max(_gathered(self._ranks, [len(compiled)], self._device)[0]):
                return
        log.warning("warm-up: %s compiled in every round: requests will wait for them", ", ".join(sorted(set(compiled))))

    def attention_us(self, num_seqs: int, query_len: int, kv_len: int) -> float:
        """Microseconds of the attention of a decode step with the fastest backend, by the crossover table; infinite without one.

        query_len, kv_len: new tokens of each sequence, and cached and new ones together.
        """
        return self.selector.decode_us(num_seqs, query_len, kv_len)

    def observe(self, look: Callable[[NDArray[numpy.int32], Tensor], None] | None) -> None:
        """Call a function in every step with the rows that sample, int32 [rows], and their logits, [rows, vocab_size].

        The next step overwrites the logits. None: call nothing any more.
        """
        self._runner.observe = look

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        """See `HostRows.prepare`."""
        return self._hosts.prepare(params)

    def launch(self, step: StepInput) -> Launched:
        """Start a step. On a CPU it has run when this returns."""
        if self.mover is not None:
            self.mover.before(step)
        return self._runner.launch(step)

    def failed(self, error: Exception) -> None:
        """See `Executor`: the next step may run."""

    def call_when_lost(self, tell: Callable[[ExecutorLostError], None]) -> None:
        """See `Executor`: nothing of it can end alone."""

    def shutdown(self) -> None:
        """See `Executor`: nothing of it runs elsewhere."""

    @property
    def facts(self) -> tuple[object, ...]:
        """What must be equal on all ranks, so that they run the same steps: memory, lengths and the choice of backends."""
        chosen, slots = self.selection, self.capacity.states
        served = tuple((phase.value, tuple(chosen.all_for(phase))) for phase in chosen.names)
        num_slots = 0 if slots is None else slots.num_slots
        return self.capacity.pool.num_pages, self.capacity.max_model_len, num_slots, chosen.block_size, chosen.layout.name, served


def _select(
    model: Model,
    layers: LayerSpecs,
    source: BackendSource,
    config: EngineConfig,
    costs: Mapping[AttentionSpec, CostTable] | None,
    compile_ahead: CompileAhead | None,
) -> Selector:
    """Choose the backends; what they and the trial of memory need is compiled together."""
    with compile_ahead() if compile_ahead is not None else nullcontext():
        selector = Selector(
            source,
            layers,
            config.backend_request,
            kv_layout=config.kv_layout,
            block_size=config.block_size,
            options=config.attn_options,
            costs=costs,
            workload=Workload.parse(config.workload),
        )
        if compile_ahead is not None:
            run_trial(model, layers, min(_TRIAL, config.step_tokens), 1)
    return selector


@dataclass(frozen=True)
class _StatePlan:
    """A model's layers with a state, and what serves them."""

    layers: Sequence[StateLayer]
    selector: StateSelector
    per_row: int
    """Slots of a row."""

    @classmethod
    def of(
        cls,
        model: Model,
        source: EngineSource,
        config: EngineConfig,
        costs: Mapping[StateSpec, CostTable] | None,
        max_decode_len: int,
    ) -> _StatePlan | None:
        """None: the model has no such layers."""
        layers = state_layers(model)
        if not layers:
            return None
        specs, workload = [layer.spec for layer in layers], Workload.parse(config.workload)
        return cls(layers, StateSelector(source, specs, config.state_request, costs, workload, max_decode_len), max_decode_len)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot over all layers."""
        return sum(self.selector.selection.layout.bytes_per_slot(layer.spec) for layer in self.layers)

    def slots(self, config: EngineConfig, memory: int | None) -> StateSlots | None:
        """Plan the slots in what states and pages share."""
        layout, caching = self.selector.selection.layout, config.enable_prefix_caching
        return plan_slots(self.layers, layout, config.max_num_seqs, self.per_row, memory, caching)

    def allocate(self, slots: StateSlots) -> LayersWithState:
        """Allocate the states, and put them and their backends together."""
        selector = self.selector
        log.info("states: %s", selector.selection)
        log.info(
            "states: %d slots of %.2f MiB, %.2f GiB: %d sequences%s, %d checkpoints",
            slots.num_slots,
            slots.bytes_per_slot / 2**20,
            slots.num_bytes / pool.GIB,
            slots.num_rows,
            f" with {slots.per_row - 1} drafts each" if slots.per_row > 1 else "",
            slots.num_checkpoints,
        )
        memory = StateMemory.allocate(self.layers, selector.selection.layout, slots)
        return LayersWithState(self.layers, memory, selector.scan, selector.step)


def _plan_pool(
    model: Model,
    layers: LayerSpecs,
    layouts: Sequence[CacheLayout],
    selector: Selector,
    states: _StatePlan | None,
    config: EngineConfig,
    ranks: Ranks,
) -> tuple[PoolSize, int, StateSlots | None]:
    """The size of the pool, tokens of the longest sequence, and the slots of states, which share one memory.

    All ranks get the least that one of them has room for.

    :raises ConfigError: memory, lengths and budgets that cannot work together.
    """
    memory = _pool_memory(model, layers, selector, states, config)
    if memory is not None:
        memory = min(_gathered(ranks, [memory], layers.device)[0])
    slots = None if states is None else states.slots(config, memory)
    memory = memory if memory is None or slots is None else memory - slots.num_bytes
    longest = _longest(config, model)
    pages = page_format(layers.cached, layouts, selector.selection.block_size, longest, config.free_window_blocks)
    whole = config.deterministic or not config.enable_chunked_prefill
    chunk = longest if whole else min(pool.SMALLEST_CHUNK, config.step_tokens + MAX_DRAFT_TOKENS)
    max_model_len = _max_model_len(config, pages, chunk, memory, longest)
    config.check_budget(max_model_len)
    size = pool.pool_size(pages, max_model_len, config.max_num_seqs, min(chunk, max_model_len), memory)
    num_pages, max_model_len = map(min, _gathered(ranks, [size.num_pages, max_model_len], layers.device))
    return replace(size, num_pages=num_pages), max_model_len, slots


def _gathered(ranks: Ranks, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """For each of a rank's numbers those of all ranks."""
    found: list[list[int]] = ranks.all_gather(torch.tensor(numbers, device=device)).T.tolist()
    return found


def _pool_memory(
    model: Model, layers: LayerSpecs, selector: Selector, states: _StatePlan | None, config: EngineConfig
) -> int | None:
    """Bytes that the pool may take; None: what a CPU has to spare."""
    if config.pool_bytes is not None or layers.device.type != "cuda":
        return config.pool_bytes
    memory = cache_memory(
        model,
        layers,
        [*selector.instances, selector.gathering, *(() if states is None else (states.selector.scan, states.selector.step))],
        max_num_tokens=config.step_tokens,
        max_num_seqs=config.max_num_seqs,
        utilization=config.gpu_memory_utilization,
    )
    if config.offload_bytes[0]:
        memory -= 2 * STAGING_BYTES + (0 if states is None else 2 * max(STAGING_BYTES, states.bytes_per_slot))
    memory -= 2 * GATHERED_BYTES if selector.gathering else 0  # keys, values, and the product that they are taken from
    return memory


def _check_caches(selector: Selector, specs: Sequence[AttentionSpec], caches: Sequence[LayerCache]) -> None:
    """Check that every backend that may be called can read the caches of its layers.

    :raises UnsupportedError: a backend cannot.
    """
    for backends in selector.instances:
        for spec, cache in zip(specs, caches, strict=True):
            backend = backends.get(spec)  # a latent layer's prompts are served without a cache
            support = backend.accepts(cache) if backend is not None else YES
            if not support:
                raise UnsupportedError(f"attention backend {name_of(backends)} (kv_layout={cache.layout.name})", support.reasons)


def _log_setup(
    selector: Selector, selection: Selection, layers: LayerSpecs, layouts: Sequence[CacheLayout], capacity: Capacity
) -> None:
    """Say which backends serve, over which layouts, and how large the pool is."""
    log.info("attention: %s", selection)
    for spec, dense in layers.expanded.items():
        gathering = selector.gathering.get(spec)
        after = f", long chunks after a context with {gathering.name}" if gathering is not None else ""
        log.info("latent attention: prompts expanded to %s%s; all else absorbed", dense, after)
    others = {layout.name for layout in layouts} - {selection.layout.name}
    if others:
        log.info("cache groups: some layers are in kv_layout=%s", ", ".join(sorted(others)))
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


def _longest(config: EngineConfig, model: Model) -> int:
    """Tokens of the longest sequence that the config asks for, or that the model was made for."""
    made_for = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > made_for:
        raise ConfigError("max_model_len", f"at most {made_for}, the positions the model was made for", config.max_model_len)
    return config.max_model_len or made_for


def _max_model_len(config: EngineConfig, pages: PageFormat, chunk: int, memory: int | None, longest: int) -> int:
    if config.max_model_len is not None:
        return longest
    fits = pool.longest_that_fits(pages, chunk, memory, longest)
    if not config.enable_chunked_prefill:
        fits = min(fits, config.step_tokens)
    if 0 < fits < longest:
        log.info("max_model_len: %d, what the pool holds; the model was made for %d", fits, longest)
    return max(fits, 1)
