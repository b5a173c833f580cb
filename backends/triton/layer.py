"""Kernel arguments derived from an AttentionSpec: base-2 scalars, small tensors and compile-time switches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.backends.triton.configs import Architecture
from headway.backends.triton.rule_code import NO_RULE, traced_rule
from headway.core.contract.layout import SCALES, CacheLayout, LayerCache
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.triton_launch import INTERPRETED, Workspace, launches_early

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Layer:
    """Arguments that all kernels of one spec share."""

    block_d: int
    """Number of elements in a key row's first tile. Without a tail, this is head_dim rounded up to a power of two. With a tail,
    it is a smaller power of two."""
    block_dv: int
    """v_head_dim rounded up to a power of two."""
    equal_tiles: bool
    """True if a key and a value each take one tile, and both have the same length."""
    slopes: Tensor
    """float32 [num_heads]: log2(e) * ALiBi slope. A placeholder if the layer has no slopes."""
    sinks: Tensor
    parameters: tuple[Tensor | None, Tensor | None]
    """Parameters of the layer's rule, as its functions read them. (None, None) without a rule."""
    scalars: Mapping[str, float | int]
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, spec: AttentionSpec) -> Layer:
        """Return the arguments for a spec. Allocates small tensors on the spec's device."""
        block_d, tail = _row(spec)
        block_dv = max(triton.next_power_of_2(spec.v_head_dim), 16)
        scale = spec.scale * spec.k_scale
        cap = spec.softcap
        rule = NO_RULE if spec.rule is None else traced_rule(spec.rule).code()

        def vector(values: tuple[float, ...] | None) -> Tensor:
            return torch.tensor([x * _LOG2E for x in values or (0.0,)], dtype=torch.float32, device=spec.device)

        return cls(
            block_d=block_d,
            block_dv=block_dv,
            equal_tiles=spec.head_dim == spec.v_head_dim and not spec.value_in_key and not tail,
            slopes=vector(spec.alibi_slopes),
            sinks=vector(spec.sinks),
            parameters=(None, None) if spec.rule is None else traced_rule(spec.rule).pack(spec.rule, spec.device),
            scalars={
                "score_scale": scale * _LOG2E if cap is None else scale / cap,
                "cap_log2": 0.0 if cap is None else cap * _LOG2E,
                "v_scale": spec.v_scale,
                "window": spec.sliding_window or 0,
            },
            constants={
                "NUM_KV_HEADS": spec.num_kv_heads,
                "GROUP": spec.group_size,
                "HEAD_DIM": spec.head_dim,
                "BLOCK_D": block_d,
                "TAIL": tail,
                "V_HEAD_DIM": spec.v_head_dim,
                "BLOCK_DV": block_dv,
                "VALUE_IN_KEY": spec.value_in_key and block_dv == block_d == spec.v_head_dim,
                "HAS_WINDOW": spec.sliding_window is not None,
                "HAS_SOFTCAP": cap is not None,
                "HAS_ALIBI": spec.alibi_slopes is not None,
                "HAS_SINKS": spec.sinks is not None,
                "RULE": rule,
                "DOT": tl.float32 if INTERPRETED else _TYPES[spec.dtype],
                "PRECISION": "ieee" if spec.dtype == torch.float32 else "tf32",
            },
        )

    def merging(self, block_m: int, rows: int, merged: int, lse: bool) -> dict[str, Any]:
        """Return compile-time constants of the merge kernels. merged: number of partial results per row that are loaded at
        once."""
        shared = ("NUM_KV_HEADS", "GROUP", "V_HEAD_DIM", "BLOCK_DV", "HAS_SINKS")
        constants = {name: self.constants[name] for name in shared}
        early = launches_early(self.sinks.device)
        return {**constants, "BLOCK_M": block_m, "ROWS": rows, "MERGED": merged, "HAS_LSE": lse, "PDL": early}

    @property
    def value_first(self) -> bool:
        """True if the value is exactly the first tile of the key."""
        return bool(self.constants["VALUE_IN_KEY"])


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSetup:
    """Objects that the kernels for one kind of layer share: arguments, cache layout, GPU properties and workspace."""

    spec: AttentionSpec
    layer: Layer
    layout: CacheLayout
    block_size: int
    arch: Architecture
    multiprocessors: int
    workspace: Workspace


def _row(spec: AttentionSpec) -> tuple[int, int]:
    """Return the sizes of the tiles in which a key row is read: (elements of the first tile, elements of the tail or 0).

    A value inside the key is a separate tile if its length permits this. Otherwise, long rows whose length is not a power of two
    (DeepSeek's 192) take two tiles, because much of a single tile would be empty.
    """
    head_dim, value = spec.head_dim, spec.v_head_dim
    if spec.value_in_key and value < head_dim and value == max(triton.next_power_of_2(value), 16):
        return value, max(triton.next_power_of_2(head_dim - value), 16)
    whole = max(triton.next_power_of_2(head_dim), 16)
    rest = head_dim - whole // 2
    if head_dim <= 128 or whole == head_dim or triton.next_power_of_2(rest) == whole // 2:
        return whole, 0
    return whole // 2, max(triton.next_power_of_2(rest), 16)


@dataclass(frozen=True, slots=True)
class Addressing:
    """Strides of a cache's logical view [block, slot, head, dim / x, x], and properties that determine which loads are
    fastest."""

    strides: tuple[int, ...]
    """Five strides of the key, followed by five of the value."""
    k_x: int
    """Size of the inner axis if head_dim is split into two axes, else 1."""
    v_x: int
    v_slots_inner: bool
    """True if adjacent slots of the value are contiguous."""
    k_pieces: bool
    """True if k_x-element chunks of the key are interleaved over a block's slots, as in vllm_5d."""
    pairs: bool
    """True if rows are contiguous and begin at even element offsets, so that 8-bit elements can be loaded in pairs."""
    scale_strides: tuple[int, ...] = ()
    """Three strides [block, slot, head] of the key's scales, then three of the value's. Empty if the cache stores no scales."""

    @classmethod
    def of(cls, cache: LayerCache) -> Addressing:
        """Return the addressing of a cache."""
        key, value = cache.logical_key, cache.logical_value
        k_x, v_x = key.shape[4], value.shape[4]
        strides = (*key.stride(), *value.stride())
        k_pieces = k_x > 1 and key.stride(4) == 1 and key.stride(1) == k_x
        rows = k_x == v_x == 1 and strides[3] == strides[8] == 1
        pairs = rows and not any(stride % 2 for stride in (*strides[:3], *strides[5:8]))
        pairs = pairs and key.data_ptr() % 2 == value.data_ptr() % 2 == 0
        scales = [each.stride() for name in SCALES if (each := cache.logical_scale(name)) is not None]
        return cls(strides, k_x, v_x, value.stride(1) == 1, k_pieces, pairs, tuple(chain(*scales)))

    @property
    def whole_rows(self) -> bool:
        """True if rows of the key and of the value are contiguous."""
        return self.k_x == self.v_x == self.strides[3] == self.strides[8] == 1

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants with which kernels address scales."""
        return {"SCALED": bool(self.scale_strides), "SCALE_STRIDES": self.scale_strides}


def scales_of(cache: LayerCache) -> tuple[Tensor, ...]:
    """Return the scale tensors of a cache's keys and values, or () if the cache stores no scales."""
    return tuple(cache.tensors[name] for name in SCALES.values()) if cache.layout.has_scales else ()


NO_SCALES = (None, None)
"""Placeholders for the two scale pointers. Triton omits None from the compiled signature."""
