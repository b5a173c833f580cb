"""Choice of the method that computes a layer of experts, by measured times or by a rule. Nothing here needs Triton."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headway.core.contract.experts import ExpertsConfig

TOKEN_COUNTS = tuple(2**n for n in range(14))
"""Numbers of tokens that are measured; any other takes the nearest one's choice, by ratio."""


@dataclass(frozen=True)
class ExpertTimes:
    """Measured times of one kind of layer on one device."""

    us: Mapping[str, Sequence[float | None]]
    """Method -> microseconds for each of TOKEN_COUNTS; None: it does not take so many, or failed."""
    source: str
    """Where they come from, in words."""

    def fastest(self, num_tokens: int, able: Collection[str]) -> str | None:
        """Return the fastest of the methods that take this many tokens; None where nothing was measured."""
        cell = nearest(num_tokens)
        known = [(self.us[name][cell], name) for name in able if cell < len(self.us.get(name, ()))]
        times = [(us, name) for us, name in known if us is not None]
        return min(times)[1] if times else None


def nearest(num_tokens: int) -> int:
    """Index of the nearest of TOKEN_COUNTS, by ratio."""
    return min(max(round(math.log2(max(num_tokens, 1))), 0), len(TOKEN_COUNTS) - 1)


def rules(num_tokens: int, config: ExpertsConfig) -> list[str]:
    """What the name of the method begins with that is taken without a measurement, by how many pairs an expert has on average.

    The first of which there is a method that takes so many tokens.
    """
    num_tokens = TOKEN_COUNTS[nearest(num_tokens)]
    pairs = num_tokens * config.num_slots / config.num_all
    lots = "cuda.rows8" if pairs <= 4 else "cuda.rows16"
    if num_tokens <= 2:
        return [lots, "triton.rows"]
    tiles = "triton.tiles16" if pairs <= 8 else "triton.tiles64" if pairs <= 64 else "triton.tiles128"
    return [lots, tiles] if pairs <= 16 else [tiles]
