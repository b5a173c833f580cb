"""Launch of the decode kernel for caches whose values lie in their keys."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from headway.backends.triton.configs import Architecture, DecodeConfig, latent_config
from headway.backends.triton.decode import Decode, DecodePlan
from headway.backends.triton.latent_kernel import latent_decode
from headway.backends.triton.layer import Addressing, Layer
from headway.backends.triton.merge_kernel import merge_chunks
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.triton_launch import INTERPRETED, BoundKernel, Launcher, Workspace, launches_early

MERGE_WARPS = 4
MERGED = 16
"""Partial results of a row that a program of the merge has in flight."""


class LatentDecode(Decode):
    """As Decode, where a row's value is the first tile of its key (`Layer.value_first`): one launch, and one that merges."""

    def __init__(
        self,
        spec: AttentionSpec,
        layer: Layer,
        layout: CacheLayout,
        block_size: int,
        arch: Architecture,
        multiprocessors: int,
        num_splits: int | None,
        workspace: Workspace,
    ) -> None:
        super().__init__(spec, layer, layout, block_size, arch, multiprocessors, num_splits, workspace)
        self._arch = arch
        self._launch_latent = Launcher(latent_decode)
        self._launch_merge = Launcher(merge_chunks)

    def _configs(self, max_query_len: int) -> Sequence[DecodeConfig]:
        rows = self._spec.group_size * (1 if self._spec.batch_invariant else max_query_len)
        return (latent_config(self._arch, rows, self._spec.dtype.itemsize),)

    def tile(self, max_query_len: int) -> tuple[int, int, int]:
        """(BLOCK_M, rows in use rounded up, query tiles a kv head) for so many query tokens."""
        rows = self._spec.group_size * max_query_len
        block_m = min(max(16, triton.next_power_of_2(rows)), self._configs(max_query_len)[0].block_m)
        return block_m, min(triton.next_power_of_2(rows), block_m), -(-rows // block_m)

    def _launch_first(
        self,
        key: Hashable,
        tensors: tuple[Tensor, ...],
        pointers: list[int],
        cache: LayerCache,
        plan: DecodePlan,
        new: bool,
        lse: Tensor | None,
    ) -> None:
        assert not new
        q, rows, _, out, *_, sums = tensors
        tile = plan.block_m, plan.rows, plan.max_query_len == 1, plan.config
        compiled_for = (key, tile, plan.chunks.split)
        layer, strides = self._layer, Addressing.of(cache).strides
        sums_stride = 0 if lse is None else lse.stride(0)
        rest = (
            plan.block_table,
            plan.chunks.table,
            layer.slopes,
            layer.sinks,
            plan.partial,
            plan.lse,
            *self._scalars,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            sums_stride,
            plan.block_table.stride(0),
            *strides[:3],
        )
        constants = self._latent_constants(plan, lse is not None)
        grid = (plan.items, len(plan.chunks.table), 1)
        first = (q, rows, out, sums)
        places = (pointers[0], pointers[1], pointers[3], pointers[6])
        kernel = self._launch_latent.bind(compiled_for, grid, first, places, rest, constants, num_warps=plan.config.num_warps)
        merge = self._merge(plan, out, sums, lse, compiled_for)
        if kernel is not None:
            plan.launches[key] = _Both(kernel, merge)

    def _merge(self, plan: DecodePlan, out: Tensor, sums: Tensor, lse: Tensor | None, key: Hashable) -> BoundKernel | None:
        """Merge what programs have left; returns the launch for layers that are like this one, if anything was launched.

        key: of all that is compiled in, and of what the arguments are aligned to.
        """
        if not plan.chunks.split:
            return None
        sums_stride, v_scale = 0 if lse is None else lse.stride(0), self._layer.scalars["v_scale"]
        rest = (plan.chunks.seqs, self._layer.sinks, plan.partial, plan.lse, v_scale, out.stride(0), out.stride(1), sums_stride)
        grid = (plan.items, plan.rows, len(plan.chunks.seqs))
        constants, pointers = self._merging(plan, lse is not None), (out.data_ptr(), sums.data_ptr())
        return self._launch_merge.bind(key, grid, (out, sums), pointers, rest, constants, num_warps=MERGE_WARPS)

    def _latent_constants(self, plan: DecodePlan, lse: bool) -> dict[str, Any]:
        shared = (
            "NUM_KV_HEADS", "GROUP", "HEAD_DIM", "BLOCK_D", "TAIL", "HAS_WINDOW", "HAS_SOFTCAP", "HAS_ALIBI", "HAS_SINKS", "DOT",
            "PRECISION",
        )  # fmt: skip
        return {
            **{name: self._layer.constants[name] for name in shared},
            "ONE_TOKEN": plan.max_query_len == 1,
            "BLOCK_SIZE": self._block_size,
            "BLOCK_M": plan.block_m,
            "ROWS": plan.rows,
            "BLOCK_N": plan.config.block_n,
            "SPLIT": plan.chunks.split,
            "PEEK": not INTERPRETED,
            "HAS_LSE": lse,
            "STAGES": plan.config.num_stages,
            "PDL": launches_early(self._spec.device),
        }

    def _merging(self, plan: DecodePlan, lse: bool) -> dict[str, Any]:
        constants = self._layer.constants
        return {
            "NUM_KV_HEADS": constants["NUM_KV_HEADS"],
            "GROUP": constants["GROUP"],
            "V_HEAD_DIM": constants["V_HEAD_DIM"],
            "BLOCK_DV": constants["BLOCK_DV"],
            "BLOCK_M": plan.block_m,
            "TILE_ROWS": plan.rows,
            "ROWS": 1,
            "MERGED": MERGED,
            "HAS_SINKS": constants["HAS_SINKS"],
            "HAS_LSE": lse,
            "PDL": launches_early(self._spec.device),
        }


@dataclass(frozen=True, slots=True)
class _Both:
    """The bound launches of a layer."""

    kernel: BoundKernel
    merge: BoundKernel | None

    def __call__(self, q: int, key: int, value: int, out: int, k: int, v: int, sums: int) -> None:
        self.kernel(q, key, out, sums)
        if self.merge is not None:
            self.merge(out, sums)
