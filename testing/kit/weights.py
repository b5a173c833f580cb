"""Linear and MoE kernels in the kit: a kernel's cells, layers, calls and checks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import combinations, count, islice
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig, ExpertsSpec, ExpertsWeights
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.linear import FUSED, LinearSpec
from headway.core.contract.spec import DTYPES
from headway.core.contract.support import Support
from headway.core.contract.weights import FORMATS, Weight, WeightFormat
from headway.core.oracle.cells import Finding, KitCell, Skipped, one_of, placed
from headway.core.oracle.oracle import distance
from headway.core.oracle.steps import GUARD, UNWRITTEN, bits, same_bits
from headway.core.oracle.weight_cases import (
    NUMBERS,
    WEIGHTS,
    Drawn,
    WeightCase,
    experts_case,
    fused_case,
    linear_case,
    make_weight,
    tensors_of,
)
from headway.testing.diagnosis.places import guess_product
from headway.testing.kit.checks import every
from headway.testing.kit.stage import Grid, Values
from headway.testing.kit.subject import Subject

ROWS = {"few": (17, 1, 16, 2, 3, 7), "many": (257, 33, 64, 100)}
"""Kind of work -> numbers of rows of x in the calls of one instance. The numbers are near tile boundaries and begin with the
largest, so that later calls could read leftovers of earlier calls."""
ROUNDED = 8e-2
"""Maximum relative error of a correct kernel that rounds x to 8 bits."""
_DTYPES = ("bfloat16", "float16", "float32")
_UNCLAIMED = "float64"


@dataclass(frozen=True, slots=True)
class LinearCell(KitCell):
    """Cell of a kernel for linear layers."""

    mark: ClassVar = "linear"
    prefixes: ClassVar = {"in_features": "k", "out_features": "n"}
    inputs: ClassVar = ("fused",)
    known: ClassVar = {
        "weight": one_of(WEIGHTS),
        "dtype": one_of((*DTYPES, _UNCLAIMED)),
        "numbers": one_of(NUMBERS),
        "work": one_of(ROWS),
        "fused": one_of(FUSED),
    }
    weight: str = "plain"
    """Name in WEIGHTS of the weight's format."""
    dtype: str = _DTYPES[0]
    in_features: int = 256
    out_features: int = 256
    numbers: str = NUMBERS[0]
    work: str = "few"
    about: str = "-"
    fused: str = ""
    """Name in FUSED of the fused operation; "" means only the GEMM."""

    @property
    def axes(self) -> dict[str, Any]:
        """Fields of the cell's result. The weight is stored as the feature."""
        shape = f"{self.out_features} x {self.in_features}, {self.numbers} numbers"
        return {"dtype": self.dtype, "feature": self.weight, "work": self.work, "shape": shape}


@dataclass(frozen=True, slots=True)
class ExpertCell(KitCell):
    """Cell of a kernel for MoE layers."""

    mark: ClassVar = "experts"
    prefixes: ClassVar = {"hidden_size": "h", "size": "s", "top_k": "t", "shared": "x"}
    known: ClassVar = {
        "weight": one_of(WEIGHTS),
        "dtype": one_of((*DTYPES, _UNCLAIMED)),
        "shared": r"\d+",
        "numbers": one_of(NUMBERS),
        "work": one_of(ROWS),
    }
    weight: str = "plain"
    dtype: str = _DTYPES[0]
    hidden_size: int = 256
    size: int = 128
    """Intermediate size of an expert."""
    expert: str = "silu"
    """Name in _EXPERTS that determines the activation and the biases of an expert."""
    top_k: int = 2
    shared: int = 0
    """Number of shared experts, which every token uses."""
    routing: str = "even"
    """Name in _ROUTING of the assignment of tokens to experts."""
    numbers: str = NUMBERS[0]
    work: str = "few"
    about: str = "-"

    @property
    def axes(self) -> dict[str, Any]:
        """Fields of the cell's result. The weight is stored as the feature."""
        shape = f"{self.expert} experts of {self.size}, hidden {self.hidden_size}, top {self.top_k}, {self.shared} shared"
        shape += f", {self.routing} routing, {self.numbers} numbers"
        return {"dtype": self.dtype, "feature": self.weight, "work": self.work, "shape": shape}


