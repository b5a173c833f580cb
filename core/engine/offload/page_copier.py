"""Page copier: the `PageMover` of one process, which copies pages and states between device memory, host memory and a folder on
disk."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.kernel import upload
from headway.core.contract.layout import LayerCache
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.page_mover import STAGING_BYTES, LinkRates, PageName, Pending, StoredPage
from headway.core.engine.data.pool import PoolSize, page_memory, size_text
from headway.core.engine.data.state_slots import StateMemory, StateSlots
from headway.core.engine.data.step import StepInput
from headway.core.engine.offload.disk_tier import DiskStore
from headway.core.engine.offload.host_tier import HostSlots


class _State(Enum):
    IN_FLIGHT = 0
    MADE = 1
    FAILED = 2


def _state_of(event: torch.cuda.Event) -> _State:
    try:
        return _State.MADE if event.query() else _State.IN_FLIGHT
    except RuntimeError:  # raised again when the event is waited for
        return _State.FAILED


class CopyInFlight:
    """Copies that have begun, as a `Pending` result."""

    def __init__(self, *events: torch.cuda.Event | None) -> None:
        self._events = [event for event in events if event is not None]

    def done(self) -> bool:
        """Return whether the copies have finished or failed."""
        return all(_state_of(event) is not _State.IN_FLIGHT for event in self._events)

    def result(self) -> None:
        """Wait for the copies."""
        for event in self._events:
            event.synchronize()


class _Copied(NamedTuple):
    event: torch.cuda.Event
    pages: Sequence[int]
    slots: Sequence[int]


class CopyEvents:
    """Events of pending copies, keyed by the pages and slots that each copy reads or writes."""

    def __init__(self) -> None:
        self._in_flight: deque[_Copied] = deque()
        self._of_page: dict[int, torch.cuda.Event] = {}
        self._of_slot: dict[int, torch.cuda.Event] = {}

    def add(self, event: torch.cuda.Event, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Record copies between these pages and slots, which are complete when the event has occurred."""
        self._in_flight.append(_Copied(event, pages, slots))
        self._of_page.update(dict.fromkeys(pages, event))
        self._of_slot.update(dict.fromkeys(slots, event))

    def of_pages(self, pages: Iterable[int]) -> list[torch.cuda.Event]:
        """Return the events of the last copies from or to these pages, without duplicates."""
        return _distinct(map(self._of_page.get, pages)) if self._of_page else []

    def of_copies(self, pages: Iterable[int], slots: Iterable[int]) -> list[torch.cuda.Event]:
        """Return the events of the last copies from or to these pages or slots, without duplicates."""
        return _distinct([*map(self._of_page.get, pages), *map(self._of_slot.get, slots)])

    def wait_for_slot(self, slot: int) -> None:
        """Block the host until copies into and out of a slot have ended. :raises RuntimeError: if the last of these copies
        failed."""
        event = self._of_slot.get(slot)
        if event is not None:
            event.synchronize()

    def forget_done(self) -> None:
        """Forget finished copies. A failed copy stays recorded for its slots until its error has been raised."""
        for _ in range(len(self._in_flight)):
            copied = self._in_flight.popleft()
            state = _state_of(copied.event)
            if state is _State.IN_FLIGHT:
                self._in_flight.append(copied)
                continue
            for page in copied.pages:
                if self._of_page.get(page) is copied.event:
                    del self._of_page[page]
            for slot in copied.slots if state is _State.MADE else ():
                if self._of_slot.get(slot) is copied.event:
                    del self._of_slot[slot]


def _distinct(events: Iterable[torch.cuda.Event | None]) -> list[torch.cuda.Event]:
    return list({id(event): event for event in events if event is not None}.values())


