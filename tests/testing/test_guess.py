"""Mistakes of a first kernel, each a variant of one right kernel, and the words that the kit finds for them."""

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
from headway.testing.broken import planted
from headway.testing.broken.plain import PlainBackend, PlainPlan
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
        (TakesQForOnePiece, {}, "ignores the strides of q"),
        (TakesEachSequencesQForOnePiece, {"phase": "extend"}, "ignores the strides of each sequence's q"),
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
    ("made", "changes", "words"),
    [
        (ScalesOnceMore, {}, "scores are multiplied by 0.177, which is 1/sqrt(head_dim)"),
        (ReadsValuesOneLate, {}, "each key's weight goes to the value one before it"),
        (
            SeesWholeBlocks,
            {"feature": "window-16", "phase": "extend"},
            "keys up to 7 before the window are seen",
        ),
        (BendsScores, {}, "they are another function of the scores"),
        (LosesElements, {}, "wrong in elements 24 to 31 alone, of 32: they hold zeros"),
        (
            HidesByWholeTiles,
            {"phase": "extend"},
            "no causal mask in tiles of 16 or 32 keys that end before",
        ),
        (RoundsTheWindowUp, {"phase": "extend", "feature": "window"}, "a window whose begin is rounded up to whole tiles of 16"),
        (ReadsTheTableByItsOwnWidth, {"phase": "mixed"}, "a block table whose rows are as wide as its part's longest"),
        (ReadsKvHeadsInPairs, {"kv_heads": 3}, "query heads 2 to 3 read 0"),
        (CountsSinksTwice, {"feature": "sinks"}, "counts the sink more than once: 1 more"),
        (RoundsScores, {"dtype": "bfloat16", "scores": "high"}, "scores that are rounded to bfloat16"),
        (CountsFromWholeBlocks, {"phase": "extend"}, "positions count from the context's last whole block"),
        (RepeatsElements, {}, "element 16 holds that of 0"),
        (RoundsTwiceOnWriting, {"feature": "fp8", "dtype": "bfloat16"}, "divides by the scale in bfloat16 and rounds twice"),
    ],
)
def test_a_mistake_of_a_class_is_named(
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
    ("of", "changes", "words"),
    [
        (lambda plain, capped, scale: capped.logsumexp(-1) / math.log(2), {}, "a logarithm to base 2"),
        (lambda plain, capped, scale: (plain / scale).logsumexp(-1), {}, "lse of scores without a scale"),
        (lambda plain, capped, scale: plain.logsumexp(-1), {"feature": "softcap"}, "lse without the soft-cap"),
        (lambda plain, capped, scale: capped.logsumexp(-1) - capped.amax(-1), {}, "lse without the largest score"),
        (lambda plain, capped, scale: capped.logsumexp(-1), {"feature": "sinks"}, "lse without the sinks"),
    ],
)
def test_a_mistake_in_log_sums_is_named(of: Any, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_guessed(type("Made", (GivesLogSums,), {"of": staticmethod(of)}), {"check": "lse", **changes}, words, monkeypatch)


MANY_LATENT = {"layout": "latent", "feature": "latent", "head_dim": 576, "group": 128, "dtype": "bfloat16", "work": "few"}


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (MANY_LATENT, "misses the first token; in heads 64 to 127 alone, of 128"),
        ({"group": 71, "kv_heads": 1}, "misses the first token; in heads 64 to 70 alone, of 71"),
        ({"group": 71, "kv_heads": 2}, "misses the first token; in heads 64 to 70, 135 to 141 alone, of 142"),
        ({"group": 71, "kv_heads": 1, "feature": "sinks"}, "misses the first token; in heads 64 to 70 alone, of 71"),
    ],
    ids=["latents", "one kv head", "two kv heads", "sinks"],
)
def test_a_mistake_in_some_heads_is_named_as_it_is_in_all(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_guessed(HidesAKeyFromHeadsBehind64, changes, words, monkeypatch)


def test_two_mistakes_that_give_one_answer_are_both_named_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(planted.PLANTED, "made", TakesSingleKeysAsTheyAre)
    cell = replace(CELL, phase="prefill", feature="sinks")
    guess = Kit(load_subject("broken:made", torch.device("cpu"))).run(cell).guess
    assert guess.startswith("matches the answer without the sinks"), guess
    assert "; in exactly those of a single token" in guess


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(
    ("made", "changes", "words"),
    [
        (KeepsTheFirstKernelsHeads, {"work": "again"}, "right as an instance's first step: keeps something of an earlier step"),
        (SharesABuffer, {"phase": "mixed", "feature": "window-1"}, "prompts and decodes are right apart"),
        (HasRoomFor64, {"work": "many"}, "right with up to 64 of them, wrong with 65"),
        (AddsToOut, {}, "right where `out` holds zeros"),
        (DoublesWithOneKvHead, {"kv_heads": 1, "group": 4}, "right with kv_heads 2 or 3 or 8 (wrong with 1)"),
        (GoesWrongBehind40Tokens, {}, "a sequence alone is right up to 40 tokens, and wrong with 41"),
    ],
)
def test_a_control_says_what_a_mistake_depends_on(
    made: type[PlainBackend], changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_guessed(made, changes, words, monkeypatch)


_KEEPS_MASKS = """
import torch
from headway.testing.broken.plain import PlainBackend

class Mine(PlainBackend):
    name = "keeps_masks"
    kept = {}

    def mask(self, scores, context):
        key = scores.shape[1:], context
        if key not in self.kept:
            self.kept[key] = super().mask(torch.zeros_like(scores[:1]), context)
        return scores + self.kept[key]
"""


def test_what_a_class_keeps_of_another_layer_is_told_by_loading_it_anew(tmp_path: Path) -> None:
    (tmp_path / "keeps_masks.py").write_text(_KEEPS_MASKS)
    kit = Kit(load_subject(f"{tmp_path / 'keeps_masks.py'}:Mine", torch.device("cpu")))
    assert kit.run(CELL).status == "passed"
    assert "keeps something of a layer for others" in kit.run(replace(CELL, feature="window")).guess
