"""Likely cause of a wrong attention output: the float64 answer is computed with each known mistake until one matches.

A mistake must reproduce the output of every wrong sequence and leave correct outputs unchanged. If two do so, both are named.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headway.core.contract.layout import SCALES, CacheLayout, LayerCache
from headway.core.oracle.oracle import StepSequence, attend, distance, expected

_CLEARLY = 0.25
"""Maximum distance between an output and a matching mistake's answer, as a fraction of the distance between this answer and the
correct answer."""
_LONG = 600
"""Maximum length in tokens of a sequence for which all mistakes can be tried quickly."""
_PATIENCE = 3.0
"""Maximum time for trying mistakes on one step, in seconds."""
_MAX_NAMED = 2
"""Maximum number of mistakes to name if several mistakes give the same answer."""
_ROUNDED_TO_11, _ROUNDED_TO_8 = 7e-4, 1e-2
"""Maximum relative errors that are explained by factors with 11 and with 8 significant bits (half a unit in the last place is
2.4e-4 and 2.0e-3)."""
_QUIET = 0.1
"""Fraction of the median row error. If the error of a row is smaller than this fraction, the row is too accurate for rounding to
be the cause."""


@dataclass(frozen=True)
class Wrong:
    """Sequence with a wrong output, and the step that computed it."""

    number: int
    """Index of the sequence in the step."""
    row: StepSequence
    out: Tensor
    layers: Sequence[StepSequence]
    """The wrong sequence in the step's other layers."""
    rows: Sequence[StepSequence]
    """All sequences of the step, including the wrong sequence."""
    answers: Sequence[Tensor]
    """Correct answer of each of `rows`."""
    part: slice
    """Slice of `rows` that selects the sequences in the same part of the step (prompts or decodes) as the wrong sequence."""
    earlier: Sequence[int]
    """kv_len of the row with the same index in earlier steps and at graph capture."""
    earlier_blocks: Sequence[tuple[int, ...]]
    """Blocks of the row with the same index in earlier steps."""
    layouts: Sequence[CacheLayout]

    @property
    def right(self) -> Tensor:
        """Correct answer for the wrong sequence."""
        return self.answers[self.number]

    @property
    def peers(self) -> dict[str, StepSequence]:
        """Description of a position -> sequence at this position, which a kernel may read by mistake through a wrong index."""
        own, place = self.rows[self.part], self.number - self.part.start
        found = {"the first sequence of its part of the step": own[:1], "the last sequence of its part of the step": own[-1:]}
        found |= {
            "the sequence before it": own[place - 1 : place] if place else (),
            "the sequence after it": own[place + 1 :][:1],
        }
        found["the longest sequence of its part of the step"] = sorted(own, key=lambda row: -row.kv_len)[:1]
        return {name: rows[0] for name, rows in found.items() if rows and rows[0] is not self.row}

    @cached_property
    def kv(self) -> tuple[Tensor, Tensor]:
        """Float64 keys and values that a correct backend reads."""
        keys, values = self.row.kv()
        if (window := self.row.spec.sliding_window) is not None:  # blocks before the window are a shared block of zeros
            size = self.row.cache.block_size
            before_window = max(self.row.context - window + 1, 0) // size * size
            keys[:before_window] = values[:before_window] = 0.0
        return keys, values

    def attend(self, **changes: object) -> Tensor:
        """Return the answer with changed arguments of `oracle.attend`: `spec`, `q`, `keys`, `values`, `first` or `future`."""
        row, (keys, values) = self.row, self.kv
        right = {"spec": row.spec, "q": row.q, "keys": keys, "values": values, "first": row.context}
        return attend(**(right | changes))[0]  # type: ignore[arg-type]

    def with_spec(self, **changes: object) -> Tensor:
        """Return the answer for a layer with changed fields of its spec."""
        return self.attend(spec=replace(self.row.spec, **changes))  # type: ignore[arg-type]

    def of_tokens(self, first: int, end: int, context: int) -> Tensor | None:
        """Return the answer over only a range of the cached and new tokens; None if the range is empty."""
        keys, values = self.kv
        return self.attend(keys=keys[first:end], values=values[first:end], first=context) if first < end else None


Answers = Iterator[tuple[str, Tensor | None]]
"""Pairs of (description of a mistake, float64 answer with that mistake). The answer is None if the mistake does not apply."""


