"""Parts of a measurement specific to attention and state layers: building a point's inputs, calling kernels, checking
answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, make_backend
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import CacheWriter
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, STATE, OperationKind
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateBackend, StateLayout, StateSpec
from headway.core.contract.support import Support
from headway.core.oracle.cases import reference, relative_error
from headway.core.oracle.state_cases import StateCase, make_state_case, run_states
from headway.core.oracle.state_reference import SequenceState, StateAnswer, advance, answer, state_of
from headway.core.select.costs import NO_BLOCKS
from headway.core.select.kernels import VERBS, Placement, StateCandidates
from headway.registry import Registry
from headway.tuning.measure import self_test as selftest
from headway.tuning.measure.contender import (
    Contender,
    GuardedInputs,
    backend_contender,
    captured,
    captures,
    graph_contender,
    run_layer,
    worst_case,
)
from headway.tuning.measure.points import Point, grid, state_grid
from headway.tuning.measure.workloads import Pair, build_case, empty_case
from headway.tuning.table.convert import CORE_PHASE
from headway.tuning.table.schema import FAILED, LayerRecord, PhaseName, SpecRecord, StateSpecRecord

_LARGE = 2**30
"""Size in bytes above which a cache must be freed before the next cache is allocated."""
_CONTEXT = 1024
"""Number of cached tokens per sequence in decode. The size of a state does not depend on this number."""
_CHECKED = 16
"""Number of tokens, at the start of the first and of the last sequence, that are compared with float64 results at every point."""


class PointInputs(ABC):
    """The inputs of a point for one layout and block size, with the float64 answer."""

    expected: Any
    """Float64 answer, which is reused when the same point is measured with other layouts."""
    large: bool
    """True if the memory of these inputs must be freed before the next inputs are created."""

    @abstractmethod
    def contender(self, name: str) -> tuple[Contender, bool]:
        """Return a kernel prepared for these inputs, and whether its call replays a CUDA graph."""

    guard: GuardedInputs
    """Guard that detects writes to the inputs."""

    def check(self, with_cache: bool = True) -> None:
        """Check that kernels have not written to the inputs; see `GuardedInputs.check`."""
        self.guard.check(with_cache)


@dataclass(frozen=True)
class MeasuredKind(ABC):
    """A layer of one kind of operation, whose kernels are measured at the points of a grid."""

    registry: Registry
    spec: Any
    graph_len: int
    seed: int = 0
    kind: ClassVar[OperationKind]
    each_phase: ClassVar[bool]
    """True if every run measures at least one point of each phase, however little time is left."""

    @property
    @abstractmethod
    def record(self) -> LayerRecord:
        """Record that identifies the layer in a table."""

    @property
    @abstractmethod
    def grid(self) -> list[Point]:
        """Return the usual points for the layer's device."""

    @abstractmethod
    def pairs(self, layouts: Sequence[str] | None, block_sizes: Sequence[int | None]) -> list[Pair]:
        """Return the layouts and block sizes to measure. layouts: None means all."""

    @abstractmethod
    def supports(self, name: str, pair: Pair, phase: Phase) -> Support:
        """Return whether a kernel supports the layer in a phase, with a layout and block size."""

    def place(self, name: str, phase: Phase, pair: Pair) -> Pair | None:
        """Return the (layout, block size) that a kernel's time applies to. None means that the time applies to all pairs, because
        the kernel reads no cache."""
        return pair

    @abstractmethod
    def fault(self, name: str, pairs: Sequence[Pair]) -> str:
        """Return why a kernel must not be used for the layer, or "" if its self-test passes."""

    @abstractmethod
    def inputs(self, point: Point, pair: Pair, expected: Any) -> PointInputs:
        """Return the inputs of a point. expected: the answer of the same point with a different layout; None for the first
        layout."""

    @abstractmethod
    def compile(
        self, points: Sequence[Point], names: Sequence[str], pairs: Sequence[Pair], given_up: Mapping[PhaseName, Collection[str]]
    ) -> None:
        """Run the self-test and the points of kernels so that all kernels are compiled. Exceptions are ignored here; the
        measurement reports them.

        given_up: names of the kernels that are not measured, per phase.
        """

    def replays(self, name: str) -> bool:
        """Return whether decode steps of a kernel are timed by replaying a CUDA graph captured for the maximum length."""
        return False


GRAPH_LEN = 32768
"""Maximum context length of decode graphs, as in an engine with max_model_len 32,768."""


def measured_kind(registry: Registry, spec: AttentionSpec | StateSpec, graph_len: int = GRAPH_LEN, seed: int = 0) -> MeasuredKind:
    """Return the layer with this spec, as an object that can be measured."""
    return (MeasuredAttention if isinstance(spec, AttentionSpec) else MeasuredStates)(registry, spec, graph_len, seed)


