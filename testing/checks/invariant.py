"""Whether a sequence's bits depend on its neighbours, where a backend says that they do not."""

from __future__ import annotations

from headway.testing.cells import Cell
from headway.testing.findings import Finding
from headway.testing.invariance import dependent, invariance_case
from headway.testing.stage import Stage


def invariant(stage: Stage, cell: Cell) -> str:
    """Every sequence of some steps has the bits that it has alone."""
    subject = stage.subject
    case = invariance_case(
        stage.claimed.spec(cell), subject.layouts[cell.layout], cell.block_size, subject.writer(cell.layout), stage.poison
    )
    found = dependent(subject.make(case.spec, cell.layout, cell.block_size), case)
    if found:
        raise Finding(
            f"batch_invariant: a sequence's bits must not depend on its neighbours; {len(found)} do, such as {found[0]} "
            "(batch: (query_len, kv_len))",
            guess="not batch invariant",
        )
    return ""
