"""What an answer would be, had its kernel made one mistake or another: in the scores, the mask, the heads and the values.

Each concept yields pairs of a mistake's words and the float64 answer that the mistake gives; where the tokens are read from is in
`misreads`, and what tiles and few bits do in `tiled`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from headway.core.contract.layout import SCALES, CacheLayout, LayerCache
from headway.core.oracle.oracle import StepSequence, attend, expected


@dataclass(frozen=True)
class Wrong:
    """One sequence that came out wrong, with what else its step held."""

    number: int
    """The sequence's place in the step."""
    row: StepSequence
    out: Tensor
    dense: tuple[Tensor, Tensor] | None = None
    """The step's k and v as they were handed to `prefill`; None in decode."""
    asked: Tensor | None = None
    """The rows of q that its part of the step was handed, up to this sequence's last."""
    layers: Sequence[StepSequence] = ()
    """This sequence in the step's other layers."""
    rows: Sequence[StepSequence] = ()
    """Every sequence of the step, this one among them."""
    answers: Sequence[Tensor] = ()
    """The right answer of each of `rows`."""
    part: slice = field(default_factory=lambda: slice(0))
    """Which of `rows` its part of the step, prompts or decodes, was handed."""
    table: Tensor | None = None
    """The block table of its part."""
    earlier: Sequence[int] = ()
    """kv_len of the same row in the steps before, and at capture."""
    earlier_blocks: Sequence[tuple[int, ...]] = ()
    """Blocks of the same row in the steps before."""
    layouts: Sequence[CacheLayout] = ()

    @cached_property
    def right(self) -> Tensor:
        """The right answer."""
        return self.answers[self.number] if self.answers else expected(self.row)[0]

    @property
    def rows_wrong(self) -> int:
        """How many (token, head) rows hold a number."""
        return int((~self.out.isnan().any(-1)).sum())

    @property
    def peers(self) -> dict[str, StepSequence]:
        """Sequences that a kernel may take for this one by a wrong index, by where they stand."""
        own, place = self.rows[self.part], self.number - self.part.start
        other = [*self.rows[: self.part.start], *self.rows[self.part.stop :]]
        found = {"the first sequence of its part of the step": own[:1], "the last sequence of its part of the step": own[-1:]}
        found |= {
            "the sequence before it": own[place - 1 : place] if place else (),
            "the sequence after it": own[place + 1 :][:1],
        }
        found["the sequence at its place in the other part of the step"] = other[place : place + 1]
        found["the longest sequence of its part of the step"] = sorted(own, key=lambda row: -row.kv_len)[:1]
        return {name: rows[0] for name, rows in found.items() if rows and rows[0] is not self.row}


@dataclass(frozen=True)
class Reading:
    """A wrong sequence with its keys and values, in float64, as a right backend reads them."""

    wrong: Wrong
    row: StepSequence
    keys: Tensor
    values: Tensor

    def attend(self, **changes: object) -> Tensor:
        """The answer with a few arguments changed: `spec`, `q`, `keys`, `values`, `first`, or a keyword of `oracle.attend`."""
        row = self.row
        right = {"spec": row.spec, "q": row.q, "keys": self.keys, "values": self.values, "first": row.context}
        return attend(**(right | changes))[0]  # type: ignore[arg-type]

    def with_spec(self, **changes: object) -> Tensor:
        """The answer of a layer whose spec differs in a few fields."""
        return self.attend(spec=replace(self.row.spec, **changes))  # type: ignore[arg-type]

    def ago(self) -> Tensor:
        """How many positions before each query each key lies: [query_len, kv_len]."""
        row = self.row
        return torch.arange(row.context, row.kv_len, device=row.q.device)[:, None] - torch.arange(row.kv_len, device=row.q.device)

    def hidden(self) -> Tensor:
        """Which keys each query does not see, where everything is right: bool [query_len, kv_len]."""
        ago, window = self.ago(), self.row.spec.sliding_window
        hidden = torch.zeros_like(ago, dtype=torch.bool)
        if self.row.spec.causal:
            hidden = ago < 0
        return hidden if window is None else hidden | (ago.abs() >= window)

    def of_tokens(self, first: int, end: int, context: int) -> Tensor | None:
        """The answer over some of the tokens alone; None where none are left."""
        return self.attend(keys=self.keys[first:end], values=self.values[first:end], first=context) if first < end else None


