"""Launch of the cache writer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from headway.backends.triton.layer import NO_SCALES, Addressing, scales_of
from headway.backends.triton.write_kernel import write_kv
from headway.core.contract.layout import LayerCache
from headway.kernels.runtime.triton_launch import Launcher, aligned, launches_early


class Writer:
    """Writes k, v [num_tokens, num_kv_heads, head_dim or v_head_dim] to slot_mapping [num_tokens]; -1 is skipped.

    One launch, no synchronisation: it can be captured in a CUDA graph. An fp8 cache gets k / k_scale and v / v_scale, saturated,
    one of whole numbers each row over a scale of its own.
    """

    def __init__(self) -> None:
        self._launch = Launcher(write_kv)
        self._known: dict[Hashable, tuple[tuple[int, ...], dict[str, Any]]] = {}
        """Strides and compile-time constants by everything they follow from."""

    def __call__(self, k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        """See the class."""
        num_tokens, num_kv_heads, head_dim = k.shape
        v_head_dim = v.shape[2]
        if num_tokens == 0:
            return
        block_t, num_warps = tile_of(num_tokens)
        scales = scales_of(cache)
        cached = (cache.key.stride(), cache.value.stride(), *(each.stride() for each in scales), cache.geometry)
        pointers = aligned(k.data_ptr(), v.data_ptr(), *(each.data_ptr() for each in (cache.key, cache.value, *scales)))
        key = (cached, cache.layout, k.dtype, k.stride(), v.stride(), pointers, block_t, num_warps)
        known = self._known.get(key)
        if known is None:
            addressing = Addressing.of(cache)
            known = self._known[key] = (
                addressing.strides,
                {
                    "HEAD_DIM": head_dim,
                    "BLOCK_D": triton.next_power_of_2(head_dim),
                    "V_HEAD_DIM": v_head_dim,
                    "BLOCK_DV": triton.next_power_of_2(v_head_dim),
                    "HAS_VALUE": cache.layout.has_value,
                    "BLOCK_SIZE": cache.block_size,
                    "K_X": addressing.k_x,
                    "V_X": addressing.v_x,
                    "BLOCK_T": block_t,
                    "V_SLOTS_INNER": addressing.v_slots_inner,
                    "FP8": cache.key.dtype == torch.float8_e4m3fn,
                    **addressing.constants,
                    "PDL": launches_early(k.device),
                },
            )
        strides, constants = known
        numbers = (num_tokens, cache.k_scale, cache.v_scale)
        rows = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        arguments = (k, v, cache.key, cache.value, slot_mapping, *(scales or NO_SCALES), *numbers, *rows, *strides)
        self._launch(key, (num_kv_heads, triton.cdiv(num_tokens, block_t), 1), arguments, constants, num_warps=num_warps)


def tile_of(num_tokens: int) -> tuple[int, int]:
    """(tokens a program, warps): large tiles keep many reads in flight, small ones occupy the whole GPU with few tokens."""
    if num_tokens >= 4096:
        return 64, 4
    if num_tokens >= 1024:
        return 16, 4
    return (16, 2) if num_tokens >= 256 else (4, 1)
