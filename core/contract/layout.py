"""Cache layouts as values: named tensors with named axes, one logical view of each, and `gather`, which reads rows back.

A layout has a key, perhaps a value, and for each of them perhaps a scale for every token and head, kept in a tensor beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy
import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError, made_by
from headway.core.contract.spec import KV_DTYPE_NAMES, AttentionSpec
from headway.core.contract.support import YES, Support

LOGICAL_AXES = ("block", "slot", "head", "dim", "x")
"""Key and value have these axes in some order; "x" is the inner part of a split head_dim and may be absent."""
SCALE_AXES = ("block", "slot", "head")
"""Axes of a scale, in some order; "head" may be absent, where all heads of a token share one."""
SCALES = {"key": "key_scale", "value": "value_scale"}
"""Tensor -> the tensor of its scales: a stored number times the scale of its token and head is what was written."""
TENSORS = ("key", "value", *SCALES.values())
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
        heads, dim = spec.num_kv_heads, spec.head_dim
        return cls(num_blocks, block_size, heads, dim, spec.cache_dtype, spec.device, spec.v_head_dim)


@dataclass(frozen=True)
class CacheLayout:
    """Where the element (block, slot, head, dim) of a layer's key and value lies.

    Two layouts with equal axes are the same layout, whatever they are called.
    """

    name: str = field(compare=False)
    tensors: Mapping[str, tuple[str, ...]]
    """Name of each tensor (out of TENSORS) -> the order of LOGICAL_AXES, or of SCALE_AXES, in memory, outermost first. A layout
    without a "value" is for layers whose value lies in the key (`AttentionSpec.value_in_key`)."""
    pack_bytes: int = 0
    """Bytes of the inner axis "x" where a tensor has one: x = pack_bytes // element size (vLLM's key cache: 16)."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Element types of tensors by name. Those of scales must be there. A key or value that is not named has the type of the
    layer's cache; one that is named serves layers with this type of cache alone."""

    def __post_init__(self) -> None:
        frozen = {name: tuple(axes) for name, axes in self.tensors.items()}
        object.__setattr__(self, "tensors", frozen)
        object.__setattr__(self, "dtypes", dict(self.dtypes))
        scaled = {name for name, scale in SCALES.items() if scale in frozen}
        if "key" not in frozen or not set(frozen) <= set(TENSORS) or not scaled <= set(frozen):
            need = "a key and perhaps a value, and perhaps the scales of either"
            raise ConfigError(f"layout {self.name!r}, tensors", need, ", ".join(frozen) or "none")
        for name, axes in frozen.items():
            self._check_axes(name, axes)
        named = {*self.dtypes, *(SCALES[name] for name in scaled)}
        if not named <= set(self.dtypes) & set(frozen) or not all(self.dtypes[SCALES[each]].is_floating_point for each in scaled):
            need = "an element type of each scale, a floating-point one, and of no tensor that is not there"
            raise ConfigError(f"layout {self.name!r}, dtypes", need, ", ".join(self.dtypes) or "none")

    def _check_axes(self, name: str, axes: tuple[str, ...]) -> None:
        known, optional = (LOGICAL_AXES, "x") if name in SCALES else (SCALE_AXES, "head")
        if len(set(axes)) != len(axes) or set(axes) | {optional} != set(known):
            needed = ", ".join(axis for axis in known if axis != optional)
            need = f"each of {needed} once, and perhaps {optional}"
            raise ConfigError(f"layout {self.name!r}, axes of {name}", need, ", ".join(axes) or "none")
        if "x" in axes and self.pack_bytes <= 0:
            raise ConfigError(f"layout {self.name!r}, pack_bytes", "the bytes of the axis x", self.pack_bytes)

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.tensors.items())), self.pack_bytes, tuple(sorted(self.dtypes.items(), key=str))))

    @property
    def has_value(self) -> bool:
        """Whether the value has a tensor of its own."""
        return "value" in self.tensors

    @property
    def has_scales(self) -> bool:
        """Whether the layout keeps scales of its own, which `LayerCache.gather` applies."""
        return any(scale in self.tensors for scale in SCALES.values())

    @property
    def contiguous_blocks(self) -> bool:
        """Whether `allocate` makes each block one piece of memory in each tensor, as copies and offload need them to be."""
        return all(axes[0] == "block" for axes in self.tensors.values())

    def x(self, dtype: torch.dtype) -> int:
        """Elements of the inner axis for this element type; 1 where the layout does not split head_dim."""
        return self.pack_bytes // dtype.itemsize if self.pack_bytes else 1

    def dtype_of(self, name: str, cache_dtype: torch.dtype) -> torch.dtype:
        """Element type of a tensor, in a cache whose keys and values are of `cache_dtype` where the layout names no other."""
        return self.dtypes.get(name, cache_dtype)

    def check(self, spec: AttentionSpec, block_size: int) -> Support:
        """Check whether a layer's keys and values can be laid out so, and if not, why."""
        if spec.value_in_key and not spec.cache_dtype.is_floating_point:
            need, got = "auto or fp8_e4m3, as values lie in keys", KV_DTYPE_NAMES.get(spec.cache_dtype)
            return Support.no("kv_cache_dtype", need, got or spec.cache_dtype, "--kv-cache-dtype auto")
        if spec.value_in_key and self.has_value:
            return Support.no("kv_layout", "a layout that keeps the value inside the key", self.name, "--kv-layout latent")
        if not spec.value_in_key and not self.has_value:
            return Support.no("kv_layout", "a layout with a value of its own", self.name, "--kv-layout nhd")
        support = self._check_types(spec)
        for name, axes in self.tensors.items() if support else ():
            what, size = ("head_dim", spec.head_dim) if name == "key" else ("v_head_dim", spec.v_head_dim)
            x = self.x(self.dtype_of(name, spec.cache_dtype)) if "x" in axes else 1
            if x < 1 or size % x:
                support &= Support.no(what, f"a multiple of {x} for layout {self.name}", size)
        return support

    def _check_types(self, spec: AttentionSpec) -> Support:
        """Check whether the layout keeps the type of cache that a layer asks for: whole numbers mean nothing without scales."""
        wanted = spec.cache_dtype
        name = KV_DTYPE_NAMES.get(wanted, str(wanted))
        own = [self.dtypes[each] for each in SCALES if each in self.dtypes]
        if not all(each == wanted for each in own):
            got = f"{self.name}, which holds {' and '.join(KV_DTYPE_NAMES.get(each, str(each)) for each in dict.fromkeys(own))}"
            return Support.no("kv_layout", f"a layout that holds a cache of {name}", got, f"--kv-layout {_plain(spec)}")
        if wanted.is_floating_point or self.has_scales:
            return YES
        need = f"a layout that holds a cache of {name}, with a scale for each token and head"
        return Support.no("kv_layout", need, self.name, "--kv-layout nhd_int8")

    def shape(self, name: str, geometry: CacheGeometry) -> tuple[int, ...]:
        """Shape of one of the layout's tensors."""
        axes = self.tensors[name]
        x = self.x(self.dtype_of(name, geometry.dtype)) if "x" in axes else 1
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
        return sum(self.tensor_bytes(geometry).values()) // geometry.num_blocks

    def tensor_bytes(self, geometry: CacheGeometry) -> Mapping[str, int]:
        """Bytes of each tensor of one layer's cache."""
        return {
            name: math.prod(self.shape(name, geometry)) * self.dtype_of(name, geometry.dtype).itemsize for name in self.tensors
        }

    def allocate(self, geometry: CacheGeometry, k_scale: float = 1.0, v_scale: float = 1.0) -> LayerCache:
        """Allocate one layer's cache, zeroed: kernels that read whole blocks must meet finite numbers."""
        tensors = {
            name: zeros(self.shape(name, geometry), self.dtype_of(name, geometry.dtype), geometry.device) for name in self.tensors
        }
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
            dtype = self.layout.dtype_of(name, self.geometry.dtype)
            if tensor.dtype != dtype:
                raise ConfigError(f"{what}, {name}", f"element type {dtype}", tensor.dtype)

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
        x = self.layout.x(self.key.dtype) if "x" in axes else 1
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

    def logical_scale(self, name: str) -> Tensor | None:
        """View [num_blocks, block_size, num_kv_heads] of the scales of "key" or "value"; None: the layout keeps none."""
        scales = self.tensors.get(SCALES[name])
        if scales is None:
            return None
        axes = self.layout.tensors[SCALES[name]]
        if "head" not in axes:
            scales, axes = scales.unsqueeze(-1), (*axes, "head")
        scales = scales.permute([axes.index(axis) for axis in SCALE_AXES])
        return scales.expand(-1, -1, self.geometry.num_kv_heads)

    def by_slot(self, name: str) -> Tensor:
        """View [num_blocks, block_size, ...] of any of the tensors: what it keeps of each token."""
        axes = self.layout.tensors[name]
        return self.tensors[name].movedim((axes.index("block"), axes.index("slot")), (0, 1))

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read logical rows back, in the order of `slots`: the oracle every writer and kernel is tested against.

        slots: int64 [...], each block * block_size + offset, none negative. Returns k [..., num_kv_heads, head_dim] and
        v [..., num_kv_heads, v_head_dim], copies. Times `k_scale` and `v_scale` (1 but in an fp8 cache) they are keys and values:
        as they are stored, and where the layout keeps scales of its own float32, those applied.
        """
        rows, heads = slots.reshape(-1), self.geometry.num_kv_heads
        k = self._gathered("key", self.logical_key, rows).view((*slots.shape, heads, self.geometry.head_dim))
        if not self.layout.has_value:
            return k, k[..., : self.geometry.v_head_dim]
        v = self._gathered("value", self.logical_value, rows)
        return k, v.view((*slots.shape, heads, self.geometry.v_head_dim))

    def _gathered(self, name: str, logical: Tensor, rows: Tensor) -> Tensor:
        """Rows [len(rows), num_kv_heads * elements of a head] of the key or the value."""
        stored, scales = _gather(logical, rows, self.block_size), self.logical_scale(name)
        if scales is None:
            return stored
        each = scales[rows // self.block_size, rows % self.block_size].float()
        return (stored.float().view((*each.shape, -1)) * each[..., None]).flatten(1)


_SIZES = tuple(each.name for each in fields(LayerCache) if each.name != "tensors")
_ROWS = ("block", "slot", "head", "dim")
NHD = CacheLayout("nhd", {"key": _ROWS, "value": _ROWS})
"""FlashAttention's paged layout: the slots of a block are consecutive rows."""
_HEADS = ("block", "head", "slot", "dim")
HND = CacheLayout("hnd", {"key": _HEADS, "value": _HEADS})
"""FlashInfer's and TensorRT-LLM's: the rows of one head lie together."""
VLLM_5D = CacheLayout("vllm_5d", {"key": ("block", "head", "dim", "slot", "x"), "value": ("block", "head", "dim", "slot")}, 16)
"""The layout of vLLM's PagedAttention kernels: 16-byte pieces of the key interleaved over slots, the value transposed."""
_TOKENS = ("block", "head", "slot")
NHD_INT8 = CacheLayout(
    "nhd_int8",
    {"key": _ROWS, "value": _ROWS, "key_scale": _TOKENS, "value_scale": _TOKENS},
    dtypes={"key": torch.int8, "value": torch.int8, "key_scale": torch.float32, "value_scale": torch.float32},
)
"""NHD in 8 bits: a row is whole numbers from -127 to 127 times a scale of its own, the row's largest magnitude over 127. The
scales of a head's neighbouring tokens lie side by side, as a kernel's tile of keys reads them."""
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

    def writer(self, device: torch.device) -> CacheWriter:
        """Return the writer for a device.

        :raises PluginError: `load_writer` raises, or returns no function.
        """
        return made_by(f"the writer of layout {self.layout.name}", lambda: self.load_writer(device), "__call__")


