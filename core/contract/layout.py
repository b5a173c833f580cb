"""Cache layouts: the axis order and element type of a layer's cache tensors, logical views of them, and `gather` to read rows.

A layout has a key tensor and usually a value tensor. Each may have a scale per token and head, stored in a separate tensor.
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
"""Axes of key and value tensors, in any order. "x" is the inner part of a split head_dim and may be absent."""
SCALE_AXES = ("block", "slot", "head")
"""Axes of scale tensors, in any order. "head" is absent if all heads of a token share one scale."""
SCALES = {"key": "key_scale", "value": "value_scale"}
"""Name of the scale tensor for each tensor. Original element = stored element * scale of its token and head."""
TENSORS = ("key", "value", *SCALES.values())
"""Names that a layout's tensors may have. Every layout has a key; the layout `latent` has only a key."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes of one layer's cache, independent of its layout."""

    num_blocks: int
    block_size: int
    """Number of slots (tokens) per block."""
    num_kv_heads: int
    head_dim: int
    """Number of elements per head of the key."""
    dtype: torch.dtype
    device: torch.device
    v_head_dim: int = 0
    """Number of elements per head of the value. 0 means `head_dim`."""

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)

    @classmethod
    def of(cls, spec: AttentionSpec, num_blocks: int, block_size: int) -> CacheGeometry:
        """Return the geometry of a layer's cache, with the element type that the spec requests."""
        heads, dim = spec.num_kv_heads, spec.head_dim
        return cls(num_blocks, block_size, heads, dim, spec.cache_dtype, spec.device, spec.v_head_dim)


@dataclass(frozen=True)
class CacheLayout:
    """Memory order of a layer's key and value over the axes block, slot, head and dim.

    Layouts with equal axes are equal, whatever their names.
    """

    name: str = field(compare=False)
    tensors: Mapping[str, tuple[str, ...]]
    """Order of the axes in memory, outermost first, for each tensor: LOGICAL_AXES for key and value, SCALE_AXES for scales. Names
    are from TENSORS. Layouts without a "value" are for layers whose value is part of the key (`AttentionSpec.value_in_key`)."""
    pack_bytes: int = 0
    """Size in bytes of the inner axis "x", if a tensor has one: x = pack_bytes // element size (16 in vLLM's key cache)."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Element types by tensor name. Scales must be listed. A key or value that is not listed has the type of the layer's cache;
    if it is listed, the layout supports only layers with that cache type."""

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
        """True if the value has a separate tensor."""
        return "value" in self.tensors

    @property
    def has_scales(self) -> bool:
        """True if the layout stores scales per token. `LayerCache.gather` applies them."""
        return any(scale in self.tensors for scale in SCALES.values())

    @property
    def contiguous_blocks(self) -> bool:
        """True if `allocate` makes each block contiguous in each tensor, as block copies and offloading need."""
        return all(axes[0] == "block" for axes in self.tensors.values())

    def x(self, dtype: torch.dtype) -> int:
        """Return the size of the inner axis "x" for an element type, or 1 if the layout does not split head_dim."""
        return self.pack_bytes // dtype.itemsize if self.pack_bytes else 1

    def dtype_of(self, name: str, cache_dtype: torch.dtype) -> torch.dtype:
        """Return the element type of a tensor. `cache_dtype` applies to tensors for which the layout names no type."""
        return self.dtypes.get(name, cache_dtype)

    def check(self, spec: AttentionSpec, block_size: int) -> Support:
        """Return whether the layout can hold a layer's keys and values."""
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
        """Return whether the layout can hold the layer's cache type. Integer types need scales."""
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
        """Return the shape of a tensor."""
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
        """Return the size in bytes of one block of one layer, over all tensors."""
        return sum(self.tensor_bytes(geometry).values()) // geometry.num_blocks

    def tensor_bytes(self, geometry: CacheGeometry) -> Mapping[str, int]:
        """Return the size in bytes of each tensor of one layer's cache."""
        return {
            name: math.prod(self.shape(name, geometry)) * self.dtype_of(name, geometry.dtype).itemsize for name in self.tensors
        }

    def allocate(self, geometry: CacheGeometry, k_scale: float = 1.0, v_scale: float = 1.0) -> LayerCache:
        """Allocate one layer's cache. It is zeroed, because kernels that read whole blocks need finite elements."""
        tensors = {
            name: zeros(self.shape(name, geometry), self.dtype_of(name, geometry.dtype), geometry.device) for name in self.tensors
        }
        return LayerCache(tensors, self, geometry, k_scale, v_scale)


