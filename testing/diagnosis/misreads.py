"""What an answer would be, had its kernel read elsewhere: other lengths, blocks, slots, strides or sequences."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.oracle.oracle import StepSequence, attend, expected
from headway.testing.diagnosis.mistakes import Answers, Reading

_LIMITS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ANOTHER_ORDER = "matches the right answers of the step's tokens in another order"
_MOST_MIXED = 1500
"""Tokens of sequences that are tried as one."""
_NAMED = 3
_BLOCK_LIMITS = (64, 128)
_SIZES = (8, 16, 32, 64, 128, 256)


def lengths(reading: Reading) -> Answers:
    """Mistakes in how many tokens a sequence has."""
    row, keys, values = reading.row, reading.keys, reading.values
    for earlier in dict.fromkeys(reading.wrong.earlier):
        if earlier != row.kv_len:
            answer = _at_length(row, earlier)
            yield "matches stale lengths: those of an earlier step, of the capture or of the host", answer
    for place, peer in reading.wrong.peers.items():
        if peer.kv_len not in (row.kv_len, *reading.wrong.earlier):
            yield f"matches the length of {place}", _at_length(row, peer.kv_len)
        if row.context and peer.context != row.context and row.query_len > 1:
            yield f"matches queries at the positions of {place}", reading.attend(first=peer.context)
    size = row.cache.block_size
    limits = {most: f"{most:,} tokens" for most in (*_LIMITS, *(size * blocks for blocks in _BLOCK_LIMITS))}
    limits |= {most: f"{limits[most]} ({most // size} blocks)" for most in limits if most // size in _BLOCK_LIMITS}
    for most, said in sorted(limits.items(), reverse=True):
        if most < row.kv_len:
            yield f"matches the first {said} alone", reading.attend(keys=keys[:most], values=values[:most])
            gone = row.kv_len - most
            yield f"matches the last {said} alone", reading.of_tokens(gone, row.kv_len, row.context - gone)


def places(reading: Reading) -> Answers:
    """Mistakes in where the sequence's tokens lie: its blocks, the slots of the last one, the layout."""
    row = reading.row
    count = row.cache.geometry.num_blocks
    if len(row.blocks) > 1:
        following = (row.blocks[0] + torch.arange(len(row.blocks))) % count
        yield "assumes contiguous blocks: matches the blocks after the first", _over(row, following)
        yield "matches the first block read again and again", _over(row, torch.full((len(row.blocks),), row.blocks[0]))
        yield "ignores the order of the block table: matches its blocks sorted", _over(row, torch.tensor(sorted(row.blocks)))
    yield "ignores the block table: matches blocks 0, 1, ...", _over(row, torch.arange(len(row.blocks)) % count)
    for before in dict.fromkeys(reading.wrong.earlier_blocks):
        kept = torch.tensor([*before, *[0] * len(row.blocks)])[: len(row.blocks)]
        yield "matches the blocks that its row had in a step before: a plan that is kept too long", _over(row, kept)
        mixed = torch.tensor([*before[: len(row.blocks) - 1], *row.blocks[len(before[: len(row.blocks) - 1]) :]])
        yield "matches a table of a step before, but for what has been added to it", _over(row, mixed)
    yield from _table_rows(reading)
    yield from _slots(reading)
    for layout in reading.wrong.layouts:
        cache = _read_as(row.cache, layout)
        if cache is not None:
            yield f"matches a {row.cache.layout.name} cache read as {layout.name}", expected(replace(row, cache=cache))[0]


