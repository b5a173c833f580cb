"""Messages between ranks: messages sent while the engine starts, and steps encoded as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy

from headway.core.engine.data.step import NewPages, StartedRow, StepInput
from headway.core.system.shared_ring import RingSize

if TYPE_CHECKING:
    from headway.core.engine.execution.local_executor import LocalExecutor
    from headway.core.engine.ranks.torch_ranks import TorchRanks

_DECODE: Final = 1
_PICKLED: Final = 2  # First byte of a message: its kind
_ELSEWHERE: Final = "rank 0 has it"  # Replaces logits processors, which only rank 0 calls; they need not be picklable


def encode(step: StepInput) -> bytes:
    """Encode a step's input as bytes. A decode of 64 sequences takes about 600 bytes."""
    rows = step.started or step.copies or step.restored or len(step.checkpoints) or not step.samples.all() or step.embedded
    if not step.continues or rows or step.shows_logits or step.adapters is not None or step.adapter_loads:
        return bytes((_PICKLED,)) + pickle.dumps(_portable(step), pickle.HIGHEST_PROTOCOL)
    states = step.state_indices is not None
    pages: list[int] = []
    for row, start, new, group in step.new_pages:
        pages += (row, start, group, len(new), *new)
    head = numpy.array((len(step.rows), states, len(pages)), dtype=numpy.int32)
    parts = [head.tobytes(), step.rows.tobytes(), step.context_lens.tobytes()]
    if step.state_indices is not None:
        parts.append(step.state_indices.tobytes())
    if pages:
        parts.append(numpy.array(pages, dtype=numpy.int32).tobytes())
    return b"".join((bytes((_DECODE,)), *parts))


def decode(message: bytes) -> StepInput:
    """Decode the result of `encode` into a step's input."""
    if message[0] == _PICKLED:
        step: StepInput = pickle.loads(memoryview(message)[1:])
        return step
    numbers = numpy.frombuffer(message, dtype=numpy.int32, offset=1).copy()  # the offset leaves the numbers unaligned
    count, states, num_pages = numbers[:3].tolist()
    arrays = numbers[3 : 3 + (2 + states) * count].reshape(2 + states, count)
    pages = numbers[len(numbers) - num_pages :].tolist()
    return StepInput.continuing(arrays[0], arrays[1], _pages_of(pages), arrays[2] if states else None)


def _pages_of(numbers: list[int]) -> tuple[NewPages, ...]:
    found, at = [], 0
    while at < len(numbers):
        row, start, group, count = numbers[at : at + 4]
        found.append(NewPages(row, start, numbers[at + 4 : at + 4 + count], group))
        at += 4 + count
    return tuple(found)


def _portable(step: StepInput) -> StepInput:
    """Return the step with parameters that another process can unpickle."""
    if not any(each.params.logits_processors or each.params.extra_args for each in step.started):
        return step
    started = []
    for each in step.started:
        processors = (_ELSEWHERE,) * len(each.params.logits_processors or ())
        params = replace(each.params, logits_processors=processors, extra_args=None)
        started.append(StartedRow(*each)._replace(params=params))
    return replace(step, started=tuple(started))


class RankStart(NamedTuple):
    """Arguments with which a `MakeRank` makes one rank's executor."""

    ranks: TorchRanks
    device: str
    choices: Callable[[], Any]
    """Function that waits for rank 0's choices for all ranks, and returns them."""


MakeRank = Callable[[RankStart], "LocalExecutor"]
"""Function that loads a rank's shard of the model and makes the rank's executor."""


class StartRank(NamedTuple):
    """Rank 0's first message."""

    make: bytes
    """Pickled `MakeRank`. It is pickled separately, so that the message can be read even if the `MakeRank` cannot be
    unpickled."""
    rank: int
    ring: RingSize
    port: int
    """TCP port of rank 0's store."""
    device: str
    num_threads: int | None
    """Number of torch threads. None means torch's default."""
    log_level: int


class RankChoices(NamedTuple):
    """Rank 0's choices for all ranks."""

    choices: Any


class RankJoins(NamedTuple):
    """Message that the rank has finished its imports and is about to join the group."""


class RankReady(NamedTuple):
    """Message that the rank waits for steps."""

    facts: Any
    """Values that must match on all ranks; see `LocalExecutor.facts`."""


class RankFailed(NamedTuple):
    """Message that the rank has raised an error and will exit."""

    text: str
    of_another: bool
    """True if the error is a failed collective call, which usually means that another rank has exited."""
    traceback: str


def pickled(make: MakeRank) -> bytes:
    """Pickle a `MakeRank`. :raises pickle.PicklingError, AttributeError, TypeError: if it cannot be passed to another process."""
    return pickle.dumps(make, pickle.HIGHEST_PROTOCOL)
