"""A layer's cache as an engine or a foreign allocator makes it, its blocks handed out in no order, and what they must hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.core.contract.layout import SCALES, CacheGeometry, CacheLayout, CacheWriter, LayerCache
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import Skipped

FINITE_POISON = 3e4
"""Finite in every 16-bit type, and far from anything a case holds."""
_FAR = 1 << 15
"""Slots, and blocks where there is room, before the first that is used in far memory: 16 bits with a sign can number no more."""
_FAR_ELEMENTS = 1 << 31
_PAD = 16
"""Elements of somebody else after each piece of an interleaved tensor that stands alone."""


def first_far(spec: AttentionSpec, block_size: int) -> int:
    """The first block of far memory that is used. On a CPU an address costs nothing until it is touched, so there blocks of
    usual sizes have numbers beyond 16 bits, and not only their slots."""
    block = block_size * spec.num_kv_heads * max(spec.head_dim, spec.v_head_dim)
    room = _FAR_ELEMENTS // (2 * block) if spec.device.type == "cpu" else 0
    return max(_FAR // block_size, min(_FAR, room))


class Foreign:
    """One layer's tensors, and the memory they are views of."""

    def __init__(
        self, spec: AttentionSpec, layout: CacheLayout, num_blocks: int, block_size: int, memory: str, first: int = 0
    ) -> None:
        """memory: out of MEMORIES; first: the first block that is handed out, where those before it are not worth watching.

        :raises Skipped: the layout's blocks are not its outermost axis, so that nobody packs them; no room for far memory.
        """
        geometry = CacheGeometry.of(spec, num_blocks, block_size)
        cache = layout.allocate(geometry, spec.k_scale, spec.v_scale)
        if memory == "own":
            self.cache = cache
            self.bases = _from(cache, first)
            return
        if memory in ("spaced", "far"):
            self.cache, bases = _apart(cache, first_far(spec, block_size) if memory == "far" else 0)
            self.bases = _from(self.cache, first) if first else bases
            return
        if any(axes[0] != "block" for axes in layout.tensors.values()):
            raise Skipped(f"layout {layout.name}: its outermost axis is not the block, so K and V are not packed by block")
        kept = 1 if memory == "packed" else 2
        shapes = {name: tensor.shape for name, tensor in cache.tensors.items()}
        together = len({shapes[name][:kept] for name in SCALES if name in shapes}) == 1
        self.bases = []
        tensors = {}
        groups = _by_type(cache, [list(shapes)] if together else [[name] for name in shapes])
        for names in groups:
            sizes = [math.prod(shapes[name][kept:]) for name in names]
            width = sum(sizes) + (_PAD if len(names) == 1 else 0)
            base = torch.zeros((*shapes[names[0]][:kept], width), dtype=cache.tensors[names[0]].dtype, device=geometry.device)
            self.bases.append(base)
            first = 0
            for name, size in zip(names, sizes, strict=True):
                tensors[name] = base[..., first : first + size].unflatten(-1, shapes[name][kept:])  # type: ignore[no-untyped-call]
                first += size
        self.cache = LayerCache(tensors, layout, geometry, spec.k_scale, spec.v_scale)

    def fill(self, value: float) -> None:
        """Put a value everywhere, somebody else's memory included."""
        for base in self.bases:
            fill(base, value)

    def fill_blocks(self, blocks: Sequence[int], value: float) -> None:
        """Put a value into every slot of some blocks."""
        for name, tensor in self.cache.tensors.items():
            one = torch.empty((), dtype=tensor.dtype)
            fill(one, value)
            at = torch.tensor(blocks, dtype=torch.int64, device=tensor.device)
            bits(tensor).index_fill_(self.cache.layout.tensors[name].index("block"), at, int(bits(one)))

    def differs(self, other: Foreign) -> bool:
        """Whether any bit differs."""
        return not all(torch.equal(bits(a), bits(b)) for a, b in zip(self.bases, other.bases, strict=True))

    def differing_slots(self, other: Foreign) -> set[int]:
        """Slots of which a tensor differs in any bit."""
        found: set[int] = set()
        for name in self.cache.tensors:
            ours, theirs = (bits(side.cache.by_slot(name)) for side in (self, other))
            found |= set((ours != theirs).flatten(2).any(-1).flatten().nonzero().flatten().tolist())
        return found