class Transfers:
    """Moves pages on one side stream per direction, or synchronously on a CPU. States are moved like pages: a state slot of the
    device counts as a page.

    Events ensure the order that `PageMover` promises. Copies begin after the steps launched before them, copies that touch the
    same page or slot run in order, and a step waits only for the copies of its new pages.
    """

    def __init__(self, memory: Sequence[Tensor], slots: HostSlots) -> None:
        self._device = memory[0].device
        self._slots = slots
        wide = all(view.shape[-1] % 8 == 0 for view in memory)
        words = [view.view(torch.int64) if wide else view for view in memory]
        self._pages = [view.transpose(0, 1) for view in words]  # [num_pages, count, words]
        self._page_bytes = sum(view[:, 0].nbytes for view in words)
        self._chunk = max(min(STAGING_BYTES // self._page_bytes, slots.num_slots, len(self._pages[0])), 1)
        gpu = self._device.type == "cuda"
        out, back = (_Lane(self._pages, self._chunk, gpu) for _ in range(2))
        self._out = out
        self._back = back
        self._events = CopyEvents()
        self.wait_for_slot = self._events.wait_for_slot

    def move_out(self, moves: Sequence[tuple[int, int]]) -> torch.cuda.Event | None:
        """Start copying out pages. moves: (page, slot) of each page. Returns an event for the end of the copies, or None if they
        are already done."""
        return self._copy(self._out, moves, True)

    def move_back(self, moves: Sequence[tuple[int, int]]) -> torch.cuda.Event | None:
        """Start copying back pages. moves: (slot, page) of each page. Returns an event for the end of the copies, or None if they
        are already done."""
        return self._copy(self._back, [(page, slot) for slot, page in moves], False)

    def before(self, pages: Iterable[int]) -> None:
        """Make the next launched step wait for the copies of these pages, which the step uses or overwrites."""
        for event in self._events.of_pages(pages):
            torch.cuda.current_stream(self._device).wait_event(event)

    def _copy(self, lane: _Lane, moves: Sequence[tuple[int, int]], out: bool) -> torch.cuda.Event | None:
        if not moves:
            return None
        self._events.forget_done()
        launched: list[torch.cuda.Event] = []
        event = None
        if lane.stream is not None:
            launched.append(torch.cuda.Event())
            launched[0].record()
        for first in range(0, len(moves), self._chunk):
            pages, slots = zip(*moves[first : first + self._chunk], strict=True)
            if lane.stream is not None:
                for before in (*launched, *self._events.of_copies(pages, slots)):
                    lane.stream.wait_event(before)
            with nullcontext() if lane.stream is None else torch.cuda.stream(lane.stream):
                index = upload(torch.tensor(pages), self._device)
                if out:
                    lane.gather(self._pages, index)
                    self._slots.write(slots, lane.staging)
                else:
                    self._slots.read(slots, lane.staging)
                    lane.scatter(self._pages, index)
            if lane.stream is not None:
                event = torch.cuda.Event()
                event.record(lane.stream)
                self._events.add(event, pages, slots)
        return event

    def measure(self) -> LinkRates:
        """Measure the link's rates by copying pages out and back unchanged. The copies run twice, and the first, slower run is
        ignored."""
        moves = [(number, number) for number in range(self._chunk)]
        seconds = [0.0, 0.0]
        for _ in range(2):
            for direction, move in enumerate((self.move_out, self.move_back)):
                began = time.perf_counter()
                CopyInFlight(move(moves)).result()
                seconds[direction] = time.perf_counter() - began
        self._events.forget_done()
        rate_out, rate_back = (self._chunk * self._page_bytes / max(each, 1e-9) for each in seconds)
        return LinkRates(rate_out, rate_back)


class _Lane:
    """Stream for one direction of copies (None on a CPU), and the stream's staging memory."""

    def __init__(self, pages: Sequence[Tensor], chunk: int, gpu: bool) -> None:
        self.stream = torch.cuda.Stream(pages[0].device) if gpu else None
        self.staging = [torch.empty((chunk, *view.shape[1:]), dtype=view.dtype, device=view.device) for view in pages]

    def gather(self, pages: Sequence[Tensor], index: Tensor) -> None:
        """Copy pages of the pool into the staging memory. index: int64 [count]."""
        for view, staged in zip(pages, self.staging, strict=True):
            torch.index_select(view, 0, index, out=staged[: len(index)])

    def scatter(self, pages: Sequence[Tensor], index: Tensor) -> None:
        """Copy the staging memory into pages of the pool. index: int64 [count]."""
        for view, staged in zip(pages, self.staging, strict=True):
            view.index_copy_(0, index, staged[: len(index)])


_VERSION = 1  # Format version of a page's bytes on disk


class PageCopier:
    """`PageMover` that saves pages and states in host memory, and in a folder if the options name one."""

    def __init__(
        self, caches: Sequence[LayerCache], size: PoolSize, states: StateMemory | None, config: EngineConfig, weights: str
    ) -> None:
        """states: state memory, or None. weights: digest of the model's weights, which names the folder.
        :raises ConfigError: if the cache's blocks are not contiguous, or the host has too little memory."""
        scattered = {cache.layout.name for cache in caches if not cache.layout.contiguous_blocks}
        if scattered:
            raise ConfigError(
                "kv_offload_size", "a cache whose blocks are one piece of memory each", f"layout {sorted(scattered)}"
            )
        num_bytes, disk_bytes = config.offload_bytes
        page_bytes = size.page_format.page_bytes
        if not page_bytes:
            need = "a model with a layer of attention, whose keys and values are kept in the host's memory"
            raise ConfigError("kv_offload_size", need, "one without any", "leave it out")
        if states is not None and config.kv_offload_dir is not None:
            need = "a model whose layers keep no state: states are not written to disk, and blocks are not found without them"
            raise ConfigError("kv_offload_dir", need, "one that keeps them", "leave it out: kv_offload_size serves states too")
        num_pages, num_state_slots = _shares(num_bytes, size, None if states is None else states.slots)
        self.num_state_slots = num_state_slots
        memory = page_memory(caches, size)
        slots = HostSlots(memory, num_pages)
        self._transfers = Transfers(memory, slots)
        views = None if states is None else states.views()
        self._states = None if views is None else Transfers(views, HostSlots(views, num_state_slots))
        self._state_slots = None if states is None else states.slots
        self._disk: DiskStore | None = None
        if config.kv_offload_dir is not None:
            if not weights:
                raise ConfigError("kv_offload_dir", "a model whose weights can be told from others", "none")
            salt = _salt(caches, size, weights)
            folder = Path(config.kv_offload_dir).expanduser()
            self._disk = DiskStore(folder, salt, page_bytes, disk_bytes, slots.parts, self._transfers.wait_for_slot)
        self.num_slots = slots.num_slots
        self.rates = self._transfers.measure()
        self.stored: Sequence[PageName] = self._disk.stored if self._disk is not None else ()
        self.max_stored = self._disk.max_stored if self._disk is not None else 0

    def before(self, step: StepInput) -> None:
        """Make a step wait for the copies of its pages; see `Transfers.before`. Must be called before the step is launched."""
        if step.new_pages:
            self._transfers.before(page for new in step.new_pages for page in new.pages)
        if self._states is not None and self._state_slots is not None and (step.started or len(step.checkpoints)):
            rows = [slot for started in step.started for slot in self._state_slots.of_row(started.row)]
            begun_with = [slot for slot, _ in step.restored]
            self._states.before([*rows, *begun_with, *step.checkpoints[:, 2].tolist()])

    def move_out(self, moves: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]] = ()) -> Pending[object]:
        pages = self._transfers.move_out(moves)
        return CopyInFlight(pages, self._states.move_out(states) if self._states is not None else None)

    def move_back(self, moves: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]] = ()) -> Pending[object]:
        pages = self._transfers.move_back(moves)
        return CopyInFlight(pages, self._states.move_back(states) if self._states is not None else None)

    def store(self, pages: Sequence[StoredPage]) -> Pending[frozenset[PageName]]:
        assert self._disk is not None
        return self._disk.store(pages)

    def fetch(self, pages: Sequence[StoredPage]) -> Pending[frozenset[PageName]]:
        assert self._disk is not None
        return self._disk.fetch(pages)

    def discard(self, names: Sequence[PageName]) -> None:
        assert self._disk is not None
        self._disk.discard(names)


