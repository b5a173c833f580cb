"""What an answer would be, had its kernel made a mistake of tiles, splits or types: a mask by whole tiles, lost tails, parts that
are merged wrongly, sums and scores of few bits."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.testing.diagnosis.mistakes import Answers, Reading

_TILES = (16, 32, 64, 128, 256)
_QUERY_TILES = (16, 32, 64, 128)
_PARTS = (512, 1024, 2048, 4096, 8192)
_SPLITS = (2, 3, 4, 5, 7, 8, 16)
_MOST_TILES = 1100
"""Tiles of a sequence up to which sums are followed tile by tile."""
SHORT = (torch.bfloat16, torch.float16)


def masks(reading: Reading) -> Answers:
    """Mistakes of a mask that is taken for whole tiles of keys, or of keys that are passed over by whole tiles."""
    row, spec = reading.row, reading.row.spec
    key = torch.arange(row.kv_len)
    at = torch.arange(row.context, row.kv_len)[:, None]
    hidden, ago = reading.hidden(), reading.ago()
    behind = hidden & (ago > 0)
    for size in _tiles(reading):
        tile = key // size
        if row.query_len > 1 and spec.causal:
            own = behind | (key >= (at // size + 1) * size)
            yield f"a causal mask by whole tiles: a query sees its tile of {size} keys to its end", reading.attend(unseen=own)
            whole = hidden & ~((tile + 1) * size < row.kv_len) | behind
            text = f"no causal mask in tiles of {size} keys that end before the sequence's last token"
            yield text, reading.attend(unseen=whole)
        tail = row.kv_len // size * size
        yield f"loses the last keys, which fill no tile of {size}", reading.attend(unseen=hidden | (key >= tail))
        if spec.sliding_window is not None:
            yield from _window_tiles(reading, size)
    size = row.cache.block_size
    if row.context % size and row.query_len > 1:
        part = (key >= row.context // size * size) & (key < row.context)
        yield "misses the context's last block, which is not full", reading.attend(unseen=hidden | part)
    yield "misses the first block", reading.attend(unseen=hidden | (key < size))
    yield "misses the last block", reading.attend(unseen=hidden | (key >= (row.kv_len - 1) // size * size))
    for splits in _SPLITS:
        whole_split = row.kv_len // splits
        text = f"loses the last keys of {splits} splits: the length does not divide by their number"
        yield text, reading.attend(unseen=hidden | (key >= whole_split * splits))
        text = f"only the first of {splits} splits counts"
        yield text, reading.attend(unseen=hidden | (key >= -(-row.kv_len // splits)))


def _window_tiles(reading: Reading, size: int) -> Answers:
    """Windows whose begin is rounded to tiles: for every query of a tile of queries as for its first."""
    row, window = reading.row, reading.row.spec.sliding_window
    assert window is not None
    key, at = torch.arange(row.kv_len), torch.arange(row.context, row.kv_len)[:, None]
    hidden, ago = reading.hidden(), reading.ago()
    for queries in (row.query_len, *(each for each in _QUERY_TILES if each < row.query_len)):
        first = row.context + (at - row.context) // queries * queries
        begin = (first - window + 1).clamp(min=0)
        up = hidden | (key < -(-begin // size) * size)
        yield (
            f"a window whose begin is rounded up to whole tiles of {size} keys: keys that are seen are passed over",
            (reading.attend(unseen=up)),
        )
        early = hidden | (key < (begin // size + 1) * size)
        text = f"a window that begins a tile of {size} keys too late: keys that are seen are passed over"
        yield text, reading.attend(unseen=early)
        last = (first + queries - 1).clamp(max=row.kv_len - 1)
        of_last = hidden | (key < (last - window + 1).clamp(min=0) // size * size)
        text = f"a window whose first tile of {size} keys is that of the last query for all: keys that are seen are passed over"
        yield text, reading.attend(unseen=of_last)
        later = (ago < 0) if row.spec.causal else (ago <= -window)
        down = later | (key < begin // size * size)
        yield f"a window by whole tiles of {size} keys: it begins where its first tile does", reading.attend(unseen=down)


def empties(reading: Reading) -> Answers:
    """Queries that have seen no key yet when their first tile ends, and become NaN: zeros stand for NaN here."""
    row = reading.row
    if not bool(reading.wrong.out.isnan().any()):
        return
    hidden, right = reading.hidden(), reading.attend()
    for size in _tiles(reading):
        for queries in (row.query_len, *(each for each in _QUERY_TILES if each < row.query_len)):
            blind = torch.zeros(row.query_len, dtype=torch.bool)
            for start in range(0, row.query_len, queries):
                seen = ~hidden[start : start + queries]
                tiles = torch.stack([part.any(1) for part in torch.split(seen, size, dim=1)], 1)  # [n, tiles]
                read = tiles.any(0).nonzero().flatten()
                if len(read):
                    blind[start : start + queries] = ~tiles[:, read[0]]
            if bool(blind.any()) and not bool(blind.all()):
                text = f"NaN for queries that see no key of the first tile of {size}: exp(-inf - -inf) has no guard"
                yield text, right.masked_fill(blind[:, None, None], 0.0)


def merges(reading: Reading) -> Answers:
    """Mistakes in how the parts of a sequence are put together."""
    row = reading.row
    hidden = reading.hidden()
    cuts = {f"tiles of {size} keys": size for size in _tiles(reading)}
    cuts |= {f"parts of {size:,} keys": size for size in _PARTS}
    cuts |= {f"{splits} splits": -(-row.kv_len // splits) for splits in _SPLITS}
    for said, size in cuts.items():
        if not size < row.kv_len or row.kv_len > 64 * size:
            continue
        key = torch.arange(row.kv_len)
        outs, seen = [], []
        for start in range(0, row.kv_len, size):
            outside = hidden | (key < start) | (key >= start + size)
            outs.append(reading.attend(unseen=outside))
            seen.append(~outside.all(1))
        weights = torch.stack(seen).double()
        mean = torch.einsum("pnhd,pn->nhd", torch.stack(outs), weights / weights.sum(0).clamp(min=1.0))
        yield f"matches the mean of {said}: each weighs alike, whatever its sum of weights is", mean
        yield f"matches the sum of {said}, each with weights that add up to one", torch.stack(outs).sum(0)
        yield f"matches the last of {said} alone", outs[-1]
        text = f"matches a result that is not rescaled when {said} bring a larger score"
        yield text, _summed(reading, size, torch.float64, rescaled=False)


def roundings(reading: Reading) -> Answers:
    """Mistakes in the type in which something is kept on the way."""
    row, spec = reading.row, reading.row.spec
    kinds = [kind for kind in (spec.dtype, *SHORT) if kind in SHORT]
    for kind in dict.fromkeys(kinds):
        name = str(kind).removeprefix("torch.")
        scaled = (row.q.double() * spec.scale).to(kind).double() / spec.scale
        yield f"matches q that is rounded to {name} once it is scaled", reading.attend(q=scaled)
        yield (
            f"matches scores that are rounded to {name}",
            reading.attend(bend=lambda scores, kind=kind: scores.to(kind).double()),
        )
        if kind != spec.dtype:
            yield (
                f"matches q, k and v that are rounded to {name}",
                reading.attend(q=row.q.to(kind), keys=reading.keys.to(kind).double(), values=reading.values.to(kind).double()),
            )
        if row.query_len * row.kv_len < 2**18:
            for size in _tiles(reading):
                yield f"matches sums that are kept in {name} from tile to tile", _summed(reading, size, kind)


def _summed(reading: Reading, size: int, kind: torch.dtype, *, rescaled: bool = True) -> Tensor | None:
    """The answer by an online softmax over tiles of so many keys, whose sums are rounded after each. rescaled: whether the result
    is, to a larger maximum."""
    row, spec = reading.row, reading.row.spec
    if row.kv_len > _MOST_TILES * size or spec.sinks is not None or spec.alibi_slopes is not None:
        return None
    heads = torch.arange(spec.num_heads) // spec.group_size
    scores = torch.einsum("qhd,khd->qhk", row.q.double(), reading.keys[:, heads]) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(reading.hidden()[:, None], -torch.inf)
    values = reading.values[:, heads]
    most = torch.full(scores.shape[:2], -torch.inf, dtype=torch.float64)
    total = torch.zeros_like(most)
    result = torch.zeros(*scores.shape[:2], values.shape[-1], dtype=torch.float64)
    for start in range(0, row.kv_len, size):
        part = scores[..., start : start + size]
        new = torch.maximum(most, part.amax(-1))
        weights = (part - new[..., None]).exp().nan_to_num(0.0)
        kept = (most - new).exp().nan_to_num(0.0)
        total = (total * kept + weights.sum(-1)).to(kind).double()
        before = result * kept[..., None] if rescaled else result
        result = (before + torch.einsum("qhk,khd->qhd", weights, values[start : start + size])).to(kind).double()
        most = new
    return (result / total[..., None]).nan_to_num(0.0)


def _tiles(reading: Reading) -> list[int]:
    """Sizes of tiles that kernels have, and that of a block."""
    return sorted({*_TILES, reading.row.cache.block_size})
