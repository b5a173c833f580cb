"""The engine's loop: requests in by id, tokens out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import count

import torch

from headway.core.contract.errors import ConfigError
from headway.core.engine.blocks import BlockManager
from headway.core.engine.config import EngineConfig
from headway.core.engine.deltas import OutputDelta
from headway.core.engine.drafting import Drafting
from headway.core.engine.entrance import Entrance
from headway.core.engine.executor import Executor, InFlight
from headway.core.engine.faults import smaller_budget
from headway.core.engine.limits import PromptLimits
from headway.core.engine.marks import Mark, no_mark
from headway.core.engine.offload.offloader import offloader_of
from headway.core.engine.prepare import prepare
from headway.core.engine.reading import delta_of, keep_prompt_logprobs, take_plain, take_sampled
from headway.core.engine.schedule import ScheduledSequence
from headway.core.engine.scheduler import Scheduler
from headway.core.engine.sequence import Sequence
from headway.core.engine.stats import EngineSnapshot, EngineStats
from headway.core.engine.usage import CacheUsage, cache_usage
from headway.core.sampling.params import SamplingParams

log = logging.getLogger("headway")


class EngineLoop:
    """Continuous batching over one executor: call `step` until nothing is left. One thread at a time may call its methods.

    With config.async_scheduling a step is launched before the one before it has been read, so that the host's work hides behind
    the device's; tokens then come one call later, and one sampled past the end of a sequence is dropped. While tokens are guessed
    a step is read before the next is launched, for guesses are made from tokens that the host has seen; what the client does with
    its tokens hides behind the next all the same.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        limits: PromptLimits,
        eos_token_ids: frozenset[int] = frozenset(),
        scheduler: type[Scheduler] = Scheduler,
        drafting: Drafting | None = None,
    ) -> None:
        """config: with what depends on the device filled in. drafting: guesses tokens, which change no output, only the speed."""
        self.config = config
        self.limits = limits
        self.capacity = executor.capacity
        self.stats = EngineStats()
        self.mark: Mark = no_mark
        pool = executor.capacity.pool
        groups, block_size = pool.page_format.groups, pool.page_format.block_size
        caching, chunk = config.enable_prefix_caching, pool.smallest_chunk
        self.blocks = BlockManager(pool.num_pages, block_size, caching, groups, chunk)
        options = config.max_num_seqs, config.enable_chunked_prefill, limits.by_priority
        self.scheduler = scheduler(self.blocks, config.step_tokens, *options)
        self._offloader = offloader_of(self.blocks, executor.mover, pool.page_format.page_bytes, config, self.stats)
        self.scheduler.offloader, self.stats.preemptions_by_kind = self._offloader, self.scheduler.preemptions
        self._entrance = Entrance(self.scheduler, config.enable_prefix_caching)
        self._executor = executor
        self._eos = eos_token_ids
        self._drafting = drafting
        self._ahead = bool(config.async_scheduling)
        self._live: dict[str, list[Sequence]] = {}
        """The unfinished sequences of each request."""
        self._in_flight: deque[tuple[InFlight, list[Sequence], list[Sequence]]] = deque()
        """Steps that have been launched and not read yet, with their sequences and those of them that sample."""
        self._unreported: list[OutputDelta] = []
        """What `step` is to return; it outlives an interrupt."""
        self._arrivals = count()
        self._seeds = torch.Generator().manual_seed(config.seed)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still wants tokens."""
        return self.scheduler.has_unfinished or self._entrance.occupied or bool(self._unreported)

    def add_request(self, request_id: str, prompt_token_ids: Items[int], params: SamplingParams, priority: int = 0) -> None:
        """Queue a request, whose n completions come as deltas of `step`. priority: see EngineConfig.scheduling_policy.

        :raises PromptError: see `PromptLimits.check`.
        :raises ConfigError: a request of this id is unfinished, or parameters ask for what this model or process has not.
        """
        self.limits.check(prompt_token_ids)
        self.limits.check_params(params)
        self.limits.check_priority(priority)
        if request_id in self._live:
            raise ConfigError("request_id", "an id that no unfinished request has", repr(request_id))
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos)
        ready = self._executor.prepare(params)
        seqs, turn = [], (priority, next(self._arrivals))
        for index in range(params.num_drawn):
            seed = int(torch.randint(2**62, (), generator=self._seeds)) if params.seed is None else params.seed + index
            longest = self.capacity.max_model_len
            seqs.append(Sequence(request_id, index, prompt_token_ids, params, stops, longest, seed, turn))
            if index == 0 and params.prompt_logprobs is not None:
                params = replace(params, prompt_logprobs=None)  # the first completion's are everybody's
        self._live[request_id] = seqs
        self._entrance.add(list(seqs), ready)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one completion of it, and free its pages; no delta tells of it.

        A request that is unknown or has finished is left alone, for it may have ended while the caller made up his mind.
        """
        ended = [seq for seq in self._live.get(request_id, ()) if index in (None, seq.index)]
        for seq in ended:
            seq.finish("abort")
        self._remove(ended)
        if self._unreported:  # since an interrupt
            told = self._unreported
            self._unreported = [each for each in told if each.request_id != request_id or index not in (None, each.completion)]

    def abort_all(self) -> None:
        """End every request."""
        for request_id in list(self._live):
            self.abort(request_id)

    def step(self) -> list[OutputDelta]:
        """Launch the next step and read the one before it, or the same one without async_scheduling.

        Returns what it added to completions that got a token or failed. A backend that raises ends the completions of its step
        with finish_reason "error" and the reason in `error`; the others go on.
        """
        stats, clock = self.stats, time.perf_counter
        started, waited = clock(), stats.wait_seconds
        drafting = self._drafting  # which guesses from tokens that have been read
        self._read_until(1 if drafting is None or drafting.rests else 0)  # more than one are left only by an interrupt
        self._let_in()
        began = clock()
        self.mark("schedule")
        if drafting is not None and drafting.plan(() if self._in_flight else self.scheduler.running):
            self.scheduler.part()
        scheduled = self.scheduler.schedule()
        waiting = self._entrance.occupied or (self._offloader is not None and self._offloader.loads.occupied)
        assert scheduled or self._in_flight or self._unreported or waiting, "unfinished, and nothing to schedule"
        chosen = clock()
        stats.schedule_seconds += chosen - began
        failure: Exception | None = None
        if self._offloader is not None:
            self._offloader.flush(wait=not (scheduled or self._in_flight or self._unreported))
        if scheduled:
            self.mark("prepare")
            step = prepare(scheduled, self.blocks.groups)
            prepared = clock()
            self.mark("launch")
            stats.prepare_seconds += prepared - chosen
            try:
                launched = self._executor.launch(step)
            except Exception as error:  # whatever a backend raises
                failure = error
            else:
                self._in_flight.append((launched, scheduled.seqs, scheduled.sampling))
                self.scheduler.launched(scheduled)
                self._entrance.launched(scheduled)
                stats.count(step, launched)
                if self._offloader is not None:
                    self._offloader.clock.launched(prepared)
                stats.launch_seconds += clock() - prepared - launched.wait_seconds
        ahead = self._ahead and bool(scheduled) and failure is None
        fault = self._read_until(1 if ahead else 0)
        if drafting is not None:
            drafting.stepped(scheduled, not ahead, stats)
        if failure is not None:
            self._recover(list(scheduled), failure, fault)
        if self._offloader is not None and not self.scheduler.has_unfinished:
            self._read_until(0)  # the last step has written the token that ended a sequence, and may fail yet
            self._offloader.flush(idle=True)
        stats.num_preemptions = self.scheduler.num_preemptions
        stats.num_prompt_tokens = self.scheduler.num_prompt_tokens
        stats.num_cached_tokens = self.scheduler.num_cached_tokens
        stats.host_seconds += clock() - started - (stats.wait_seconds - waited)
        self.mark("")
        deltas, self._unreported = self._unreported, []
        return deltas

    def _let_in(self) -> None:
        """Hand requests that are prepared to the scheduler, and end those that cannot be."""
        idle = not (self.scheduler.has_unfinished or self._in_flight or self._unreported)
        for seqs, reason in self._entrance.poll(idle):
            for seq in seqs:
                seq.fail(reason)
                self._unreported.append(delta_of(seq, []))
            self._remove(seqs)

    def cache_usage(self) -> CacheUsage:
        """Who uses the cache at this moment."""
        pages = self.capacity.pool.page_format
        return cache_usage(self.blocks, pages.block_size, pages.page_bytes, self.scheduler.holders, self._num_offloaded_blocks)

    def snapshot(self) -> EngineSnapshot:
        """What it does at this moment, and has done."""
        blocks, scheduler = self.blocks, self.scheduler
        running, waiting = len(scheduler.running), len(scheduler.waiting) + self._entrance.num_waiting
        used = blocks.num_pages - blocks.num_free
        pool = blocks.num_pages, used, blocks.num_cached
        return EngineSnapshot(time.perf_counter(), running, waiting, *pool, self.stats.snapshot(), self._num_offloaded_blocks)

    @property
    def _num_offloaded_blocks(self) -> int:
        return 0 if self._offloader is None else self._offloader.num_blocks

    def _read_until(self, left: int) -> Exception | None:
        """Read the oldest steps until this many are left; an interrupt while the host waits loses none of them.

        Returns the fault of a step that has failed.
        """
        stats, clock, fault = self.stats, time.perf_counter, None
        while len(self._in_flight) > left:
            started, waited = clock(), stats.wait_seconds
            fault = self._read(*self._in_flight[0]) or fault
            self._in_flight.popleft()
            stats.read_seconds += clock() - started - (stats.wait_seconds - waited)
        return fault

    def _read(self, in_flight: InFlight, step: list[Sequence], sampling: list[Sequence]) -> Exception | None:
        """Wait for a step's tokens and append them to the sequences that sample; returns what it has failed for."""
        started = time.perf_counter()
        self.mark("wait")
        try:
            sampled = in_flight.wait()
        except Exception as error:  # a kernel's fault shows when the host waits for it
            lost = [seq for _, seqs, _ in self._in_flight for seq in seqs]  # later steps have read what the fault has left
            while len(self._in_flight) > 1:
                self._in_flight.pop()
            if self._offloader is not None:
                self._offloader.clock.forget()
            self._fail(lost, error)
            return error
        if self._offloader is not None:
            self._offloader.clock.read()
        self.stats.wait_seconds += time.perf_counter() - started
        self.mark("read")
        if sampled.found is not None:
            keep_prompt_logprobs(step, sampled.found)
        plain = sampled.plain_tokens()
        if plain is not None:
            told, ended = take_plain(sampling, plain, self.scheduler.read)
        else:
            told, ended = take_sampled(sampling, sampled, in_flight.first_nan, self.scheduler.read, self._verified)
        self._unreported += told
        self.stats.num_output_tokens += len(told) if plain is not None else sum(len(each.new_token_ids) for each in told)
        self._remove(ended)
        return None

    def _verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        if self._drafting is not None:
            self.stats.num_accepted_tokens += num_accepted
            self._drafting.verified(seq, num_drafts, num_accepted)

    def _recover(self, step: list[ScheduledSequence], error: Exception, fault: Exception | None) -> None:
        """After a step that did not run: end its sequences, or let them wait for smaller steps where memory was too small.

        fault: of the step before, whose prefixes they may have begun with.
        """
        smaller = None if fault else smaller_budget(step, error, self.config.enable_chunked_prefill)
        if smaller is None:
            self._fail([scheduled.seq for scheduled in step], fault or error)
        else:
            self.scheduler.max_num_batched_tokens = smaller

    def _fail(self, step: Iterable[Sequence], error: Exception) -> None:
        """End the sequences of a step for a fault in it."""
        failed = [seq for seq in dict.fromkeys(step) if not seq.finished]
        log.error("a step of %d sequences failed: %s", len(failed), error)
        for seq in failed:
            seq.fail(str(error))
        self._remove(failed)
        self.blocks.forget_prefixes()  # what the step was to write may have been published already
        self._unreported += [delta_of(seq, []) for seq in failed]

    def _remove(self, ended: Items[Sequence]) -> None:
        """Free what sequences held that have ended."""
        if not ended:
            return
        self.scheduler.remove_finished()
        self._entrance.ended(ended)
        for seq in ended:
            if self._drafting is not None:
                self._drafting.finish(seq)
            live = self._live[seq.request_id]
            live.remove(seq)
            if not live:
                del self._live[seq.request_id]
