"""Cache layouts as values: named tensors with named axes, one logical view of each, and `gather`, which reads rows back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy
import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support

LOGICAL_AXES = ("block", "slot", "head", "dim", "x")
"""Every cache tensor has these axes in some order; "x" is the inner part of a split head_dim and may be absent."""
TENSORS = ("key", "value")
"""Names that a layout's tensors may have; every layout has a key, and `latent` has nothing else."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The sizes of one layer's cache, whatever its layout."""

    num_blocks: int
    block_size: int
    """Slots (tokens) in a block."""
    num_kv_heads: int
    head_dim: int
    """Elements of one head of the key."""
    dtype: torch.dtype
    device: torch.device
    v_head_dim: int = 0
    """Elements of one head of the value; 0, the default, becomes `head_dim`."""

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)

    @classmethod
    def of(cls, spec: AttentionSpec, num_blocks: int, block_size: int) -> CacheGeometry:
        """The cache of a layer, in the element type that its spec asks for."""
        heads = spec.num_kv_heads, spec.head_dim
        return cls(num_blocks, block_size, *heads, spec.cache_dtype, spec.device, spec.v_head_dim)


@dataclass(frozen=True)
class CacheLayout:
    """Where the element (block, slot, head, dim) of a layer's key and value lies.

    Two layouts with equal axes are the same layout, whatever they are called.
    """

    name: str = field(compare=False)
    tensors: Mapping[str, tuple[str, ...]]
    """Name of each tensor ("key", "value") -> the order of LOGICAL_AXES in memory, outermost first. A layout without a "value" is
    for layers whose value lies in the key (`AttentionSpec.value_in_key`)."""
    pack_bytes: int = 0
    """Bytes of the inner axis "x" where a tensor has one: x = pack_bytes // element size (vLLM's key cache: 16)."""

    def __post_init__(self) -> None:
        frozen = {name: tuple(axes) for name, axes in self.tensors.items()}
        object.__setattr__(self, "tensors", frozen)
        if "key" not in frozen or not set(frozen) <= set(TENSORS):
            raise ConfigError(f"layout {self.name!r}, tensors", "a key and perhaps a value", ", ".join(frozen) or "none")
        for name, axes in frozen.items():
            if len(set(axes)) != len(axes) or set(axes) | {"x"} != set(LOGICAL_AXES):
                need = f"each of {', '.join(LOGICAL_AXES[:-1])} once, and perhaps x"
                raise ConfigError(f"layout {self.name!r}, axes of {name}", need, ", ".join(axes) or "none")
            if "x" in axes and self.pack_bytes <= 0:
                raise ConfigError(f"layout {self.name!r}, pack_bytes", "the bytes of the axis x", self.pack_bytes)

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.tensors.items())), self.pack_bytes))

    @property
    def has_value(self) -> bool:
        """Whether the value has a tensor of its own."""
        return "value" in self.tensors

    @property
    def contiguous_blocks(self) -> bool:
        """Whether `allocate` makes each block one piece of memory in each tensor, as copies and offload need them to be."""
        return all(axes[0] == "block" for axes in self.tensors.values())

    def x(self, dtype: torch.dtype) -> int:
        """Elements of the inner axis for this element type; 1 where the layout does not split head_dim."""
        return self.pack_bytes // dtype.itemsize if self.pack_bytes else 1

    def check(self, spec: AttentionSpec, block_size: int) -> Support:
        """Check whether a layer's keys and values can be laid out so, and if not, why."""
        if spec.value_in_key and self.has_value:
            return Support.no("kv_layout", "a layout that keeps the value inside the key", self.name, "--kv-layout latent")
        if not spec.value_in_key and not self.has_value:
            return Support.no("kv_layout", "a layout with a value of its own", self.name, "--kv-layout nhd")
        support = YES
        for name, axes in self.tensors.items():
            what, size = ("head_dim", spec.head_dim) if name == "key" else ("v_head_dim", spec.v_head_dim)
            x = self.x(spec.cache_dtype) if "x" in axes else 1
            if x < 1 or size % x:
                support &= Support.no(what, f"a multiple of {x} for layout {self.name}", size)
        return support

    def shape(self, name: str, geometry: CacheGeometry) -> tuple[int, ...]:
        """Shape of the tensor "key" or "value"."""
        axes = self.tensors[name]
        x = self.x(geometry.dtype) if "x" in axes else 1
        sizes = {
            "block": geometry.num_blocks,
            "slot": geometry.block_size,
            "head": geometry.num_kv_heads,
            "dim": (geometry.head_dim if name == "key" else geometry.v_head_dim) // x,
            "x": x,
        }
        return tuple(sizes[axis] for axis in axes)

    def bytes_per_block(self, geometry: CacheGeometry) -> int:
        """Bytes that one block of one layer takes, over all tensors."""
        whole = sum(math.prod(self.shape(name, geometry)) for name in self.tensors)
        return whole // geometry.num_blocks * geometry.dtype.itemsize

    def allocate(self, geometry: CacheGeometry, k_scale: float = 1.0, v_scale: float = 1.0) -> LayerCache:
        """Allocate one layer's cache, zeroed: kernels that read whole blocks must meet finite numbers."""
        tensors = {name: zeros(self.shape(name, geometry), geometry.dtype, geometry.device) for name in self.tensors}
        return LayerCache(tensors, self, geometry, k_scale, v_scale)


