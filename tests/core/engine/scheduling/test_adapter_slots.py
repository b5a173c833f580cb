"""Adapters and their slots: one to one under random work, fair to those that wait, and never taken from a request that runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.contract.adapters import NO_ADAPTER, LoRARequest
from headway.core.contract.errors import ConfigError
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.adapters import AdapterLoad, KnownAdapter
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.execution.local_executor import AdapterStore
from headway.core.engine.scheduling.adapter_slots import AdapterTable
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.engine.scheduling.step_input import prepare
from headway.core.sampling.params import SamplingParams


class Held(NamedTuple):
    digest: bytes


class Slots:
    """A device's slots, of which each holds a text; adapters are what their paths say."""

    def __init__(self, count: int) -> None:
        self.num_slots = count
        self.held: dict[int, bytes] = {}
        self.reads: list[str] = []

    def read(self, request: LoRARequest) -> Held:
        self.reads.append(request.lora_path)
        if request.lora_path == "broken":
            raise ConfigError("adapter", "a folder", "none")
        return Held(request.lora_path.encode())

    def put(self, slot: int, adapter: Held) -> None:
        self.held[slot] = adapter.digest

    def begin(self, slots: object) -> None:
        raise AssertionError("no model runs here")


def table_of(slots: int, kept: int = 2) -> tuple[Slots, AdapterStore, AdapterTable]:
    device = Slots(slots)
    store = AdapterStore(device, kept)
    return device, store, AdapterTable(store)


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"a{number}", number, f"path{number}")


def test_the_adapter_that_was_used_longest_ago_gives_its_slot_up() -> None:
    device, store, table = table_of(2)
    first, second, third = (table.claim(adapter(number), 1) for number in (1, 2, 3))
    assert (table.occupy(first), table.occupy(second), table.occupy(third)) == (0, 1, None)
    table.vacate(first)
    table.vacate(second)
    assert table.occupy(first) == 0
    table.vacate(first)
    assert table.occupy(third) == 1, "the second was used before the first"
    store.put(table.take_loads())
    assert device.held == {0: b"path1", 1: b"path3"}
    assert table.take_loads() == ()


def test_adapters_of_unfinished_requests_stay_in_memory_and_others_go() -> None:
    device, _, table = table_of(1, kept=1)
    wanted = [table.claim(adapter(number), 1) for number in (1, 2, 3)]
    for each in wanted:
        table.claim(each.request, 1)
        table.release(each)
    assert device.reads == ["path1", "path2", "path3"]
    for each in wanted:
        table.release(each)
    assert table.claim(adapter(3), 1)
    assert len(device.reads) == 3
    table.claim(adapter(1), 1)
    assert device.reads[3:] == ["path1"]


def test_an_adapter_that_cannot_be_read_leaves_nothing_behind() -> None:
    _, _, table = table_of(1)
    with pytest.raises(ConfigError, match="adapter: needs a folder"):
        table.claim(LoRARequest("x", 1, "broken"), 1)
    assert table.known == []
    assert table.claim(LoRARequest("y", 1, "path"), 1).request.lora_name == "y", "its number is free"


def test_a_rank_that_follows_keeps_no_more_than_it_may() -> None:
    device = Slots(1)
    store = AdapterStore(device, 1, follows=True)
    for number in (1, 2, 2, 1):
        store.put([AdapterLoad(0, adapter(number), f"path{number}".encode())])
    assert device.reads == ["path1", "path2", "path1"]


def run(scheduler: Scheduler, table: AdapterTable, device: Slots, store: AdapterStore) -> list[list[str]]:
    """Schedule until nothing is left; returns the requests of each step, having looked at what the slots hold."""
    steps = []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step
        told = prepare(step, scheduler.blocks.groups, adapters=table)
        store.put(told.adapter_loads)
        slots = [NO_ADAPTER] * told.num_seqs if told.adapters is None else told.adapters.tolist()
        for seq, slot in zip(step.seqs, slots, strict=True):
            assert (slot == NO_ADAPTER) == (seq.adapter is None)
            assert seq.adapter is None or device.held[slot] == seq.adapter.digest
        steps.append([seq.request_id for seq in step.seqs])
        scheduler.launched(step)
        for scheduled in step:
            if scheduled.samples and not scheduled.seq.finished:
                scheduler.append_sampled(scheduled.seq, [3])
        ended = [seq for seq in step.seqs if seq.finished]
        scheduler.remove_finished()
        for seq in ended:
            if seq.adapter is not None:
                table.release(seq.adapter)
        table.check_integrity()
    return steps


def sequence(name: str, known: KnownAdapter | None, prompt: int, tokens: int) -> Sequence:
    return Sequence(name, 0, [5] * prompt, SamplingParams(temperature=0, max_tokens=tokens), frozenset(), 60, adapter=known)


@settings(max_examples=25, deadline=None)
@given(
    wanted=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=14),
    slots=st.integers(1, 3),
    max_num_seqs=st.integers(1, 5),
    spare=st.integers(0, 6),
    budget=st.integers(4, 30),
)
def test_every_request_runs_with_its_adapter(
    wanted: list[tuple[int, int, int]], slots: int, max_num_seqs: int, spare: int, budget: int
) -> None:
    """With preemption too, which gives slots up and takes them again."""
    device, store, table = table_of(slots)
    scheduler = Scheduler(BlockManager(15 + spare, 4), budget, max_num_seqs, adapters=table)
    for place, (number, prompt, tokens) in enumerate(wanted):
        known = table.claim(adapter(number), 1) if number else None
        scheduler.add(sequence(str(place), known, prompt, tokens))
    steps = run(scheduler, table, device, store)
    assert {name for step in steps for name in step} == {str(place) for place in range(len(wanted))}
    assert all(known.num_unfinished == 0 for known in (table.add(adapter(number)) for number in range(1, 5)))


def order_of_starts(steps: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step))


def test_a_request_without_a_slot_is_passed_by_a_batch_of_others_at_most() -> None:
    device, store, table = table_of(1)
    scheduler = Scheduler(BlockManager(200, 4), 64, 2, adapters=table)
    busy, other = (table.claim(adapter(number), 20) for number in (1, 2))
    scheduler.add(sequence("first", busy, 4, 12))
    scheduler.add(sequence("waits", other, 4, 2))
    for number in range(8):
        scheduler.add(sequence(f"busy{number}", busy, 4, 3))
    scheduler.add(sequence("plain", None, 4, 2))
    order = order_of_starts(run(scheduler, table, device, store))
    assert order.index("waits") == 4, order
    assert order[:3] == ["first", "busy0", "busy1"], "those whose adapter runs already go on for a while"
    assert order[3] == "plain", "the model itself needs no slot"
