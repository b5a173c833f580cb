"""Whether a sequence's output has the same bits alone and beside others, for any backend."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import CacheLayout, CacheWriter
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.testing.cases import Case, make_case
from headway.testing.reference import run_backend

PROMPTS = [(17, 17), (1, 1), (40, 40), (5, 5), (33, 33), (64, 64)]
CHUNKS = [(7, 20), (16, 33), (30, 70), (2, 19)]
DECODES = [(1, kv) for kv in (2, 15, 16, 17, 49, 130, 33, 75)]
LENS = [*PROMPTS, *CHUNKS, *DECODES]
"""(query_len, kv_len): prompts without context, later chunks, decodes."""
P, C, D = (list(range(len(PROMPTS))), list(range(6, 10)), list(range(10, len(LENS))))
BATCHES = {
    "prompts": P,
    "prompts in reverse": P[::-1],
    "a prompt and a chunk": [2, 7],
    "prompts and chunks": [*C, *P],
    "decodes": D,
    "decodes in reverse": D[::-1],
    "two decodes": [D[1], D[5]],
    "64 decodes": D * 8,
    "mixed": [*P, *C, *D],
    "a prompt and decodes": [P[4], *D[2:]],
}
"""Rows of LENS that one step holds, those that decode last."""


def invariance_case(spec: AttentionSpec, layout: CacheLayout, block_size: int, writer: CacheWriter) -> Case:
    """All sequences of LENS over one filled cache, of a layer that asks to be batch invariant."""
    return make_case(LENS, dataclasses.replace(spec, batch_invariant=True), layout, block_size, writer, poison=float("nan"))


def outputs(backend: AttentionBackend, case: Case, rows: list[int]) -> list[Tensor]:
    """What each of some of a case's sequences gets, in one step of these alone."""
    starts = case.metadata.query_start_loc_cpu.tolist()
    lens = [LENS[row] for row in rows]
    tables = [case.metadata.block_table_cpu[row].tolist() for row in rows]
    metadata = AttentionMetadata.build(
        [q for q, _ in lens], [kv - q for q, kv in lens], tables, case.metadata.block_size, case.q.device
    )
    q, k, v = (torch.cat([t[starts[row] : starts[row + 1]] for row in rows]) for t in (case.q, case.k, case.v))
    out = run_backend(backend, dataclasses.replace(case, metadata=metadata, q=q, k=k, v=v))
    return list(out.split([q for q, _ in lens]))


def dependent(backend: AttentionBackend, case: Case) -> list[str]:
    """Sequences whose bits hang on their neighbours, each with the batch that shows it."""
    alone = [outputs(backend, case, [row])[0] for row in range(len(LENS))]
    assert all(bool(out.isfinite().all()) for out in alone)
    found = []
    for name, rows in BATCHES.items():
        for row, out in zip(rows, outputs(backend, case, rows), strict=True):
            if not torch.equal(out, alone[row]):
                found.append(f"{name}: {LENS[row]}")
    return found
