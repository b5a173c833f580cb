"""Batches described by text such as `2q512_1q64s1k_32q1s4k`, for tests and benchmarks, each with its float64 reference.

The text consists of groups joined by "_". A group is [count]q<query_len>[s<kv_len>], where "k" after a length multiplies it by
1024. kv_len counts cached and new tokens. It defaults to query_len (a prompt without context). `8q1s1k` means eight sequences
that decode at length 1024. The grammar is vLLM's batch-spec grammar (vllm-project/vllm#26835).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheGeometry, CacheLayout, CacheWriter, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.inputs import Numbers
from headway.core.oracle.oracle import attend
from headway.core.oracle.steps import fill

_MOST_SEQUENCES = 1 << 20
"""Maximum number of sequences in a case. This is far more than any step has; a longer list would take minutes, or all memory."""
_MOST_TOKENS = 1 << 40
_BLOCK_BYTES = 200
"""Host memory in bytes that each block number takes while a case is created, in Python lists and in tensors."""
_GROUP = re.compile(r"(\d+)?q(\d+)(k)?(?:s(\d+)(k)?)?")


def parse_case(text: str, decode_query_len: int = 1) -> list[tuple[int, int]]:
    """Parse a case's text. Returns (query_len, kv_len) of each sequence, with sequences that decode last.

    :raises ConfigError: if the text does not match the grammar, or a kv_len is less than its query_len.
    """
    lens: list[tuple[int, int]] = []
    for group in text.split("_"):
        match = _GROUP.fullmatch(group)
        if match is None:
            raise ConfigError("case", "groups like 8q1s1k or 2q512, joined by '_'", repr(text))
        count, query, query_k, kv, kv_k = match.groups()
        query_len = int(query) * (1024 if query_k else 1)
        kv_len = int(kv) * (1024 if kv_k else 1) if kv else query_len
        if query_len < 1 or kv_len < query_len:
            raise ConfigError("case", "query_len of at least 1 and kv_len no shorter", repr(group))
        if count is not None and not 1 <= int(count) <= _MOST_SEQUENCES - len(lens):
            raise ConfigError("case", f"1 to {_MOST_SEQUENCES:,} sequences", repr(group))
        if kv_len > _MOST_TOKENS:
            raise ConfigError("case", f"sequences of at most {_MOST_TOKENS:,} tokens", repr(group))
        lens += [(query_len, kv_len)] * int(count or 1)
    return sorted(lens, key=lambda qs: Phase.of(qs[0], qs[1] - qs[0], decode_query_len) is Phase.DECODE)


@dataclass(frozen=True)
class Case:
    """Filled cache and one step over it, for testing and timing a backend."""

    spec: AttentionSpec
    metadata: AttentionMetadata
    cache: LayerCache
    q: torch.Tensor
    """[num_tokens, num_heads, head_dim]: queries of the step."""
    k: torch.Tensor
    """[num_tokens, num_kv_heads, head_dim]: keys of the step, already in the cache."""
    v: torch.Tensor
    """[num_tokens, num_kv_heads, v_head_dim]: values of the step; a view of k if values are part of keys."""


def make_case(
    lens: Sequence[tuple[int, int]],
    spec: AttentionSpec,
    layout: CacheLayout,
    block_size: int,
    writer: CacheWriter,
    *,
    seed: int = 0,
    poison: float | None = None,
    spare_blocks: int = 3,
    padding_rows: int = 0,
    decode_query_len: int = 1,
    scores: str = "normal",
) -> Case:
    """Return a case with random q, k, v and context in shuffled blocks. The layout's writer writes the context, then the new
    tokens.

    poison: value of every slot without a token, in partly used blocks and in `spare_blocks` unused blocks (NaN reveals stray
    reads), or None.
    padding_rows: number of rows of length 0 with slot -1 at the end, like a CUDA graph's unused rows.
    scores: regime of the scores, one of `cells.SCORES`. With `normal`, queries have the same distribution as keys, whatever the
    layer's scale.
    """
    check_room(lens, spec, block_size)
    generator = torch.Generator().manual_seed(seed)
    query_lens = [q for q, _ in lens] + [1] * padding_rows
    context_lens = [kv - q for q, kv in lens] + [-1] * padding_rows
    blocks_of = [-(-kv // block_size) for _, kv in lens]
    order = torch.randperm(sum(blocks_of) + spare_blocks, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in blocks_of] + [[]] * padding_rows
    num_blocks = sum(blocks_of) + spare_blocks
    geometry = CacheGeometry.of(spec, num_blocks, block_size)
    cache = layout.allocate(geometry, spec.k_scale, spec.v_scale)
    if poison is not None:
        for tensor in cache.tensors.values():
            fill(tensor, poison)

    def rows(count: int, heads: int, dim: int) -> torch.Tensor:
        random = torch.randn(count, heads, dim, generator=generator, dtype=torch.float32)
        return random.to(device=spec.device, dtype=spec.dtype)

    numbers = None if scores == "normal" else Numbers(spec, scores, generator)

    def new_rows(spans: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        count = sum(end - start for start, end in spans)
        if numbers is not None:
            return numbers.rows(torch.cat([torch.arange(start, end) for start, end in spans]))
        k = rows(count, spec.num_kv_heads, spec.head_dim)
        return k, k[..., : spec.v_head_dim] if spec.value_in_key else rows(count, spec.num_kv_heads, spec.v_head_dim)

    cached = [(length, table) for length, table in zip(context_lens, tables, strict=True) if length > 0]
    if cached:
        lengths = [length for length, _ in cached]
        past = AttentionMetadata.build(lengths, [0] * len(cached), [table for _, table in cached], block_size, spec.device)
        k, v = new_rows([(0, length) for length in lengths])
        writer(k, v, cache, past.slot_mapping)
    metadata = AttentionMetadata.build(
        query_lens, context_lens, tables, block_size, spec.device, decode_query_len, num_blocks=num_blocks
    )
    tokens = metadata.num_tokens
    shape = tokens, spec.num_heads, spec.head_dim
    q = rows(*shape) if numbers is None else numbers.queries(*shape).to(spec.device, spec.dtype)
    k, v = new_rows([(length, length + new) for new, length in zip(query_lens, context_lens, strict=True)])
    writer(k, v, cache, metadata.slot_mapping)
    return Case(spec, metadata, cache, q, k, v)


def check_room(lens: Sequence[tuple[int, int]], spec: AttentionSpec, block_size: int) -> None:
    """Check that a case fits in the host's memory. Otherwise the system might kill the process.

    :raises MemoryError: if there is too little memory. The error names the amount needed.
    """
    blocks, new = sum(-(-kv_len // block_size) for _, kv_len in lens), sum(query_len for query_len, _ in lens)
    needed = blocks * _BLOCK_BYTES
    if spec.device.type == "cpu":
        row = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
        needed += blocks * block_size * spec.cache_row_bytes
        needed += max(kv_len - query_len for query_len, kv_len in lens) * row * 4  # at least one sequence's context
        needed += new * (spec.num_heads * (spec.head_dim + spec.v_head_dim) + row) * 4
    free = psutil.virtual_memory().available
    if needed > free:
        raise MemoryError(f"{needed / 2**30:,.1f} GiB of memory are needed, {free / 2**30:.1f} GiB are free")


def reference(case: Case) -> Tensor:
    """Return the step's output, float64 [num_tokens, num_heads, v_head_dim]. Rows of padding sequences are zero."""
    return reference_with_lse(case)[0]


