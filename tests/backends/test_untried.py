"""Kernels whose answers were compared on the host alone take part where they are asked for, and say why not elsewhere."""

from __future__ import annotations

import pytest

from headway.backends.probe import UNTRIED, untried


@pytest.mark.parametrize(("value", "takes_part"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_leave_is_given_by_a_variable(value: str | None, takes_part: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTRIED, raising=False)
    if value is not None:
        monkeypatch.setenv(UNTRIED, value)
    assert bool(untried()) == takes_part
    if not takes_part:
        assert str(untried()).endswith("(HEADWAY_UNTRIED_KERNELS=1 lets it take part)")
