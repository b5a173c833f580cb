"""What can be read off a wrong answer without knowing the mistake: where in it the errors are, and what its keys weigh.

An output is a weighted sum of a sequence's values. Where a value has more elements than the sequence has tokens, the weights can
be solved for (least squares), and told from the right ones: which keys are hidden or seen, and how the scores differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.testing.diagnosis.mistakes import Reading, Wrong, reading_of

_LEAST, _SHARE = 6, 0.96
"""Fewest tokens of a sequence that tells something, and most of them for each element of a value."""
_EXACT = 1e-3
_SEEN, _UNSEEN = 1e-3, 1e-5
"""Weights above which a key is surely seen, and below which it surely is not."""
_STRAIGHT = 0.02
"""Share of the spread of the differences of scores that may be left beside a straight line."""
_LISTED = 3


def where(wrong: Sequence[Wrong]) -> str:
    """The heads or elements of a value that are wrong in every wrong sequence, where the others are right in all."""
    if any(bool(each.out.isnan().any()) for each in wrong):
        return ""
    for axis, name in ((1, "heads"), (2, "elements")):
        if numbers := wrong_alone(wrong, axis):
            zeros = all(not bool(each.out.index_select(axis, torch.tensor(numbers)).any()) for each in wrong)
            return f"{ONLY_IN} {name} {spans(numbers)} alone, of {wrong[0].out.shape[axis]}{': they hold zeros' if zeros else ''}"
    return ""


def wrong_alone(wrong: Sequence[Wrong], axis: int) -> list[int]:
    """Numbers along an axis of the output (1: heads, 2: elements) that are wrong in some sequence, where the others are right in
    all; empty where all are wrong, or by no more than rounding."""
    others = [at for at in range(3) if at != axis]
    rounding = max(_EXACT, torch.finfo(wrong[0].out.dtype).eps)
    apart = torch.stack([(each.out.double() - each.right).norm(dim=others) for each in wrong])
    size = torch.stack([each.right.norm(dim=others) for each in wrong])
    bad = (apart > rounding * size).any(0)
    if bool(bad.all()) or not bool(apart.norm() > 10 * rounding * size.norm()):
        return []
    return [int(number) for number in bad.nonzero().flatten()]


def spans(numbers: Sequence[int]) -> str:
    """Words for numbers, those that follow one another as one."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    said = [f"{first} to {last}" if last > first else f"{first}" for first, last in found[:_LISTED]]
    return ", ".join(said) + (", ..." if len(found) > _LISTED else "")


ONLY_IN = "wrong in"
NO_WEIGHT = "keys that are seen have no weight"
OTHER_VALUES = "no weights of the sequence's own values give it: other values are read, or values are changed"


@dataclass(frozen=True)
class Solved:
    """One sequence with the weights that its output comes of."""

    reading: Reading
    weights: Tensor
    """float64 [query_len, num_heads, kv_len]"""
    right: Tensor
    """The right ones."""
    residual: float
    """Share of the output that no weights explain."""

    @property
    def scores(self) -> Tensor:
        """q k times the scale, [query_len, num_heads, kv_len]."""
        row, spec = self.reading.row, self.reading.row.spec
        heads = torch.arange(spec.num_heads) // spec.group_size
        return torch.einsum("qhd,khd->qhk", row.q.double(), self.reading.keys[:, heads]) * spec.scale


def weighed(wrong: Sequence[Wrong]) -> str:
    """What the weights of a wrong sequence say; empty where none is of a kind that they can be solved for."""
    fit = [
        each for each in wrong if _LEAST <= each.row.kv_len <= _SHARE * each.right.shape[-1] and not bool(each.out.isnan().any())
    ]
    if not fit or fit[0].row.spec.dtype != torch.float32:
        return ""
    solved = _solve(max(fit, key=lambda each: each.row.kv_len))
    if solved.residual > 10 * _EXACT:
        return OTHER_VALUES
    if solved.residual > _EXACT:
        return ""
    return _moved(solved) or _visible(solved) or _scored(solved)


def _solve(wrong: Wrong) -> Solved:
    reading, spec = reading_of(wrong), wrong.row.spec
    heads = torch.arange(spec.num_heads) // spec.group_size
    values = reading.values[:, heads].permute(1, 2, 0)  # [num_heads, v_head_dim, kv_len]
    found = [torch.linalg.lstsq(values, out.double().permute(1, 2, 0)).solution for out in (wrong.out, wrong.right)]
    weights, right = (each.permute(2, 0, 1) for each in found)
    left = wrong.out.double() - torch.einsum("qhk,hdk->qhd", weights, values)
    return Solved(reading, weights, right, float(left.norm() / wrong.out.double().norm()))


def _visible(solved: Solved) -> str:
    """Keys that are seen and must not be, or are not and must be."""
    row, hidden, ago = solved.reading.row, solved.reading.hidden(), solved.reading.ago()
    most = solved.weights.abs().amax(1)
    extra = hidden & (most > _SEEN)
    lost = ~hidden & (solved.right.abs().amax(1) > _SEEN) & (most < _UNSEEN)
    said = []
    if bool((extra & (ago < 0)).any()):
        said.append(f"keys up to {int(-ago[extra].min())} after a query are seen")
    window = row.spec.sliding_window
    if window is not None and bool((extra & (ago >= window)).any()):
        at = extra & (ago >= window)
        begins = at.int().argmax(1)[at.any(1)]
        said.append(f"keys up to {int(ago[at].max()) - window + 1} before the window are seen{_multiple(begins, 'seen from')}")
    if bool(lost.any()) and bool((most > _SEEN).any(1).all()):  # a row without any weight says another thing
        query = int(lost.any(1).int().argmax())
        own = lost[query].nonzero().flatten().tolist()
        if not bool(ago[lost].any()):
            said.append("queries do not see themselves")
        elif bool((lost == (~hidden & (solved.right.abs().amax(1) > _SEEN) & (ago >= int(ago[lost].min())))).all()):
            said.append(f"keys that lie {int(ago[lost].min())} or more before a query have no weight")
        else:
            said.append(f"{NO_WEIGHT}: of the query at {row.context + query} those at {spans(own)}")
    return f"solved for the weights: {'; '.join(said)}" if said else ""


