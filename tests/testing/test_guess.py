"""Mistakes of a first kernel, each a variant of one right kernel: the kit finds them, and has words for the usual ones."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from headway.testing.kit.report import CellResult
from headway.testing.kit.subject import load_subject

CELL = CheckCell("answer", "decode", layout="nhd", block_size=8, head_dim=32, group=2)
MANY_LATENT = {"layout": "latent", "feature": "latent", "head_dim": 576, "group": 128, "dtype": "bfloat16", "work": "few"}
Backend = type[PlainBackend]


def variant(**members: Any) -> Backend:
    return type("Made", (PlainBackend,), members)


def scaled(change: Callable[[PlainBackend], float]) -> Backend:
    """Backends whose scale is multiplied by a number."""
    return variant(scale=lambda self: PlainBackend.scale(self) * change(self))


def capped(change: Callable[[Tensor], Tensor]) -> Backend:
    """Backends that change scores where the soft-cap would."""
    return variant(cap=lambda self, scores: change(scores))


def masked(change: Callable[[PlainBackend, Tensor, int, Tensor], Tensor]) -> Backend:
    """Backends whose masked scores are change(self, scores, context, the right ones)."""
    return variant(mask=lambda self, scores, context: change(self, scores, context, PlainBackend.mask(self, scores, context)))


def planned(change: Callable[[AttentionMetadata], Tensor]) -> Backend:
    """Backends that plan with another block table."""
    return variant(plan=lambda self, step: PlainBackend.plan(self, replace(step, block_table=change(step))))


def tabled(change: Callable[[PlainBackend, Tensor, int], Tensor]) -> Backend:
    """Backends that read change(self, blocks, kv_len) in place of a sequence's blocks."""
    return variant(rows=lambda self, cache, blocks, kv_len: PlainBackend.rows(self, cache, change(self, blocks, kv_len), kv_len))


def valued(change: Callable[[Tensor], Tensor]) -> Backend:
    """Backends that read other values."""

    def rows(self: PlainBackend, *given: Any) -> tuple[Tensor, Tensor]:
        keys, values = PlainBackend.rows(self, *given)
        return keys, change(values)

    return variant(rows=rows)


def decoding(change: Callable[..., Tensor]) -> Backend:
    """Backends that decode change(self, q) in place of q."""
    return variant(decode=lambda self, q, *rest: PlainBackend.decode(self, change(self, q), *rest))


def answering(change: Callable[[Tensor, Tensor], object]) -> Backend:
    """Backends that decode, and then leave what change(out as it was given, the right answer) makes of it in out."""

    def decode(self: PlainBackend, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        right = out.clone()
        PlainBackend.decode(self, q, cache, plan, right, lse)
        change(out, right)

    return variant(decode=decode)


def run(made: Backend, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> CellResult:
    """Run a cell that differs from CELL so."""
    monkeypatch.setitem(planted.PLANTED, "made", made)
    return Kit(load_subject("broken:made", torch.device("cpu"))).run(replace(CELL, **changes))


def as_one_piece(self: PlainBackend, q: Tensor) -> Tensor:
    return q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1), q.storage_offset())


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


class HidesAKeyFromHeadsBehind64(PlainBackend):
    capabilities = replace(PlainBackend.capabilities, value_in_key=True, v_head_dims=((576, 512),))

    def mask(self, scores: Tensor, context: int) -> Tensor:
        hidden = super().mask(scores, context)
        hidden[torch.arange(self.spec.num_heads) % self.spec.group_size >= 64, :, 0] = -torch.inf
        return hidden