def heads(wrong: Wrong) -> Answers:
    """Yield mistakes in the mapping of query heads to kv heads and queries."""
    row, spec, (keys, values) = wrong.row, wrong.row.spec, wrong.kv
    numbers = torch.arange(spec.num_heads, device=row.q.device)
    if 1 < spec.num_kv_heads < spec.num_heads:
        apart, read = replace(spec, num_kv_heads=spec.num_heads), numbers % spec.num_kv_heads
        answer = wrong.attend(spec=apart, keys=keys[:, read], values=values[:, read])
        yield "matches GQA map h % kv_heads (query head h reads kv head h // group_size)", answer
        grouped = row.q.reshape(row.query_len, spec.group_size, spec.num_kv_heads, -1).transpose(1, 2).flatten(1, 2)
        yield "matches query heads in the order [group, kv head]; theirs is [kv head, group]", wrong.attend(q=grouped)
    if spec.num_kv_heads > 1:
        first = [of_heads[:, :1].expand_as(of_heads) for of_heads in (keys, values)]
        yield "matches kv head 0 read by every query head", wrong.attend(keys=first[0], values=first[1])
    place = numbers % spec.group_size
    for size in (8, 16, 32, 64):
        if size < spec.group_size:
            text = f"matches tiles of {size} query heads of a kv head, all of which take the queries of the first tile"
            yield text, wrong.attend(q=row.q[:, numbers - place + place % size])


def scores(wrong: Wrong) -> Answers:
    """Yield mistakes in scores: soft-cap, sinks, ALiBi, the scale, and the scales of the cache."""
    spec, with_spec, (keys, values) = wrong.row.spec, wrong.with_spec, wrong.kv
    if spec.softcap is not None:
        yield "matches the answer without the soft-cap", with_spec(softcap=None)
    if spec.sinks is not None:
        yield "matches the answer without the sinks", with_spec(sinks=None)
        yield "matches the sinks of other heads", with_spec(sinks=spec.sinks[::-1])
    if spec.alibi_slopes is not None:
        yield "matches the answer without ALiBi", with_spec(alibi_slopes=None)
        yield "matches the ALiBi slopes of other heads: in reverse", with_spec(alibi_slopes=spec.alibi_slopes[::-1])
    if wrong.row.cache.layout.has_scales:
        plain = _without_scales(wrong.row)
        yield "matches a cache whose keys are read without their scales", wrong.attend(keys=plain[0])
        yield "matches a cache whose values are read without their scales", wrong.attend(values=plain[1])
        yield "matches a cache whose numbers are read without their scales", wrong.attend(keys=plain[0], values=plain[1])
    elif spec.cache_dtype != spec.dtype:
        plain = keys / spec.k_scale, values / spec.v_scale
        yield "matches a cache read without k_scale", wrong.attend(keys=plain[0])
        yield "matches a cache read without v_scale", wrong.attend(values=plain[1])
        yield "matches a cache read without k_scale and v_scale", wrong.attend(keys=plain[0], values=plain[1])
    yield "matches scale 1/sqrt(head_dim) instead of the spec's", with_spec(scale=spec.head_dim**-0.5)
    log2 = math.log2(math.e)
    yield "matches powers of two of scores without the factor log2(e)", with_spec(scale=spec.scale / log2)
    yield "matches powers of e of scores with the factor log2(e)", with_spec(scale=spec.scale * log2)
    yield "matches a scale that is applied twice", with_spec(scale=spec.scale**2)
    yield "matches scores without a scale", with_spec(scale=1.0)


def positions(wrong: Wrong) -> Answers:
    """Yield mistakes in the choice of visible tokens: window, context, causal mask, first token and newest token."""
    row, spec, (keys, values) = wrong.row, wrong.row.spec, wrong.kv
    if (window := spec.sliding_window) is not None:
        yield "a window off by one (one key too many)", wrong.with_spec(sliding_window=window + 1)
        if window > 1:
            yield "a window off by one (one key too few)", wrong.with_spec(sliding_window=window - 1)
        yield "matches the answer without the sliding window", wrong.with_spec(sliding_window=None)
    if row.context:
        yield "ignores the context: matches this step's tokens alone", wrong.of_tokens(row.context, row.kv_len, 0)
        own = {"keys": keys[row.context :], "values": values[row.context :]}
        yield "ignores the context: matches this step's tokens alone, all seen by each query", wrong.attend(**own)
        yield "matches queries that sit at positions 0, 1, ... in place of after the context", wrong.attend(first=0)
    if row.query_len > 1:
        yield "a causal mask off by one (a query sees the next token)", wrong.attend(future=1)
        yield "a causal mask off by one (a query does not see itself)", wrong.attend(future=-1)
        if not spec.causal:
            yield "a causal mask, in a layer whose queries see later keys", wrong.with_spec(causal=True)
        yield "no causal mask", wrong.attend(future=row.query_len)
    else:
        yield "misses the newest token", wrong.of_tokens(0, row.kv_len - 1, row.context)
    if row.kv_len > 1:
        yield "misses the first token", wrong.of_tokens(1, row.kv_len, row.context - 1)