def kind_of(spec: AttentionSpec | StateSpec) -> OperationKind:
    """Return the kind of operation of a layer's spec."""
    return ATTENTION if isinstance(spec, AttentionSpec) else STATE


class MeasuredAttention(MeasuredKind):
    """An attention layer: its paged cache has the same contents for every layout and block size."""

    kind = ATTENTION
    each_phase = False

    @property
    def record(self) -> SpecRecord:
        return SpecRecord.of(self.spec)

    @property
    def grid(self) -> list[Point]:
        return grid(self.spec.device.type)

    def pairs(self, layouts: Sequence[str] | None, block_sizes: Sequence[int | None]) -> list[Pair]:
        found = [self.registry.layout(name).layout for name in layouts or self.registry.layouts]
        return list(dict.fromkeys((layout, size) for size in block_sizes for layout in found))

    def supports(self, name: str, pair: Pair, phase: Phase) -> Support:
        return self.registry.supports(name, self.spec, pair[0], pair[1], phase)

    def place(self, name: str, phase: Phase, pair: Pair) -> Pair | None:
        return None if phase is Phase.PREFILL and self.registry.backend(name).capabilities.dense_prefill else pair

    def replays(self, name: str) -> bool:
        return bool(self.registry.backend(name).captures())

    def fault(self, name: str, pairs: Sequence[Pair]) -> str:
        return selftest.self_test(self.registry, name, self.spec, pairs)

    def inputs(self, point: Point, pair: Pair, expected: Tensor | None) -> AttentionInputs:
        return AttentionInputs(self, point, pair, expected)

    def compile(
        self, points: Sequence[Point], names: Sequence[str], pairs: Sequence[Pair], given_up: Mapping[PhaseName, Collection[str]]
    ) -> None:
        """Compile the kernels with a cache of one block that all sequences share.

        While compiling ahead, launches are suppressed. A backend whose first launch is not suppressed has nothing to compile, and
        is skipped afterwards.
        """
        selftest.launch(self.registry, names, self.spec, pairs)
        for pair in pairs:
            for name in names:
                self._compile([point for point in points if name not in given_up.get(point.phase, ())], name, pair)

    def _compile(self, points: Sequence[Point], name: str, pair: Pair) -> None:
        made = None
        for point in points:
            if not self.supports(name, pair, CORE_PHASE[point.phase]):
                continue
            with suppress(Exception):
                made = made or self.instance(name, pair)
                if not self._launches_nothing(made, point, pair):
                    return

    def _launches_nothing(self, backend: AttentionBackend, point: Point, pair: Pair) -> bool:
        """Plan and launch a point. Return whether the output is unchanged, which shows that the launches were suppressed."""
        case = empty_case(point.work(self.spec), pair[0], pair[1], self.seed, shared=True)
        out = case.q.new_full((*case.q.shape[:2], self.spec.v_head_dim), math.nan)
        if captures(backend, case):
            plan = backend.plan_for_capture(worst_case(case.metadata, max(self.graph_len, point.kv_len)))
        else:
            plan = backend.plan(case.metadata)
        run_layer(backend, case, plan, out, self.writer(point, pair))
        return bool(out[:1].isnan().all())

    def instance(self, name: str, pair: Pair) -> AttentionBackend:
        """Return an instance of a backend for a layout and block size."""
        return make_backend(self.registry.backend(name), self.spec, pair[0], pair[1])

    def writer(self, point: Point, pair: Pair) -> CacheWriter | None:
        """Return the cache writer of a layout, or None in prefill: dense prefill may have no cache, and writing takes as long in
        any layout."""
        return None if point.phase == "prefill" else self.registry.layout(pair[0].name).writer(self.spec.device)


class AttentionInputs(PointInputs):
    """The inputs of an attention step, guarded against writes."""

    def __init__(self, kind: MeasuredAttention, point: Point, pair: Pair, expected: Tensor | None) -> None:
        make = partial(build_case, point.work(kind.spec), pair[0], pair[1], kind.seed)
        self.case = make()
        self.expected = reference(self.case) if expected is None else expected
        self.large = self.case.cache.key.nbytes > _LARGE
        self.guard = GuardedInputs.of(self.case, make)
        self._kind = kind
        self._point = point
        self._pair = pair

    def contender(self, name: str) -> tuple[Contender, bool]:
        kind, case = self._kind, self.case
        backend = kind.instance(name, self._pair)

        def distance(out: Tensor) -> float:
            return relative_error(out, self.expected, case)

        writer = kind.writer(self._point, self._pair)
        if captures(backend, case):
            return graph_contender(backend, case, distance, kind.graph_len, writer), True
        return backend_contender(backend, case, distance, writer), False


