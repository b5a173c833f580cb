"""Random work for a scheduler, and a pool that notices when a sequence reads what is not its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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

    def __init__(self, blocks: BlockManager, failing: bool) -> None:
        self.blocks, self.failing = blocks, failing
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
        assert self.failing or held <= group.most_pages(MAX_MODEL_LEN, count + ahead)
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


@dataclass
class Traffic:
    """Random work: who comes when, who gives up, and how the steps run."""

    arrivals: list[Arrival]
    aborted: set[int] = field(default_factory=set)
    """Numbers of the arrivals that are aborted at the eighth step."""
    overlapped: bool = False
    """True if a step is launched before the previous one is read."""
    drafts: int = 0
    """Guesses after each token, of which some are wrong."""
    failing: bool = False
    """True if every fifth step fails, and the next one retries."""
    stop: frozenset[int] = frozenset()
    priorities: int = 0
    """Others than 0."""

    def drive(
        self,
        scheduler: Scheduler,
        cache: Cache,
        look: Callable[[ScheduledStep], None] = lambda _: None,
        before: Callable[[int], None] = lambda _: None,
    ) -> list[Sequence]:
        """Run until all have ended. look: sees each step before it runs. before: is called with the number of each."""
        coming = sorted(enumerate(self.arrivals), key=lambda item: item[1].step)
        seqs: list[Sequence] = []
        in_flight: ScheduledStep | list[ScheduledSequence] = []
        time, blocks, offloader = 0, scheduler.blocks, scheduler.offloader
        while coming or scheduler.has_unfinished:
            while coming and coming[0][1].step <= time:
                number, arrival = coming.pop(0)
                seqs.append(sequence(str(number), arrival.prompt, arrival.max_tokens))
                seqs[-1].stop_token_ids = self.stop
                seqs[-1].turn = (number % (self.priorities + 1), len(seqs))
                scheduler.add(seqs[-1])
            if time == 8:
                for seq in seqs:
                    if int(seq.request_id) in self.aborted and not seq.finished:
                        seq.finish("abort")
                scheduler.remove_finished()
            time += 1
            assert time < 3000, "no progress"
            before(time)
            if not scheduler.has_unfinished:
                continue
            step = scheduler.schedule()
            if offloader is not None:
                offloader.flush()
            coming_back = offloader is not None and offloader.restores.pending
            assert step or in_flight or coming_back, "unfinished work, and nothing scheduled"
            blocks.check_integrity(scheduler.holders)
            look(step)
            if self.failing and time % 5 == 0:
                continue
            cache.run(step, scheduler.running)
            scheduler.launched(step)
            read, in_flight = (in_flight, step) if self.overlapped else (step, [])
            for scheduled in read:
                seq = scheduled.seq
                if scheduled.samples:
                    scheduler.append_sampled(seq, [] if seq.finished else verified(scheduled))
                    ahead = range(seq.num_tokens, seq.num_tokens + self.drafts)
                    seq.draft_token_ids = [next_token(place) ^ (place % 5 == 0) for place in ahead]
            if self.drafts:
                scheduler.dissolve_batch()
            scheduler.remove_finished()
            blocks.check_integrity(scheduler.holders)
        assert all(seq.finished for seq in seqs)
        assert blocks.num_free == blocks.num_pages, "a page leaked"
        return seqs


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
