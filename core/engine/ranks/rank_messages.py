"""The messages between rank 0 and each of the others, beside the ring: at the start, and where a rank fails.

This module imports little, so that the other ranks' processes can be started before rank 0 imports what it needs itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.core.system.shared_ring import RingSize

if TYPE_CHECKING:
    from headway.core.engine.execution.local_executor import LocalExecutor
    from headway.core.engine.ranks.torch_ranks import TorchRanks


class RankStart(NamedTuple):
    """The ranks as the maker of one rank's executor sees them."""

    ranks: TorchRanks
    device: str
    """The rank's device, as in torch.device."""
    choices: Callable[[], Any]
    """Waits for what rank 0 has chosen for all, and returns it."""


MakeRank = Callable[[RankStart], "LocalExecutor"]
"""Loads a rank's part of the model and makes the executor for it."""


class StartRank(NamedTuple):
    """Rank 0's first message."""

    make: bytes
    """A `MakeRank`, pickled by itself: one that cannot be read spoils no other message."""
    rank: int
    ring: RingSize
    port: int
    """The port of rank 0's store."""
    device: str
    """The rank's device, as in torch.device."""
    num_threads: int | None
    """torch's threads; None: as many as torch takes."""
    log_level: int


class RankChoices(NamedTuple):
    """Rank 0 has chosen what all ranks must agree in."""

    choices: Any


class RankJoins(NamedTuple):
    """The rank has imported what it needs and is about to meet the others."""


class RankReady(NamedTuple):
    """The rank waits for steps."""

    facts: Any
    """What must be equal on all ranks; see `facts_of`."""


class RankFailed(NamedTuple):
    """The rank has raised, and ends."""

    text: str
    of_another: bool
    """Whether it has noticed that another rank is gone, as a rule."""
    traceback: str


def pickled(make: MakeRank) -> bytes:
    """Pickle a maker.

    :raises pickle.PicklingError, AttributeError, TypeError: it, or what it holds, cannot be handed to another process.
    """
    return pickle.dumps(make, pickle.HIGHEST_PROTOCOL)
