"""What the kernels take, as structures: field for field those of the sources, with the same names."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec

TILE = 16
"""Keys of a tile, and tokens that a block of threads writes: TILE of layout.cuh."""
MAX_WARPS = 8
_LOG2E = math.log2(math.e)


class Scoring(ctypes.Structure):
    """struct Scoring of score.cuh."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("window", ctypes.c_int),
        ("has_slopes", ctypes.c_bool),
    )


class Attention(ctypes.Structure):
    """struct Arguments of paged_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "key", "value", "out")),
        *((name, ctypes.c_void_p) for name in ("block_table", "seq_lens", "query_start_loc", "slopes", "sinks")),
        *((name, ctypes.c_void_p) for name in ("partial", "state")),
        *((name, ctypes.c_longlong) for name in ("q_stride_token", "q_stride_head")),
        *((name, ctypes.c_longlong) for name in ("out_stride_token", "out_stride_head", "table_stride")),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "partitions")),
        ("v_scale", ctypes.c_float),
        ("scoring", Scoring),
    )


class Written(ctypes.Structure):
    """struct Written of cache.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "key", "value", "slots")),
        *((name, ctypes.c_longlong) for name in ("k_stride_token", "k_stride_head", "v_stride_token", "v_stride_head")),
        *((name, ctypes.c_int) for name in ("num_tokens", "kv_heads")),
        *((name, ctypes.c_float) for name in ("k_scale", "v_scale")),
    )


class Moves(ctypes.Structure):
    """struct Moves of blocks.cu."""

    _fields_ = (
        ("source", ctypes.c_void_p * 2),
        ("to", ctypes.c_void_p * 2),
        ("pairs", ctypes.c_void_p),
        ("vectors", ctypes.c_longlong),
    )


def scoring_of(spec: AttentionSpec) -> Scoring:
    """The numbers of a layer, in the base-2 domain."""
    scale, cap = spec.scale * spec.k_scale, spec.softcap
    if cap is None:
        return Scoring(scale * _LOG2E, 0.0, spec.sliding_window or 0, spec.alibi_slopes is not None)
    return Scoring(scale / cap, cap * _LOG2E, spec.sliding_window or 0, spec.alibi_slopes is not None)


def per_head(values: tuple[float, ...] | None, device: torch.device) -> Tensor | None:
    """float32 [num_heads], times log2(e)."""
    if values is None:
        return None
    return torch.tensor([value * _LOG2E for value in values], dtype=torch.float32, device=device)
