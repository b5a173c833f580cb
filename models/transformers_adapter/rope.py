"""Rotary embeddings whose frequencies follow the longest sequence of a batch: they are held at those of their training length."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("headway")


def fixed_rope_length(model: Any, max_positions: int) -> int:
    """Fix such frequencies, and return the positions for which that is what transformers computes.

    Of the types that transformers has, `dynamic` and `longrope` change when a sequence of the batch grows past the length of the
    original training. A cache holds keys of the old frequencies, and one sequence would change the others, so they stay as they
    are up to that length, and no sequence may grow past it.
    """
    longest = max_positions
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        by_layer = kind if isinstance(kind, dict) else {None: kind}
        for layer_type, each in by_layer.items():
            if not isinstance(each, str) or ("dynamic" not in each and each != "longrope"):
                continue
            parameters = module.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            # `dynamic` takes max_position_embeddings for the original length; `longrope` names it.
            original = parameters.get("original_max_position_embeddings") if each == "longrope" else None
            longest = min(longest, original or max_positions)
            log.info("model: RoPE of type %s is held at the frequencies of up to %d positions", each, original or max_positions)
            by_layer[layer_type] = "fixed"
            module.rope_type = kind if isinstance(kind, dict) else "fixed"
    return longest
