"""Block tables in a graph's host buffer: only those that have changed are written."""

from __future__ import annotations

import numpy

from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.step import NewPages, StepInput
from headway.core.engine.execution.attention import HostBlockTables, MirroredTables

NOBODY = numpy.zeros(0, dtype=numpy.int32)


def update(tables: HostBlockTables, *new: NewPages) -> None:
    tables.update(StepInput(*[NOBODY] * 5, NOBODY.astype(numpy.int64), True, new_pages=new))


def test_only_tables_that_have_changed_are_written() -> None:
    rows, padding = HostBlockTables(4, 3, [CacheGroup(8), CacheGroup(8)]), 4
    buffer = numpy.full((2, 3, 4), 77, dtype=numpy.int32)
    tables = MirroredTables(buffer)
    update(rows, *(NewPages(row, 0, [10 + row, 20 + row], group) for row in range(4) for group in range(2)))
    written = [tables.fill(numpy.array([2, 0, padding]), rows)]
    update(rows)
    written.append(tables.fill(numpy.array([2, 0, padding]), rows))
    update(rows, NewPages(0, 2, [30], 1))
    written.append(tables.fill(numpy.array([2, 0, padding]), rows))
    update(rows, NewPages(3, 0, [9]))  # of somebody who takes no part
    written.append(tables.fill(numpy.array([2, 0, 1]), rows))
    written.append(tables.fill(numpy.array([0, 2, padding]), rows))
    assert written == [3, 0, 1, 1, 3]
    assert buffer.tolist() == [
        [[10, 20, 0, 0], [12, 22, 0, 0], [0] * 4],
        [[10, 20, 30, 0], [12, 22, 0, 0], [0] * 4],
    ]
