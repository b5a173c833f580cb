"""Mistakes of a first kernel, each a variant of one right kernel, and the words that the kit finds for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.testing.broken import planted
from headway.testing.broken.plain import PlainBackend, PlainPlan
from headway.testing.cells import CheckCell
from headway.testing.kit import Kit
from headway.testing.subject import load_subject

CELL = CheckCell("answer", "decode", layout="nhd", block_size=8, head_dim=32, group=2)


class IgnoresTheTable(PlainBackend):
    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        blocks = torch.arange(metadata.block_table.shape[1], dtype=torch.int32)
        return super().plan(replace(metadata, block_table=blocks.expand_as(metadata.block_table)))


class LeavesTheLastOut(PlainBackend):
    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        right = out.clone()
        super().decode(q, cache, plan, right, lse)
        out[:-1] = right[:-1]


class KeepsElevenBits(PlainBackend):
    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        super().decode(q.half().float(), cache, plan, out, lse)


class KeepsEightBits(PlainBackend):
    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        super().decode(q.bfloat16().float(), cache, plan, out, lse)


class GroupsTheOtherWay(PlainBackend):
    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        heads = q.reshape(len(q), self.spec.group_size, self.spec.num_kv_heads, -1).transpose(1, 2).flatten(1, 2)
        super().decode(heads, cache, plan, out, lse)


class ClaimsAWindow(PlainBackend):
    def window(self) -> int:
        return 1 << 20


class TakesQForOnePiece(PlainBackend):
    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        strides = (q.shape[1] * q.shape[2], q.shape[2], 1)
        super().decode(q.as_strided(q.shape, strides, q.storage_offset()), cache, plan, out, lse)


class HidesByANumber(PlainBackend):
    def mask(self, scores: Tensor, context: int) -> Tensor:
        return scores.masked_fill(super().mask(scores, context) == -torch.inf, -100.0)


class KeepsPlansByFirstBlocks(PlainBackend):
    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        key = (tuple(metadata.query_lens), tuple(metadata.kv_lens), tuple(metadata.block_table[:, 0].tolist()))
        if getattr(self, "key", None) != key:
            self.key, self.kept = key, PlainPlan(replace(metadata, block_table=metadata.block_table.clone()))
        return self.kept


class KeepsSinksByHeads(PlainBackend):
    kept: ClassVar[dict[int, tuple[float, ...]]] = {}

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.spec.sinks is not None:
            self.spec = replace(self.spec, sinks=self.kept.setdefault(self.spec.num_heads, self.spec.sinks))


class LosesHeadsBehind64(PlainBackend):
    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        super().decode(q, cache, plan, out, lse)
        out[:, 64:] = 0.0


class EndsTablesAtZero(PlainBackend):
    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        kept = blocks[blocks != 0]
        return super().rows(cache, torch.cat([kept, blocks.new_zeros(len(blocks) - len(kept))]), kv_len)


class NumbersBlocksIn16Bits(PlainBackend):
    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        return super().rows(cache, blocks % (1 << 15), kv_len)


class ForgetsTheValuesScales(PlainBackend):
    capabilities = replace(PlainBackend.capabilities, kv_dtypes=(torch.int8,))

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        ones = {name: torch.ones_like(tensor) if name == "value_scale" else tensor for name, tensor in cache.tensors.items()}
        return super().rows(cache.over(ones), blocks, kv_len)


def test_forgotten_scales_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(planted.PLANTED, "made", ForgetsTheValuesScales)
    result = Kit(load_subject("broken:made", torch.device("cpu"))).run(replace(CELL, layout="nhd_int8", feature="int8"))
    assert result.guess == "matches a cache whose values are read without their scales", result


@pytest.mark.parametrize(
    ("made", "feature", "words"),
    [
        (IgnoresTheTable, "none", "ignores the block table: matches blocks 0, 1, ..."),
        (LeavesTheLastOut, "none", "leaves rows of `out` unwritten, or parts of them: of the last sequence of the step"),
        (KeepsElevenBits, "none", "float32 rounded to 11 bits"),
        (KeepsEightBits, "none", "float32 rounded to 8 bits"),
        (GroupsTheOtherWay, "none", "query heads in the order [group, kv head]"),
        (ClaimsAWindow, "window", "matches the answer without the sliding window"),
    ],
)
def test_a_first_mistake_is_named(made: type[PlainBackend], feature: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(planted.PLANTED, "made", made)
    result = Kit(load_subject("broken:made", torch.device("cpu"))).run(replace(CELL, feature=feature))
    assert result.status == "failed"
    assert words in result.guess, result


@pytest.mark.parametrize(
    ("made", "changes", "words"),
    [
        (TakesQForOnePiece, {}, "ignores the strides of q"),
        (HidesByANumber, {"phase": "extend", "scores": "low"}, "what hides them is no -inf"),
        (KeepsPlansByFirstBlocks, {"work": "again"}, "had in a step before: a plan that is kept too long"),
        (KeepsSinksByHeads, {"check": "siblings", "feature": "sinks"}, "keeps something of one layer for another"),
        (LosesHeadsBehind64, {"phase": "verify", "kv_heads": 40}, ""),
        (EndsTablesAtZero, {"work": "again"}, ""),
        (EndsTablesAtZero, {"work": "many", "feature": "window-16", "phase": "extend"}, ""),
        (NumbersBlocksIn16Bits, {"memory": "far"}, "numbers of blocks and slots are beyond 16 bits"),
    ],
)
def test_an_input_brings_a_mistake_out(
    made: type[PlainBackend], changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(planted.PLANTED, "made", made)
    cell = replace(CELL, **changes)
    result = Kit(load_subject("broken:made", torch.device("cpu"))).run(cell)
    assert result.status == "failed"
    assert words in result.guess, result
    monkeypatch.setitem(planted.PLANTED, "made", PlainBackend)
    assert Kit(load_subject("broken:made", torch.device("cpu"))).run(cell).status == "passed"
