"""Checks of a state step: every row, every written slot, and every bit that must not change. Also the likely cause of errors.

To find the likely cause, the float64 answer is computed with each known mistake until one answer matches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from headway.core.contract.state import MAMBA1, StateBackend, StateCache, StateParameters, StateSpec
from headway.core.oracle import state_reference as right
from headway.core.oracle.cells import Finding
from headway.core.oracle.oracle import distance
from headway.core.oracle.state_cases import StateCase, run_states
from headway.core.oracle.state_reference import Rules, SequenceState, StateAnswer, TokenOperands, advance, answer, begin, state_of
from headway.core.oracle.steps import same_bits

_CLEARLY = 0.25
"""Maximum distance between a result and a matching mistake's result, as a fraction of the distance between the mistake's result
and the correct result."""
_PATIENCE = 4.0
"""Maximum time for trying mistakes on one step, in seconds."""
_MAX_NAMED = 2
"""Maximum number of mistakes to name if several mistakes give the same answer."""
_CHUNKS = (64, 16, 32, 128, 8, 256, 512, 1024)
Mistakes = Iterator[tuple[str, Rules]]


@dataclass(frozen=True)
class Seen:
    """Results of a backend for some sequences of a step: the outputs of these sequences, or one state."""

    rows: Sequence[int]
    """Indices of the sequences whose answers are computed for comparison."""
    parts: Callable[[StateAnswer], list[Tensor]]
    """Function that returns the parts of an expected answer that correspond to `found`."""
    found: list[Tensor]


def guess(case: StateCase, wrong: Seen, fine: Seen, tolerance: float) -> str:
    """Return the mistake that reproduces the wrong results and leaves the correct results unchanged; "" if no such mistake is
    found.

    case: case as it was before the step. wrong, fine: wrong and correct results. tolerance: maximum relative error of a correct
    answer.
    """
    until, found = time.monotonic() + _PATIENCE, list[tuple[float, str]]()
    expected = wrong.parts(answer(case, rows=wrong.rows))
    for name, rules in mistakes(case):
        if time.monotonic() > until:
            break
        error = _remaining_distance(wrong.found, wrong.parts(answer(case, rules, wrong.rows)), expected)
        if error < 1 and (not fine.rows or _leaves(fine, fine.parts(answer(case, rules, fine.rows)), tolerance)):
            found.append((error, name))
    least = min(found, default=(0.0, ""))[0]
    names = [name for error, name in sorted(found) if error <= max(2 * least, 1e-3)]
    return ", or: ".join(names[:_MAX_NAMED])


def _remaining_distance(found: Sequence[Tensor], mistaken: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest ratio of a part's distance from the mistake's answer to the allowed distance. The mistake explains all
    parts if the ratio is below 1."""
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
    """Yield (name, rules) for each mistake that is possible for a layer, likeliest first."""
    spec = case.spec
    yield from _beginnings(case)
    if spec.recurrent:
        yield from _updates()
        yield from _readings(spec)
    if spec.conv_channels:
        yield from _convolutions()
    yield from _losses(spec)


def _beginnings(case: StateCase) -> Mistakes:
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
        transposed = changed(lambda state: replace(state, recurrent=_of(state.recurrent).transpose(-1, -2)))
        yield f"state transposed: takes layout {case.cache.layout.name} for its transpose", transposed
    yield "reads the slot that it writes, out_slots, in place of slots", of_slot(lambda row: int(metadata.out_slots_cpu[row, 0]))
    yield "reads the slot of the sequence's number in place of slots", of_slot(lambda row: row)
    others = len(metadata.slots_cpu)
    for by in (1, -1):
        read = of_slot(lambda row, by=by: int(metadata.slots_cpu[(row + by) % others]))  # type: ignore[misc]
        yield f"reads the slot of the {'next' if by > 0 else 'previous'} sequence", read


def _updates() -> Mistakes:
    def after(operands: TokenOperands, state: Tensor) -> tuple[Tensor, Tensor]:
        out, new = right.update(_without_decay(operands), state)
        return out, operands.decay[..., None] * new

    def everything(operands: TokenOperands, state: Tensor) -> tuple[Tensor, Tensor]:
        _, new = after(operands, state)
        return _read_out(operands, new), new

    def early(operands: TokenOperands, state: Tensor) -> tuple[Tensor, Tensor]:
        return _read_out(operands, state), right.update(operands, state)[1]

    yield "decay applied after instead of before the update", Rules(update=everything)
    yield "decay applied after the update and after the output is read", Rules(update=after)
    yield "the output is read before the update", Rules(update=early)
    yield "no decay", _reading(_without_decay)


