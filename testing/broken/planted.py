"""Nineteen ways to get attention wrong, each a few lines beside the plain backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND, NHD, LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.testing.broken.plain import PlainBackend, PlainPlan


class WrongScale(PlainBackend):
    """Scores are scaled by 1 / sqrt(head_dim) whatever the layer says."""

    name = "wrong-scale"

    def scale(self) -> float:
        """1 / sqrt(head_dim), as most layers have it."""
        return float(self.spec.head_dim**-0.5)


class IgnoresContext(PlainBackend):
    """A sequence with cached tokens is taken for a new one."""

    name = "ignores-the-context"

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """Attention over this step's tokens alone."""
        return super().sequence(q, keys[context:], values[context:], 0, number, metadata)


class CausalOffByOne(PlainBackend):
    """A query sees the token after it."""

    name = "causal-off-by-one"

    def ago(self, scores: Tensor, context: int) -> Tensor:
        """The distance plus one."""
        return super().ago(scores, context) + 1


class WindowOffByOne(PlainBackend):
    """A window of w keys without the query itself."""

    name = "window-off-by-one"

    def window(self) -> int:
        """The window plus one."""
        return super().window() + 1


class WrongGroupMap(PlainBackend):
    """Query heads are dealt to kv heads in turn."""

    name = "wrong-gqa-map"

    def kv_heads(self, device: torch.device) -> Tensor:
        """Query heads dealt out in turn, as by a transposed reshape."""
        return torch.arange(self.spec.num_heads, device=device) % self.spec.num_kv_heads


class DropsSoftcap(PlainBackend):
    """The soft-cap is claimed and not computed."""

    name = "drops-softcap"

    def cap(self, scores: Tensor) -> Tensor:
        """The scores without the soft-cap."""
        return scores


class DropsSinks(PlainBackend):
    """Sinks are claimed and not computed."""

    name = "drops-sinks"

    def weights(self, scores: Tensor) -> Tensor:
        """A softmax without sinks."""
        return scores.softmax(-1)


