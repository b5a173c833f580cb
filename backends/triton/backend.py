"""The attention backend `triton`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from headway.backends.triton.configs import architecture
from headway.backends.triton.decode import Decode, DecodePlan
from headway.backends.triton.latent_kernel import LatentDecode
from headway.backends.triton.layer import KernelSetup, Layer
from headway.backends.triton.prefill import Prefill, PrefillPlan, rereads
from headway.backends.triton.rule_code import inlines
from headway.core.contract.backend import AttentionBackend, Options
from headway.core.contract.capabilities import ALL_PHASES, FEATURES, Capabilities
from headway.core.contract.errors import BackendError, ConfigError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import HND, LATENT, NHD, NHD_INT8, VLLM_5D, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.triton_launch import INTERPRETED, Workspace, can_launch

GRAPH_CONTEXT = 8192
"""Context length, in tokens, for which a captured decode fixes tile sizes and the maximum number of chunks. Each replay selects
the number of chunks to use. A larger value would help batches of few, very long sequences, but launch more programs without work
for other batches. Other values were not measured."""
LONGEST_KEY, LONGEST_VALUE = 576, 512
"""Maximum head_dim and v_head_dim. Larger heads do not fit the registers together with a query tile."""
FP8_CAPABILITY = (8, 9)
"""Minimum compute capability with instructions that convert e4m3."""


class TritonAttention(AttentionBackend):
    """Paged split-KV decode (one launch) and varlen prefill and extend, for every layout. Needs no build step."""

    name = "triton"
    capabilities = Capabilities(
        phases=ALL_PHASES,
        layouts=(NHD, HND, VLLM_5D, LATENT, NHD_INT8),
        kv_dtypes=(torch.float8_e4m3fn, torch.int8),
        devices=("cpu", "cuda") if INTERPRETED else ("cuda",),
        block_multiple=16,
        head_dims=tuple(range(8, 513, 8)),
        v_head_dims=None,
        value_in_key=True,
        lse=True,
        shares_plans=True,
        features=FEATURES | {"rule"},
        dense_prefill=True,
        non_causal=True,
        reads_live_slots=True,
        invariance=Invariance.PHASE,
    )
    graph_level = GraphLevel.UNIFORM
    options: ClassVar[Mapping[str, str]] = {
        "num_splits": "splits of every sequence in decode, in place of the built-in rule",
        "extend_splits": "splits of the longest query tile's keys in prefill and extend, in place of the built-in rule",
    }

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._debug = os.environ.get("HEADWAY_DEBUG") == "1"
        cuda = spec.device.type == "cuda"
        arch = architecture(None if INTERPRETED else torch.cuda.get_device_capability(spec.device))
        multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count if cuda else 4
        # No fused write if: cache elements are 8-bit, since they are unpacked from the cache; key and value lengths differ, since
        # that takes two tiles; batch invariance, since mixed steps use the writer and must give the same bits.
        layer = Layer.of(spec)
        self.decode_writes = layer.equal_tiles and spec.cache_dtype == spec.dtype and not spec.batch_invariant
        setup = KernelSetup(
            spec=spec,
            layer=layer,
            layout=layout,
            block_size=block_size,
            arch=arch,
            multiprocessors=multiprocessors,
            workspace=Workspace(spec.device),
        )
        decode = LatentDecode if setup.layer.value_first else Decode
        splits, extend_splits = (self.count_option(options, name) for name in ("num_splits", "extend_splits"))
        if spec.invariance >= Invariance.PHASE and (splits or extend_splits):
            name = "num_splits" if splits else "extend_splits"
            raise ConfigError(f"--attn-opt {self.name}.{name}", "no splits, in deterministic mode full", splits or extend_splits)
        if spec.batch_invariant and extend_splits is not None and extend_splits > 1:  # runs depend on the longest sequence
            raise ConfigError(f"--attn-opt {self.name}.extend_splits", "1, in deterministic mode", extend_splits)
        self.decode_kernels = decode(setup, splits)
        self.prefill_kernels = Prefill(setup, extend_splits)
        self._one_kernel = spec.invariance >= Invariance.PHASE
        """True if decode runs on the kernel of prompts, with the same tiles, so that the phase changes no bit."""

    @classmethod
    def available(cls) -> Support:
        return can_launch()

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        support = super().supports(spec, layout, block_size, phase)
        if rereads(spec):
            support &= replace(cls.capabilities, dense_prefill=False).check(spec, layout, block_size, phase)
        if spec.head_dim != spec.v_head_dim and (spec.head_dim > LONGEST_KEY or spec.v_head_dim > LONGEST_VALUE):
            got = f"{spec.head_dim}/{spec.v_head_dim}"
            support &= Support.no("head_dim/v_head_dim", f"at most {LONGEST_KEY}/{LONGEST_VALUE}", got)
        support &= inlines(spec.rule)
        if spec.scale <= 0:
            support &= Support.no("scale", "a positive number", spec.scale)
        if spec.cache_dtype == torch.float8_e4m3fn and not INTERPRETED and spec.device.type == "cuda":
            capability = torch.cuda.get_device_capability(spec.device)
            if capability < FP8_CAPABILITY:
                support &= Support.no("kv_cache_dtype", "compute capability 8.9 or newer for fp8", "{}.{}".format(*capability))
        return support

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Return whether the kernels can use the cache's strides. The elements in a chunk of a split head must be contiguous."""
        for name, logical in (("key", cache.logical_key), ("value", cache.logical_value)):
            x = logical.shape[4]
            if x > 1 and (logical.stride(4) != 1 or logical.stride(1) % x):
                got = f"strides {logical.stride(1)} and {logical.stride(4)}"
                return Support.no(f"cache, {name}", f"pieces of {x} elements, slots a multiple of them apart", got)
        return YES

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        return "split_kv_decode (Triton)" if phase is Phase.DECODE else "varlen_attention (Triton)"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Return the size in bytes of the buffer for partial results of decode, or of prefill and extend."""
        return max(self.decode_kernels.workspace_bytes(max_num_seqs), self.prefill_kernels.workspace_bytes())

    def plan(self, metadata: AttentionMetadata) -> DecodePlan | PrefillPlan:
        """Return the plan for all layers. With HEADWAY_DEBUG=1, negative block numbers raise an error here, and block numbers
        that are too large raise one at the launch."""
        decodes = metadata.phase is Phase.DECODE and not self._one_kernel
        plan: DecodePlan | PrefillPlan
        plan = self.decode_kernels.plan(metadata) if decodes else self.prefill_kernels.plan(metadata)
        if self._debug:
            _check_table(metadata, None)
            plan = replace(plan, checked=metadata)
        return plan

    def plan_for_capture(self, metadata: AttentionMetadata) -> DecodePlan | PrefillPlan:
        """Return the plan for a capture, with tile sizes for contexts of at most GRAPH_CONTEXT."""
        return self.plan(replace(metadata, seq_lens_cpu=metadata.seq_lens_cpu.clamp_max(GRAPH_CONTEXT)))

    def plan_for_replay(self, plan: DecodePlan | PrefillPlan, metadata: AttentionMetadata) -> None:
        """Split the sequences into chunks for the current lengths on the device. The kernel of prompts reads the lengths."""
        if isinstance(plan, DecodePlan):
            self.decode_kernels.split_again(plan, metadata.kv_lens)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: PrefillPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        _check_plan(plan, cache)
        self.prefill_kernels.run(q, k, v, cache, plan, out, lse)

    def decode(
        self, q: Tensor, cache: LayerCache, plan: DecodePlan | PrefillPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        _check_plan(plan, cache)
        if isinstance(plan, PrefillPlan):
            self.prefill_kernels.run(q, q, q, cache, plan, out, lse)  # reads keys and values from the cache
        else:
            self.decode_kernels.run(q, cache, plan, out, lse)

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor) -> None:
        _check_plan(plan, cache)
        self.decode_kernels.run(q, cache, plan, out, new=(k, v))


def _check_plan(plan: DecodePlan | PrefillPlan, cache: LayerCache) -> None:
    """Check, in debug mode, that the plan's block numbers exist in the cache.

    :raises BackendError: if a block number does not exist.
    """
    if plan.checked is not None:
        _check_table(plan.checked, cache.geometry.num_blocks + cache.open_blocks)


def _check_table(metadata: AttentionMetadata, num_blocks: int | None) -> None:
    """Check the block numbers that kernels read for each sequence's length.

    :raises BackendError: if a block number is outside the cache.
    """
    for row, (kv_len, blocks) in enumerate(zip(metadata.kv_lens, metadata.block_table_cpu.tolist(), strict=True)):
        for block in blocks[: -(-kv_len // metadata.block_size)]:
            if block < 0 or (num_blocks is not None and block >= num_blocks):
                last = "" if num_blocks is None else f" .. {num_blocks - 1}"
                raise BackendError(f"triton: block_table row {row}: needs blocks 0{last}, got {block}")
