"""What an engine has done since it started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Self

from headway.core.engine.scheduler import Scheduled


@dataclass
class EngineStats:
    """Counters that only grow: subtract an earlier `snapshot` to see a stretch of work."""

    num_steps: int = 0
    num_graph_steps: int = 0
    """Steps that were a CUDA graph's replay."""
    num_prefill_tokens: int = 0
    """Tokens computed beyond those of decoding sequences."""
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    kv_tokens_read: int = 0
    """Sum over decode tokens of the tokens in the cache that each attended to."""
    host_seconds: float = 0.0
    """Scheduling, launching and reading steps, without waiting for the device."""
    wait_seconds: float = 0.0
    """The host blocked on the device."""
    steps_by_backend: Counter[str] = field(default_factory=Counter)
    """Steps in which a backend served a phase."""

    def count(self, step: Iterable[Scheduled], backends: Iterable[str], graph: bool) -> None:
        """Add a step that has been launched."""
        self.num_steps += 1
        self.num_graph_steps += graph
        self.steps_by_backend.update(backends)
        for share in step:
            if share.num_new_tokens == 1 and share.context_len:
                self.num_decode_tokens += 1
                self.kv_tokens_read += share.context_len + 1
            else:
                self.num_prefill_tokens += share.num_new_tokens

    def snapshot(self) -> Self:
        """A copy."""
        return replace(self, steps_by_backend=Counter(self.steps_by_backend))

    def __sub__(self, earlier: Self) -> Self:
        """What was done since `earlier`."""
        return type(self)(**{each.name: getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)})
