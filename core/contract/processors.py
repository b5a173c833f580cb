"""How a plugin registers a logits processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LogitsProcessorInfo:
    """A logits processor that requests may name in `SamplingParams.logits_processors`."""

    name: str
    summary: str
    """One line for lists."""
    load: Callable[[], Callable[[Mapping[str, Any]], Callable[..., Any]]]
    """Returns a function that makes the processor of one completion from its request's `extra_args` (empty where there are none):
    (token_ids, logits) -> logits, or (prompt_token_ids, token_ids, logits) -> logits. Called when the name is first used."""
