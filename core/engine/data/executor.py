"""What an executor tells the engine's loop: what it can hold, what of it sleeps, and that it is lost."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.contract.errors import HeadwayError
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.state_slots import StateSlots

WEIGHTS, CACHE = "weights", "kv_cache"
"""What of an executor sleeps and wakes; vLLM's words."""


class ExecutorLostError(HeadwayError):
    """No step can run any more; the text says which rank failed, in which step, and why."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can hold."""

    pool: PoolSize
    max_num_seqs: int
    """Sequences that may run at once; each has a row in the executor's buffers."""
    max_model_len: int
    """Tokens of the longest sequence, prompt and output."""
    states: StateSlots | None = None
    """Slots of the layers with a state; None: the model has none."""
