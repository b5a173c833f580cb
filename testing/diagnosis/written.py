"""What a cache that a backend has written itself, or rows of `out` that it has not, look like."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.core.oracle.steps import UNWRITTEN, Foreign, StepInputs, bits

_ALIKE = 0.2
"""Rows that are nearer than this to the right ones hold the right tokens, rounded otherwise."""


def looks_of_cache(
    given: Foreign, right: Foreign, inputs: StepInputs, slots: Tensor, missing: Sequence[int], stray: Sequence[int]
) -> str:
    """A guess about a cache that is not as the layout's writer leaves it.

    inputs: the step's; slots: int64 [num_tokens], where its tokens belong, -1 for padding; missing: slots of new tokens that are
    wrong; stray: those of no new token that are changed.
    """
    if missing and stray:
        return _moved(given, right, missing, stray)
    if missing:
        return _values(given, right, inputs, slots, missing)
    return _strayed(given, right, stray)


def _moved(given: Foreign, right: Foreign, missing: Sequence[int], stray: Sequence[int]) -> str:
    for shift in sorted({other - slot for slot in missing[:1] for other in stray}, key=abs):
        moved = [(slot, slot + shift) for slot in missing if slot + shift in set(stray)]
        if moved and len(moved) >= len(stray) / 2:
            theirs, ours = (torch.tensor(each) for each in zip(*moved, strict=True))
            if torch.equal(_rows(right, theirs), _rows(given, ours)):
                return f"writes to the wrong slot: {abs(shift)} {'after' if shift > 0 else 'before'} the right one"
    return "writes to the wrong slot"


def _strayed(given: Foreign, right: Foreign, stray: Sequence[int]) -> str:
    if not stray:
        return "writes to the cache, beside its rows"
    at = torch.tensor(sorted(stray))
    was, now = _rows(right, at), _rows(given, at)
    if (
        was.isfinite().logical_not().any()
        and bool((now == 0)[~was.isfinite()].all())
        and torch.equal(now[was.isfinite()], was[was.isfinite()])
    ):
        return "writes to the cache: puts zeros where there was NaN, into slots that belong to others (clean a copy)"
    if not bool(now.any()):
        return "writes to the cache: puts zeros into slots that belong to others"
    return "writes to the cache"


def _values(given: Foreign, right: Foreign, inputs: StepInputs, slots: Tensor, missing: Sequence[int]) -> str:
    """What the new tokens' slots hold in place of what the writer leaves."""
    at = torch.tensor(missing)
    was, now = _rows(right, at), _rows(given, at)
    k, v = given.cache.gather(at)
    if not bool(now.isfinite().any()):
        return "forgets to write the new token"
    cache, token = given.cache, {slot: number for number, slot in enumerate(slots.tolist())}
    rows = torch.tensor([token[slot] for slot in missing])
    kind = k.dtype
    if kind.itemsize == 1 and kind.is_floating_point:
        most = torch.finfo(kind).max
        for name, k_scale, v_scale in (
            ("without dividing by the scales", 1.0, 1.0),
            ("with k_scale and v_scale exchanged", cache.v_scale, cache.k_scale),
            ("multiplied by the scales, which divide", 1 / cache.k_scale, 1 / cache.v_scale),
        ):
            made = [
                (x[rows].float() / scale).clamp(-most, most).to(kind) for x, scale in ((inputs.k, k_scale), (inputs.v, v_scale))
            ]
            if _same(k, made[0]) and _same(v, made[1]):
                return f"writes keys and values {name}"
        made = [
            (x[rows] / scale).clamp(-most, most).to(kind) for x, scale in ((inputs.k, cache.k_scale), (inputs.v, cache.v_scale))
        ]
        if _same(k, made[0]) and _same(v, made[1]):
            name = str(inputs.k.dtype).removeprefix("torch.")
            return f"divides by the scale in {name} and rounds twice; the writer divides in float32"
        beyond = was.abs() >= most
        if bool(beyond.any()) and _same(was[~beyond], now[~beyond]):
            return "writes numbers beyond the cache's type without stopping at its largest"
    if (
        kind == inputs.k.dtype
        and now.shape == was.shape
        and k.shape == v.shape
        and _same(k, inputs.v[rows])
        and _same(v, inputs.k[rows])
    ):
        return "writes values as keys and keys as values"
    apart = float((now - was).nan_to_num(0.0).norm() / was.nan_to_num(0.0).norm())
    if bool(now.isfinite().all()) and apart < _ALIKE:
        return f"writes the new tokens rounded otherwise than the layout's writer (apart by {apart:.1g})"
    half = "keys" if _same(v, right.cache.gather(at)[1]) else "values" if _same(k, right.cache.gather(at)[0]) else "tokens"
    return f"writes the new {half} wrongly"


def _rows(foreign: Foreign, slots: Tensor) -> Tensor:
    """Keys and values of slots, float64 [slots, numbers]."""
    return torch.cat([each.double().flatten(1) for each in foreign.cache.gather(slots)], dim=1)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.double().nan_to_num(3e38), other.double().nan_to_num(3e38))


def unwritten_parts(out: Tensor, group: int) -> str:
    """Say which part of every sequence is unwritten. out: [num_tokens, num_heads, v_head_dim], rows of one or several sequences;
    group: query heads of a kv head.

    Returns words for its first or last token, for heads or for elements, or ""."""
    missed = bits(out) == UNWRITTEN[out.dtype]
    if len(out) > 1 and bool(missed[-1].all()) and not bool(missed[:-1].any()):
        return "the last new token"
    if len(out) > 1 and bool(missed[0].all()) and not bool(missed[1:].any()):
        return "the first new token"
    for name, where in (("heads", missed.any(0).any(-1)), ("elements", missed.any(0).any(0))):
        count, numbers = len(where), where.nonzero().flatten().tolist()
        if numbers and len(numbers) < count:
            first, last = numbers[0], numbers[-1]
            if last - first + 1 == len(numbers):
                behind = f"from {first} on" if last == count - 1 else f"{first} to {last}"
                return f"{name} {behind}, of {count}"
            in_groups = where.view(-1, group) if name == "heads" else where[None]
            if bool((in_groups == in_groups[:1]).all()):
                return f"{name} from {first} on, of the {group} of each kv head"
            return f"{len(numbers)} of {count} {name}, first {first}"
    return ""


def unwritten_behind(out: Tensor) -> int:
    """The number of tokens, at least 32, behind which every row is unwritten and before which none is; 0: there is none. out: of
    one part of a step, [num_tokens, num_heads, v_head_dim]."""
    missed = (bits(out) == UNWRITTEN[out.dtype]).flatten(1)
    count = int((~missed.any(1)).sum())
    return count if 32 <= count < len(out) and bool(missed[count:].all()) else 0
