"""Device memory: the amount available to the cache, the plan of the pool, and memory released while the engine sleeps."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy
import torch
from torch import Tensor, UntypedStorage

from headway.core.contract.adapters import adapters_of, rows_with
from headway.core.contract.backend import Backends
from headway.core.contract.errors import ConfigError
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.model import AttentionFunctions, Model, StateLayer, latent_layers, state_layers
from headway.core.contract.ranks import Ranks
from headway.core.contract.state import StateBackend, StateBackends, StateLayout, StateSpec
from headway.core.engine.data import pool
from headway.core.engine.data.config import MAX_DRAFT_TOKENS, EngineConfig
from headway.core.engine.data.groups import PageFormat, page_format
from headway.core.engine.data.page_mover import STAGING_BYTES
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.state_slots import StateMemory, StateSlots, plan_slots
from headway.core.engine.execution.latent import GATHERED_BYTES
from headway.core.engine.execution.states import LayersWithState
from headway.core.sampling.filtering import keep_top
from headway.core.sampling.sampler import Draws, sample
from headway.core.select.costs import CostTable
from headway.core.select.kernels import KernelRegistry, StateCandidates
from headway.core.select.request import LayerSpecs, Workload
from headway.core.select.selector import KernelSelector, Selector

log = logging.getLogger("headway")

_DONTNEED: Final = 4
"""Linux's MADV_DONTNEED: the system takes the pages back, and they are zero at the next access."""


class _Released(NamedTuple):
    storage: UntypedStorage
    num_bytes: int
    stored: Tensor | None
    """Saved contents in host memory. None if the contents are lost."""


class ReleasedMemory:
    """Memory of tensors on a device, released by the constructor and allocated again by `restore`.

    On a GPU the addresses change, so CUDA graphs become invalid. On a CPU the addresses stay: pages are returned to the system,
    and saved contents stay in place.
    """

    def __init__(self, *, stored: Iterable[Tensor] = (), lost: Iterable[Tensor] = ()) -> None:
        """stored: tensors whose contents `restore` brings back. lost: tensors that are zero after `restore`, even if they are
        also in `stored`."""
        self._released: list[_Released] = []
        empty = _storages(lost)
        for key, storage in {**_storages(stored), **empty}.items():
            if storage.device.type == "cuda":
                size = storage.nbytes()
                self._released.append(_Released(storage, size, None if key in empty else _on_host(storage)))
                storage.resize_(0)
            elif key in empty:
                _empty_pages(storage)

    @torch.inference_mode()
    def restore(self) -> None:
        """Allocate the memory again, and copy saved contents back."""
        while self._released:
            storage, num_bytes, stored = self._released.pop()
            storage.resize_(num_bytes)
            memory = _bytes_of(storage)
            memory.zero_() if stored is None else memory.copy_(stored)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    found = (each.untyped_storage() for each in tensors if each.layout == torch.strided)
    return {storage._cdata: storage for storage in found}


@torch.inference_mode()
def _on_host(storage: UntypedStorage) -> Tensor:
    stored = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
    return stored.copy_(_bytes_of(storage))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@torch.inference_mode()
def _empty_pages(storage: UntypedStorage) -> None:
    """Set a CPU storage to zero. On Linux, its whole pages are returned to the system instead of being written."""
    memory, page = _bytes_of(storage), mmap.PAGESIZE
    begin = -storage.data_ptr() % page
    length = (storage.nbytes() - begin) // page * page
    if length <= 0 or sys.platform != "linux":
        memory.zero_()
        return
    memory[:begin].zero_()
    memory[begin + length :].zero_()
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(storage.data_ptr() + begin), ctypes.c_size_t(length), _DONTNEED):
        memory.zero_()


_SPARE = 256 * 2**20
"""Bytes reserved for memory that the trial does not measure: workspaces of libraries, and graphs without their activations."""


