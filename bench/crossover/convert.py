"""A table file as the numbers that `auto` looks up."""

from __future__ import annotations

from headway.bench.crossover.grid import CORE_PHASE
from headway.bench.crossover.schema import CrossoverTable
from headway.core.costs import CostTable, Sample, Shape


def to_costs(table: CrossoverTable, source: str = "") -> CostTable:
    """Times of a kernel-level table; a backend that failed its self-test is excluded with the reason.

    A cell without a time (out of memory, a wrong answer, a loser given up) is one nothing is known of: `auto` avoids it.
    """
    samples = [
        Sample(
            Shape(CORE_PHASE[cell.phase], cell.batch, cell.query_len, cell.kv_len),
            cell.backend,
            cell.layout,
            cell.block_size,
            cell.layer_us,
            cell.plan_us or 0.0,
        )
        for cell in table.cells
        if cell.phase in CORE_PHASE
    ]
    excluded = {record.name: record.reason for record in table.backends if record.available and record.reason}
    return CostTable(samples, table.noise, source or f"crossover table of {table.date[:10]}", excluded)
