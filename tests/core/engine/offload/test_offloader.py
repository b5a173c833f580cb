"""Random work with a host tier and a disk: nothing leaks, nobody reads what is not his, every request finishes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.engine.blocks import BlockManager
from headway.core.engine.groups import CacheGroup
from headway.core.engine.offload.costs import Costs
from headway.core.engine.offload.offloader import Offloader
from headway.core.engine.schedule import Schedule
from headway.core.engine.scheduler import Scheduler
from headway.core.engine.sequence import Sequence
from headway.core.engine.stats import EngineStats
from moving import Moving
from scheduling import ARRIVALS, GROUPS, Arrival, Cache, next_token, room, sequence, verified

PAGE_BYTES = 1000


@settings(max_examples=80, deadline=None)
@given(
    arrivals=ARRIVALS,
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare=st.integers(0, 12),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    aborted=st.sets(st.integers(0, 11)),
    overlapped=st.booleans(),
    drafts=st.integers(0, 3),
    failing=st.booleans(),
    grouped=st.sampled_from(GROUPS),
    num_slots=st.integers(1, 60),
    max_stored=st.sampled_from([0, 0, 3, 50]),
    mode=st.sampled_from(["auto", "swap", "recompute"]),
    rate=st.sampled_from([1e12, 1e6]),
    faults=st.sampled_from([0.0, 0.3]),
    lookahead=st.integers(0, 20),
    seed=st.integers(0, 2**16),
)
def test_no_page_leaks_none_is_mixed_up_and_every_request_finishes(
    arrivals: list[Arrival],
    block_size: int,
    spare: int,
    budget: int,
    max_num_seqs: int,
    aborted: set[int],
    overlapped: bool,
    drafts: int,
    failing: bool,
    grouped: Callable[[int], list[CacheGroup]],
    num_slots: int,
    max_stored: int,
    mode: str,
    rate: float,
    faults: float,
    lookahead: int,
    seed: int,
) -> None:
    groups = grouped(block_size)
    blocks = BlockManager(room(groups, 6) + spare, block_size, True, groups, 6)
    scheduler, cache, stats = Scheduler(blocks, budget, max_num_seqs), Cache(blocks, failing), EngineStats()
    mover = Moving(cache, num_slots, Random(seed), max_stored, faults=faults, rate=rate)
    costs = Costs(mover.rates, PAGE_BYTES, budget)
    costs.note_step(64, 0, 0.064)
    offloader = Offloader(blocks, mover, costs, stats, mode, lookahead)
    scheduler.offloader = offloader
    coming = sorted(enumerate(arrivals), key=lambda item: item[1].step)
    seqs: list[Sequence] = []
    in_flight: Schedule | list[object] = []
    time = 0
    while coming or scheduler.has_unfinished:
        while coming and coming[0][1].step <= time:
            number, arrival = coming.pop(0)
            seqs.append(sequence(str(number), arrival.prompt, arrival.max_tokens))
            scheduler.add(seqs[-1])
        if time == 8:
            for seq in seqs:
                if int(seq.request_id) in aborted and not seq.finished:
                    seq.finish("abort")
            scheduler.remove_finished()
        time += 1
        assert time < 3000, "no progress"
        if time == 20 and failing:
            blocks.forget_prefixes(everywhere=seed % 2 == 1)
        if not scheduler.has_unfinished:
            continue
        step = scheduler.schedule()
        offloader.flush()
        assert step or in_flight or offloader.loads.occupied, "unfinished work, and nothing scheduled"
        blocks.check_integrity(scheduler.holders)
        offloader.tier.check_integrity(idle=False)
        if failing and time % 5 == 0:  # the step does not run, and the next one tries again
            continue
        cache.run(step, scheduler.running)
        scheduler.launched(step)
        read, in_flight = (in_flight, step) if overlapped else (step, [])
        for scheduled in read:
            seq = scheduled.seq
            if scheduled.samples:
                scheduler.read(seq, [] if seq.finished else verified(scheduled))
                ahead = range(seq.num_tokens, seq.num_tokens + drafts)
                seq.draft_token_ids = [next_token(place) ^ (place % 5 == 0) for place in ahead]
        if drafts:
            scheduler.part()
        scheduler.remove_finished()
        blocks.check_integrity(scheduler.holders)

    assert blocks.num_free == blocks.num_pages
    assert all(seq.finished for seq in seqs)
    for _ in range(10):  # what the disk still does
        offloader.flush(idle=True)
    mover.finish()
    offloader.tier.check_integrity(idle=True)
    assert len(mover.disk) <= max_stored
    assert "a copy failed" not in stats.offload_failures


def made(
    num_pages: int, num_slots: int, mode: str = "auto", lookahead: int = 0, rate: float = 1e12, **options: Any
) -> tuple[Scheduler, Moving]:
    """One group, pages of four tokens. options: of the mover."""
    blocks = BlockManager(num_pages, 4)
    scheduler, cache = Scheduler(blocks, 64, 4), Cache(blocks, False)
    mover = Moving(cache, num_slots, Random(0), rate=rate, **options)
    costs = Costs(mover.rates, PAGE_BYTES, 64)
    costs.note_step(64, 0, 0.064)
    scheduler.offloader = Offloader(blocks, mover, costs, EngineStats(), mode, lookahead)
    scheduler.cache = cache  # type: ignore[attr-defined]
    return scheduler, mover


def finish(scheduler: Scheduler, *seqs: Sequence) -> list[int]:
    """Run sequences to their ends; returns how many were in each step."""
    offloader, counts = scheduler.offloader, []
    assert offloader is not None
    for seq in seqs:
        scheduler.add(seq)
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        offloader.flush()
        scheduler.cache.run(step, scheduler.running)  # type: ignore[attr-defined]
        scheduler.launched(step)
        for scheduled in step:
            if scheduled.samples:
                scheduler.read(scheduled.seq, [next_token(scheduled.seq.num_tokens)])
        scheduler.remove_finished()
        scheduler.blocks.check_integrity(scheduler.holders)
        counts.append(len(step))
    return counts


def test_an_evicted_prefix_comes_back_and_counts_as_a_hit() -> None:
    scheduler, mover = made(num_pages=8, num_slots=16)
    finish(scheduler, sequence("first", [1] * 24, 1))
    finish(scheduler, sequence("second", [2] * 30, 1))
    again, other = sequence("again", [1] * 25, 4), sequence("other", [0], 6)
    counts = finish(scheduler, again, other)
    assert (again.num_cached_tokens, mover.moved_back) == (24, 6)
    assert counts[0] == 1, "the other one did not wait"


@pytest.mark.parametrize(
    ("mode", "rate", "kind"),
    [("auto", 1e12, "swap"), ("auto", 1e3, "recompute"), ("swap", 1e3, "swap"), ("recompute", 1e12, "recompute")],
)
def test_preemption_takes_what_costs_less_or_what_was_asked_for(mode: str, rate: float, kind: str) -> None:
    scheduler, mover = made(num_pages=10, num_slots=16, mode=mode, rate=rate)
    offloader = scheduler.offloader
    assert offloader is not None
    seqs = [sequence(str(n), [n] * 16, 20) for n in range(2)]
    finish(scheduler, *seqs)
    assert set(scheduler.preemptions) == {kind}
    assert (mover.moved_back > 0) == (kind == "swap")
    offloader.tier.check_integrity(idle=True)


def test_a_tier_without_room_loses_pages_and_says_so() -> None:
    scheduler, mover = made(num_pages=8, num_slots=2)
    finish(scheduler, sequence("first", [1] * 24, 1), sequence("second", [2] * 30, 1))
    again = sequence("again", [1] * 25, 1)
    finish(scheduler, again)
    assert again.num_cached_tokens < 24
    assert mover.moved_out > 2


@pytest.mark.parametrize("broken", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("max_stored", [0, 50])
def test_copies_that_fail_cost_time_alone(broken: float, max_stored: int) -> None:
    scheduler, mover = made(num_pages=8, num_slots=16, mode="swap", max_stored=max_stored)
    offloader = scheduler.offloader
    assert offloader is not None
    finish(scheduler, sequence("kept", [1] * 24, 1), sequence("in its place", [2] * 30, 1))
    for _ in range(2):
        offloader.flush(idle=True)
        mover.finish()
    mover.broken = broken
    for turn in range(6):  # what a failed copy should have brought is read by nobody: `Cache` would see it
        prompts = [[1] * 25, [2] * 29]
        seqs = [sequence(f"{turn} {number}", prompt, 4) for number, prompt in enumerate(prompts)]
        assert len(finish(scheduler, *seqs)) < 60
        assert all(seq.finished for seq in seqs)
    mover.broken = 0.0
    for _ in range(2):
        offloader.flush(idle=True)
        mover.finish()
    assert mover.num_broken
    offloader.tier.check_integrity(idle=True)
