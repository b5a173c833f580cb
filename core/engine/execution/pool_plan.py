"""The memory of an engine: how many pages and states fit, and how long a sequence may be, on the least of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.model import Model, StateLayer, state_layers
from headway.core.contract.ranks import Ranks
from headway.core.contract.state import StateSpec
from headway.core.engine.data import pool
from headway.core.engine.data.config import MAX_DRAFT_TOKENS, EngineConfig
from headway.core.engine.data.groups import PageFormat, page_format
from headway.core.engine.data.page_mover import STAGING_BYTES
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.state_slots import StateMemory, StateSlots, plan_slots
from headway.core.engine.execution.latent import GATHERED_BYTES
from headway.core.engine.execution.memory import cache_memory
from headway.core.engine.execution.states import LayersWithState
from headway.core.select.costs import CostTable
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selector import Selector
from headway.core.select.state_candidates import StateSource
from headway.core.select.state_selector import StateSelector
from headway.core.select.workload import Workload

log = logging.getLogger("headway")


@dataclass(frozen=True)
class StatePlan:
    """A model's layers with a state, and what serves them."""

    layers: Sequence[StateLayer]
    selector: StateSelector
    per_row: int
    """Slots of a row."""

    @classmethod
    def of(
        cls,
        model: Model,
        source: StateSource,
        config: EngineConfig,
        costs: Mapping[StateSpec, CostTable] | None,
        max_decode_len: int,
    ) -> StatePlan | None:
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

    def slots(self, config: EngineConfig, memory: int | None, pages: bool) -> StateSlots | None:
        """Plan the slots in what states and pages share. pages: False if no layer has keys and values."""
        layout, caching = self.selector.selection.layout, config.enable_prefix_caching
        return plan_slots(self.layers, layout, config.max_num_seqs, self.per_row, memory, caching, pages)

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


def plan_pool(
    model: Model,
    layers: LayerSpecs,
    layouts: Sequence[CacheLayout],
    selector: Selector,
    states: StatePlan | None,
    config: EngineConfig,
    ranks: Ranks,
) -> tuple[PoolSize, int, StateSlots | None]:
    """The size of the pool, tokens of the longest sequence, and the slots of states, which share one memory.

    All ranks get the least that one of them has room for.

    :raises ConfigError: memory, lengths and budgets that cannot work together.
    """
    memory = _pool_memory(model, layers, selector, states, config)
    if memory is not None:
        memory = min(gathered(ranks, [memory], layers.device)[0])
    slots = None if states is None else states.slots(config, memory, bool(layers.cached))
    memory = memory if memory is None or slots is None else memory - slots.num_bytes
    longest = _longest(config, model)
    pages = page_format(layers.cached, layouts, selector.selection.block_size, longest, config.free_window_blocks)
    whole = config.deterministic or not config.enable_chunked_prefill
    chunk = longest if whole else min(pool.SMALLEST_CHUNK, config.step_tokens + MAX_DRAFT_TOKENS)
    max_model_len = _max_model_len(config, pages, chunk, memory, longest)
    config.check_budget(max_model_len)
    size = pool.pool_size(pages, max_model_len, config.max_num_seqs, min(chunk, max_model_len), memory)
    num_pages, max_model_len = map(min, gathered(ranks, [size.num_pages, max_model_len], layers.device))
    return replace(size, num_pages=num_pages), max_model_len, slots


def gathered(ranks: Ranks, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return for each of a rank's numbers those of all ranks."""
    found: list[list[int]] = ranks.all_gather(torch.tensor(numbers, device=device)).T.tolist()
    return found


def _pool_memory(
    model: Model, layers: LayerSpecs, selector: Selector, states: StatePlan | None, config: EngineConfig
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


def _longest(config: EngineConfig, model: Model) -> int:
    """Tokens of the longest sequence that the config asks for, or that the model was made for."""
    made_for = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > made_for:
        raise ConfigError("max_model_len", f"at most {made_for}, the positions the model was made for", config.max_model_len)
    return config.max_model_len or made_for


_TABLE_BYTES = 1 << 30
"""Most bytes of the block tables of all sequences. The pool alone is no bound: with windows it holds sequences of any length."""


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
        log.info("max_model_len: %d, what the pool holds; the model was made for %d", fits, longest)
    return max(fits, 1)
