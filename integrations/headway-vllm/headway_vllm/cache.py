"""The memory of vLLM's KV cache as Headway's LayerCache: strided views, no copies."""

from __future__ import annotations

from torch import Tensor

from headway.contract import NHD, AttentionSpec, ConfigError, LayerCache


def packed_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value [num_blocks, block_size, num_kv_heads, head_dim] of the shape that headway-vllm asks vLLM 0.24 for.

    kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], in any order in memory.
    """
    key, value = kv_cache.unbind(1)
    return key, value


def content_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the logical view that vLLM has had since 0.29: [num_blocks, num_kv_heads, block_size, 2 * head_dim]."""
    key, value = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return key, value


def layer_cache(key: Tensor, value: Tensor, spec: AttentionSpec) -> LayerCache:
    """A LayerCache over views [num_blocks, block_size, num_kv_heads, head_dim], whatever their strides.

    :raises ConfigError: elements of a head do not lie together, or are of another type than the layer's.
    """
    if key.stride(3) != 1 or value.stride(3) != 1:
        raise ConfigError("vLLM's KV cache", "heads whose elements lie together", f"strides {list(key.stride())}")
    return LayerCache.wrap({"key": key, "value": value}, NHD, spec)