def stale(wrong: Wrong) -> Answers:
    """Yield mistakes that use lengths or blocks of an earlier step, or data of a different sequence or layer."""
    row = wrong.row
    for earlier in dict.fromkeys(wrong.earlier):
        if earlier != row.kv_len:
            yield "matches stale lengths: those of an earlier step, of the capture or of the host", _at_length(row, earlier)
    for before in dict.fromkeys(wrong.earlier_blocks):
        old_blocks = torch.tensor([*before, *[0] * len(row.blocks)])[: len(row.blocks)]
        yield "matches the blocks that its row had in a step before: a plan that is kept too long", _over(row, old_blocks)
    for place, peer in wrong.peers.items():
        if peer.kv_len not in (row.kv_len, *wrong.earlier):
            yield f"matches the length of {place}", _at_length(row, peer.kv_len)
        if row.context and peer.context != row.context and row.query_len > 1:
            yield f"matches queries at the positions of {place}", wrong.attend(first=peer.context)
        blocks = torch.tensor([*peer.blocks, *[0] * len(row.blocks)])[: len(row.blocks)]
        yield f"matches the block table's row of {place}", _over(row, blocks)
    for other in wrong.layers:
        keys, values = other.kv()
        yield "matches the answer of another layer", expected(other)[0]
        yield "matches this query over the cache of another layer", wrong.attend(keys=keys, values=values, first=other.context)


