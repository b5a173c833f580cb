"""Copies of whole pages between the pool and the host's memory, beside the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.transfer import upload
from headway.core.engine.offload.costs import LinkRates
from headway.core.engine.offload.slots import HostSlots
from headway.core.engine.step import StepInput

STAGING_BYTES = 32 * 2**20
"""Device memory through which the pages of one direction pass: gathered by a kernel, then copied as one piece, since a page's
parts lie far from each other and single copies of them cost more than the link does."""


class _Copied(NamedTuple):
    """A chunk of pages on its way."""

    event: torch.cuda.Event
    pages: Sequence[int]
    slots: Sequence[int]


class _State(Enum):
    UNDER_WAY = 0
    MADE = 1
    FAILED = 2


def _state_of(event: torch.cuda.Event) -> _State:
    try:
        return _State.MADE if event.query() else _State.UNDER_WAY  # type: ignore[no-untyped-call]
    except RuntimeError:  # whoever waits for the event is told
        return _State.FAILED


class Moved:
    """See Pending."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether the copies have been made, or have failed."""
        return self._event is None or _state_of(self._event) is not _State.UNDER_WAY

    def result(self) -> None:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()


class Transfers:
    """Moves pages on a side stream for each direction; on a CPU at once.

    Events keep the order that the caller may take for granted: copies begin after the steps launched before them, those that
    touch the same page or slot follow each other, and a step waits for those of the pages that it is told of, and for no others.
    """

    def __init__(self, memory: Sequence[Tensor], slots: HostSlots) -> None:
        """memory: see `page_memory`."""
        self._device = memory[0].device
        self._slots = slots
        wide = all(view.shape[-1] % 8 == 0 for view in memory)
        words = [view.view(torch.int64) if wide else view for view in memory]
        self._pages = [view.transpose(0, 1) for view in words]  # [num_pages, count, words]
        page_bytes = sum(view[:, 0].nbytes for view in words)
        self._chunk = max(min(STAGING_BYTES // page_bytes, slots.num_slots, len(self._pages[0])), 1)
        gpu = self._device.type == "cuda"
        self._out, self._back = (_Lane(self._pages, self._chunk, gpu) for _ in range(2))
        self._under_way: deque[_Copied] = deque()
        self._page_events: dict[int, torch.cuda.Event] = {}
        self._slot_events: dict[int, torch.cuda.Event] = {}
        self.rates = self._measure(page_bytes)

    def move_out(self, moves: Sequence[tuple[int, int]]) -> Moved:
        """See PageMover."""
        return self._copy(self._out, moves, True)

    def move_back(self, moves: Sequence[tuple[int, int]]) -> Moved:
        """See PageMover."""
        return self._copy(self._back, [(page, slot) for slot, page in moves], False)

    def before(self, step: StepInput) -> None:
        """Have a step wait for the copies of the pages that it is about to use or to overwrite."""
        if not self._page_events or not step.new_pages:
            return
        told = (page for new in step.new_pages for page in new.pages)
        self._wait(torch.cuda.current_stream(self._device), (self._page_events.get(page) for page in told))

    def wait_for_slot(self, slot: int) -> None:
        """Wait, on the host, until what was copied into a slot is there and what was copied out of it has left.

        :raises RuntimeError: the last copy has failed.
        """
        event = self._slot_events.get(slot)
        if event is not None:
            event.synchronize()

    def _copy(self, lane: _Lane, moves: Sequence[tuple[int, int]], out: bool) -> Moved:
        """Copy pages, (page, slot), after what was launched."""
        self._forget_done()
        launched = event = None
        if lane.stream is not None:
            launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.record()
        for first in range(0, len(moves), self._chunk):
            pages, slots = zip(*moves[first : first + self._chunk], strict=True)
            if lane.stream is not None:
                found = [self._page_events.get(page) for page in pages] + [self._slot_events.get(slot) for slot in slots]
                self._wait(lane.stream, [launched, *found])
            with nullcontext() if lane.stream is None else torch.cuda.stream(lane.stream):
                index = upload(torch.tensor(pages), self._device)
                if out:
                    lane.gather(self._pages, index)
                    self._slots.write(slots, lane.staging)
                else:
                    self._slots.read(slots, lane.staging)
                    lane.scatter(self._pages, index)
            if lane.stream is not None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(lane.stream)
                self._under_way.append(_Copied(event, pages, slots))
                self._page_events.update(dict.fromkeys(pages, event))
                self._slot_events.update(dict.fromkeys(slots, event))
        return Moved(event)

    def _wait(self, stream: torch.cuda.Stream, events: Iterable[torch.cuda.Event | None]) -> None:
        for event in {id(event): event for event in events if event is not None}.values():
            stream.wait_event(event)

    def _forget_done(self) -> None:
        for _ in range(len(self._under_way)):
            copied = self._under_way.popleft()
            state = _state_of(copied.event)
            if state is _State.UNDER_WAY:
                self._under_way.append(copied)
                continue
            for page in copied.pages:
                if self._page_events.get(page) is copied.event:
                    del self._page_events[page]
            for slot in copied.slots if state is _State.MADE else ():  # else whoever waits for the slot is to hear of it
                if self._slot_events.get(slot) is copied.event:
                    del self._slot_events[slot]

    def _measure(self, page_bytes: int) -> LinkRates:
        """Copy some pages out and back as they are, twice: the first time starts what has never run."""
        moves = [(number, number) for number in range(self._chunk)]
        seconds = [0.0, 0.0]
        for _ in range(2):
            for direction, move in enumerate((self.move_out, self.move_back)):
                began = time.perf_counter()
                move(moves).result()
                seconds[direction] = time.perf_counter() - began
        self._forget_done()
        rate_out, rate_back = (self._chunk * page_bytes / max(each, 1e-9) for each in seconds)
        return LinkRates(rate_out, rate_back)


class _Lane:
    """One direction's stream, None on a CPU, and its staging memory."""

    def __init__(self, pages: Sequence[Tensor], chunk: int, gpu: bool) -> None:
        self.stream = torch.cuda.Stream(pages[0].device) if gpu else None  # type: ignore[no-untyped-call]
        self.staging = [torch.empty((chunk, *view.shape[1:]), dtype=view.dtype, device=view.device) for view in pages]

    def gather(self, pages: Sequence[Tensor], index: Tensor) -> None:
        """Pages of the pool into the staging memory. index: int64 [count]."""
        for view, staged in zip(pages, self.staging, strict=True):
            torch.index_select(view, 0, index, out=staged[: len(index)])

    def scatter(self, pages: Sequence[Tensor], index: Tensor) -> None:
        """And back."""
        for view, staged in zip(pages, self.staging, strict=True):
            view.index_copy_(0, index, staged[: len(index)])
