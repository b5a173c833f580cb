"""Limits that are too narrow: of sequences, keys, heads, numbers. Each is a class beside the right one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.bench.studies.mutants.reference import TiledAttention, TiledPlan
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata

PLANTED: list[tuple[str, type[TiledAttention]]] = []
"""Kind and class of every one."""


def plant(kind: str) -> Callable[[type[TiledAttention]], type[TiledAttention]]:
    """List a class as a mistake of a kind."""

    def keep(found: type[TiledAttention]) -> type[TiledAttention]:
        PLANTED.append((kind, found))
        return found

    return keep


class _Edges(TiledAttention):
    """Lets a mistake in at one place: what a sequence's rows are, and how many sequences a step has."""

    def blocks_of(self, table: Tensor) -> Tensor:
        """The block table's row as it is read."""
        return table

    def length_of(self, kv_len: int) -> int:
        """How many keys are read."""
        return kv_len

    def rows(self, cache: LayerCache, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """Rows of the blocks and lengths that are read; zeros behind them."""
        read = self.length_of(kv_len)
        keys, values = super().rows(cache, self.blocks_of(table), read)
        missing = (kv_len - read, 1, 1)
        return torch.cat([keys, keys[:1].mul(0).repeat(missing)]), torch.cat([values, values[:1].mul(0).repeat(missing)])


def _shorter(most: int) -> type[TiledAttention]:
    class Shorter(_Edges):
        def length_of(self, kv_len: int) -> int:
            return min(kv_len, most)

    Shorter.__name__ = f"ReadsAtMost{most}Keys"
    return Shorter


for _most in (1024, 2048, 4096, 8192):
    plant("limit")(_shorter(_most))


class _FewOnly(TiledAttention):
    most: ClassVar[int]

    def _served(self, plan: TiledPlan, out: Tensor) -> None:
        if plan.metadata.num_seqs > self.most:
            out[plan.starts[self.most] :] = 0.0

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().prefill(q, k, v, cache, plan, out, lse)
        self._served(plan, out)

    def decode(self, q: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None) -> None:
        super().decode(q, cache, plan, out, lse)
        self._served(plan, out)


for _most in (16, 32, 64, 128):
    plant("limit")(type(f"ServesAtMost{_most}Sequences", (_FewOnly,), {"most": _most}))


@plant("limit")
class TablesOf128Blocks(_Edges):
    """A table is read up to its 128th column."""

    def blocks_of(self, table: Tensor) -> Tensor:
        """Column 127 for all after it."""
        return table[torch.arange(len(table)).clamp(max=127)]


@plant("limit")
class SlotsOfSixteenBits(TiledAttention):
    """A slot's number is held in 16 bits."""

    def read(self, logical: Tensor, blocks: Tensor, places: Tensor) -> Tensor:
        """The block that is left of a slot's number modulo 2**15."""
        slots = (blocks * self.block_size + places) % (1 << 15)
        return super().read(logical, slots // self.block_size, slots % self.block_size)


@plant("limit")
class BlockNumbersOfSixteenBits(TiledAttention):
    """A block's number is held in 16 bits."""

    def read(self, logical: Tensor, blocks: Tensor, places: Tensor) -> Tensor:
        """The number modulo 2**15."""
        return super().read(logical, blocks % (1 << 15), places)


@plant("limit")
class BlockZeroIsNone(_Edges):
    """A zero in the table is taken for its end."""

    def blocks_of(self, table: Tensor) -> Tensor:
        """The other blocks, then zeros."""
        kept = table[table != 0]
        return torch.cat([kept, table.new_zeros(len(table) - len(kept))])


@plant("limit")
class OffsetsOf32Bits(TiledAttention):
    """An element's offset is held in 32 bits."""

    def read(self, logical: Tensor, blocks: Tensor, places: Tensor) -> Tensor:
        """Block 0 for each whose offset does not fit."""
        fits = blocks * logical.stride(0) < 2**31 - 1
        return super().read(logical, torch.where(fits, blocks, 0), places)


class _Heads(TiledAttention):
    """Changes the keys and values that heads read."""

    def of_heads(self, rows: Tensor) -> Tensor:
        """rows: [kv_len, num_kv_heads, *]."""
        return rows

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Attend over the changed rows."""
        super().sequence(q, self.of_heads(keys), self.of_heads(values), context, out, lse)


@plant("limit")
class TwoKVHeads(_Heads):
    """Two kv heads are built in."""

    def of_heads(self, rows: Tensor) -> Tensor:
        """The first two in turn."""
        return rows[:, torch.arange(rows.shape[1]) % 2]


@plant("limit")
class KVHeadsArePowersOfTwo(_Heads):
    """Heads are padded to a power of two and found by a shift."""

    def of_heads(self, rows: Tensor) -> Tensor:
        """Heads behind the largest power of two are the last before it."""
        return rows[:, torch.arange(rows.shape[1]).clamp(max=(1 << (rows.shape[1].bit_length() - 1)) - 1)]


@plant("limit")
class MoreThan32HeadsWrap(TiledAttention):
    """A warp has a lane for each head."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Heads from the 33rd on repeat the first ones."""
        super().sequence(q, keys, values, context, out, lse)
        if q.shape[1] > 32:
            out[:, 32:] = out[:, : q.shape[1] - 32][:, : q.shape[1] - 32] if q.shape[1] <= 64 else out[:, :1]


@plant("limit")
class HeadsBehind64(TiledAttention):
    """There are 64 places for heads."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Heads from the 65th on are zero."""
        super().sequence(q, keys, values, context, out, lse)
        out[:, 64:] = 0.0


@plant("limit")
class OneQueryHeadAGroupAtMost4(TiledAttention):
    """A group has at most four query heads."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """The fifth and later heads of a group repeat the fourth."""
        super().sequence(q, keys, values, context, out, lse)
        groups = out.view(len(out), -1, self.spec.group_size, out.shape[2])
        groups[:, :, 4:] = groups[:, :, 3:4]


@plant("limit")
class ScaleOfAtMostOne(TiledAttention):
    """A scale above 1/2 is taken for a mistake and clipped."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Queries are made smaller where the scale is large."""
        super().sequence(q * min(1.0, 0.5 / self.spec.scale), keys, values, context, out, lse)


@plant("limit")
class WindowOfAtMost512(TiledAttention):
    """Wide windows are cut."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        window = self.spec.sliding_window
        self.spec = dataclasses.replace(self.spec, sliding_window=window and min(window, 512))


@plant("limit")
class WindowOfWholeBlocks(TiledAttention):
    """A window is rounded up to whole blocks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        window = self.spec.sliding_window
        rounded = window and -(-window // self.block_size) * self.block_size
        self.spec = dataclasses.replace(self.spec, sliding_window=rounded)


class _Scores(TiledAttention):
    """Changes the softmax."""

    def capped(self, scores: Tensor) -> Tensor:
        """The soft-cap, and what a mistake does to scores."""
        return self.changed(super().capped(scores))

    def changed(self, scores: Tensor) -> Tensor:
        """The scores of a tile."""
        return scores


@plant("limit")
class NoMaximum(_Scores):
    """Exponentials are taken without their maximum, held at 80."""

    def changed(self, scores: Tensor) -> Tensor:
        """Scores between -80 and 80."""
        return scores.clamp(-80.0, 80.0)


@plant("limit")
class MaximumFromZero(TiledAttention):
    """The running maximum begins at zero: scores far below it vanish."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Zeros where every score is below what exp holds."""
        super().sequence(q, keys, values, context, out, lse)
        heads = torch.arange(self.spec.num_heads) // self.spec.group_size
        best = (q.float().transpose(0, 1) @ keys[:, heads].permute(1, 2, 0) * self.spec.scale).amax(-1)
        out.mul_((best > -87.0).T[..., None])


@plant("limit")
class SumsOf16Bits(TiledAttention):
    """The softmax's denominator is kept in the layer's own type."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Sums of at most 256 or 2,048 equal weights."""
        super().sequence(q, keys, values, context, out, lse)
        most = {torch.bfloat16: 256, torch.float16: 2048}.get(q.dtype)
        if most is not None and context > most and self.spec.sliding_window is None:
            out.mul_(len(keys) / most)


@plant("limit")
class HeadSizesAreMultiplesOf16(TiledAttention):
    """What is left of a head behind the last whole 16 elements is not read."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Cut the products."""
        whole = keys.shape[2] // 16 * 16
        super().sequence(q[..., :whole], keys[..., :whole], values, context, out, lse)


@plant("limit")
class HeadSizesAreMultiplesOf8(TiledAttention):
    """What is left of a head behind the last whole 8 elements is not read."""

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """Cut the products."""
        whole = keys.shape[2] // 8 * 8
        super().sequence(q[..., :whole], keys[..., :whole], values, context, out, lse)


class _PerHead(TiledAttention):
    """Changes numbers that a layer has for each head."""

    def changed(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        """One number for each query head."""
        return numbers

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in ("sinks", "alibi_slopes"):
            numbers = getattr(self.spec, name)
            if numbers is not None:
                self.spec = dataclasses.replace(self.spec, **{name: self.changed(numbers)})  # type: ignore[arg-type]


@plant("limit")
class NumbersByKVHead(_PerHead):
    """Sinks and slopes are read by kv head."""

    def changed(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        """Give each head the number of its group."""
        return tuple(numbers[head // self.spec.group_size] for head in range(len(numbers)))


@plant("limit")
class NumbersOf16Bits(_PerHead):
    """Sinks and slopes are rounded to the layer's type, and sinks are scaled."""

    def changed(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        """Times the scale."""
        return tuple(number * self.spec.scale for number in numbers)


@plant("limit")
class SoftcapBehindTheMask(TiledAttention):
    """The soft-cap is applied after the mask, so that hidden keys count."""

    def masked(self, scores: Tensor, positions: Tensor, first: int, last: int) -> Tensor:
        """Hidden keys have minus the soft-cap."""
        masked = super().masked(scores, positions, first, last)
        cap = self.spec.softcap
        return masked if cap is None else masked.masked_fill(masked == -math.inf, -cap)


@plant("limit")
class SoftcapBeforeTheCachesScale(TiledAttention):
    """The keys' scale multiplies what the soft-cap leaves of the scores."""

    def capped(self, scores: Tensor) -> Tensor:
        """Divide before, multiply behind."""
        return super().capped(scores / self.spec.k_scale) * self.spec.k_scale


@plant("limit")
class DraftsSeeAll(TiledAttention):
    """The queries of a verification see each other."""

    def decode(self, q: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Without the causal mask."""
        masked = self.masked
        self.masked = lambda scores, positions, first, last: masked(scores, positions * 0 + positions.max(), first, last)  # type: ignore[method-assign]
        try:
            super().decode(q, cache, plan, out, lse)
        finally:
            del self.masked


@plant("limit")
class LengthOfTheSequenceBefore(TiledAttention):
    """An index is one behind."""

    def plan(self, metadata: AttentionMetadata) -> TiledPlan:
        """Lengths of the next sequence where it is longer."""
        lengths = metadata.seq_lens.roll(1).minimum(metadata.seq_lens)
        query_lens = torch.tensor(metadata.query_lens, dtype=lengths.dtype)
        return super().plan(dataclasses.replace(metadata, seq_lens=lengths.maximum(query_lens)))