def _by_type(cache: LayerCache, groups: list[list[str]]) -> list[list[str]]:
    """The same groups, each cut into those of one element type and shape of what is outermost."""
    found: dict[tuple[object, ...], list[str]] = {}
    for number, names in enumerate(groups):
        for name in names:
            found.setdefault((number, cache.tensors[name].dtype, name in SCALES), []).append(name)
    return list(found.values())


def _apart(cache: LayerCache, far: int) -> tuple[LayerCache, list[Tensor]]:
    """A cache whose blocks lie apart, whatever its layout, and all of its memory. far: the block from which on elements have
    offsets that 32 bits with a sign cannot number; 0: there is none."""
    tensors, bases = {}, []
    for name, tensor in cache.tensors.items():
        axis, count = cache.layout.tensors[name].index("block"), cache.geometry.num_blocks
        shape = [count, *tensor.shape[:axis], *tensor.shape[axis + 1 :]]  # in memory the blocks are outermost
        size = math.prod(shape[1:])
        stride = max(2 * size, -(-_FAR_ELEMENTS // far) if far else 0)
        try:
            base = torch.empty((count - 1) * stride + 2 * size, dtype=tensor.dtype, device=tensor.device)
        except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
            gib = count * stride * tensor.itemsize / 2**30
            raise Skipped(f"memory: no room for a cache tensor that spans {gib:.0f} GiB of addresses") from None
        inner = [math.prod(shape[place + 1 :]) for place in range(1, len(shape))]
        tensors[name] = base.as_strided(shape, (stride, *inner)).movedim(0, axis)
        bases.append(base)
    return LayerCache(tensors, cache.layout, cache.geometry, cache.k_scale, cache.v_scale), bases


def _from(cache: LayerCache, first: int) -> list[Tensor]:
    """The blocks of a cache from one on. Blocks before it are not touched: in far memory each might take a page of megabytes."""
    axes = {name: cache.layout.tensors[name].index("block") for name in cache.tensors}
    return [tensor.narrow(axes[name], first, cache.geometry.num_blocks - first) for name, tensor in cache.tensors.items()]


class Layers:
    """The caches of layers with one block table: those a backend is given, and beside them what they must hold."""

    def __init__(
        self,
        spec: AttentionSpec,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        writer: CacheWriter,
        *,
        memory: str = "own",
        layers: int = 2,
        poison: float = math.nan,
    ) -> None:
        """poison: in every slot that holds no token."""
        self.poison = poison
        near, first = ("own", first_far(spec, block_size)) if memory == "far" else (memory, 0)
        self.right = [Foreign(spec, layout, num_blocks, block_size, near, first) for _ in range(layers)]
        self.given = [Foreign(spec, layout, num_blocks, block_size, memory, first) for _ in range(layers)]
        self._writer = writer
        for foreign in (*self.given, *self.right):
            foreign.fill(self.poison)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, *, given: bool) -> None:
        """Write rows as the layout's writer does. given: into the backend's cache as well."""
        self._writer(k, v, self.right[layer].cache, slots)
        if given:
            self._writer(k, v, self.given[layer].cache, slots)

    def forget(self, blocks: Sequence[int]) -> None:
        """Fill blocks that belong to no sequence any more."""
        for foreign in (*self.given, *self.right):
            foreign.fill_blocks(blocks, self.poison)


def fill(tensor: Tensor, value: float) -> None:
    """Put a value everywhere, or the largest that the type has, where that is less; whole numbers know no NaN."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(min(value, torch.finfo(tensor.dtype).max) if math.isfinite(value) else value)
    else:
        tensor.fill_(int(min(value, torch.iinfo(tensor.dtype).max)) if math.isfinite(value) else torch.iinfo(tensor.dtype).max)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers, so that NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])
