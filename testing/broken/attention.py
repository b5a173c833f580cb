"""Plain attention backend, written like the definition of attention, and variants with one planted mistake each.

The conformance kit must detect every variant and name its mistake.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import HND, NHD, LayerCache
from headway.core.contract.metadata import AttentionMetadata


@dataclass
class PlainPlan:
    """Plan that stores a step's metadata. Layers read the metadata's tensors when they run, so graph replays need no update of
    the plan."""

    metadata: AttentionMetadata


class PlainBackend(AttentionBackend):
    """Backend that computes attention in float32, one sequence at a time."""

    name = "plain"
    capabilities = Capabilities(
        phases=ALL_PHASES, devices=("cpu", "cuda"), features=frozenset({"sliding_window", "softcap", "sinks"})
    )
    graph_level = GraphLevel.DECODE

    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        """Return a plan with the metadata; nothing is prepared."""
        return PlainPlan(metadata)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Compute attention for each sequence from its cached keys and values, which include this step's tokens."""
        self.decode(q, cache, plan, out)

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Compute attention for each sequence from its cached keys and values; padding rows are skipped."""
        metadata, start = plan.metadata, 0
        for number, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.seq_lens.tolist(), strict=True)):
            if kv_len:
                keys, values = self.rows(cache, metadata.block_table[number].long(), kv_len)
                tokens = slice(start, start + query_len)
                out[tokens] = self.sequence(q[tokens], keys, values, kv_len - query_len, number, metadata)
            start += query_len

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """Return the output of one sequence. q: [n, num_heads, head_dim]. keys, values: [kv_len, num_kv_heads, head_dim].
        context: number of cached tokens."""
        heads = self.kv_heads(q.device)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys[:, heads].float()) * self.scale()
        scores = self.mask(self.cap(scores), context)
        return torch.einsum("hqk,khd->qhd", self.weights(scores), values[:, heads].float()).to(q.dtype)

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values of a sequence."""
        at = torch.arange(kv_len, device=blocks.device)
        return cache.gather(blocks[at // self.block_size] * self.block_size + at % self.block_size)

    def scale(self) -> float:
        """Return the factor by which the scores are scaled."""
        return self.spec.scale

    def kv_heads(self, device: torch.device) -> Tensor:
        """Return the kv head of each query head."""
        return torch.arange(self.spec.num_heads, device=device) // self.spec.group_size

    def cap(self, scores: Tensor) -> Tensor:
        """Apply the soft-cap if the layer has one."""
        return scores if self.spec.softcap is None else self.spec.softcap * torch.tanh(scores / self.spec.softcap)

    def mask(self, scores: Tensor, context: int) -> Tensor:
        """Apply the causal mask, aligned to the last token, and the window. scores: [num_heads, n, kv_len]."""
        ago = self.ago(scores, context)
        hidden = ago < 0
        if self.spec.sliding_window is not None:
            hidden |= ago >= self.window()
        return scores.masked_fill(hidden, -torch.inf)

    def ago(self, scores: Tensor, context: int) -> Tensor:
        """Return the distance from each key to each later query in positions, [n, kv_len]."""
        n, kv_len = scores.shape[1:]
        keys = torch.arange(kv_len, device=scores.device)
        return torch.arange(context, context + n, device=scores.device)[:, None] - keys

    def window(self) -> int:
        """Return the number of keys that a query may see."""
        assert self.spec.sliding_window is not None
        return self.spec.sliding_window

    def weights(self, scores: Tensor) -> Tensor:
        """Return the softmax of the scores, with the sinks in its denominator."""
        if self.spec.sinks is None:
            return scores.softmax(-1)
        sinks = torch.tensor(self.spec.sinks, device=scores.device)[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def _writes_padding_rows(
    self: PlainBackend, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor
) -> None:
    slots = plan.metadata.slot_mapping
    blocks, places = slots // self.block_size % cache.geometry.num_blocks, slots % self.block_size
    for rows, logical in ((k, cache.logical_key), (v, cache.logical_value)):
        logical[blocks, places] = rows.reshape((len(slots), *logical.shape[2:]))
    self.decode(q, cache, plan, out)


def _with_q_scaled(self: PlainBackend, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: object = None) -> None:
    q.mul_(self.spec.scale)  # the answer is correct, but later reads of q get another value
    PlainBackend.decode(self, q, cache, plan, out)


@dataclass
class _StalePlan(PlainPlan):
    lens: list[int]


def _keep_first_lengths(self: PlainBackend, plan: _StalePlan, metadata: AttentionMetadata) -> None:
    plan.lens = plan.lens or metadata.seq_lens_cpu.tolist()


def _with_planned_lengths(
    self: PlainBackend, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: object = None
) -> None:
    if isinstance(plan, _StalePlan) and plan.lens:
        plan = PlainPlan(replace(plan.metadata, seq_lens=torch.tensor(plan.lens, dtype=torch.int32)))
    PlainBackend.decode(self, q, cache, plan, out)


def _with_noise(self: PlainBackend, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: object = None) -> None:
    PlainBackend.decode(self, q, cache, plan, out)
    out.mul_(1 + torch.finfo(out.dtype).eps * torch.randint(0, 2, out.shape, device=out.device))


@dataclass
class _PlanWithSinks(PlainPlan):
    sinks: tuple[float, ...] | None


def _with_planned_sinks(
    self: PlainBackend, q: Tensor, cache: LayerCache, plan: _PlanWithSinks, out: Tensor, lse: object = None
) -> None:
    own = self.spec
    self.spec = replace(own, sinks=plan.sinks)
    PlainBackend.decode(self, q, cache, plan, out)
    self.spec = own


def _hnd_as_nhd(self: PlainBackend, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    geometry, at = cache.geometry, torch.arange(kv_len, device=blocks.device)
    shape = (geometry.num_blocks, geometry.block_size, geometry.num_kv_heads, -1)
    block, place = blocks[at // self.block_size], at % self.block_size
    key, value = (tensor.reshape(shape)[block, place] for tensor in (cache.key, cache.value))
    return key, value


def _one_maximum(self: PlainBackend, scores: Tensor) -> Tensor:
    exponentials = (scores - scores.max()).exp()
    plain = self.spec.sinks is None
    return exponentials / exponentials.sum(-1, keepdim=True) if plain else PlainBackend.weights(self, scores)


def _over(change: Any) -> Any:
    """Return a `sequence` method that computes the output with changed arguments.

    change: function (self, q, keys, values, context, metadata) -> (q, keys, values, context).
    """

    def sequence(
        self: PlainBackend, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata
    ) -> Tensor:
        q, keys, values, context = change(self, q, keys, values, context, metadata)
        return PlainBackend.sequence(self, q, keys, values, context, number, metadata)

    return sequence


def _first_tile_of_heads(self: PlainBackend, q: Tensor) -> Tensor:
    group, heads = self.spec.group_size, torch.arange(self.spec.num_heads, device=q.device)
    return q[:, heads // group * group + heads % group % 64]


def _nan_for_the_third(
    self: PlainBackend, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata
) -> Tensor:
    out = PlainBackend.sequence(self, q, keys, values, context, number, metadata)
    return out / 0 * 0 if number == 2 else out


_MISTAKES: dict[str, dict[str, Any]] = {
    # Uses 1 / sqrt(head_dim) instead of the layer's scale.
    "wrong-scale": {"scale": lambda self: float(self.spec.head_dim**-0.5)},
    "ignores-the-context": {"sequence": _over(lambda self, q, keys, values, at, _: (q, keys[at:], values[at:], 0))},
    # A query sees the token after it.
    "causal-off-by-one": {"ago": lambda self, scores, context: PlainBackend.ago(self, scores, context) + 1},
    # The window has one key too many.
    "window-off-by-one": {"window": lambda self: PlainBackend.window(self) + 1},
    # Query heads are assigned to kv heads cyclically, as by a transposed reshape.
    "wrong-gqa-map": {"kv_heads": lambda self, device: torch.arange(self.spec.num_heads, device=device) % self.spec.num_kv_heads},
    "drops-softcap": {"cap": lambda self, scores: scores},
    "drops-sinks": {"weights": lambda self, scores: scores.softmax(-1)},
    # Decode covers whole blocks without a mask.
    "reads-past-the-end": {
        "rows": lambda self, cache, blocks, kv_len: PlainBackend.rows(
            self, cache, blocks, -(-kv_len // self.block_size) * self.block_size
        ),
        "sequence": _over(lambda self, q, keys, values, at, _: (q, keys, values, len(keys) - 1 if len(q) == 1 else at)),
    },
    # Decode writes the new token itself; slot -1 is the last slot.
    "writes-padding-rows": {"decode_writes": True, "write_and_decode": _writes_padding_rows},
    # Reads the blocks after the first instead of the block table.
    "assumes-contiguous-blocks": {
        "rows": lambda self, cache, blocks, kv_len: PlainBackend.rows(
            self, cache, (blocks[0] + torch.arange(len(blocks), device=blocks.device)) % cache.geometry.num_blocks, kv_len
        )
    },
    # Multiplies q by the scale in place.
    "changes-q": {"decode": _with_q_scaled, "scale": lambda self: 1.0},
    # A captured decode uses the lengths of the first replay.
    "stale-plan-on-replay": {
        "plan_for_capture": lambda self, metadata: _StalePlan(metadata, []),
        "plan_for_replay": _keep_first_lengths,
        "decode": _with_planned_lengths,
    },
    # Random changes of the last bit, as from sums in varying order.
    "non-deterministic": {"decode": _with_noise},
    # Divides by zero for the third sequence of a step.
    "nan-for-one-sequence": {"sequence": _nan_for_the_third},
    "claims-a-layout-it-cannot-read": {
        "capabilities": replace(PlainBackend.capabilities, layouts=(NHD, HND)),
        "rows": _hnd_as_nhd,
    },
    # Claims to share plans between layers of a kind, but a plan holds the sinks of one layer.
    "shares-its-sinks": {
        "capabilities": replace(PlainBackend.capabilities, shares_plans=True),
        "plan": lambda self, metadata: _PlanWithSinks(metadata, self.spec.sinks),
        "decode": _with_planned_sinks,
    },
    # A tile has 64 query heads per kv head, and the second tile uses the queries of the first.
    "takes-the-first-tile-of-heads": {
        "capabilities": replace(PlainBackend.capabilities, value_in_key=True, v_head_dims=((576, 512),)),
        "sequence": _over(lambda self, q, keys, values, at, _: (_first_tile_of_heads(self, q), keys, values, at)),
    },
    # The softmax uses one maximum for all heads and queries, and underflows if all scores of a row are far below it.
    "shares-a-maximum": {"weights": _one_maximum},
    # Looks up the context of a sequence by its length: that of the step's first sequence of this length.
    "takes-lengths-for-sequences": {
        "sequence": _over(
            lambda self, q, keys, values, _, metadata: (
                *(q, keys, values),
                len(keys) - metadata.query_lens[metadata.kv_lens.index(len(keys))],
            )
        )
    },
}
"""Name of a mistake -> attributes that override the plain backend's attributes."""

PLANTED: dict[str, type[AttentionBackend]] = {
    name: type(name.title().replace("-", ""), (PlainBackend,), {"name": name, "__module__": __name__, **changes})
    for name, changes in _MISTAKES.items()
}
"""Nineteen incorrect attention backends, keyed by name."""
