"""A backend's decode as an engine runs it on a GPU: captured once at the longest context, replayed at the case's lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import CacheWriter
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.oracle.cases import Case
from headway.core.speculation.proposers import is_captured
from headway.tuning.measure.contender import Contender, run_layer

_WARM_UPS = 2


def captures(backend: AttentionBackend, case: Case) -> bool:
    """Whether an engine would run this step as a graph's replay."""
    metadata = case.metadata
    if metadata.phase is not Phase.DECODE or metadata.query_start_loc.device.type != "cuda":
        return False
    longest = metadata.max_query_len
    return (longest == 1 or is_captured(metadata.num_seqs, longest)) and bool(backend.captures(longest))


def graph_contender(
    backend: AttentionBackend, case: Case, error: Callable[[Tensor], float], graph_len: int, writer: CacheWriter | None = None
) -> Contender:
    """Capture one layer's decode for sequences of up to `graph_len` tokens; a call is a replay at the case's own lengths.

    writer: as for `run_layer`.
    """
    step = case.metadata
    static = worst_case(step, max(graph_len, step.max_seq_len))
    out = case.q.new_empty((*case.q.shape[:2], case.spec.v_head_dim))
    plan = backend.plan_for_capture(static)

    def layer() -> None:
        run_layer(backend, case, plan, out, writer)

    graph = captured(layer)
    current = _loaded(static, step)
    backend.plan_for_replay(plan, current)

    def replay() -> Tensor:
        graph.replay()
        return out

    return Contender(
        call=replay,
        error=error,
        tolerance=backend.tolerance[case.spec.dtype],
        poison=lambda: out.fill_(math.nan),
        plan=lambda: backend.plan_for_replay(plan, current),
        kernel=type(backend).kernel(case.spec, Phase.DECODE),
    )


def captured(layer: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture one call in a CUDA graph, after two that warm it up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # torch.cuda.graph would collect garbage first, for longer than the capture takes
        graph.capture_begin()
        try:
            layer()
        finally:
            graph.capture_end()
    return graph


def worst_case(step: AttentionMetadata, graph_len: int) -> AttentionMetadata:
    """What an engine captures: static tensors of padding rows, in a table as wide as the longest context, and the longest lengths
    on the host."""
    rows, width = step.block_table.shape[0], -(-graph_len // step.block_size)
    return replace(
        step,
        seq_lens=torch.zeros_like(step.seq_lens),
        context_lens=torch.zeros_like(step.context_lens),
        block_table=torch.zeros((rows, width), dtype=torch.int32, device=step.block_table.device),
        slot_mapping=torch.full_like(step.slot_mapping, -1),
        block_table_cpu=torch.zeros((rows, width), dtype=torch.int32),
        seq_lens_cpu=torch.full_like(step.seq_lens_cpu, graph_len),
        max_seq_len=graph_len,
    )


def _loaded(static: AttentionMetadata, step: AttentionMetadata) -> AttentionMetadata:
    """Bring the static tensors up to date with a step, and give what an engine hands to `plan_for_replay`: those tensors, the
    step's lengths on the host, and the longest length as before."""
    columns = step.block_table.shape[1]
    static.seq_lens.copy_(step.seq_lens)
    static.context_lens.copy_(step.context_lens)
    static.slot_mapping.copy_(step.slot_mapping)
    static.block_table[:, :columns] = step.block_table
    table = torch.zeros_like(static.block_table_cpu)
    table[:, :columns] = step.block_table_cpu
    return replace(static, seq_lens_cpu=step.seq_lens_cpu, block_table_cpu=table)
