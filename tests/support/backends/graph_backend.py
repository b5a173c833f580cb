"""A backend that decodes in graphs on any device, and a stand-in for the graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from graph_stub import Tape
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.engine.execution.captured_step import DecodeGraph


class Again(Tape):
    """Stand-in for graphs on a CPU: replays a recorded step by running it again."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        """The batch sizes that were replayed, in order."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        graph: DecodeGraph = run.__self__  # type: ignore[attr-defined]

        def replay() -> None:
            if run.__name__ == "run":  # not a step's second part
                self.sizes.append(graph.size)
            run()

        return replay


class Walk(AttentionBackend):
    """Reads what a graph's kernels may: the metadata's tensors, when it runs."""

    name = "walk"
    capabilities = Capabilities(phases=frozenset(Phase), devices=("cpu",))
    graph_level = GraphLevel.DECODE

    def plan(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def decode(self, q: Tensor, cache: LayerCache, plan: AttentionMetadata, out: Tensor) -> None:
        for row, kv_len in enumerate(plan.seq_lens.tolist()):
            if kv_len == 0:
                out[row] = math.nan  # nobody reads what padding computes
                continue
            k, v = self._rows(cache, plan, row, kv_len)
            weights = (torch.einsum("hd,nhd->hn", q[row], k) * self.spec.scale).softmax(-1)
            out[row] = torch.einsum("hn,nhd->hd", weights, v)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: AttentionMetadata, out: Tensor) -> None:
        for row, (first, last) in enumerate(pairwise(plan.query_start_loc.tolist())):
            kv_len = int(plan.seq_lens[row])
            if kv_len == 0:
                out[first:last] = math.nan  # likewise
                continue
            k, v = self._rows(cache, plan, row, kv_len)
            later = torch.arange(kv_len) > torch.arange(kv_len - (last - first), kv_len)[:, None]
            scores = torch.einsum("qhd,nhd->hqn", q[first:last], k) * self.spec.scale
            out[first:last] = torch.einsum("hqn,nhd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v)

    def _rows(self, cache: LayerCache, plan: AttentionMetadata, row: int, kv_len: int) -> tuple[Tensor, Tensor]:
        """A sequence's keys and values for each query head."""
        places = torch.arange(kv_len)
        slots = plan.block_table[row, places // plan.block_size].long() * plan.block_size + places % plan.block_size
        k, v = (rows.repeat_interleave(self.spec.group_size, dim=1) for rows in cache.gather(slots))
        return k, v


class Wide(Walk):
    """Several query tokens per sequence, read from the static tensors."""

    name = "wide"
    graph_level = GraphLevel.UNIFORM

    def decode(self, q: Tensor, cache: LayerCache, plan: AttentionMetadata, out: Tensor) -> None:
        if plan.max_query_len == 1:
            super().decode(q, cache, plan, out)
        else:
            self.prefill(q, q, q, cache, plan, out)