@dataclass(frozen=True)
class LayerCache:
    """One layer's paged cache. The layout travels with the tensors, so that nobody has to guess it from a shape.

    The tensors may be views of memory that somebody else allocated (another engine's packed keys and values): their strides are
    the truth, and a kernel that cannot follow them is refused (`Capabilities.contiguous_blocks`).

    :raises ConfigError: a tensor is missing, or its shape or element type is not what layout and geometry say.
    """

    tensors: Mapping[str, Tensor]
    """Tensors of the cache, by the names of `layout.tensors`."""
    layout: CacheLayout
    geometry: CacheGeometry
    k_scale: float = 1.0
    """Key = stored key * k_scale (an fp8 cache; 1 otherwise): the writer divides before it stores."""
    v_scale: float = 1.0
    open_blocks: int = 0
    """Blocks behind the last whole one that begin in this memory and end behind it. A table names one only where its sequence
    ends inside the memory, and only to a backend that never reads further (`Capabilities.reads_live_slots`)."""

    def __post_init__(self) -> None:
        what = f"cache in layout {self.layout.name}"
        if set(self.tensors) != set(self.layout.tensors):
            raise ConfigError(what, f"the tensors {', '.join(self.layout.tensors)}", ", ".join(self.tensors) or "none")
        for name, tensor in self.tensors.items():
            shape = self.layout.shape(name, self.geometry)
            if tuple(tensor.shape) != shape:
                raise ConfigError(f"{what}, {name}", f"shape {list(shape)}", list(tensor.shape))
            if tensor.dtype != self.geometry.dtype:
                raise ConfigError(f"{what}, {name}", f"element type {self.geometry.dtype}", tensor.dtype)

    @classmethod
    def wrap(
        cls, tensors: Mapping[str, Tensor], layout: CacheLayout, spec: AttentionSpec, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> LayerCache:
        """A cache over memory that is there already: sizes come from the key's shape, what a head is from the spec."""
        sizes = dict(zip(layout.tensors["key"], tensors["key"].shape, strict=True))
        geometry = CacheGeometry.of(spec, sizes["block"], sizes["slot"])
        return cls(tensors, layout, geometry, k_scale, v_scale)

    def over(self, tensors: Mapping[str, Tensor]) -> LayerCache:
        """The same cache of another layer, whose tensors the caller knows to have these shapes and element types: nothing is
        checked again, which costs more than a launch."""
        other = object.__new__(LayerCache)
        own = self.__dict__
        other.__dict__.update({name: own[name] for name in _SIZES}, tensors=tensors)
        return other

    @property
    def key(self) -> Tensor:
        """The tensor of the keys, with the layout's axes."""
        return self.tensors["key"]

    @cached_property
    def value(self) -> Tensor:
        """The tensor of the values, with the layout's axes; a value in the key is a view of its first `v_head_dim` elements."""
        if "value" in self.tensors:
            return self.tensors["value"]
        axes = self.layout.tensors["key"]
        x = self.layout.x(self.geometry.dtype) if "x" in axes else 1
        return self.key.narrow(axes.index("dim"), 0, self.geometry.v_head_dim // x)

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.geometry.block_size

    @cached_property
    def contiguous_blocks(self) -> bool:
        """Whether each block is one piece of memory in each tensor, its elements in the order of the layout's axes."""
        return all(
            tensor.select(self.layout.tensors[name].index("block"), 0).is_contiguous() for name, tensor in self.tensors.items()
        )

    @cached_property
    def logical_key(self) -> Tensor:
        """View [num_blocks, block_size, num_kv_heads, head_dim / x, x]: its strides address every layout alike."""
        return _logical(self.key, self.layout.tensors["key"])

    @cached_property
    def logical_value(self) -> Tensor:
        """View [num_blocks, block_size, num_kv_heads, v_head_dim / x, x] of the value."""
        return _logical(self.value, self.layout.tensors["value" if self.layout.has_value else "key"])

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read logical rows back, in the order of `slots`: the oracle every writer and kernel is tested against.

        slots: int64 [...], each block * block_size + offset, none negative. Returns k [..., num_kv_heads, head_dim] and
        v [..., num_kv_heads, v_head_dim], copies as they are stored: those of an fp8 cache are still to be multiplied by
        `k_scale` and `v_scale`.
        """
        rows, heads = slots.reshape(-1), self.geometry.num_kv_heads
        k = _gather(self.logical_key, rows, self.block_size).view(*slots.shape, heads, self.geometry.head_dim)
        if not self.layout.has_value:
            return k, k[..., : self.geometry.v_head_dim]
        return k, _gather(self.logical_value, rows, self.block_size).view(*slots.shape, heads, self.geometry.v_head_dim)


_SIZES = tuple(each.name for each in fields(LayerCache) if each.name != "tensors")
_ROWS = ("block", "slot", "head", "dim")
NHD = CacheLayout("nhd", {"key": _ROWS, "value": _ROWS})
"""FlashAttention's paged layout: the slots of a block are consecutive rows."""
_HEADS = ("block", "head", "slot", "dim")
HND = CacheLayout("hnd", {"key": _HEADS, "value": _HEADS})
"""FlashInfer's and TensorRT-LLM's: the rows of one head lie together."""
VLLM_5D = CacheLayout("vllm_5d", {"key": ("block", "head", "dim", "slot", "x"), "value": ("block", "head", "dim", "slot")}, 16)
"""The layout of vLLM's PagedAttention kernels: 16-byte pieces of the key interleaved over slots, the value transposed."""
LATENT = CacheLayout("latent", {"key": _ROWS})
"""One row a token, the value inside the key: the cache of latent attention (DeepSeek-V2), as FlashMLA and vLLM lay it out."""

CacheWriter = Callable[[Tensor, Tensor, LayerCache, Tensor], None]
"""(k, v, cache, slot_mapping): writes k [num_tokens, num_kv_heads, head_dim] and v [num_tokens, num_kv_heads, v_head_dim] to
slot_mapping [num_tokens]; -1 is skipped. In a layout without a value v is not written, since it lies in k."""


@dataclass(frozen=True, slots=True)
class LayoutInfo:
    """How a plugin registers a layout: the value, and the one writer that fills it on a device."""

    layout: CacheLayout
    load_writer: Callable[[torch.device], CacheWriter]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory of a cache."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc, not memset: the system hands out zero pages when they are first written, so a big pool costs no start-up time.
    flat = torch.from_numpy(numpy.zeros(math.prod(shape) * dtype.itemsize, dtype=numpy.uint8))
    return flat.view(dtype).view(shape)


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
