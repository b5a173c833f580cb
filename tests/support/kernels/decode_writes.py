"""Decode that writes its new tokens itself, checked against float64 and the cache of the layout's writer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from headway.core.contract import layout as layouts
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import CacheLayout
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, parse_case, reference, relative_error

LENGTHS = "1q1_1q1s2_1q1s15_1q1s16_1q1s17_1q1s18_1q1s47_1q1s48_1q1s49_1q1s300"
"""A single token, then contexts around the edges of blocks of 16 and 48, and one long enough for several splits."""


def new_token_case(lengths: str, layer: AttentionSpec, layout: CacheLayout, block_size: int, padding_rows: int = 2) -> Case:
    """A decode batch with one new token per sequence; q, k, v are slices of one tensor, as from a merged projection."""
    case = make_case(
        parse_case(lengths), layer, layout, block_size, layouts.write_rows, poison=math.nan, padding_rows=padding_rows
    )
    rows = case.metadata.num_seqs
    step = dataclasses.replace(
        case.metadata, num_prefills=0, num_prefill_tokens=0, num_decodes=rows, num_decode_tokens=rows
    )  # a token without a context, too
    parts = [case.q, case.k, case.v]
    q, k, v = torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1)
    return dataclasses.replace(case, metadata=step, q=q, k=k, v=v)


def write_and_decode(backend: AttentionBackend, case: Case) -> Tensor:
    """One step planned and run, into an output filled with NaN."""
    assert backend.decode_writes
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype, device=case.q.device)
    backend.write_and_decode(case.q, case.k, case.v, case.cache, backend.plan(case.metadata), out)
    return out


def error_after_writing(case: Case, run: Callable[[], Tensor], spoiled: float = math.nan) -> float:
    """Relative error of a run that finds `spoiled` in the new tokens' slots; the cache must come out with the bits it had."""
    expected, cache = reference(case), case.cache
    before = cache.key.clone(), cache.value.clone()
    slots = case.metadata.slot_mapping[case.metadata.slot_mapping >= 0]
    for logical in (cache.logical_key, cache.logical_value):
        logical[slots // cache.block_size, slots % cache.block_size] = spoiled
    error = relative_error(run(), expected, case)
    for ours, theirs in zip((cache.key, cache.value), before, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), "the cache is not what the writer leaves"
    return error
