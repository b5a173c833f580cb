"""Scheduler and block manager step by step, and engines under random requests: no block leaked, all end."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy
import pytest
from hypothesis import strategies as st

from examples import examples
from fake_device import VOCABULARY, FakeDevice, History
from headway.core.contract.metadata import Phase
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import Capacity
from headway.core.engine.data.groups import CacheGroup, PageFormat
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.request_limits import RequestLimits
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.step import NEWEST, ScheduledSequence, ScheduledStep
from headway.core.engine.loop import EngineLoop
from headway.core.engine.scheduling.deterministic import IndependentScheduler
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.engine.scheduling.step_input import prepare
from headway.core.sampling.params import SamplingParams
from random_engines import FAULTS, World
from random_engines import MAX_MODEL_LEN as LONGEST
from random_schedules import ARRIVALS, GROUPS, MAX_MODEL_LEN, Arrival, finish, room, sequence, step_through
from tiny_engine import drain


def run_step(scheduler: Scheduler) -> list[ScheduledSequence]:
    """Every sequence that samples gets token 1."""
    return list(step_through(scheduler, sampled=lambda _: [1]))


def test_first_come_is_first_served() -> None:
    scheduler = Scheduler(BlockManager(64, 4), max_num_batched_tokens=64, max_num_seqs=2)
    seqs = [sequence(str(n), [n] * 5, 3) for n in range(4)]
    for seq in seqs:
        scheduler.add(seq)
    assert [scheduled.seq for scheduled in scheduler.schedule()] == seqs[:2]


def test_a_long_prompt_is_cut_into_chunks_beside_decodes() -> None:
    scheduler = Scheduler(BlockManager(64, 4), max_num_batched_tokens=8, max_num_seqs=4)
    short, long = sequence("short", [1] * 4, 9), sequence("long", [2] * 20, 1)
    scheduler.add(short)
    run_step(scheduler)
    scheduler.add(long)
    step = run_step(scheduler)
    assert [(scheduled.seq, scheduled.num_new_tokens, scheduled.phase) for scheduled in step] == [
        (long, 7, Phase.PREFILL),
        (short, 1, Phase.DECODE),
    ]
    assert not step[0].samples, "the middle of a prompt has no next token"
    assert [(s.seq, s.phase) for s in scheduler.schedule()] == [(long, Phase.EXTEND), (short, Phase.DECODE)]


def test_youngest_sequence_is_preempted_and_admitted_first_again() -> None:
    scheduler = Scheduler(BlockManager(4, 4, enable_prefix_caching=False), max_num_batched_tokens=64, max_num_seqs=4)
    seqs = [sequence("old", [1] * 7, 9), sequence("young", [2] * 7, 9), sequence("waiting", [3] * 7, 9)]
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(3):  # seven tokens and one fit two blocks each; the next token needs a fifth block
        run_step(scheduler)
    assert scheduler.running == [seqs[0]]
    assert list(scheduler.waiting) == seqs[1:]
    assert seqs[1].num_preemptions == 1
    assert not seqs[1].tables


def test_lowest_priority_is_preempted_and_waits_behind_higher_ones() -> None:
    scheduler = Scheduler(BlockManager(4, 4, enable_prefix_caching=False), 64, 4, by_priority=True)
    seqs = [sequence("low", [1] * 7, 9), sequence("high", [2] * 7, 9), sequence("middle", [3] * 7, 9), sequence("second", [4], 9)]
    for number, (seq, priority) in enumerate(zip(seqs, [5, -1, 2, -1], strict=True)):
        seq.queue_key = (priority, number)
    low, high, middle, second = seqs
    scheduler.add(low)
    run_step(scheduler)
    for seq in (middle, second, high):
        scheduler.add(seq)
    assert list(scheduler.waiting) == [high, second, middle]
    run_step(scheduler)  # the pool has room for two, and who runs is not preempted for who waits
    assert (scheduler.running, list(scheduler.waiting)) == ([high, low], [second, middle])
    for _ in range(2):
        run_step(scheduler)
    assert scheduler.running == [high, second]
    assert list(scheduler.waiting) == [middle, low]


def test_an_equal_prefix_is_found_after_its_owner_is_gone() -> None:
    scheduler = Scheduler(BlockManager(32, 4), 64, 4)
    finish(scheduler, sequence("first", list(range(10)), 2))
    second = sequence("second", [*range(9), 77], 2)
    other = sequence("other", [5, *range(1, 10)], 2)  # differs in the first block, so no later block may be scheduledd
    finish(scheduler, second, other)
    assert (second.num_cached_tokens, other.num_cached_tokens) == (9, 0)


def test_least_recently_freed_page_is_handed_out_first() -> None:
    scheduler = Scheduler(BlockManager(6, 4), 64, 4)
    finish(scheduler, sequence("a", [1] * 8, 1))
    finish(scheduler, sequence("b", [2] * 8, 1))
    finish(scheduler, sequence("big", [3] * 15, 1))  # takes the two empty blocks and the two freed longest ago
    b, a = sequence("b again", [2] * 9, 1), sequence("a again", [1] * 9, 1)
    finish(scheduler, b)
    finish(scheduler, a)
    assert (b.num_cached_tokens, a.num_cached_tokens) == (8, 0)


def test_sampled_token_is_scheduled_before_the_host_has_read_it() -> None:
    scheduler = Scheduler(BlockManager(8, 4), 64, 4)
    seq = sequence("ahead", [1] * 4, 3)
    scheduler.add(seq)
    for expected in ((4, 0), (1, 4), (1, 5)):
        step = scheduler.schedule()
        (scheduled,) = step
        assert (scheduled.num_new_tokens, scheduled.context_len) == expected
        scheduler.launched(step)
    assert not scheduler.schedule(), "the third token ends it by length: nothing is computed for a fourth"
    assert seq.token_ids == seq.prompt_token_ids
    assert seq.tables[0].num_published == 1, "the second block holds tokens nobody knows yet"


@examples(
    12,
    100,
    arrivals=ARRIVALS,
    others=ARRIVALS,
    block_size=st.sampled_from([1, 4, 8]),
    spare=st.integers(0, 12),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    chunked=st.booleans(),
    grouped=st.sampled_from(GROUPS),
)
def test_independent_sequences_take_the_same_steps_whoever_runs_beside_them(
    arrivals, others, block_size, spare, budget, max_num_seqs, chunked, grouped
) -> None:
    budget = budget if chunked else max(budget, MAX_MODEL_LEN)
    groups = grouped(block_size)

    def steps_of(batch: list[Arrival]) -> dict[int, list[int]]:
        """Tokens of each step of each sequence that is there from the start or comes later."""
        blocks = BlockManager(room(groups, MAX_MODEL_LEN) + spare, block_size, False, groups)
        scheduler = IndependentScheduler(blocks, budget, max_num_seqs, chunked)
        coming = {number: sequence(str(number), a.prompt, a.max_tokens) for number, a in enumerate(batch)}
        steps: dict[int, list[int]] = {number: [] for number in coming}
        time = 0
        while time <= 12 or scheduler.has_unfinished:
            for number, arrival in enumerate(batch):
                if arrival.step == time:
                    scheduler.add(coming[number])
            time += 1
            assert time < 2000, "no progress"
            if scheduler.has_unfinished:
                step = run_step(scheduler)
                assert sum(scheduled.num_new_tokens for scheduled in step) <= budget
                for scheduled in step:
                    steps[int(scheduled.seq.request_id)].append(scheduled.num_new_tokens)
            blocks.check_integrity(scheduler.running)
        assert scheduler.stats.num_preemptions == 0
        assert blocks.num_free == blocks.num_pages
        assert all(seq.finish_reason == "length" for seq in coming.values())
        return steps

    together = steps_of([*arrivals, *others])
    assert all(steps_of([arrival])[0] == together[number] for number, arrival in enumerate(arrivals))


def test_uncut_prompt_longer_than_the_reduced_budget_gets_a_step_of_its_own() -> None:
    scheduler = Scheduler(BlockManager(64, 4), 40, 4, enable_chunked_prefill=False)
    short, long = sequence("short", [1] * 4, 2), sequence("long", [2] * 20, 1)
    scheduler.max_num_batched_tokens = 8  # as after a step without memory
    finish(scheduler, short, long)
    assert [seq.finish_reason for seq in (short, long)] == ["length", "length"]


def test_uncut_prompt_is_scheduled_whole_again_after_a_lack_of_memory() -> None:
    scheduler = Scheduler(BlockManager(64, 4), 40, 4, enable_chunked_prefill=False)
    seqs = [sequence("short", [1] * 4, 2), sequence("long", [2] * 20, 1)]
    for seq in seqs:
        scheduler.add(seq)
    assert [scheduled.num_new_tokens for scheduled in scheduler.schedule()] == [4, 20]
    scheduler.max_num_batched_tokens = 2  # nothing was launched, as after a step without memory
    steps = [[scheduled.num_new_tokens for scheduled in step] for step in finish(scheduler)]
    assert [seq.finish_reason for seq in seqs] == ["length", "length"]
    assert steps == [[4], [1], [20]]


def running(scheduler: Scheduler, lengths: list[int], max_tokens: int = 20) -> list[Sequence]:
    """Sequences whose prompts have been computed and whose first token has been read."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    seqs = [Sequence(str(number), 0, [number] * length, params, frozenset(), 64) for number, length in enumerate(lengths)]
    for seq in seqs:
        scheduler.add(seq)
    take(scheduler, launch(scheduler))
    return seqs


