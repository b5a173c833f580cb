"""The points at which backends of layers with a state are timed: sequences x new tokens, in the order in which they matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.contract.metadata import Phase
from headway.tuning.table.convert import VERB_PHASE
from headway.tuning.table.state_schema import Verb

_CONTEXT = 1024
"""Cached tokens of a sequence that decodes; a state's size does not depend on them."""


@dataclass(frozen=True, slots=True)
class StatePoint:
    """Sequences of equal lengths in one verb."""

    verb: Verb
    batch: int
    query_len: int
    """New tokens of each: of a step one, or one and its drafts."""
    level: int = 0
    """Points of a lower level are measured first; those of level 0 are what a choice cannot do without."""

    @property
    def phase(self) -> Phase:
        """PREFILL for scan, DECODE for step."""
        return VERB_PHASE[self.verb]

    @property
    def key(self) -> tuple[Verb, int, int]:
        """What `MeasuredState.point` is."""
        return self.verb, self.batch, self.query_len

    @property
    def lens(self) -> list[tuple[int, int]]:
        """(query_len, kv_len) of each sequence."""
        return [(self.query_len, self.query_len + (_CONTEXT if self.verb == "step" else 0))] * self.batch

    def __str__(self) -> str:
        return f"{self.verb} {self.batch}x{self.query_len}"


def _points(verb: Verb, *sizes: tuple[int, int, int]) -> list[StatePoint]:
    return [StatePoint(verb, batch, query_len, level) for batch, query_len, level in sizes]


_GRIDS: dict[str, Sequence[StatePoint]] = {
    "cuda": [
        *_points("step", (1, 1, 0), (64, 1, 0), (16, 1, 1), (256, 1, 1), (4, 1, 2), (1, 4, 1), (16, 4, 2), (64, 4, 2)),
        *_points("scan", (1, 64, 0), (1, 2048, 0), (8, 1024, 0), (64, 32, 1), (1, 512, 1), (8, 64, 1), (1, 8192, 2)),
    ],
    "cpu": [
        *_points("step", (1, 1, 0), (16, 1, 0), (4, 1, 1), (64, 1, 2), (1, 4, 1), (16, 4, 2)),
        *_points("scan", (1, 64, 0), (1, 512, 0), (8, 64, 1), (1, 2048, 2), (64, 32, 2)),
    ],
}
"""Device type -> grid. A state is read and written whole whatever came before, so that a step costs by its sequences and a scan
by its tokens and by how many of them must wait for one another. Drafts are timed at four tokens."""


def state_grid(device_type: str) -> list[StatePoint]:
    """The points of a device, in the order in which they matter."""
    return sorted(_GRIDS.get(device_type, _GRIDS["cuda"]), key=lambda point: point.level)
