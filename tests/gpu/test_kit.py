"""The conformance kit on a GPU, quick cells, for every backend that is available there; `bench/reproduce.sh` runs them all."""

from __future__ import annotations

import pytest

from headway.registry import create_registry
from headway.testing.kit.checking import Wanted, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", list(create_registry(load_entry_points=False).backends))
def test_a_backend_keeps_the_contract(name: str) -> None:
    report = check(Wanted(target=name, device="cuda", quick=True, jobs=4))
    if report.unavailable:
        pytest.skip(report.unavailable)
    assert not report.failed
