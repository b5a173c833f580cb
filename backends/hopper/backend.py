"""The backend `hopper`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headway.backends.hopper.attention import HopperKernels, HopperPlan
from headway.backends.hopper.tiles import HEAD_DIMS, MAX_GROUP, UNEQUAL
from headway.core.contract.backend import AttentionBackend, GraphLevel
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND, NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from headway.kernels.runtime.probe import HALF_DTYPES, capability, has_gpu

CAPABILITY = (9, 0)
"""The compute capability whose instructions (wgmma, setmaxnreg) the kernel is written in; no other has them."""
_HINT = "name triton, which runs on every GPU"


class HopperAttention(AttentionBackend):
    """Our CUDA C++ prefill and extend for H100 and H200: warp-specialised, persistent, keys split where rows are few."""

    name = "hopper"
    capabilities = Capabilities(
        phases=frozenset({Phase.PREFILL, Phase.EXTEND}),
        layouts=(NHD, HND),
        dtypes=HALF_DTYPES,
        block_multiple=16,
        head_dims=HEAD_DIMS,
        v_head_dims=UNEQUAL,
        max_group_size=MAX_GROUP,
        lse=True,
        shares_plans=True,
        features=frozenset({"sliding_window", "softcap", "sinks"}),
        dense_prefill=True,
    )
    graph_level = GraphLevel.UNIFORM  # a prompt's items are fixed by its length, which a captured prompt keeps
    options: ClassVar[Mapping[str, str]] = {"num_splits": "splits of the longest sequence's keys, in place of the built-in rule"}

    def __init__(
        self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(spec, layout, block_size, options)
        self._attention = HopperKernels(spec, block_size, count_of(self.name, options, "num_splits"))

    @classmethod
    def available(cls) -> Support:
        """A GPU of this generation, and something to compile with."""
        support = has_gpu()
        if support:
            support &= is_hopper(torch.device("cuda"))
        return support & find_compiler()[1]

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """The claim, the GPU's generation, and a scale that the softmax can take the maximum before."""
        support = super().supports(spec, layout, block_size, phase) & is_hopper(spec.device)
        if spec.scale <= 0:
            support &= Support.no("scale", "a positive number", spec.scale)
        return support

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Rows must lie at multiples of 16 bytes, which the tensor memory accelerator asks for, in a cache that is read."""
        if cache.layout not in (cls.capabilities.layouts or ()):
            return YES  # prompts alone are served beside it
        return has_rows_of_16_bytes("key", cache.logical_key) & has_rows_of_16_bytes("value", cache.logical_value)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        """Name of the kernel that will really run."""
        return "attention (CUDA C++, sm_90a)"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Partial results where keys are split."""
        return self._attention.workspace_bytes()

    def plan(self, metadata: AttentionMetadata) -> HopperPlan:
        """Cut the step into items, and choose the tile, once for all layers."""
        return self._attention.plan(metadata)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: HopperPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attention of several new tokens a sequence."""
        self._attention.run(q, k, v, cache, plan, out, lse)


def is_hopper(device: torch.device) -> Support:
    """Whether a device has the instructions; YES where there is none to ask."""
    found = capability(device)
    if found is None or found == CAPABILITY:
        return YES
    return Support.no("compute capability", "9.0 (H100, H200), whose instructions it uses", "{}.{}".format(*found), _HINT)


def has_rows_of_16_bytes(name: str, logical: Tensor) -> Support:
    """Whether rows of a cache tensor, seen as [block, slot, head, dim, 1], can be copied 16 bytes at a time."""
    size = logical.element_size()
    if logical.stride(3) == 1 and not logical.data_ptr() % 16 and not any(s * size % 16 for s in logical.stride()[:3]):
        return YES
    got = f"strides {logical.stride()[:4]} at address ...{logical.data_ptr() % 16:x}"
    return Support.no(f"cache, {name}", "rows in one piece, at multiples of 16 bytes", got, _HINT)


def count_of(backend: str, options: Mapping[str, str] | None, name: str) -> int | None:
    """The number that an option asks for; None: the built-in rule.

    :raises ConfigError: it is no number of at least 1.
    """
    text = (options or {}).get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--attn-opt {backend}.{name}", "a number of at least 1", repr(text))
    return int(text)