def _shares(num_bytes: int, size: PoolSize, states: StateSlots | None) -> tuple[int, int]:
    """Divide host memory between pages and states in the same ratio as on the device. :raises ConfigError: if the memory does not
    fit at least one page and one state."""
    page_bytes = size.page_format.page_bytes
    if states is None:
        if num_bytes < page_bytes:
            raise ConfigError("kv_offload_size", f"at least the {page_bytes} bytes of a block of all layers", num_bytes)
        return num_bytes // page_bytes, 0
    if not states.num_checkpoints:
        need = f"a cache with room for a checkpoint of {size_text(states.bytes_per_slot)}, to which states come back"
        raise ConfigError("kv_offload_size", need, "none", "raise kv_cache_memory, or lower max_num_seqs")
    smallest = page_bytes + states.bytes_per_slot
    if num_bytes < smallest:
        need = f"at least the {smallest} bytes of a block and a state of all layers"
        raise ConfigError("kv_offload_size", need, num_bytes)
    kept = states.num_rows + states.num_checkpoints
    share = kept * states.bytes_per_slot / (kept * states.bytes_per_slot + size.num_bytes)
    most = (num_bytes - page_bytes) // states.bytes_per_slot
    num_states = min(max(int(num_bytes * share) // states.bytes_per_slot, 1), most)
    return (num_bytes - num_states * states.bytes_per_slot) // page_bytes, num_states


def _salt(caches: Sequence[LayerCache], size: PoolSize, weights: str) -> str:
    """Return a digest of everything on which the meaning of a page's bytes depends."""
    layers = [
        (
            sorted(cache.layout.tensors.items()),
            sorted((name, str(tensor.dtype)) for name, tensor in cache.tensors.items()),
            cache.layout.pack_bytes,
            cache.k_scale,
            cache.v_scale,
        )
        for cache in caches
    ]
    shapes = [
        (each.geometry.block_size, each.geometry.num_kv_heads, each.geometry.head_dim, each.geometry.v_head_dim)
        for each in caches
    ]
    what = _VERSION, torch.__version__, weights, layers, shapes, size.page_format
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()