W = TypeVar("W", LinearCell, ExpertCell)


class WeightStage(Grid[Subject, W]):
    """Kernel with weights under test."""

    inputs: ClassVar[Mapping[str, Values]] = {"numbers": NUMBERS, "work": tuple(ROWS)}
    """Axes of a call and their values, which no kernel can refuse. The values are distributed over the layers."""

    @abstractmethod
    def case(self, cell: W, rows: int, seed: int = 0, turn: int = 0) -> WeightCase:
        """Return a call of a cell's layer on the subject's device. seed: seed of the weight. turn: index of a call with the
        same weight."""

    @property
    def tolerance(self) -> Mapping[torch.dtype, float]:
        """Maximum relative error of a correct answer, for each dtype of x."""
        declared: Mapping[torch.dtype, float] = self.subject.backend.tolerance
        rounded = ROUNDED if getattr(self.subject.backend, "rounds_input", False) else 0.0
        return {dtype: max(float(error), rounded) for dtype, error in declared.items()}

    def most_tolerance(self, dtype: torch.dtype) -> float:
        """Return the contract's tolerance or, for a kernel that rounds x to 8 bits, at least ROUNDED."""
        return max(super().most_tolerance(dtype), ROUNDED * getattr(self.subject.backend, "rounds_input", False))

    def answers(self, cell: W) -> list[Support]:
        """Return a list with the subject's support for the cell's layer."""
        return [self.subject.registry.of(self.subject.kind).supports(self.subject.name, self.spec(cell))]

    def make(self, cell: W) -> Any:
        """Return an instance of the kernel for a cell's layer."""
        return self.subject.backend(self.spec(cell))

    def rows_of(self, cell: W) -> tuple[int, ...]:
        """Return the numbers of rows in a cell's calls, limited to the numbers that the subject supports."""
        claims = self.subject.claims
        most = getattr(claims, "max_rows", None) or getattr(claims, "max_tokens", None)
        return tuple(rows if most is None else min(rows, most) for rows in ROWS[cell.work])

    def cells(self, quick: bool = False) -> list[W]:
        """Return the cells of the subject. quick: True to cover each value with each weight instead of each pair of values."""
        found: list[W] = [self.having({}).plain("claims")]
        plain = self.widest()
        if plain is None:
            return found
        found += self._refusals(plain[0])
        found += [plain[0].plain("tolerance", dtype=dtype) for dtype in self.values["dtype"] if self.widest(dtype=dtype)]
        pairs = [pair for pair in combinations(self.values, 2) if not quick or pair[0] == "weight"]
        turns = [dict(zip(self.inputs, each, strict=True)) for each in _turns(self.inputs)]
        for number, (cell, _) in enumerate(self.cover(pairs)):
            found += [cell.having(turns[(number + more) % len(turns)]) for more in range(1 if quick else 3)]
        of_weights = [row[0] for weight in self.values["weight"] if (row := self.widest(weight=weight)) is not None]
        for cell in of_weights:
            found += [cell.having(each) for each in turns[:: 3 if quick else 1]]
            checks = ("prepare", "instances", "graph", "repeat", "sync", *["invariant"] * self.subject.claims.batch_invariant)
            found += [cell.plain(check) for check in checks] + self.of_weight(cell)
        found.append(plain[0].plain("memory"))
        return list(dict.fromkeys(found))

    def _refusals(self, plain: W) -> list[W]:
        """Return the `refuse` cells. Each cell has one unclaimed or rejected axis value, in a layer that otherwise has the
        simplest values."""
        plain = next((row for row, _ in self.rows if self.subject.claims.check(self.spec(row))), plain)
        found: list[W] = []
        unclaimed: dict[str, Values] = {**self.values, "dtype": (*_DTYPES, _UNCLAIMED), **self.others}
        for axis, values in unclaimed.items():
            for value in values:
                cell = self.whole(plain.plain("refuse", axis).having({axis: value}))
                if cell is not None and not (self.subject.claims.check(self.spec(cell)) and all(self.answers(cell))):
                    found.append(cell)
        return found

    def of_weight(self, cell: W) -> list[W]:
        """Return the additional cells for the simplest layer with a weight."""
        return []

    @property
    def others(self) -> dict[str, Values]:
        """Further fields of a cell -> values that a kernel may have to refuse."""
        return {}

    def once(self, cell: W) -> Callable[[], list[Tensor]]:
        """Return a function that makes all calls of a cell with one instance, and returns the outputs."""
        kernel, cases = self.make(cell), [self.case(cell, rows) for rows in self.rows_of(cell)]
        prepared = kernel.prepare(cases[0].weight)
        return lambda: [GuardedCall(case).run(kernel, prepared) for case in cases]

    def many(self, cell: W) -> Callable[[int], None]:
        """Return a function that makes N calls with changing numbers of rows."""
        kernel, cases = self.make(cell), [self.case(cell, rows) for rows in self.rows_of(cell)]
        prepared, numbers = kernel.prepare(cases[0].weight), count()

        def steps(more: int) -> None:
            for number in islice(numbers, more):
                case: WeightCase = cases[number % len(cases)]
                out = torch.zeros_like(case.right, dtype=case.given[0].dtype, device=case.given[0].device)
                with torch.inference_mode():
                    case.call(kernel, prepared, out)

        return steps

    def launches(self, cell: W) -> tuple[str, Callable[[], object]]:
        """Return the name of the kernel's call, and a function that makes one call."""
        kernel = self.make(cell)
        call: GuardedCall = GuardedCall(self.case(cell, self.rows_of(cell)[0]))
        prepared = kernel.prepare(call.case.weight)
        call.run(kernel, prepared)  # compiles
        return "apply", lambda: call.case.call(kernel, prepared, call.out)


