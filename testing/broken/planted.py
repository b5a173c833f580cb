"""Fifteen ways to get attention wrong, each a few lines beside the plain backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import HND, NHD, LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.testing.broken.plain import Plain, PlainPlan


class WrongScale(Plain):
    """Scores are scaled by 1 / sqrt(head_dim) whatever the layer says."""

    name = "wrong-scale"

    def scale(self) -> float:
        """What everybody assumes."""
        return float(self.spec.head_dim**-0.5)


class IgnoresContext(Plain):
    """A sequence with cached tokens is taken for a new one."""

    name = "ignores-the-context"

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """Over this step's tokens alone."""
        return super().sequence(q, keys[context:], values[context:], 0, number, metadata)


class CausalOffByOne(Plain):
    """A query sees the token after it."""

    name = "causal-off-by-one"

    def ago(self, scores: Tensor, context: int) -> Tensor:
        """One too many."""
        return super().ago(scores, context) + 1


class WindowOffByOne(Plain):
    """A window of w keys without the query itself."""

    name = "window-off-by-one"

    def window(self) -> int:
        """One too many."""
        return super().window() + 1


class WrongGroupMap(Plain):
    """Query heads are dealt to kv heads in turn."""

    name = "wrong-gqa-map"

    def kv_heads(self, device: torch.device) -> Tensor:
        """As in a transposed reshape."""
        return torch.arange(self.spec.num_heads, device=device) % self.spec.num_kv_heads


class DropsSoftcap(Plain):
    """The soft-cap is claimed and not computed."""

    name = "drops-softcap"

    def cap(self, scores: Tensor) -> Tensor:
        """Left out."""
        return scores


class DropsSinks(Plain):
    """Sinks are claimed and not computed."""

    name = "drops-sinks"

    def weights(self, scores: Tensor) -> Tensor:
        """A plain softmax."""
        return scores.softmax(-1)


class ReadsPastTheEnd(Plain):
    """Decode runs over whole blocks without a mask."""

    name = "reads-past-the-end"

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """All slots of the last block."""
        return super().rows(cache, blocks, -(-kv_len // self.block_size) * self.block_size)

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """A decode sees them all."""
        return super().sequence(q, keys, values, len(keys) - 1 if len(q) == 1 else context, number, metadata)


class WritesPaddingRows(Plain):
    """Decode stores the new token itself, also that of rows that are padding."""

    name = "writes-padding-rows"
    decode_writes = True

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor) -> None:
        """Slot -1 is taken for the last one."""
        slots = plan.metadata.slot_mapping
        blocks, places = slots // self.block_size % cache.geometry.num_blocks, slots % self.block_size
        for rows, logical in ((k, cache.logical_key), (v, cache.logical_value)):
            logical[blocks, places] = rows.reshape(len(slots), *logical.shape[2:])
        self.decode(q, cache, plan, out)


class AssumesContiguousBlocks(Plain):
    """The blocks of a sequence are taken to follow its first."""

    name = "assumes-contiguous-blocks"

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """First block, and those behind it in memory."""
        following = blocks[0] + torch.arange(len(blocks), device=blocks.device)
        return super().rows(cache, following % cache.geometry.num_blocks, kv_len)


class ChangesQ(Plain):
    """The scale is multiplied into q where q lies."""

    name = "changes-q"

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Right answers, and a q that the next reader will not know."""
        q.mul_(self.spec.scale)
        super().decode(q, cache, plan, out)

    def scale(self) -> float:
        """Done already."""
        return 1.0


@dataclass
class StalePlan(PlainPlan):
    """With the lengths that the step had when it was planned."""

    lens: list[int]


class StaleOnReplay(Plain):
    """A captured decode keeps the lengths of the first replay."""

    name = "stale-plan-on-replay"

    def plan_for_capture(self, metadata: AttentionMetadata) -> StalePlan:
        """Lengths are asked for at the first replay."""
        return StalePlan(metadata, [])

    def plan_for_replay(self, plan: StalePlan, metadata: AttentionMetadata) -> None:
        """Only the first is believed."""
        plan.lens = plan.lens or metadata.seq_lens_cpu.tolist()

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """By the plan's lengths where it has any."""
        if isinstance(plan, StalePlan) and plan.lens:
            plan = PlainPlan(replace(plan.metadata, seq_lens=torch.tensor(plan.lens, dtype=torch.int32)))
        super().decode(q, cache, plan, out)


class NonDeterministic(Plain):
    """The last bits are another each time."""

    name = "non-deterministic"

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """As sums in an order that the scheduler chooses."""
        super().decode(q, cache, plan, out)
        out.mul_(1 + torch.finfo(out.dtype).eps * torch.randint(0, 2, out.shape, device=out.device))


class NaNForOneSequence(Plain):
    """The third sequence of a step divides by zero."""

    name = "nan-for-one-sequence"

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        """Zero over zero."""
        out = super().sequence(q, keys, values, context, number, metadata)
        return out / 0 * 0 if number == 2 else out


class CannotReadItsLayout(Plain):
    """Claims hnd and reads it as nhd."""

    name = "claims-a-layout-it-cannot-read"
    capabilities = replace(Plain.capabilities, layouts=(NHD, HND))

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """Shapes do not say which axis is which."""
        geometry = cache.geometry
        shape = (geometry.num_blocks, geometry.block_size, geometry.num_kv_heads, -1)
        at = torch.arange(kv_len, device=blocks.device)
        block, place = blocks[at // self.block_size], at % self.block_size
        key, value = (tensor.reshape(shape)[block, place] for tensor in (cache.key, cache.value))
        return key, value


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
    )
}