class ReadsPastTheEnd(PlainBackend):
    """Decode runs over whole blocks without a mask."""

    name = "reads-past-the-end"

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """The rows of all slots of the last block."""
        return super().rows(cache, blocks, -(-kv_len // self.block_size) * self.block_size)

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """A decode attends to all of these rows."""
        return super().sequence(q, keys, values, len(keys) - 1 if len(q) == 1 else context, number, metadata)


class WritesPaddingRows(PlainBackend):
    """Decode stores the new token itself, also that of rows that are padding."""

    name = "writes-padding-rows"
    decode_writes = True

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor) -> None:
        """Store every row; slot -1 is taken for the last slot."""
        slots = plan.metadata.slot_mapping
        blocks, places = slots // self.block_size % cache.geometry.num_blocks, slots % self.block_size
        for rows, logical in ((k, cache.logical_key), (v, cache.logical_value)):
            logical[blocks, places] = rows.reshape(len(slots), *logical.shape[2:])
        self.decode(q, cache, plan, out)


class AssumesContiguousBlocks(PlainBackend):
    """The blocks of a sequence are taken to follow its first."""

    name = "assumes-contiguous-blocks"

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """The rows of the first block and of those behind it in memory."""
        following = blocks[0] + torch.arange(len(blocks), device=blocks.device)
        return super().rows(cache, following % cache.geometry.num_blocks, kv_len)


class ChangesQ(PlainBackend):
    """The scale is multiplied into q where q lies."""

    name = "changes-q"

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Scale q in place: the answer is right, and the next reader of q gets another one."""
        q.mul_(self.spec.scale)
        super().decode(q, cache, plan, out)

    def scale(self) -> float:
        """1, because q is scaled already."""
        return 1.0


@dataclass
class StalePlan(PlainPlan):
    """A plan that remembers the lengths of its first replay."""

    lens: list[int]


class StaleOnReplay(PlainBackend):
    """A captured decode keeps the lengths of the first replay."""

    name = "stale-plan-on-replay"

    def plan_for_capture(self, metadata: AttentionMetadata) -> StalePlan:
        """A plan without lengths: the first replay fills them in."""
        return StalePlan(metadata, [])

    def plan_for_replay(self, plan: StalePlan, metadata: AttentionMetadata) -> None:
        """Keep the lengths of the first replay."""
        plan.lens = plan.lens or metadata.seq_lens_cpu.tolist()

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention over the plan's lengths where it has any."""
        if isinstance(plan, StalePlan) and plan.lens:
            plan = PlainPlan(replace(plan.metadata, seq_lens=torch.tensor(plan.lens, dtype=torch.int32)))
        super().decode(q, cache, plan, out)


class NonDeterministic(PlainBackend):
    """The last bits of an answer differ from call to call."""

    name = "non-deterministic"

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Disturb the last bit at random, as sums in varying order do."""
        super().decode(q, cache, plan, out)
        out.mul_(1 + torch.finfo(out.dtype).eps * torch.randint(0, 2, out.shape, device=out.device))


class NaNForOneSequence(PlainBackend):
    """The third sequence of a step divides by zero."""

    name = "nan-for-one-sequence"

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """NaN for the third sequence, by zero over zero."""
        out = super().sequence(q, keys, values, context, number, metadata)
        return out / 0 * 0 if number == 2 else out


@dataclass
class PlanWithSinks(PlainPlan):
    """A plan that holds what is a layer's own."""

    sinks: tuple[float, ...] | None


class SharesItsSinks(PlainBackend):
    """Plans are claimed to serve all layers of a kind, and hold the sinks of the layer that made them."""

    name = "shares-its-sinks"
    capabilities = replace(PlainBackend.capabilities, shares_plans=True)

    def plan(self, metadata: AttentionMetadata) -> PlanWithSinks:
        """The layer's sinks beside the metadata."""
        return PlanWithSinks(metadata, self.spec.sinks)

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """With the plan's sinks."""
        assert isinstance(plan, PlanWithSinks)
        self._sinks = plan.sinks
        super().decode(q, cache, plan, out)

    def weights(self, scores: Tensor) -> Tensor:
        """The softmax, the plan's sinks in its denominator."""
        if self._sinks is None:
            return scores.softmax(-1)
        sinks = torch.tensor(self._sinks, device=scores.device)[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


class CannotReadItsLayout(PlainBackend):
    """The backend claims hnd and reads it as nhd."""

    name = "claims-a-layout-it-cannot-read"
    capabilities = replace(PlainBackend.capabilities, layouts=(NHD, HND))

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """The rows of an hnd cache that is reshaped as nhd."""
        geometry = cache.geometry
        shape = (geometry.num_blocks, geometry.block_size, geometry.num_kv_heads, -1)
        at = torch.arange(kv_len, device=blocks.device)
        block, place = blocks[at // self.block_size], at % self.block_size
        key, value = (tensor.reshape(shape)[block, place] for tensor in (cache.key, cache.value))
        return key, value


class TakesTheFirstTileOfHeads(PlainBackend):
    """A kernel's tile holds 64 query heads of a kv head, and a second tile takes the queries of the first."""

    name = "takes-the-first-tile-of-heads"
    capabilities = replace(PlainBackend.capabilities, value_in_key=True, v_head_dims=((576, 512),))

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """The answer of other queries from a kv head's 65th query head on."""
        group = self.spec.group_size
        heads = torch.arange(self.spec.num_heads, device=q.device)
        return super().sequence(q[:, heads // group * group + heads % group % 64], keys, values, context, number, metadata)


class SharesAMaximum(PlainBackend):
    """The softmax of all heads and queries of a sequence takes one maximum."""

    name = "shares-a-maximum"

    def weights(self, scores: Tensor) -> Tensor:
        """The softmax without sinks, which vanishes where every score is far below the maximum."""
        exponentials = (scores - scores.max()).exp()
        return exponentials / exponentials.sum(-1, keepdim=True) if self.spec.sinks is None else super().weights(scores)


class TakesLengthsForSequences(PlainBackend):
    """A plan finds what it knows of a sequence by its length."""

    name = "takes-lengths-for-sequences"

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """The context of the step's first sequence of the same length."""
        first = metadata.kv_lens.index(len(keys))
        return super().sequence(q, keys, values, len(keys) - metadata.query_lens[first], number, metadata)


PLANTED: dict[str, type[AttentionBackend]] = {
    each.name: each
    for each in (
        WrongScale,
        IgnoresContext,
        CausalOffByOne,
        WindowOffByOne,
        WrongGroupMap,
        DropsSoftcap,
        DropsSinks,
        ReadsPastTheEnd,
        WritesPaddingRows,
        AssumesContiguousBlocks,
        ChangesQ,
        StaleOnReplay,
        NonDeterministic,
        NaNForOneSequence,
        CannotReadItsLayout,
        SharesItsSinks,
        TakesTheFirstTileOfHeads,
        SharesAMaximum,
        TakesLengthsForSequences,
    )
}


def find_planted(name: str) -> type[AttentionBackend]:
    """The planted backend of a name.

    :raises ConfigError: there is none of that name.
    """
    if name not in PLANTED:
        raise ConfigError("broken:NAME", f"one of {', '.join(PLANTED)}", repr(name))
    return PLANTED[name]