def _turns(inputs: Mapping[str, Values]) -> Iterator[Values]:
    """Yield combinations of axis values, ordered so that values of different axes soon occur together."""
    for number in range(max(map(len, inputs.values())) * 2):
        yield tuple(values[(number + number // len(values)) % len(values)] for values in inputs.values())


class GuardedCall:
    """One call with separate memory. `out` is between guard rows and is filled with NaN, or with the values to which the call
    adds."""

    def __init__(self, case: WeightCase) -> None:
        self.case = case
        rows, columns = case.right.shape
        x = case.given[0]
        self._guarded = torch.empty(rows + 2 * GUARD, columns, dtype=x.dtype, device=x.device)
        self._before = [tensor.clone() for tensor in self._read()]

    def _read(self) -> list[Tensor]:
        return [*self.case.given, *tensors_of(self.case.weight)]

    @property
    def out(self) -> Tensor:
        """[rows, out_features]: output of the call."""
        return self._guarded[GUARD:-GUARD]

    def run(self, kernel: Any, prepared: Any, before: float = torch.nan) -> Tensor:
        """Make the call and return a copy of its output. before: contents of `out` before the call, unless the call adds to
        `out`.

        :raises Finding: if the kernel changes its inputs, or memory outside `out`.
        """
        self.fill(before, self.case.onto)
        self.case.call(kernel, prepared, self.out)
        self.check()
        return self.out.clone()

    def fill(self, before: float = torch.nan, onto: Tensor | None = None) -> None:
        """Fill `out` before a call: with the values to which the call adds, else with the number `before`, or with a NaN pattern
        that arithmetic never returns."""
        bits(self._guarded).fill_(UNWRITTEN[self._guarded.dtype])
        if onto is not None:
            self.out.copy_(onto)
        elif before == before:
            self.out.fill_(before)

    def check(self) -> None:
        """Check that the call has changed no memory except `out`.

        :raises Finding: if any other memory has changed.
        """
        names = ["x", "experts", "scores"][: len(self.case.given)]
        for place, (now, before) in enumerate(zip(self._read(), self._before, strict=True)):
            if not same_bits(now, before):
                name = names[place] if place < len(names) else "the weight"
                raise Finding(f"{name} must be left as it is", guess=f"changes {name}")
        edges = torch.cat([self._guarded[:GUARD], self._guarded[-GUARD:]])
        if not bool((bits(edges) == UNWRITTEN[edges.dtype]).all()):
            text = "rows before or after `out`, which belong to somebody else, are written"
            raise Finding(text, guess="writes more rows than `out` has")


@cache
def _format_of(name: str, out_features: int, in_features: int) -> WeightFormat:
    drawn = Drawn(torch.Generator().manual_seed(0))
    return WeightFormat.of(make_weight(name, (out_features, in_features), torch.bfloat16, drawn))


@lru_cache(maxsize=4)
def _drawn(name: str, shape: tuple[int, int], dtype: torch.dtype, numbers: str, seed: int, most: int = 6) -> Weight:
    return make_weight(name, shape, dtype, Drawn(torch.Generator().manual_seed(seed), numbers, most))


def _fits(name: str, *in_features: int) -> bool:
    """Return whether each number of columns in `in_features` divides into complete groups of the weight format."""
    kind, *words = name.split("-")
    group = 32 if kind == "mxfp4" else int(words[0]) if kind == "int4" else 1
    return all(size % group == 0 for size in in_features)


class LinearStage(WeightStage[LinearCell]):
    """Linear kernel under test."""

    cell = LinearCell

    @cached_property
    def values(self) -> Mapping[str, Values]:
        """Values of each axis, claimed or unclaimed, the simplest first."""
        sizes = {"in_features": (256, 96, 1120, 72), "out_features": (256, 72, 257, 96)}
        return {"weight": WEIGHTS, "dtype": _DTYPES, **sizes}

    def spec(self, cell: LinearCell) -> LinearSpec:
        """Return the spec of a cell's layer."""
        n, k, dtype = cell.out_features, cell.in_features, DTYPES.get(cell.dtype, torch.float64)
        return LinearSpec(
            *(k, n, dtype, self.subject.device, _format_of(cell.weight, n, k), cell.fused == "norm", cell.fused == "bias"),
            *("silu" if cell.fused == "activation" else None, cell.fused == "gated"),
            *(cell.fused == "residual", cell.fused == "rotary"),
        )

    def whole(self, cell: LinearCell) -> LinearCell | None:
        """Return the cell; None if the columns of its weight do not divide into complete groups."""
        return cell if _fits(cell.weight, cell.in_features) else None

    @property
    def others(self) -> dict[str, Values]:
        """Fused operations that the subject does not claim."""
        return {"fused": tuple(name for name in FUSED if name not in self.subject.claims.fused)}

    def case(self, cell: LinearCell, rows: int, seed: int = 0, turn: int = 0) -> WeightCase:
        spec = self.spec(cell)
        weight = _drawn(cell.weight, (spec.out_features, spec.in_features), spec.dtype, cell.numbers, seed)
        drawn = Drawn(torch.Generator().manual_seed(seed + rows + 1000 * turn), cell.numbers)
        x = drawn.rows(rows, spec.in_features).to(spec.dtype)
        if not cell.fused:
            return linear_case(weight, x, spec.device)
        layer = Drawn(torch.Generator().manual_seed(seed + 1), cell.numbers)
        return fused_case(weight, x, cell.fused, layer, drawn, spec.device)

    def of_weight(self, cell: LinearCell) -> list[LinearCell]:
        """Return answer and graph cells for each fused operation that the subject claims, with the same weight."""
        fused = () if hasattr(self.subject.backend, "compute") else self.subject.claims.fused
        return [cell.having({"fused": part}).plain(check) for part in sorted(fused) for check in ("answer", "graph")]


_EXPERTS: dict[str, dict[str, Any]] = {
    "silu": {},
    "biases": {"biases": True},
    "clamped": {"swiglu_alpha": 1.702, "swiglu_limit": 1.5},
    "clamped-biases": {"swiglu_alpha": 1.702, "swiglu_limit": 1.5, "biases": True},
    "relu2": {"gated": False},
}
"""Activation and biases of an expert -> fields of its `ExpertsConfig`. clamped-biases: gpt-oss. relu2: Nemotron-H."""
_ROUTING = ("even", "one", "some", "equal")
"""Routings. even: random experts. one: the same experts for all tokens. some: no token for the last experts. equal: random
experts with equal scores."""
_NUM_EXPERTS = 8
_MOST = 2
"""Value of `Drawn.most` for experts. With larger numbers, the squared ReLU overflows float16."""


class ExpertsStage(WeightStage[ExpertCell]):
    """MoE kernel under test."""

    cell = ExpertCell
    inputs: ClassVar[Mapping[str, Values]] = {"numbers": NUMBERS, "work": tuple(ROWS), "routing": _ROUTING}

    @cached_property
    def values(self) -> Mapping[str, Values]:
        """Values of each axis, claimed or unclaimed, the simplest first."""
        sizes = {"hidden_size": (256, 128, 96), "size": (128, 64, 96), "top_k": (2, 1, 8), "shared": (0, 1, 2)}
        return {"weight": WEIGHTS, "dtype": _DTYPES, "expert": tuple(_EXPERTS), **sizes}

    def spec(self, cell: ExpertCell) -> ExpertsSpec:
        """Return the spec of a cell's layer."""
        sizes: dict[str, Any] = {"num_experts": _NUM_EXPERTS, "top_k": cell.top_k, "intermediate_size": cell.size}
        sizes["shared_intermediate_size"] = cell.shared * cell.size
        config = ExpertsConfig(**sizes, **_EXPERTS[cell.expert])
        up, down = config.num_all * config.up_size, config.num_all * cell.hidden_size
        formats = _format_of(cell.weight, up, cell.hidden_size), _format_of(cell.weight, down, cell.size)
        dtype = DTYPES.get(cell.dtype, torch.float64)
        return ExpertsSpec(config, cell.hidden_size, dtype, self.subject.device, formats[0], formats[1])

    def whole(self, cell: ExpertCell) -> ExpertCell | None:
        """Return the cell. The result is None if the kit does not test its weight format for experts, if the columns of its
        weights do not divide into complete groups, or if a block would span two experts."""
        apart = "order" in cell.weight or cell.weight == "fp8-tensor"
        blocks = cell.weight != "fp8-128x128" or (cell.size % 128 == 0 and cell.hidden_size % 128 == 0)
        return cell if _fits(cell.weight, cell.size, cell.hidden_size) and blocks and not apart else None

    def case(self, cell: ExpertCell, rows: int, seed: int = 0, turn: int = 0) -> WeightCase:
        spec = self.spec(cell)
        config, dtype = spec.config, spec.dtype
        weights = self._weights(cell.weight, cell.hidden_size, config, dtype, cell.numbers, seed)
        drawn = Drawn(torch.Generator().manual_seed(seed + rows + 1000 * turn), cell.numbers, _MOST)
        routed = self._routed(config, cell.routing, rows, drawn)
        onto = torch.randn(rows, cell.hidden_size, generator=drawn.generator).to(dtype)
        given = drawn.rows(rows, cell.hidden_size).to(dtype), *routed
        return experts_case(config, weights, given, onto, spec.device)

    @staticmethod
    @lru_cache(maxsize=4)
    def _weights(
        name: str, hidden_size: int, config: ExpertsConfig, dtype: torch.dtype, numbers: str, seed: int
    ) -> ExpertsWeights:
        shapes = (config.up_size, hidden_size), (hidden_size, config.intermediate_size)
        drawn = Drawn(torch.Generator().manual_seed(seed), numbers, _MOST)
        made = [make_weight(name, (config.num_all * n, k), dtype, drawn) for n, k in shapes]
        pairs = zip(made, shapes, strict=True)
        weights = [each.view((-1, *shape)) if isinstance(each, Tensor) else each for each, shape in pairs]
        biases = [drawn.normal(config.num_all, n).to(dtype) if config.biases else None for n, _ in shapes]
        return ExpertsWeights(weights[0], weights[1], biases[0], biases[1])

    def _routed(self, config: ExpertsConfig, routing: str, rows: int, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """Return random experts and scores for the slots of each token, with the shared experts last."""
        chosen = torch.rand(1 if routing == "one" else rows, config.num_experts, generator=drawn.generator)
        if routing == "some" and config.top_k < config.num_experts:
            chosen[:, max(config.top_k, config.num_experts // 2) :] = -1.0
        routed = chosen.topk(config.top_k, dim=1).indices.expand(rows, -1)
        shared = torch.arange(config.num_experts, config.num_all).expand(rows, -1)
        scores = torch.rand(rows, config.num_slots, generator=drawn.generator) + 0.1
        scores = torch.full_like(scores, 0.5) if routing == "equal" else scores
        return torch.cat([routed, shared], dim=1).int(), scores


_ELEMENT, _ROW = 8.0, 3.0
"""Factors on the tolerance for a single element and for a single row, whose errors vary more than the error of the complete
output."""
_FINITE = 192.0
"""Value with which `out` is filled before some calls; a check could ignore NaN as missing."""


def claims(stage: WeightStage[Any], cell: Any) -> str:
    """Check the class against the contract as far as possible without running the kernel."""
    every.claims(stage)
    accepted = {row.weight.partition("-")[0] for row, _ in stage.rows}
    for name in FORMATS:
        if name in stage.subject.claims.formats and name not in accepted:
            raise Finding(f"weight format {name} is claimed, and no layer of it is accepted", guess="a claim that does not hold")
    if not isinstance(stage.subject.backend.graph_level, GraphLevel):
        raise Finding(
            f"graph_level {stage.subject.backend.graph_level!r}; needs a GraphLevel", guess="a claim that does not hold"
        )
    return ""


def answer(stage: WeightStage[Any], cell: Any) -> str:
    """Run one instance on one layer with several numbers of rows; `out` is filled with NaN or a number before each call."""
    calls = [GuardedCall(stage.case(cell, rows)) for rows in stage.rows_of(cell)]
    kernel = stage.make(cell)
    prepared = _prepare(kernel, calls[0].case, cell)
    for number, call in enumerate(calls):
        _run(stage, kernel, prepared, call, torch.nan if number % 2 == 0 else _FINITE)
    return ""


def _prepare(kernel: Any, case: WeightCase, cell: Any) -> Any:
    try:
        return kernel.prepare(case.weight)
    except ArithmeticError as error:
        if cell.numbers == NUMBERS[0]:
            raise
        raise Skipped(f"prepare() refuses the weight's scales: {error}") from None


def _run(stage: WeightStage[Any], kernel: Any, prepared: Any, call: GuardedCall, before: float = torch.nan) -> torch.Tensor:
    out = call.run(kernel, prepared, before)
    judge(stage, call.case, out)
    return out


def judge(stage: WeightStage[Any], case: WeightCase, out: torch.Tensor) -> None:
    """Compare the output of a call with the correct answer.

    :raises Finding: if the whole output, a row or an element is wrong.
    """
    tolerance, found = stage.tolerance[out.dtype], out.cpu().double()
    error, apart = distance(found, case.right), (found - case.right).abs()
    stage.errors.note(error, tolerance)
    wrong = ~(apart <= _ELEMENT * tolerance * case.spread)
    rows = ~(apart.norm(dim=1) <= _ROW * tolerance * case.spread.norm(dim=1))
    if error <= tolerance and not bool(wrong.any()) and not bool(rows.any()):
        return
    far = (apart / case.spread).nan_to_num(torch.inf)
    row, column = divmod(int(far.argmax()), far.shape[1])
    numbers = f"expected {float(case.right[row, column]):.5g}, got {float(found[row, column]):.5g}"
    count = int((rows | wrong.any(1)).sum())
    some = f"{count} of {len(rows)} rows {'is' if count == 1 else 'are'} wrong" if count else "all rows together are wrong"
    text = f"{some}; row {row}, column {column}: {numbers}"
    looks = guess_product(case, out, wrong if bool(wrong.any()) else wrong | rows[:, None]) if stage.guesses else ""
    raise Finding(text, guess=looks, error=error, tolerance=tolerance)


def prepare(stage: WeightStage[Any], cell: Any) -> str:
    """Check one instance with several layers, one of which is prepared twice."""
    first, second = (GuardedCall(stage.case(cell, stage.rows_of(cell)[0], seed)) for seed in (0, 1))
    kernel = stage.make(cell)
    kept = [(call, kernel.prepare(call.case.weight)) for call in (first, second, first)]
    outs = []
    for number, (call, prepared) in enumerate([*kept, kept[0]]):
        with placed(f"call {number + 1} of an instance that has prepared two layers, the first of them twice"):
            outs.append(_run(stage, kernel, prepared, call))
    if not same_bits(outs[0], outs[2]):
        raise Finding("a layer that is prepared again must give the same bits", guess="prepare() depends on what came before it")
    return ""


def instances(stage: WeightStage[Any], cell: Any) -> str:
    """Alternate two instances, with layers of different sizes if the subject accepts them."""
    others = (row for row, _ in stage.rows if row.weight == cell.weight and stage.spec(row) != stage.spec(cell))
    cells = [cell, next(others, cell)]
    calls = [GuardedCall(stage.case(each, stage.rows_of(each)[0])) for each in cells]
    kernels = [stage.make(each) for each in cells]
    prepared = [kernel.prepare(call.case.weight) for kernel, call in zip(kernels, calls, strict=True)]
    for turn in (0, 1, 0):
        with placed(f"instance {turn + 1} of two"):
            _run(stage, kernels[turn], prepared[turn], calls[turn])
    return ""


def invariant(stage: WeightStage[Any], cell: Any) -> str:
    """Check that rows of the output have the same bits if they are computed without the other rows, or in a different order."""
    case, kernel = stage.case(cell, stage.rows_of(cell.having({"work": "many"}))[0]), stage.make(cell)
    prepared, rows = kernel.prepare(case.weight), len(case.right)
    whole = GuardedCall(case).run(kernel, prepared)
    orders = {
        f"the first {count} of {rows} rows": torch.arange(count) for count in (1, 2, 7, 16, 17, 33, 64, 100) if count < rows
    }
    for what, order in {**orders, f"{rows} rows in the inverse order": torch.arange(rows).flip(0)}.items():
        if not same_bits(GuardedCall(case.subset(order)).run(kernel, prepared), whole[order.to(whole.device)]):
            text = f"batch_invariant: the bits of a row must not depend on the other rows; those of {what} do"
            raise Finding(text, guess="not batch invariant")
    return ""


def graph(stage: WeightStage[Any], cell: Any) -> str:
    """Check a captured call that is replayed with different rows. On a CPU, the call is repeated because no graph can be
    replayed."""
    if stage.subject.backend.graph_level is GraphLevel.NONE:
        raise Skipped("graph_level: needs more, got NONE, so no engine captures it")
    for rows in sorted({stage.rows_of(cell)[0], 1}):
        _replay(stage, cell, rows)
    return ""


def _replay(stage: WeightStage[Any], cell: Any, rows: int) -> None:
    static, kernel = GuardedCall(stage.case(cell, rows)), stage.make(cell)
    prepared = kernel.prepare(static.case.weight)

    recorded = every.Recorded(lambda: static.case.call(kernel, prepared, static.out), stage.subject.device)
    for number in range(1, 4):
        now = stage.case(cell, rows, turn=number)
        for old, new in zip(static.case.given, now.given, strict=True):
            old.copy_(new)
        static.fill(onto=now.onto)
        recorded.replay()
        with placed(f"replay {number} of a captured call of {rows} rows"):
            judge(stage, now, static.out)
