"""Finds out which of vLLM's attention interfaces is installed: they differ in the shape of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headway_vllm.cache import content_views, packed_views

WORKS = "0.24 to 0.28 and 0.29 to 0.33"


class UnknownVllmError(ImportError):
    """A vLLM whose attention interface is another one."""


@dataclass(frozen=True)
class Generation:
    """The differences between vLLM's attention interfaces."""

    views: Callable[[Tensor], tuple[Tensor, Tensor]]
    """From a layer's KV cache to key and value [num_blocks, block_size, num_kv_heads, head_dim]."""
    members: Mapping[str, Callable[..., Any]]
    """Static methods by which the backend says what memory it wants."""
    names_are_free: bool
    """Whether a backend may bring a name of its own; else there is `CUSTOM`."""


def _shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: object, **__: object) -> tuple[int, ...]:
    return num_blocks, 2, block_size, num_kv_heads, head_size


def _stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
    return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)


def find_generation() -> Generation:
    """Look at the vLLM that is installed.

    :raises UnknownVllmError: it is neither of those that work, in one line.
    """
    try:
        from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise _unknown(f"{type(error).__name__}: {error}") from error
    if not callable(register_backend) or "seq_lens_cpu_upper_bound" not in CommonAttentionMetadata.__dataclass_fields__:
        raise _unknown("CommonAttentionMetadata has no seq_lens_cpu_upper_bound")
    free = hasattr(AttentionBackendEnum, "register")
    if hasattr(AttentionBackend, "get_kv_cache_shape"):
        members: dict[str, Callable[..., Any]] = {
            "get_kv_cache_shape": _shape,
            "get_kv_cache_stride_order": _stride_order,
            "get_required_kv_cache_layout": _nhd,
        }
        return Generation(packed_views, members, free)
    if hasattr(AttentionBackend, "supported_kv_cache_layouts"):
        return Generation(content_views, {"supported_kv_cache_layouts": _slots_first}, free)
    raise _unknown("AttentionBackend says nothing of the KV cache's shape")


def _slots_first() -> tuple[Any, ...]:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return KVCacheLayout.LBNHC, KVCacheLayout.BLNHC


def _nhd() -> str:
    return "NHD"


def _unknown(why: str) -> UnknownVllmError:
    try:
        from vllm import __version__ as version
    except ImportError:
        version = "none"
    return UnknownVllmError(f"headway-vllm: needs vLLM {WORKS}, got {version} ({why})")
