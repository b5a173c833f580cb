"""What a rank's memory holds beside the weights: activations, states and the cache's pages, sized as the engine sizes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headway.core.contract.errors import ConfigError
from headway.core.contract.model import StateLayer
from headway.core.contract.state import KEY_VALUE, StateParameters
from headway.core.engine.data.groups import PageFormat, page_format
from headway.core.engine.data.pool import SMALLEST_CHUNK, pool_size, size_text
from headway.core.engine.data.state_slots import StateSlots, plan_slots
from headway.plan.attention_times import layout_of
from headway.plan.devices import GIB, GpuKind
from headway.plan.model_costs import RankCosts

BLOCK_SIZE: Final = 16
SPARE_BYTES: Final = int(0.75 * GIB)
"""CUDA's context, libraries' workspaces and graphs."""
GROUP_BYTES: Final = int(0.4 * GIB)
"""What NCCL takes on each of several ranks (342 to 392 MB in the tables of `devices`' source)."""


@dataclass(frozen=True)
class EngineLimits:
    """Options of an engine that bound its steps; names are vLLM's."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int = 16384
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = False


@dataclass(frozen=True)
class EngineMemory:
    """What an engine's scheduler knows of memory, and its limits."""

    pages: PageFormat
    num_pages: int
    limits: EngineLimits
    states: StateSlots | None = None
    """Slots of a model whose layers keep states."""
    used_bytes: float = 0.0
    """Bytes that a rank takes for weights, activations, states and pages."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds in sequences of max_model_len."""
        longest = self.limits.max_model_len
        return (self.num_pages - self.pages.reserved) * longest // self.pages.pages_for(longest, 1)


def engine_memory(gpu: GpuKind, costs: RankCosts, limits: EngineLimits) -> EngineMemory:
    """Size states and pages for what the weights and the largest step leave of one GPU.

    :raises ConfigError: the weights do not fit, or not even one sequence of max_model_len.
    """
    usable = gpu.memory_bytes * limits.gpu_memory_utilization
    taken = SPARE_BYTES + (GROUP_BYTES if costs.size > 1 else 0)
    activations = costs.largest_step_bytes(limits.max_num_batched_tokens, limits.max_num_seqs)
    left = int(usable - costs.weight_bytes - activations - taken)
    if left <= 0:
        parts = f"{size_text(int(costs.weight_bytes))} of weights and {size_text(int(activations))} of activations"
        raise ConfigError("memory", f"{parts} in {size_text(int(usable))}", f"{size_text(int(gpu.memory_bytes))} a GPU")
    layers = [StateLayer(spec, StateParameters()) for spec in costs.layers.states]
    caches = costs.layers.cached
    slots = plan_slots(layers, KEY_VALUE, limits.max_num_seqs, 1, left, limits.enable_prefix_caching, bool(caches))
    left -= 0 if slots is None else slots.num_bytes
    pages = page_format(caches, [layout_of(spec) for spec in caches], BLOCK_SIZE, limits.max_model_len)
    pool = pool_size(pages, limits.max_model_len, limits.max_num_seqs, SMALLEST_CHUNK, left)
    states = 0 if slots is None else slots.num_bytes
    return EngineMemory(pages, pool.num_pages, limits, slots, costs.weight_bytes + activations + taken + states + pool.num_bytes)