def cache_memory(
    model: Model,
    layers: LayerSpecs,
    backends: Iterable[Backends | StateBackends],
    *,
    max_num_tokens: int,
    max_num_seqs: int,
    utilization: float,
) -> int:
    """Return the number of bytes for the cache on a CUDA device, so that the process uses at most the fraction `utilization` of
    the device's memory.

    The largest step runs once without attention to measure its peak memory, which is reserved together with the backends'
    workspaces.

    :raises ConfigError: if the model exceeds this limit even without a cache.
    """
    held = _peak_bytes(model, layers, max_num_tokens, max_num_seqs)
    called = {id(backend): backend for by_spec in backends for backend in by_spec.values()}
    workspace = sum(backend.workspace_bytes(max_num_tokens, max_num_seqs) for backend in called.values())
    free, total = torch.cuda.mem_get_info(layers.device)
    left = int(total * utilization) - (total - free) - held - workspace - _SPARE
    if left <= 0:
        gib = 2**30
        raise ConfigError(
            "gpu_memory_utilization",
            f"more than {(total * utilization - left) / total:.2f} for the model, its activations and what else runs on the GPU",
            f"{utilization} of {total / gib:.1f} GiB, of which {(total - free) / gib:.1f} GiB are taken before the cache",
            "raise it, lower max_num_batched_tokens, or free the GPU",
        )
    return left


def _peak_bytes(model: Model, layers: LayerSpecs, max_num_tokens: int, max_num_seqs: int) -> int:
    """Return the peak memory of a step in bytes, excluding weights and KV cache."""
    device = layers.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run_trial(model, layers, max_num_tokens, max_num_seqs)
    torch.cuda.synchronize(device)
    held = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    return held


@torch.inference_mode()
def run_trial(model: Model, layers: LayerSpecs, num_tokens: int, num_seqs: int) -> None:
    """Run a step of `num_tokens` tokens that samples `num_seqs` tokens, with the GEMMs of latent layers but without attention.

    The step sorts the logits for sampling even if the engine's kernels filter without sorting. The 42 bytes per logit that
    sorting needs also cover penalties, masks and log-probabilities, which the trial does not run.
    """
    latents, states, device = latent_layers(model), state_layers(model), layers.device

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_zeros((*q.shape[:2], layers.value_head_dims[layer]))
        if layer in latents:
            latents[layer].expand(k)
            attended = latents[layer].absorb(q)[..., : v.shape[-1]]
            latents[layer].project(attended.clone(memory_format=torch.contiguous_format), out)
        return out

    def state(layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        return x.new_zeros(x.shape[0], states[layer].spec.out_channels)

    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device) % model.max_position_embeddings
    count = min(num_seqs, num_tokens)
    slots = torch.zeros(num_tokens, dtype=torch.int32, device=device)  # with adapter slots, such rows use the most memory
    with rows_with(adapters_of(model), slots):
        hidden = model(ids, positions, AttentionFunctions(attention, state))
    logits = model.compute_logits(hidden[:count])
    if logits.shape[1] < model.vocab_size:  # shard of one rank, which may have to gather all logits
        logits = logits.new_zeros(count, model.vocab_size)
    likely = keep_top(logits.float(), torch.zeros(count, device=device), torch.full((count,), 0.9, device=device))
    sample(likely, Draws(numpy.ones(count, dtype=numpy.float32), numpy.zeros(count, dtype=numpy.int64)))


@dataclass(frozen=True)
class StatePlan:
    """A model's layers with a state, and their backends."""

    layers: Sequence[StateLayer]
    selector: KernelSelector[StateSpec, StateBackend, StateLayout]
    per_row: int
    """Number of state slots per row."""
    scan: StateBackends
    """Backends for sequences that prefill or extend."""
    step: StateBackends
    """Backends for sequences that decode."""

    @classmethod
    def of(
        cls,
        model: Model,
        source: KernelRegistry[StateBackend, StateLayout],
        config: EngineConfig,
        costs: Mapping[StateSpec, CostTable] | None,
        max_decode_len: int,
    ) -> StatePlan | None:
        """Return the plan of a model's layers with a state, or None if the model has no such layers.

        :raises HeadwayError: if no requested backend supports the layers. The message gives the reason for each backend.
        """
        layers = state_layers(model)
        if not layers:
            return None
        candidates = StateCandidates(source, [layer.spec for layer in layers], max_decode_len)
        selector = KernelSelector(candidates, config.state_request, costs, Workload.parse(config.workload))
        scan, step = map(selector.backends_for, (Phase.PREFILL, Phase.DECODE))
        return cls(layers, selector, max_decode_len, scan, step)

    @property
    def bytes_per_slot(self) -> int:
        """Size of one slot in bytes, over all layers."""
        return sum(self.selector.selection.layout.bytes_per_slot(layer.spec) for layer in self.layers)

    def slots(self, config: EngineConfig, memory: int | None, pages: bool) -> StateSlots | None:
        """Return the state slots that fit in the memory that states and pages share. pages: False if no layer has keys and
        values."""
        layout, caching = self.selector.selection.layout, config.enable_prefix_caching
        return plan_slots(self.layers, layout, config.max_num_seqs, self.per_row, memory, caching, pages)

    def allocate(self, slots: StateSlots) -> LayersWithState:
        """Allocate the states, and return them with their backends."""
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
        return LayersWithState(self.layers, memory, self.scan, self.step)


