"""Stand-ins for attention libraries: the real signatures, plain float math on a CPU, and a record of what was asked.

Each checks what the real function checks of shapes and types, so that a call it accepts is one the library would accept.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def attend(q, k, v, scale, causal, left=-1, right=-1, softcap=0.0, slopes=None, sinks=None, used=None):
    """One sequence, bottom-right aligned as flash-attn documents it. q: [n, heads, d]; k, v: [m, kv_heads, d], `used` of m."""
    n, m, dtype = len(q), len(k) if used is None else used, q.dtype
    if m == 0:
        return torch.zeros_like(q)
    repeat = q.shape[1] // k.shape[1]
    keys, values = (rows.double().repeat_interleave(repeat, 1).transpose(0, 1) for rows in (k, v))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at, columns = torch.arange(m - n, m)[:, None], torch.arange(len(k))[None]
    if slopes is not None:
        assert slopes.dtype == torch.float32
        scores = scores - slopes.double()[:, None, None] * (at - columns).abs()
    if causal:
        right = 0
    hidden = columns >= m
    if right >= 0:
        hidden = hidden | (columns > at + right)
    if left >= 0:
        hidden = hidden | (columns < at - left)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
    return (scores.softmax(-1) @ values).transpose(0, 1).to(dtype)  # weight 0 times NaN is NaN, as in a real kernel


def rows_of(cache: Tensor, table: Tensor, count: int) -> Tensor:
    """The first `count` slots of a paged sequence. cache: [num_blocks, block_size, heads, d]; table: [max_blocks]."""
    size = cache.shape[1]
    return cache[table[: -(-count // size)].long()].flatten(0, 1)[:count]


class Recorded:
    """Names of the functions called, in order, with what a test may want to look at."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class FlashAttn2(Recorded):
    """flash_attn_2_cuda, by the argument order of flash-attn 2.7 and 2.8."""

    def varlen_fwd(
        self, q, k, v, out, cu_q, cu_k, seqused_k, leftpad_k, table, slopes, max_q, max_k, dropout, scale, zero, causal,
        left, right, softcap, return_softmax, generator,
    ):  # fmt: skip
        """varlen_fwd(arg0: Tensor, arg1: Tensor, arg2: Tensor, arg3: Tensor, arg4: Tensor, arg5: Tensor, arg6: Tensor,
        arg7: Tensor, arg8: Tensor, arg9: Tensor, arg10: int, arg11: int, arg12: float, arg13: float, arg14: bool, arg15: bool,
        arg16: int, arg17: int, arg18: float, arg19: bool, arg20: Generator)"""
        self.calls.append(("varlen_fwd", {"table": table, "slopes": slopes}))
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert cu_q.is_contiguous()
        assert cu_k.shape == cu_q.shape
        assert leftpad_k is None
        assert generator is None
        assert (dropout, zero, return_softmax) == (0.0, False, False)
        assert table is None or k.shape[1] % 256 == 0
        assert max_q == (cu_q[1:] - cu_q[:-1]).max()
        assert out.shape == q.shape
        # One token a sequence: the real function swaps heads and rows and answers in a tensor of its own.
        result = torch.empty_like(out) if max_q == 1 and q.shape[1] > k.shape[-2] and left < 0 and slopes is None else out
        for row in range(len(cu_q) - 1):
            first, last = int(cu_q[row]), int(cu_q[row + 1])
            if table is None:
                keys, values = (rows[int(cu_k[row]) : int(cu_k[row + 1])] for rows in (k, v))
            else:
                assert table.dtype == torch.int32
                assert seqused_k.dtype == torch.int32
                assert seqused_k[row] <= max_k
                keys, values = (rows_of(rows, table[row], int(seqused_k[row])) for rows in (k, v))
            result[first:last] = attend(q[first:last], keys, values, scale, causal, left, right, softcap, slopes)
        return [result, None, None, None]

    def fwd_kvcache(
        self, q, k_cache, v_cache, k, v, seqlens, cos, sin, batch_idx, leftpad, table, slopes, out, scale, causal, left,
        right, softcap, interleaved, num_splits,
    ):  # fmt: skip
        """fwd_kvcache(arg0: Tensor, arg1: Tensor, arg2: Tensor, arg3: Tensor, arg4: Tensor, arg5: Tensor, arg6: Tensor,
        arg7: Tensor, arg8: Tensor, arg9: Tensor, arg10: Tensor, arg11: Tensor, arg12: Tensor, arg13: float, arg14: bool,
        arg15: int, arg16: int, arg17: float, arg18: bool, arg19: int)"""
        self.calls.append(("fwd_kvcache", {"q": q, "table": table}))
        assert (k, v, cos, sin, batch_idx, leftpad) == (None,) * 6
        assert num_splits == 0
        assert k_cache.shape[1] % 256 == 0
        assert seqlens.dtype == table.dtype == torch.int32
        assert seqlens.is_contiguous()
        swaps = q.shape[1] == 1 and q.shape[2] > k_cache.shape[2] and left < 0 and right < 0 and slopes is None
        assert not swaps, "the real function would want `out` in the swapped shape"
        assert out.shape == q.shape
        assert out.stride(-1) == 1
        if q.shape[1] == 1 and slopes is None:
            causal = False
        for row in range(len(q)):
            keys, values = (rows_of(rows, table[row], int(seqlens[row])) for rows in (k_cache, v_cache))
            out[row] = attend(q[row], keys, values, scale, causal, left, right, softcap, slopes)
        return [out, None]