def _readings(spec: StateSpec) -> Mistakes:
    if spec.kind != MAMBA1:
        heads = torch.arange(spec.num_heads)
        dealt = heads % spec.num_key_heads * (spec.num_heads // spec.num_key_heads)
        for name, of in (("h % num_key_heads", dealt), ("0 for every head", 0 * heads)):
            yield f"wrong head group: state head h reads key head {name}", _reading(partial(_dealt, heads=of))
    for name, scale in (("without the scale", 1.0), ("scale 1/sqrt(key_dim) in place of the layer's", spec.key_dim**-0.5)):
        if scale != spec.scale:
            yield name, Rules(read=partial(_scaled, scale=scale))
    yield "the gate's sigmoid is missing (beta)", Rules(read=partial(right.read, strength=lambda x: x))
    yield "the gate's softplus is missing", Rules(read=partial(right.read, positive=lambda x: x))


def _convolutions() -> Mistakes:
    def taps(change: Callable[[Tensor], Tensor]) -> Rules:
        def convolve(spec: StateSpec, parameters: StateParameters, x: Tensor, remembered: Tensor) -> tuple[Tensor, Tensor]:
            return right.convolve(spec, replace(parameters, conv_weight=change(_of(parameters.conv_weight))), x, remembered)

        return Rules(convolve=convolve)

    yield "convolution taps shifted by one", taps(lambda weight: weight.roll(1, dims=1))
    yield "convolution taps shifted by one", taps(lambda weight: weight.roll(-1, dims=1))
    yield "convolution taps in reverse order", taps(lambda weight: weight.flip(1))


def _losses(spec: StateSpec) -> Mistakes:
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


def _reading(change: Callable[[TokenOperands], TokenOperands]) -> Rules:
    return Rules(read=lambda *given: change(right.read(*given)))


def _without_decay(operands: TokenOperands) -> TokenOperands:
    return replace(operands, decay=torch.ones_like(operands.decay))


def _dealt(operands: TokenOperands, heads: Tensor) -> TokenOperands:
    return replace(operands, key=operands.key[..., heads, :], query=operands.query[..., heads, :])


def _scaled(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], scale: float) -> TokenOperands:
    return right.read(replace(spec, scale=scale), parameters, x, gates)


def _read_out(operands: TokenOperands, state: Tensor) -> Tensor:
    out = right.seen(state, operands.query)
    return out if operands.skip is None else out + operands.skip


def _of(part: Tensor | None) -> Tensor:
    assert part is not None
    return part


ROW_FACTOR = 8.0
"""Factor on the tolerance for a single sequence or state, whose error varies more than the error of a complete step."""


