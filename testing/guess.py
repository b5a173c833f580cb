"""A guess at why an answer is wrong: the float64 answer computed with one mistake after another, until one matches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headway.core.contract.layout import SCALES, CacheLayout, LayerCache
from headway.testing.oracle import StepSequence, attend, distance, expected

_ROUNDED_TO_11, _ROUNDED_TO_8 = 7e-4, 1e-2
"""Relative errors below these come of factors with 11 and with 8 significant bits (half a unit is 2.4e-4 and 2.0e-3)."""
_CLEARLY = 0.25
"""A mistake explains an answer if it lies nearer than this share of its distance from the right one."""


@dataclass(frozen=True)
class Wrong:
    """One sequence that came out wrong."""

    number: int
    row: StepSequence
    out: Tensor
    dense: tuple[Tensor, Tensor] | None = None
    """The step's k and v as they were handed to `prefill`; None in decode."""
    asked: Tensor | None = None
    """The rows of q that its part of the step was handed, up to this sequence's last."""
    others: Sequence[StepSequence] = ()
    """The other sequences of the step, and this one in other layers."""
    earlier: Sequence[int] = ()
    """kv_len of the same row in the step before, and at capture."""
    earlier_blocks: Sequence[int] = ()
    """Blocks of the same row in the step before."""
    layouts: Sequence[CacheLayout] = ()
    neighbours: Mapping[str, int] = field(default_factory=dict)
    """kv_len of the sequences "before" and "after" it in the step."""


def mistakes(wrong: Wrong) -> Iterator[tuple[str, Tensor]]:
    """Pairs of a mistake's text and the answer it gives, the likeliest first; mistakes that change nothing are left out."""
    for name, answer in _changing(wrong):
        if bool(answer.any()):
            yield name, answer


def _changing(wrong: Wrong) -> Iterator[tuple[str, Tensor]]:
    row, right = wrong.row, expected(wrong.row)[0]
    for name, answer in _answers(wrong):
        if answer is not None and answer.shape == right.shape and not distance(answer, right) < 1e-9:
            yield name.format(row=row), answer


def guess(wrong: list[Wrong], tolerance: float) -> str:
    """What the wrong sequences of a step have in common; empty if no mistake of the list explains them all."""
    if not wrong:
        return ""
    first = max(wrong, key=lambda each: each.row.kv_len if each.row.kv_len < 600 else -each.row.kv_len)
    found = []
    for name, answer in mistakes(first):
        error, missed = distance(first.out, answer), distance(first.out, expected(first.row)[0])
        if error <= max(4 * tolerance, 0.0) or (math.isfinite(missed) and error < _CLEARLY * missed and error < 0.05):
            found.append((error, name))
    for _, name in sorted(found, key=lambda each: each[0] > 2 * min(found)[0] + 1e-12):
        if all(_explains(name, other, tolerance) for other in wrong[:2] + wrong[-1:] if other is not first):
            return name
    return _precision(wrong)