@dataclass(frozen=True)
class LayerCache:
    """One layer's paged KV cache: tensors together with their layout and geometry.

    The tensors may be views of memory that was allocated elsewhere, for example another engine's packed KV cache. Kernels must
    use the tensors' strides; a backend that cannot is refused (`Capabilities.contiguous_blocks`).

    :raises ConfigError: if a tensor is missing, or its shape or element type does not match layout and geometry.
    """

    tensors: Mapping[str, Tensor]
    """Tensors of the cache, by the names in `layout.tensors`."""
    layout: CacheLayout
    geometry: CacheGeometry
    k_scale: float = 1.0
    """Key = stored key * k_scale. Writers divide by it before they store. Other than 1 only in FP8 caches."""
    v_scale: float = 1.0
    open_blocks: int = 0
    """Number of blocks after the last complete block that begin inside the cache's memory and end outside it. A block table may
    list such a block only if its sequence ends inside the memory, and only for backends that set
    `Capabilities.reads_live_slots`."""

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
        """Return a cache over existing tensors. Block count and block size come from the key's shape, head sizes from the
        spec."""
        sizes = dict(zip(layout.tensors["key"], tensors["key"].shape, strict=True))
        geometry = CacheGeometry.of(spec, sizes["block"], sizes["slot"])
        return cls(tensors, layout, geometry, k_scale, v_scale)

    def over(self, tensors: Mapping[str, Tensor]) -> LayerCache:
        """Return a cache with these tensors, and this cache's layout, geometry and scales.

        The caller guarantees that shapes and element types match. They are not checked, because a check takes longer than a
        kernel launch.
        """
        other = object.__new__(LayerCache)
        own = self.__dict__
        other.__dict__.update({name: own[name] for name in _SIZES}, tensors=tensors)
        return other

    @property
    def key(self) -> Tensor:
        """Key tensor, with the layout's axes."""
        return self.tensors["key"]

    @cached_property
    def value(self) -> Tensor:
        """Value tensor, with the layout's axes. If the value is part of the key: a view of the key's first `v_head_dim`
        elements."""
        if "value" in self.tensors:
            return self.tensors["value"]
        axes = self.layout.tensors["key"]
        x = self.layout.x(self.key.dtype) if "x" in axes else 1
        return self.key.narrow(axes.index("dim"), 0, self.geometry.v_head_dim // x)

    @property
    def block_size(self) -> int:
        """Number of slots per block."""
        return self.geometry.block_size

    @cached_property
    def contiguous_blocks(self) -> bool:
        """True if each block is contiguous in each tensor, in the order of the layout's axes."""
        return all(
            tensor.select(self.layout.tensors[name].index("block"), 0).is_contiguous() for name, tensor in self.tensors.items()
        )

    @cached_property
    def logical_key(self) -> Tensor:
        """View [num_blocks, block_size, num_kv_heads, head_dim / x, x] of the key. Layouts differ only in the view's strides and
        in x."""
        return _logical(self.key, self.layout.tensors["key"])

    @cached_property
    def logical_value(self) -> Tensor:
        """View [num_blocks, block_size, num_kv_heads, v_head_dim / x, x] of the value. Layouts differ only in the view's strides
        and in x."""
        return _logical(self.value, self.layout.tensors["value" if self.layout.has_value else "key"])

    def logical_scale(self, name: str) -> Tensor | None:
        """Return a view [num_blocks, block_size, num_kv_heads] of the scales of "key" or "value", or None if there are none."""
        scales = self.tensors.get(SCALES[name])
        if scales is None:
            return None
        axes = self.layout.tensors[SCALES[name]]
        if "head" not in axes:
            scales, axes = scales.unsqueeze(-1), (*axes, "head")
        scales = scales.permute([axes.index(axis) for axis in SCALE_AXES])
        return scales.expand(-1, -1, self.geometry.num_kv_heads)

    def by_slot(self, name: str) -> Tensor:
        """Return a view [num_blocks, block_size, ...] of the named tensor, with its elements grouped by token."""
        axes = self.layout.tensors[name]
        return self.tensors[name].movedim((axes.index("block"), axes.index("slot")), (0, 1))

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the rows at `slots`. This method is the reference that every writer and kernel is tested against.

        slots: int64 [...], each block * block_size + offset, none negative.

        Returns k [..., num_kv_heads, head_dim] and v [..., num_kv_heads, v_head_dim]. If the layout stores scales, they are
        applied and the result is float32. `k_scale` and `v_scale` (1 except in FP8 caches) are not applied: multiply by them to
        get keys and values.
        """
        rows, heads = slots.reshape(-1), self.geometry.num_kv_heads
        k = self._gathered("key", self.logical_key, rows).view((*slots.shape, heads, self.geometry.head_dim))
        if not self.layout.has_value:
            return k, k[..., : self.geometry.v_head_dim]
        v = self._gathered("value", self.logical_value, rows)
        return k, v.view((*slots.shape, heads, self.geometry.v_head_dim))

    def _gathered(self, name: str, logical: Tensor, rows: Tensor) -> Tensor:
        """Return rows [len(rows), num_kv_heads * elements per head] of the key or the value, with scales applied."""
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
"""Layout of FlashInfer and TensorRT-LLM: the rows of one head are consecutive within a block."""
VLLM_5D = CacheLayout("vllm_5d", {"key": ("block", "head", "dim", "slot", "x"), "value": ("block", "head", "dim", "slot")}, 16)
"""Layout of vLLM's PagedAttention kernels: 16-byte chunks of the key interleaved over slots, and the value transposed."""
_TOKENS = ("block", "head", "slot")
NHD_INT8 = CacheLayout(
    "nhd_int8",
    {"key": _ROWS, "value": _ROWS, "key_scale": _TOKENS, "value_scale": _TOKENS},
    dtypes={"key": torch.int8, "value": torch.int8, "key_scale": torch.float32, "value_scale": torch.float32},
)
"""NHD with int8 elements from -127 to 127 and one float32 scale per row: the row's largest magnitude / 127. Scales of one head
are contiguous over tokens, so that a kernel loads them together with its tile of keys."""
LATENT = CacheLayout("latent", {"key": _ROWS})
"""One row per token that holds key and value: the cache of MLA (DeepSeek-V2), as in FlashMLA and vLLM."""

CacheWriter = Callable[[Tensor, Tensor, LayerCache, Tensor], None]
"""Function (k, v, cache, slot_mapping) that writes k [num_tokens, num_kv_heads, head_dim] and v [num_tokens, num_kv_heads,
v_head_dim] to the slots in slot_mapping [num_tokens], and skips -1. If the layout has no value tensor, v is part of k and is not
written."""


@dataclass(frozen=True, slots=True)
class LayoutInfo:
    """A plugin's registration of a layout, with the function that loads its writer for a device."""

    layout: CacheLayout
    load_writer: Callable[[torch.device], CacheWriter]

    def writer(self, device: torch.device) -> CacheWriter:
        """Return the writer for a device.

        :raises PluginError: if `load_writer` raises, or does not return a function.
        """
        return made_by(f"the writer of layout {self.layout.name}", lambda: self.load_writer(device), "__call__")


def _plain(spec: AttentionSpec) -> str:
    """Return the name of the built-in layout that holds a layer's cache in the layer's element type."""
    return LATENT.name if spec.value_in_key else NHD.name


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed tensor for a cache."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc instead of memset: the system zeroes pages on first write, so a large pool does not delay start-up.
    flat = torch.from_numpy(numpy.zeros(math.prod(shape) * dtype.itemsize, dtype=numpy.uint8))
    return flat.view(dtype).view(shape)


def _logical(tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
    if "x" not in axes:
        tensor, axes = tensor.unsqueeze(-1), (*axes, "x")
    return tensor.permute([axes.index(axis) for axis in LOGICAL_AXES])


def _gather(logical: Tensor, rows: Tensor, block_size: int) -> Tensor:
    if logical.dtype.is_floating_point and logical.dtype.itemsize == 1:  # torch cannot index FP8: move it as bytes
        return _gather(logical.view(torch.uint8), rows, block_size).view(logical.dtype)
    if logical.is_contiguous():  # slots are consecutive rows: one index_select instead of a two-axis gather
        return logical.view(logical.shape[0] * block_size, -1).index_select(0, rows)
    return logical[rows // block_size, rows % block_size].flatten(1)


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write k [num_tokens, num_kv_heads, head_dim] and v [..., v_head_dim] to the slots in slot_mapping [num_tokens], skipping
    -1.

    The function supports any layout, because it writes through the logical views. On a GPU, the test for -1 synchronises with the
    host, so the function cannot be captured in a CUDA graph.
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
    """Return rows as the cache stores them: divided by the scale and, for FP8, clamped to the type's range, since larger values
    would become NaN."""
    if rows.dtype == dtype:
        return rows if scale == 1.0 else rows / scale
    limit = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-limit, limit).to(dtype)


def quantised(rows: Tensor, dtype: torch.dtype, each_head: bool = True) -> tuple[Tensor, Tensor]:
    """Return rows [n, heads, dim] quantized to 8 bits, with scale = the row's largest magnitude / the type's largest value.

    Integers are rounded to nearest, ties to even. Rows of zeros have scale 0; so do rows whose scale would be subnormal, because
    some hardware flushes subnormals to 0. A row with a non-finite element is stored as zeros with scale infinity, so that it
    dequantizes to NaN.

    each_head: True for one scale per head; False for one scale per token.

    Returns 8-bit values [n, heads, dim], and float32 scales [n, heads] or [n].
    """
    integer = not dtype.is_floating_point
    limit = float(torch.iinfo(dtype).max if integer else torch.finfo(dtype).max)
    exact = rows.float()
    largest = exact.abs().amax(-1 if each_head else (-2, -1))
    # Divide by a tensor: torch divides by a number on a GPU through its reciprocal, which may differ in the last bit.
    scales = torch.where(largest.isfinite(), largest / torch.full_like(largest, limit), torch.inf)
    scales = scales.where(scales >= torch.finfo(torch.float32).tiny, 0.0)
    divisors = scales.unsqueeze(-1) if each_head else scales[:, None, None]
    numbers = (exact / divisors).clamp(-limit, limit).where((divisors > 0) & divisors.isfinite(), 0.0)
    return (numbers.round() if integer else numbers).to(dtype), scales


def _write(rows: Tensor, logical: Tensor, slots: Tensor, block_size: int) -> None:
    if logical.dtype.itemsize == 1:  # torch cannot index FP8: move it as bytes
        rows, logical = rows.view(torch.uint8), logical.view(torch.uint8)
    if logical.is_contiguous():  # slots are consecutive rows
        logical.view(logical.shape[0] * block_size, -1).index_copy_(0, slots, rows.flatten(1))
    else:
        logical[slots // block_size, slots % block_size] = rows.reshape((len(slots), *logical.shape[2:]))
