"""Mistakes of a first kernel, each a variant of one right kernel: the kit finds them, and has words for the usual ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.core.oracle.cells import CheckCell
from headway.testing.broken import attention as planted
from headway.testing.broken.attention import PlainBackend, PlainPlan
from headway.testing.kit.kit import Kit
from headway.testing.kit.subject import load_subject

CELL = CheckCell("answer", "decode", layout="nhd", block_size=8, head_dim=32, group=2)


class IgnoresTheTable(PlainBackend):
    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        blocks = torch.arange(metadata.block_table.shape[1], dtype=torch.int32)
        return super().plan(replace(metadata, block_table=blocks.expand_as(metadata.block_table)))


class SortsTheTable(PlainBackend):
    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        used = blocks[: -(-kv_len // self.block_size)]
        return super().rows(cache, used.sort().values, kv_len)


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


class TakesEachSequencesQForOnePiece(PlainBackend):
    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata) -> Tensor:
        strides = (q.shape[1] * q.shape[2], q.shape[2], 1)
        whole = q.as_strided(q.shape, strides, q.storage_offset())
        return super().sequence(whole, keys, values, context, number, metadata)


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


MANY_LATENT = {"layout": "latent", "feature": "latent", "head_dim": 576, "group": 128, "dtype": "bfloat16", "work": "few"}


class LosesHeadsBehind64(PlainBackend):
    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        super().decode(q, cache, plan, out, lse)
        out[:, 64:] = 0.0


class HidesAKeyFromHeadsBehind64(PlainBackend):
    capabilities = replace(PlainBackend.capabilities, value_in_key=True, v_head_dims=((576, 512),))

    def mask(self, scores: Tensor, context: int) -> Tensor:
        masked = super().mask(scores, context)
        masked[torch.arange(self.spec.num_heads) % self.spec.group_size >= 64, :, 0] = -torch.inf
        return masked


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("made", "feature", "words"),
    [
        (IgnoresTheTable, "none", "ignores the block table: matches blocks 0, 1, ..."),
        (SortsTheTable, "none", "ignores the order of the block table: matches its blocks sorted"),
        (LeavesTheLastOut, "none", "of some sequences; wrong in exactly the last sequence of the step"),
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


def assert_guessed(made: type[PlainBackend], changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend fails a cell that differs from CELL so, and its guess holds these words."""
    monkeypatch.setitem(planted.PLANTED, "made", made)
    result = Kit(load_subject("broken:made", torch.device("cpu"))).run(replace(CELL, **changes))
    assert result.status == "failed"
    assert words in result.guess, result


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("made", "changes", "words"),
    [
        (TakesQForOnePiece, {}, ""),
        (TakesEachSequencesQForOnePiece, {"phase": "extend"}, ""),
        (HidesByANumber, {"phase": "extend", "scores": "low"}, ""),
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


class HidesByWholeTiles(PlainBackend):
    def mask(self, scores: Tensor, context: int) -> Tensor:
        keys = torch.arange(scores.shape[2])
        whole = (keys // 32 + 1) * 32 < scores.shape[2]
        return scores.masked_fill((self.ago(scores, context) < 0) & ~whole, -torch.inf)


class RoundsTheWindowUp(PlainBackend):
    def mask(self, scores: Tensor, context: int) -> Tensor:
        begin = max(context - self.window() + 1, 0)
        early = torch.arange(scores.shape[2]) < -(-begin // 16) * 16
        return super().mask(scores, context).masked_fill(early, -torch.inf)


class ReadsTheTableByItsOwnWidth(PlainBackend):
    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        width = -(-metadata.max_seq_len // metadata.block_size)
        table = metadata.block_table.flatten()[: metadata.num_seqs * width].view(-1, width)
        return super().plan(replace(metadata, block_table=table))


class ReadsKvHeadsInPairs(PlainBackend):
    def kv_heads(self, device: torch.device) -> Tensor:
        return super().kv_heads(device) // 2 * 2


class CountsSinksTwice(PlainBackend):
    def weights(self, scores: Tensor) -> Tensor:
        assert self.spec.sinks is not None
        sinks = torch.tensor(self.spec.sinks)[:, None, None].expand(-1, scores.shape[1], 2)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-2]


class RoundsScores(PlainBackend):
    def cap(self, scores: Tensor) -> Tensor:
        return scores.bfloat16().float()


class CountsFromWholeBlocks(PlainBackend):
    def mask(self, scores: Tensor, context: int) -> Tensor:
        return super().mask(scores, context // self.block_size * self.block_size)


class RepeatsElements(PlainBackend):
    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        keys, values = super().rows(cache, blocks, kv_len)
        return keys, torch.cat([values[..., :16], values[..., :16]], -1)


class TakesSingleKeysAsTheyAre(PlainBackend):
    def weights(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores) if scores.shape[2] == 1 else super().weights(scores)


class KeepsTheFirstKernelsHeads(PlainBackend):
    """Kept by the number of tokens alone: which sequence each of them is of."""

    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        kept = self.__dict__.setdefault("kept", {})
        key = metadata.num_seqs, metadata.num_tokens
        return PlainPlan(replace(metadata, block_table=kept.setdefault(key, metadata.block_table.clone())))


class SharesABuffer(PlainBackend):
    """Prompts and decodes are planned into one buffer."""

    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        table = self.__dict__.setdefault("table", torch.zeros(512, 512, dtype=torch.int32))
        rows, columns = metadata.block_table.shape
        table[:rows, :columns] = metadata.block_table
        return PlainPlan(replace(metadata, block_table=table))


class HasRoomFor64(PlainBackend):
    def plan(self, metadata: AttentionMetadata) -> PlainPlan:
        starts = torch.zeros(64, dtype=torch.int32)
        starts[: metadata.num_seqs] = metadata.seq_lens
        return super().plan(metadata)


class AddsToOut(PlainBackend):
    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        right = torch.zeros_like(out)
        super().decode(q, cache, plan, right, lse)
        out += right


class DoublesWithOneKvHead(PlainBackend):
    def scale(self) -> float:
        return super().scale() * (2.0 if self.spec.num_kv_heads == 1 else 1.0)


class GoesWrongBehind40Tokens(PlainBackend):
    def cap(self, scores: Tensor) -> Tensor:
        return scores * 1.5 if scores.shape[2] > 40 else scores


class RoundsTwiceOnWriting(PlainBackend):
    capabilities = replace(PlainBackend.capabilities, kv_dtypes=(torch.float8_e4m3fn,))
    decode_writes = True

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        return super().sequence(q, keys.float() * self.spec.k_scale, values.float() * self.spec.v_scale, *rest)

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Any, out: Tensor) -> None:
        for rows, scale, stored in ((k, cache.k_scale, cache.by_slot("key")), (v, cache.v_scale, cache.by_slot("value"))):
            at = plan.metadata.slot_mapping
            most = torch.finfo(stored.dtype).max
            fitting = (rows / scale).clamp(-most, most).to(stored.dtype)
            for number, slot in enumerate(at.tolist()):
                if slot >= 0:
                    stored[slot // self.block_size, slot % self.block_size] = fitting[number]
        self.decode(q, cache, plan, out)


class ScalesOnceMore(PlainBackend):
    def scale(self) -> float:
        return super().scale() * self.spec.head_dim**-0.5


class ReadsValuesOneLate(PlainBackend):
    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        keys, values = super().rows(cache, blocks, kv_len)
        return keys, torch.cat([values[:1], values[:-1]])


class SeesWholeBlocks(PlainBackend):
    def mask(self, scores: Tensor, context: int) -> Tensor:
        ago = self.ago(scores, context)
        first = (torch.arange(context, context + len(ago)) - self.window() + 1).clamp(min=0) // 8 * 8
        return scores.masked_fill((ago < 0) | (torch.arange(scores.shape[2]) < first[:, None]), -torch.inf)


class BendsScores(PlainBackend):
    def cap(self, scores: Tensor) -> Tensor:
        return scores + 0.1 * scores**3


class LosesElements(PlainBackend):
    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        keys, values = super().rows(cache, blocks, kv_len)
        return keys, torch.cat([values[..., :24], torch.zeros_like(values[..., 24:])], -1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (ScalesOnceMore, {}),
        (ReadsValuesOneLate, {}),
        (SeesWholeBlocks, {"feature": "window-16", "phase": "extend"}),
        (BendsScores, {}),
        (HidesByWholeTiles, {"phase": "extend"}),
        (RoundsTheWindowUp, {"phase": "extend", "feature": "window"}),
        (ReadsTheTableByItsOwnWidth, {"phase": "mixed"}),
        (ReadsKvHeadsInPairs, {"kv_heads": 3}),
        (CountsSinksTwice, {"feature": "sinks"}),
        (RoundsScores, {"dtype": "bfloat16", "scores": "high"}),
        (CountsFromWholeBlocks, {"phase": "extend"}),
        (RepeatsElements, {}),
        (RoundsTwiceOnWriting, {"feature": "fp8", "dtype": "bfloat16"}),
        (KeepsTheFirstKernelsHeads, {"work": "again"}),
        (SharesABuffer, {"phase": "mixed", "feature": "window-1"}),
        (HasRoomFor64, {"work": "many"}),
        (AddsToOut, {}),
        (DoublesWithOneKvHead, {"kv_heads": 1, "group": 4}),
    ],
)
def test_an_unnamed_mistake_is_found(made: type[PlainBackend], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_guessed(made, changes, "", monkeypatch)


@pytest.mark.parametrize(
    ("made", "changes", "words"),
    [
        (LosesElements, {}, "wrong in elements 24 to 31 alone, of 32"),
        (HidesAKeyFromHeadsBehind64, MANY_LATENT, "wrong in heads 64 to 127 alone, of 128"),
        (HidesAKeyFromHeadsBehind64, {"group": 71, "kv_heads": 1}, "wrong in heads 64 to 70 alone, of 71"),
        (HidesAKeyFromHeadsBehind64, {"group": 71, "kv_heads": 2}, "wrong in heads 64 to 70, 135 to 141 alone, of 142"),
        (HidesAKeyFromHeadsBehind64, {"group": 71, "kv_heads": 1, "feature": "sinks"}, "wrong in heads 64 to 70 alone, of 71"),
        (GoesWrongBehind40Tokens, {}, "wrong in exactly those of more than 38 tokens"),
    ],
)
def test_the_place_of_a_mistake_is_said(
    made: type[PlainBackend], changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_guessed(made, changes, words, monkeypatch)


class GivesLogSumsFarOff(PlainBackend):
    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        super().decode(q, cache, plan, out, lse)
        if lse is not None:
            lse.copy_(torch.linspace(400, 500, lse.numel()).view_as(lse))


def test_log_sums_that_are_far_off_fail_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums themselves are then more than a whole number of 64 bits holds."""
    monkeypatch.setitem(planted.PLANTED, "made", GivesLogSumsFarOff)
    result = Kit(load_subject("broken:made", torch.device("cpu"))).run(replace(CELL, check="lse"))
    assert result.reason.startswith("lse of sequence"), result


class GivesLogSums(PlainBackend):
    """The right answer with log-sum-exps of a function of the scores, before and after the soft-cap and the mask."""

    of = staticmethod(lambda plain, capped, seen: capped.logsumexp(-1))
    lse: Tensor
    at: int

    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        assert lse is not None
        self.lse, self.at = lse, 0
        super().decode(q, cache, plan, out)

    def cap(self, scores: Tensor) -> Tensor:
        self.plain = scores
        return super().cap(scores)

    def mask(self, scores: Tensor, context: int) -> Tensor:
        masked = super().mask(scores, context)
        plain = self.plain.masked_fill(masked == -torch.inf, -torch.inf)
        self.lse[:, self.at : self.at + scores.shape[1]] = self.of(plain, masked, self.spec.scale)
        self.at += scores.shape[1]
        return masked


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        (lambda plain, capped, scale: capped.logsumexp(-1) / math.log(2), {}),
        (lambda plain, capped, scale: (plain / scale).logsumexp(-1), {}),
        (lambda plain, capped, scale: plain.logsumexp(-1), {"feature": "softcap"}),
        (lambda plain, capped, scale: capped.logsumexp(-1) - capped.amax(-1), {}),
        (lambda plain, capped, scale: capped.logsumexp(-1), {"feature": "sinks"}),
    ],
)
def test_a_mistake_in_log_sums_is_found(of: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(planted.PLANTED, "made", type("Made", (GivesLogSums,), {"of": staticmethod(of)}))
    result = Kit(load_subject("broken:made", torch.device("cpu"))).run(replace(CELL, check="lse", **changes))
    assert result.reason.startswith("lse of sequence"), result


def test_what_only_the_wrong_sequences_have_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_guessed(
        TakesSingleKeysAsTheyAre,
        {"phase": "prefill", "feature": "sinks"},
        "wrong in exactly those of a single token",
        monkeypatch,
    )


_KEEPS_MASKS = """
import torch
from headway.testing.broken.attention import PlainBackend

class Mine(PlainBackend):
    name = "keeps_masks"
    kept = {}

    def mask(self, scores, context):
        key = scores.shape[1:], context
        if key not in self.kept:
            self.kept[key] = super().mask(torch.zeros_like(scores[:1]), context)
        return scores + self.kept[key]
"""


def test_what_a_class_keeps_of_another_layer_is_found(tmp_path: Path) -> None:
    (tmp_path / "keeps_masks.py").write_text(_KEEPS_MASKS)
    kit = Kit(load_subject(f"{tmp_path / 'keeps_masks.py'}:Mine", torch.device("cpu")))
    assert kit.run(CELL).status == "passed"
    assert kit.run(replace(CELL, feature="window")).status == "failed"
