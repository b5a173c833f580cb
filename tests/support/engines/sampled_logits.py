"""The logits that an engine samples from, and what transformers computes in their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.engine.loop import EngineLoop


def watched(engine: EngineLoop) -> Callable[[], dict[tuple[int, ...], Tensor]]:
    """Have the logits of an engine's greedy requests kept.

    What is returned gives them, [tokens, vocabulary], by the tokens that they chose, and begins anew. Fewer requests than
    max_num_seqs must run meanwhile, so that no row has two of them.
    """
    seen: dict[int, list[Tensor]] = defaultdict(list)

    def look(rows: NDArray[numpy.int32], logits: Tensor) -> None:
        for row, own in zip(rows.tolist(), logits.clone(), strict=True):
            seen[row].append(own)

    def take() -> dict[tuple[int, ...], Tensor]:
        found = {tuple(torch.stack(own).argmax(-1).tolist()): torch.stack(own) for own in seen.values()}
        seen.clear()
        return found

    engine.executor.observe(look)
    return take


def logits_of(reference: Any, prompt: list[int], written: list[int]) -> Tensor:
    """[len(written), vocabulary]: what transformers computes before each token, over the whole sequence at once."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([prompt + written[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :]
