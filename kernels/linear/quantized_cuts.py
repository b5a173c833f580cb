"""Changes of the rule's cut by name: what an engine's start measures beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from headway.kernels.linear.quantized import CutRule, QuantizedCut, WeightBytes, quantized_cut

Change = Callable[[QuantizedCut], QuantizedCut]
MOST_ROWS: Final = 64
"""Rows up to which changes are measured: beyond, kernels multiply more than they read."""
CHANGES: Final[Mapping[str, Change]] = {
    "n64": lambda cut: replace(cut, block_n=64),
    "n128": lambda cut: replace(cut, block_n=128),
    "splits x2": lambda cut: replace(cut, splits=2 * cut.splits),
}


def changed(change: Change) -> CutRule:
    """Return the rule with a change after it."""
    return partial(_changed, change)


def _changed(change: Change, weight: WeightBytes, rows: int, features: int, gated: bool, multiprocessors: int) -> QuantizedCut:
    return change(quantized_cut(weight, rows, features, gated, multiprocessors))
