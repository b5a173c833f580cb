"""The attention backends `sdpa` and `sdpa.math`: gather cached rows, then call torch's scaled_dot_product_attention.

They support every layer on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headway.core.contract.backend import AttentionBackend, Options
from headway.core.contract.capabilities import ALL_PHASES, FEATURES, RULE_FEATURES, Capabilities
from headway.core.contract.errors import ConfigError
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support

_SCORES = 1 << 24
"""Maximum number of float32 scores of a layer with a rule in memory at a time (64 MiB), unless one query has more."""
_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class ContiguousBlocks:
    """Sequences of equal length whose blocks are evenly spaced. Their rows can often be read without a copy, as a strided
    view."""

    first: int
    """Index of the first sequence's first block."""
    apart: int
    """Distance in blocks from a sequence's first block to the first block of the next sequence."""
    step: int
    """Distance in blocks between successive blocks of a sequence. 0 if there is only one block."""
    count: int
    kv_len: int

    @classmethod
    def of(cls, table: NDArray[numpy.int32], kv_len: int) -> ContiguousBlocks | None:
        """Return a description of the sequences in a block table [count, blocks], all of length kv_len. Return None if the blocks
        are not evenly spaced."""
        first, steps = table[:, 0], numpy.diff(table)
        apart = int(first[1] - first[0]) if len(first) > 1 else 0
        step = int(steps[0, 0]) if steps.size else 0
        if apart < 0 or step < 0 or (steps != step).any() or (numpy.diff(first) != apart).any():
            return None
        return cls(int(first[0]), apart, step, len(first), kv_len)

    def rows(self, tensor: Tensor, axes: tuple[str, ...], block_size: int) -> Tensor | None:
        """Return a view [count, kv_len, heads, dim] of a cache's key or value, or None if the rows are not evenly spaced."""
        if "x" in axes:
            return None
        at = [axes.index(axis) for axis in ("block", "slot", "head", "dim")]
        block, slot, head, dim = (tensor.stride(axis) for axis in at)
        if self.step * block != block_size * slot and self.kv_len > block_size:
            return None
        shape = (self.count, self.kv_len, tensor.shape[at[2]], tensor.shape[at[3]])
        return tensor.as_strided(shape, (self.apart * block, slot, head, dim), tensor.storage_offset() + self.first * block)


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Consecutive sequences for one dense call: `count` sequences with `query_len` new tokens each."""

    tokens: slice
    """Range of the group's tokens in the step's packed tokens."""
    count: int
    """Number of sequences. 0 means that the tokens are padding, which sees no key."""
    query_len: int
    slots: Tensor | None
    """int64 [count, kv_len]: slots of the keys, padded to the longest sequence. None if the keys are this step's k and v."""
    bias: Tensor | None
    """[count or 1, num_heads or 1, query_len, kv_len]: bias of scores (0, -inf or ALiBi). None if no bias is added."""
    causal: bool
    """True if the call must apply a causal mask (query_len = kv_len, no bias)."""
    run: ContiguousBlocks | None = None
    """Description of `slots` as evenly spaced blocks. None if the blocks are not evenly spaced."""
    positions: Tensor | None = None
    """int64 [count, query_len]: positions of the queries, for a layer with a rule. None for other layers."""
    firsts: tuple[int, ...] = ()
    """First number of each row of `positions`."""
    keyless: Tensor | None = None
    """bool [count * query_len]: True for queries before the first key, which see no key. None if there are none."""


class SDPA(AttentionBackend):
    """torch's SDPA, which selects the kernel: flash on a CPU, flash or memory-efficient on a GPU.

    cuDNN is used only on request, because torch builds a cuDNN plan for every new shape, which takes tens of milliseconds
    (pytorch/pytorch#155958). When serving, nearly every step has a new shape. A benchmark that repeats one shape does not show
    this cost.
    """

    name = "sdpa"
    options: ClassVar[Mapping[str, str]] = {"cudnn": "1: let torch take cuDNN on a GPU, for shapes that come again"}
    # For batch invariance there is one call per sequence, so that a kernel's shape depends only on that sequence.
    capabilities = Capabilities(
        phases=ALL_PHASES,
        kv_dtypes=(torch.float8_e4m3fn, torch.int8),
        devices=("cpu", "cuda"),
        v_head_dims=None,
        value_in_key=True,
        features=FEATURES | RULE_FEATURES,
        dense_prefill=True,
        non_causal=True,
        exact_host_lengths=True,  # gathers and masks with the host's lengths
        lse=True,
        shares_plans=True,
        zeroes_padding=True,
        invariance=Invariance.PHASE,
    )

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self.on_gpu = spec.device.type == "cuda"
        cudnn = (options or {}).get("cudnn", "0")
        if cudnn not in ("0", "1"):
            raise ConfigError(f"--attn-opt {self.name}.cudnn", "0 or 1", repr(cudnn))
        self._shape_bound = cudnn == "1"

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        return "explicit softmax in float32 (torch)" if _explicit(spec) else "torch SDPA, torch's own choice"

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        found = super().supports(spec, layout, block_size, phase)
        if spec.invariance > Invariance.BATCH and "rule.blocks" in spec.features:
            need = "scores whose rounding may change the choice of blocks: deterministic_level batch"
            return found & Support.no("rule.blocks", need, spec.invariance.name.lower())
        return found

    @property
    def _in_tiles(self) -> bool:
        """True if a token's bits must not depend on the phase."""
        return self.spec.invariance >= Invariance.PHASE

    def plan(self, metadata: AttentionMetadata) -> list[DenseGroup]:
        """Return groups of consecutive sequences for dense calls, with gather indices and masks for all layers."""
        decode = metadata.phase is Phase.DECODE
        lens = zip(metadata.query_lens, metadata.kv_lens, strict=True)
        # Decodes are padded to the longest of their group; prefills are grouped only with equal shapes.
        keys: list[tuple[int, ...]] = [(q, kv > 0 if decode else kv) for q, kv in lens]
        if self.spec.batch_invariant:
            keys = [(*key, row) for row, key in enumerate(keys)]
        groups, row = [], 0
        for (query_len, kv_len, *_), members in groupby(keys):
            count = len(list(members))
            if kv_len:
                groups.append(self._group(metadata, row, count, query_len))
            else:  # padding rows
                start = int(metadata.query_start_loc_cpu[row])
                groups.append(DenseGroup(slice(start, start + count * query_len), 0, query_len, None, None, causal=False))
            row += count
        return groups

    def _group(self, metadata: AttentionMetadata, row: int, count: int, query_len: int) -> DenseGroup:
        start = int(metadata.query_start_loc_cpu[row])
        tokens = slice(start, start + count * query_len)
        kv_lens = metadata.seq_lens_cpu[row : row + count].numpy()
        longest = int(kv_lens.max())
        equal = bool((kv_lens == longest).all())
        device = metadata.block_table.device
        plain = not self.spec.features
        # In an EXTEND step, keys of all sequences are gathered, except for batch invariance, where other sequences must not
        # matter.
        alone = self.spec.batch_invariant and metadata.phase is not Phase.DECODE
        dense = (alone or metadata.phase is Phase.PREFILL) and longest == query_len
        # Keys of 8-bit caches are read back; otherwise results would depend on how a prompt is chunked.
        dense = dense and self.spec.cache_dtype == self.spec.dtype
        if not self.spec.causal and self.spec.features == {"sliding_window"}:
            plain = longest <= (self.spec.sliding_window or 0)  # an encoder's short texts fit into the window
        if dense and plain:
            return DenseGroup(tokens, count, query_len, None, None, causal=self.spec.causal and query_len > 1)
        slots = None if dense else _slots(metadata, row, kv_lens).to(device)
        every_key_seen = query_len == 1 and plain and equal
        ruled = self.spec.rule is not None
        bias = None if every_key_seen or self._in_tiles or ruled else self._bias(kv_lens, query_len, longest).to(device)
        if self.spec.rule is not None and self.spec.rule.ahead and not equal:  # padding, which `ahead` would let queries see
            bias = torch.where(torch.arange(longest) < torch.from_numpy(kv_lens)[:, None, None, None], 0.0, -torch.inf).to(device)
        run = None
        if slots is not None and not self.spec.batch_invariant and equal:
            blocks = -(-longest // metadata.block_size)
            run = ContiguousBlocks.of(metadata.block_table_cpu[row : row + count, :blocks].numpy(), longest)
        keyless = None
        if query_len > int(kv_lens.min()):  # `AttentionMetadata.build` refuses such lengths
            keyless = torch.from_numpy((kv_lens[:, None] - query_len + numpy.arange(query_len) < 0).reshape(-1)).to(device)
        group = DenseGroup(tokens, count, query_len, slots, bias, causal=False, run=run, keyless=keyless)
        if not ruled:
            return group
        firsts = kv_lens - query_len
        positions = torch.from_numpy(firsts[:, None] + numpy.arange(query_len)).to(device)
        return replace(group, positions=positions, firsts=tuple(firsts.tolist()))

    def _bias(self, kv_lens: NDArray[numpy.int32], query_len: int, longest: int) -> Tensor:
        explicit = _explicit(self.spec)
        if query_len == 1 and not self.spec.features:  # a decode token sees all keys of its sequence
            seen = numpy.arange(longest, dtype=numpy.int32) < kv_lens[:, None, None, None]
            scores = numpy.where(seen, numpy.float32(0), numpy.float32(-numpy.inf))
            return torch.from_numpy(scores).to(torch.float32 if explicit else self.spec.dtype)
        return self._general_bias(torch.from_numpy(kv_lens), query_len, longest, explicit)

    def _general_bias(self, kv_lens: Tensor, query_len: int, longest: int, explicit: bool) -> Tensor:
        key_positions = torch.arange(longest)[None, None]
        query_positions = (kv_lens[:, None] - query_len + torch.arange(query_len))[:, :, None]
        seen = visible(query_positions, key_positions, self.spec)[:, None]  # [count, 1, query_len, longest]
        bias = torch.zeros(seen.shape, dtype=torch.float32 if explicit else self.spec.dtype)
        if self.spec.alibi_slopes is not None:
            bias = bias + alibi(query_positions, key_positions, self.spec).transpose(0, 1)
        return bias.masked_fill(~seen, -torch.inf)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: list[DenseGroup], out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Compute attention over this step's k and v if no sequence has a context, otherwise over gathered rows."""
        self._run(q, k, v, cache, plan, out, lse)

    def decode(self, q: Tensor, cache: LayerCache, plan: list[DenseGroup], out: Tensor, lse: Tensor | None = None) -> None:
        """Run one padded call per group of sequences with equal query lengths."""
        self._run(q, q, q, cache, plan, out, lse)  # the keys and values of a decode are gathered

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: list[DenseGroup], out: Tensor, lse: Tensor | None
    ) -> None:
        with self.allowed_kernels():
            for group in plan:
                if group.count == 0:
                    out[group.tokens] = 0
                    if lse is not None:
                        sinks = self.spec.sinks
                        lse[:, group.tokens] = -torch.inf if sinks is None else lse.new_tensor(sinks)[:, None]
                    continue
                if group.slots is None:
                    shape = (group.count, group.query_len, self.spec.num_kv_heads, -1)
                    keys, values = (rows[group.tokens].reshape(shape) for rows in (k, v))
                else:
                    keys, values = self._gather(cache, group)
                self._attend(q, keys, values, group, out, lse)

    def _gather(self, cache: LayerCache, group: DenseGroup) -> tuple[Tensor, Tensor]:
        """Return cached keys and values in the layer's element type. Rows of 8-bit caches are dequantized."""
        assert group.slots is not None
        k, v = self._in_place(cache, group.run) or cache.gather(group.slots)
        if k.dtype == self.spec.dtype:
            return k, v
        keys, values = (rows.float() * scale for rows, scale in ((k, self.spec.k_scale), (v, self.spec.v_scale)))
        return keys.to(self.spec.dtype), values.to(self.spec.dtype)

    def _in_place(self, cache: LayerCache, run: ContiguousBlocks | None) -> tuple[Tensor, Tensor] | None:
        axes = cache.layout.tensors
        if run is None or not cache.layout.has_value or cache.layout.has_scales:
            return None
        k = run.rows(cache.key, axes["key"], cache.block_size)
        v = None if k is None else run.rows(cache.value, axes["value"], cache.block_size)
        return None if k is None or v is None else (k, v)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, group: DenseGroup, out: Tensor, lse: Tensor | None) -> None:
        """Run one dense call. keys, values: [count, kv_len, num_kv_heads, head_dim or v_head_dim]; lse: float32 [num_heads,
        num_tokens]."""
        rows = q[group.tokens]
        if self._in_tiles:
            out[group.tokens], sums = attend_in_tiles(rows, keys[0], values[0], self.spec)
            if lse is not None:
                lse[:, group.tokens] = sums
            return
        if self.spec.batch_invariant:  # a copy has an aligned address, independent of the sequence's position in the step
            rows, keys, values = (t.clone(memory_format=torch.contiguous_format) for t in (rows, keys, values))
        if group.positions is not None:
            out[group.tokens] = self._attend_by_rule(rows, keys, values, group, lse)
            return
        keys, values, bias = keys.transpose(1, 2), values.transpose(1, 2), group.bias
        folded = group.query_len == 1 and self.spec.group_size > 1
        if not folded:
            queries = rows.reshape(group.count, group.query_len, -1, self.spec.head_dim).transpose(1, 2)
        else:  # use the query heads of a kv head as query rows, so that keys are read once
            queries = rows.reshape(group.count, self.spec.num_kv_heads, self.spec.group_size, -1)
            if bias is not None and bias.shape[1] > 1:
                bias = bias.reshape(bias.shape[0], self.spec.num_kv_heads, self.spec.group_size, -1)
        if _explicit(self.spec) or lse is not None:
            if bias is None and group.causal:
                length = numpy.full(1, group.query_len, dtype=numpy.int32)
                bias = self._bias(length, group.query_len, group.query_len).to(q.device)
            result, sums = _explicit_attention(queries, keys, values, bias, self.spec)
            if lse is not None:  # [count, num_heads, query_len] to packed tokens
                lse[:, group.tokens] = sums.reshape(group.count, -1, group.query_len).transpose(0, 1).flatten(1)
        else:
            gqa = not folded and self.spec.group_size > 1
            if gqa and bias is not None and self.on_gpu:  # torch's GPU kernels that take a bias do not support GQA
                keys, values = (t.repeat_interleave(self.spec.group_size, 1) for t in (keys, values))
                gqa = False
            result = scaled_dot_product_attention(
                queries, keys, values, attn_mask=bias, is_causal=group.causal, scale=self.spec.scale, enable_gqa=gqa
            )
        if group.query_len == 1:
            out[group.tokens] = result.reshape(group.count, self.spec.num_heads, -1)
        else:
            rows = result.transpose(1, 2).flatten(0, 1)
            out[group.tokens] = rows if group.keyless is None else rows.masked_fill(group.keyless[:, None, None], 0)
        if lse is not None and group.keyless is not None and self.spec.sinks is None:
            lse[:, group.tokens] = lse[:, group.tokens].masked_fill(group.keyless, -torch.inf)

    def _attend_by_rule(self, rows: Tensor, keys: Tensor, values: Tensor, group: DenseGroup, lse: Tensor | None) -> Tensor:
        """Return the attention of a layer with a rule, [tokens, num_heads, v_head_dim], in parts of at most _SCORES scores."""
        positions, count, query_len = group.positions, group.count, group.query_len
        assert positions is not None
        queries, (keys, values) = rows.unflatten(0, (count, query_len)), (each.transpose(1, 2) for each in (keys, values))
        step = max(1, _SCORES // (count * self.spec.num_heads * keys.shape[2]))
        parts = []
        for start in range(0, query_len, step):
            part = slice(start, start + step)
            rows, bias = queries[:, part], group.bias
            if "rule.blocks" in self.spec.features:
                unseen = _unseen_blocks(rows, keys, [first + start for first in group.firsts], self.spec)
                bias = (unseen.new_zeros(1, dtype=torch.float32) if bias is None else bias).masked_fill(unseen, -torch.inf)
            parts.append(_explicit_attention(rows.transpose(1, 2), keys, values, bias, self.spec, positions[:, part]))
        if lse is not None:
            lse[:, group.tokens] = torch.cat([sums for _, sums in parts], 2).transpose(0, 1).flatten(1)
        return torch.cat([result for result, _ in parts], 2).transpose(1, 2).flatten(0, 1)

    def allowed_kernels(self) -> AbstractContextManager[None]:
        """Return a context in which torch may select the kernels that this backend uses."""
        return nullcontext() if self._shape_bound or not self.on_gpu else sdpa_kernel(_ANY_SHAPE)


class SDPAMath(SDPA):
    """Baseline that uses torch's MATH kernel, which stores all scores. It is slow but accurate."""

    name = "sdpa.math"
    options: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        return "explicit softmax in float32 (torch)" if _explicit(spec) else "torch SDPA, MATH"

    def allowed_kernels(self) -> AbstractContextManager[None]:
        """Return a context in which torch may select only its MATH kernel."""
        return sdpa_kernel(SDPBackend.MATH)


def _explicit(spec: AttentionSpec) -> bool:
    """Return whether torch's SDPA cannot compute a layer. SDPA supports neither a rule, a soft cap nor sinks, and q's dtype is
    not precise enough for ALiBi biases."""
    imprecise = spec.alibi_slopes is not None and spec.dtype != torch.float32
    return imprecise or not spec.features.isdisjoint({"softcap", "sinks", "rule"})


def _explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, spec: AttentionSpec, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax(softcap(q k^T scale) + bias) v computed in float32, and the logarithm of each softmax denominator.

    q: [n, heads, query_len, head_dim]; k, v: [n, num_kv_heads, kv_len, head_dim or v_head_dim]
    positions: int64 [n, query_len]: positions of the queries, by which ALiBi, masks and the rule are applied before `bias`.
    None for a layer without a rule.
    Returns [n, heads, query_len, v_head_dim] in q's element type, and float32 [n, heads, query_len]. With a rule, rows that see
    no key have zeros and -inf.
    """
    repeat = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(repeat, 1) for t in (k, v))
    scores = q.float() @ keys.transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    gate = None
    if positions is not None:
        scores, gate = _changed_by_rule(scores, positions, spec)
    if bias is not None:
        scores = scores + bias
    if spec.sinks is not None:  # one extra logit per row, whose weight is removed again; folded heads are rows here
        sinks = torch.tensor(spec.sinks, device=q.device).view(1, scores.shape[1], -1, 1)
        scores = torch.cat([scores, sinks.expand((*scores.shape[:3], 1))], -1)
    sums = scores.logsumexp(-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    if positions is not None:
        weights = weights.masked_fill(sums[..., None] == -torch.inf, 0.0)
    return ((weights if gate is None else weights * gate) @ values).to(q.dtype), sums


def _changed_by_rule(scores: Tensor, positions: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """Return the scores of a layer with a rule, -inf for keys that are not seen, and the factors of its gate, or None.

    positions: as in `_explicit_attention`. scores: [n, heads, query_len, kv_len].
    """
    rule, device = spec.rule, scores.device
    assert rule is not None
    q_pos, k_pos = positions[:, None, :, None], torch.arange(scores.shape[3], device=device)
    if spec.alibi_slopes is not None:
        scores = scores + alibi(q_pos[:, 0], k_pos, spec).transpose(0, 1)
    head = torch.arange(spec.num_heads, device=device)[:, None, None]
    scores, gate = rule.changed(scores, q_pos, k_pos, head)
    return scores.masked_fill(~visible(q_pos, k_pos, spec), -torch.inf), gate


def _unseen_blocks(q: Tensor, k: Tensor, firsts: Sequence[int], spec: AttentionSpec) -> Tensor:
    """Return bool [n, num_heads, query_len, kv_len]: True for keys that the rule's `blocks` hides.

    q: [n, query_len, num_heads, head_dim]. k: [n, num_kv_heads, kv_len, head_dim]. firsts: position of each first query."""
    assert spec.rule is not None
    rows = zip(q, k.transpose(1, 2), firsts, strict=True)
    return torch.stack([~spec.rule.seen_blocks(queries, keys, first) for queries, keys, first in rows])


def _slots(metadata: AttentionMetadata, row: int, kv_lens: NDArray[numpy.int32]) -> Tensor:
    """Return the slots of the sequences' keys, int64 [count, longest]. Sequences are padded by repeating their first slot, whose
    rows are finite."""
    size, count, longest = metadata.block_size, len(kv_lens), int(kv_lens.max())
    table = metadata.block_table_cpu[row : row + count, : -(-longest // size)].numpy().astype(numpy.int64)
    slots = (table[:, :, None] * size + numpy.arange(size)).reshape(count, -1)[:, :longest]
    return torch.from_numpy(numpy.where(numpy.arange(longest) < kv_lens[:, None], slots, slots[:, :1]))


def visible(query_positions: Tensor, key_positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Return a bool mask that is True if a query sees a key. A causal query at p with window w sees keys p - w + 1 .. p. If the
    layer is not causal, the query sees keys with |p - key| < w, or all keys without a window. A rule's `ahead` tokens see each
    other; its mask is not applied."""
    distance = query_positions - key_positions
    if spec.causal:
        seen = distance >= 0
        if spec.rule is not None and spec.rule.ahead:
            seen |= torch.maximum(query_positions, key_positions) < spec.rule.ahead
    else:
        distance = distance.abs()
        seen = torch.ones_like(distance, dtype=torch.bool)
    if spec.sliding_window is not None:
        seen &= distance < spec.sliding_window
    return seen


def alibi(query_positions: Tensor, key_positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the ALiBi bias -slope * distance, float32 [num_heads, *broadcast positions]."""
    assert spec.alibi_slopes is not None
    distance = (query_positions - key_positions).float()
    slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=distance.device)
    return -slopes.view((-1, *[1] * distance.dim())) * distance


QUERIES, KEYS = 16, 128
"""Number of positions in a tile of queries and in a tile of keys."""


def attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return attention of a sequence's last tokens over all its keys, computed in float32, and the logarithm of the sums. A row's
    bits depend only on its query, its position and its keys.

    Queries and keys are cut into tiles at multiples of `QUERIES` and `KEYS` positions, whatever part of the sequence a step
    computes. Every product has the same shape, and a row always has the same place in it. Tiles of keys are added in order, with
    the online softmax of Milakov and Gimelshein (2018). A tile that a row does not see changes none of its bits. Prompts, chunks,
    decodes and verifications therefore give the same bits.

    q: [query_len, num_heads, head_dim]; k: [kv_len, num_kv_heads, head_dim]; v: [kv_len, num_kv_heads, v_head_dim].
    Returns [query_len, num_heads, v_head_dim] in q's element type, and float32 [num_heads, query_len]. A row that sees no key has
    zeros and -inf.
    """
    query_len, kv_len = q.shape[0], k.shape[0]
    first = kv_len - query_len
    lead = first % QUERIES
    queries = _padded(q.float(), lead, QUERIES).unflatten(0, (-1, QUERIES))  # [tiles, QUERIES, heads, head_dim]
    keys, values = (_padded(rows.float(), 0, KEYS).unflatten(0, (-1, KEYS)).transpose(1, 2) for rows in (k, v))
    heads = None if spec.rule is None else tuple(range(spec.num_heads))
    by_row = [None if each is None else _by_row(each, spec, q.device) for each in (spec.alibi_slopes, spec.sinks, heads)]
    out, sums = [], []
    for number, tile in enumerate(queries):
        start = first - lead + number * QUERIES
        rows = tile.unflatten(1, (spec.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2).contiguous()  # [kv heads, rows, dim]
        result, logs = _tile(rows, start, keys, values, kv_len, spec, by_row)
        out.append(result.unflatten(1, (-1, QUERIES)).flatten(0, 1).transpose(0, 1))  # [QUERIES, heads, v_head_dim]
        sums.append(logs.unflatten(1, (-1, QUERIES)).flatten(0, 1))  # [heads, QUERIES]
    here = slice(lead, lead + query_len)
    return torch.cat(out)[here].to(q.dtype), torch.cat(sums, 1)[:, here]


def _padded(rows: Tensor, lead: int, size: int) -> Tensor:
    """Return rows [n, ...] with `lead` rows of zeros before them, and as many after them as fill tiles of `size` rows."""
    whole = rows.new_zeros((-(-(lead + len(rows)) // size) * size, *rows.shape[1:]))
    whole[lead : lead + len(rows)] = rows
    return whole


def _tile(
    rows: Tensor, start: int, keys: Tensor, values: Tensor, kv_len: int, spec: AttentionSpec, by_row: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the attention of one tile of queries: [num_kv_heads, rows, v_head_dim] and [num_kv_heads, rows].

    rows: [num_kv_heads, group_size * QUERIES, head_dim]. start: position of the tile's first query. by_row: ALiBi slopes,
    sinks, and numbers of heads for a layer with a rule, as `_by_row` returns them."""
    device, window, rule, (slopes, sinks, heads) = rows.device, spec.sliding_window, spec.rule, by_row
    ahead = 0 if rule is None or start >= rule.ahead else min(rule.ahead, kv_len)
    positions = (start + torch.arange(QUERIES, device=device)).repeat(spec.group_size)[:, None]
    place = torch.arange(KEYS, device=device)
    shape = (*rows.shape[:2], 1)
    most, total = (torch.full(shape, fill, device=device) for fill in (-torch.inf, 0.0))
    acc = rows.new_zeros((*rows.shape[:2], values.shape[-1]))
    for begin, key, value in zip(range(0, kv_len, KEYS), keys, values, strict=True):
        later = 0 if spec.causal else math.inf if window is None else window - 1
        if begin > max(start + QUERIES - 1 + later, ahead - 1) or (window is not None and begin + KEYS <= start - window + 1):
            continue  # no row of the tile sees these keys
        distance = positions - (begin + place)
        seen = distance >= 0 if spec.causal else (begin + place < kv_len).expand(distance.shape)
        if ahead:
            seen = seen | (torch.maximum(positions, begin + place) < ahead)
        if window is not None:
            seen = seen & (distance.abs() < window if not spec.causal else distance < window)
        scores = torch.bmm(rows, key.transpose(1, 2).contiguous()) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if slopes is not None:
            scores = scores - slopes * distance.float()
        gate = None
        if rule is not None and heads is not None:  # padding rows and keys need no right results
            scores, gate = rule.changed(scores, positions.clamp(max=kv_len - 1), begin + place, heads.long())
        scores = scores.masked_fill(~seen, -torch.inf)
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -torch.inf, 0.0)
        weights, shrink = torch.exp(scores - base), torch.exp(most - base)
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + torch.bmm(weights if gate is None else weights * gate, value.contiguous())
        most = higher
    if sinks is not None:
        higher = torch.maximum(most, sinks)
        shrink = torch.exp(most - higher)
        total, acc, most = total * shrink + torch.exp(sinks - higher), acc * shrink, higher
    return acc / total.masked_fill(total == 0.0, 1.0), (most + torch.log(total)).squeeze(-1)


def _by_row(of_heads: Sequence[float], spec: AttentionSpec, device: torch.device) -> Tensor:
    """Return a number per query head for each row of a tile, float32 [num_kv_heads, rows, 1]."""
    numbers = torch.tensor(of_heads, dtype=torch.float32, device=device).view(spec.num_kv_heads, spec.group_size)
    return numbers.repeat_interleave(QUERIES, 1)[..., None]
