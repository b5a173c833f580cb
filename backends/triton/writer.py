"""Launch of the cache writer."""

from __future__ import annotations

import triton
from torch import Tensor

from headway.backends.triton.layer import cache_strides, inner_sizes
from headway.backends.triton.write_kernel import write_kv
from headway.core.layout import LayerCache


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim] to slot_mapping [num_tokens]; -1 is skipped.

    One launch, no synchronisation: it can be captured in a CUDA graph. An fp8 cache gets k / k_scale and v / v_scale, saturated.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    strides = cache_strides(cache)
    k_x, v_x = inner_sizes(cache)
    block_t = 16 if num_tokens >= 2048 else 4 if num_tokens >= 256 else 1
    write_kv[(triton.cdiv(num_tokens, block_t), num_kv_heads)](
        k,
        v,
        cache.key,
        cache.value,
        slot_mapping,
        num_tokens,
        cache.k_scale,
        cache.v_scale,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *strides,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=cache.block_size,
        K_X=k_x,
        V_X=v_x,
        BLOCK_T=block_t,
        K_SLOTS_INNER=strides[1] < strides[3],
        V_SLOTS_INNER=strides[6] < strides[8],
        FP8=cache.key.element_size() == 1,
        num_warps=4 if block_t > 1 else 1,
    )