def _multiple(begins: Tensor, text: str) -> str:
    """Words for positions that are all multiples of a power of two, of 8 or more."""
    size = math.gcd(*begins.tolist()) if bool(begins.any()) else 0
    power = size & -size
    return f", {text} a multiple of {power} on" if power >= 8 else ""


def _moved(solved: Solved) -> str:
    """Weights that belong to the key before or after."""
    for shift, text in ((-1, "after"), (1, "before")):
        moved = solved.right.roll(shift, -1)
        inner = slice(1, -1)
        if float((solved.weights - moved)[..., inner].norm()) < 0.01 * float(moved[..., inner].norm()):
            return (
                f"solved for the weights: each key's weight goes to the value one {'before' if text == 'after' else 'after'} it"
            )
    return ""


def _scored(solved: Solved) -> str:
    """How the logarithms of the weights differ from the right ones: by a factor of the scores, by the distance, or otherwise."""
    spec, seen = solved.reading.row.spec, (solved.right > _SEEN) & (solved.weights > _UNSEEN)
    if not bool(seen.any()):
        return ""
    ratio = (solved.weights / solved.right).where(seen, torch.ones(())).log()
    scores = solved.scores
    if float(ratio[seen].abs().max()) < _EXACT:
        return ""
    capped = scores if spec.softcap is None else spec.softcap * torch.tanh(scores / spec.softcap)
    for values, name in ((capped, "scores"), (scores, "scores before the soft-cap")):
        slope = _slope(values.flatten(0, 1), ratio.flatten(0, 1), seen.flatten(0, 1))
        if slope is not None:
            return f"solved for the weights: {name} are multiplied by {_constant(1.0 + slope, spec)}"
    ago = solved.reading.ago().double()[:, None].expand_as(ratio)
    slopes = [_slope(ago[:, head], ratio[:, head], seen[:, head]) for head in range(spec.num_heads)]
    if spec.alibi_slopes is not None and any(slopes):
        said = [
            f"{own - slope:.4g} in head {head}, where its own is {own:.4g}"
            for head, (slope, own) in enumerate(zip(slopes, spec.alibi_slopes, strict=True))
            if slope
        ]
        return f"solved for the weights: ALiBi slopes are others: {', '.join(said[:2])}{', ...' if len(said) > 2 else ''}"
    return _FUNCTION if _one_function(scores.flatten(0, 1), ratio.flatten(0, 1), seen.flatten(0, 1)) else ""


_FUNCTION = "solved for the weights: they are another function of the scores: soft-cap, bounds, or an approximation of exp"
_WAVES = 1.5
"""Times its range that a curve's ups and downs may add up to, where it is one function of what it is ordered by."""


def _one_function(x: Tensor, y: Tensor, seen: Tensor) -> bool:
    """Whether y is a function of x in every row: ordered by x it goes up and down little."""
    waves = []
    for one, other, kept in zip(x, y, seen, strict=True):
        if int(kept.sum()) >= _LEAST + 2:
            ordered = other[kept][one[kept].argsort()]
            spread = float(ordered.max() - ordered.min())
            waves += [float(ordered.diff().abs().sum()) / spread] if spread > _EXACT else []
    return bool(waves) and sorted(waves)[len(waves) // 2] < _WAVES


def _slope(x: Tensor, y: Tensor, seen: Tensor) -> float | None:
    """The slope of y over x, the same in every row, each of which has an offset of its own; None where it is no straight line."""
    count = seen.sum(-1, keepdim=True)
    kept = (count > 2).expand_as(seen) & seen
    if int(kept.sum()) < _LEAST:
        return None
    mean = [(each * kept).sum(-1, keepdim=True) / count.clamp(min=1) for each in (x, y)]
    dx, dy = ((each - own) * kept for each, own in zip((x, y), mean, strict=True))
    size = float(dx.square().sum())
    slope = float((dx * dy).sum()) / size if size else 0.0
    left = float((dy - slope * dx).norm())
    return slope if left < _STRAIGHT * float(dy.norm()) else None


def _constant(factor: float, spec: AttentionSpec) -> str:
    """A factor with the name of the constant that it is."""
    known = {
        "the layer's scale": spec.scale,
        "1 / scale": 1 / spec.scale,
        "1/sqrt(head_dim)": spec.head_dim**-0.5,
        "1/sqrt(head_dim) in place of the scale": spec.head_dim**-0.5 / spec.scale,
        "sqrt(head_dim)": spec.head_dim**0.5,
        "log2(e)": math.log2(math.e),
        "ln(2)": math.log(2),
        "k_scale": spec.k_scale,
        "1 / k_scale": 1 / spec.k_scale,
        "v_scale / k_scale": spec.v_scale / spec.k_scale,
    }
    names = [name for name, value in known.items() if abs(factor - value) < 0.01 * abs(value) and value != 1.0]
    return f"{factor:.3g}{f', which is {names[0]}' if names else ''}"