@dataclass(frozen=True)
class Judge:
    """Expected results of a step, computed before it runs."""

    case: StateCase
    earlier: StateCase
    """Copy of the case from before the step, including everything that the step may change."""
    expected: StateAnswer

    @classmethod
    def of(cls, case: StateCase) -> Judge:
        """Return the judge for a case that has not been run."""
        tensors = {name: tensor.clone() for name, tensor in case.cache.tensors.items()}
        cache = StateCache(tensors, case.cache.layout, case.cache.spec)
        earlier = replace(case, cache=cache, x=case.x.clone(), gates=[gate.clone() for gate in case.gates])
        return cls(case, earlier, answer(earlier))

    def run(self, backend: StateBackend) -> Tensor:
        """Run the step with a backend, check the results, and return the output.

        :raises Finding: if a result is wrong, or memory changed that must not.
        """
        out = run_states(backend, self.case)
        self.judge(out, type(backend).tolerance)
        return out

    def judge(self, out: Tensor, tolerance: Mapping[torch.dtype, float]) -> None:
        """Compare the output and the written states with the expected output and states.

        :raises Finding: for the first error, with the numbers and the likely cause.
        """
        spec = self.case.spec
        self._inputs()
        self._foreign()
        self._answer(out, float(tolerance[spec.dtype]))
        # States stored in a shorter type add its error in every step.
        bound = max(float(tolerance[spec.dtype]), float(tolerance.get(spec.state_dtype, 0.0)))
        for slot, state in self.expected.written.items():
            self._state(slot, state, bound)

    def _inputs(self) -> None:
        pairs = [("x", self.case.x, self.earlier.x)]
        pairs += [
            (f"gate {n}", now, before) for n, (now, before) in enumerate(zip(self.case.gates, self.earlier.gates, strict=True))
        ]
        for name, now, before in pairs:
            if not same_bits(now, before):
                raise Finding(f"{name} must be left as it is", guess=f"changes {name}")

    def _foreign(self) -> None:
        for name, tensor in self.case.cache.tensors.items():
            changed = [
                slot
                for slot in range(self.case.cache.num_slots)
                if slot not in self.expected.written and not same_bits(tensor[slot], self.earlier.cache.tensors[name][slot])
            ]
            if changed:
                padding = bool((self.case.metadata.slots_cpu < 0).any())
                last = changed == [self.case.cache.num_slots - 1] or changed == [0]
                raise Finding(
                    f"slots {changed[:6]} must keep their bits ({name}): no sequence of the step writes them",
                    guess=_PADDING if padding and last else "writes slots that are not its own",
                )

    def _answer(self, out: Tensor, tolerance: float) -> None:
        out, right = out.cpu(), self.expected.out
        starts = self.case.metadata.step.query_start_loc_cpu.tolist()
        rows = [slice(*pair) for pair in pairwise(starts)]
        real = [row for row, tokens in enumerate(rows) if len(out[tokens]) and not right[tokens].isnan().any()]
        errors = {row: distance(out[rows[row]], right[rows[row]]) for row in real}
        wrong = [row for row in real if not errors[row] <= ROW_FACTOR * tolerance]
        if wrong:
            got, want = out[rows[wrong[0]]].double(), right[rows[wrong[0]]]
            shown = self._first_wrong_output(got, want, ROW_FACTOR * tolerance)
            guess = self._guess_output(out, rows, wrong, [row for row in real if row not in wrong], tolerance)
            some = f"{len(wrong)} of {len(real)} sequences {'is' if len(wrong) == 1 else 'are'} wrong; " if len(real) > 1 else ""
            text = f"{some}output of {self._named(wrong[0])}, {shown}"
            raise Finding(text, guess=guess, error=errors[wrong[0]], tolerance=tolerance)
        tokens = ~right.isnan().any(1)
        error = distance(out[tokens], right[tokens])
        if real and error > tolerance:
            shown = "the output of all sequences together is off by more than rounding"
            raise Finding(shown, error=error, tolerance=tolerance, guess="computes in a shorter type")

    def _named(self, row: int) -> str:
        step = self.case.metadata.step
        length = step.query_lens[row]
        return f"sequence {row} ({length} new tokens after {step.kv_lens[row] - length})"

    def _first_wrong_output(self, got: Tensor, want: Tensor, tolerance: float) -> str:
        """Return the first token and head with a wrong output, and the element with the largest error in this token and head, in
        words."""
        spec = self.case.spec
        heads = (spec.num_heads, spec.value_dim) if spec.recurrent else (spec.conv_channels, 1)
        got, want = (torch.unflatten(rows, -1, heads) for rows in (got, want))
        token, head = _first((got - want).norm(dim=-1) / _usual(want.norm(dim=-1)), tolerance)
        element = int((got - want)[token, head].abs().nan_to_num(torch.inf).argmax())
        what = "channel" if heads[1] == 1 else "head"
        where = f"token {token}, {what} {head}" + ("" if heads[1] == 1 else f", element {element}")
        return f"{where}: expected {float(want[token, head, element]):.5g}, got {float(got[token, head, element]):.5g}"

    def _guess_output(self, out: Tensor, rows: list[slice], wrong: list[int], fine: list[int], tolerance: float) -> str:
        if missing := [row for row in wrong if bool(out[rows[row]].isnan().any())]:
            return _OLD if all(self._holds_nan(row) for row in missing) else _NAN

        def seen(chosen: list[int]) -> Seen:
            found = [out[rows[row]].double() for row in chosen]
            return Seen(chosen, lambda other: [other.out[rows[row]] for row in chosen], found)

        lens = self.case.metadata.step.query_lens
        one, other = (seen(sorted(each, key=lambda row: lens[row])[:2]) for each in (wrong, fine))
        return guess(self.earlier, one, other, ROW_FACTOR * tolerance) or _shared(wrong, fine, lens)

    def _holds_nan(self, row: int) -> bool:
        step, slot = self.case.metadata.step, int(self.case.metadata.slots_cpu[row])
        held = self.earlier.cache.tensors.values()
        return step.kv_lens[row] == step.query_lens[row] and any(bool(tensor[slot].isnan().any()) for tensor in held)

    def _state(self, slot: int, state: SequenceState, tolerance: float) -> None:
        cache = self.case.cache
        row, tokens = self.expected.writers[slot]
        what = f"slot {slot}, the state after new token {tokens} of {self._named(row)}"
        if state.conv is not None:
            got = cache.logical_conv[slot].cpu().double()
            if not torch.equal(got, state.conv):
                channel, time = (got != state.conv).nonzero()[0].tolist()
                numbers = f"expected {float(state.conv[channel, time]):.5g}, got {float(got[channel, time]):.5g}"
                raise Finding(
                    f"{what}: must hold the convolution's inputs, the newest last; channel {channel}, input {time}: {numbers}",
                    guess=self._guess_state(slot, "conv", got, state.conv, 0.0),
                )
        if state.recurrent is not None:
            got = cache.logical_recurrent[slot].cpu().double()
            error = distance(got, state.recurrent)
            if not error <= ROW_FACTOR * tolerance:
                heads = (got - state.recurrent).flatten(1).norm(dim=1) / _usual(state.recurrent.flatten(1).norm(dim=1))
                head = _first(heads[None], ROW_FACTOR * tolerance)[1]
                far = (got[head] - state.recurrent[head]).abs().nan_to_num(torch.inf)
                key, value = divmod(int(far.argmax()), far.shape[1])
                numbers = f"expected {float(state.recurrent[head, key, value]):.5g}, got {float(got[head, key, value]):.5g}"
                raise Finding(
                    f"{what}: must hold the recurrence's state; head {head}, key {key}, value {value}: {numbers}",
                    guess=self._guess_state(slot, "recurrent", got, state.recurrent, ROW_FACTOR * tolerance),
                    error=error,
                    tolerance=tolerance,
                )

    def _guess_state(self, slot: int, part: str, got: Tensor, want: Tensor, tolerance: float) -> str:
        earlier = getattr(state_of(self.earlier, slot), part)
        if torch.equal(got.nan_to_num(0.5), earlier.nan_to_num(0.5)):
            return "does not write the state"
        if part == "conv" and torch.equal(got.flip(1), want):
            return "keeps the convolution's inputs newest first"
        if part == "recurrent" and got.shape[1] == got.shape[2] and distance(got.transpose(1, 2), want) <= tolerance:
            return f"state transposed: takes layout {self.case.cache.layout.name} for its transpose"
        row, due = self.expected.writers[slot]
        for other in (row, *(each for each in range(len(self.case.metadata.slots_cpu)) if each != row)):
            for tokens, state in states_along(self.earlier, other):
                if (other, tokens) != (row, due) and distance(got, getattr(state, part)) < 1e-3:
                    whose = "its sequence" if other == row else f"sequence {other}"
                    return f"the state after new token {tokens} of {whose}, in place of {due}" + (
                        "" if other == row else " of its own"
                    )
        wrong = Seen([row], lambda answer: [getattr(answer.written[slot], part)], [got])
        if said := guess(self.earlier, wrong, Seen([], lambda answer: [], []), tolerance):
            return said
        if bool((self.case.metadata.slots_cpu < 0).any()) and slot in (0, self.case.cache.num_slots - 1):
            return _PADDING
        if not bool(got.isfinite().all()) or len(torch.unique(got)) < _DISTINCT:
            return ""
        short = [name for name, dtype in _SHORT.items() if part == "recurrent" and torch.equal(got, got.to(dtype).double())]
        return f"state kept in 16 bits ({short[0]})" if short and self.case.spec.state_dtype == torch.float32 else ""


