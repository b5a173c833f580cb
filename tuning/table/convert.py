"""A table file as the numbers that `auto` looks up."""

from __future__ import annotations

from collections.abc import Collection

from headway.core.contract.metadata import Phase
from headway.core.select.costs import NO_BLOCKS, CostTable, Sample, Shape, state_shape
from headway.tuning.table.noise import LEAST_DIFFERENCE
from headway.tuning.table.schema import Cell, CrossoverTable, PointKey, StateTable, Verb

CORE_PHASE = {"decode": Phase.DECODE, "verify": Phase.DECODE, "prefill": Phase.PREFILL, "extend": Phase.EXTEND}
"""A table's phase -> the contract's. Verification is DECODE with several query tokens."""


def to_costs(table: CrossoverTable, source: str = "", phases: Collection[Phase] = tuple(Phase)) -> CostTable:
    """Times of a kernel-level table; a backend that failed its self-test is excluded with the reason. phases: see `CostTable`.

    A cell without a time (out of memory, a wrong answer, a backend given up for a whole phase) was not measured: `auto`
    avoids it. A loser's rough time counts, also for the layouts over which it was not tried: others are faster here either way,
    and towards the next points, where it may be the fastest, it can be weighed.
    """
    rough: dict[tuple[PointKey, str], float] = {}
    for cell in table.cells:
        if cell.status == "dropped" and cell.median_us is not None:
            key = (cell.point, cell.backend)
            rough[key] = max(rough.get(key, 0.0), cell.median_us)

    def device_us(cell: Cell) -> float | None:
        if cell.status != "dropped" or cell.median_us is not None or cell.layout is None:
            return cell.median_us
        return rough.get((cell.point, cell.backend))

    samples = [
        Sample(
            Shape(CORE_PHASE[cell.phase], cell.batch, cell.query_len, cell.kv_len),
            cell.backend,
            cell.layout,
            cell.block_size,
            device_us(cell),
            cell.plan_us or 0.0,
            cell.host_us or 0.0,
            cell.between,
        )
        for cell in table.cells
        if cell.phase in CORE_PHASE
    ]
    excluded = {record.name: record.reason for record in table.backends if record.available and record.reason}
    return CostTable(samples, table.noise, source or _source(table), excluded, phases)


def _source(table: CrossoverTable) -> str:
    if table.prior is None:
        return f"crossover table of {table.date[:10]}"
    checked = f"checked here {table.date[:10]}" if table.prior.checked else "not checked here"
    return f"shipped table of {table.prior.date[:10]}, {checked}"


VERB_PHASE: dict[Verb, Phase] = {"scan": Phase.PREFILL, "step": Phase.DECODE}
"""A method of state backends -> the phase that it stands for in a `CostTable`."""


def to_state_costs(table: StateTable) -> CostTable:
    """Times of a table of layers with a state; a backend that failed as a whole is excluded with the reason."""
    samples = [
        Sample(
            state_shape(VERB_PHASE[cell.verb], cell.batch, cell.query_len),
            cell.backend,
            cell.layout,
            NO_BLOCKS,
            cell.median_us,
            cell.plan_us or 0.0,
            cell.host_us or 0.0,
        )
        for cell in table.cells
    ]
    excluded = {record.name: record.reason for record in table.backends if record.available and record.reason}
    return CostTable(samples, LEAST_DIFFERENCE, f"state table of {table.date[:10]}", excluded)