def plan_pool(
    model: Model,
    layers: LayerSpecs,
    layouts: Sequence[CacheLayout],
    selector: Selector,
    states: StatePlan | None,
    config: EngineConfig,
    ranks: Ranks,
) -> tuple[PoolSize, int, StateSlots | None]:
    """Return the pool size, the maximum sequence length in tokens, and the state slots. Pool and state slots share the same
    memory.

    All ranks use the minimum over ranks.

    :raises ConfigError: if memory, lengths and budgets conflict.
    """
    memory = _pool_memory(model, layers, selector, states, config)
    if memory is not None:
        memory = min(gathered(ranks, [memory], layers.device)[0])
    slots = None if states is None else states.slots(config, memory, bool(layers.cached))
    memory = memory if memory is None or slots is None else memory - slots.num_bytes
    longest = _longest(config, model)
    pages = page_format(layers.cached, layouts, selector.selection.block_size, longest, config.free_window_blocks)
    whole = config.invariance is Invariance.BATCH or not config.enable_chunked_prefill
    chunk = longest if whole else min(pool.SMALLEST_CHUNK, config.step_tokens + MAX_DRAFT_TOKENS)
    max_model_len = _max_model_len(config, pages, chunk, memory, longest)
    config.check_budget(max_model_len)
    size = pool.pool_size(pages, max_model_len, config.max_num_seqs, min(chunk, max_model_len), memory)
    num_pages, max_model_len = map(min, gathered(ranks, [size.num_pages, max_model_len], layers.device))
    return replace(size, num_pages=num_pages), max_model_len, slots


def gathered(ranks: Ranks, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return, for each entry of `numbers`, the values of all ranks."""
    found: list[list[int]] = ranks.all_gather(torch.tensor(numbers, device=device)).T.tolist()
    return found


def _pool_memory(
    model: Model, layers: LayerSpecs, selector: Selector, states: StatePlan | None, config: EngineConfig
) -> int | None:
    """Return the size of the pool in bytes. None means the default size, on a CPU."""
    if config.pool_bytes is not None or layers.device.type != "cuda":
        return config.pool_bytes
    memory = cache_memory(
        model,
        layers,
        [*selector.instances.values(), selector.gathering, *(() if states is None else (states.scan, states.step))],
        max_num_tokens=config.step_tokens,
        max_num_seqs=config.max_num_seqs,
        utilization=config.gpu_memory_utilization,
    )
    if config.offload_bytes[0]:
        memory -= 2 * STAGING_BYTES + (0 if states is None else 2 * max(STAGING_BYTES, states.bytes_per_slot))
    memory -= 2 * GATHERED_BYTES if selector.gathering else 0  # keys, values, and the GEMM output from which they are split
    return memory


def _longest(config: EngineConfig, model: Model) -> int:
    """Return the maximum sequence length in tokens, from the config or the model."""
    made_for = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > made_for:
        raise ConfigError("max_model_len", f"at most {made_for}, the positions the model was made for", config.max_model_len)
    return config.max_model_len or made_for


_TABLE_BYTES = 1 << 30
"""Maximum total size in bytes of all sequences' block tables. This limits the sequence length, because with sliding windows the
pool does not."""


def _max_model_len(config: EngineConfig, pages: PageFormat, chunk: int, memory: int | None, longest: int) -> int:
    most = _TABLE_BYTES // (4 * (config.max_num_seqs + 1) * max(len(pages.groups), 1)) * pages.block_size
    if config.max_model_len is not None:
        if longest > most:
            need = f"at most {most}, as far as block tables of 1 GiB reach for max_num_seqs={config.max_num_seqs}"
            raise ConfigError("max_model_len", need, longest, "lower it, or max_num_seqs")
        return longest
    fits = min(pool.longest_that_fits(pages, chunk, memory, longest), most)
    if not config.enable_chunked_prefill:
        fits = min(fits, config.step_tokens)
    if 0 < fits < longest:
        log.info("max_model_len: %d, limited by the size of the KV cache; the model supports %d", fits, longest)
    return max(fits, 1)