class ForgetsTheValuesScales(PlainBackend):
    capabilities = replace(PlainBackend.capabilities, kv_dtypes=(torch.int8,))

    def rows(self, cache: LayerCache, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        ones = {name: torch.ones_like(tensor) if name == "value_scale" else tensor for name, tensor in cache.tensors.items()}
        return super().rows(cache.over(ones), blocks, kv_len)


def without_zeros(self: PlainBackend, blocks: Tensor, kv_len: int) -> Tensor:
    kept = blocks[blocks != 0]
    return torch.cat([kept, blocks.new_zeros(len(blocks) - len(kept))])


ENDS_TABLES_AT_ZERO = tabled(without_zeros)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("made", "changes", "words"),
    [
        (
            planned(lambda step: torch.arange(step.block_table.shape[1], dtype=torch.int32).expand_as(step.block_table)),
            {},
            "ignores the block table: matches blocks 0, 1, ...",
        ),
        (
            tabled(lambda self, blocks, kv_len: blocks[: -(-kv_len // self.block_size)].sort().values),
            {},
            "ignores the order of the block table: matches its blocks sorted",
        ),
        (
            answering(lambda out, right: out[:-1].copy_(right[:-1])),
            {},
            "of some sequences; wrong in exactly the last sequence of the step",
        ),
        (decoding(lambda self, q: q.half().float()), {}, "float32 rounded to 11 bits"),
        (decoding(lambda self, q: q.bfloat16().float()), {}, "float32 rounded to 8 bits"),
        (
            decoding(lambda self, q: q.unflatten(1, (self.spec.group_size, -1)).transpose(1, 2).flatten(1, 2)),
            {},
            "query heads in the order [group, kv head]",
        ),
        (variant(window=lambda self: 1 << 20), {"feature": "window"}, "matches the answer without the sliding window"),
        (
            ForgetsTheValuesScales,
            {"layout": "nhd_int8", "feature": "int8"},
            "matches a cache whose values are read without their scales",
        ),
    ],
)
def test_a_first_mistake_is_named(made: Backend, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(made, monkeypatch, **changes)
    assert result.status == "failed"
    assert words in result.guess, result


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("made", "changes", "words"),
    [
        (decoding(as_one_piece), {}, ""),
        (
            variant(sequence=lambda self, q, *rest: PlainBackend.sequence(self, as_one_piece(self, q), *rest)),
            {"phase": "extend"},
            "",
        ),
        (
            masked(lambda self, scores, context, right: scores.masked_fill(right == -torch.inf, -100.0)),
            {"phase": "extend", "scores": "low"},
            "",
        ),
        (KeepsPlansByFirstBlocks, {"work": "again"}, "had in a step before: a plan that is kept too long"),
        (KeepsSinksByHeads, {"check": "siblings", "feature": "sinks"}, "keeps something of one layer for another"),
        (answering(lambda out, right: out[:, :64].copy_(right[:, :64])), {"phase": "verify", "kv_heads": 40}, ""),
        (ENDS_TABLES_AT_ZERO, {"work": "again"}, ""),
        (ENDS_TABLES_AT_ZERO, {"work": "many", "feature": "window-16", "phase": "extend"}, ""),
        (
            tabled(lambda self, blocks, kv_len: blocks % (1 << 15)),
            {"memory": "far"},
            "numbers of blocks and slots are beyond 16 bits",
        ),
    ],
)
def test_an_input_brings_a_mistake_out(
    made: Backend, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(made, monkeypatch, **changes)
    assert result.status == "failed"
    assert words in result.guess, result
    assert run(PlainBackend, monkeypatch, **changes).status == "passed"


def by_whole_tiles(self: PlainBackend, scores: Tensor, context: int, right: Tensor) -> Tensor:
    whole = (torch.arange(scores.shape[2]) // 32 + 1) * 32 < scores.shape[2]
    return scores.masked_fill((self.ago(scores, context) < 0) & ~whole, -torch.inf)


def by_a_rounded_window(self: PlainBackend, scores: Tensor, context: int, right: Tensor) -> Tensor:
    early = torch.arange(scores.shape[2]) < -(-max(context - self.window() + 1, 0) // 16) * 16
    return right.masked_fill(early, -torch.inf)


def by_whole_blocks(self: PlainBackend, scores: Tensor, context: int, right: Tensor) -> Tensor:
    ago = self.ago(scores, context)
    first = (torch.arange(context, context + len(ago)) - self.window() + 1).clamp(min=0) // 8 * 8
    return scores.masked_fill((ago < 0) | (torch.arange(scores.shape[2]) < first[:, None]), -torch.inf)


def of_its_own_width(step: AttentionMetadata) -> Tensor:
    width = -(-step.max_seq_len // step.block_size)
    return step.block_table.flatten()[: step.num_seqs * width].view(-1, width)


def with_sinks_twice(self: PlainBackend, scores: Tensor) -> Tensor:
    assert self.spec.sinks is not None
    sinks = torch.tensor(self.spec.sinks)[:, None, None].expand(-1, scores.shape[1], 2)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-2]


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
        torch.zeros(64, dtype=torch.int32)[: metadata.num_seqs] = metadata.seq_lens
        return super().plan(metadata)


class RoundsTwiceOnWriting(PlainBackend):
    capabilities = replace(PlainBackend.capabilities, kv_dtypes=(torch.float8_e4m3fn,))
    decode_writes = True

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        return super().sequence(q, keys.float() * self.spec.k_scale, values.float() * self.spec.v_scale, *rest)

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Any, out: Tensor) -> None:
        for rows, scale, stored in ((k, cache.k_scale, cache.by_slot("key")), (v, cache.v_scale, cache.by_slot("value"))):
            most = torch.finfo(stored.dtype).max
            fitting = (rows / scale).clamp(-most, most).to(stored.dtype)
            for number, slot in enumerate(plan.metadata.slot_mapping.tolist()):
                if slot >= 0:
                    stored[slot // self.block_size, slot % self.block_size] = fitting[number]
        self.decode(q, cache, plan, out)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (scaled(lambda self: self.spec.head_dim**-0.5), {}),
        (valued(lambda values: torch.cat([values[:1], values[:-1]])), {}),
        (masked(by_whole_blocks), {"feature": "window-16", "phase": "extend"}),
        (capped(lambda scores: scores + 0.1 * scores**3), {}),
        (masked(by_whole_tiles), {"phase": "extend"}),
        (masked(by_a_rounded_window), {"phase": "extend", "feature": "window"}),
        (planned(of_its_own_width), {"phase": "mixed"}),
        (variant(kv_heads=lambda self, device: PlainBackend.kv_heads(self, device) // 2 * 2), {"kv_heads": 3}),
        (variant(weights=with_sinks_twice), {"feature": "sinks"}),
        (capped(lambda scores: scores.bfloat16().float()), {"dtype": "bfloat16", "scores": "high"}),
        (
            variant(mask=lambda self, scores, at: PlainBackend.mask(self, scores, at // self.block_size * self.block_size)),
            {"phase": "extend"},
        ),
        (valued(lambda values: torch.cat([values[..., :16], values[..., :16]], -1)), {}),
        (RoundsTwiceOnWriting, {"feature": "fp8", "dtype": "bfloat16"}),
        (KeepsTheFirstKernelsHeads, {"work": "again"}),
        (SharesABuffer, {"phase": "mixed", "feature": "window-1"}),
        (HasRoomFor64, {"work": "many"}),
        (answering(lambda out, right: out.add_(right)), {}),
        (scaled(lambda self: 2.0 if self.spec.num_kv_heads == 1 else 1.0), {"kv_heads": 1, "group": 4}),
    ],
)
def test_an_unnamed_mistake_is_found(made: Backend, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(made, monkeypatch, **changes).status == "failed"


def of_single_keys(self: PlainBackend, scores: Tensor) -> Tensor:
    return torch.ones_like(scores) if scores.shape[2] == 1 else PlainBackend.weights(self, scores)


@pytest.mark.parametrize(
    ("made", "changes", "words"),
    [
        (
            valued(lambda values: torch.cat([values[..., :24], torch.zeros_like(values[..., 24:])], -1)),
            {},
            "wrong in elements 24 to 31 alone, of 32",
        ),
        (HidesAKeyFromHeadsBehind64, MANY_LATENT, "wrong in heads 64 to 127 alone, of 128"),
        (HidesAKeyFromHeadsBehind64, {"group": 71, "kv_heads": 1}, "wrong in heads 64 to 70 alone, of 71"),
        (HidesAKeyFromHeadsBehind64, {"group": 71, "kv_heads": 2}, "wrong in heads 64 to 70, 135 to 141 alone, of 142"),
        (HidesAKeyFromHeadsBehind64, {"group": 71, "kv_heads": 1, "feature": "sinks"}, "wrong in heads 64 to 70 alone, of 71"),
        (
            capped(lambda scores: scores * 1.5 if scores.shape[2] > 40 else scores),
            {},
            "wrong in exactly those of more than 38 tokens",
        ),
        (variant(weights=of_single_keys), {"phase": "prefill", "feature": "sinks"}, "wrong in exactly those of a single token"),
    ],
)
def test_the_place_of_a_mistake_is_said(
    made: Backend, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(made, monkeypatch, **changes)
    assert result.status == "failed"
    assert words in result.guess, result


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
        right = super().mask(scores, context)
        plain = self.plain.masked_fill(right == -torch.inf, -torch.inf)
        self.lse[:, self.at : self.at + scores.shape[1]] = self.of(plain, right, self.spec.scale)
        self.at += scores.shape[1]
        return right


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        (lambda plain, capped, scale: capped.logsumexp(-1) / math.log(2), {}),
        (lambda plain, capped, scale: (plain / scale).logsumexp(-1), {}),
        (lambda plain, capped, scale: plain.logsumexp(-1), {"feature": "softcap"}),
        (lambda plain, capped, scale: capped.logsumexp(-1) - capped.amax(-1), {}),
        (lambda plain, capped, scale: capped.logsumexp(-1), {"feature": "sinks"}),
        (lambda plain, capped, scale: 400 + 30 * torch.arange(capped[..., 0].numel()).view_as(capped[..., 0]), {}),
    ],
)
def test_a_mistake_in_log_sums_is_found(of: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones are so far off that the sums themselves are more than a whole number of 64 bits holds."""
    result = run(type("Made", (GivesLogSums,), {"of": staticmethod(of)}), monkeypatch, check="lse", **changes)
    assert result.reason.startswith("lse of sequence"), result


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
