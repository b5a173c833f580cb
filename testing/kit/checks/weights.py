"""Checks of kernels over weights: claims, answers, arrangements of several layers, several instances, and captured calls."""

from __future__ import annotations

from typing import Any

import torch

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.weights import FORMATS
from headway.core.oracle.cells import Finding, Skipped, placed
from headway.core.oracle.oracle import distance
from headway.core.oracle.steps import same_bits
from headway.core.oracle.weight_cases import NUMBERS, WeightCase
from headway.testing.diagnosis.weights import guess
from headway.testing.kit.checks import every
from headway.testing.kit.weights import Call, WeightStage

_ELEMENT, _ROW = 8.0, 3.0
"""How many times as far as the tolerance of a whole answer says one element and one row may be off: few numbers scatter more."""
_FINITE = 192.0
"""What `out` holds before some calls, in place of NaN, which could be taken for nothing."""


def claims(stage: WeightStage[Any], cell: Any) -> str:
    """The class keeps to the contract as far as that can be seen without running it."""
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
    """One instance over one layer, with one number of rows after the other; `out` holds NaN, or a number, before each call."""
    calls = [Call(stage.case(cell, rows)) for rows in stage.rows_of(cell)]
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


def _run(stage: WeightStage[Any], kernel: Any, prepared: Any, call: Call, before: float = torch.nan) -> torch.Tensor:
    out = call.run(kernel, prepared, before)
    judge(stage, call.case, out)
    return out


def judge(stage: WeightStage[Any], case: WeightCase, out: torch.Tensor) -> None:
    """Hold the output of a call to the right answer.

    :raises Finding: it is wrong as a whole, in a row or in an element.
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
    looks = guess(case, out, wrong if bool(wrong.any()) else wrong | rows[:, None]) if stage.guesses else ""
    raise Finding(text, guess=looks, error=error, tolerance=tolerance)


def prepare(stage: WeightStage[Any], cell: Any) -> str:
    """One instance serves several layers, and prepares one of them twice."""
    first, second = (Call(stage.case(cell, stage.rows_of(cell)[0], seed)) for seed in (0, 1))
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
    """Two instances, of layers of different sizes where the subject takes such, make their calls by turns."""
    others = (row for row, _ in stage.rows if row.weight == cell.weight and stage.spec(row) != stage.spec(cell))
    cells = [cell, next(others, cell)]
    calls = [Call(stage.case(each, stage.rows_of(each)[0])) for each in cells]
    kernels = [stage.make(each) for each in cells]
    prepared = [kernel.prepare(call.case.weight) for kernel, call in zip(kernels, calls, strict=True)]
    for turn in (0, 1, 0):
        with placed(f"instance {turn + 1} of two"):
            _run(stage, kernels[turn], prepared[turn], calls[turn])
    return ""


def graph(stage: WeightStage[Any], cell: Any) -> str:
    """A call that is captured once is right when it is replayed for other rows; on a CPU it is made again."""
    if stage.subject.backend.graph_level is GraphLevel.NONE:
        raise Skipped("graph_level: needs more, got NONE, so no engine captures it")
    for rows in sorted({stage.rows_of(cell)[0], 1}):
        _replay(stage, cell, rows)
    return ""


def _replay(stage: WeightStage[Any], cell: Any, rows: int) -> None:
    static, kernel = Call(stage.case(cell, rows)), stage.make(cell)
    prepared = kernel.prepare(static.case.weight)

    def run() -> None:
        kernel.apply(*static.case.given, prepared, static.out)

    run()  # compiles
    recorded = every.capture(run) if stage.subject.device.type == "cuda" else None
    for number in range(1, 4):
        now = stage.case(cell, rows, turn=number)
        for old, new in zip(static.case.given, now.given, strict=True):
            old.copy_(new)
        static.fill(onto=now.onto)
        if recorded is None:
            run()
        else:
            recorded.replay()
            torch.cuda.synchronize()
        with placed(f"replay {number} of a captured call of {rows} rows"):
            judge(stage, now, static.out)
