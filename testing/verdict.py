"""Judges a step: the caches bit for bit, the rows that nobody may touch, and every sequence's answer against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import CacheLayout
from headway.core.contract.spec import AttentionSpec
from headway.testing.cells import Finding
from headway.testing.guess import Wrong, guess, trait
from headway.testing.inputs import Numbers
from headway.testing.oracle import distance, expected
from headway.testing.pool import Layers
from headway.testing.steps import GUARD, StepTensors

SEQUENCE_FACTOR = 8.0
"""How much farther from the reference than the tolerance of a whole step one sequence may be: few numbers scatter more."""
_STRIDED = "wrong in a strided view of memory: go by the strides of the cache, or declare contiguous_blocks"
_MEMORY = {
    "packed": _STRIDED,
    "interleaved": _STRIDED,
    "spaced": _STRIDED,
    "far": "wrong where numbers of blocks and slots are beyond 16 bits, and offsets of elements beyond 32",
}
_LISTED = 6
_EXPONENT = 88.0
"""Where the exponential of a float32 ends."""


class Watched(Protocol):
    """What a verdict must know of a session."""

    spec: AttentionSpec
    block_size: int
    memory: str
    num_blocks: int
    layers: Layers
    layouts: Sequence[CacheLayout]
    previous: list[int]
    previous_blocks: list[tuple[int, ...]]
    planned: int
    prefill: AttentionBackend | None
    decode: AttentionBackend | None
    numbers: Numbers


def judge(session: Watched, step: StepTensors) -> None:
    """:raises Finding: the first thing that is wrong, with the numbers and a guess."""
    for layer in range(len(step.inputs)):
        _cache(session, step, layer)
        _guards(step, layer)
    tolerance = limit(session, step)
    for layer in range(len(step.inputs)):
        _answers(session, step, layer, tolerance)
        _padding(step, layer)


def limit(session: Watched, step: StepTensors) -> float:
    """The largest tolerance declared by those who served the step, and what rounding the regime's scores may cost."""
    parts = [(step.metadata.num_prefills, session.prefill), (step.metadata.num_decodes, session.decode)]
    declared = max(float(backend.tolerance[session.spec.dtype]) for count, backend in parts if count and backend is not None)
    return declared + session.numbers.slack


def _cache(session: Watched, step: StepTensors, layer: int) -> None:
    given, right = session.layers.given[layer], session.layers.right[layer]
    if not given.differs(right):
        return
    wrong = given.differing_slots(right)
    new = {slot for slot in step.metadata.slot_mapping.tolist() if slot >= 0}
    missing, stray = sorted(wrong & new), sorted(wrong - new)
    said = []
    if missing:
        slots = missing[:_LISTED]
        said.append(f"{len(missing)} of {len(new)} new tokens are not in the cache as the writer leaves them (slots {slots})")
    if stray:
        said.append(f"{len(stray)} slots of no new token are changed (slots {stray[:_LISTED]})")
    if not wrong:
        said.append("memory between the rows, which belongs to somebody else, is changed")
    looks = "writes to the cache" if not missing else "writes to the wrong slot" if stray else "forgets to write the new token"
    last = session.num_blocks * session.block_size - 1
    if stray and not missing and (stray == [last] or step.padding.start < step.padding.stop):
        looks = "writes padding rows to the cache: slot -1 means that nothing is written"
    raise Finding(f"layer {layer}: the cache must hold what the layout's writer leaves: {'; '.join(said)}", guess=looks)


def _guards(step: StepTensors, layer: int) -> None:
    guarded = step.inputs[layer].guarded
    edges = torch.cat([guarded[:GUARD], guarded[-GUARD:]])
    if not bool(edges.isnan().all()):
        raise Finding(
            f"layer {layer}: rows before or after `out`, which belong to somebody else, are written",
            guess="writes more rows than `out` has",
        )


def _padding(step: StepTensors, layer: int) -> None:
    padding = step.inputs[layer].out[step.padding]
    if bool((padding.isfinite() & (padding != 0)).any()):
        raise Finding(
            f"layer {layer}: the output of padding rows (length 0) must be left alone or zero; it holds numbers",
            guess="writes padding rows",
        )