_PADDING = "writes padding rows"
_OLD = "reads the slot's old content: begins with what the slot holds where there is no context"
_NAN = "NaN, or rows not written"
_SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_DISTINCT = 8
"""Minimum number of distinct values of a state from which the dtype of a rounded state is inferred."""
_MOST_TOKENS = 400
"""Maximum length in tokens of a sequence that is searched for the token after which a given state occurs."""


def states_along(case: StateCase, row: int) -> Iterator[tuple[int, SequenceState]]:
    """Yield (number of new tokens, state after these tokens) for one sequence, starting with 1 token."""
    length, start = case.metadata.step.query_lens[row], int(case.metadata.step.query_start_loc_cpu[row])
    if int(case.metadata.slots_cpu[row]) < 0 or length > _MOST_TOKENS:
        return
    state = begin(case, row)
    x, gates = case.x.cpu().double(), [gate.cpu().double() for gate in case.gates]
    for token in range(length):
        advance(case.spec, case.parameters, x[start + token], [gate[start + token] for gate in gates], state)
        yield token + 1, state


def _shared(wrong: Sequence[int], fine: Sequence[int], lens: Sequence[int]) -> str:
    """Return the property that only the wrong sequences share, in words; "" if no such property exists, or no sequence is
    correct."""
    if fine and min(wrong) > max(fine):
        return f"right up to sequence {max(fine)} of the step: a size that is too small, or programs that are not launched"
    if fine and min(lens[row] for row in wrong) > (most := max(lens[row] for row in fine)):
        return f"wrong in those of more than {most:,} new tokens, and right in all others"
    return ""


def _usual(sizes: Tensor) -> float:
    return max(float(sizes.square().mean().sqrt()), 1e-30)


def _first(errors: Tensor, tolerance: float) -> tuple[int, int]:
    """Return the first index in errors [n, m] whose error exceeds the tolerance, else the index of the largest error."""
    errors = errors.nan_to_num(torch.inf)
    beyond = (errors > tolerance).nonzero()
    row, column = beyond[0].tolist() if len(beyond) else divmod(int(errors.argmax()), errors.shape[1])
    return row, column