class MeasuredStates(MeasuredKind):
    """A state layer: states are stored in slots, and a timed step does not change them."""

    kind = STATE
    each_phase = True

    @property
    def record(self) -> StateSpecRecord:
        return StateSpecRecord.of(self.spec)

    @property
    def grid(self) -> list[Point]:
        return state_grid(self.spec.device.type)

    @cached_property
    def able(self) -> StateCandidates:
        """The candidate backends for the layer."""
        return StateCandidates(self.registry.states, [self.spec])

    def pairs(self, layouts: Sequence[str] | None, block_sizes: Sequence[int | None]) -> list[Pair]:
        """Return the layouts; states have no block sizes."""
        return [(layout, None) for name, layout in self.registry.states.layouts.items() if layouts is None or name in layouts]

    def supports(self, name: str, pair: Pair, phase: Phase) -> Support:
        return Support(self.able.reasons(name, phase, Placement(pair[0], NO_BLOCKS)))

    def fault(self, name: str, pairs: Sequence[Pair]) -> str:
        """Run the self-test with every layout, in both phases."""
        for phase, test in self._tests.items():
            for layout, _ in pairs:
                if not self.supports(name, (layout, None), phase):
                    continue
                try:
                    backend = self.backend(name, layout, phase)
                    error, tolerance = test.error(backend, layout), backend.tolerance[self.spec.dtype]
                    why = f"relative error {error:.2g}, tolerance {tolerance:.2g}" if error > tolerance else ""
                except (Exception, SystemExit) as raised:
                    why = selftest.describe_error(raised)
                if why:
                    return f"{FAILED}, {VERBS[phase]} of {name} over {layout.name}: {why}"
        return ""

    def inputs(self, point: Point, pair: Pair, expected: ExpectedRows | None) -> StateInputs:
        return StateInputs(self, point, pair[0], expected or ExpectedRows.of(self._case(point, pair[0])))

    def compile(
        self, points: Sequence[Point], names: Sequence[str], pairs: Sequence[Pair], given_up: Mapping[PhaseName, Collection[str]]
    ) -> None:
        for layout, _ in pairs:
            steps = [(phase, relaid(test.case, layout), ()) for phase, test in self._tests.items()]
            for phase, case, out in [*steps, *self._steps(points, layout, given_up)]:
                for name in names:
                    if name not in out and self.supports(name, (layout, None), phase):
                        with suppress(Exception):  # the measurement meets the same error and reports it
                            run_states(self.backend(name, layout, phase), case)

    def _steps(
        self, points: Sequence[Point], layout: StateLayout, given_up: Mapping[PhaseName, Collection[str]]
    ) -> Iterator[tuple[Phase, StateCase, Collection[str]]]:
        for point in points:
            with suppress(torch.OutOfMemoryError):
                yield CORE_PHASE[point.phase], self._case(point, layout), given_up.get(point.phase, ())

    def backend(self, name: str, layout: StateLayout, phase: Phase) -> StateBackend:
        """Return an instance of a backend for a phase, PREFILL or DECODE."""
        return self.able.make(name, self.spec, phase, Placement(layout, NO_BLOCKS))

    def _case(self, point: Point, layout: StateLayout) -> StateCase:
        # In place, a state would change with every run, and could overflow.
        context = _CONTEXT if point.phase == "step" else 0
        lens, device = [(point.query_len, point.query_len + context)] * point.batch, self.spec.device
        return make_state_case(
            lens, self.spec, layout, seed=self.seed, spare_slots=0, checkpoints=False, in_place=False, draw_on=device
        )

    @cached_property
    def _tests(self) -> dict[Phase, SelfTestStep]:
        layout = next(iter(self.registry.states.layouts.values()))
        return {phase: SelfTestStep.of(self.spec, layout, phase) for phase in VERBS}


class ExpectedRows(NamedTuple):
    """A step of a state layer, and float64 answers for a few of its tokens."""

    case: StateCase
    rows: list[int]
    """Indices of the compared tokens, which are the first tokens of the first and of the last sequence."""
    answers: Tensor

    @classmethod
    def of(cls, case: StateCase) -> ExpectedRows:
        """Compute the float64 answers of a case."""
        step, rows, answers = case.metadata.step, [], []
        for sequence in dict.fromkeys((0, step.num_seqs - 1)):
            length, first = step.query_lens[sequence], sum(step.query_lens[:sequence])
            empty = step.kv_lens[sequence] == length
            state = SequenceState.zeros(case.spec) if empty else state_of(case, int(case.metadata.slots_cpu[sequence]))
            for row in range(first, first + min(length, _CHECKED)):
                gates = [gate[row].cpu().double() for gate in case.gates]
                answers.append(advance(case.spec, case.parameters, case.x[row].cpu().double(), gates, state))
                rows.append(row)
        return cls(case, rows, torch.stack(answers))