def reference_with_lse(case: Case) -> tuple[Tensor, Tensor]:
    """Return `reference`, and the log-sum-exp of the scores, float64 [num_heads, num_tokens], sinks included. In rows that see no
    key it is -inf, or the sink."""
    spec, metadata = case.spec, case.metadata
    out = torch.zeros((*case.q.shape[:2], spec.v_head_dim), dtype=torch.float64, device=case.q.device)
    lse = torch.full((spec.num_heads, len(case.q)), -torch.inf, dtype=torch.float64, device=case.q.device)
    if spec.sinks is not None:
        lse[:] = lse.new_tensor(spec.sinks)[:, None]
    token = 0
    for row, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        if kv_len:
            positions = torch.arange(kv_len, device=out.device)
            blocks = metadata.block_table[row].long()[positions // metadata.block_size]
            k, v = case.cache.gather(blocks * metadata.block_size + positions % metadata.block_size)
            keys, values = k.double() * spec.k_scale, v.double() * spec.v_scale
            tokens = slice(token, token + query_len)
            out[tokens], lse[:, tokens] = attend(spec, case.q[tokens], keys, values, kv_len - query_len)
        token += query_len
    return out, lse


def run_backend(backend: AttentionBackend, case: Case, lse: Tensor | None = None) -> Tensor:
    """Return a backend's output for the step, with the backend called as in the engine. The output is first filled with NaN,
    which reveals missed rows.

    lse: float32 [num_heads, num_tokens], which receives the log-sum-exp if the backend supports it, or None.
    """
    metadata, n = case.metadata, case.metadata.num_prefill_tokens
    out = case.q.new_full((*case.q.shape[:2], case.spec.v_head_dim), torch.nan)
    prefill, decode = backend.prefill, backend.decode
    if lse is not None:  # a backend without lse may lack the argument
        prefill, decode = partial(prefill, lse=lse[:, :n]), partial(decode, lse=lse[:, n:])
    if metadata.prefill is not None:
        prefill(case.q[:n], case.k[:n], case.v[:n], case.cache, backend.plan(metadata.prefill), out[:n])
    if metadata.decode is not None:
        decode(case.q[n:], case.cache, backend.plan(metadata.decode), out[n:])
    return out


def relative_error(out: Tensor, expected: Tensor, case: Case) -> float:
    """Return ||out - expected|| / ||expected|| over all rows except padding. NaN if any element of these rows is NaN."""
    lens = torch.tensor(case.metadata.query_lens)
    real = torch.repeat_interleave(torch.tensor(case.metadata.kv_lens) > 0, lens).to(out.device)
    return float((out[real].double() - expected[real]).norm() / expected[real].norm())
