"""Split-KV decode for MLA. Each latent row is read once. It is the key of all query heads, and its first elements are their
value.

Absorbed latent attention (DeepSeek-AI 2024, arXiv 2405.04434) has one kv head, so up to 128 query heads share a row. These heads
are the rows of one tile, as in FlashMLA. A second launch merges partial results. With 512 elements per value, the last program to
arrive would need longer to merge all heads than to read its keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.backends.triton.configs import DecodeConfig, latent_config
from headway.backends.triton.decode import Decode, DecodePlan, Launches
from headway.backends.triton.layer import Addressing, KernelSetup
from headway.backends.triton.tiles import (
    alibi_slopes,
    block_numbers,
    cached_rows,
    normalise,
    peeked_blocks,
    query_tile,
    rule_rows,
    scale_of,
    softmax_step,
)
from headway.core.contract.layout import LayerCache
from headway.kernels.runtime.triton_launch import INTERPRETED, Launcher, launches_early


@triton.jit(
    do_not_specialize=["window", "table_stride", "sums_stride_head"],
    do_not_specialize_on_alignment=["table_ptr", "lse_ptr", "sums_ptr"],
)
def latent_decode(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_ptr,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM], contiguous rows
    out_ptr,  # [num_tokens, num_heads, BLOCK_D]
    sums_ptr,  # HAS_LSE: float32 [num_heads, num_tokens], the caller's log-sum-exp
    table_ptr,  # int32 [num_seqs, max_blocks]
    chunks_ptr,  # int32 [chunks, 8], see chunk_kernel.CHUNK_FIELDS
    slopes_ptr,  # float32 [num_heads]: log2(e) * ALiBi slope
    sinks_ptr,  # float32 [num_heads]: log2(e) * sink
    floats_ptr,  # RULE: its parameters
    ints_ptr,
    partial_ptr,  # SPLIT: float32 [chunks, items, ROWS, BLOCK_D]; items: grid axis 0
    lse_ptr,  # SPLIT: float32 [chunks, items, ROWS]
    score_scale,
    cap_log2,
    v_scale,
    window,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    sums_stride_head,
    table_stride,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    ONE_TOKEN: tl.constexpr,  # every sequence has exactly one query token
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # elements of the value, the first part of a row: a power of two
    TAIL: tl.constexpr,  # rest of the row, rounded up to a power of two; 0 means none
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of the query tile; tensor cores need 16 or 64
    ROWS: tl.constexpr,  # rows that can be in use, rounded up to a power of two
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # a sequence may have more than one chunk
    PEEK: tl.constexpr,  # block numbers are read by `peeked_blocks`
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    RULE: tl.constexpr,  # a rule_code.RuleCode
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # launched before the kernels it depends on have ended
):
    """Attend to one chunk of keys. Grid (kv heads * query tiles, chunks). Query row r is token r // GROUP, head r % GROUP."""
    if PDL:
        gdc_wait()
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    first_row = (tl.program_id(0) // NUM_KV_HEADS) * BLOCK_M
    chunk = chunks_ptr + tl.program_id(1) * 8
    seq = tl.load(chunk)
    kv_len = tl.load(chunk + 1)
    start = tl.load(chunk + 4) * BLOCK_N  # stored as a number of tiles, so that the compiler sees a multiple
    end = tl.load(chunk + 5)
    num_chunks = tl.load(chunk + 7)
    token = seq
    query_len = 1
    if not ONE_TOKEN:
        token = tl.load(chunk + 2)
        query_len = tl.load(chunk + 3)
    if seq < 0:
        return
    if first_row >= query_len * GROUP:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    live = row < query_len * GROUP
    head = kv_head * GROUP + row % GROUP
    positions = kv_len - query_len + row // GROUP
    d = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + ((token + row // GROUP).to(tl.int64) * q_stride_token + head * q_stride_head)[:, None]
    q = query_tile(q_rows, d, live[:, None], live, HEAD_DIM, BLOCK_D, TAIL, DOT)
    slopes = alibi_slopes(slopes_ptr, head, live, BLOCK_M, HAS_ALIBI)
    rule = rule_rows(positions, head, live, floats_ptr, ints_ptr, RULE)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = table_ptr + seq * table_stride
    key = key_ptr + kv_head * k_stride_head
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        if PEEK:
            blocks = peeked_blocks(table, first, end, BLOCK_SIZE, BLOCK_N)
        else:
            blocks = block_numbers(table, first, end, BLOCK_SIZE, BLOCK_N)
        rows = cached_rows(
            key, blocks, d, first, end, k_stride_block, k_stride_slot, 1, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
            True, True, False, DOT,
        )  # fmt: skip
        scores = tl.dot(q[0], tl.trans(rows), input_precision=PRECISION)
        if TAIL > 0:
            tail = cached_rows(
                key + BLOCK_D, blocks, tl.arange(0, TAIL), first, end, k_stride_block, k_stride_slot, 1, BLOCK_SIZE,
                HEAD_DIM - BLOCK_D, TAIL, BLOCK_N, True, False, False, DOT,
            )  # fmt: skip
            scores = tl.dot(q[1], tl.trans(tail), scores, input_precision=PRECISION)
        m, l, weights, shrink = softmax_step(
            scores, m, l, first + tl.arange(0, BLOCK_N), positions, positions, slopes, rule, score_scale, cap_log2,
            window, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, RULE, DOT,
        )  # fmt: skip
        acc = tl.dot(weights.to(DOT), rows, acc * shrink[:, None], input_precision=PRECISION)

    if PDL:
        gdc_launch_dependents()
    m = m * scale_of(score_scale, HAS_SOFTCAP, HAS_ALIBI, RULE)
    if not SPLIT or num_chunks == 1:
        result = normalise(
            acc, m, l, sums_ptr, sinks_ptr, token, row, head, live, v_scale, sums_stride_head, GROUP, HAS_SINKS, HAS_LSE
        )
        out_rows = (token + row // GROUP).to(tl.int64) * out_stride_token + head * out_stride_head
        tl.store(out_ptr + out_rows[:, None] + d[None, :], result.to(out_ptr.dtype.element_ty), mask=live[:, None])
    else:
        item = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        slot = item * ROWS + tl.arange(0, BLOCK_M)
        used = tl.arange(0, BLOCK_M) < ROWS
        tl.store(lse_ptr + slot, m + tl.log2(l), mask=used)  # -inf for a row without a visible key in this chunk
        result = acc * (1.0 / tl.where(l > 0, l, 1.0))[:, None]
        tl.store(partial_ptr + slot[:, None] * BLOCK_D + d[None, :], result, mask=used[:, None])


class LatentDecode(Decode):
    """Decode for layers whose value is the first tile of the key (`Layer.value_first`), with one launch for attention and one for
    the merge."""

    def __init__(self, setup: KernelSetup, num_splits: int | None) -> None:
        super().__init__(setup, num_splits)
        self._arch = setup.arch
        self._launch_latent = Launcher(latent_decode)

    skips_tiles = False

    def _configs(self, max_query_len: int) -> Sequence[DecodeConfig]:
        rows = self._spec.group_size * (1 if self._spec.batch_invariant else max_query_len)
        return (latent_config(self._arch, rows, self._spec.dtype.itemsize),)

    def tile(self, max_query_len: int) -> tuple[int, int, int]:
        """Return (BLOCK_M, rows in use rounded up to a power of two, query tiles per kv head). max_query_len: maximum number of
        query tokens per sequence."""
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
            *layer.parameters,
            plan.partial,
            plan.lse,
            *self._scalars,
            *q.stride()[:2],
            *out.stride()[:2],
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
            plan.launches[key] = Launches(lambda q, key, _value, out, _k, _v, sums: kernel(q, key, out, sums), merge)

    def _latent_constants(self, plan: DecodePlan, lse: bool) -> dict[str, Any]:
        shared = (
            "NUM_KV_HEADS", "GROUP", "HEAD_DIM", "BLOCK_D", "TAIL", "HAS_WINDOW", "HAS_SOFTCAP", "HAS_ALIBI", "HAS_SINKS", "RULE",
            "DOT", "PRECISION",
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
