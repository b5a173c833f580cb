"""Cache layouts as values: named axes, one view that all layouts share, and `gather`, which reads logical rows back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy
import torch
from torch import Tensor

from headway.core.contract.support import YES, Support

LOGICAL_AXES = ("block", "slot", "head", "dim", "x")
"""Every cache tensor has these axes in some order; "x" is the inner part of a split head_dim and may be absent."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The sizes of one layer's cache, whatever its layout."""

    num_blocks: int
    block_size: int
    """Slots (tokens) in a block."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_block(self) -> int:
        """Of key and value of one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where the element (block, slot, head, dim) of a layer's key and value lies.

    Two layouts with equal axes are the same layout, whatever they are called.
    """

    name: str = field(compare=False)
    key_axes: tuple[str, ...]
    """Order of LOGICAL_AXES in memory, outermost first."""
    value_axes: tuple[str, ...]
    pack_bytes: int = 0
    """Bytes of the inner axis "x" where a tensor has one: x = pack_bytes // element size (vLLM's key cache: 16)."""

    def __post_init__(self) -> None:
        for axes in (self.key_axes, self.value_axes):
            assert set(axes) | {"x"} == set(LOGICAL_AXES), f"{self.name}: axes must be an order of {LOGICAL_AXES}: {axes}"
            assert "x" not in axes or self.pack_bytes > 0, f"{self.name}: axis x needs pack_bytes"

    def x(self, dtype: torch.dtype) -> int:
        """Elements of the inner axis for this element type; 1 where the layout does not split head_dim."""
        return self.pack_bytes // dtype.itemsize if self.pack_bytes else 1

    def check(self, head_dim: int, dtype: torch.dtype) -> Support:
        """Whether heads of this size can be laid out so."""
        if head_dim % self.x(dtype):
            return Support.no("head_dim", f"a multiple of {self.x(dtype)} for layout {self.name}", head_dim)
        return YES

    def shape(self, axes: tuple[str, ...], geometry: CacheGeometry) -> tuple[int, ...]:
        """Shape of a tensor with these axes (`key_axes` or `value_axes`)."""
        x = self.x(geometry.dtype) if "x" in axes else 1
        sizes = {
            "block": geometry.num_blocks,
            "slot": geometry.block_size,
            "head": geometry.num_kv_heads,
            "dim": geometry.head_dim // x,
            "x": x,
        }
        return tuple(sizes[axis] for axis in axes)

    def allocate(self, geometry: CacheGeometry, k_scale: float = 1.0, v_scale: float = 1.0) -> LayerCache:
        """Allocate one layer's key and value, zeroed: kernels that read whole blocks must meet finite numbers."""
        key = _zeros(self.shape(self.key_axes, geometry), geometry)
        value = _zeros(self.shape(self.value_axes, geometry), geometry)
        return LayerCache(key, value, self, geometry, k_scale, v_scale)


@dataclass(frozen=True)
class LayerCache:
    """One layer's paged cache. The layout travels with the tensors, so that nobody has to guess it from a shape."""

    key: Tensor
    value: Tensor
    layout: CacheLayout
    geometry: CacheGeometry
    k_scale: float = 1.0
    """Key = stored key * k_scale (an fp8 cache; 1 otherwise): the writer divides before it stores."""
    v_scale: float = 1.0

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.geometry.block_size

    @cached_property
    def logical_key(self) -> Tensor:
        """View [num_blocks, block_size, num_kv_heads, head_dim / x, x]: its strides address every layout alike."""
        return _logical(self.key, self.layout.key_axes)

    @cached_property
    def logical_value(self) -> Tensor:
        """View [num_blocks, block_size, num_kv_heads, head_dim / x, x] of the value."""
        return _logical(self.value, self.layout.value_axes)

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read logical rows back, in the order of `slots`: the oracle every writer and kernel is tested against.

        slots: int64 [...], each block * block_size + offset, none negative. Returns k, v [..., num_kv_heads, head_dim], copies as
        they are stored: those of an fp8 cache are still to be multiplied by `k_scale` and `v_scale`.
        """
        rows = slots.reshape(-1)
        k = _gather(self.logical_key, rows, self.block_size)
        v = _gather(self.logical_value, rows, self.block_size)
        shape = (*slots.shape, self.geometry.num_kv_heads, self.geometry.head_dim)
        return k.view(shape), v.view(shape)


NHD = CacheLayout("nhd", ("block", "slot", "head", "dim"), ("block", "slot", "head", "dim"))
"""FlashAttention's paged layout: the slots of a block are consecutive rows."""
HND = CacheLayout("hnd", ("block", "head", "slot", "dim"), ("block", "head", "slot", "dim"))
"""FlashInfer's and TensorRT-LLM's: the rows of one head lie together."""
VLLM_5D = CacheLayout("vllm_5d", ("block", "head", "dim", "slot", "x"), ("block", "head", "dim", "slot"), pack_bytes=16)
"""The layout of vLLM's PagedAttention kernels: 16-byte pieces of the key interleaved over slots, the value transposed."""

CacheWriter = Callable[[Tensor, Tensor, LayerCache, Tensor], None]
"""(k, v, cache, slot_mapping): writes k, v [num_tokens, num_kv_heads, head_dim] to slot_mapping [num_tokens]; -1 is skipped."""


@dataclass(frozen=True, slots=True)
class LayoutInfo:
    """How a plugin registers a layout: the value, and the one writer that fills it on a device."""

    layout: CacheLayout
    load_writer: Callable[[torch.device], CacheWriter]


def _zeros(shape: tuple[int, ...], geometry: CacheGeometry) -> Tensor:
    if geometry.device.type != "cpu":
        return torch.zeros(shape, dtype=geometry.dtype, device=geometry.device)
    # calloc, not memset: the system hands out zero pages when they are first written, so a big pool costs no start-up time.
    flat = torch.from_numpy(numpy.zeros(math.prod(shape) * geometry.dtype.itemsize, dtype=numpy.uint8))
    return flat.view(geometry.dtype).view(shape)


def _logical(tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
    if "x" not in axes:
        tensor, axes = tensor.unsqueeze(-1), (*axes, "x")
    return tensor.permute([axes.index(axis) for axis in LOGICAL_AXES])


def _gather(logical: Tensor, rows: Tensor, block_size: int) -> Tensor:
    if logical.dtype.is_floating_point and logical.dtype.itemsize == 1:  # torch indexes no fp8: move it as bytes
        return _gather(logical.view(torch.uint8), rows, block_size).view(logical.dtype)
    if logical.is_contiguous():  # slots are consecutive rows: one index_select instead of a two-axis gather
        return logical.view(logical.shape[0] * block_size, -1).index_select(0, rows)
    return logical[rows // block_size, rows % block_size].flatten(1)
