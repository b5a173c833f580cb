"""A sequence's output has the same bits alone and beside others, where a backend says so."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import CacheLayout, CacheWriter
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, run_backend
from headway.core.oracle.cells import CheckCell, Finding
from headway.testing.kit.stage import Stage


def invariant(stage: Stage, cell: CheckCell) -> str:
    """Every sequence of some steps has the bits that it has alone."""
    subject = stage.subject
    case = invariance_case(
        stage.claimed.spec(cell), subject.layouts[cell.layout], cell.block_size, subject.writer(cell.layout), stage.poison
    )
    found = dependent(subject.make(case.spec, cell.layout, cell.block_size), case)
    if found:
        raise Finding(
            f"batch_invariant: a sequence's bits must not depend on its neighbours; {len(found)} do, such as {found[0]} "
            "(batch: (query_len, kv_len))",
            guess="not batch invariant",
        )
    return ""


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


def invariance_case(
    spec: AttentionSpec, layout: CacheLayout, block_size: int, writer: CacheWriter, poison: float = float("nan")
) -> Case:
    """All sequences of LENS over one filled cache, of a layer that asks to be batch invariant."""
    return make_case(LENS, dataclasses.replace(spec, batch_invariant=True), layout, block_size, writer, poison=poison)


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
    return list(out.split([q for q, _ in lens]))  # type: ignore[no-untyped-call]


def dependent(backend: AttentionBackend, case: Case) -> list[str]:
    """Sequences whose bits depend on their neighbours, each with the batch that shows it; of the phases the backend claims."""
    served = {row for row, (query_len, kv_len) in enumerate(LENS) if Phase.of(query_len, kv_len - query_len) in _phases(backend)}
    alone = {row: outputs(backend, case, [row])[0] for row in sorted(served)}
    assert all(bool(out.isfinite().all()) for out in alone.values())
    found = []
    for name, batch in BATCHES.items():
        rows = [row for row in batch if row in served]
        for row, out in zip(rows, outputs(backend, case, rows) if rows else [], strict=True):
            if not torch.equal(out, alone[row]):
                found.append(f"{name}: {LENS[row]}")
    return found


def _phases(backend: AttentionBackend) -> frozenset[Phase]:
    return backend.capabilities.phases
