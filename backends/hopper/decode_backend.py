"""The backend `hopper_decode`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from headway.backends.hopper.backend import HopperAttention, count_of, has_rows_of_16_bytes, is_hopper
from headway.backends.hopper.decode import HopperDecode
from headway.backends.hopper.tiles import HEAD_DIMS
from headway.backends.triton.backend import GRAPH_CONTEXT, TritonAttention
from headway.backends.triton.configs import architecture
from headway.backends.triton.decode import DecodePlan
from headway.backends.triton.layer import Layer
from headway.core.contract.backend import AttentionBackend, GraphLevel
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.layout import HND, NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.probe import HALF_DTYPES
from headway.kernels.runtime.triton_launch import Workspace


class HopperDecoding(AttentionBackend):
    """Our CUDA C++ decode for H100 and H200: queries are the narrow side of the products, and a warp waits for no other."""

    name = "hopper_decode"
    capabilities = Capabilities(
        phases=frozenset({Phase.DECODE}),
        layouts=(NHD, HND),
        dtypes=HALF_DTYPES,
        block_multiple=16,
        head_dims=HEAD_DIMS,
        lse=True,
        shares_plans=True,
        features=frozenset({"sliding_window", "softcap", "sinks"}),
    )
    graph_level = GraphLevel.UNIFORM
    options: ClassVar[Mapping[str, str]] = {"num_splits": "splits of every sequence's keys, in place of the built-in rule"}
    decode_writes = True

    def __init__(
        self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(spec, layout, block_size, options)
        arch = architecture(torch.cuda.get_device_capability(spec.device))
        multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count
        splits, workspace = count_of(self.name, options, "num_splits"), Workspace(spec.device)
        self._decode = HopperDecode(spec, Layer.of(spec), layout, block_size, arch, multiprocessors, splits, workspace)

    @classmethod
    def available(cls) -> Support:
        """What `hopper` needs, and Triton, whose kernel cuts keys."""
        support = HopperAttention.available()
        return support & TritonAttention.available() if support else support

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """The claim, the GPU's generation, and a scale that the softmax can take the maximum before."""
        support = super().supports(spec, layout, block_size, phase) & is_hopper(spec.device)
        if spec.scale <= 0:
            support &= Support.no("scale", "a positive number", spec.scale)
        return support

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Rows must lie at multiples of 16 bytes, which are copied at once."""
        return has_rows_of_16_bytes("key", cache.logical_key) & has_rows_of_16_bytes("value", cache.logical_value)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        """Name of the kernel that will really run."""
        return "decode (CUDA C++, sm_90a)"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Partial results where keys are split."""
        return self._decode.workspace_bytes(max_num_seqs)

    def plan(self, metadata: AttentionMetadata) -> DecodePlan:
        """Cut the sequences into chunks, once for all layers."""
        return self._decode.plan(metadata)

    def plan_for_capture(self, metadata: AttentionMetadata) -> DecodePlan:
        """As `plan`, for contexts of at most GRAPH_CONTEXT."""
        return self.plan(replace(metadata, seq_lens_cpu=metadata.seq_lens_cpu.clamp_max(GRAPH_CONTEXT)))

    def plan_for_replay(self, plan: DecodePlan, metadata: AttentionMetadata) -> None:
        """Cut the sequences into chunks for the lengths that the device has now."""
        self._decode.cut_again(plan, metadata.kv_lens)

    def decode(self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of the newest tokens over the cache."""
        self._decode.run(q, cache, plan, out, lse)

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor) -> None:
        """Attention of one new token a sequence over the cache, which gets its k and v."""
        self._decode.run(q, cache, plan, out, new=(k, v))
