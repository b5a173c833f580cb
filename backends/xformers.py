"""The attention backend `xformers`: prefill by CUTLASS or flash, and decode by Triton split-K, through
memory_efficient_attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as once
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.backends.varlen import VARLEN
from headway.core.contract.backend import AttentionBackend, Options
from headway.core.contract.errors import BackendError, ConfigError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Reason, Support
from headway.kernels.runtime.probe import at_least, find, has_gpu

MODULE = "xformers.ops.fmha"
SPLIT_K = "triton_splitk"
OPERATORS = ("flash", "cutlass", SPLIT_K)
"""Names of the modules of xformers.ops.fmha, each with one operator `FwOp`."""
HINT = (
    "pip install --no-deps xformers; where its C++ part, built for CUDA 12, is said not to load, "
    "pip install nvidia-cuda-runtime-cu12 and put its lib folder on LD_LIBRARY_PATH"
)
WITHOUT_CPP = "xFormers wasn't build with CUDA support"
"""xformers' message if its C++ extension does not load."""
SPLIT_K_HEAD_DIMS = (16, 32, 64, 128, 256)
SPLIT_K_QUERY_LEN = 16
"""Maximum number of query tokens per sequence for which the split-K kernel applies a causal mask."""
FLASH_BLOCK_MULTIPLE = 256


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """Arguments of one library call for consecutive sequences."""

    tokens: slice
    operator: Any
    bias: Any
    paged: bool
    """True if keys are read from the cache. False means that all keys are this step's k and v."""
    source: Tensor | None
    """Block table of the metadata if the mask contains a wider copy of the table, otherwise None."""