def _answers(session: Watched, step: StepTensors, layer: int, tolerance: float) -> None:
    rows, given = step.rows[layer], step.inputs[layer]
    right = [expected(row)[0] for row in rows]
    outs = [given.out[tokens] for tokens in step.tokens]
    if not outs:
        return
    error = distance(torch.cat(outs), torch.cat(right))
    errors = [distance(out, answer) for out, answer in zip(outs, right, strict=True)]
    bad = [number for number, each in enumerate(errors) if not each <= SEQUENCE_FACTOR * tolerance]
    if error <= tolerance and not bad:
        return
    numbers = bad or [max(range(len(errors)), key=errors.__getitem__)]
    finite = [number for number in numbers if not math.isnan(errors[number])]
    worst = max(finite, key=errors.__getitem__) if finite else numbers[0]
    wrong = [_wrong(session, step, layer, number) for number in numbers]
    shared = trait(rows, bad) if bad else ""
    raise Finding(
        f"{_count(bad, rows)}layer {layer}: {_numbers(worst, rows, outs, right)}",
        guess=_unwritten(step, layer, numbers, shared)
        or _looks(wrong, errors, tolerance, shared, bool(bad), session.numbers.lift)
        or _MEMORY.get(session.memory, ""),
        error=error,
        tolerance=tolerance,
    )


def _wrong(session: Watched, step: StepTensors, layer: int, number: int) -> Wrong:
    row, given, tokens = step.rows[layer][number], step.inputs[layer], step.tokens[number]
    same = [each for at, each in enumerate(step.rows[layer]) if at != number]
    others = [*(rows[number] for at, rows in enumerate(step.rows) if at != layer), *same[:8]]
    earlier = [length for length in (session.planned, *session.previous[number : number + 1]) if length]
    dense = None
    prefills = number < step.metadata.num_prefills
    asked = given.q[0 if prefills else step.metadata.num_prefill_tokens : tokens.stop]
    if prefills:
        first = step.tokens[0].start
        dense = given.k[first : tokens.stop], given.v[first : tokens.stop]
    rows = step.rows[layer]
    places = {"before": number - 1, "after": number + 1}
    neighbours = {place: rows[at].kv_len for place, at in places.items() if 0 <= at < len(rows)}
    blocks = next(iter(session.previous_blocks[number : number + 1]), ())
    return Wrong(number, row, given.out[tokens].clone(), dense, asked, others, earlier, blocks, session.layouts, neighbours)


def _unwritten(step: StepTensors, layer: int, numbers: Sequence[int], shared: str) -> str:
    missed = [number for number in numbers if step.inputs[layer].unwritten(step.tokens[number])]
    if not missed:
        return ""
    whose = shared if shared and len(missed) == len(numbers) else "some sequences"
    return (
        f"leaves rows of `out` unwritten, or parts of them: of {'every sequence' if len(missed) == len(step.tokens) else whose}"
    )


def _looks(wrong: list[Wrong], errors: Sequence[float], tolerance: float, shared: str, bad: bool, lift: float) -> str:
    if all(bool(each.out.isnan().any()) for each in wrong):
        looks = "NaN for one sequence" if len(wrong) == 1 and len(errors) > 1 else "NaN"
        if abs(lift) > _EXPONENT and wrong[0].row.spec.sliding_window is None:  # with one there may be no key that is seen
            looks += f" where scores are near {lift:+.0f}: exponentials that are not relative to the largest score"
    elif not bad:
        looks = "a rounding that is coarser than the declared tolerance"
    else:
        looks = guess([each for each in wrong if not bool(each.out.isnan().any())] or wrong, tolerance)
    if looks and not looks.startswith("NaN"):
        return looks
    return ", ".join(part for part in (looks, f"wrong in exactly {shared}" if shared else "") if part)


def _count(bad: Sequence[int], rows: Sequence[object]) -> str:
    return f"{len(bad)} of {len(rows)} sequences {'is' if len(bad) == 1 else 'are'} wrong; " if bad else ""


def _numbers(worst: int, rows: Sequence[object], outs: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> str:
    """Where one sequence differs most, expected and got."""
    out, answer = outs[worst].double(), right[worst]
    apart = (out - answer).abs()
    at = int(torch.where(apart.isnan(), torch.inf, apart).argmax())
    token, head, dim = (int(i) for i in torch.unravel_index(torch.tensor(at), answer.shape))
    row = rows[worst]
    lens = f"query_len {row.query_len}, kv_len {row.kv_len}"  # type: ignore[attr-defined]
    return (
        f"sequence {worst} ({lens}), query {token}, head {head}, element {dim}: "
        f"expected {float(answer[token, head, dim]):.5g}, got {float(out[token, head, dim]):.5g}"
    )
