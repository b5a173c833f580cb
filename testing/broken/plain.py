"""A backend that reads like the definition of attention, with a method for each step that a mistake can be in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, GraphLevel
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata


@dataclass
class PlainPlan:
    """A step's metadata; its tensors are read when a layer is computed, so a captured plan needs no replay's help."""

    metadata: AttentionMetadata


class PlainBackend(AttentionBackend):
    """One sequence at a time, in float32."""

    name = "plain"
    capabilities = Capabilities(
        phases=ALL_PHASES, devices=("cpu", "cuda"), features=frozenset({"sliding_window", "softcap", "sinks"})
    )
    graph_level = GraphLevel.DECODE

    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        """Nothing to prepare."""
        return PlainPlan(metadata)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Every sequence over its cached rows, which hold this step's too."""
        self.decode(q, cache, plan, out)

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Every sequence over its cached rows; a padding row is left alone."""
        metadata, start = plan.metadata, 0
        for number, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.seq_lens.tolist(), strict=True)):
            if kv_len:
                keys, values = self.rows(cache, metadata.block_table[number].long(), kv_len)
                tokens = slice(start, start + query_len)
                out[tokens] = self.sequence(q[tokens], keys, values, kv_len - query_len, number, metadata)
            start += query_len

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """One sequence. q: [n, num_heads, head_dim]; keys, values: [kv_len, num_kv_heads, head_dim]; context: cached tokens."""
        heads = self.kv_heads(q.device)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys[:, heads].float()) * self.scale()
        scores = self.mask(self.cap(scores), context)
        return torch.einsum("hqk,khd->qhd", self.weights(scores), values[:, heads].float()).to(q.dtype)

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """Cached keys and values of a sequence."""
        at = torch.arange(kv_len, device=blocks.device)
        return cache.gather(blocks[at // self.block_size] * self.block_size + at % self.block_size)

    def scale(self) -> float:
        """What multiplies the scores."""
        return self.spec.scale

    def kv_heads(self, device: torch.device) -> Tensor:
        """The kv head of each query head."""
        return torch.arange(self.spec.num_heads, device=device) // self.spec.group_size

    def cap(self, scores: Tensor) -> Tensor:
        """The soft-cap, where the layer has one."""
        return scores if self.spec.softcap is None else self.spec.softcap * torch.tanh(scores / self.spec.softcap)

    def mask(self, scores: Tensor, context: int) -> Tensor:
        """Causal from the bottom right, and the window. scores: [num_heads, n, kv_len]."""
        ago = self.ago(scores, context)
        hidden = ago < 0
        if self.spec.sliding_window is not None:
            hidden |= ago >= self.window()
        return scores.masked_fill(hidden, -torch.inf)

    def ago(self, scores: Tensor, context: int) -> Tensor:
        """How many positions before each query a key lies: [n, kv_len]."""
        n, kv_len = scores.shape[1:]
        keys = torch.arange(kv_len, device=scores.device)
        return torch.arange(context, context + n, device=scores.device)[:, None] - keys

    def window(self) -> int:
        """Keys a query may see."""
        assert self.spec.sliding_window is not None
        return self.spec.sliding_window

    def weights(self, scores: Tensor) -> Tensor:
        """The softmax, sinks in its denominator."""
        if self.spec.sinks is None:
            return scores.softmax(-1)
        sinks = torch.tensor(self.spec.sinks, device=scores.device)[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
