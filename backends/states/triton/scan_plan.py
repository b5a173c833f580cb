"""Where a prompt step's chunks, sequences and kept states lie: made on the host, uploaded at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from headway.core.contract.compiled import Packed
from headway.core.contract.state import CHECKPOINT_TOKENS, StateMetadata

CHUNK = CHECKPOINT_TOKENS
"""Tokens of a chunk: states are known at its multiples."""


@dataclass(frozen=True, slots=True)
class ChunkedPlan:
    """One step of prompts; all tensors are int32 on the device. For their fields see the kernels."""

    chunks: Tensor
    seqs: Tensor
    places: Tensor
    parts: Tensor
    num_chunks: int
    num_seqs: int
    num_places: int


def plan_scan(metadata: StateMetadata, device: torch.device) -> ChunkedPlan:
    """Plan a view of sequences that prefill or extend."""
    step = metadata.step
    query = numpy.asarray(step.query_lens, dtype=numpy.int64)
    slots = metadata.slots_cpu.numpy().astype(numpy.int64)
    live = slots >= 0
    reads = numpy.where(live & (numpy.asarray(step.kv_lens) > query), slots, -1)
    firsts = step.query_start_loc_cpu.numpy()[:-1].astype(numpy.int64)
    counts = numpy.where(live, -(-query // CHUNK), 0)
    starts = numpy.cumsum(counts) - counts
    num_chunks, num_seqs = int(counts.sum()), len(query)
    rows = numpy.repeat(numpy.arange(num_seqs), counts)
    before = (numpy.arange(num_chunks) - starts[rows]) * CHUNK
    targets = numpy.where(live, metadata.out_slots_cpu.numpy()[:, 0], -1)
    marks = numpy.zeros((0, 3), dtype=numpy.int64)
    if metadata.checkpoints_cpu is not None:
        marks = metadata.checkpoints_cpu.numpy().astype(numpy.int64)
        marks = marks[live[marks[:, 0]] & (marks[:, 2] >= 0)]
    ends = numpy.stack([numpy.arange(num_seqs), query, targets], 1)
    parts = numpy.concatenate([marks, ends])  # sequence, new tokens up to its end, slot
    parts = parts[numpy.lexsort((parts[:, 1], parts[:, 0]))]
    seq, tokens, slot = parts.T
    first_parts = numpy.searchsorted(seq, numpy.arange(num_seqs + 1))
    places = numpy.stack([firsts[seq], tokens, reads[seq], slot], 1)[slot >= 0]
    packed = Packed(chunks=4 * num_chunks, seqs=8 * num_seqs, places=4 * len(places), parts=2 * len(parts))
    packed.host("chunks").reshape(-1, 4)[:] = numpy.stack(
        [reads[rows], firsts[rows] + before, before, numpy.minimum(query[rows] - before, CHUNK)], 1
    )
    packed.host("seqs").reshape(-1, 8)[:, :7] = numpy.stack(
        [starts, counts, firsts, query, reads, first_parts[:-1], numpy.diff(first_parts)], 1
    )
    packed.host("places").reshape(-1, 4)[:] = places
    packed.host("parts").reshape(-1, 2)[:] = numpy.stack([-(-tokens // CHUNK), slot], 1)
    packed.upload(device)
    return ChunkedPlan(
        chunks=packed.device("chunks"),
        seqs=packed.device("seqs"),
        places=packed.device("places"),
        parts=packed.device("parts"),
        num_chunks=num_chunks,
        num_seqs=num_seqs,
        num_places=len(places),
    )