Answers = Iterator[tuple[str, Tensor | None]]


def reading_of(wrong: Wrong) -> Reading:
    """Read a sequence's keys and values as a right backend does."""
    row, spec = wrong.row, wrong.row.spec
    keys, values = row.kv()
    if spec.sliding_window is not None:  # in place of blocks behind the window the table names one that holds zeros
        size = row.cache.block_size
        behind = max(row.context - spec.sliding_window + 1, 0) // size * size
        keys[:behind] = values[:behind] = 0.0
    return Reading(wrong, row, keys, values)


_TANH: dict[str, Callable[[Tensor], Tensor]] = {
    "x cut at 1": lambda x: x.clamp(-1, 1),
    "x / (1 + |x|)": lambda x: x / (1 + x.abs()),
    "x / sqrt(1 + x^2)": lambda x: x / (1 + x.square()).sqrt(),
    "x (27 + x^2) / (27 + 9 x^2)": lambda x: (x * (27 + x.square()) / (27 + 9 * x.square())).clamp(-1, 1),
    "x - x^3 / 3": lambda x: (x - x**3 / 3).clamp(-1, 1),
}


def scores(reading: Reading) -> Answers:
    """Mistakes in what a layer does to its scores: soft-cap, sinks, ALiBi."""
    spec, with_spec = reading.row.spec, reading.with_spec
    if spec.softcap is not None:
        yield "matches the answer without the soft-cap", with_spec(softcap=None)
        yield "matches a soft-cap applied before the scale", with_spec(softcap=spec.softcap * spec.scale)
        cap = spec.softcap
        for text, tanh in _TANH.items():
            yield f"matches a soft-cap with {text} in place of tanh(x)", reading.attend(tanh=tanh)
        yield "matches a soft-cap without its division: cap * tanh(score)", reading.attend(tanh=lambda x: torch.tanh(x * cap))
        yield "matches a soft-cap without its factor: tanh(score / cap)", reading.attend(tanh=lambda x: torch.tanh(x) / cap)
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
        yield from _distances(reading)
        slopes, kv_heads = spec.alibi_slopes, spec.num_kv_heads
        yield "matches the ALiBi slopes of other heads: in reverse", with_spec(alibi_slopes=slopes[::-1])
        grouped = tuple(slopes[head % spec.group_size * kv_heads + head // spec.group_size] for head in range(spec.num_heads))
        yield "matches ALiBi slopes in the order [group, kv head]; theirs is [kv head, group]", with_spec(alibi_slopes=grouped)
        of_group = tuple(slopes[head // spec.group_size] for head in range(spec.num_heads))
        yield "matches ALiBi slopes read by kv head: query head h takes that of its group", with_spec(alibi_slopes=of_group)


def _distances(reading: Reading) -> Answers:
    """Mistakes in the distances and slopes of ALiBi."""
    row, spec, ago = reading.row, reading.row.spec, reading.ago().double()
    slopes = spec.alibi_slopes or ()
    by_key = ago - ago[:, :1]
    yield "matches ALiBi by the key's position alone, without the query's", reading.attend(distances=by_key)
    longest = max((each.kv_len for each in reading.wrong.rows[reading.wrong.part]), default=row.kv_len)
    text = "matches ALiBi distances counted from the end of the longest sequence"
    yield text, reading.attend(distances=ago + longest - row.kv_len)
    scaled = tuple(each * spec.scale for each in slopes)
    yield "matches ALiBi slopes multiplied by the scale", reading.with_spec(alibi_slopes=scaled)
    for power in range(7, 13):
        for most in ((1 << power) - 1, 1 << power):
            yield f"matches ALiBi distances that stop at {most}", reading.attend(distances=ago.clamp(max=most))
    for kind in (torch.bfloat16, torch.float16):
        name = str(kind).removeprefix("torch.")
        yield f"matches ALiBi distances in {name}", reading.attend(distances=ago.to(kind).double())
        queries, keys = torch.arange(row.context, row.kv_len)[:, None].to(kind), torch.arange(row.kv_len).to(kind)
        yield f"matches ALiBi by positions in {name}", reading.attend(distances=(queries - keys).double())


def window(reading: Reading) -> Answers:
    """Mistakes in a window's size, side and place."""
    row, spec, with_spec = reading.row, reading.row.spec, reading.with_spec
    if spec.sliding_window is None:
        return
    yield "a window off by one (one key too many)", with_spec(sliding_window=spec.sliding_window + 1)
    if spec.sliding_window > 1:
        yield "a window off by one (one key too few)", with_spec(sliding_window=spec.sliding_window - 1)
    yield "matches the answer without the sliding window", with_spec(sliding_window=None)
    yield "a window of the wrong side: the keys before it are seen, and its own are hidden", reading.attend(old=True)
    ago = reading.ago()
    if row.query_len > 1:
        hidden = ago < 0 if spec.causal else ago <= -spec.sliding_window
        of_last = hidden | (ago[-1:] >= spec.sliding_window)
        yield "a window that begins, for each query, where that of the last query does", reading.attend(unseen=of_last)
        of_first = hidden | (ago[:1] >= spec.sliding_window)
        yield "a window that begins, for each query, where that of the first query does", reading.attend(unseen=of_first)
    if not spec.causal:
        yield "a window that bounds the earlier keys alone", reading.attend(unseen=ago >= spec.sliding_window)
        yield "a window that bounds the later keys alone", reading.attend(unseen=ago <= -spec.sliding_window)
        half = spec.sliding_window // 2
        yield "a window of half the size on each side", reading.attend(unseen=ago.abs() > half)


def scales(reading: Reading) -> Answers:
    """Mistakes in the cache's scales, then in that of the scores."""
    spec, with_spec = reading.row.spec, reading.with_spec
    if reading.row.cache.layout.has_scales:
        keys, values = _without_scales(reading.row)
        yield "matches a cache whose keys are read without their scales", reading.attend(keys=keys)
        yield "matches a cache whose values are read without their scales", reading.attend(values=values)
        yield "matches a cache whose numbers are read without their scales", reading.attend(keys=keys, values=values)
        key_scales, value_scales = _ratio(reading.keys, keys), _ratio(reading.values, values)
        yield "matches values read with the keys' scales", reading.attend(values=values * key_scales)
        yield "matches keys read with the values' scales", reading.attend(keys=keys * value_scales)
        own = reading.attend(keys=keys * key_scales[:, :1], values=values * value_scales[:, :1])
        yield "matches the scales of kv head 0 for every head", own
        one = reading.attend(keys=keys * key_scales[:1], values=values * value_scales[:1])
        yield "matches the scales of the first token for every token", one
    elif spec.cache_dtype != spec.dtype:
        keys, values = reading.keys / spec.k_scale, reading.values / spec.v_scale
        yield "matches a cache read without k_scale", reading.attend(keys=keys)
        yield "matches a cache read without v_scale", reading.attend(values=values)
        yield "matches a cache read without k_scale and v_scale", reading.attend(keys=keys, values=values)
        yield "matches values read with k_scale in place of v_scale", reading.attend(values=values * spec.k_scale)
        yield "matches keys read with v_scale in place of k_scale", reading.attend(keys=keys * spec.v_scale)
        if spec.softcap is not None:
            yield "matches a soft-cap applied before k_scale", with_spec(softcap=spec.softcap * spec.k_scale)
    for most in (10, 20, 30, 50, 60, 64, 80, 88, 100, 127):
        yield f"matches scores cut at {most}", reading.attend(bend=lambda scores, most=most: scores.clamp(-most, most))
    yield "matches scale 1/sqrt(head_dim) instead of the spec's", with_spec(scale=spec.head_dim**-0.5)
    log2 = math.log2(math.e)
    yield "matches powers of two of scores without the factor log2(e)", with_spec(scale=spec.scale / log2)
    yield "matches powers of e of scores with the factor log2(e)", with_spec(scale=spec.scale * log2)
    yield "matches a scale that is applied twice", with_spec(scale=spec.scale**2)
    yield "matches scores without a scale", with_spec(scale=1.0)
    if spec.v_head_dim != spec.head_dim:
        yield "matches scale 1/sqrt(v_head_dim)", with_spec(scale=spec.v_head_dim**-0.5)


def positions(reading: Reading) -> Answers:
    """Mistakes in which tokens a query sees: the context, the causal mask, the first and the newest token."""
    row = reading.row
    if row.context:
        yield "ignores the context: matches this step's tokens alone", reading.of_tokens(row.context, row.kv_len, 0)
        own = {"keys": reading.keys[row.context :], "values": reading.values[row.context :]}
        yield "ignores the context: matches this step's tokens alone, all seen by each query", reading.attend(**own)
        yield "matches queries that sit at positions 0, 1, ... in place of after the context", reading.attend(first=0)
        for size, name in ((row.cache.block_size, "block"), (64, "tile of 64"), (128, "tile of 128")):
            if row.context % size:
                text = f"matches queries whose positions count from the context's last whole {name}"
                yield text, reading.attend(first=row.context // size * size)
    most = max((each.query_len for each in reading.wrong.rows[reading.wrong.part]), default=row.query_len)
    text = "matches queries whose positions count back by the most new tokens of any sequence of the step, not by their own"
    yield text, reading.attend(first=row.kv_len - most)
    if row.query_len > 1:
        yield "a causal mask off by one (a query sees the next token)", reading.attend(future=1)
        yield "a causal mask off by one (a query does not see itself)", reading.attend(future=-1)
        if not row.spec.causal:
            yield "a causal mask, in a layer whose queries see later keys", reading.with_spec(causal=True)
        yield "no causal mask", reading.attend(future=row.query_len)
    else:
        yield "misses the newest token", reading.of_tokens(0, row.kv_len - 1, row.context)
    unwritten = [torch.cat([own[: row.context], torch.zeros_like(own[row.context :])]) for own in (reading.keys, reading.values)]
    text = "matches what lies in the new tokens' slots before they are written: write_and_decode writes first, then reads"
    yield text, reading.attend(keys=unwritten[0], values=unwritten[1])
    yield "matches hidden keys that outweigh the seen ones: what hides them is no -inf", reading.attend(masked=1e4)
    if row.kv_len > 1:
        yield "misses the first token", reading.of_tokens(1, row.kv_len, row.context - 1)


_HEAD_TILES = (8, 16, 32, 64)


def heads(reading: Reading) -> Answers:
    """Mistakes in which kv head a query head reads, and in which query it is."""
    row, spec = reading.row, reading.row.spec
    if 1 < spec.num_kv_heads < spec.num_heads:
        yield "matches GQA map h % kv_heads (query head h reads kv head h // group_size)", reading.attend(modulo=True)
        grouped = row.q.reshape(row.query_len, spec.group_size, spec.num_kv_heads, -1).transpose(1, 2).flatten(1, 2)
        yield "matches query heads in the order [group, kv head]; theirs is [kv head, group]", reading.attend(q=grouped)
    if spec.num_kv_heads > 1:
        keys, values = (of_heads[:, :1].expand_as(of_heads) for of_heads in (reading.keys, reading.values))
        yield "matches kv head 0 read by every query head", reading.attend(keys=keys, values=values)
    numbers = torch.arange(spec.num_heads, device=row.q.device)
    place = numbers % spec.group_size
    for size in _HEAD_TILES:
        if size < spec.group_size:
            text = f"matches tiles of {size} query heads of a kv head, all of which take the queries of the first tile"
            yield text, reading.attend(q=row.q[:, numbers - place + place % size])


_MOST_APART = 8
"""Kv heads up to which keys and values are told apart."""
_MOST_NAMED = 6
"""Groups of query heads that a guess lists."""


def heads_read(reading: Reading) -> Answers:
    """Which kv head each query head's answer comes of, found by trying every one; and the answer that this gives."""
    spec, out = reading.row.spec, reading.wrong.out.double()
    if spec.num_kv_heads == 1:
        return
    for name, of_keys, of_values in (("", True, True), (" of the values", False, True), (" of the keys", True, False)):
        if name and spec.num_kv_heads > _MOST_APART:
            return
        tried = []
        for head in range(spec.num_kv_heads):
            one = [own[:, head : head + 1].expand_as(own) for own in (reading.keys, reading.values)]
            tried.append(reading.attend(keys=one[0] if of_keys else reading.keys, values=one[1] if of_values else reading.values))
        apart = torch.stack([(answer - out).nan_to_num(torch.inf).norm(dim=(0, 2)) for answer in tried])
        read = apart.argmin(0).tolist()
        answer = torch.stack([tried[of][:, head] for head, of in enumerate(read)], dim=1)
        said = _mapped(read, spec.group_size)
        yield f"wrong kv heads{name} (query head h reads number h // {spec.group_size}): query heads {said}", answer


def _mapped(read: Sequence[int], group: int) -> str:
    """Words for query heads that read another kv head than theirs. read: the one that each of them reads."""
    groups: list[list[int]] = []
    for head, of in enumerate(read):
        if of == head // group:
            continue
        if groups and groups[-1][1] == head - 1 and groups[-1][2] == of:
            groups[-1][1] = head
        else:
            groups.append([head, head, of])
    said = ", ".join(f"{first} to {last} read {of}" for first, last, of in groups[:_MOST_NAMED])
    more = ", ..." if len(groups) > _MOST_NAMED else ""
    return f"{said}{more}"


def weights(reading: Reading) -> Answers:
    """Mistakes in values, in what weighs them, and in how much of a key is read."""
    spec = reading.row.spec
    if spec.value_in_key:
        last = reading.keys[..., -spec.v_head_dim :]
        yield "matches values that are the last elements of the key; they are its first", reading.attend(values=last)
    if reading.keys.shape == reading.values.shape and not spec.value_in_key:
        yield "matches keys taken for values, and values for keys", reading.attend(keys=reading.values, values=reading.keys)
    if spec.head_dim % 2 == 0:
        halves = reading.keys.reshape(*reading.keys.shape[:-1], 2, -1)
        yield "matches keys whose halves are exchanged", reading.attend(keys=halves.flip(-2).flatten(-2))
        yield (
            "matches keys in pairs of elements, where halves are asked for",
            reading.attend(keys=halves.transpose(-1, -2).flatten(-2)),
        )
        pairs = reading.keys.reshape(*reading.keys.shape[:-1], -1, 2)
        yield "matches keys whose odd and even elements are exchanged", reading.attend(keys=pairs.flip(-1).flatten(-2))
        yield (
            "matches keys in halves, where pairs of elements are asked for",
            reading.attend(keys=pairs.transpose(-1, -2).flatten(-2)),
        )
    hidden = reading.hidden()
    if hidden.numel() * spec.num_heads < 2**22:
        for below in (4, 5, 6, 8, 10, 12, 16, 20):
            text = f"matches an answer without the keys whose scores lie {below} or more below the largest"
            yield text, reading.attend(bend=lambda scores, below=below: _pruned(scores, hidden, below))
    yield "matches values that are not weighted: an average over the keys", reading.with_spec(scale=1e-9)
    for size in (8, 16, 32, 64, 128):
        whole = spec.head_dim // size * size
        if 0 < whole < spec.head_dim:
            keys = reading.keys.clone()
            keys[..., whole:] = 0.0
            yield f"matches scores over the first {whole} of {spec.head_dim} elements of a head", reading.attend(keys=keys)


def _pruned(scores: Tensor, hidden: Tensor, below: int) -> Tensor:
    largest = scores.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
    return scores.masked_fill(scores < largest - below, -torch.inf)


def _ratio(scaled: Tensor, plain: Tensor) -> Tensor:
    """The scale of each token and head, [m, kv_heads, 1]."""
    at = plain.abs().argmax(-1, keepdim=True)
    return (scaled.gather(-1, at) / plain.gather(-1, at)).nan_to_num(1.0)


def _without_scales(row: StepSequence) -> tuple[Tensor, Tensor]:
    """Keys and values as the numbers that the cache keeps of them."""
    cache, own = row.cache, {name: row.cache.tensors[name] for name in SCALES if name in row.cache.tensors}
    layout = CacheLayout("numbers", {name: cache.layout.tensors[name] for name in own}, cache.layout.pack_bytes)
    return replace(row, cache=LayerCache(own, layout, cache.geometry)).kv()