def places(wrong: Wrong) -> Answers:
    """Yield mistakes in the addresses of tokens: blocks, the slots of the last block, the layout."""
    row, size = wrong.row, wrong.row.cache.block_size
    count = row.cache.geometry.num_blocks
    if len(row.blocks) > 1:
        following = (row.blocks[0] + torch.arange(len(row.blocks))) % count
        yield "assumes contiguous blocks: matches the blocks after the first", _over(row, following)
        yield "matches the first block read again and again", _over(row, torch.full((len(row.blocks),), row.blocks[0]))
        yield "ignores the order of the block table: matches its blocks sorted", _over(row, torch.tensor(sorted(row.blocks)))
    yield "ignores the block table: matches blocks 0, 1, ...", _over(row, torch.arange(len(row.blocks)) % count)
    whole = -(-row.kv_len // size) * size
    if row.query_len == 1:
        if whole != row.kv_len:
            yield "reads the rest of the last block", _at_length(row, whole)
        yield "reads one slot past the end", _at_length(row, row.kv_len + 1)
    for layout in wrong.layouts:
        cache = _read_as(row.cache, layout)
        if cache is not None:
            yield f"matches a {row.cache.layout.name} cache read as {layout.name}", expected(replace(row, cache=cache))[0]


CONCEPTS: tuple[Callable[[Wrong], Answers], ...] = (heads, scores, positions, stale, places)
"""Functions that yield mistakes, in descending order of likelihood."""


def guess(wrong: Sequence[Wrong], fine: Sequence[Wrong], tolerance: float) -> str:
    """Return the mistake that explains all wrong sequences of a step; "" if no mistake does. Wrong outputs must be finite.

    fine: correct sequences of the step, which a mistake must leave unchanged.
    """
    first = max(wrong, key=_telling)
    others = [each for each in (*wrong[:3], *wrong[-2:]) if each is not first]
    most = max(4 * tolerance, min(_CLEARLY * distance(first.out, first.right), 0.05))
    until, found = time.monotonic() + _PATIENCE, list[tuple[float, str]]()
    for concept in CONCEPTS:
        for name, answer in _answers_of(concept, first):
            if time.monotonic() > until:
                break
            error = _relative_distance(first, answer)
            if error <= most and all(_explains(concept, name, each, tolerance) for each in others):
                found += [] if any(_changes(concept, name, each, tolerance) for each in fine) else [(error, name)]
    least = min((error for error, _ in found), default=0.0)
    names = list(dict.fromkeys(name for error, name in found if error <= max(2 * least, tolerance)))
    more = ", or another of its kind" if len(names) > _MAX_NAMED else ""
    return ", or: ".join(names[:_MAX_NAMED]) + more if names else _precision(wrong)


def _answers_of(concept: Callable[[Wrong], Answers], wrong: Wrong) -> Iterator[tuple[str, Tensor]]:
    """Yield (description, answer) for each mistake that changes the answer."""
    for name, answer in concept(wrong):
        if answer is not None and answer.shape == wrong.right.shape and not distance(answer, wrong.right) < 1e-9:
            yield name, answer


def _telling(wrong: Wrong) -> int:
    """Return a score for the suitability of a sequence for trying mistakes. More keys are better, up to the length at which
    trying mistakes becomes slow."""
    row = wrong.row
    little = row.kv_len < _LONG and row.kv_len * row.query_len * row.spec.num_heads < _LONG**2
    return row.kv_len if little else -row.kv_len * row.query_len


def _relative_distance(wrong: Wrong, answer: Tensor) -> float:
    """Return the distance of the output from a mistake's answer, relative to the answer; infinite if the answer is all zeros."""
    size = max(float(answer.norm()), 1e-6 * float(wrong.right.norm()))
    return float((wrong.out.double() - answer).norm()) / size if bool(answer.any()) else math.inf


def _explains(concept: Callable[[Wrong], Answers], name: str, wrong: Wrong, tolerance: float) -> bool:
    """Return whether a mistake reproduces this sequence's output. An output of zeros also matches a mistake with which the
    sequence sees no key."""
    within = max(4 * tolerance, _CLEARLY * distance(wrong.out, wrong.right))
    return any(
        name == other and (_relative_distance(wrong, answer) if answer.any() else float(wrong.out.norm())) <= within
        for other, answer in _answers_of(concept, wrong)
    )


def _changes(concept: Callable[[Wrong], Answers], name: str, fine: Wrong, tolerance: float) -> bool:
    return any(
        name == other and not distance(answer, fine.right) <= 16 * tolerance for other, answer in _answers_of(concept, fine)
    )


def _precision(wrong: Sequence[Wrong]) -> str:
    """Return the likely number of significant bits of the factors, in words. The result is "" unless all outputs are float32 and
    nearly correct."""
    errors = [float((each.out - each.right).norm() / (each.right - each.right.mean()).norm()) for each in wrong]
    if wrong[0].row.spec.dtype != torch.float32 or not max(errors) < _ROUNDED_TO_8 or not _noisy(wrong):
        return ""
    if sorted(errors)[len(errors) // 2] < _ROUNDED_TO_11:
        return "float32 rounded to 11 bits on the way: TF32 (tl.dot without input_precision='ieee') or float16"
    return "float32 rounded to 8 bits on the way: bfloat16"


def _noisy(wrong: Sequence[Wrong]) -> bool:
    """Return whether all rows have similar nonzero errors, as caused by rounding."""
    rows = [(each.out.double() - each.right).norm(dim=-1) / each.right.norm(dim=-1) for each in wrong if each.row.kv_len > 4]
    apart = torch.cat([each.flatten() for each in rows]) if rows else torch.ones(1)
    return float(apart.quantile(0.1)) > _QUIET * float(apart.median()) if len(apart) < 2**20 else True


def _over(row: StepSequence, blocks: Tensor) -> Tensor:
    keys, values = row.kv(row.slots(blocks, row.kv_len))
    return attend(row.spec, row.q, keys, values, row.context)[0]


def _at_length(row: StepSequence, kv_len: int) -> Tensor | None:
    """Return the answer over the first kv_len slots of the sequence's blocks. Missing blocks are replaced by block 0."""
    if kv_len < row.query_len:
        return None
    blocks = torch.tensor([*row.blocks, *[0] * (-(-kv_len // row.cache.block_size) - len(row.blocks))])
    keys, values = row.kv(row.slots(blocks, kv_len))
    return attend(row.spec, row.q, keys, values, kv_len - row.query_len)[0]


def _read_as(cache: LayerCache, layout: CacheLayout) -> LayerCache | None:
    """Return a cache's memory read in a different layout; None if that layout's sizes do not fit the memory."""
    if layout == cache.layout or set(layout.tensors) != set(cache.layout.tensors):
        return None
    empty = layout.allocate(cache.geometry, cache.k_scale, cache.v_scale)
    tensors = {}
    for name, tensor in cache.tensors.items():
        if empty.tensors[name].numel() != tensor.numel() or not tensor.is_contiguous():
            return None
        tensors[name] = tensor.view(empty.tensors[name].shape)
    return LayerCache(tensors, layout, cache.geometry, cache.k_scale, cache.v_scale)


def _without_scales(row: StepSequence) -> tuple[Tensor, Tensor]:
    cache, own = row.cache, {name: row.cache.tensors[name] for name in SCALES if name in row.cache.tensors}
    layout = CacheLayout("numbers", {name: cache.layout.tensors[name] for name in own}, cache.layout.pack_bytes)
    return replace(row, cache=LayerCache(own, layout, cache.geometry)).kv()
