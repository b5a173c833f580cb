"""Judges a step: the caches bit for bit, the rows that nobody may touch, and every sequence's answer against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import CacheLayout
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import Finding
from headway.core.oracle.inputs import Numbers
from headway.core.oracle.oracle import distance, expected
from headway.core.oracle.steps import GUARD, CellErrors, Layers, StepTensors, Unlike
from headway.testing.diagnosis.guess import guess, names_a_mistake, rounding
from headway.testing.diagnosis.mistakes import Wrong
from headway.testing.diagnosis.traits import trait
from headway.testing.diagnosis.written import looks_of_cache, unwritten_behind, unwritten_parts

SEQUENCE_FACTOR = 8.0
"""How much farther from the reference than the tolerance of a whole step one sequence may be: few numbers scatter more."""
_STRIDED = "wrong in a strided view of memory: go by the strides of the cache, or declare contiguous_blocks"
MEMORY = {
    "packed": _STRIDED,
    "interleaved": _STRIDED,
    "spaced": _STRIDED,
    "far": "wrong where numbers of blocks and slots are beyond 16 bits, and offsets of elements beyond 32",
}
_LISTED = 6
_COMPARED = 4
"""Right sequences that a mistake must leave alone."""
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
    previous: list[list[int]]
    previous_blocks: list[list[tuple[int, ...]]]
    planned: int
    prefill: AttentionBackend | None
    decode: AttentionBackend | None
    numbers: Numbers
    unlike: Unlike
    errors: CellErrors


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
    with _beside(step.metadata.slot_mapping):
        looks = looks_of_cache(given, right, step.inputs[layer], step.metadata.slot_mapping, missing, stray)
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


def _vanish(out: torch.Tensor, answer: torch.Tensor) -> bool:
    """Return whether an answer and its output lie below the smallest normal number, as where a sink takes all the weight."""
    smallest = torch.finfo(out.dtype).tiny
    return not out.numel() or (float(answer.abs().max()) < smallest and float(out.abs().max()) < smallest)


def _answers(session: Watched, step: StepTensors, layer: int, tolerance: float) -> None:
    rows, given = step.rows[layer], step.inputs[layer]
    right = [expected(row)[0] for row in rows]
    outs = [given.out[tokens] for tokens in step.tokens]
    if not outs:
        return
    error = distance(torch.cat(outs), torch.cat(right))
    session.errors.note(error, tolerance)
    errors = [0.0 if _vanish(out, answer) else distance(out, answer) for out, answer in zip(outs, right, strict=True)]
    bad = [number for number, each in enumerate(errors) if not each <= SEQUENCE_FACTOR * tolerance]
    if error <= tolerance and not bad:
        return
    numbers = bad or [max(range(len(errors)), key=errors.__getitem__)]
    finite = [number for number in numbers if not math.isnan(errors[number])]
    worst = max(finite, key=errors.__getitem__) if finite else numbers[0]
    if session.unlike.without_guesses:
        words = f"{_count(bad, rows)}layer {layer}: {_numbers(worst, rows, outs, right)}"
        raise Finding(words, guess="NaN" if not finite else "", error=error, tolerance=tolerance, numbers=bad)
    shared = trait(rows, bad) if bad else ""
    looks, named = _unwritten(session, step, layer, numbers, shared)
    if not looks:
        wrong = [_wrong(session, step, layer, number, right) for number in numbers]
        fine = [_wrong(session, step, layer, number, right) for number in _fine(step, bad)]
        try:
            with _beside(given.out):
                looks, named = _looks(wrong, fine, tolerance, shared, bool(bad), session.numbers.lift)
        except (RuntimeError, ValueError, IndexError) as fault:  # what was found counts more than what it looks like
            looks, named = f"no guess, by an error of the kit's own: {type(fault).__name__}: {fault}", False
    raise Finding(
        f"{_count(bad, rows)}layer {layer}: {_numbers(worst, rows, outs, right)}",
        guess=looks or MEMORY.get(session.memory, ""),
        error=error,
        tolerance=tolerance,
        named=named,
        numbers=bad,
    )


def _fine(step: StepTensors, bad: Sequence[int]) -> list[int]:
    """A few of the step's right sequences, of those parts that have wrong ones."""
    parts = {number < step.metadata.num_prefills for number in bad}
    right = [n for n in range(len(step.tokens)) if n not in bad and (n < step.metadata.num_prefills) in parts]
    return right if len(right) <= _COMPARED else [right[at * (len(right) - 1) // (_COMPARED - 1)] for at in range(_COMPARED)]


def _wrong(session: Watched, step: StepTensors, layer: int, number: int, right: Sequence[torch.Tensor]) -> Wrong:
    rows, given, tokens, metadata = step.rows[layer], step.inputs[layer], step.tokens[number], step.metadata
    prefills = number < metadata.num_prefills
    part = slice(0, metadata.num_prefills) if prefills else slice(metadata.num_prefills, len(rows))
    first = step.tokens[0].start
    lens = [before[number] for before in session.previous if number < len(before)]
    return Wrong(
        number,
        rows[number],
        given.out[tokens].clone(),
        dense=(given.k[first : tokens.stop], given.v[first : tokens.stop]) if prefills else None,
        asked=given.q[0 if prefills else metadata.num_prefill_tokens : tokens.stop],
        layers=[others[number] for at, others in enumerate(step.rows) if at != layer],
        rows=rows,
        answers=right,
        part=part,
        table=metadata.block_table[part],
        earlier=[length for length in (session.planned, *reversed(lens)) if length],
        earlier_blocks=[before[number] for before in reversed(session.previous_blocks) if number < len(before)],
        layouts=session.layouts,
    )


def _unwritten(session: Watched, step: StepTensors, layer: int, numbers: Sequence[int], shared: str) -> tuple[str, bool]:
    """Words for rows that nobody wrote, if there are any, and whether they say which part of every row that is."""
    given = step.inputs[layer]
    missed = [number for number in numbers if given.unwritten(step.tokens[number])]
    if not missed:
        return "", False
    whose = shared if shared and len(missed) == len(numbers) else "some sequences"
    if len(missed) == len(step.tokens):
        whose = "every sequence"
    first = 0 if missed[0] < step.metadata.num_prefills else step.metadata.num_prefill_tokens
    part = given.out[first : step.tokens[missed[-1]].stop]
    parts = {unwritten_parts(given.out[step.tokens[number]], session.spec.group_size) for number in missed}
    said = parts.pop() if len(parts) == 1 else ""
    if not said and len(missed) > 1 and (behind := unwritten_behind(part)):
        return f"leaves rows of `out` unwritten: those behind the first {behind} tokens of their part of the step", True
    return f"leaves rows of `out` unwritten, or parts of them: {f'{said}; ' if said else ''}of {whose}", bool(said)


def _looks(wrong: list[Wrong], fine: list[Wrong], tolerance: float, shared: str, bad: bool, lift: float) -> tuple[str, bool]:
    """A guess, and whether it names a mistake that gives the answer."""
    computed = [each for each in wrong if not bool(each.out.isnan().any())]
    looks = guess(wrong, fine, tolerance, shared) if bad else ""
    if not looks and computed and len(computed) < len(wrong) and bad:
        looks = guess(computed, fine, tolerance, shared)
    if looks:
        return looks, names_a_mistake(looks)
    if not computed:
        looks = "NaN for one sequence" if len(wrong) == 1 and fine else "NaN"
        if abs(lift) > _EXPONENT and wrong[0].row.spec.sliding_window is None:  # with one there may be no key that is seen
            looks += f" where scores are near {lift:+.0f}: exponentials that are not relative to the largest score"
    elif not bad:
        looks = "a rounding that is coarser than the declared tolerance"
        if finer := rounding(wrong[0]):
            return f"{looks}; {finer}", True
    return ", ".join(part for part in (looks, f"wrong in exactly {shared}" if shared else "") if part), False


def _beside(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """What mistakes are made of lies where the step does. On a CPU it does anyway, and torch need not look at each call."""
    return nullcontext() if tensor.device.type == "cpu" else tensor.device


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
