"""Random arrivals for a scheduler, and a pool that notices when a sequence reads what is not its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.groups import NULL_PAGE, CacheGroup
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.step import ScheduledSequence, ScheduledStep
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.params import SamplingParams


def next_token(length: int) -> int:
    """Return the token after a sequence of this length."""
    return length % 2


def verified(scheduled: ScheduledSequence) -> list[int]:
    """Return the sampled tokens of a step for a sequence: the accepted draft tokens, and the token after them."""
    first = scheduled.context_len + scheduled.num_new_tokens - scheduled.num_draft_tokens
    tokens = [next_token(first)]
    for guess in scheduled.seq.draft_token_ids[: scheduled.num_draft_tokens]:
        if guess != tokens[-1]:
            break
        tokens.append(next_token(first + len(tokens)))
    return tokens


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    max_tokens: int


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        prompt=st.one_of(
            st.lists(st.integers(0, 1), min_size=1, max_size=30),  # two tokens only: many equal prefixes
            st.integers(1, 30).map(lambda length: [0] * length),
        ),
        max_tokens=st.integers(1, 12),
    ),
    min_size=1,
    max_size=12,
)


MAX_MODEL_LEN = 48


def sequence(name: str, prompt: list[int], max_tokens: int) -> Sequence:
    return Sequence(name, 0, prompt, SamplingParams(temperature=0, max_tokens=max_tokens), frozenset(), MAX_MODEL_LEN)


class Cache:
    """Stands for the pool: what each slot holds, so that a sequence reading a block that is not its own is seen."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        """Content of each slot (page, place), for any group that wrote it: the group, and the prefix."""

    def read_page(self, page: int) -> dict[int, tuple[int, ...]]:
        return {place: held for (number, place), held in self.slots.items() if number == page}

    def write_page(self, page: int, content: dict[int, tuple[int, ...]]) -> None:
        self.slots.update({(page, place): held for place, held in content.items()})

    def run(self, step: ScheduledStep, running: list[Sequence]) -> None:
        """Make the copies of a step, then its sequences' tokens, as a device does."""
        copied = {}
        self.sources = [copy.source for seq in running for copy in seq.prefix_copies]
        for scheduled in step:
            seq = scheduled.seq
            for number, source, count in seq.prefix_copies:
                target = seq.tables[number].pages[scheduled.context_len // self.blocks.groups[number].page_size]
                copied.update({(target, place): self.slots[source, place] for place in range(count)})
        assert not {page for page, _ in copied} & set(self.sources), "a source is overwritten before it is read"
        self.slots.update(copied)
        for scheduled in step:
            for number in range(len(self.blocks.groups)):
                self.run_one(scheduled, number)

    def run_one(self, scheduled: ScheduledSequence, number: int) -> None:
        """Check that everything visible to the new tokens is present, then write each token as its whole prefix."""
        seq, count = scheduled.seq, scheduled.num_new_tokens
        group, pages, first = self.blocks.groups[number], seq.tables[number].pages, scheduled.context_len
        assert first == seq.num_computed
        tokens = list(seq.token_ids)
        tokens += [next_token(len(tokens) + ahead) for ahead in range(seq.num_pending)]  # what the device already knows
        tokens += seq.draft_token_ids[: scheduled.num_draft_tokens]
        seen = 0 if group.window is None else max(first - group.window + 1, 0)
        held = len(seq.tables[number].held)
        ahead = 2 + len(seq.draft_token_ids) + 3  # the host may be two tokens behind, and drafts that were refused had pages
        assert held <= group.most_pages(MAX_MODEL_LEN, count + ahead)
        for position in range(seen, first + count):
            page, place = pages[position // group.page_size], position % group.page_size
            prefix = (number, *tokens[: position + 1])
            assert page != NULL_PAGE or group.window is None, f"{seq.request_id} needs position {position}, which was given back"
            if position < first:
                assert self.slots[page, place] == prefix, f"{seq.request_id} reads another's cache at {position}"
            else:
                holders = self.blocks.num_holders(page) - self.sources.count(page)  # what was copied out has been read
                assert holders == 1, f"{seq.request_id} writes into a shared page"
                self.slots[page, place] = prefix


def step_through(
    scheduler: Scheduler, cache: Cache | None = None, sampled: Callable[[ScheduledSequence], list[int]] = verified
) -> ScheduledStep:
    step = scheduler.schedule()
    if scheduler.offloader is not None:
        scheduler.offloader.flush()
    if cache is not None:
        cache.run(step, scheduler.running)
    scheduler.launched(step)
    for scheduled in step:
        if scheduled.samples:
            scheduler.append_sampled(scheduled.seq, sampled(scheduled))
    scheduler.remove_finished()
    scheduler.blocks.check_integrity(scheduler.holders)
    return step


def finish(scheduler: Scheduler, *seqs: Sequence, cache: Cache | None = None) -> list[ScheduledStep]:
    for seq in seqs:
        scheduler.add(seq)
    steps = []
    while scheduler.has_unfinished:
        steps.append(step_through(scheduler, cache))
    return steps


GROUPS = [
    lambda size: [CacheGroup(size)],
    lambda size: [CacheGroup(size, window=5)],
    lambda size: [CacheGroup(size, window=1)],
    lambda size: [CacheGroup(3 * size), CacheGroup(size, window=7)],
    lambda size: [CacheGroup(size), CacheGroup(2 * size, window=3), CacheGroup(size, window=12)],
]
"""Cache groups, for a block size."""


def room(groups: list[CacheGroup], chunk: int) -> int:
    """Pages without which not one sequence would end."""
    return sum(group.most_pages(MAX_MODEL_LEN, chunk) for group in groups) + any(group.window for group in groups)
