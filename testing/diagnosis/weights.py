"""A guess at why a product over weights is wrong: unwritten elements, a mistake in reading the weight, and where it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.weights import Int4Weight, Weight
from headway.core.oracle.oracle import distance
from headway.core.oracle.steps import UNWRITTEN, bits
from headway.core.oracle.weight_cases import WeightCase, dequantized, experts_case, on_device
from headway.testing.diagnosis.places import spans

_ROWS = 7
"""Rows from which on it shows that one column of x explains an error."""
_CLEARLY = 0.25
"""A mistake explains an answer if it lies nearer to it than this share of its distance from the right one."""
_ROUNDING = 0.2
"""Error of an element, by the size of its sum, up to which an answer looks rounded."""


def guess(case: WeightCase, out: Tensor, wrong: Tensor) -> str:
    """Name what a wrong output looks like, and where it is wrong. wrong: bool, as large as `out`: elements that are."""
    places = _places(wrong)
    missed = (bits(out) == UNWRITTEN[out.dtype]).cpu()
    if bool(missed.any()):
        return "; ".join(filter(None, ("leaves elements of `out` unwritten", _places(missed))))
    found = out.cpu().double()
    if bool(found.isnan().any()):
        return "; ".join(filter(None, ("NaN", places)))
    off = float((found - case.right).norm())
    for name, answer in mistakes(case, found):
        if distance(answer, case.right) > 1e-9 and float((found - answer).norm()) <= _CLEARLY * off:
            return name
    rounded = float(((found - case.right) / case.spread).abs().max()) < _ROUNDING
    return "sums, or factors, in a shorter type" if rounded else places


def mistakes(case: WeightCase, found: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes with the float64 answers that they give, the likeliest first. found: the wrong answer, float64."""
    if case.onto is not None:
        before = case.onto.cpu().double()
        yield "overwrites `out`, to which it must add", case.right - before
        yield "adds what the experts give twice", 2 * case.right - before
        yield "ignores the scores", _unscored(case)
        return
    x, weight = case.given[0].cpu().double(), on_device(case.weight, torch.device("cpu"))
    if isinstance(weight, Int4Weight):
        for name, other in _of_codes(weight):
            yield name, x @ dequantized(other).t()
    if len(x) >= _ROWS:
        shares = (x.t() @ (found - case.right)) / x.square().sum(0)[:, None].clamp(min=1e-30)
        column = int((shares.square().sum(1) * x.square().sum(0)).argmax())
        yield f"reads input column {column} wrongly", case.right + x[:, column, None] * shares[column]
    own, size = dequantized(weight), getattr(weight, "group_size", 32)
    for start in range(0, own.shape[1], size):
        part = x[:, start : start + size] @ own[:, start : start + size].t()
        columns = f"input columns {start} to {min(start + size, own.shape[1]) - 1}"
        yield f"misses {columns}", case.right - part
        yield f"counts {columns} twice", case.right + part
    yield "adds to what `out` held", case.right + (found - case.right).mean()


def _unscored(case: WeightCase) -> Tensor:
    """Return the answer of experts without their scores."""
    assert case.config is not None
    assert case.onto is not None
    cpu = torch.device("cpu")
    x, experts, scores, onto = (each.cpu() for each in (*case.given, case.onto))
    return experts_case(case.config, on_device(case.weight, cpu), (x, experts, torch.ones_like(scores)), onto, cpu).right


def _of_codes(weight: Int4Weight) -> Iterator[tuple[str, Weight]]:
    """Yield mistakes in reading weights of 4 bits, and the weight that they read."""
    zeros = torch.full_like(weight.scales, 8, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    for by in (1, -1):
        yield f"zeros off by {by:+d}", replace(weight, zeros=zeros + by)
    if weight.zeros is not None:
        yield "ignores the zeros, and takes 8", replace(weight, zeros=None)
        yield "takes the zeros of the group before", replace(weight, zeros=zeros.roll(1, 1))
    if weight.order is not None:
        yield "ignores the order of the columns", replace(weight, order=None)
        yield "takes the order of the columns for its inverse", replace(weight, order=weight.order.argsort().int())
    packed, half = weight.packed, weight.group_size // 2
    yield "exchanges the halves of a group: low and high bits of a byte", replace(weight, packed=packed >> 4 | packed << 4)
    near = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1).view(len(packed), -1, 2, half)
    interleaved = (near[:, :, 0] | near[:, :, 1] << 4).flatten(1)
    yield "takes the two columns of a byte for neighbours", replace(weight, packed=interleaved)
    for by, place in ((1, "before"), (-1, "after")):
        yield f"takes the scales of the group {place}", replace(weight, scales=weight.scales.roll(by, 1))


def _places(wrong: Tensor) -> str:
    """Name the rows and columns that are wrong, where others are right; empty if all are wrong."""
    said = []
    for axis, name in ((1, "rows"), (0, "columns")):
        bad = wrong.any(axis)
        if bool(bad.any()) and not bool(bad.all()):
            said.append(f"{name} {spans(bad.nonzero().flatten().tolist())} alone, of {len(bad)}")
    return f"wrong in {' and '.join(said)}" if said else ""