def _precision(wrong: list[Wrong]) -> str:
    """A guess about float32 answers that are all nearly right: how many bits of the products' factors were kept."""
    answers = [expected(each.row)[0] for each in wrong]
    errors = [
        float((each.out - right).norm() / (right - right.mean()).norm()) for each, right in zip(wrong, answers, strict=True)
    ]
    if wrong[0].row.spec.dtype != torch.float32 or not max(errors) < _ROUNDED_TO_8:
        return ""
    if sorted(errors)[len(errors) // 2] < _ROUNDED_TO_11:
        return "float32 rounded to 11 bits on the way: TF32 (tl.dot without input_precision='ieee') or float16"
    return "float32 rounded to 8 bits on the way: bfloat16"


def _explains(name: str, wrong: Wrong, tolerance: float) -> bool:
    """Whether a mistake gives this sequence's answer too; zeros, where a mistake finds no key, count here."""
    missed = distance(wrong.out, expected(wrong.row)[0])
    return any(
        name == other
        and (distance(wrong.out, answer) if answer.any() else float(wrong.out.norm())) <= max(4 * tolerance, _CLEARLY * missed)
        for other, answer in _changing(wrong)
    )


@dataclass(frozen=True)
class Reading:
    """A wrong sequence with its keys and values, in float64, as a right backend reads them."""

    wrong: Wrong
    row: StepSequence
    keys: Tensor
    values: Tensor

    def attend(self, **changes: object) -> Tensor:
        """The answer with a few arguments changed: `q`, `keys`, `values`, `context`, or a keyword of `oracle.attend`."""
        right = {"q": self.row.q, "keys": self.keys, "values": self.values, "context": self.row.context}
        q, keys, values, context = (changes.pop(name, value) for name, value in right.items())
        return attend(self.row.spec, q, keys, values, context, **changes)[0]  # type: ignore[arg-type]

    def with_spec(self, **changes: object) -> Tensor:
        """The answer of a layer whose spec differs in a few fields."""
        spec = replace(self.row.spec, **changes)  # type: ignore[arg-type]
        return attend(spec, self.row.q, self.keys, self.values, self.row.context)[0]

    def of_tokens(self, first: int, end: int, context: int) -> Tensor | None:
        """The answer over some of the tokens alone; None where none are left."""
        return self.attend(keys=self.keys[first:end], values=self.values[first:end], context=context) if first < end else None


Answers = Iterator[tuple[str, Tensor | None]]


def _answers(wrong: Wrong) -> Answers:
    row, spec = wrong.row, wrong.row.spec
    keys, values = row.kv()
    if spec.sliding_window is not None:  # in place of blocks behind the window the table names one that holds zeros
        size = row.cache.block_size
        behind = max(row.context - spec.sliding_window + 1, 0) // size * size
        keys[:behind] = values[:behind] = 0.0
    reading = Reading(wrong, row, keys, values)
    for concept in MISTAKES:
        yield from concept(reading)


def _scores(reading: Reading) -> Answers:
    """Mistakes in what a layer does to its scores: soft-cap, sinks, ALiBi."""
    spec, with_spec = reading.row.spec, reading.with_spec
    if spec.softcap is not None:
        yield "matches the answer without the soft-cap", with_spec(softcap=None)
        yield "matches a soft-cap applied before the scale", with_spec(softcap=spec.softcap * spec.scale)
        yield "matches a soft-cap applied after the mask: hidden keys count", reading.attend(masked=-spec.softcap)
    if spec.sinks is not None:
        yield "matches the answer without the sinks", with_spec(sinks=None)
        yield "matches sinks of the wrong sign", with_spec(sinks=tuple(-sink for sink in spec.sinks))
        yield "matches sinks that are scaled", with_spec(sinks=tuple(sink * spec.scale for sink in spec.sinks))
        yield "matches the sinks of other heads", with_spec(sinks=spec.sinks[::-1])
        heads, groups = range(spec.num_heads), spec.group_size
        by_kv_head = tuple(spec.sinks[head // groups] for head in heads)
        yield "matches sinks read by kv head: query head h takes that of its group", with_spec(sinks=by_kv_head)
        in_turn = tuple(spec.sinks[head % spec.num_kv_heads] for head in heads)
        yield "matches sinks read by kv head: query head h takes number h % kv_heads", with_spec(sinks=in_turn)
        yield "matches one sink for every head", with_spec(sinks=spec.sinks[:1] * spec.num_heads)
    if spec.alibi_slopes is not None:
        yield "matches the answer without ALiBi", with_spec(alibi_slopes=None)
        yield "matches ALiBi of the wrong sign", with_spec(alibi_slopes=tuple(-slope for slope in spec.alibi_slopes))
        if spec.softcap is not None:
            yield "matches a soft-cap applied after ALiBi", reading.attend(cap_last=True)
        yield "matches ALiBi by the key's position alone, without the query's", reading.attend(absolute=True)
        slopes, kv_heads = spec.alibi_slopes, spec.num_kv_heads
        yield "matches the ALiBi slopes of other heads: in reverse", with_spec(alibi_slopes=slopes[::-1])
        grouped = tuple(slopes[head % spec.group_size * kv_heads + head // spec.group_size] for head in range(spec.num_heads))
        yield "matches ALiBi slopes in the order [group, kv head]; theirs is [kv head, group]", with_spec(alibi_slopes=grouped)
        of_group = tuple(slopes[head // spec.group_size] for head in range(spec.num_heads))
        yield "matches ALiBi slopes read by kv head: query head h takes that of its group", with_spec(alibi_slopes=of_group)


def _window(reading: Reading) -> Answers:
    spec, with_spec = reading.row.spec, reading.with_spec
    if spec.sliding_window is None:
        return
    yield "a window off by one (one key too many)", with_spec(sliding_window=spec.sliding_window + 1)
    if spec.sliding_window > 1:
        yield "a window off by one (one key too few)", with_spec(sliding_window=spec.sliding_window - 1)
    yield "matches the answer without the sliding window", with_spec(sliding_window=None)
    yield "a window of the wrong side: the keys before it are seen, and its own are hidden", reading.attend(old=True)


def _scales(reading: Reading) -> Answers:
    """Mistakes in the cache's scales, then in that of the scores."""
    spec, with_spec = reading.row.spec, reading.with_spec
    if reading.row.cache.layout.has_scales:
        keys, values = _without_scales(reading.row)
        yield "matches a cache whose keys are read without their scales", reading.attend(keys=keys)
        yield "matches a cache whose values are read without their scales", reading.attend(values=values)
        yield "matches a cache whose numbers are read without their scales", reading.attend(keys=keys, values=values)
    elif spec.cache_dtype != spec.dtype:
        keys, values = reading.keys / spec.k_scale, reading.values / spec.v_scale
        yield "matches a cache read without k_scale", reading.attend(keys=keys)
        yield "matches a cache read without v_scale", reading.attend(values=values)
        yield "matches a cache read without k_scale and v_scale", reading.attend(keys=keys, values=values)
        yield "matches values read with k_scale in place of v_scale", reading.attend(values=values * spec.k_scale)
        yield "matches keys read with v_scale in place of k_scale", reading.attend(keys=keys * spec.v_scale)
        if spec.softcap is not None:
            yield "matches a soft-cap applied before k_scale", with_spec(softcap=spec.softcap * spec.k_scale)
    yield "matches scale 1/sqrt(head_dim) instead of the spec's", with_spec(scale=spec.head_dim**-0.5)
    yield "matches a scale that is applied twice", with_spec(scale=spec.scale**2)
    yield "matches scores without a scale", with_spec(scale=1.0)
    if spec.v_head_dim != spec.head_dim:
        yield "matches scale 1/sqrt(v_head_dim)", with_spec(scale=spec.v_head_dim**-0.5)


def _positions(reading: Reading) -> Answers:
    """Mistakes in which tokens a query sees: the context, the causal mask, the first and the newest token."""
    row = reading.row
    if row.context:
        yield "ignores the context: matches this step's tokens alone", reading.of_tokens(row.context, row.kv_len, 0)
        own = {"keys": reading.keys[row.context :], "values": reading.values[row.context :]}
        yield "ignores the context: matches this step's tokens alone, all seen by each query", reading.attend(**own)
        yield "matches queries that sit at positions 0, 1, ... in place of after the context", reading.attend(context=0)
    if row.query_len > 1:
        yield "a causal mask off by one (a query sees the next token)", reading.attend(future=1)
        yield "a causal mask off by one (a query does not see itself)", reading.attend(future=-1)
        if not row.spec.causal:
            yield "a causal mask, in a layer whose queries see later keys", reading.with_spec(causal=True)
        yield "no causal mask", reading.attend(future=row.query_len)
    else:
        yield "misses the newest token", reading.of_tokens(0, row.kv_len - 1, row.context)
    yield "matches hidden keys that outweigh the seen ones: what hides them is no -inf", reading.attend(masked=1e4)
    if row.kv_len > 1:
        yield "misses the first token", reading.of_tokens(1, row.kv_len, row.context - 1)


def _heads(reading: Reading) -> Answers:
    """Mistakes in which KV head a query head reads."""
    row, spec = reading.row, reading.row.spec
    if 1 < spec.num_kv_heads < spec.num_heads:
        yield "matches GQA map h % kv_heads (query head h reads kv head h // group_size)", reading.attend(modulo=True)
        grouped = row.q.reshape(row.query_len, spec.group_size, spec.num_kv_heads, -1).transpose(1, 2).flatten(1, 2)
        yield "matches query heads in the order [group, kv head]; theirs is [kv head, group]", reading.attend(q=grouped)
    if spec.num_kv_heads > 1:
        keys, values = (of_heads[:, :1].expand_as(of_heads) for of_heads in (reading.keys, reading.values))
        yield "matches kv head 0 read by every query head", reading.attend(keys=keys, values=values)


def _lengths(reading: Reading) -> Answers:
    row, keys, values = reading.row, reading.keys, reading.values
    for most in sorted({1024, 2048, 4096, 8192, 128 * row.cache.block_size}):
        if most < row.kv_len:
            first = reading.attend(keys=keys[:most], values=values[:most])
            yield f"matches the first {most:,} tokens alone", first
            gone = row.kv_len - most
            yield f"matches the last {most:,} tokens alone", reading.of_tokens(gone, row.kv_len, row.context - gone)
    for earlier in reading.wrong.earlier:
        if earlier != reading.row.kv_len:
            answer = _at_length(reading.row, earlier)
            yield "matches stale lengths: those of an earlier step, of the capture or of the host", answer
    for place, length in reading.wrong.neighbours.items():
        if length not in (reading.row.kv_len, *reading.wrong.earlier):
            yield f"matches the length of the sequence {place} it: an index that is off by one", _at_length(reading.row, length)


def _places(reading: Reading) -> Answers:
    """Mistakes in where the sequence's tokens lie: its blocks, the slots of the last one, the layout."""
    row = reading.row
    count = row.cache.geometry.num_blocks
    if len(row.blocks) > 1:
        following = (row.blocks[0] + torch.arange(len(row.blocks))) % count
        yield "assumes contiguous blocks: matches the blocks after the first", _over(row, following)
        yield "matches the first block read again and again", _over(row, torch.full((len(row.blocks),), row.blocks[0]))
    yield "ignores the block table: matches blocks 0, 1, ...", _over(row, torch.arange(len(row.blocks)) % count)
    if len(reading.wrong.earlier_blocks) >= len(row.blocks):
        before = torch.tensor(reading.wrong.earlier_blocks[: len(row.blocks)])
        yield "matches the blocks that its row had in the step before: a plan that is kept too long", _over(row, before)
    size = row.cache.block_size
    whole = -(-row.kv_len // size) * size
    if whole != row.kv_len and row.query_len == 1:
        yield "reads the rest of the last block", _at_length(row, whole)
    if row.query_len == 1:
        yield "reads one slot past the end", _at_length(row, row.kv_len + 1)
    for layout in reading.wrong.layouts:
        cache = _read_as(row.cache, layout)
        if cache is not None:
            yield f"matches a {row.cache.layout.name} cache read as {layout.name}", expected(replace(row, cache=cache))[0]


def _strides(reading: Reading) -> Answers:
    """Mistakes in the strides of q, and in the rows and strides of the k and v that `prefill` was handed."""
    row, dense, asked = reading.row, reading.wrong.dense, reading.wrong.asked
    if asked is not None:
        yield "ignores the strides of q", reading.attend(q=_unstrided(asked)[-row.query_len :])
    if dense is None or row.context:
        return
    k, v = (t[: row.query_len].double() for t in dense)
    yield "matches this query over the first rows of the step's k and v", reading.attend(keys=k, values=v)
    for name, packed in (("k", (True, False)), ("v", (False, True)), ("k and v", (True, True))):
        k, v = (_unstrided(t) if wanted else t for t, wanted in zip(dense, packed, strict=True))
        k, v = k[-row.query_len :], v[-row.query_len :]
        if k.shape == reading.keys.shape and v.shape == reading.values.shape:
            yield f"ignores the strides of {name}", reading.attend(keys=k.double(), values=v.double(), context=0)


def _other_sequences(reading: Reading) -> Answers:
    row = reading.row
    for other in reading.wrong.others:
        if other.query_len == row.query_len and other.q.shape == row.q.shape:
            yield "matches the answer of another sequence or layer", expected(other)[0]
            k, v = other.kv()
            answer = reading.attend(keys=k, values=v, context=other.context)
            yield "matches this query over the cache of another sequence or layer", answer


def _weights(reading: Reading) -> Answers:
    spec = reading.row.spec
    if spec.value_in_key:
        last = reading.keys[..., -spec.v_head_dim :]
        yield "matches values that are the last elements of the key; they are its first", reading.attend(values=last)
    yield "matches values that are not weighted: an average over the keys", reading.with_spec(scale=1e-9)


MISTAKES: tuple[Callable[[Reading], Answers], ...] = (
    _scores,
    _window,
    _scales,
    _positions,
    _heads,
    _lengths,
    _places,
    _strides,
    _other_sequences,
    _weights,
)
"""The mistakes that are tried, by concept, the likeliest first."""


def _over(row: StepSequence, blocks: Tensor) -> Tensor:
    return attend(row.spec, row.q, *row.kv(row.slots(blocks, row.kv_len)), row.context)[0]


def _at_length(row: StepSequence, kv_len: int) -> Tensor | None:
    """The answer over the first kv_len slots of the sequence's blocks, and of block 0, which pads a table."""
    if kv_len < row.query_len:
        return None
    needed = -(-kv_len // row.cache.block_size)
    blocks = torch.tensor([*row.blocks, *[0] * (needed - len(row.blocks))])
    return attend(row.spec, row.q, *row.kv(row.slots(blocks, kv_len)), kv_len - row.query_len)[0]


def _without_scales(row: StepSequence) -> tuple[Tensor, Tensor]:
    """Keys and values as the numbers that the cache keeps of them."""
    cache, own = row.cache, {name: row.cache.tensors[name] for name in SCALES if name in row.cache.tensors}
    layout = CacheLayout("numbers", {name: cache.layout.tensors[name] for name in own}, cache.layout.pack_bytes)
    return replace(row, cache=LayerCache(own, layout, cache.geometry)).kv()


def _read_as(cache: LayerCache, layout: CacheLayout) -> LayerCache | None:
    """The same memory under another layout; None where its sizes differ."""
    if layout == cache.layout or set(layout.tensors) != set(cache.layout.tensors):
        return None
    empty = layout.allocate(cache.geometry, cache.k_scale, cache.v_scale)
    tensors = {}
    for name, tensor in cache.tensors.items():
        if empty.tensors[name].numel() != tensor.numel() or not tensor.is_contiguous():
            return None
        tensors[name] = tensor.view(empty.tensors[name].shape)
    return LayerCache(tensors, layout, cache.geometry, cache.k_scale, cache.v_scale)


def _unstrided(tensor: Tensor) -> Tensor:
    """What a kernel reads that takes a view for a tensor of its own."""
    strides: list[int] = []
    step = 1
    for length in reversed(tensor.shape):
        strides.insert(0, step)
        step *= length
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


TRAITS: dict[str, Callable[[StepSequence, int, int], bool]] = {
    "the last sequence of the step": lambda row, number, count: number == count - 1,
    "the first sequence of the step": lambda row, number, count: number == 0,
    "those with a context": lambda row, number, count: row.context > 0,
    "those without a context": lambda row, number, count: row.context == 0,
    "those whose context ends with a block": lambda row, number, count: (
        row.context > 0 and row.context % row.cache.block_size == 0
    ),
    "those that end with a block": lambda row, number, count: row.kv_len % row.cache.block_size == 0,
    "those of several blocks": lambda row, number, count: row.kv_len > row.cache.block_size,
    "those of more than 1,024 tokens": lambda row, number, count: row.kv_len > 1024,
    "those of one new token": lambda row, number, count: row.query_len == 1,
    "those of several new tokens": lambda row, number, count: row.query_len > 1,
    "those with an odd length": lambda row, number, count: row.kv_len % 2 == 1,
}


def trait(rows: Sequence[StepSequence], wrong: Sequence[int]) -> str:
    """What exactly the wrong sequences of a step share; empty if all are wrong, or nothing says it."""
    if len(wrong) == len(rows):
        return ""
    for name, holds in TRAITS.items():
        if [number for number, row in enumerate(rows) if holds(row, number, len(rows))] == list(wrong):
            return name
    return ""
