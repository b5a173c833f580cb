"""Location of errors: common properties of wrong sequences; wrong heads, rows and columns; likely cause of a wrong GEMM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.weights import Int4Weight, Weight
from headway.core.oracle.oracle import StepSequence, distance
from headway.core.oracle.steps import UNWRITTEN, bits
from headway.core.oracle.weight_cases import WeightCase, dequantized, experts_case, on_device

_TRAITS: dict[str, Callable[[StepSequence, int, int], bool]] = {
    "those of a single token": lambda row, number, count: row.kv_len == 1,
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


_MEASURES: dict[str, Callable[[StepSequence, int], int]] = {
    "those of more than {most:,} tokens": lambda row, number: row.kv_len,
    "those of more than {most:,} new tokens": lambda row, number: row.query_len,
    "those after the first {most:,} of the step": lambda row, number: number + 1,
}
_FEWEST = 3
"""Minimum number of correct sequences below a length limit for which the limit is named as the cause."""
_EXACT = 1e-3
_LISTED = 3


def wrong_sequences(rows: Sequence[StepSequence], wrong: Sequence[int]) -> str:
    """Return the property that only the wrong sequences of a step share, in words; "" if all sequences are wrong or no such
    property exists."""
    if not wrong or len(wrong) == len(rows):
        return ""
    for name, holds in _TRAITS.items():
        if [number for number, row in enumerate(rows) if holds(row, number, len(rows))] == list(wrong):
            return f"wrong in exactly {name}"
    for name, measure in _MEASURES.items():
        right = [measure(row, number) for number, row in enumerate(rows) if number not in wrong]
        most, least = max(right), min(measure(rows[number], number) for number in wrong)
        if len(right) >= _FEWEST and most < least and (len(wrong) > 1 or least >= 64):
            power = 1 << (least - 1).bit_length() - 1
            return f"wrong in exactly {name.format(most=power if power >= most else most)}"
    return ""


def wrong_parts(outs: Sequence[Tensor], answers: Sequence[Tensor]) -> str:
    """Return the wrong heads or elements in the outputs [query_len, num_heads, v_head_dim] of some sequences, in words. The
    result is "" if all are wrong, or if the errors are only rounding errors."""
    rounding = max(_EXACT, torch.finfo(outs[0].dtype).eps)
    for axis, name in ((1, "heads"), (2, "elements")):
        others = [at for at in range(3) if at != axis]
        apart = torch.stack([(out.double() - right).norm(dim=others) for out, right in zip(outs, answers, strict=True)])
        size = torch.stack([right.norm(dim=others) for right in answers])
        bad = (apart > rounding * size).any(0)
        if not bool(bad.all()) and bool(apart.norm() > 10 * rounding * size.norm()):
            return f"wrong in {name} {spans(bad.nonzero().flatten().tolist())} alone, of {len(bad)}"
    return ""


def spans(numbers: Sequence[int]) -> str:
    """Return numbers as text, with runs of consecutive numbers as ranges."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    words = [f"{first} to {last}" if last > first else f"{first}" for first, last in found[:_LISTED]]
    return ", ".join(words) + (", ..." if len(found) > _LISTED else "")


_ROWS = 7
"""Minimum number of rows of x from which a single column of x can be identified as the cause of the errors."""
_CLEARLY = 0.25
"""Maximum distance between an output and a matching mistake's answer, as a fraction of the distance between this answer and the
correct answer."""
_ROUNDING = 0.2
"""Maximum error of an element, relative to the magnitude of the element's sum, that is reported as rounding."""


def guess_product(case: WeightCase, out: Tensor, wrong: Tensor) -> str:
    """Return the likely cause of a wrong output, or the location of the errors. wrong: bool tensor with the shape of `out`, True
    for wrong elements."""
    places = _places(wrong)
    missed = (bits(out) == UNWRITTEN[out.dtype]).cpu()
    if bool(missed.any()):
        return "; ".join(filter(None, ("leaves elements of `out` unwritten", _places(missed))))
    found = out.cpu().double()
    if bool(found.isnan().any()):
        return "; ".join(filter(None, ("NaN", places)))
    off = float((found - case.right).norm())
    for name, answer in product_mistakes(case, found):
        if distance(answer, case.right) > 1e-9 and float((found - answer).norm()) <= _CLEARLY * off:
            return name
    rounded = float(((found - case.right) / case.spread).abs().max()) < _ROUNDING
    return "sums, or factors, in a shorter type" if rounded else places


def product_mistakes(case: WeightCase, found: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (mistake, float64 answer with that mistake), likeliest first. found: the wrong output, float64."""
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
    """Return the answer of an MoE layer that ignores the experts' scores."""
    assert case.config is not None
    assert case.onto is not None
    cpu = torch.device("cpu")
    x, experts, scores, onto = (each.cpu() for each in (*case.given, case.onto))
    return experts_case(case.config, on_device(case.weight, cpu), (x, experts, torch.ones_like(scores)), onto, cpu).right


def _of_codes(weight: Int4Weight) -> Iterator[tuple[str, Weight]]:
    """Yield (mistake in reading an int4 weight, weight that results from this mistake)."""
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
    """Return the wrong rows and columns, in words; "" if all elements are wrong."""
    words = []
    for axis, name in ((1, "rows"), (0, "columns")):
        bad = wrong.any(axis)
        if bool(bad.any()) and not bool(bad.all()):
            words.append(f"{name} {spans(bad.nonzero().flatten().tolist())} alone, of {len(bad)}")
    return f"wrong in {' and '.join(words)}" if words else ""
