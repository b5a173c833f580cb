"""Slots in the pool of states: first the rows of running sequences, then checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import zeros
from headway.core.contract.model import StateLayer
from headway.core.contract.state import StateCache, StateLayout
from headway.core.engine.data.pool import size_text

_CHECKPOINT_SHARE = 5  # Checkpoints use at most 1/5 of the cache's memory: pages save a hit more tokens
_CHECKPOINTS_PER_ROW = 4  # Checkpoints per row: with more, few would be hit before they are evicted
_DEFAULT_BYTES = 256 * 2**20  # Maximum bytes of checkpoints on a CPU if no cache size is set


class Checkpoint(NamedTuple):
    """A state that a step saves in addition to the sequence's current state."""

    num_tokens: int
    """Number of the step's new tokens after which the state is saved."""
    slot: int
    digest: bytes
    """Name of the sequence's prefix up to the saved state."""


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Number and ownership of the state slots."""

    num_rows: int
    per_row: int
    """Number of slots per row: one, plus one for each draft token that a step may verify."""
    num_checkpoints: int
    bytes_per_slot: int

    @property
    def first_checkpoint(self) -> int:
        """Index of the first checkpoint slot."""
        return self.num_rows * self.per_row

    @property
    def num_slots(self) -> int:
        """Total number of slots."""
        return self.first_checkpoint + self.num_checkpoints

    def of_row(self, row: int) -> range:
        """Return the slots of a row."""
        return range(row * self.per_row, (row + 1) * self.per_row)

    @property
    def num_bytes(self) -> int:
        """Size of all slots in bytes."""
        return self.num_slots * self.bytes_per_slot


def plan_slots(
    layers: Sequence[StateLayer],
    layout: StateLayout,
    max_num_seqs: int,
    per_row: int,
    memory: int | None,
    checkpoints: bool,
    pages: bool = True,
) -> StateSlots | None:
    """Return the slots for a model's layers with a state, or None if there are none.

    memory: bytes that states and pages share. None means the default for CPUs. checkpoints: True if there is a prefix cache.
    pages: False if no layer has keys and values, so that states may use all of the memory.
    :raises ConfigError: if the states of max_num_seqs sequences leave less than half of the memory for pages, or do not fit."""
    if not layers:
        return None
    size = sum(layout.bytes_per_slot(layer.spec) for layer in layers)
    rows = max_num_seqs * per_row * size
    parts = 2 if pages else 1
    if memory is not None and parts * rows > memory:
        fits = memory // (parts * per_row * size)
        raise ConfigError(
            "max_num_seqs",
            f"states of {size_text(per_row * size)} a sequence in {'at most half of ' if pages else ''}the cache's memory",
            f"{max_num_seqs} sequences, {size_text(rows)} of {size_text(memory)}",
            f"set max_num_seqs to at most {fits}" if fits else "raise kv_cache_memory",
        )
    share = _DEFAULT_BYTES if memory is None else memory // _CHECKPOINT_SHARE if pages else memory - rows
    count = min(_CHECKPOINTS_PER_ROW * max_num_seqs, share // size) if checkpoints else 0
    return StateSlots(max_num_seqs, per_row, count, size)


@dataclass(frozen=True)
class StateMemory:
    """States of all layers. Tensors of equal shape share one allocation, so that copying slots takes few launches."""

    caches: Sequence[StateCache]
    stacks: Sequence[Tensor]
    """[layers, num_slots, ...] each: the allocations, of which the tensors of `caches` are views."""
    slots: StateSlots

    @classmethod
    def allocate(cls, layers: Sequence[StateLayer], layout: StateLayout, slots: StateSlots) -> StateMemory:
        """Allocate zeroed states for every layer."""
        kinds: dict[object, list[tuple[int, str]]] = {}
        for number, layer in enumerate(layers):
            for name, kind in layout.shapes(layer.spec, slots.num_slots).items():
                kinds.setdefault(kind, []).append((number, name))
        tensors: list[dict[str, Tensor]] = [{} for _ in layers]
        stacks = []
        for places in kinds.values():
            number, name = places[0]
            shape, dtype = layout.shapes(layers[number].spec, slots.num_slots)[name]
            stack = zeros((len(places), *shape), dtype, layers[number].spec.device)
            stacks.append(stack)
            for (owner, tensor), memory in zip(places, stack, strict=True):
                tensors[owner][tensor] = memory
        caches = [StateCache(own, layout, layer.spec) for own, layer in zip(tensors, layers, strict=True)]
        return cls(caches, stacks, slots)

    def views(self) -> list[Tensor]:
        """Return uint8 views [layers, num_slots, bytes] of the memory, with one row per slot, as `page_memory` does for pages."""
        return [stack.view(len(stack), self.slots.num_slots, -1).view(torch.uint8) for stack in self.stacks]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots of all layers. All sources are read before any target is written. sources, targets: int64 [count]."""
        for stack in self.stacks:
            stack.index_copy_(1, targets, stack.index_select(1, sources))
