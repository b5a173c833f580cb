"""Choice of the method that computes a layer of experts, by measured times or by a rule. Nothing here needs Triton."""

from __future__ import annotations

from headway.core.contract.experts import ExpertsConfig
from headway.core.select.costs import CountAxis

TOKEN_COUNTS = tuple(2**n for n in range(14))
"""Numbers of tokens that are measured; any other takes the nearest one's choice, by ratio."""
TOKENS = CountAxis("tokens", TOKEN_COUNTS, nearest=True)


def rules(num_tokens: int, config: ExpertsConfig) -> list[str]:
    """What the name of the method begins with that is taken without a measurement, by how many pairs an expert has on average.

    The first of which there is a method that takes so many tokens.
    """
    num_tokens = TOKEN_COUNTS[TOKENS.cell(num_tokens)]
    pairs = num_tokens * config.num_slots / config.num_all
    lots = "cuda.rows8" if pairs <= 4 else "cuda.rows16"
    if num_tokens <= 2:
        return [lots, "triton.rows"]
    tiles = "triton.tiles16" if pairs <= 8 else "triton.tiles64" if pairs <= 64 else "triton.tiles128"
    return [lots, tiles] if pairs <= 16 else [tiles]