class XFormersAttention(AttentionBackend):
    """Attention with explicitly selected xformers operators. Masks reference the metadata's tensors, so that nothing is copied to
    the device.

    The split-K kernel is compiled for each number of sequences and each width of the block table; widths are rounded up to powers
    of two to limit compilations. xformers does not accept an output tensor, so each result is copied to `out`. xformers does not
    support windows, soft cap or ALiBi over a paged cache.
    """

    name = "xformers"
    capabilities = replace(VARLEN, block_multiple=64)
    graph_level = GraphLevel.UNIFORM
    options: ClassVar[Mapping[str, str]] = {
        "prefill_op": "prefill by cutlass or flash (unset: flash where it works: it was faster in every cell measured)"
    }

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._masks = import_module(f"{MODULE}.attn_bias")
        self._inputs = import_module(f"{MODULE}.common").Inputs
        self._prefill_operator = load_operator(_prefill_op(options))
        self._accepted: set[tuple[Any, type]] = set()

    @classmethod
    def available(cls) -> Support:
        """Return whether any operator works on this machine. `supports` reports for each phase which operators work."""
        support = has_gpu() & find(MODULE, "memory_efficient_attention_forward", HINT)[1]
        if not support:
            return support
        refusals = [operator_works(name) for name in OPERATORS]
        if any(refusals):
            return support
        return Support(tuple(reason for refusal in refusals for reason in refusal.reasons))

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        support = super().supports(spec, layout, block_size, phase) & at_least((8, 0), spec.device)
        if phase is Phase.PREFILL:
            return support & operator_works(_default_prefill())
        if phase is Phase.EXTEND:  # the split-K kernel masks no ragged chunks, CUTLASS reads no paged cache
            support &= operator_works("flash") and _flash_reads_blocks()
            if block_size % FLASH_BLOCK_MULTIPLE:
                hint = f"--block-size {FLASH_BLOCK_MULTIPLE}"
                support &= Support.no("block_size", f"a multiple of {FLASH_BLOCK_MULTIPLE} in extend", block_size, hint)
            return support
        if spec.head_dim not in SPLIT_K_HEAD_DIMS:
            support &= Support.no("head_dim", " or ".join(map(str, SPLIT_K_HEAD_DIMS)) + " in decode", spec.head_dim)
        return support & operator_works(SPLIT_K)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        name = SPLIT_K if phase is Phase.DECODE else "flash" if phase is Phase.EXTEND else _default_prefill()
        return f"{load_operator(name).NAME} (xformers)"

    def plan(self, metadata: AttentionMetadata) -> list[OperatorCall]:
        """Return one step's masks, for all layers. :raises BackendError: if a decode has too many query tokens for the split-K
        mask."""
        phase = metadata.phase
        if phase is Phase.PREFILL:
            queries = self._lengths(metadata.query_start_loc, metadata.query_lens)
            masks = self._masks
            bias = (masks.BlockDiagonalCausalMask if self.spec.causal else masks.BlockDiagonalMask)(queries, queries)
            return [OperatorCall(slice(0, metadata.num_tokens), self._prefill_operator, bias, paged=False, source=None)]
        if phase is Phase.EXTEND:
            return [self._paged(metadata, 0, metadata.num_seqs, load_operator("flash"))]
        if metadata.max_query_len > SPLIT_K_QUERY_LEN:
            most = f"at most {SPLIT_K_QUERY_LEN} query tokens a sequence in decode"
            raise BackendError(f"xformers: {SPLIT_K} takes {most}, got {metadata.max_query_len}")
        lens, first, groups = metadata.query_lens, 0, []
        for row in range(1, len(lens) + 1):  # group consecutive sequences with equal query lengths
            if row == len(lens) or lens[row] != lens[first]:
                groups.append(self._paged(metadata, first, row, load_operator(SPLIT_K)))
                first = row
        return groups

    def _paged(self, metadata: AttentionMetadata, first: int, last: int, operator: Any) -> OperatorCall:
        start, end = (int(metadata.query_start_loc_cpu[row]) for row in (first, last))
        starts, table = metadata.query_start_loc[first : last + 1], metadata.block_table[first:last]
        query_lens, kv_lens = metadata.query_lens[first:last], metadata.kv_lens[first:last]
        source = None
        if operator is load_operator(SPLIT_K):
            width = 1 << (table.shape[1] - 1).bit_length()
            if width > table.shape[1]:
                source, table = table, torch.nn.functional.pad(table, (0, width - table.shape[1]))
        padding = table.shape[1] * metadata.block_size
        key_starts = torch.arange(0, (len(kv_lens) + 1) * padding, padding, dtype=torch.int32, device=table.device)
        keys = self._masks._PaddedSeqLenInfo(
            seqstart=key_starts,
            max_seqlen=max(kv_lens),
            min_seqlen=min(kv_lens),
            seqstart_py=list(range(0, (len(kv_lens) + 1) * padding, padding)),
            seqlen=metadata.seq_lens[first:last],
            seqlen_py=kv_lens,
            padding=padding,
        )
        plain = max(query_lens) == 1  # one query sees every key, so no mask is needed
        masks = self._masks
        kind = masks.PagedBlockDiagonalPaddedKeysMask if plain else masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        queries = self._lengths(starts - start if start else starts, query_lens)
        bias = kind(q_seqinfo=queries, k_seqinfo=keys, block_tables=table, page_size=metadata.block_size)
        return OperatorCall(slice(start, end), operator, bias, paged=True, source=source)

    def _lengths(self, starts: Tensor, lens: Sequence[int]) -> Any:
        positions = [0]
        for length in lens:
            positions.append(positions[-1] + length)
        return self._masks._SeqLenInfo(seqstart=starts, max_seqlen=max(lens), min_seqlen=min(lens), seqstart_py=positions)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: list[OperatorCall], out: Tensor, lse: Tensor | None = None
    ) -> None:
        assert lse is None, "not declared"
        (group,) = plan
        if group.paged:
            self._run(q, cache.key, cache.value, group, out)
        else:
            self._run(q, k, v, group, out)

    def decode(self, q: Tensor, cache: LayerCache, plan: list[OperatorCall], out: Tensor, lse: Tensor | None = None) -> None:
        """Run one call for each group of sequences with the same number of new tokens."""
        assert lse is None, "not declared"
        for group in plan:
            if group.source is not None and q.is_cuda and torch.cuda.is_current_stream_capturing():
                # The plan's copy of the table would be constant in the graph: copy it in every replay.
                group.bias.block_tables[:, : group.source.shape[1]].copy_(group.source)
            self._run(q[group.tokens], cache.key, cache.value, group, out[group.tokens])

    def _run(self, q: Tensor, k: Tensor, v: Tensor, group: OperatorCall, out: Tensor) -> None:
        scale = self.spec.scale
        inputs = self._inputs(
            query=self._grouped(q), key=self._grouped(k), value=self._grouped(v), attn_bias=group.bias, scale=scale
        )
        kind = (group.operator, type(group.bias))
        if kind not in self._accepted:  # the library's check takes longer than its call, so check once
            reasons = _refusals(group.operator, inputs)
            if reasons:
                raise BackendError(f"xformers: {group.operator.NAME} refuses: {'; '.join(reasons)}")
            self._accepted.add(kind)
        answer, _ = group.operator.apply(inputs, needs_gradient=False)
        out.copy_(answer.reshape(out.shape))

    def _grouped(self, rows: Tensor) -> Tensor:
        """Return rows [tokens, heads, dim] as BMGHK [1, tokens, num_kv_heads, group_size, head_dim]. Keys have stride 0 along
        groups."""
        groups, heads, head_dim = self.spec.num_kv_heads, self.spec.group_size, self.spec.head_dim
        if rows.dim() == 4:
            rows = rows.flatten(0, 1)
        if rows.shape[1] == groups * heads:  # queries, or keys of a layer with one query head per kv head
            return rows.view(1, -1, groups, heads, head_dim)
        return rows[None, :, :, None].expand(-1, -1, -1, heads, -1)


