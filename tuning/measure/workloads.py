"""Workloads of `headway bench kernel`: default cases, the step of each case, and its filled cache.

The cache is filled on the device through its logical view, one sequence at a time, with random values from a seed. Every layout,
block size and library thus gets the same values, without a host copy of a large cache. For a check to be valid, only the
reference writer must be correct.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheGeometry, CacheLayout, LayerCache, put
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, check_room, parse_case

Pair = tuple[Any, Any]
"""(layout, block size). The block size is None for states, which are stored in slots."""
VERIFY_QUERY_LEN = 8
"""Maximum number of query tokens of a sequence in decode (speculative verification)."""

PhaseName = Literal["decode", "prefill", "write"]
"""Measured operation: decode (including verification), prefill with or without a context, or only the cache writer."""

DEFAULT_CASES: dict[str, dict[PhaseName, tuple[str, ...]]] = {
    "cuda": {
        "decode": (
            *("1q1s512", "1q1s2k", "1q1s8k", "1q1s32k", "1q1s128k"),
            *("8q1s512", "8q1s2k", "8q1s8k", "8q1s32k"),
            *("64q1s512", "64q1s2k", "64q1s8k"),
            *("256q1s512", "256q1s2k", "256q1s8k"),
        ),
        "prefill": ("1q512", "1q2k", "1q8k", "1q32k", "8q512", "8q2k", "4q8k", "32q1k"),
        "write": ("1q1s512", "64q1s512", "256q1s512", "1q64", "1q512", "1q2k", "1q8k"),
    },
    "cpu": {
        "decode": ("1q1s64", "4q1s64", "2q1s256"),
        "prefill": ("1q32", "2q64", "1q128"),
        "write": ("8q1s64", "1q64"),
    },
}
"""Device type -> name of the measured phase -> default cases."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Head counts and dimensions of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    """Dimension of a value head if it differs from head_dim, else 0. With a single KV head, a cache and a smaller value
    dimension, the value is a part of the key, as in absorbed latent attention (MLA)."""
    dense: bool = False
    """True for attention without a cache, as in non-absorbed latent attention (MLA prefill)."""
    causal: bool = True
    """True if queries see no later keys. False, as in encoders, implies that there is no cache."""

    @classmethod
    def parse(cls, text: str) -> Geometry:
        """Parse num_heads/num_kv_heads/head_dim with optional /v_head_dim and optional /dense or /bidirectional.

        :raises ConfigError: if there are not three or four positive numbers, or num_heads is not a multiple of num_kv_heads.
        """
        form = "num_heads/num_kv_heads/head_dim[/v_head_dim][/dense or /bidirectional]"
        need = f"{form}, such as 32/8/128, num_heads a multiple of num_kv_heads"
        match = re.fullmatch(r"(\d+)/(\d+)/(\d+)(?:/(\d+))?(/dense|/bidirectional)?", text.strip())
        heads, kv_heads, head_dim = map(int, match.groups()[:3]) if match else (0, 0, 0)
        v_head_dim = int(match[4]) if match and match[4] else head_dim
        if not (heads and kv_heads and head_dim and v_head_dim) or heads % kv_heads:
            raise ConfigError("--geometry", need, repr(text))
        kind = match[5] if match else None
        return cls(heads, kv_heads, head_dim, 0 if v_head_dim == head_dim else v_head_dim, bool(kind), kind != "/bidirectional")

    @classmethod
    def of(cls, spec: AttentionSpec) -> Geometry:
        """Return the geometry of a layer."""
        value = 0 if spec.v_head_dim == spec.head_dim else spec.v_head_dim
        return cls(spec.num_heads, spec.num_kv_heads, spec.head_dim, value, spec.dense, spec.causal)

    def __str__(self) -> str:
        value = f"/{self.v_head_dim}" if self.v_head_dim else ""
        kind = "" if not self.dense else "/dense" if self.causal else "/bidirectional"
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}{value}{kind}"


@dataclass(frozen=True)
class AttentionWork:
    """One case with a geometry and dtype, independent of the backend."""

    phase: PhaseName
    case: str
    lens: tuple[tuple[int, int], ...]
    """(query_len, kv_len) of each sequence."""
    geometry: Geometry
    spec: AttentionSpec

    @property
    def attention_phase(self) -> Phase:
        """The phase of the case: DECODE, EXTEND if any sequence has a cached context, else PREFILL."""
        if self.phase == "decode":
            return Phase.DECODE
        return Phase.EXTEND if any(kv_len > query_len for query_len, kv_len in self.lens) else Phase.PREFILL

    @property
    def num_tokens(self) -> int:
        """Number of new tokens in the step."""
        return sum(query_len for query_len, _ in self.lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the visible keys and values of all sequences, each read once for all query heads that share it."""
        window = self.spec.sliding_window
        seen = sum(kv_len if window is None else min(kv_len, window + n - 1) for n, kv_len in self.lens)
        return seen * self.spec.cache_row_bytes

    @property
    def flops(self) -> int:
        """Number of multiplications and additions in q.k and weights.v, over the keys that each query sees."""
        seen = sum(n * (kv_len - n) + n * (n + 1) // 2 for n, kv_len in self.lens)
        if not self.spec.causal:
            seen = sum(n * kv_len for n, kv_len in self.lens)
        if window := self.spec.sliding_window:  # of the keys behind a query, those at the window's size or more are not seen
            sides = 1 if self.spec.causal else 2
            hidden = [(max(0, kv_len - window), max(0, kv_len - n - window)) for n, kv_len in self.lens]
            seen -= sides * sum(last * (last + 1) // 2 - before * (before + 1) // 2 for last, before in hidden)
        return 2 * (self.spec.head_dim + self.spec.v_head_dim) * self.spec.num_heads * seen

    @property
    def write_bytes(self) -> int:
        """Number of bytes read and written for k and v of the new tokens: read in their dtype, and written in the cache's
        dtype."""
        new = replace(self.spec, kv_dtype=None, k_scale=1.0, v_scale=1.0)
        return self.num_tokens * (new.cache_row_bytes + self.spec.cache_row_bytes)


def make_work(phase: PhaseName, case: str, geometry: Geometry, spec: AttentionSpec) -> AttentionWork:
    """Parse a case for a phase.

    :raises ConfigError: if the text is not in the grammar, or its sequences do not belong to the phase.
    """
    lens = parse_case(case, VERIFY_QUERY_LEN if phase == "decode" else 1)
    wrong = [q for q, kv in lens if phase == "decode" and Phase.of(q, kv - q, VERIFY_QUERY_LEN) is not Phase.DECODE]
    wrong += [q for q, kv in lens if phase == "prefill" and Phase.of(q, kv - q) is Phase.DECODE]
    if wrong:
        needs = {
            "decode": f"sequences with a context and at most {VERIFY_QUERY_LEN} new tokens, as 8q1s1k",
            "prefill": "sequences with several new tokens or no context, as 2q512 or 1q256s1k",
        }
        raise ConfigError(f"--cases for --phase {phase}", needs[phase], repr(case))
    return AttentionWork(phase, case, tuple(lens), geometry, spec)


def make_spec(geometry: Geometry, dtype: torch.dtype, kv_dtype: torch.dtype | None, device: torch.device) -> AttentionSpec:
    """Return a plain layer with a geometry and scale 1/sqrt(head_dim). kv_dtype: dtype of the cache; None means the layer's
    dtype.

    An FP8 cache gets scales other than 1, so that a kernel that ignores the scales is detected. An int8 cache stores its own
    scales.
    """
    narrow: dict[str, Any] = {} if kv_dtype in (None, dtype) else {"kv_dtype": kv_dtype}
    if kv_dtype is not None and narrow and kv_dtype.is_floating_point:
        narrow |= {"k_scale": 0.5, "v_scale": 0.25}
    inside = geometry.num_kv_heads == 1 and 0 < geometry.v_head_dim < geometry.head_dim and not geometry.dense
    if inside and "k_scale" in narrow:
        narrow["v_scale"] = narrow["k_scale"]
    return AttentionSpec(
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.v_head_dim,
        value_in_key=inside,
        dense=geometry.dense,
        causal=geometry.causal,
        scale=geometry.head_dim**-0.5,
        dtype=dtype,
        device=device,
        **narrow,
    )


def build_case(work: AttentionWork, layout: CacheLayout, block_size: int, seed: int) -> Case:
    """Return the step of a workload with a filled cache and shuffled blocks. q, k, v and context depend only on `work` and
    `seed`."""
    case = empty_case(work, layout, block_size, seed)
    spec, metadata, cache, q, k, v = work.spec, case.metadata, case.cache, case.q, case.k, case.v
    generator = torch.Generator(spec.device)
    token = 0
    for row, (query_len, kv_len) in enumerate(work.lens):
        generator.manual_seed(seed * 1_000_003 + row)
        positions = torch.arange(kv_len, device=spec.device)
        slots = metadata.block_table[row].long()[positions // block_size] * block_size + positions % block_size
        new = slice(token, token + query_len)
        keys = _random(kv_len, spec.num_kv_heads, spec.head_dim, spec, generator)
        k[new] = _store(keys, cache, "key", slots)[kv_len - query_len :]
        if not spec.value_in_key:
            values = _random(kv_len, spec.num_kv_heads, spec.v_head_dim, spec, generator)
            v[new] = _store(values, cache, "value", slots)[kv_len - query_len :]
        q[new] = _random(query_len, spec.num_heads, spec.head_dim, spec, generator)
        token += query_len
    return case


def build_write(work: AttentionWork, layout: CacheLayout, block_size: int, seed: int) -> Case:
    """Return the step of a workload with only the new tokens and a zero cache, for a cache writer."""
    generator = torch.Generator(work.spec.device).manual_seed(seed)
    dims = work.spec.head_dim, work.spec.v_head_dim
    k, v = (_random(work.num_tokens, work.spec.num_kv_heads, dim, work.spec, generator) for dim in dims)
    return replace(empty_case(work, layout, block_size, seed), q=k[:0], k=k, v=v)


def empty_case(work: AttentionWork, layout: CacheLayout, block_size: int, seed: int, shared: bool = False) -> Case:
    """Return the step of a workload with zeros and an empty cache. shared: let all sequences use one block, to save memory."""
    spec = work.spec
    if not shared:
        check_room(work.lens, spec, block_size)
    counts = [-(-kv_len // block_size) for _, kv_len in work.lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    order = [0] * len(order) if shared else order
    tables: list[Sequence[int]] = []
    first = 0
    for count in counts:
        tables.append(order[first : first + count])
        first += count
    geometry = CacheGeometry.of(spec, 1 if shared else sum(counts), block_size)
    query_lens = [query_len for query_len, _ in work.lens]
    context_lens = [kv_len - query_len for query_len, kv_len in work.lens]
    decode_query_len = VERIFY_QUERY_LEN if work.phase == "decode" else 1
    metadata = AttentionMetadata.build(query_lens, context_lens, tables, block_size, spec.device, decode_query_len)
    q = torch.zeros((work.num_tokens, spec.num_heads, spec.head_dim), dtype=spec.dtype, device=spec.device)
    k = q.new_zeros((work.num_tokens, spec.num_kv_heads, spec.head_dim))
    v = k[..., : spec.v_head_dim] if spec.value_in_key else q.new_zeros((*k.shape[:2], spec.v_head_dim))
    return Case(spec, metadata, layout.allocate(geometry, spec.k_scale, spec.v_scale), q, k, v)


def _random(rows: int, heads: int, dim: int, spec: AttentionSpec, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, heads, dim, dtype=spec.dtype, device=spec.device, generator=generator)


def _store(rows: Tensor, cache: LayerCache, name: str, slots: Tensor) -> Tensor:
    """Write rows [n, num_kv_heads, head_dim] to `slots` of a cache's "key" or "value", and return the stored values.

    The result equals `rows` unless the cache has 8 bits. Dense prefill must then get the rounded values to agree with paged
    attention.
    """
    put(rows, cache, name, slots)
    if cache.layout.dtype_of(name, cache.geometry.dtype) == rows.dtype:
        return rows
    k, v = cache.gather(slots)
    held, scale = (k, cache.k_scale) if name == "key" else (v, cache.v_scale)
    return (held.float() * scale).to(rows.dtype)
