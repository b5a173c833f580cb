"""Judges a step of layers with states: every row, every slot that is written and every bit that is nobody's to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.contract.state import StateCache
from headway.core.contract.state_backend import StateBackend
from headway.testing.cells import Finding
from headway.testing.state_cases import StateCase, run_states
from headway.testing.state_reference import SequenceState, StateAnswer, answer

ROW_FACTOR = 8.0
"""How much farther than the tolerance of a whole step one sequence or state may be off: few numbers scatter more."""
_CLEARLY = 0.25
"""A mistake explains an answer that lies nearer to it than this share of its distance from the right one."""


@dataclass(frozen=True)
class Judge:
    """What a step must return and leave, taken down before it runs."""

    case: StateCase
    earlier: StateCase
    """The case with copies of all that a step may change."""
    expected: StateAnswer

    @classmethod
    def of(cls, case: StateCase) -> Judge:
        """Compute the answer of a case that has not run yet."""
        tensors = {name: tensor.clone() for name, tensor in case.cache.tensors.items()}
        cache = StateCache(tensors, case.cache.layout, case.cache.spec)
        earlier = replace(case, cache=cache, x=case.x.clone(), gates=[gate.clone() for gate in case.gates])
        return cls(case, earlier, answer(earlier))

    def run(self, backend: StateBackend) -> Tensor:
        """Run the step through a backend and judge it; returns the output.

        :raises Finding: anything about it is wrong.
        """
        out = run_states(backend, self.case)
        self.judge(out, type(backend).tolerance)
        return out

    def judge(self, out: Tensor, tolerance: Mapping[torch.dtype, float]) -> None:
        """:raises Finding: the first thing that is wrong, with the numbers and a guess."""
        spec = self.case.spec
        self._inputs()
        self._foreign()
        self._answer(out, float(tolerance[spec.dtype]))
        # States that are kept in a shorter type have its errors too, which every step adds.
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
                    guess="writes padding rows" if padding and last else "writes slots that are not its own",
                )

    def _answer(self, out: Tensor, tolerance: float) -> None:
        out, right, start = out.cpu(), self.expected.out, 0
        for row, length in enumerate(self.case.metadata.step.query_lens):
            got, want = out[start : start + length].double(), right[start : start + length]
            start += length
            if want.isnan().any():  # a padding row
                continue
            context = self.case.metadata.step.kv_lens[row] - length
            what = f"sequence {row} ({length} new tokens after {context})"
            if got.isnan().any():
                guess = (
                    "begins with what the slot holds where there is no context" if context == 0 else "NaN, or rows not written"
                )
                raise Finding(f"{what} must be written with numbers, got NaN", guess=guess)
            error = distance(got, want)
            if error > ROW_FACTOR * tolerance:
                guess = self._looks_like(start - length, got, want)
                raise Finding(f"{what} is wrong", guess=guess, error=error, tolerance=tolerance)
        real = ~right.isnan().any(1)
        error = distance(out[real].double(), right[real])
        if bool(real.any()) and error > tolerance:
            raise Finding(
                "the step's output is wrong in all", error=error, tolerance=tolerance, guess="computes in a shorter type"
            )

    def _looks_like(self, start, got, want):
        return ""

    def _state(self, slot, state, tolerance):
        cache = self.case.cache
        if state.conv is not None:
            got = cache.logical_conv[slot].cpu().double()
            if not torch.equal(got, state.conv):
                raise Finding(f"slot {slot} must hold the convolution's last inputs, the newest last")
        if state.recurrent is not None:
            got = cache.logical_recurrent[slot].cpu().double()
            error = distance(got, state.recurrent)
            if not error <= ROW_FACTOR * tolerance:
                raise Finding(f"slot {slot} must hold the state", error=error, tolerance=tolerance)


def distance(got: Tensor, right: Tensor) -> float:
    """Return ||got - right|| / ||right||."""
    return float((got.double() - right).norm() / right.norm().clamp(min=1e-30))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
