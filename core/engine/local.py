"""The executor of one process and one device: sets cache, backends and model up, and runs steps on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.compiled import CompileAhead
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.latent import expanded_specs, latent_layers
from headway.core.contract.layout import LayerCache
from headway.core.contract.model import Model
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES
from headway.core.contract.warmup import StepLimits
from headway.core.engine import pool
from headway.core.engine.attention import PagedAttention
from headway.core.engine.blocks import SMALLEST_CHUNK
from headway.core.engine.compilation import CompilationWatch
from headway.core.engine.config import MAX_DRAFT_TOKENS, EngineConfig
from headway.core.engine.executor import Capacity
from headway.core.engine.graph import name_of
from headway.core.engine.graphs import capture_sizes
from headway.core.engine.groups import PageFormat, page_format
from headway.core.engine.host_rows import HostRows
from headway.core.engine.latent import GATHERED_BYTES
from headway.core.engine.launched import Launched
from headway.core.engine.memory import cache_memory, run_trial
from headway.core.engine.offload.host_mover import HostMover
from headway.core.engine.offload.transfers import STAGING_BYTES
from headway.core.engine.pieces import piece_sizes
from headway.core.engine.pool import PoolSize
from headway.core.engine.recorder import CudaRecorder, Recorder
from headway.core.engine.runner import Runner
from headway.core.engine.step import StepInput
from headway.core.engine.warming import Warming
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.core.select.costs import CostTable
from headway.core.select.selector import BackendSource, Selector
from headway.core.select.workload import Workload

log = logging.getLogger("headway")

_TRIAL = 1024
"""Tokens of a step that takes the kernels of the largest."""
_MOST_ROUNDS = 3
"""Of warm-up: the first compiles, the second finds nothing; a kernel that is compiled in every step would keep it from ending."""


class LocalExecutor:
    """See `Executor`. Only here are model, backends and cache in one place."""

    def __init__(
        self,
        model: Model,
        specs: Sequence[AttentionSpec],
        source: BackendSource,
        config: EngineConfig,
        sampling: SamplingOps = TORCH_SAMPLING,
        costs: Mapping[AttentionSpec, CostTable] | None = None,
        compile_ahead: CompileAhead | None = None,
        max_decode_len: int = 1,
        hosts: HostRows | None = None,
        weights: str = "",
    ) -> None:
        """specs: of the model's layers, with the cache's element type as asked for. config: with its device's options filled in.

        sampling, costs, compile_ahead, hosts, weights: see `Engine`. max_decode_len: query tokens of a decode, drafts included.

        :raises HeadwayError: options that cannot work together, with what would.
        """
        device = specs[0].device
        asked = config.attn_backend, config.kv_layout, config.block_size, config.attn_options
        latents = latent_layers(model)
        expanded = expanded_specs(specs, latents)
        with compile_ahead() if compile_ahead is not None else nullcontext():  # what backends and the trial need, together
            selector = Selector(source, specs, *asked, costs, Workload.parse(config.workload), expanded)
            if compile_ahead is not None:
                run_trial(model, min(_TRIAL, config.step_tokens), 1, device)
        self.selection = selector.selection
        """Which backend serves which phase, over which layout and block size."""
        if config.deterministic:
            self.selection = replace(self.selection, why="deterministic: pinned")
        block_size = self.selection.block_size
        memory = config.pool_bytes
        if memory is None and device.type == "cuda":
            sizes, called = (config.step_tokens, config.max_num_seqs), [*selector.instances, selector.gathering]
            memory = cache_memory(model, called, *sizes, config.gpu_memory_utilization, device)
            memory -= 2 * STAGING_BYTES if config.offload_bytes[0] else 0
            memory -= 2 * GATHERED_BYTES if selector.gathering else 0  # keys, values, and the product that they are taken from
        layouts = [selector.layout_of(spec) for spec in specs]
        longest = _longest(config, model)
        pages = page_format(specs, layouts, block_size, longest, config.free_window_blocks)
        whole = config.deterministic or not config.enable_chunked_prefill
        chunk = longest if whole else min(SMALLEST_CHUNK, config.step_tokens + MAX_DRAFT_TOKENS)
        max_model_len = _max_model_len(config, pages, chunk, memory, longest)
        config.check_budget(max_model_len)
        size = pool.pool_size(pages, max_model_len, config.max_num_seqs, min(chunk, max_model_len), memory)
        self.capacity = Capacity(size, config.max_num_seqs, max_model_len)
        self.caches = pool.allocate(specs, layouts, size)
        """One a layer."""
        self.mover = HostMover(self.caches, size, config, weights) if config.offload_bytes[0] else None
        """Copies pages to memory beyond the pool."""
        _check_caches(selector, specs, self.caches)
        writers = {layout.name: source.layout(layout.name).load_writer(device) for layout in layouts}
        of_layers = [writers[layout.name] for layout in layouts]
        self.attention = PagedAttention(specs, self.caches, of_layers, pages.groups, latents, selector.gathering)
        """What the model calls; outside of steps only its shapes may be asked for."""
        self._hosts = hosts or HostRows(None, {})
        of_rows = block_size, config.max_num_seqs, max_model_len
        self._runner = Runner(model, self.attention, selector, sampling, *of_rows, pages.groups, self._hosts)
        self._device = device
        self._config = config
        self._compile_ahead = compile_ahead
        self.selector, self._max_decode_len = selector, max_decode_len
        limits = StepLimits(config.step_tokens, config.max_num_seqs, max_model_len, max_decode_len)
        self._warming = Warming(self._runner, model, self.attention, selector, limits, size)
        log.info("attention: %s", self.selection)
        for spec, dense in expanded.items():
            gathering = selector.gathering.get(spec)
            after = f", long chunks after a context with {gathering.name}" if gathering is not None else ""
            log.info("latent attention: prompts expanded to %s%s; all else absorbed", dense, after)
        others = {layout.name for layout in layouts} - {self.selection.layout.name}
        if others:
            log.info("cache groups: some layers are in kv_layout=%s", ", ".join(sorted(others)))
        _log_pool(size, block_size, max_model_len)

    def capture(self, recorder: Recorder | None = None) -> None:
        """Compile what requests may need; capture decode, and pieces of all other steps, as CUDA graphs, where there are any and
        nothing speaks against them.

        Then the engine is ready. recorder: records in place of CUDA's, on any device.
        """
        config, watch = self._config, CompilationWatch()
        if self._compile_ahead is not None:
            began = time.perf_counter()
            with self._compile_ahead():
                self._warming.run()
            log.info("warm-up: %d kernels compiled or loaded in %.1f s", len(watch.take()), time.perf_counter() - began)
        if self.attention.debug:
            log.warning("HEADWAY_DEBUG=1: every layer is looked at for NaN, so no CUDA graphs")
        elif recorder is not None or (self._device.type == "cuda" and not config.enforce_eager):
            sizes = config.cudagraph_capture_sizes or capture_sizes(config.max_num_seqs)
            self._runner.capture(sizes, piece_sizes(config.step_tokens), recorder or CudaRecorder(), self._max_decode_len)
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
            self._warming.run()
            compiled = watch.take()
            log.info("warm-up: every kind of step ran in %.1f s, %d kernels compiled", time.perf_counter() - began, len(compiled))
            if not compiled:
                return
        log.warning("warm-up: %s compiled in every round: requests will wait for them", ", ".join(sorted(set(compiled))))

    def attention_us(self, num_seqs: int, query_len: int, kv_len: int) -> float:
        """Microseconds of the attention of a decode step with the fastest backend, by the crossover table; infinite without one.

        query_len, kv_len: of each sequence, new tokens, and cached and new ones.
        """
        return self.selector.decode_us(num_seqs, query_len, kv_len)

    def observe(self, look: Callable[[NDArray[numpy.int32], Tensor], None] | None) -> None:
        """Have every step's logits looked at: rows that sample, int32 [rows], and logits [rows, vocab_size] on the device.

        The logits are overwritten by the next step. None ends it.
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


