"""What the kernels take of an AttentionSpec: numbers folded into the base-2 domain, small tensors, compile-time switches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.core.contract.layout import LayerCache
from headway.core.contract.spec import AttentionSpec

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run under Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Layer:
    """Arguments common to the kernels of one spec."""

    block_d: int
    """head_dim rounded up to a power of two."""
    slopes: Tensor
    """float32 [num_heads], log2(e) * ALiBi slope; a placeholder where there are none."""
    sinks: Tensor
    scalars: Mapping[str, float | int]
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, spec: AttentionSpec) -> Layer:
        """Prepare one spec; allocates the small tensors on its device."""
        scale = spec.scale * spec.k_scale
        cap = spec.softcap

        def vector(values: tuple[float, ...] | None) -> Tensor:
            return torch.tensor([x * _LOG2E for x in values or (0.0,)], dtype=torch.float32, device=spec.device)

        return cls(
            block_d=triton.next_power_of_2(spec.head_dim),
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
                "BLOCK_D": triton.next_power_of_2(spec.head_dim),
                "HAS_WINDOW": spec.sliding_window is not None,
                "HAS_SOFTCAP": cap is not None,
                "HAS_ALIBI": spec.alibi_slopes is not None,
                "HAS_SINKS": spec.sinks is not None,
                "DOT": tl.float32 if INTERPRETED else _TYPES[spec.dtype],
                "PRECISION": "ieee" if spec.dtype == torch.float32 else "tf32",
            },
        )


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

    @classmethod
    def of(cls, cache: LayerCache) -> Addressing:
        """Read off a cache."""
        key, value = cache.logical_key, cache.logical_value
        return cls((*key.stride(), *value.stride()), key.shape[4], value.shape[4], value.stride(1) == 1)
