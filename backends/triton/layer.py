"""What the kernels take of an AttentionSpec: numbers folded into the base-2 domain, small tensors, compile-time switches."""

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
from headway.core.contract.layout import SCALES, CacheLayout, LayerCache
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.triton_launch import INTERPRETED, Workspace, launches_early

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Layer:
    """Arguments common to the kernels of one spec."""

    block_d: int
    """Elements of a key row that one tile holds: head_dim rounded up to a power of two, or the power of two before the rest."""
    block_dv: int
    """v_head_dim rounded up to a power of two."""
    slopes: Tensor
    """float32 [num_heads], log2(e) * ALiBi slope; a placeholder where there are none."""
    sinks: Tensor
    scalars: Mapping[str, float | int]
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, spec: AttentionSpec) -> Layer:
        """Prepare one spec; allocates the small tensors on its device."""
        block_d, tail = _row(spec)
        block_dv = max(triton.next_power_of_2(spec.v_head_dim), 16)
        scale = spec.scale * spec.k_scale
        cap = spec.softcap

        def vector(values: tuple[float, ...] | None) -> Tensor:
            return torch.tensor([x * _LOG2E for x in values or (0.0,)], dtype=torch.float32, device=spec.device)

        return cls(
            block_d=block_d,
            block_dv=block_dv,
            slopes=vector(spec.alibi_slopes),
            sinks=vector(spec.sinks),
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
                "DOT": tl.float32 if INTERPRETED else _TYPES[spec.dtype],
                "PRECISION": "ieee" if spec.dtype == torch.float32 else "tf32",
            },
        )

    def merging(self, block_m: int, rows: int, merged: int, lse: bool) -> dict[str, Any]:
        """Compile-time constants of the kernels that merge partial results. merged: those of a row that are in flight at once."""
        shared = ("NUM_KV_HEADS", "GROUP", "V_HEAD_DIM", "BLOCK_DV", "HAS_SINKS")
        constants = {name: self.constants[name] for name in shared}
        early = launches_early(self.sinks.device)
        return {**constants, "BLOCK_M": block_m, "ROWS": rows, "MERGED": merged, "HAS_LSE": lse, "PDL": early}

    @property
    def value_first(self) -> bool:
        """Whether the value lies in the key and is all of its first tile."""
        return bool(self.constants["VALUE_IN_KEY"])


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSetup:
    """What the kernels of one layer kind share: the layer's arguments, its cache, the GPU, and room for partial results."""

    spec: AttentionSpec
    layer: Layer
    layout: CacheLayout
    block_size: int
    arch: Architecture
    multiprocessors: int
    workspace: Workspace


def _row(spec: AttentionSpec) -> tuple[int, int]:
    """How a key row is read: (elements of the first tile, elements of the tile for the rest; 0: there is none).

    A value inside the key is a tile of its own, if tiles can be of its length. Else long rows that are no power of two
    (DeepSeek's 192) take two tiles, since one would be half empty.
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
    """How a cache's elements are found: the strides of its logical view, [block, slot, head, dim / x, x]."""

    strides: tuple[int, ...]
    """Five of the key, five of the value."""
    k_x: int
    """Elements of the inner axis of a split head_dim, 1 where it is not split."""
    v_x: int
    v_slots_inner: bool
    """Whether neighbouring slots of the value lie side by side."""
    k_pieces: bool
    """Whether the key's pieces of k_x elements lie side by side for neighbouring slots of a block, as in vllm_5d."""
    pairs: bool
    """Whether each row lies in one piece and every row begins at an even element, so that bytes can be read two at a time."""
    scale_strides: tuple[int, ...] = ()
    """Three of the key's scales, [block, slot, head], three of the value's; empty: the cache has none of its own."""

    @classmethod
    def of(cls, cache: LayerCache) -> Addressing:
        """Read off a cache."""
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
        """Whether each row of the key and of the value lies in one piece."""
        return self.k_x == self.v_x == self.strides[3] == self.strides[8] == 1

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of kernels by which they find scales."""
        return {"SCALED": bool(self.scale_strides), "SCALE_STRIDES": self.scale_strides}


def scales_of(cache: LayerCache) -> tuple[Tensor, ...]:
    """The scales of a cache's keys and values, where it has its own."""
    return tuple(cache.tensors[name] for name in SCALES.values()) if cache.layout.has_scales else ()


NO_SCALES = (None, None)
"""Stands for pointers to scales: Triton leaves None out of what it compiles."""