class FlashAttn4(Recorded):
    """flash_attn.cute: a paged call loads every row of each block, like TMA."""

    def _flash_attn_fwd(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, learnable_sink=None, num_splits=1, score_mod=None, out=None,
    ):  # fmt: skip
        self.calls.append(("_flash_attn_fwd", {"num_splits": num_splits, "cu_seqlens_q": cu_seqlens_q}))
        assert (qv, seqused_q, softcap, window_size_right) == (None,) * 4
        assert page_table is None or cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert out.shape == q.shape
        left = -1 if window_size_left is None else window_size_left
        cap = 0.0 if score_mod is None else score_mod.softcap
        count = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        for row in range(count):
            tokens = row if cu_seqlens_q is None else slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
            used = None
            if page_table is None:
                keys, values = (rows[int(cu_seqlens_k[row]) : int(cu_seqlens_k[row + 1])] for rows in (k, v))
            else:
                used, size = int(seqused_k[row]), k.shape[1]
                assert used <= max_seqlen_k
                keys, values = (rows_of(rows, page_table[row], -(-used // size) * size) for rows in (k, v))
            out[tokens] = attend(
                q[tokens], keys, values, softmax_scale, causal, left, softcap=cap, sinks=learnable_sink, used=used
            )
        return out, None, None, None, None

    def create_softcap_scoremod(self, softcap):
        return SimpleNamespace(softcap=softcap)


class TorchVarlen(Recorded):
    """torch.nn.attention.varlen of torch 2.13."""

    def varlen_attn(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        self.calls.append(("varlen_attn", {"window_size": window_size}))
        return self._run(
            torch.empty_like(query), query, key, value, cu_seq_q, cu_seq_k, max_q, scale, window_size, enable_gqa, seqused_k,
            block_table,
        )  # fmt: skip

    def varlen_attn_out(
        self, out, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        self.calls.append(("varlen_attn_out", {"window_size": window_size}))
        return self._run(
            out, query, key, value, cu_seq_q, cu_seq_k, max_q, scale, window_size, enable_gqa, seqused_k, block_table
        )

    def _run(self, out, q, k, v, cu_q, cu_k, max_q, scale, window, gqa, seqused_k, table):
        assert gqa == (q.shape[1] != k.shape[-2])
        assert cu_q.shape == cu_k.shape
        assert max_q == (cu_q[1:] - cu_q[:-1]).max()
        assert window[1] in (0, window[0])  # causal, or the same on both sides
        for row in range(len(cu_q) - 1):
            tokens = slice(int(cu_q[row]), int(cu_q[row + 1]))
            if table is None:
                keys, values = (rows[int(cu_k[row]) : int(cu_k[row + 1])] for rows in (k, v))
            else:
                assert k.shape[1] % 256 == 0
                keys, values = (rows_of(rows, table[row], int(seqused_k[row])) for rows in (k, v))
            out[tokens] = attend(q[tokens], keys, values, scale, False, *window)
        return out


@dataclass
class SeqLenInfo:
    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]


@dataclass
class PaddedSeqLenInfo(SeqLenInfo):
    seqlen: Tensor
    seqlen_py: list[int]
    padding: int


@dataclass
class BlockDiagonalMask:
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    _batch_sizes: Any = None


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    pass


@dataclass
class PagedBlockDiagonalPaddedKeysMask:
    q_seqinfo: SeqLenInfo
    k_seqinfo: PaddedSeqLenInfo
    block_tables: Tensor
    page_size: int


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    pass


@dataclass
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None


@dataclass(eq=False)
class Operator:
    """One xformers operator; `NAME` is what xformers calls it."""

    NAME: str
    SUPPORTED_ATTN_BIAS_TYPES: tuple[type, ...]
    calls: list[Inputs] = field(default_factory=list)
    built: bool = True

    def is_available(self) -> bool:
        return self.built

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        bias = inputs.attn_bias
        if bias is not None and type(bias) not in self.SUPPORTED_ATTN_BIAS_TYPES:
            return [f"attn_bias type is {type(bias)}"]
        if self.NAME == "triton_splitKF" and bias is not None:
            lens = bias.q_seqinfo
            if inputs.query.shape[1] != lens.seqstart_py[-1]:
                return ["Expected another total of queries"]
            if isinstance(bias, PagedBlockDiagonalCausalWithOffsetPaddedKeysMask) and lens.max_seqlen != lens.min_seqlen:
                return ["Variable query len is not supported for causal masks"]
            if bias.page_size % 64:
                return ["page size should be divisible by the block size"]
        return []

    def apply(self, inputs: Inputs, needs_gradient: bool) -> tuple[Tensor, None]:
        assert not needs_gradient
        assert not self.not_supported_reasons(inputs)
        self.calls.append(replace(inputs))
        q, k, v, bias = inputs.query, inputs.key, inputs.value, inputs.attn_bias
        assert q.dim() == 5
        assert k.shape[2:] == q.shape[2:] == v.shape[2:]
        assert q.shape[3] == 1 or k.stride(3) == v.stride(3) == 0, "heads were repeated"
        out = torch.empty_like(q.reshape(q.shape[1], -1, q.shape[-1]))
        queries, keys, values = q.reshape(out.shape), k[0, :, :, 0], v[0, :, :, 0]
        starts = bias.q_seqinfo.seqstart
        assert starts.tolist() == bias.q_seqinfo.seqstart_py
        paged = isinstance(bias, PagedBlockDiagonalPaddedKeysMask)
        causal = isinstance(bias, BlockDiagonalCausalMask | PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
        for row in range(len(starts) - 1):
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            rows = [keys[tokens], values[tokens]]
            if paged:
                info, blocks = bias.k_seqinfo, bias.block_tables[row]
                assert info.padding == bias.block_tables.shape[1] * bias.page_size
                assert info.seqlen_py[row] == info.seqlen[row] <= info.padding
                pages = [t.view(-1, bias.page_size, *t.shape[1:]) for t in (keys, values)]
                rows = [rows_of(page, blocks, int(info.seqlen[row])) for page in pages]
            out[tokens] = attend(queries[tokens], *rows, inputs.scale, causal)
        return out.view(1, *out.shape), None


class XFormers:
    """xformers.ops.fmha with its three operators."""

    def __init__(self, flash_reads_blocks: bool = True) -> None:
        paged = (PagedBlockDiagonalPaddedKeysMask, PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
        self.flash = Operator("fa2F", (BlockDiagonalMask, BlockDiagonalCausalMask, *(paged if flash_reads_blocks else ())))
        self.cutlass = Operator("cutlassF-pt", (BlockDiagonalMask, BlockDiagonalCausalMask))
        self.triton_splitk = Operator("triton_splitKF", paged)


def modules(fake: object) -> dict[str, ModuleType]:
    if isinstance(fake, FlashAttn2):
        return _tree({"flash_attn.flash_attn_interface": {"flash_attn_gpu": fake}})
    if isinstance(fake, FlashAttn4):
        utilities = {"create_softcap_scoremod": fake.create_softcap_scoremod}
        return _tree({
            "flash_attn.cute.interface": {"_flash_attn_fwd": fake._flash_attn_fwd},
            "flash_attn.cute.utils": utilities,
        })  # fmt: skip
    if isinstance(fake, TorchVarlen):
        contents = {"varlen_attn": fake.varlen_attn, "varlen_attn_out": fake.varlen_attn_out}
        return {"torch.nn.attention.varlen": _module("torch.nn.attention.varlen", contents)}
    assert isinstance(fake, XFormers)
    kinds = BlockDiagonalMask, BlockDiagonalCausalMask, *fake.triton_splitk.SUPPORTED_ATTN_BIAS_TYPES
    masks = {kind.__name__: kind for kind in kinds}
    masks |= {"_SeqLenInfo": SeqLenInfo, "_PaddedSeqLenInfo": PaddedSeqLenInfo}
    fmha = "xformers.ops.fmha"
    return _tree({
        fmha: {"memory_efficient_attention_forward": lambda: None},
        f"{fmha}.attn_bias": masks,
        f"{fmha}.common": {"Inputs": Inputs},
        **{f"{fmha}.{name}": {"FwOp": getattr(fake, name)} for name in ("flash", "cutlass", "triton_splitk")},
    })  # fmt: skip


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _tree(contents: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Modules by full name, with the packages above them."""
    found: dict[str, ModuleType] = {}
    for name in contents:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            found.setdefault(path, _module(path, {"__path__": [], **contents.get(path, {})}))
    return found
