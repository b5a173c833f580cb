"""Where a prompt step's chunks, sequences and kept states lie: made on the host, uploaded at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from headway.core.contract.state import CHECKPOINT_TOKENS, StateMetadata
from headway.core.contract.transfer import Packed

CHUNK = CHECKPOINT_TOKENS
"""Tokens of a chunk: states are known at its multiples."""


@dataclass(frozen=True, slots=True)
class ChunkedPlan:
    """One step of prompts; all tensors are int32 on the device. For their fields see the kernels."""

    chunks: Tensor
    seqs: Tensor
    places: Tensor
    left: Tensor
    """[depth, num_chunks]: slots that get the state after a chunk; -1: none."""
    num_chunks: int
    num_seqs: int
    num_places: int
    depth: int


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
    at = starts[marks[:, 0]] + marks[:, 1] // CHUNK - 1
    levels = numpy.array([int((at[:i] == chunk).sum()) for i, chunk in enumerate(at)], dtype=numpy.int64)
    depth = int(levels.max()) + 1 if len(levels) else 0
    ends = numpy.flatnonzero(targets >= 0)
    places = numpy.concatenate(
        [
            numpy.stack([firsts[ends], query[ends], reads[ends], targets[ends]], 1),
            numpy.stack([firsts[marks[:, 0]], marks[:, 1], reads[marks[:, 0]], marks[:, 2]], 1),
        ]
    )
    packed = Packed(chunks=4 * num_chunks, seqs=8 * num_seqs, places=4 * len(places), left=max(depth, 1) * max(num_chunks, 1))
    packed.host("chunks").reshape(-1, 4)[:] = numpy.stack(
        [reads[rows], firsts[rows] + before, before, numpy.minimum(query[rows] - before, CHUNK)], 1
    )
    packed.host("seqs").reshape(-1, 8)[:, :6] = numpy.stack([starts, counts, firsts, query, reads, targets], 1)
    packed.host("places").reshape(-1, 4)[:] = places
    left = packed.host("left").reshape(max(depth, 1), -1)
    left.fill(-1)
    left[levels, at] = marks[:, 2]
    packed.upload(device)
    names = ("chunks", "seqs", "places", "left")
    return ChunkedPlan(*map(packed.device, names), num_chunks, num_seqs, len(places), depth)
