"""Logits processors that change a whole batch at once, in the manner of vLLM's v1 class, and the batch updates that they
receive."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from headway.core.sampling.params import SamplingParams

ENGINE_PROCESSORS: Final = "headway.batch"
"""Placeholder for the engine's own processors, which change whole batches, in a request's logits processors."""

State = TypeVar("State")


class MoveDirectionality(Enum):
    """Content of a move's source after the move. The names are vLLM's."""

    UNIDIRECTIONAL = auto()
    """The source becomes empty."""
    SWAP = auto()
    """The source receives the target's entry."""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a batch since the last step, to be applied in the order removed, added, moved. The names are vLLM's."""

    batch_size: int
    removed: Sequence[int]
    """Places that sequences have left; `added` may fill some of them again."""
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    """New sequences: (place, parameters, prompt tokens, output tokens). The list of output tokens grows with the output."""
    moved: Sequence[tuple[int, int, MoveDirectionality]]
    """Sequences that moved: (source, target, content of the source after the move)."""


class BatchLogitsProcessor(ABC):
    """Base class for processors that change the logits of a batch. vLLM calls it LogitsProcessor."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a request's parameters before it is queued. A ValueError rejects the request."""
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """vllm_config: a `VllmConfig`. device: device of the logits. is_pin_memory: True to copy to this device through pinned
        memory."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the changed logits. logits: float32 [batch_size, vocab_size], which may be changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether the processor never changes which token is the most likely one, for any parameters."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Process the changes of the batch for a step, before `apply` is called. None means that the batch is unchanged."""


class RequestLogitsProcessors(BatchLogitsProcessor):
    """Base class for processors with a function per sequence. vLLM calls it AdapterLogitsProcessor."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._functions: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        """Return a function of (token_ids, logits) or (prompt_ids, token_ids, logits) that changes the logits, or None."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._functions, batch_update, self._function)

    def apply(self, logits: Tensor) -> Tensor:
        for place, function in self._functions.items():
            logits[place] = function(logits[place])
        return logits

    def _function(self, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> Callable[[Tensor], Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        if len(inspect.signature(function).parameters) == 3:
            return lambda logits: function(prompt, output, logits)
        return lambda logits: function(output, logits)


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Update a processor's data, a dict keyed by index in the batch. Return whether the dict has changed. new_state: function
    that makes a sequence's data, or returns None if the sequence needs none."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for place in batch_update.removed:
        req_entries.pop(place, None)
    for place, params, prompt, output in batch_update.added:
        state = new_state(params, prompt, output)
        req_entries.pop(place, None)
        if state is not None:
            req_entries[place] = state
    for first, second, way in batch_update.moved:
        moving, other = req_entries.pop(first, None), req_entries.pop(second, None)
        if moving is not None:
            req_entries[second] = moving
        if way is MoveDirectionality.SWAP and other is not None:
            req_entries[first] = other
    return before != req_entries


class BatchMember(Protocol):
    """The part of a sequence that processors see."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]


class ProcessorBatch:
    """Batch as seen by an engine's processors. Each sequence stays at the same place from step to step, and free places are
    filled."""

    def __init__(self, processors: Sequence[BatchLogitsProcessor]) -> None:
        self._processors = processors
        self._members: list[BatchMember] = []

    def apply(self, members: Sequence[BatchMember], logits: Tensor) -> Tensor:
        """Return the changed logits of a step. members: distinct sequences. logits: [members, vocab_size]."""
        update = self._update(members)
        place = {id(member): number for number, member in enumerate(members)}
        order = torch.tensor([place[id(member)] for member in self._members], device=logits.device)
        changed = logits.index_select(0, order)
        for processor in self._processors:
            processor.update_state(update)
            changed = processor.apply(changed)
        return torch.empty_like(logits).index_copy_(0, order, changed.to(logits.dtype))

    def _update(self, members: Sequence[BatchMember]) -> BatchUpdate | None:
        """Update the places. Return the changes, or None if nothing changed."""
        held, wanted = {id(each) for each in self._members}, {id(each) for each in members}
        removed = [number for number, each in enumerate(self._members) if id(each) not in wanted]
        fresh = [each for each in members if id(each) not in held]
        if not removed and not fresh:
            return None
        holes, added = list(removed), []
        for member in fresh:
            number = holes.pop(0) if holes else len(self._members)
            self._members[number : number + 1] = [member]
            added.append((number, member.params, member.prompt, member.output))
        moved = []
        while holes:
            last = len(self._members) - 1
            if holes[-1] == last:
                holes.pop()
            else:
                hole = holes.pop(0)
                self._members[hole] = self._members[last]
                moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
            self._members.pop()
        return BatchUpdate(len(self._members), removed, added, moved)
