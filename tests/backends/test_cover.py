"""What the grid leaves out is no pair of values; and a backend that is wrong does not pass it."""

from __future__ import annotations

from itertools import combinations

import numpy
import pytest

import cover
from conformance import case_of
from headway.bench.conformance.report import AXES
from headway.testing.reference import reference, relative_error, run_backend


@pytest.mark.parametrize("name", cover.backends("cpu"))
def test_every_pair_of_claimed_values_is_in_a_cell(name: str) -> None:
    rows, cells = cover.claimed(name, "cpu"), cover.answers(name, "cpu")
    known = [cell for cell in cells if all(value in cover.values(name)[axis] for axis, value in cell.axes.items())]
    assert len(known) == len(cells) - 4, "the odd values, all of which these backends take"
    chosen = numpy.array([[cover.values(name)[axis].index(getattr(cell, axis)) for axis in AXES] for cell in known])
    for one, other in combinations(range(len(AXES)), 2):
        assert {*map(tuple, rows[:, [one, other]].tolist())} == {*map(tuple, chosen[:, [one, other]].tolist())}
    assert len(cells) < len(rows) / 100


def test_a_pair_that_nobody_claims_is_not_asked_for() -> None:
    rows = numpy.array([[0, 0], [0, 1], [1, 0]])
    assert sorted(cover.cover(rows, [(0, 1)])) == [0, 1, 2]
    assert len(cover.cover(rows, [(0,), (1,)])) == 2


def test_every_value_that_is_not_claimed_has_a_cell() -> None:
    about = {(cell.about, getattr(cell, cell.about)) for cell in cover.refusals("sdpa", "cpu")}
    assert about == {("dtype", "float64"), ("feature", "fp8 cache")}


@pytest.mark.parametrize("feature", ["scale", "window", "window 1", "softcap", "alibi", "sinks"])
def test_a_backend_that_forgets_a_feature_would_fail(feature: str) -> None:
    """The inputs of the cells make each feature matter far beyond every tolerance."""
    cell = cover.first("sdpa", "cpu", phase="mixed", feature=feature)
    plain = cover.first("sdpa", "cpu", phase="mixed", feature="none")
    assert cell is not None
    assert plain is not None
    case = case_of(cell, "cpu")
    forgetful = cover.registry().backend("sdpa")(case_of(plain, "cpu").spec, case.cache.layout, cell.block_size)
    assert relative_error(run_backend(forgetful, case), reference(case), case) > 0.02
