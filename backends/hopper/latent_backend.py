"""The backend `hopper_mla`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from headway.backends.hopper.backend import HopperAttention, count_of, has_rows_of_16_bytes, is_hopper
from headway.backends.hopper.latent import HEAD, ROWS, HeadTile, HopperLatentDecode
from headway.backends.triton.backend import GRAPH_CONTEXT, TritonAttention
from headway.backends.triton.configs import architecture
from headway.backends.triton.decode import DecodePlan
from headway.backends.triton.layer import Layer
from headway.core.contract.backend import AttentionBackend, GraphLevel
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.layout import LATENT, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.probe import HALF_DTYPES
from headway.kernels.runtime.triton_launch import Workspace

_HINT = "name triton, which runs on every GPU"


class HopperLatent(AttentionBackend):
    """Our CUDA C++ attention over latents for H100 and H200: a tile of keys is copied once, as key and as value of 64 rows."""

    name = "hopper_mla"
    capabilities = Capabilities(
        phases=frozenset({Phase.EXTEND, Phase.DECODE}),
        layouts=(LATENT,),
        dtypes=HALF_DTYPES,
        block_multiple=16,
        head_dims=(),
        v_head_dims=(HEAD,),
        value_in_key=True,
        lse=True,
        shares_plans=True,
    )
    graph_level = GraphLevel.UNIFORM
    options: ClassVar[Mapping[str, str]] = {
        "num_splits": "splits of every sequence's keys, in place of the built-in rule",
        "cluster": "blocks of threads that copy keys for each other, 1 or 2, in place of 2 where a token has 128 heads",
    }

    def __init__(
        self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(spec, layout, block_size, options)
        arch = architecture(torch.cuda.get_device_capability(spec.device))
        multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count
        tile = HeadTile.of(spec.num_heads, count_of(self.name, options, "cluster"))
        assert tile is not None, "asked by supports"
        splits, workspace = count_of(self.name, options, "num_splits"), Workspace(spec.device)
        self._decode = HopperLatentDecode(
            spec, Layer.of(spec), layout, block_size, arch, multiprocessors, splits, workspace, tile
        )

    @classmethod
    def available(cls) -> Support:
        """What `hopper` needs, and Triton, whose kernels cut keys and merge parts."""
        support = HopperAttention.available()
        return support & TritonAttention.available() if support else support

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """The claim, the GPU's generation, absorbed latent attention, and query heads that fill equal tiles."""
        support = super().supports(spec, layout, block_size, phase) & is_hopper(spec.device)
        if not spec.value_in_key or spec.num_kv_heads != 1:
            got = f"{spec.num_kv_heads} kv heads, value_in_key={spec.value_in_key}"
            support &= Support.no("layer", "absorbed latent attention, of one kv head", got)
        if HeadTile.of(spec.num_heads) is None:
            support &= Support.no("query heads", f"equal parts of at most {ROWS}", spec.num_heads, _HINT)
        if spec.scale <= 0:
            support &= Support.no("scale", "a positive number", spec.scale)
        return support

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Rows must lie at multiples of 16 bytes, which the tensor memory accelerator asks for."""
        return has_rows_of_16_bytes("key", cache.logical_key)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        """Name of the kernel that will really run."""
        return "latent (CUDA C++, sm_90a)"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Partial results where keys are split."""
        return self._decode.workspace_bytes(max_num_seqs)

    def plan(self, metadata: AttentionMetadata) -> DecodePlan:
        """Cut the sequences into chunks, once for all layers; an extend is cut as a decode of many tokens."""
        return self._decode.plan(metadata)

    def plan_for_capture(self, metadata: AttentionMetadata) -> DecodePlan:
        """As `plan`, for contexts of at most GRAPH_CONTEXT."""
        return self.plan(replace(metadata, seq_lens_cpu=metadata.seq_lens_cpu.clamp_max(GRAPH_CONTEXT)))

    def plan_for_replay(self, plan: DecodePlan, metadata: AttentionMetadata) -> None:
        """Cut the sequences into chunks for the lengths that the device has now."""
        self._decode.cut_again(plan, metadata.kv_lens)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attention of several new tokens a sequence."""
        self._decode.run(q, cache, plan, out, lse)

    def decode(self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of the newest tokens over the cache."""
        self._decode.run(q, cache, plan, out, lse)
