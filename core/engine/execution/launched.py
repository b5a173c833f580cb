"""A launched step, until its tokens are on the host: copies through pinned memory, and what comes beside tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.engine.data.step import Sampled, SampledExtras
from headway.core.sampling.logprobs import Scores, TokenLogprobs
from headway.core.sampling.vocabulary import Gathers


class HostResults:
    """Copies tensors of int64 to the host. Making pinned memory and an event for each step would cost more than the copy."""

    def __init__(self, num_longs: int, device: torch.device) -> None:
        """num_longs: numbers that most steps have; after a step with more there is room for as many in each."""
        self._num_longs = num_longs
        self._gpu = device.type == "cuda"
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def copy(self, tensor: Tensor) -> HostCopy:
        """Begin to copy, after all that the current stream has been given."""
        memory, done = self._take(tensor.numel())
        view = memory[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor, non_blocking=True)
        if done is not None:
            done.record()
        return HostCopy(self, memory, done, view)

    @property
    def num_free(self) -> int:
        """Pieces of pinned memory that the next copies reuse."""
        return len(self._free)

    def _take(self, length: int) -> tuple[Tensor, torch.cuda.Event | None]:
        if length > self._num_longs:
            self._num_longs = length
            self._free = []
        if self._free:
            return self._free.pop()
        memory = torch.empty(self._num_longs, dtype=torch.int64, pin_memory=self._gpu)
        return memory, torch.cuda.Event() if self._gpu else None  # type: ignore[no-untyped-call]

    def give_back(self, memory: Tensor, done: torch.cuda.Event | None) -> None:
        """Take pinned memory back that nobody reads any more. Memory of a step that nobody waits for is never reused."""
        if len(memory) == self._num_longs:
            self._free.append((memory, done))


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, owner: HostResults, memory: Tensor, done: torch.cuda.Event | None, view: Tensor) -> None:
        self._owner = owner
        self._done = done
        self._view = view
        self.memory = memory
        """The pinned memory that it goes to."""

    def wait(self) -> NDArray[numpy.int64]:
        """Return the tensor, once the device has done all work that was queued before the copy. May be called once."""
        if self._done is not None:
            self._done.synchronize()
        found: NDArray[numpy.int64] = self._view.numpy().copy()
        self._owner.give_back(self.memory, self._done)
        return found


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of some of a prompt's tokens."""

    index: int
    """Index of the sequence in the step."""
    first: int
    """Position of the first of these tokens."""
    k: int
    """Most likely tokens that each has beside it."""
    scores: Scores


@dataclass(frozen=True, slots=True)
class DeviceExtras:
    """Results of a step beyond tokens, with tensors in host memory that are valid once the step is done."""

    errors: Mapping[int, str]
    """Why a sequence cannot go on, by its row of logits."""
    scores: Scores | None
    scored: Sequence[tuple[int, int]]
    """For each entry of `scores` its row of logits, and how many of the most likely tokens it wants."""
    prompts: Sequence[PromptScores]
    owners: NDArray[numpy.int64]
    """[rows of logits]: which of the step's sampling sequences each belongs to."""

    def on_host(self) -> SampledExtras:
        """The same as plain data, by sequence."""
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for index, (row, k) in enumerate(self.scored):
            assert self.scores is not None
            logprobs.setdefault(int(self.owners[row]), []).append(self.scores.at(index, k))
        prompts = {
            each.index: (each.first, [each.scores.at(index, each.k) for index in range(len(each.scores.ranks))])
            for each in self.prompts
        }
        return SampledExtras({int(self.owners[row]): why for row, why in self.errors.items()}, logprobs, prompts)


@dataclass(slots=True)
class Launched:
    """A launched step of this process: its `InFlight`."""

    tokens: HostCopy
    """The tokens, int64 [rows] in the order of `order`, or [rows, drafts + 2] as in `Verified`."""
    order: NDArray[numpy.int64] | None
    """Index of each row among the step's sampling sequences; None: rows are in their order."""
    backends: tuple[str, ...] = ()
    graph: bool = False
    piecewise: bool = False
    no_graph: str = ""
    compiled: tuple[str, ...] = ()
    first_nan: str | None = None
    after_model: tuple[str, ...] = ()
    waited_for: tuple[str, ...] = ()
    wait_seconds: float = 0.0
    gathers: Gathers | None = None
    extras: DeviceExtras | None = None
    check: Callable[[], None] | None = None
    """Raises where what the step has left is void, though the device reports no fault: another rank has been lost."""
    _sampled: Sampled | None = field(default=None, init=False)

    def wait(self) -> Sampled:
        """The sampled tokens; waits for the device."""
        if self._sampled is None:
            self._sampled = self._read()
        return self._sampled

    def _read(self) -> Sampled:
        tokens = self.tokens.wait()
        if self.check is not None:
            self.check()
        if tokens.ndim == 2:
            tokens, counts = tokens[:, :-1], tokens[:, -1]
        else:
            tokens, counts = tokens[:, None], numpy.ones(len(tokens), dtype=numpy.int64)
        if self.order is not None:  # a graph's rows, and those have no drafts
            ordered = numpy.empty_like(tokens)
            ordered[self.order] = tokens
            tokens = ordered
        return Sampled(tokens, counts, None if self.extras is None else self.extras.on_host())
