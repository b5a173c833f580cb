"""The diagrams of layouts are drawn from the contract's layouts, the same each time."""

from __future__ import annotations

import pytest

import diagrams
from headway.core.contract.layout import HND, NHD, VLLM_5D


def test_diagrams_show_what_the_layouts_do() -> None:
    nhd, hnd, packed = (diagrams.memory(layout, "key") for layout in (NHD, HND, VLLM_5D))
    assert nhd[8:10] == [(0, 1, 0), (0, 1, 1)]
    assert hnd[8:10] == [(1, 0, 0), (1, 0, 1)]
    assert packed[4:6] == [(1, 0, 0), (1, 0, 1)]
    assert diagrams.memory(VLLM_5D, "value")[:5] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0), (0, 0, 1)]
    assert sorted(nhd) == sorted(packed)


@pytest.mark.slow
def test_diagrams_are_drawn_the_same_each_time() -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    for draw in (diagrams.layouts, diagrams.step):
        drawn = draw()
        assert drawn.startswith(b"<?xml")
        assert drawn == draw()
