"""Backends of layers with a state on one step: first whether their answers are right, then how they are called to be timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.contract.backend import GraphLevel
from headway.core.contract.metadata import Phase
from headway.core.contract.state import StateLayout, StateSpec
from headway.core.contract.state_backend import StateBackend
from headway.core.oracle.state_cases import StateCase, make_state_case, run_states
from headway.core.oracle.state_reference import SequenceState, StateAnswer, advance, answer, state_of
from headway.core.select.state_candidates import VERBS, StateCandidates
from headway.registry import Registry
from headway.tuning.measure.graph_replay import captured
from headway.tuning.measure.state_points import StatePoint

_SELF_TEST = {
    Phase.PREFILL: ((70, 70), (20, 50), (5, 5)),
    Phase.DECODE: ((1, 40), (1, 2), (4, 9)),
}
"""(query_len, kv_len) of the sequences of the step that a backend computes right before it is timed: chunks that end early,
prompts behind a context, drafts."""
_CHECKED = 16
"""Tokens of the first and of the last sequence that are held to float64 at every point."""


@dataclass(frozen=True)
class StateContender:
    """One backend over one layout in one phase, PREFILL (scan) or DECODE (step)."""

    name: str
    layout: StateLayout
    phase: Phase
    backend: StateBackend
    convolution: str
    """The backend that applies the convolution, where that is another."""

    @property
    def tolerance(self) -> float:
        """Largest relative error of the output and of states."""
        return self.backend.tolerance[self.backend.spec.dtype]

    def __str__(self) -> str:
        return f"{VERBS[self.phase]} of {self.name} over {self.layout.name}"


def state_contenders(registry: Registry, spec: StateSpec, names: Sequence[str]) -> list[StateContender]:
    """Every backend of `names` over every layout in both phases, where it can serve the layer."""
    able = StateCandidates(registry, [spec])
    return [
        StateContender(name, layout, phase, able.instances(name, layout, phase)[spec], able.helper(name, layout, phase))
        for phase in VERBS
        for layout in registry.state_layouts.values()
        for name in names
        if able.serves(name, layout, phase)
    ]


@dataclass(frozen=True)
class SelfTestStep:
    """A small step of one phase with its float64 answer, which any contender of the phase may be held to."""

    case: StateCase
    answer: StateAnswer

    @classmethod
    def of(cls, spec: StateSpec, layout: StateLayout, phase: Phase) -> SelfTestStep:
        """Draw the numbers, over any layout."""
        case = make_state_case(_SELF_TEST[phase], spec, layout)
        return cls(case, answer(case))

    def run(self, contender: StateContender) -> tuple[StateCase, Tensor]:
        """Run the step over the contender's layout: the case afterwards, and the output."""
        case = relaid(self.case, contender.layout)
        return case, run_states(contender.backend, case)

    def error(self, contender: StateContender) -> float:
        """The relative error of the output or of the worst state, the larger; infinite where another slot was touched."""
        case, out = self.run(contender)
        errors = [relative(out, self.answer.out)]
        for slot, wanted in self.answer.written.items():
            got = state_of(case, slot)
            for mine, theirs in ((got.recurrent, wanted.recurrent), (got.conv, wanted.conv)):
                if mine is not None and theirs is not None:
                    errors.append(relative(mine, theirs))
        others = [slot for slot in range(case.cache.num_slots) if slot not in self.answer.written]
        before = relaid(self.case, contender.layout).cache.tensors
        same = all(
            torch.equal(tensor[others].nan_to_num(7.0), before[name][others].nan_to_num(7.0))
            for name, tensor in case.cache.tensors.items()
        )
        return max(errors) if same else math.inf


def relaid(case: StateCase, layout: StateLayout) -> StateCase:
    """The same case over states of its own in another layout, or in the same."""
    cache = layout.allocate(case.spec, case.cache.num_slots)
    if case.spec.recurrent:
        cache.logical_recurrent.copy_(case.cache.logical_recurrent)
    if case.spec.conv_channels:
        cache.logical_conv.copy_(case.cache.logical_conv)
    return replace(case, cache=cache)


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, infinite where either is no number."""
    got, want = got.detach().cpu().double(), want.cpu()
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class TimedState:
    """A contender on a point's step: `call` runs one layer, again and again with the same result."""

    call: Callable[[], object]
    out: Tensor
    plan: Callable[[], object] | None
    """Makes the step's plan once more; None: a graph has none."""


class StatePointStep:
    """One point's step: the same numbers over every layout, and the float64 rows that outputs are held to."""

    def __init__(
        self, point: StatePoint, spec: StateSpec, layouts: Sequence[StateLayout], seed: int, *, checked: bool = True
    ) -> None:
        """checked: whether `error` will be asked for, whose answers take a while."""
        # In place a state would move on with every run, and might grow beyond all numbers.
        case = make_state_case(
            point.lens, spec, layouts[0], seed=seed, spare_slots=0, checkpoints=False, in_place=False, draw_on=spec.device
        )
        self.cases = {layout.name: case if not number else relaid(case, layout) for number, layout in enumerate(layouts)}
        self._rows, self._expected = _expected(case) if checked else ([], torch.empty(0))

    def timed(self, contender: StateContender) -> TimedState:
        """Make a contender's call: on a GPU a step is a graph's replay where the backend can be captured."""
        case, backend = self.cases[contender.layout.name], contender.backend
        out = case.x.new_full((case.x.shape[0], case.spec.out_channels), torch.nan)
        metadata, decodes = case.metadata, contender.phase is Phase.DECODE
        serve = backend.step if decodes else backend.scan
        level = GraphLevel.DECODE if metadata.step.max_query_len == 1 else GraphLevel.UNIFORM
        in_graph = decodes and case.x.device.type == "cuda" and backend.graph_level >= level
        plan = backend.plan_for_capture(metadata) if in_graph else backend.plan(metadata)

        def layer() -> None:
            serve(case.x, case.gates, case.parameters, case.cache, plan, out)

        if in_graph:
            return TimedState(captured(layer).replay, out, None)
        return TimedState(layer, out, lambda: backend.plan(metadata))

    def launch(self, contender: StateContender) -> None:
        """Run a contender whatever comes of it, so that its kernels are compiled."""
        with suppress(Exception):  # the run that counts will meet it again, and name it
            case = self.cases[contender.layout.name]
            run_states(contender.backend, case)

    def error(self, out: Tensor) -> float:
        """The relative error of the tokens that are held to float64."""
        return relative(out[self._rows], self._expected)


def _expected(case: StateCase) -> tuple[list[int], Tensor]:
    """The first tokens of the first and of the last sequence: their rows, and what float64 makes of them."""
    step, rows, answers = case.metadata.step, [], []
    last = step.num_seqs - 1
    for sequence in dict.fromkeys((0, last)):
        length, first = step.query_lens[sequence], sum(step.query_lens[:sequence])
        empty = step.kv_lens[sequence] == length
        state = SequenceState.zeros(case.spec) if empty else state_of(case, int(case.metadata.slots_cpu[sequence]))
        for row in range(first, first + min(length, _CHECKED)):
            gates = [gate[row].cpu().double() for gate in case.gates]
            answers.append(advance(case.spec, case.parameters, case.x[row].cpu().double(), gates, state))
            rows.append(row)
    return rows, torch.stack(answers)
