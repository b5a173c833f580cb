"""Sequences that decode are counted on together: nobody who looks at one sees a difference."""

from __future__ import annotations

import numpy

from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.step import NEWEST, ScheduledStep
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.engine.scheduling.step_input import prepare
from headway.core.sampling.params import SamplingParams


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
    assert all(step.goes_on and not step.started and (step.token_ids == NEWEST).all() for step in told)
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