def _prefill_op(options: Mapping[str, str] | None) -> str:
    name = (options or {}).get("prefill_op")
    if name is None:
        return _default_prefill()
    if name not in ("cutlass", "flash"):
        raise ConfigError("--attn-opt xformers.prefill_op", "cutlass or flash", repr(name))
    works = operator_works(name)
    if not works:
        raise ConfigError("--attn-opt xformers.prefill_op", "an operator that works here", f"{name}: {works}")
    return name


def _default_prefill() -> str:
    return "flash" if operator_works("flash") else "cutlass"


@once
def load_operator(name: str) -> Any:
    """Return the library's forward operator. name: name of the operator's module."""
    return import_module(f"{MODULE}.{name}").FwOp


@once
def operator_works(name: str) -> Support:
    """Return whether an operator works. On a GPU, this tests a tiny input, since `is_available` ignores the C++ extension."""
    module = f"{MODULE}.{name}"
    operator, support = find(module, "FwOp", HINT)
    if not support:
        return support
    reasons = [] if operator.is_available() else ["its kernel is not there"]
    if not reasons and torch.cuda.is_available():
        tiny = torch.zeros((1, 16, 1, 1, 64), dtype=torch.float16, device="cuda")
        reasons = _refusals(operator, import_module(f"{MODULE}.common").Inputs(query=tiny, key=tiny, value=tiny))
    return Support(tuple(Reason(f"{module}.FwOp", "an operator that runs here", " ".join(why.split()), HINT) for why in reasons))


def _refusals(operator: Any, inputs: Any) -> list[str]:
    """Return the library's reasons for refusing a call, except reasons that do not apply.

    If the C++ extension of xformers does not load, xformers refuses every operator. These operators do not use the extension:
    CUTLASS is torch's kernel, flash is from flash-attn or torch, and split-K is a Triton kernel.
    """
    return [reason for reason in operator.not_supported_reasons(inputs) if reason != WITHOUT_CPP]


def _flash_reads_blocks() -> Support:
    """Return whether xformers' flash operator supports a paged cache. The package flash-attn is required; torch's copy of
    FlashAttention is not sufficient."""
    kind = import_module(f"{MODULE}.attn_bias").PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    if kind in load_operator("flash").SUPPORTED_ATTN_BIAS_TYPES:
        return Support()
    need, got = "the package flash-attn, to read a paged cache", "torch's own copy of it"
    return Support.no(f"{MODULE}.flash", need, got, "pip install flash-attn")
