"""Engines with random options, a device that checks every slot that is read, and clients that send random requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fake_device import STOP, VOCABULARY, WORDS, FakeDevice, History
from headway.core.contract.metadata import Phase
from headway.core.engine.data.config import MAX_DRAFT_TOKENS, EngineConfig
from headway.core.engine.data.executor import Capacity
from headway.core.engine.data.groups import CacheGroup, PageFormat
from headway.core.engine.data.page_mover import PageName
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.request_limits import RequestLimits
from headway.core.engine.data.step import ScheduledStep
from headway.core.engine.loop import EngineLoop
from headway.core.engine.scheduling.deterministic import IndependentScheduler
from headway.core.engine.scheduling.drafting import Drafting
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import seed_of
from page_copier_stub import Moving

MAX_MODEL_LEN = 96
GROUPS: list[Callable[[int], tuple[CacheGroup, ...]]] = [
    lambda size: (CacheGroup(size),),
    lambda size: (CacheGroup(size),),
    lambda size: (CacheGroup(size, window=11),),
    lambda size: (CacheGroup(size, window=1),),
    lambda size: (CacheGroup(3 * size), CacheGroup(size, window=7)),
    lambda size: (CacheGroup(size), CacheGroup(2 * size, window=30), CacheGroup(size, window=12)),
]
"""Cache groups, for a block size."""


FAULTS = "not copied out", "not copied back", "not read from disk", "not written to disk", "host tier full of what is locked"


@dataclass
class Guesser:
    """Proposer of random draft tokens; about a third are accepted."""

    draw: Random

    def begin(self, num_prompt_tokens: int) -> Guesser:
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        if self.draw.random() < 0.01:
            raise ValueError("no idea")
        return [self.draw.randrange(WORDS) for _ in range(self.draw.randint(0, most))]

    def finish(self, token_ids: Sequence[int]) -> None:
        pass


@dataclass
class Ticks:
    """A clock that goes on when it is read, by times that differ by up to a factor of a hundred."""

    draw: Random
    unit: float
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.unit * self.draw.choice([1, 10, 100])
        return self.now


@dataclass
class Expected:
    """One completion, and what has come of it."""

    history: History
    max_tokens: int
    ignore_eos: bool
    tokens: list[int] = field(default_factory=list)
    ended: str = ""

    def check(self, clean: bool) -> None:
        """Check that the run ended as it should. clean: True if no step failed."""
        own = self.history.tokens[self.history.prompt_len :].tolist()[: len(self.tokens)]
        assert self.tokens == own, "tokens of another"
        stops = [not self.ignore_eos and token == STOP for token in own]
        room = min(self.max_tokens, MAX_MODEL_LEN - self.history.prompt_len)
        bad = self.history.bad_at == self.history.prompt_len + len(own)
        match self.ended:
            case "stop":
                assert stops == [False] * (len(own) - 1) + [True]
            case "length":
                assert len(own) == room
                assert not any(stops)
            case "error":
                assert bad or self.history.refused or not clean
                assert len(own) < room
                assert not any(stops)
            case _:
                assert self.ended == "abort"


class World:
    """An engine with random options, its device, and clients that send requests and abort some."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = Random(seed)
        options = [draw.random() < share for share in (0.5, 0.75, 0.75, 0.4, 0.1, 0.3)]
        overlap, chunked, caching, drafts, independent, self.priorities = options
        rows, size = draw.choice([1, 5, 12, 24, 40]), draw.choice([1, 4, 8, 16])
        groups = draw.choice(GROUPS)(size)
        budget = draw.choice([3, 8, 48, 100, 256]) if chunked else draw.choice([MAX_MODEL_LEN, 256])
        chunk = MAX_MODEL_LEN if independent or not chunked else min(128, budget + MAX_DRAFT_TOKENS, MAX_MODEL_LEN)
        pages = PageFormat(groups, size, page_bytes=1)
        sequences = draw.choice([1, 3, 1 + rows // 4, rows])  # in a small pool sequences are preempted all the time
        pool = PoolSize(pages.reserved + sequences * pages.pages_for(MAX_MODEL_LEN, chunk) + draw.randint(0, 5), pages, chunk)
        self.capacity = Capacity(pool, rows, MAX_MODEL_LEN)
        self.histories: dict[int, History] = {}
        self.failing = draw.random() < 0.4
        keeps = caching and not independent and draw.random() < 0.8
        options = self.beyond_the_pool() if keeps else {}
        self.config = EngineConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=rows,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching and not independent,
            async_scheduling=overlap,
            scheduling_policy="priority" if self.priorities else "fcfs",
            **options,
        )
        self.scheduler = IndependentScheduler if independent else Scheduler
        self.drafts = drafts and not independent
        self.ticks = Ticks(Random(seed), draw.choice([1e-7, 1e-5, 1e-3]))
        self.stems = [[draw.randrange(WORDS) for _ in range(draw.randint(4, 70))] for _ in range(4)]
        self.counts: Counter[str] = Counter()
        """Counts of events, so that a test can check that its subject occurred."""
        self.told = f"seed {seed}: {len(groups)} groups of {size}, {pool.num_pages} pages, {self.failing=}, {self.config}"

    def beyond_the_pool(self) -> dict[str, Any]:
        """Draw the engine's options of memory beyond the pool; a page is one byte."""
        draw, num_pages = self.draw, self.capacity.pool.num_pages
        options: dict[str, Any] = {
            "preemption_mode": draw.choice(["auto", "auto", "recompute", "swap"]),
            "kv_offload_size": draw.choice([1, 4, num_pages // 2 + 1, 2 * num_pages]),
        }
        if draw.random() < 0.5:
            options |= {"kv_offload_dir": "a folder", "kv_offload_dir_size": draw.choice([1, num_pages, 10 * num_pages])}
        self.disk: dict[PageName, tuple[bytes, Any]] = {}
        broken = draw.choice([0.0, 0.05, 0.2])
        lost, latest, rate = draw.choice([0.0, 0.3]), draw.choice([0, 4, 30]), draw.choice([1e3, 1e6, 1e12])
        self.transfers = {"faults": lost, "latest": latest, "rate": rate, "broken": broken}
        return options

    def start(self) -> None:
        """An engine with an empty cache, which finds on disk what the one before has left there."""
        draw, config = self.draw, self.config
        faults, ooms = (0.04, draw.randint(0, 2)) if self.failing else (0.0, 0)
        seed = draw.randrange(2**32)
        self.device = FakeDevice(self.capacity, self.histories, Random(seed), faults, ooms, draw.choice([0.0, 0.0, 0.05]))
        num_slots, max_stored = config.offload_bytes
        if num_slots:
            disk = max_stored if config.kv_offload_dir else 0
            self.device.mover = Moving(self.device, num_slots, Random(seed), disk, self.disk, **self.transfers)
        limits = RequestLimits(MAX_MODEL_LEN, VOCABULARY, "", by_priority=self.priorities)
        drafting = Drafting(Guesser(Random(seed)), VOCABULARY) if self.drafts else None
        self.engine = EngineLoop(self.device, config, limits, frozenset({STOP}), self.scheduler, drafting, self.ticks)
        schedule = self.engine.scheduler.schedule
        self.engine.scheduler.schedule = lambda **how: self.look(schedule(**how))  # type: ignore[method-assign]
        self.completions: dict[tuple[str, int], Expected] = {}
        self.live: dict[str, set[int]] = {}

    def look(self, step: ScheduledStep) -> ScheduledStep:
        """Check a step before it is launched."""
        scheduler, rows = self.engine.scheduler, self.config.max_num_seqs
        assert sum(scheduled.num_new_tokens for scheduled in step) <= self.config.max_num_batched_tokens
        assert all(scheduled.num_new_tokens > 0 for scheduled in step)
        assert len({id(scheduled.seq) for scheduled in step}) == len(step) <= len(scheduler.running) <= rows
        assert {seq.row for seq in scheduler.running} <= set(range(rows))
        assert len({seq.row for seq in scheduler.running}) == len(scheduler.running)
        phases = [scheduled.phase is Phase.DECODE for scheduled in step]
        assert phases == sorted(phases), "prefill and extend come before decode"
        for queue in (scheduler.running, scheduler.waiting) if self.priorities else ():
            assert list(queue) == sorted(queue, key=lambda seq: seq.queue_key)
        if scheduler.offloader is None:
            assert all(not seq.tables for seq in scheduler.waiting), "a waiting sequence holds pages"
        return step

    def run(self, num_requests: int) -> None:
        """Send requests, to two engines one after the other if there is a disk."""
        starts = 2 if self.config.kv_offload_dir else 1
        for _ in range(starts):
            self.start()
            self.serve(num_requests // starts)
            self.look_at_what_is_left()

    def serve(self, num_requests: int) -> None:
        draw, engine, sent, steps = self.draw, self.engine, 0, 0
        crowd = draw.choice([8, 32, 64])
        while sent < num_requests or engine.has_unfinished:
            while sent < num_requests and len(self.live) < crowd and draw.random() < 0.8:
                self.send(str(sent))
                sent += 1
            if engine.has_unfinished:
                self.take()
            if draw.random() < 0.04:
                self.abort()
            if draw.random() < 0.02:
                self.check_integrity()
            if draw.random() < 0.002:
                engine.forget_prefixes(everywhere=draw.random() < 0.5)
            steps += 1
            assert steps < 1000 * (num_requests + 1), "no progress"

    def check_integrity(self, idle: bool = False) -> None:
        self.engine.blocks.check_integrity(self.engine.scheduler.holders)
        if self.engine.scheduler.offloader is not None:
            self.engine.scheduler.offloader.tier.check_integrity(idle)

    def look_at_what_is_left(self) -> None:
        engine, stats = self.engine, self.engine.stats
        offloader, mover = engine.scheduler.offloader, self.device.mover
        interrupted = True
        while interrupted:
            try:
                engine.read_launched()  # steps of sequences that were aborted since
                interrupted = False
            except KeyboardInterrupt:
                pass
        if offloader is not None and mover is not None:
            mover.finish()
            for _ in range(self.transfers["latest"] + 3):  # what is still to be stored, what has been, and what has failed
                offloader.flush(idle=True)
                mover.finish()
            assert len(self.disk) <= mover.max_stored, "more lies on disk than may"
            assert stats.offload_failures["not copied out"] == mover.num_not_out, "a copy failed, and nobody has seen it"
            assert stats.offload_failures["not copied back"] == 0 or mover.num_broken
        assert engine.scheduler.holders == []
        self.check_integrity(idle=True)
        assert engine.blocks.num_free == engine.blocks.num_pages, "a page leaked"
        assert not self.live, "a request was lost"
        assert not any(engine.blocks.num_holders(page) for page in range(self.capacity.pool.num_pages))
        for expected in self.completions.values():
            expected.check(clean=self.device.num_faults == 0)
        self.counts += stats.preemptions_by_kind + Counter(stats.offload_failures)
        self.counts += Counter(hits=stats.offload_hits, stored=stats.blocks_stored, swapped=stats.blocks_swapped)

    def send(self, request_id: str) -> None:
        draw = self.draw
        stem = draw.choice(self.stems)
        prompt = [*stem[: draw.randint(0, len(stem))], *(draw.randrange(WORDS) for _ in range(draw.randint(1, 20)))]
        count = draw.choice([1, 1, 1, 1, 2, 3])
        n = count if draw.random() < 0.7 else 1
        most, ignore, seed = draw.randint(1, 50), draw.random() < 0.3, 8 * (len(self.histories) + 1)
        while seed in self.histories:
            seed += 8
        self.live[request_id] = set(range(count))
        refused = draw.random() < 0.01
        for index in range(count):
            history = self.histories[seed_of(seed, index)] = History(prompt, seed + index, MAX_MODEL_LEN)
            history.refused = refused
            if draw.random() < 0.02:
                history.bad_at = draw.randrange(len(prompt), MAX_MODEL_LEN)
            self.completions[request_id, index] = Expected(history, most, ignore)
        best_of = count if count > n else None
        params = SamplingParams(n=n, best_of=best_of, temperature=0.7, max_tokens=most, ignore_eos=ignore, seed=seed)
        priority = draw.choice([-1, 0, 0, 5]) if self.priorities else 0
        self.engine.add_request(request_id, self.engine.limits.checked(prompt, params, priority))

    def take(self) -> None:
        try:
            deltas = self.engine.step()
        except KeyboardInterrupt:  # what was read before it comes with the next step
            self.counts["interrupts"] += 1
            return
        for delta in deltas:
            expected = self.completions[delta.request_id, delta.completion]
            assert not expected.ended, "a delta after the last"
            expected.tokens += delta.new_token_ids
            if delta.finish_reason is not None:
                assert (delta.finish_reason == "error") == (delta.error is not None)
                self.end(delta.request_id, delta.completion, delta.finish_reason)

    def end(self, request_id: str, index: int, reason: str) -> None:
        self.completions[request_id, index].ended = reason
        self.live[request_id].remove(index)
        if not self.live[request_id]:
            del self.live[request_id]

    def abort(self) -> None:
        if not self.live:
            return
        request_id = self.draw.choice(list(self.live))
        index = self.draw.choice([None, *self.live[request_id]])
        self.engine.abort(request_id, index)
        for each in list(self.live[request_id]) if index is None else [index]:
            self.end(request_id, each, "abort")
        self.engine.abort("nobody")
