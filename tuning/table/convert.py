"""Conversion of a table file to the times that `auto` looks up."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headway.core.contract.metadata import Phase
from headway.core.select.costs import NO_BLOCKS, CostTable, Sample, Shape
from headway.tuning.table.schema import Cell, CrossoverTable, PointKey

CORE_PHASE: dict[str, Phase] = {
    "decode": Phase.DECODE,
    "verify": Phase.DECODE,
    "prefill": Phase.PREFILL,
    "extend": Phase.EXTEND,
    "scan": Phase.PREFILL,
    "step": Phase.DECODE,
}
"""Phase in a table -> phase in the contract. Verification is DECODE with several query tokens."""


def to_costs(table: CrossoverTable, phases: Collection[Phase] = tuple(Phase)) -> CostTable:
    """Return the times of a kernel-level table. Backends that failed their self-test are excluded with the reason. phases: as in
    `CostTable`.

    A cell without a time (out of memory, wrong answer, backend dropped for a phase) counts as not measured, and `auto` avoids the
    backend there. The rough time of a slower candidate is used, also for layouts with which the candidate was not tried. Other
    backends are faster at this point, but the time is needed to interpolate towards points where the candidate may win.
    """
    rough: dict[tuple[PointKey, str], float] = {}
    for cell in table.cells:
        if cell.status == "dropped" and cell.median_us is not None:
            key = (cell.point, cell.kernel)
            rough[key] = max(rough.get(key, 0.0), cell.median_us)

    def device_us(cell: Cell) -> float | None:
        if cell.status != "dropped" or cell.median_us is not None or cell.layout is None:
            return cell.median_us
        return rough.get((cell.point, cell.kernel))

    samples = [
        Sample(
            Shape(CORE_PHASE[cell.phase], cell.batch, cell.query_len, cell.kv_len),
            cell.kernel,
            cell.layout,
            NO_BLOCKS if cell.layout is not None and cell.block_size is None else cell.block_size,
            device_us(cell),
            cell.plan_us or 0.0,
            cell.host_us or 0.0,
            cell.between,
        )
        for cell in table.cells
        if cell.phase in CORE_PHASE
    ]
    excluded = {record.name: record.reason for record in table.kernels if record.available and record.reason}
    return CostTable(samples, table.noise, source_of(table), excluded, phases)


_SOURCES = {"attention": "crossover table of", "state": "state table of"}


def source_of(table: CrossoverTable) -> str:
    """Return a description of the source of a table's times."""
    if table.prior is None:
        return f"{_SOURCES.get(table.kind, 'measured')} {table.date[:10]}"
    prior, checked = table.prior, f"checked here {table.date[:10]}" if table.prior.checked else "not checked here"
    return f"derived from the {prior.made}, {checked}" if prior.derived else f"shipped table of {prior.date[:10]}, {checked}"


def to_times(table: CrossoverTable, counts: Sequence[int]) -> dict[str, list[float | None]]:
    """Return kernel -> microseconds per call, for each number of rows, tokens or bytes. None means not measured."""
    us = {(cell.kernel, cell.batch): cell.median_us for cell in table.cells}
    return {record.name: [us.get((record.name, count)) for count in counts] for record in table.kernels}


def failures(table: CrossoverTable) -> dict[str, str]:
    """Return kernel -> reason, for kernels that have no time because their answers were wrong or they raised an error."""
    timed = {cell.kernel for cell in table.cells if cell.median_us is not None}
    failed = {cell.kernel: cell.reason for cell in table.cells if cell.status in ("incorrect", "error")}
    return {name: reason for name, reason in failed.items() if name not in timed}
