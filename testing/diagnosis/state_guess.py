"""A guess at why a layer with a state is wrong: the float64 answer computed with one mistake after another, until one matches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.state import MAMBA1, StateParameters, StateSpec
from headway.core.oracle import state_reference as right
from headway.core.oracle.state_cases import StateCase
from headway.core.oracle.state_reference import Rules, SequenceState, StateAnswer, TokenOperands, answer

_CLEARLY = 0.25
"""A mistake explains what is found if that lies nearer to it than this share of its distance from the right answer."""
_PATIENCE = 4.0
"""Seconds for which mistakes are tried."""
_SAID = 2
"""Mistakes that are said where several give the same answer."""
_CHUNKS = (64, 16, 32, 128, 8, 256, 512, 1024)
Mistakes = Iterator[tuple[str, Rules]]


@dataclass(frozen=True)
class Seen:
    """What a backend left of some sequences of a step: their outputs, or one state."""

    rows: Sequence[int]
    """The sequences to compute for it."""
    parts: Callable[[StateAnswer], list[Tensor]]
    """What an answer has in the place of `found`."""
    found: list[Tensor]


def guess(case: StateCase, wrong: Seen, fine: Seen, tolerance: float) -> str:
    """Name the mistake that gives what is wrong and leaves what is right as it is; empty if none of them does.

    case: as it was before the step. fine: what is right. tolerance: largest relative error of a right answer.
    """
    until, found = time.monotonic() + _PATIENCE, list[tuple[float, str]]()
    expected = wrong.parts(answer(case, rows=wrong.rows))
    for name, rules in mistakes(case):
        if time.monotonic() > until:
            break
        error = _apart(wrong.found, wrong.parts(answer(case, rules, wrong.rows)), expected)
        if error < 1 and (not fine.rows or _leaves(fine, fine.parts(answer(case, rules, fine.rows)), tolerance)):
            found.append((error, name))
    least = min(found, default=(0.0, ""))[0]
    names = [name for error, name in sorted(found) if error <= max(2 * least, 1e-3)]
    return ", or: ".join(names[:_SAID])


def _apart(found: Sequence[Tensor], mistaken: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """How much of the distance that a mistake allows is left, at most 1 if it explains all parts."""
    shares = []
    for got, other, want in zip(found, mistaken, expected, strict=True):
        if other.shape != want.shape:
            return 2.0
        away = float((want - other).norm())
        off = float((got.double() - other).norm())
        shares.append(off / (_CLEARLY * away) if away > 0 and off == off else 2.0)
    return max(shares)


def _leaves(fine: Seen, mistaken: Sequence[Tensor], tolerance: float) -> bool:
    return all(
        float((got.double() - other).norm()) <= tolerance * float(got.norm())
        for got, other in zip(fine.found, mistaken, strict=True)
    )


def mistakes(case: StateCase) -> Mistakes:
    """Yield the name and the rules of each mistake that a layer can have, the likeliest first."""
    spec = case.spec
    yield from _beginnings(case)
    if spec.recurrent:
        yield from _updates(spec)
        yield from _readings(spec)
    if spec.conv_channels:
        yield from _convolutions(spec)
    yield from _losses(spec)


def _beginnings(case: StateCase) -> Mistakes:
    """What a sequence begins with."""
    spec, metadata = case.spec, case.metadata
    zeros = SequenceState.zeros(spec)

    def changed(change: Callable[[SequenceState], SequenceState]) -> Rules:
        return Rules(begin=lambda case, row: change(right.begin(case, row)))

    def of_slot(slot: Callable[[int], int]) -> Rules:
        def begin(case: StateCase, row: int) -> SequenceState:
            read = slot(row)
            context = case.metadata.step.kv_lens[row] > case.metadata.step.query_lens[row]
            return right.state_of(case, read) if context and 0 <= read < case.cache.num_slots else right.begin(case, row)

        return Rules(begin=begin)

    yield (
        "reads the slot's old content: begins with what the slot holds where there is no context",
        Rules(begin=lambda case, row: right.state_of(case, int(case.metadata.slots_cpu[row])).changed(torch.nan_to_num)),
    )
    yield "ignores the context: every step begins with zeros", changed(lambda state: zeros.copy())
    if spec.conv_channels:
        yield "ignores the inputs that the convolution remembers", changed(lambda state: replace(state, conv=zeros.conv))
        yield "keeps the convolution's inputs newest first", changed(lambda state: replace(state, conv=_of(state.conv).flip(-1)))
    if spec.recurrent:
        yield "ignores the recurrence's state", changed(lambda state: replace(state, recurrent=zeros.recurrent))
    if spec.recurrent and spec.key_dim == spec.value_dim:
        turned = changed(lambda state: replace(state, recurrent=_of(state.recurrent).transpose(-1, -2)))
        yield f"state transposed: takes layout {case.cache.layout.name} for its transpose", turned
    yield "reads the slot that it writes, out_slots, in place of slots", of_slot(lambda row: int(metadata.out_slots_cpu[row, 0]))
    yield "reads the slot of the sequence's number in place of slots", of_slot(lambda row: row)
    others = len(metadata.slots_cpu)
    for by in (1, -1):
        read = of_slot(lambda row, by=by: int(metadata.slots_cpu[(row + by) % others]))  # type: ignore[misc]
        yield f"reads the slot of the {'next' if by > 0 else 'previous'} sequence", read


def _updates(spec: StateSpec) -> Mistakes:
    """What a token does to the state, and what is read from it."""

    def after(operands: TokenOperands, state: Tensor) -> tuple[Tensor, Tensor]:
        out, new = right.update(replace(operands, decay=torch.ones_like(operands.decay)), state)
        return out, operands.decay[..., None] * new

    def everything(operands: TokenOperands, state: Tensor) -> tuple[Tensor, Tensor]:
        _, new = after(operands, state)
        return _read_out(operands, new), new

    def early(operands: TokenOperands, state: Tensor) -> tuple[Tensor, Tensor]:
        return _read_out(operands, state), right.update(operands, state)[1]

    def stale(operands: TokenOperands, state: Tensor) -> tuple[Tensor, Tensor]:
        assert operands.beta is not None
        added = operands.beta[..., None] * (operands.value - right.seen(state, operands.key))
        new = operands.decay[..., None] * state + operands.key[..., None] * added[..., None, :]
        return _read_out(operands, new), new

    def half(operands: TokenOperands, state: Tensor) -> tuple[Tensor, Tensor]:
        assert operands.beta is not None
        state = operands.decay[..., None] * state
        added = operands.beta[..., None] * operands.value - right.seen(state, operands.key)
        new = state + operands.key[..., None] * added[..., None, :]
        return _read_out(operands, new), new

    yield "decay applied after instead of before the update", Rules(update=everything)
    yield "decay applied after the update and after the output is read", Rules(update=after)
    yield "the output is read before the update", Rules(update=early)
    for name, change in (
        ("no decay", lambda operands: replace(operands, decay=torch.ones_like(operands.decay))),
        ("the decay is applied twice", lambda operands: replace(operands, decay=operands.decay**2)),
        ("without the skip D * x", lambda operands: replace(operands, skip=None)),
        ("queries and keys are exchanged", lambda operands: replace(operands, query=operands.key, key=operands.query)),
    ):
        yield name, _reading(change)
    if spec.kind in ("gated_delta", "kda"):
        yield "the delta rule reads the state before its decay", Rules(update=stale)
        yield "beta multiplies the value alone, and not what its key holds", Rules(update=half)
        added = _reading(lambda operands: replace(operands, value=_of(operands.beta)[..., None] * operands.value, beta=None))
        yield "adds values without taking off what their key holds (v - S^T k)", added
        yield "beta is 1", _reading(lambda operands: replace(operands, beta=torch.ones_like(_of(operands.beta))))


def _readings(spec: StateSpec) -> Mistakes:
    """What is made of inputs and gates."""
    if spec.kind != MAMBA1:
        heads, groups = torch.arange(spec.num_heads), spec.num_key_heads
        share = spec.num_heads // groups
        for name, dealt in (("h % num_key_heads", heads % groups * share), ("0 for every head", 0 * heads)):
            turn = partial(_dealt, heads=dealt)
            yield f"wrong head group: state head h reads key head {name}", _reading(turn)
    changed: tuple[tuple[str, dict[str, Any]], ...] = (
        ("without the scale", {"scale": 1.0}),
        ("scale 1/sqrt(key_dim) in place of the layer's", {"scale": spec.key_dim**-0.5}),
        ("the scale is applied twice", {"scale": spec.scale**2}),
        ("q and k are not normed (qk_norm)", {"qk_norm": False}),
        ("q and k are normed where qk_norm is False", {"qk_norm": True}),
        ("without beta_scale", {"beta_scale": 1.0}),
        ("dt is not clamped to dt_limits", {"dt_limits": (0.0, float("inf"))}),
    )
    for name, changes in changed:
        if replace(spec, **changes) != spec:
            yield name, Rules(read=partial(_of_spec, changes=changes))
    yield "the gate's sigmoid is missing (beta)", Rules(read=partial(right.read, strength=lambda x: x))
    yield "the gate's softplus is missing", Rules(read=partial(right.read, positive=lambda x: x))
    yield "the gate's softplus is taken for max(x, 0)", Rules(read=partial(right.read, positive=lambda x: x.clamp(min=0)))
    yield "the gate's softplus is taken for exp", Rules(read=partial(right.read, positive=torch.exp))
    yield "dt_bias is not added", Rules(read=_without_bias)


def _convolutions(spec: StateSpec) -> Mistakes:
    """What the convolution makes of its window."""

    def taps(change: Callable[[Tensor], Tensor]) -> Rules:
        def convolve(spec: StateSpec, parameters: StateParameters, x: Tensor, remembered: Tensor) -> tuple[Tensor, Tensor]:
            return right.convolve(spec, replace(parameters, conv_weight=change(_of(parameters.conv_weight))), x, remembered)

        return Rules(convolve=convolve)

    def with_spec(**changes: Any) -> Rules:
        return Rules(convolve=lambda spec, *rest: right.convolve(replace(spec, **changes), *rest))

    def unbiased(spec: StateSpec, parameters: StateParameters, x: Tensor, remembered: Tensor) -> tuple[Tensor, Tensor]:
        return right.convolve(spec, replace(parameters, conv_bias=None), x, remembered)

    def older(spec: StateSpec, parameters: StateParameters, x: Tensor, remembered: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((remembered, x[..., None]), dim=-1)
        summed = (window[..., :-1] * _of(parameters.conv_weight).cpu().double()).sum(-1)
        return right.activate(spec, parameters, summed), window[..., 1:]

    def padded(case: StateCase, row: int) -> SequenceState:
        state = right.begin(case, row)
        return replace(state, conv=torch.nn.functional.pad(_of(state.conv), (1, 0)))

    yield "convolution window shifted by one: ends with the token before", Rules(begin=padded, convolve=older)
    yield "convolution taps shifted by one", taps(lambda weight: weight.roll(1, dims=1))
    yield "convolution taps shifted by one", taps(lambda weight: weight.roll(-1, dims=1))
    yield "convolution taps in reverse order", taps(lambda weight: weight.flip(1))
    yield "without the convolution's bias", Rules(convolve=unbiased)
    yield (
        ("without the activation after the convolution", with_spec(activation="none"))
        if spec.activation == "silu"
        else ("applies silu where the layer has no activation", with_spec(activation="silu"))
    )


def _losses(spec: StateSpec) -> Mistakes:
    """What gets lost on the way."""
    zeros = SequenceState.zeros(spec)

    def lost(token: int, state: SequenceState, chunk: int, part: str) -> SequenceState:
        if token and token % chunk == 0:
            return replace(state, **{part: _of(getattr(zeros, part)).expand_as(_of(getattr(state, part))).clone()})
        return state

    for part, kept, there in (("recurrent", "state", spec.recurrent), ("conv", "convolution's inputs", spec.conv_channels > 0)):
        for chunk in _CHUNKS if there else ():
            name = (
                f"missing initial state of later chunks: the {kept} of the tokens before is lost after every {chunk} new tokens"
            )
            yield name, Rules(before=partial(lost, chunk=chunk, part=part))
    if spec.recurrent:
        for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
            yield f"state kept in 16 bits ({name}) between tokens", Rules(before=partial(_rounded, dtype=dtype))


def _rounded(token: int, state: SequenceState, dtype: torch.dtype) -> SequenceState:
    return replace(state, recurrent=_of(state.recurrent).to(dtype).double())


def _reading(change: Callable[[TokenOperands], TokenOperands]) -> Rules:
    return Rules(read=lambda *given: change(right.read(*given)))


def _dealt(operands: TokenOperands, heads: Tensor) -> TokenOperands:
    return replace(operands, key=operands.key[..., heads, :], query=operands.query[..., heads, :])


def _of_spec(
    spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], changes: dict[str, Any]
) -> TokenOperands:
    return right.read(replace(spec, **changes), parameters, x, gates)


def _without_bias(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor]) -> TokenOperands:
    bias = parameters.dt_bias
    return right.read(spec, parameters if bias is None else replace(parameters, dt_bias=torch.zeros_like(bias)), x, gates)


def _read_out(operands: TokenOperands, state: Tensor) -> Tensor:
    out = right.seen(state, operands.query)
    return out if operands.skip is None else out + operands.skip


def _of(part: Tensor | None) -> Tensor:
    assert part is not None
    return part