def _check_caches(selector: Selector, specs: Sequence[AttentionSpec], caches: Sequence[LayerCache]) -> None:
    """Ask every backend that may be called whether it can read the caches that it will meet.

    :raises UnsupportedError: one cannot.
    """
    for backends in selector.instances:
        for spec, cache in zip(specs, caches, strict=True):
            backend = backends.get(spec)  # a latent layer's prompts are served without a cache
            support = backend.accepts(cache) if backend is not None else YES
            if not support:
                raise UnsupportedError(f"attention backend {name_of(backends)} (kv_layout={cache.layout.name})", support.reasons)


def _log_pool(size: PoolSize, block_size: int, max_model_len: int) -> None:
    groups, gib = size.page_format.groups, size.num_bytes / pool.GIB
    windows = ", ".join(
        f"{len(group.layers)} layers {'keep all tokens' if group.window is None else f'see {group.window}'}: "
        f"pages of {group.page_size}"
        for group in groups
    )
    log.info(
        "pool: %d pages, blocks of %d tokens, %.2f GiB, %d sequences of %d tokens; %s",
        *(size.num_pages, block_size, gib, size.num_sequences(max_model_len), max_model_len, windows),
    )


def _longest(config: EngineConfig, model: Model) -> int:
    """The longest sequence that is asked for, or that the model was made for."""
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