def launch(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    prepare(step, scheduler.blocks.groups)
    scheduler.launched(step)
    return step


def take(scheduler: Scheduler, step: ScheduledStep) -> None:
    for seq in step.sampling:
        scheduler.append_sampled(seq, [] if seq.finished else [7])
    scheduler.remove_finished()


def test_members_counters_equal_those_of_individual_sequences() -> None:
    scheduler = Scheduler(BlockManager(64, 4), 64, 4)
    seqs = running(scheduler, [3, 6])
    first = launch(scheduler)
    assert first.members == seqs
    assert not first.individual
    second = launch(scheduler)  # before the first is read
    for seq, length in zip(seqs, (3, 6), strict=True):
        assert (seq.num_computed, seq.num_pending, seq.newest_at, seq.num_tokens) == (length + 2, 2, length + 2, length + 1)
    assert second.context_lens.tolist() == [4, 7]
    assert first.context_lens.tolist() == [3, 6], "a step that was launched stays as it was"
    take(scheduler, first)
    assert [(seq.num_computed, seq.num_pending) for seq in seqs] == [(5, 1), (8, 1)]
    scheduler.dissolve_batch()
    assert [(seq.num_computed, seq.num_pending, seq.newest_at) for seq in seqs] == [(5, 1, 5), (8, 1, 8)]
    take(scheduler, second)
    assert [(seq.num_pending, seq.num_to_compute) for seq in seqs] == [(0, 1), (0, 1)]


def test_step_of_members_names_only_their_new_pages() -> None:
    scheduler = Scheduler(BlockManager(64, 4), 64, 4)
    seqs = running(scheduler, [2, 3, 5])
    told = []
    for _ in range(4):
        step = scheduler.schedule()
        told.append(prepare(step, scheduler.blocks.groups))
        scheduler.launched(step)
        take(scheduler, step)
    assert all(step.continues and not step.started and (step.token_ids == NEWEST).all() for step in told)
    assert numpy.stack([told[0].rows, told[0].context_lens]).tolist() == [[0, 1, 2], [2, 3, 5]]
    assert [[(new.row, new.start) for new in step.new_pages] for step in told] == [[], [(1, 1)], [(0, 1)], [(2, 2)]]
    assert [seq.num_computed for seq in seqs] == [6, 7, 9]


def test_sequence_that_ends_or_gets_drafts_leaves_the_batch_alone() -> None:
    scheduler = Scheduler(BlockManager(64, 4), 64, 4)
    seqs = running(scheduler, [3, 3, 3])
    take(scheduler, launch(scheduler))
    seqs[1].finish("abort")
    scheduler.remove_finished()
    step = launch(scheduler)
    assert step.members == [seqs[0], seqs[2]]
    take(scheduler, step)
    seqs[2].draft_token_ids = [7, 7]
    scheduler.dissolve_batch()
    step = launch(scheduler)
    assert step.members == [seqs[0]]
    assert [(each.seq, each.num_draft_tokens) for each in step.individual] == [(seqs[2], 2)]


def test_youngest_sequence_is_preempted_from_the_batch_when_pages_run_out() -> None:
    scheduler = Scheduler(BlockManager(5, 4, enable_prefix_caching=False), 64, 4)
    old, young = running(scheduler, [7, 7], max_tokens=12)
    for _ in range(3):  # 4 pages hold 8 tokens of each; the ninth wants the fifth page, and the other's a sixth
        take(scheduler, launch(scheduler))
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert old.num_computed == 10
    assert not young.in_decode_batch
    scheduler.blocks.check_integrity(scheduler.running)


def test_budget_below_the_running_sequences_dissolves_the_batch() -> None:
    scheduler = Scheduler(BlockManager(64, 4), 64, 4)
    seqs = running(scheduler, [3, 3, 3])
    take(scheduler, launch(scheduler))
    scheduler.max_num_batched_tokens = 2  # as after a step for which the memory was too small
    step = launch(scheduler)
    assert not step.members
    assert [each.seq for each in step] == seqs[:2]


class Always(Random):
    """Whatever may happen does."""

    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize("ooms", [0, 1], ids=["launched", "without memory for it"])
def test_steps_launched_after_a_faulty_step_fail_with_it(ooms: int) -> None:
    prompt = [0, 1, 2] * 12
    histories = {seed: History(prompt, seed, LONGEST) for seed in (8, 16, 24)}
    pool = PoolSize(64, PageFormat((CacheGroup(4),), 4, 1), LONGEST)
    device = FakeDevice(Capacity(pool, 4, LONGEST), histories, Always(), faults=1.0)
    config = EngineConfig(max_model_len=LONGEST, max_num_batched_tokens=64, async_scheduling=True)
    engine = EngineLoop(device, config, RequestLimits(LONGEST, VOCABULARY, ""))
    engine.add_request("first", engine.limits.checked(prompt, SamplingParams(max_tokens=3, seed=8)))
    assert engine.step() == []
    device.faults, device.ooms = 0.0, ooms
    # the second finds the prompt of the first in the cache
    engine.add_request("second", engine.limits.checked(prompt, SamplingParams(max_tokens=3, seed=16)))
    ended = {delta.request_id: (delta.finish_reason, delta.error) for delta in engine.step()}
    assert ended == dict.fromkeys(["first", "second"], ("error", "a fault of the device"))
    engine.add_request("third", engine.limits.checked(prompt, SamplingParams(max_tokens=3, seed=24)))
    written = drain(engine)["third", 0]
    assert (written.finish_reason, written.num_cached_tokens) == ("length", 0)
    assert written.token_ids == histories[24].tokens[36:39].tolist()


def test_deltas_kept_by_an_interrupt_are_dropped_for_an_aborted_request() -> None:
    pool = PoolSize(64, PageFormat((CacheGroup(4),), 4, 1), LONGEST)
    device = FakeDevice(Capacity(pool, 4, LONGEST), {8: History([0, 1], 8, LONGEST)}, Random(0), interrupts=1.0)
    config = EngineConfig(max_model_len=LONGEST, max_num_batched_tokens=64, async_scheduling=True)
    engine = EngineLoop(device, config, RequestLimits(LONGEST, VOCABULARY, ""))
    engine.add_request("first", engine.limits.checked([0, 1], SamplingParams(max_tokens=9, seed=8)))
    assert engine.step() == []
    for _ in range(2):  # the second time after a step was read
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort("first")
    assert not engine.has_unfinished


def run_worlds(first: int, num_worlds: int, num_requests: int) -> Counter[str]:
    """Returns what has happened in all of them."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + num_worlds):
        world = World(seed)
        try:
            world.run(num_requests)
        except BaseException as error:
            error.add_note(world.told)
            raise
        counts += world.counts
    return counts


def test_1000_random_requests() -> None:
    counts = run_worlds(first=200, num_worlds=50, num_requests=20)
    assert counts["swap"]
    assert counts["hits"]
    assert counts["stored"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "num_worlds"), [(1000, 40), pytest.param(2000, 100, marks=pytest.mark.soak)], ids=["4,000", "10,000"]
)
def test_thousands_of_random_requests(first: int, num_worlds: int) -> None:
    counts = run_worlds(first, num_worlds, num_requests=100)
    never = [what for what in ("swap", "recompute", "hits", "stored", "interrupts", *FAULTS) if not counts[what]]
    assert not never, "requests as random as these should have come to that"
