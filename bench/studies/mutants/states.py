"""State that is kept too long, memory that is not what it is taken for, and a contract not kept: a class for each mistake."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.bench.studies.mutants.limits import PLANTED, plant
from headway.bench.studies.mutants.reference import TiledAttention, TiledPlan
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata


@plant("layout")
class ValuesAsLongAsKeys(TiledAttention):
    """A value has as many elements as a key."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Elements behind the key's size are zero."""
        values = values.clone()
        values[..., keys.shape[2] :] = 0.0
        super().sequence(q, keys, values, context, out, lse)


@plant("layout")
class KAndVInOnePiece(TiledAttention):
    """A prompt's k and v are read as tensors of their own."""

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Ignore the strides of v."""
        shape = v.shape
        strides = (shape[1] * shape[2], shape[2], 1)
        super().prefill(q, k, v.as_strided(shape, strides), cache, plan, out, lse)


@plant("layout")
class QInOnePiece(TiledAttention):
    """q is read as a tensor of its own."""

    def decode(self, q: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Ignore the strides of q."""
        super().decode(q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1)), cache, plan, out, lse)


@plant("layout")
class BlocksInOnePiece(TiledAttention):
    """The cache is read as if blocks followed each other."""

    def read(self, logical: Tensor, blocks: Tensor, places: Tensor) -> Tensor:
        """Ignore the stride of blocks: the product of a block's sizes."""
        packed = math.prod(logical.shape[1:])
        at = blocks * packed * (logical.stride(0) // packed if logical.stride(0) % packed else 1)
        nearest = (at // logical.stride(0)).clamp(max=logical.shape[0] - 1)
        return super().read(logical, nearest, places)


@plant("layout")
class TablesInOnePiece(TiledAttention):
    """A block table's rows are taken to follow each other."""

    def plan(self, metadata: AttentionMetadata) -> TiledPlan:
        """Ignore the stride of the table's rows."""
        table = metadata.block_table
        table = table.as_strided(table.shape, (table.shape[1], 1))
        return super().plan(dataclasses.replace(metadata, block_table=table.clamp(min=0)))


class _Plans(TiledAttention):
    """Keeps plans by a key."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._plans: dict[object, TiledPlan] = {}

    @abstractmethod
    def key(self, metadata: AttentionMetadata) -> object:
        """What a plan is found by."""

    def plan(self, metadata: AttentionMetadata) -> TiledPlan:
        """The plan that was made first for a key."""
        return self._plans.setdefault(self.key(metadata), super().plan(metadata))


@plant("state")
class PlansByLengths(_Plans):
    """A plan is kept by the step's lengths."""

    def key(self, metadata: AttentionMetadata) -> object:
        """Query and kv lengths."""
        return tuple(metadata.query_lens), tuple(metadata.kv_lens)


@plant("state")
class PlansByNumberOfSequences(_Plans):
    """A decode's plan is kept by its number of sequences."""

    def key(self, metadata: AttentionMetadata) -> object:
        """How many sequences and tokens."""
        return metadata.num_seqs, metadata.num_tokens, metadata.phase


@plant("state")
class PlansByFirstBlocks(_Plans):
    """A plan is kept by the step's lengths and each sequence's first block, which two requests may share."""

    def key(self, metadata: AttentionMetadata) -> object:
        """Lengths and the table's first column."""
        return tuple(metadata.query_lens), tuple(metadata.kv_lens), tuple(metadata.block_table[:, 0].tolist())


@plant("state")
class CountsSteps(TiledAttention):
    """A ring of buffers ends after 700 steps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._steps = 0

    def plan(self, metadata: AttentionMetadata) -> TiledPlan:
        """The 700th plan and later ones have no first sequence."""
        self._steps += 1
        plan = super().plan(metadata)
        return plan if self._steps < 700 else TiledPlan(metadata, [start and 0 for start in plan.starts])


@plant("state")
class KeepsRows(TiledAttention):
    """Gathered rows are kept by a sequence's blocks and length."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rows: dict[object, tuple[Tensor, Tensor]] = {}

    def rows(self, cache: LayerCache, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """What the blocks held when they were first read."""
        key = id(cache), tuple(table[: -(-kv_len // self.block_size)].tolist()), kv_len
        if key not in self._rows:
            self._rows[key] = super().rows(cache, table, kv_len)
        return self._rows[key]


@plant("state")
class SinksOfTheFirstLayer(TiledAttention):
    """The scale is kept by the class: that of the first layer that was made."""

    scales: ClassVar[dict[int, float]] = {}

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        scale = self.scales.setdefault(self.spec.head_dim, self.spec.scale)
        self.spec = dataclasses.replace(self.spec, scale=scale)


@plant("state")
class NumbersOfAnotherLayer(TiledAttention):
    """Sinks and slopes are kept by the class for each number of heads."""

    kept: ClassVar[dict[tuple[str, int], tuple[float, ...]]] = {}

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in ("sinks", "alibi_slopes"):
            numbers = getattr(self.spec, name)
            if numbers is not None:
                first = self.kept.setdefault((name, len(numbers)), numbers)
                self.spec = dataclasses.replace(self.spec, **{name: first})  # type: ignore[arg-type]


@plant("state")
class LeaksTensors(TiledAttention):
    """Every step's lengths are kept."""

    kept: ClassVar[list[Tensor]] = []

    def plan(self, metadata: AttentionMetadata) -> TiledPlan:
        """Keep a copy."""
        self.kept.append(metadata.seq_lens.repeat(64))
        return super().plan(metadata)


@plant("state")
class LeaksNativeMemory(TiledAttention):
    """Every step allocates 16 KiB that nobody frees."""

    def plan(self, metadata: AttentionMetadata) -> TiledPlan:
        """malloc without free."""
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc(16384)
        return super().plan(metadata)


@plant("state")
class LengthsOfTheCapture(TiledAttention):
    """A captured plan keeps the lengths of the capture."""

    def plan_for_capture(self, metadata: AttentionMetadata) -> TiledPlan:
        """Copy the lengths."""
        return super().plan(dataclasses.replace(metadata, seq_lens=metadata.seq_lens.clone()))


@plant("state")
class TableOfTheCapture(TiledAttention):
    """A captured plan keeps the block table of the capture."""

    def plan_for_capture(self, metadata: AttentionMetadata) -> TiledPlan:
        """Copy the table."""
        return super().plan(dataclasses.replace(metadata, block_table=metadata.block_table.clone()))


@plant("protocol")
class ScalesQ(TiledAttention):
    """q is scaled where it lies, and back."""

    def decode(self, q: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Multiply and divide by three: the last bits change."""
        q.mul_(3.0)
        q.div_(3.0)
        super().decode(q, cache, plan, out, lse)


@plant("protocol")
class WritesThePadding(TiledAttention):
    """A row of length 0 gets numbers."""

    def decode(self, q: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Fill all, then attend."""
        out.fill_(1.0)
        super().decode(q, cache, plan, out, lse)


@plant("protocol")
class AddsToTheOutput(TiledAttention):
    """The result is added to what the output holds."""

    def decode(self, q: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Add to what a zeroed buffer would hold."""
        before = out.clone()
        super().decode(q, cache, plan, out, lse)
        out.add_(before)


@plant("protocol")
class LogSumWithoutSinks(TiledAttention):
    """The sinks are left out of lse."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Take exp(sink) out of the sum."""
        super().sequence(q, keys, values, context, out, lse)
        if lse is not None and self.spec.sinks is not None:
            lse.copy_((lse.exp() - torch.tensor(self.spec.sinks)[:, None].exp()).log())


@plant("protocol")
class LogSumOf16Bits(TiledAttention):
    """lse is rounded to the layer's type."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Round."""
        super().sequence(q, keys, values, context, out, lse)
        if lse is not None:
            lse.copy_(lse.to(q.dtype))


@plant("protocol")
class ClaimsInt8(TiledAttention):
    """A cache type is claimed that none of the claimed layouts holds."""

    capabilities = dataclasses.replace(TiledAttention.capabilities, kv_dtypes=(torch.float8_e4m3fn, torch.int8))


@plant("protocol")
class TakesAnyOption(TiledAttention):
    """Unknown options are ignored."""

    @classmethod
    def check_options(cls, options: Any) -> None:
        """Check nothing."""


@plant("protocol")
class WantsAGradient(TiledAttention):
    """The weights are asked for a gradient, which inference mode has not."""

    def decode(self, q: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """requires_grad_ on a tensor that was made under inference mode."""
        q.detach().requires_grad_(True)
        super().decode(q, cache, plan, out, lse)


def planted() -> Iterator[tuple[str, str, type[TiledAttention]]]:
    """Kind, name and class of each."""
    for kind, found in PLANTED:
        yield kind, found.__name__, found