def _table_rows(reading: Reading) -> Answers:
    """Mistakes in which row of the block table is read: another sequence's, or a row of another width."""
    row, wrong = reading.row, reading.wrong
    for place, peer in wrong.peers.items():
        blocks = torch.tensor([*peer.blocks, *[0] * len(row.blocks)])[: len(row.blocks)]
        yield f"matches the block table's row of {place}", _over(row, blocks)
    if wrong.table is None:
        return
    table, place = wrong.table, wrong.number - wrong.part.start
    size, longest = row.cache.block_size, {"step": wrong.rows, "part": wrong.rows[wrong.part]}
    widths = {-(-max(each.kv_len for each in rows) // size): f"{name}'s longest sequence" for name, rows in longest.items()}
    for width, said in widths.items():
        flat = table.flatten()[place * width :][: len(row.blocks)]
        if width != table.shape[1] and len(flat) == len(row.blocks):
            yield f"matches a block table whose rows are as wide as its {said} needs; they lie a stride apart", _over(row, flat)
    if not table.is_contiguous():
        flat = unstrided(table)[place][: len(row.blocks)]
        yield "ignores the strides of the block table", _over(row, flat.clamp(0))


def _slots(reading: Reading) -> Answers:
    """Mistakes in slots: those past the end, and positions that are cut into blocks of another size, or by tiles."""
    row, size = reading.row, reading.row.cache.block_size
    whole = -(-row.kv_len // size) * size
    if whole != row.kv_len and row.query_len == 1:
        yield "reads the rest of the last block", _at_length(row, whole)
    if row.query_len == 1:
        yield "reads one slot past the end", _at_length(row, row.kv_len + 1)
    at, blocks, count = torch.arange(row.kv_len), torch.tensor(row.blocks), row.cache.geometry.num_blocks
    for other in _SIZES:
        if other != size:
            slots = blocks[(at // other).clamp(max=len(blocks) - 1)] * other + at % other
            yield f"matches slots of blocks of {other} tokens; they have {size}", _over_slots(row, slots % (count * size))
        if other > size and other % size:
            column = (at // other * other // size + at % other // size).clamp(max=len(blocks) - 1)
            text = f"matches tiles of {other} keys that begin a block each; blocks of {size} tokens do not divide them"
            yield text, _over_slots(row, blocks[column] * size + at % size)
    if len(blocks) > 1:
        yield "matches the tokens of each block in reverse", _over_slots(row, blocks[at // size] * size + (size - 1 - at % size))


def strides(reading: Reading) -> Answers:
    """Mistakes in the strides of q, and in the rows and strides of the k and v that `prefill` was handed."""
    row, dense, asked = reading.row, reading.wrong.dense, reading.wrong.asked
    if asked is not None:
        yield "ignores the strides of q", reading.attend(q=unstrided(asked)[-row.query_len :])
        yield "ignores the strides of each sequence's q", reading.attend(q=unstrided(asked[-row.query_len :]))
    if dense is None or row.context:
        return
    k, v = (t[: row.query_len].double() for t in dense)
    yield "matches this query over the first rows of the step's k and v", reading.attend(keys=k, values=v)
    for name, packed in (("k", (True, False)), ("v", (False, True)), ("k and v", (True, True))):
        k, v = (unstrided(t) if wanted else t for t, wanted in zip(dense, packed, strict=True))
        k, v = k[-row.query_len :], v[-row.query_len :]
        if k.shape == reading.keys.shape and v.shape == reading.values.shape:
            yield f"ignores the strides of {name}", reading.attend(keys=k.double(), values=v.double(), first=0)
    if not row.spec.causal:
        yield from _padded(reading)


def _padded(reading: Reading) -> Answers:
    """Prompts that are padded to the longest of the step, where nothing hides the padding from a layer that is not causal."""
    row, dense = reading.row, reading.wrong.dense
    assert dense is not None
    beyond = max(each.query_len for each in reading.wrong.rows) - row.query_len
    zeros = [torch.cat([own, own.new_zeros(beyond, *own.shape[1:])]) for own in (reading.keys, reading.values)]
    seen = _seen_beyond(reading, beyond)
    yield (
        "matches padding up to the longest sequence that is seen: zeros count as keys",
        reading.attend(keys=zeros[0], values=zeros[1], unseen=seen),
    )
    following = [each.kv() for each in reading.wrong.rows[reading.wrong.number : reading.wrong.part.stop]]
    keys, values = (torch.cat(of_rows)[: row.kv_len + beyond] for of_rows in zip(*following, strict=True))
    yield (
        "matches the tokens of the next sequences seen as far as the longest one is long: nothing hides keys past the end",
        reading.attend(keys=keys, values=values, unseen=_seen_beyond(reading, len(keys) - row.kv_len)),
    )
    last = [torch.cat([own, own[-1:].expand(beyond, -1, -1)]) for own in (reading.keys, reading.values)]
    yield (
        "matches padding up to the longest sequence that is seen: its last token again",
        reading.attend(keys=last[0], values=last[1], unseen=_seen_beyond(reading, beyond)),
    )


def _seen_beyond(reading: Reading, beyond: int) -> Tensor:
    """What each query does not see, were there so many keys more."""
    row, window = reading.row, reading.row.spec.sliding_window
    ago = torch.arange(row.context, row.kv_len)[:, None] - torch.arange(row.kv_len + beyond)
    return torch.zeros_like(ago, dtype=torch.bool) if window is None else ago.abs() >= window


def other_sequences(reading: Reading) -> Answers:
    """Mistakes in whose tokens are read, and whose rows the answer is."""
    row, wrong = reading.row, reading.wrong
    for other in wrong.layers:
        yield "matches the answer of another layer", expected(other)[0]
        yield "matches this query over the cache of another layer", reading.attend(**_tokens_of(other), first=other.context)
    for place, peer in wrong.peers.items():
        if peer.kv_len == row.kv_len:  # the block table's row says it
            continue
        yield (
            f"matches this query over the tokens of {place}",
            reading.attend(**_tokens_of(peer), first=peer.kv_len - row.query_len),
        )
    part = wrong.rows[wrong.part]
    for text, rows in {"earlier": wrong.rows[wrong.part.start : wrong.number], "other": part}.items():
        if rows and wrong.dense is not None and sum(each.kv_len for each in rows) < _MOST_MIXED:
            read = rows if rows is part else [*rows, row]
            keys, values = (torch.cat(of_rows) for of_rows in zip(*(each.kv() for each in read), strict=True))
            before = sum(each.kv_len for each in wrong.rows[wrong.part.start : wrong.number]) + row.context
            yield (
                f"sees the tokens of the step's {text} sequences beside its own",
                reading.attend(keys=keys, values=values, first=before),
            )
    for other in [each for each in wrong.rows if each is not row][:8]:
        if other.q.shape == row.q.shape:
            yield (
                "matches this query over the cache of another sequence",
                reading.attend(**_tokens_of(other), first=other.context),
            )


def displaced(reading: Reading) -> Answers:
    """The right answers of the step's tokens in another order: each row of `out` is held against every one."""
    wrong = reading.wrong
    if not wrong.answers:
        return
    right, out = torch.cat(list(wrong.answers)), wrong.out.double()
    if len(right) * out.numel() > 2**24:
        return
    nearest = torch.cdist(out.nan_to_num(1e9).flatten(1), right.flatten(1)).argmin(1)
    first = sum(len(answer) for answer in wrong.answers[: wrong.number])
    shifts = set((nearest - torch.arange(first, first + len(out))).tolist())
    if shifts == {0}:
        return
    if len(shifts) == 1:
        shift = shifts.pop()
        yield f"matches the answer of the token {abs(shift)} rows {'before' if shift < 0 else 'after'} it", right[nearest]
    yield ANOTHER_ORDER, right[nearest]


def rearranged(reading: Reading) -> Answers:
    """The right answer with its heads or elements in other places: each is held against every one."""
    right, out = reading.wrong.right, reading.wrong.out.double().nan_to_num(1e9)
    if out.numel() > 2**20:
        return
    for axis, name in ((1, "head"), (2, "element")):
        apart = torch.cdist(out.movedim(axis, 0).flatten(1), right.movedim(axis, 0).flatten(1))
        nearest = apart.argmin(1)
        moved = (nearest != torch.arange(len(nearest))).nonzero().flatten().tolist()
        if moved:
            said = ", ".join(f"{at} holds that of {int(nearest[at])}" for at in moved[:_NAMED])
            more = ", ..." if len(moved) > _NAMED else ""
            yield f"the answers of other {name}s: {name} {said}{more}", right.index_select(axis, nearest)


def _tokens_of(row: StepSequence) -> dict[str, Tensor]:
    keys, values = row.kv()
    return {"keys": keys, "values": values}


def _over(row: StepSequence, blocks: Tensor) -> Tensor:
    return attend(row.spec, row.q, *row.kv(row.slots(blocks, row.kv_len)), row.context)[0]


def _over_slots(row: StepSequence, slots: Tensor) -> Tensor:
    return attend(row.spec, row.q, *row.kv(slots.to(row.q.device)), row.context)[0]


def _at_length(row: StepSequence, kv_len: int) -> Tensor | None:
    """The answer over the first kv_len slots of the sequence's blocks, and of block 0, which pads a table."""
    if kv_len < row.query_len:
        return None
    needed = -(-kv_len // row.cache.block_size)
    blocks = torch.tensor([*row.blocks, *[0] * (needed - len(row.blocks))])
    return attend(row.spec, row.q, *row.kv(row.slots(blocks, kv_len)), kv_len - row.query_len)[0]


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


def unstrided(tensor: Tensor) -> Tensor:
    """What a kernel reads that takes a view for a tensor of its own."""
    strides: list[int] = []
    step = 1
    for length in reversed(tensor.shape):
        strides.insert(0, step)
        step *= length
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())
