"""The attention backend `native`: decode over the paged cache on a CPU, in Headway's C code."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Options
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.layout import HND, NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.native.library import (
    TYPES,
    CacheStruct,
    DecodeStruct,
    StepStruct,
    functions,
    is_recording,
    native_support,
)

_LANES = 16
_MAX_DIM = 256


@dataclass(frozen=True, slots=True, eq=False)
class NativePlan:
    """Plan of one decode step, for all layers."""

    step: StepStruct
    referenced: tuple[object, ...]
    """Objects that own the memory to which the structure points."""


class NativeAttention(AttentionBackend):
    """CPU decode with one task per token and kv head. A long context is split into several tasks whose results are merged."""

    name = "native"
    capabilities = Capabilities(
        phases=frozenset({Phase.DECODE}),
        layouts=(NHD, HND),
        devices=("cpu",),
        v_head_dims=None,
        features=frozenset({"sliding_window"}),
        exact_host_lengths=True,
        zeroes_padding=True,
    )

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        found = functions()
        if found is None:
            raise UnsupportedError(f"attention backend {self.name}", native_support().reasons)
        self._functions = found
        self.decode_writes = True
        self._newest: NativePlan | None = None
        self._step = StepStruct()  # The most recently planned step, which recorded calls read

    @classmethod
    def available(cls) -> Support:
        return native_support()

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        support = super().supports(spec, layout, block_size, phase)
        for what, dim in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
            if dim % _LANES or dim > _MAX_DIM:
                support &= Support.no(what, f"a multiple of {_LANES} up to {_MAX_DIM}", dim)
        return support

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        support = super().accepts(cache)
        for name, tensor in cache.tensors.items():
            if tensor.stride(cache.layout.tensors[name].index("dim")) != 1:
                support &= Support.no(
                    f"cache, {name}", "elements of a head side by side", f"strides {tensor.stride()}", "name sdpa"
                )
        return support

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        return "paged decode (our C)"

    def plan(self, metadata: AttentionMetadata) -> NativePlan:
        """Return a plan with each token's sequence and number of visible keys. The last token of a sequence sees all keys of the
        sequence."""
        lens = metadata.seq_lens_cpu.numpy()
        sequences = numpy.arange(len(lens), dtype=numpy.int32)
        if metadata.max_query_len > 1:
            starts = metadata.query_start_loc_cpu.numpy()
            sequences = numpy.repeat(sequences, numpy.diff(starts))
            later = starts[1:][sequences] - 1 - numpy.arange(len(sequences), dtype=numpy.int32)
            lens = numpy.maximum(lens[sequences] - later, 0).astype(numpy.int32)
        table = metadata.block_table_cpu
        spec = self.spec
        step = StepStruct(
            lens=lens.ctypes.data,
            sequences=sequences.ctypes.data,
            table=table.data_ptr(),
            slots=metadata.slot_mapping.data_ptr(),
            table_row=table.stride(0),
            tokens=len(sequences),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            value_dim=spec.v_head_dim,
            window=spec.sliding_window or 0,
            scale=spec.scale,
            type=TYPES[spec.dtype],
        )
        ctypes.pointer(self._step)[0] = step
        self._newest = NativePlan(step, (lens, sequences, table, metadata.slot_mapping))
        return self._newest

    def decode(self, q: Tensor, cache: LayerCache, plan: NativePlan, out: Tensor, lse: Tensor | None = None) -> None:
        assert lse is None, "not declared"
        self._run(q, None, None, cache, plan, out)

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: NativePlan, out: Tensor) -> None:
        """Write k and v, and compute attention over the cache, in one call of the C library."""
        self._run(q, _by_head(k), _by_head(v), cache, plan, out)

    def _run(self, q: Tensor, k: Tensor | None, v: Tensor | None, cache: LayerCache, plan: NativePlan, out: Tensor) -> None:
        """Run decode. k, v: rows to write to the cache first, or None to write nothing."""
        q, target = _by_head(q), out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        call = DecodeStruct(
            step=ctypes.pointer(self._step if is_recording() and plan is self._newest else plan.step),
            cache=ctypes.pointer(_described(cache)),
            q=q.data_ptr(),
            k=None if k is None else k.data_ptr(),
            v=None if v is None else v.data_ptr(),
            out=target.data_ptr(),
            q_row=q.stride(0),
            k_row=0 if k is None else k.stride(0),
            v_row=0 if v is None else v.stride(0),
        )
        self._functions.decode(call)
        if target is not out:
            out.copy_(target)


def _by_head(rows: Tensor) -> Tensor:
    """Return rows [tokens, heads, dim] in which the elements of each head are contiguous."""
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()


def _described(cache: LayerCache) -> CacheStruct:
    described = CacheStruct(block_size=cache.block_size)
    for name in ("key", "value"):
        tensor, axes = cache.tensors[name], cache.layout.tensors[name]
        setattr(described, name, tensor.data_ptr())
        for axis in ("block", "slot", "head"):
            setattr(described, f"{name}_{axis}", tensor.stride(axes.index(axis)))
    return described
