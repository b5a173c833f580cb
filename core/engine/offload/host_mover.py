"""The mover of one process: host memory, and a folder where one is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import LayerCache
from headway.core.engine.config import EngineConfig
from headway.core.engine.offload.disk import DiskStore
from headway.core.engine.offload.mover import KeptPage, Pending
from headway.core.engine.offload.slots import HostSlots
from headway.core.engine.offload.tier import PageName
from headway.core.engine.offload.transfers import Transfers
from headway.core.engine.pool import PoolSize, page_memory
from headway.core.engine.step import StepInput

_VERSION = 1
"""Of what a page's bytes mean."""


class HostMover:
    """See PageMover."""

    def __init__(self, caches: Sequence[LayerCache], size: PoolSize, config: EngineConfig, weights: str) -> None:
        """weights: tells this model's weights from all others; needed for a folder alone.

        :raises ConfigError: caches whose blocks are not one piece of memory, or a tier that the host has no room for.
        """
        scattered = {cache.layout.name for cache in caches if not cache.layout.contiguous_blocks}
        if scattered:
            raise ConfigError(
                "kv_offload_size", "a cache whose blocks are one piece of memory each", f"layout {sorted(scattered)}"
            )
        num_bytes, disk_bytes = config.offload_bytes
        page_bytes = size.page_format.page_bytes
        if num_bytes < page_bytes:
            raise ConfigError("kv_offload_size", f"at least the {page_bytes} bytes of a block of all layers", num_bytes)
        memory = page_memory(caches, size)
        slots = HostSlots(memory, num_bytes // page_bytes)
        self._transfers = Transfers(memory, slots)
        self._disk: DiskStore | None = None
        if config.kv_offload_dir is not None:
            if not weights:
                raise ConfigError("kv_offload_dir", "a model whose weights can be told from others", "none")
            salt = _salt(caches, size, weights)
            of_slots = slots.parts, self._transfers.wait_for_slot
            self._disk = DiskStore(Path(config.kv_offload_dir).expanduser(), salt, page_bytes, disk_bytes, *of_slots)
        self.num_slots, self.rates = slots.num_slots, self._transfers.rates
        self.stored: Sequence[PageName] = self._disk.stored if self._disk is not None else ()
        self.max_stored = self._disk.max_stored if self._disk is not None else 0

    def before(self, step: StepInput) -> None:
        """To be called before a step is launched: see Transfers."""
        self._transfers.before(step)

    def move_out(self, moves: Sequence[tuple[int, int]]) -> Pending[object]:
        """See PageMover."""
        return self._transfers.move_out(moves)

    def move_back(self, moves: Sequence[tuple[int, int]]) -> Pending[object]:
        """See PageMover."""
        return self._transfers.move_back(moves)

    def store(self, pages: Sequence[KeptPage]) -> Pending[frozenset[PageName]]:
        """See PageMover."""
        assert self._disk is not None
        return self._disk.store(pages)

    def fetch(self, pages: Sequence[KeptPage]) -> Pending[frozenset[PageName]]:
        """See PageMover."""
        assert self._disk is not None
        return self._disk.fetch(pages)

    def discard(self, names: Sequence[PageName]) -> None:
        """See PageMover."""
        assert self._disk is not None
        self._disk.discard(names)


def _salt(caches: Sequence[LayerCache], size: PoolSize, weights: str) -> str:
    """A digest of everything that gives a page's bytes their meaning."""
    layers = [
        (sorted(cache.layout.tensors.items()), cache.layout.pack_bytes, str(cache.geometry.dtype), cache.k_scale, cache.v_scale)
        for cache in caches
    ]
    shapes = [
        (each.geometry.block_size, each.geometry.num_kv_heads, each.geometry.head_dim, each.geometry.v_head_dim)
        for each in caches
    ]
    what = _VERSION, torch.__version__, weights, layers, shapes, size.page_format
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()
