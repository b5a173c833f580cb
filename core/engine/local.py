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
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.model import Model
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.warmup import StepLimits
from headway.core.engine import pool
from headway.core.engine.attention import PagedAttention
from headway.core.engine.compilation import CompilationWatch
from headway.core.engine.config import EngineConfig
from headway.core.engine.executor import Capacity
from headway.core.engine.graphs import capture_sizes
from headway.core.engine.host_rows import HostRows
from headway.core.engine.launched import Launched
from headway.core.engine.memory import cache_memory, run_trial
from headway.core.engine.pieces import piece_sizes
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
    ) -> None:
        """specs: of the model's layers, with the cache's element type as asked for. config: with its device's options filled in.

        sampling, costs, compile_ahead, hosts: see `Engine`. max_decode_len: query tokens of a decode, drafts included.

        :raises HeadwayError: options that cannot work together, with what would.
        """
        device = specs[0].device
        asked = config.attn_backend, config.kv_layout, config.block_size, config.attn_options
        with compile_ahead() if compile_ahead is not None else nullcontext():  # what backends and the trial need, together
            selector = Selector(source, specs, *asked, costs, Workload.parse(config.workload))
            if compile_ahead is not None:
                run_trial(model, min(_TRIAL, config.step_tokens), 1, device)
        self.selection = selector.selection
        """Which backend serves which phase, over which layout and block size."""
        if config.deterministic:
            self.selection = replace(self.selection, why="deterministic: pinned")
        block_size = self.selection.block_size
        memory = config.pool_bytes
        if memory is None and device.type == "cuda":
            sizes = config.step_tokens, config.max_num_seqs
            memory = cache_memory(model, selector.instances, *sizes, config.gpu_memory_utilization, device)
        layouts = [selector.layout_of(spec) for spec in specs]
        max_model_len = _max_model_len(config, model, specs, layouts, block_size, memory)
        config.check_budget(max_model_len)
        size = pool.pool_size(specs, layouts, block_size, max_model_len, config.max_num_seqs, memory)
        self.capacity = Capacity(size, config.max_num_seqs, max_model_len)
        self.caches = pool.allocate(specs, layouts, size)
        """One a layer."""
        _check_caches(selector, specs, self.caches)
        writers = {layout.name: source.layout(layout.name).load_writer(device) for layout in layouts}
        self.attention = PagedAttention(specs, self.caches, [writers[layout.name] for layout in layouts])
        """What the model calls; outside of steps only its shapes may be asked for."""
        self._hosts = hosts or HostRows(None, {})
        most = config.max_num_seqs, max_model_len
        self._runner = Runner(model, self.attention, selector, sampling, block_size, *most, self._hosts)
        self._device = device
        self._config = config
        self._compile_ahead = compile_ahead
        limits = StepLimits(config.step_tokens, config.max_num_seqs, max_model_len, max_decode_len)
        self._warming = Warming(self._runner, model, self.attention, selector, limits, block_size)
        log.info("attention: %s", self.selection)
        others = {layout.name for layout in layouts} - {self.selection.layout.name}
        if others:
            log.info("cache groups: some layers are in kv_layout=%s", ", ".join(sorted(others)))
        log.info("pool: %d blocks of %d tokens, %.2f GiB", size.num_blocks, block_size, size.num_bytes / pool.GIB)

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
            self._runner.capture(sizes, piece_sizes(config.step_tokens), recorder or CudaRecorder())
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
        return self._runner.launch(step)


def _check_caches(selector: Selector, specs: Sequence[AttentionSpec], caches: Sequence[LayerCache]) -> None:
    """Ask every backend that may be called whether it can read the caches that it will meet.

    :raises UnsupportedError: one cannot.
    """
    for backends in selector.instances:
        for spec, cache in zip(specs, caches, strict=True):
            support = backends[spec].accepts(cache)
            if not support:
                raise UnsupportedError(
                    f"attention backend {backends[spec].name} (kv_layout={cache.layout.name})", support.reasons
                )


def _max_model_len(
    config: EngineConfig,
    model: Model,
    specs: Sequence[AttentionSpec],
    layouts: Sequence[CacheLayout],
    block_size: int,
    memory: int | None,
) -> int:
    made_for = model.max_position_embeddings
    if config.max_model_len is None:
        fits = pool.longest_that_fits(specs, layouts, block_size, memory, made_for)
        if not config.enable_chunked_prefill:
            fits = min(fits, config.step_tokens)
        if 0 < fits < made_for:
            log.info("max_model_len: %d, what the pool holds; the model was made for %d", fits, made_for)
        return max(fits, 1)
    if config.max_model_len > made_for:
        raise ConfigError("max_model_len", f"at most {made_for}, the positions the model was made for", config.max_model_len)
    return config.max_model_len
