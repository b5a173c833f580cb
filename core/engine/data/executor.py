"""Types that an executor shares with the engine loop: its capacity, the names of its parts, and the error raised when it is
lost."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.contract.errors import HeadwayError
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.state_slots import StateSlots

WEIGHTS, CACHE = "weights", "kv_cache"
"""Parts of an executor that can sleep and wake; the names are vLLM's."""


class ExecutorLostError(HeadwayError):
    """Error after which no step can run. The message says which rank failed, in which step, and why."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of an executor."""

    pool: PoolSize
    max_num_seqs: int
    """Maximum number of running sequences; each has a row in the executor's buffers."""
    max_model_len: int
    """Maximum length of prompt plus output, in tokens."""
    states: StateSlots | None = None
    """State slots, for layers with a state. None if the model has no such layers."""