def _plain(spec: AttentionSpec) -> str:
    """Name of the built-in layout that holds every layer of a kind, in the layer's own type."""
    return LATENT.name if spec.value_in_key else NHD.name


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


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim or v_head_dim] to slot_mapping [num_tokens]; -1 is skipped.

    Works on any layout through its logical view. On a GPU the test for -1 synchronises, so it cannot be captured in a graph.
    """
    valid = slot_mapping >= 0
    if not valid.all():
        k, v, slot_mapping = k[valid], v[valid], slot_mapping[valid]
    put(k, cache, "key", slot_mapping)
    if cache.layout.has_value:
        put(v, cache, "value", slot_mapping)


def put(rows: Tensor, cache: LayerCache, name: str, slots: Tensor) -> None:
    """Write rows [n, num_kv_heads, head_dim or v_head_dim] to a cache's "key" or "value". slots: int64 [n], none negative."""
    logical = cache.logical_key if name == "key" else cache.logical_value
    if SCALES[name] not in cache.tensors:
        _write(stored(rows, logical.dtype, cache.k_scale if name == "key" else cache.v_scale), logical, slots, cache.block_size)
        return
    kept = cache.by_slot(SCALES[name])
    numbers, scales = quantised(rows, logical.dtype, each_head=kept.dim() == 3)
    _write(numbers, logical, slots, cache.block_size)
    kept[slots // cache.block_size, slots % cache.block_size] = scales.to(kept.dtype)


def stored(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Rows as the cache keeps them: divided by the scale and, in fp8, held inside its range (beyond it lies NaN)."""
    if rows.dtype == dtype:
        return rows if scale == 1.0 else rows / scale
    limit = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-limit, limit).to(dtype)


def quantised(rows: Tensor, dtype: torch.dtype, each_head: bool = True) -> tuple[Tensor, Tensor]:
    """Rows [n, heads, dim] as numbers of 8 bits times a scale of their own, the row's largest magnitude over the type's largest.

    Whole numbers are rounded to the nearest, ties to even. A row of zeros has the scale 0, and so has one so small that its scale
    would be no normal number, which some hardware takes for 0. A row with a number that is not finite
    has zeros and the scale infinity, whose product is NaN, so that nobody takes it for a row. each_head: a scale for each head,
    and not one for all heads of a token. Returns numbers [n, heads, dim] and float32 scales, [n, heads] or [n].
    """
    integer = not dtype.is_floating_point
    limit = float(torch.iinfo(dtype).max if integer else torch.finfo(dtype).max)
    exact = rows.float()
    largest = exact.abs().amax(-1 if each_head else (-2, -1))
    # Divided by a tensor: by a number torch multiplies with its reciprocal on a GPU, whose last bit may be another.
    scales = torch.where(largest.isfinite(), largest / torch.full_like(largest, limit), torch.inf)
    scales = scales.where(scales >= torch.finfo(torch.float32).tiny, 0.0)
    divisors = scales.unsqueeze(-1) if each_head else scales[:, None, None]
    numbers = (exact / divisors).clamp(-limit, limit).where((divisors > 0) & divisors.isfinite(), 0.0)
    return (numbers.round() if integer else numbers).to(dtype), scales


def _write(rows: Tensor, logical: Tensor, slots: Tensor, block_size: int) -> None:
    if logical.dtype.itemsize == 1:  # torch indexes no fp8: move it as bytes
        rows, logical = rows.view(torch.uint8), logical.view(torch.uint8)
    if logical.is_contiguous():  # slots are consecutive rows
        logical.view(logical.shape[0] * block_size, -1).index_copy_(0, slots, rows.flatten(1))
    else:
        logical[slots // block_size, slots % block_size] = rows.reshape((len(slots), *logical.shape[2:]))
