"""The built-in plugin: what Headway registers of its own, through the hooks everybody uses. Imports no kernel library."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from headway.core.backend import API_VERSION, AttentionBackend, BackendInfo
from headway.core.layout import HND, NHD, VLLM_5D, CacheWriter, LayoutInfo
from headway.core.metadata import Phase
from headway.core.spec import AttentionSpec
from headway.registry.hookspecs import hookimpl

log = logging.getLogger("headway")


def _writer(device: torch.device) -> CacheWriter:
    if device.type == "cuda":
        try:
            from headway.backends.triton.writer import write_rows as write_rows_triton
        except ImportError as error:
            hint = "pip install 'headway[triton]'"
            log.warning("cache writes go through torch, which waits for the GPU in every layer: %s (%s)", error, hint)
        else:
            return write_rows_triton
    from headway.backends.layouts import write_rows

    return write_rows


def _sdpa() -> type[AttentionBackend]:
    from headway.backends.sdpa import SDPA

    return SDPA


def _sdpa_math() -> type[AttentionBackend]:
    from headway.backends.sdpa import SDPAMath

    return SDPAMath


def _triton() -> type[AttentionBackend]:
    from headway.backends.triton.backend import TritonAttention

    return TritonAttention


def _info(name: str, summary: str, load: Callable[[], type[AttentionBackend]], extra: str = "") -> BackendInfo:
    return BackendInfo(name, summary, load, extra, api_version=API_VERSION)


@hookimpl
def headway_register_layouts() -> list[LayoutInfo]:
    """Register the three built-in layouts."""
    return [LayoutInfo(layout, _writer) for layout in (NHD, HND, VLLM_5D)]


@hookimpl
def headway_register_backends() -> list[BackendInfo]:
    """Register the built-in backends."""
    return [
        _info("triton", "our paged split-KV decode and varlen prefill in Triton, every layout", _triton, "headway[triton]"),
        _info("sdpa", "torch's scaled_dot_product_attention, the kernel torch picks", _sdpa),
        _info("sdpa.math", "the baseline: torch's MATH kernel over gathered rows", _sdpa_math),
    ]


@hookimpl
def headway_rank_backends(spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
    """Order for a start without measurements: `triton` first on a GPU, the baseline last."""
    first = "triton" if spec.device.type == "cuda" else None
    return sorted(candidates, key=lambda name: (name != first, name == "sdpa.math"))