class StateInputs(PointInputs):
    """The inputs of a state step."""

    large = False

    def __init__(self, kind: MeasuredStates, point: Point, layout: StateLayout, expected: ExpectedRows) -> None:
        self.expected = expected
        self.case = expected.case if expected.case.cache.layout is layout else relaid(expected.case, layout)
        self._kind = kind
        self._phase = CORE_PHASE[point.phase]
        self._layout = layout
        read = {"x": self.case.x, **{f"gates[{number}]": gate for number, gate in enumerate(self.case.gates)}}
        self.guard = GuardedInputs(read, {}, dict)  # a write to a state that is only read shows in the answer

    def contender(self, name: str) -> tuple[Contender, bool]:
        """Return a kernel prepared for these inputs, and whether its call replays a CUDA graph. On a GPU, a decode step replays a
        graph if the backend can be captured."""
        case, metadata, decodes = self.case, self.case.metadata, self._phase is Phase.DECODE
        backend = self._kind.backend(name, self._layout, self._phase)
        out = case.x.new_full((case.x.shape[0], case.spec.out_channels), torch.nan)
        serve = backend.step if decodes else backend.scan
        level = GraphLevel.DECODE if metadata.step.max_query_len == 1 else GraphLevel.UNIFORM
        in_graph = decodes and case.x.device.type == "cuda" and backend.graph_level >= level
        plan = backend.plan_for_capture(metadata) if in_graph else backend.plan(metadata)

        def layer() -> None:
            serve(case.x, case.gates, case.parameters, case.cache, plan, out)

        run: Callable[[], object] = captured(layer) if in_graph else layer

        def call() -> Tensor:
            run()
            return out

        helper = self._kind.able.helper(name, self._phase, Placement(self._layout, NO_BLOCKS))
        contender = Contender(
            call=call,
            error=lambda found: relative(found[self.expected.rows], self.expected.answers),
            tolerance=backend.tolerance[case.spec.dtype],
            poison=lambda: out.fill_(math.nan),
            plan=None if in_graph else lambda: backend.plan(metadata),
            kernel=f"convolution by {helper}" if helper else "",
        )
        return contender, in_graph


_SELF_TEST = {
    Phase.PREFILL: ((70, 70), (20, 50), (5, 5)),
    Phase.DECODE: ((1, 40), (1, 2), (4, 9)),
}
"""(query_len, kv_len) of the sequences in the self-test, per phase: partial chunks, prompts with a context, draft tokens."""


@dataclass(frozen=True)
class SelfTestStep:
    """A small step of one phase with its float64 answer."""

    case: StateCase
    answer: StateAnswer

    @classmethod
    def of(cls, spec: StateSpec, layout: StateLayout, phase: Phase) -> SelfTestStep:
        """Return a step with random inputs; any layout may be used."""
        case = make_state_case(_SELF_TEST[phase], spec, layout)
        return cls(case, answer(case))

    def error(self, backend: StateBackend, layout: StateLayout) -> float:
        """Return the largest relative error among the output and the written states; infinity if any other slot changed."""
        case = relaid(self.case, layout)
        errors = [relative(run_states(backend, case), self.answer.out)]
        for slot, wanted in self.answer.written.items():
            got = state_of(case, slot)
            for mine, theirs in ((got.recurrent, wanted.recurrent), (got.conv, wanted.conv)):
                if mine is not None and theirs is not None:
                    errors.append(relative(mine, theirs))
        others = [slot for slot in range(case.cache.num_slots) if slot not in self.answer.written]
        before = relaid(self.case, layout).cache.tensors
        same = all(
            torch.equal(tensor[others].nan_to_num(7.0), before[name][others].nan_to_num(7.0))
            for name, tensor in case.cache.tensors.items()
        )
        return max(errors) if same else math.inf


def relaid(case: StateCase, layout: StateLayout) -> StateCase:
    """Return a case with a separate copy of the states, stored in a layout."""
    cache = layout.allocate(case.spec, case.cache.num_slots)
    if case.spec.recurrent:
        cache.logical_recurrent.copy_(case.cache.logical_recurrent)
    if case.spec.conv_channels:
        cache.logical_conv.copy_(case.cache.logical_conv)
    return replace(case, cache=cache)


def relative(got: Tensor, want: Tensor) -> float:
    """Return ||got - want|| / ||want||, or infinity if this ratio is not finite."""
    got, want = got.detach().cpu().double(), want.cpu()
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf
