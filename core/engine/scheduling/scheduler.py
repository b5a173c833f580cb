"""Scheduler: decides how many tokens of each sequence the next step computes, and admits waiting requests."""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections import deque
from collections.abc import Sequence as Items
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from headway.core.contract.adapters import NO_ADAPTER
from headway.core.contract.metadata import Phase
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.cache.misses import FOUND
from headway.core.engine.data.sequence import Sequence, Status
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.data.step import DecodeBatch, ScheduledSequence, ScheduledStep
from headway.core.engine.offload.offloader import RECOMPUTE, Offloader
from headway.core.engine.scheduling.adapter_slots import AdapterTable
from headway.core.engine.scheduling.drafting import Drafting

log = logging.getLogger("headway")

_queue_key = attrgetter("queue_key")
_FARTHEST = 1024  # Maximum number of waiting sequences examined if earlier ones lack adapter slots


@dataclass(slots=True)
class _StepPlan:
    budget: int  # Tokens that may still be added
    has_members: bool  # True if the decode batch has members, which take one token each of this step
    prompts: list[ScheduledSequence] = field(default_factory=list)  # Prefill or extend in arrival order; so the next two
    decodes: list[ScheduledSequence] = field(default_factory=list)
    joining: list[Sequence] = field(default_factory=list)  # Sequences that become members of the decode batch with this step
    admits: bool = True  # True if waiting sequences may be admitted: not after a preemption or a shortened chunk

    @property
    def empty(self) -> bool:
        return not (self.prompts or self.decodes or self.joining or self.has_members)

    def add(self, scheduled: ScheduledSequence) -> None:
        (self.decodes if scheduled.phase is Phase.DECODE else self.prompts).append(scheduled)
        self.budget -= scheduled.num_new_tokens


class Scheduler:
    """Continuous batching with a token budget. Running sequences are scheduled first, then waiting ones in arrival order.

    A prompt that exceeds the remaining budget is split into chunks (Agrawal et al. 2023, Sarathi), but only once the pool has
    pages for the whole prompt. Otherwise the partial prompt would take pages from running sequences and then be preempted for
    them.

    When the pool is full, the scheduler preempts the youngest running sequence. With priorities, it preempts the youngest
    sequence of the lowest priority. The preempted sequence waits at the head of the queue, to be recomputed (vLLM's recompute) or
    restored by the offloader (vLLM's swap). Sequences with a pending restore wait outside the queue. No sequence is preempted for
    a waiting sequence.

    `schedule` may be called while earlier steps run on the device. Tokens that these steps will sample count as pending. Pages
    that `schedule` frees may be reused at once, because the device runs steps in order.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        enable_chunked_prefill: bool = True,
        by_priority: bool = False,
        offloader: Offloader | None = None,
        stats: EngineStats | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        """by_priority: True to order sequences by `queue_key`, False to order them by arrival. offloader: saves pages outside the
        pool, or None. stats: counts admissions and preemptions. adapters: adapters that sequences may use, or None."""
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.enable_chunked_prefill = enable_chunked_prefill
        self.offloader = offloader
        self.adapters = adapters
        self.stats = EngineStats() if stats is None else stats
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.drafting: Drafting | None = None
        """Object that proposes draft tokens for running sequences. None means no speculation."""
        self._by_priority = by_priority
        self._free_rows = list(range(max_num_seqs))  # a heap: contiguous rows keep their states next to each other
        self._batch = DecodeBatch()

    @property
    def has_unfinished(self) -> bool:
        """True if any sequence is queued, runs, or waits for its pages to be restored."""
        return bool(self.waiting or self.running) or self.restoring

    @property
    def restoring(self) -> bool:
        """True if sequences wait outside the queue for their pages to be restored."""
        return self.offloader is not None and self.offloader.restores.pending

    @property
    def holders(self) -> list[Sequence]:
        """All sequences that reference pages."""
        restoring = [] if self.offloader is None else self.offloader.restores.holders
        return [*self.running, *(seq for seq in self.waiting if seq.tables), *restoring]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._insert(self.waiting, seq)

    def add_first(self, seqs: list[Sequence]) -> None:
        """Queue sequences before all waiting sequences or, with priorities, before all waiting sequences of the same priority."""
        if self._by_priority:
            for seq in seqs:
                insort(self.waiting, seq, key=_queue_key)
        else:
            self.waiting.extendleft(reversed(seqs))

    def _insert(self, queue: deque[Sequence] | list[Sequence], seq: Sequence) -> None:
        if self._by_priority:
            insort(queue, seq, key=_queue_key)
        else:
            queue.append(seq)

    def dissolve_batch(self) -> None:
        """Schedule every running sequence individually in the next step, for example because some have drafts."""
        self._batch.clear()

    def schedule(self, all_read: bool = True) -> ScheduledStep:
        """Return the next step: sequences that prefill or extend, then sequences that decode. The step is empty if all sequences
        wait. all_read: True if no step is in flight."""
        if self.drafting is not None and self.drafting.plan(self.running if all_read else ()):
            self.dissolve_batch()
        if self.offloader is not None:
            self.add_first(self.offloader.take_returned())
        step = None
        if len(self.running) <= self.max_num_batched_tokens and self._extend_members():
            step = self._fill_step(batching=True)
        if step is None:
            self._batch.clear()
            step = self._fill_step(batching=False)
        assert step is not None
        return step

    def _extend_members(self) -> bool:
        """Reserve pages for the next tokens of the members of the decode batch. Returns False if too few pages are free."""
        last = []
        for place in self._batch.due():
            seq = self._batch.members[place]
            if seq.num_computed >= seq.max_len - 1:  # its last token is pending
                last.append(seq)
            elif self.blocks.reserve(seq, self._tokens_to_reserve(seq, 1)):
                self._batch.renew(place)
            else:
                return False
        self._batch.remove(last)
        return True

    def _fill_step(self, batching: bool) -> ScheduledStep | None:
        """Fill a step up to the token budget, with running sequences first, then waiting ones.

        batching: True to decode in the batch. Returns None if another sequence then lacks pages, because the sequence to preempt
        may be a member of the batch.
        """
        plan = _StepPlan(self.max_num_batched_tokens - len(self._batch), bool(self._batch.members))
        if len(self._batch) < len(self.running) and not self._continue_running(plan, batching):
            return None
        if plan.admits:
            self._admit_waiting(plan)
        self._batch.add(plan.joining)
        for prompt in plan.prompts:
            self.blocks.reserve_states(prompt.seq, prompt.num_new_tokens)
        return ScheduledStep(plan.prompts + plan.decodes, self._batch)

    def _continue_running(self, plan: _StepPlan, batching: bool) -> bool:
        """Schedule the next tokens of running sequences. Returns False if `batching` is True and a sequence lacks pages."""
        position = 0
        while position < len(self.running) and plan.budget > 0:
            seq = self.running[position]
            position += 1
            if seq.in_decode_batch:
                continue
            if batching and seq.continues() and seq.newest_at == seq.num_computed:
                plan.joining.append(seq)
                plan.budget -= 1
                continue
            self._fit_whole_prompt(plan, seq)
            count = self._num_tokens(seq, plan.budget)
            if count:
                scheduled = self._make_room(plan, seq, count, batching)
                if scheduled is not None:
                    plan.add(scheduled)
                elif batching:
                    return False
            elif seq.num_to_compute > 0:
                plan.admits = False
        return True

    def _make_room(self, plan: _StepPlan, seq: Sequence, count: int, batching: bool) -> ScheduledSequence | None:
        """Reserve pages for `count` tokens of a running sequence, and for its drafts if enough pages are free.

        Unless `batching` is True, other sequences are preempted if pages are lacking, but never for drafts. Returns None if no
        pages can be reserved; unless `batching` is True, the sequence itself has then been preempted.
        """
        drafts = seq.num_drafts(plan.budget - count) if seq.draft_token_ids else 0
        while not self.blocks.reserve(seq, self._tokens_to_reserve(seq, count + drafts)):
            if drafts:
                drafts = 0
                seq.draft_token_ids = []  # drafts must not evict other sequences
            elif batching:
                return None
            elif not self._preempt_waiting():
                plan.admits = False
                if self._preempt_last() is seq:
                    return None
                count = self._num_tokens(seq, plan.budget)
        return ScheduledSequence(seq, count + drafts, seq.num_computed, count == seq.num_to_compute, drafts)

    def _admit_waiting(self, plan: _StepPlan) -> None:
        """Admit waiting sequences in order while tokens, rows and pages suffice. Sequences whose adapter cannot get a slot are
        skipped."""
        took_pages, place, passed = False, 0, None
        while place < min(len(self.waiting), _FARTHEST) and plan.budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[place]
            if seq.adapter is not None and not self._has_slot(seq, passed):
                place, passed = place + 1, passed or seq
                continue
            if self.offloader is not None and not took_pages and self.offloader.restore(seq):
                del self.waiting[place]
                continue
            self._fit_whole_prompt(plan, seq)
            count = self._admit(seq, plan.budget)
            if count:
                if passed is not None and seq.adapter is not None:
                    passed.num_passed += 1
                self._start(seq, place)
                plan.add(ScheduledSequence(seq, count, seq.num_computed, count == seq.num_to_compute))
            elif self.running or self.restoring or not self._preempt_waiting():
                return
            else:
                took_pages = True  # so that the freed pages are not used for a restore

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Reserve pages for the tokens of a waiting sequence after its cached prefix. Returns the number of its tokens in this
        step, or 0 if it is not admitted."""
        for partly in (True, False):  # a copy needs the source's page as well: there may be room without it
            spared = seq.num_computed if seq.tables else self.blocks.attach_prefix(seq, partly)
            count, wanted = self._num_tokens(seq, budget), seq.num_to_compute
            able = count == wanted or (self.enable_chunked_prefill and self.blocks.has_room(seq, wanted))
            if count and able and self.blocks.reserve(seq, self._tokens_to_reserve(seq, count)):
                if seq.num_preemptions == 0:
                    seq.num_cached_tokens = spared
                    seq.admitted_time = time.perf_counter()
                    self.stats.num_prompt_tokens += seq.num_prompt_tokens
                    self.stats.num_cached_tokens += spared
                    seq.cache_report = self.blocks.report_on(seq)
                    self.stats.missed_tokens.update({why: n for why, n in seq.cache_report.items() if why not in FOUND})
                return count
            copies = bool(seq.prefix_copies)
            self.blocks.release(seq)
            if not copies:
                break
        return 0

    def _has_slot(self, seq: Sequence, passed: Sequence | None) -> bool:
        """Return whether a sequence's adapter may use a slot in the next step.

        passed: the first waiting sequence that was skipped for lack of a slot, or None. Up to max_num_seqs sequences with
        adapters may overtake it. After that, only sequences without an adapter may, so that a slot becomes free.
        """
        assert self.adapters is not None
        assert seq.adapter is not None
        return (passed is None or passed.num_passed < self.max_num_seqs) and self.adapters.has_slot_for(seq.adapter)

    def _start(self, seq: Sequence, place: int) -> None:
        del self.waiting[place]
        if seq.adapter is not None and self.adapters is not None:
            slot = self.adapters.occupy(seq.adapter)
            assert slot is not None, "`_has_slot` has found one"
            seq.adapter_slot = slot
        if self.offloader is not None:
            self.offloader.started(seq)
        self._insert(self.running, seq)
        seq.status = Status.RUNNING
        seq.row = heappop(self._free_rows)

    def _num_tokens(self, seq: Sequence, budget: int) -> int:
        whole = seq.num_to_compute if not self.enable_chunked_prefill else self.blocks.ahead - seq.num_computed
        if whole > budget:
            return 0
        return self.blocks.whole_chunk(seq, self.blocks.fitting(seq, min(seq.num_to_compute, budget)))

    def _fit_whole_prompt(self, plan: _StepPlan, seq: Sequence) -> None:
        """Raise the budget of an empty step so that a prompt that must not be split, or its part that must not, fits, even if the
        budget was reduced for lack of memory."""
        if plan.empty and (not self.enable_chunked_prefill or seq.num_computed < self.blocks.ahead):
            plan.budget = max(plan.budget, self.blocks.ahead if self.enable_chunked_prefill else seq.num_to_compute)

    def _tokens_to_reserve(self, seq: Sequence, count: int) -> int:
        """Return the number of new tokens for which a sequence must have pages when a step computes `count` of its tokens."""
        return count

    def _preempt_waiting(self) -> bool:
        """Free the pages of one waiting sequence, or cancel its restore. Returns False if no waiting sequence has pages."""
        if self.offloader is None:
            return False
        holder = next((seq for seq in reversed(self.waiting) if seq.tables), None)
        if holder is None:
            return self.offloader.restores.give_up()
        self.blocks.release(holder)
        return True

    def _preempt_last(self) -> Sequence:
        seq = self.running[-1]
        self._preempt(seq, RECOMPUTE if self.offloader is None else self.offloader.preempt(seq))
        return seq

    def recompute(self, seqs: list[Sequence]) -> None:
        """Preempt the running sequences in `seqs`, to be recomputed, because a step that failed midway may have advanced their
        states."""
        self.dissolve_batch()
        for seq in reversed([each for each in self.running if each in seqs]):
            self._preempt(seq, RECOMPUTE)

    def _preempt(self, seq: Sequence, kind: str) -> None:
        assert not seq.in_decode_batch
        self.running.remove(seq)
        self.stats.num_preemptions += 1
        self.stats.preemptions_by_kind[kind] += 1
        self._release(seq)
        seq.status = Status.WAITING
        seq.draft_token_ids = []
        seq.num_preemptions += 1
        self.add_first([seq])

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        if seq.adapter_slot != NO_ADAPTER and seq.adapter is not None and self.adapters is not None:
            self.adapters.vacate(seq.adapter)
            seq.adapter_slot = NO_ADAPTER
        if seq.row is not None:
            heappush(self._free_rows, seq.row)
            seq.row = None

    def launched(self, step: ScheduledStep) -> None:
        """Account for a launched step. Its new tokens now count as computed, and the tokens that it samples count as pending."""
        for seq, count, context_len, samples, drafts in step.individual:
            seq.num_computed += count
            seq.num_unverified = drafts
            if drafts:
                seq.draft_token_ids = []
            if seq.prefix_copies:
                self.blocks.copies_launched(seq)
            if count > 1 or seq.restored_from is not None:
                self.blocks.publish_states(seq)
            if samples:
                seq.num_pending += 1
                seq.newest_at = context_len + count
            if count > 1 or len(seq.token_ids) >= seq.next_boundary:
                self.blocks.advance(seq, partly=count > 1)
        if step.members:
            for place in self._batch.step():
                seq = self._batch.members[place]
                if len(seq.token_ids) >= seq.next_boundary:  # else the host has not seen the token that fills the page
                    self.blocks.advance(seq)
                    self._batch.passed(place)

    def append_sampled(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """Append a step's accepted drafts and next token. Returns the appended tokens, which are fewer than `tokens` if one of
        them ends the sequence.

        The keys and values of rejected drafts count as not computed; the next step overwrites them.
        """
        if not seq.in_decode_batch:
            seq.num_pending -= 1
        if seq.num_unverified:  # else there were no drafts, or the sequence was preempted meanwhile and is recomputed
            seq.num_computed -= seq.num_unverified + 1 - len(tokens)
            seq.newest_at = seq.num_computed
            seq.state_index = max(len(tokens) - 1, 0)  # a step with drafts saves the state after each of its tokens
            seq.num_unverified = 0
        for count, token in enumerate(tokens, start=1):
            seq.append(token)
            if seq.status is Status.FINISHED:
                return tokens[:count]
        return tokens

    def remove_finished(self) -> None:
        """Free the pages and rows of finished sequences."""
        self._batch.remove(seq for seq in self._batch.members if seq.finished)
        for seq in (*self.running, *self.waiting):
            if seq.finished:
                self._release(seq)
        if self.offloader is not None:
            self.offloader.remove_finished()
        self.running = [seq for seq in self.running if not seq.finished]
        self.waiting = deque(seq for seq in self.waiting if not seq.finished)


_LONGEST_WAIT = 0.02  # Seconds that an idle engine waits for a request's preparation before it checks for new requests


class AdmissionQueue:
    """Queue of sequences that cannot be scheduled yet, or should wait for another sequence.

    With a prefix cache, the first completion of a request starts first. The other completions start once a step that completes
    the prompt has been launched. They find the prompt in the prefix cache: whole blocks are shared and a partial block is copied,
    so the prompt is computed once.
    """

    def __init__(self, scheduler: Scheduler, shares_prompts: bool) -> None:
        """shares_prompts: True if there is a prefix cache."""
        self._scheduler = scheduler
        self._shares = shares_prompts
        self._preparing: list[tuple[Future[None], list[Sequence]]] = []
        self._siblings: dict[str, list[Sequence]] = {}

    @property
    def occupied(self) -> bool:
        """True if any sequence waits in this queue."""
        return bool(self._preparing or self._siblings)

    @property
    def num_waiting(self) -> int:
        """Number of completions that wait in this queue."""
        return sum(len(seqs) for _, seqs in self._preparing) + sum(map(len, self._siblings.values()))

    def add(self, seqs: list[Sequence], ready: Future[None] | None) -> None:
        """Add the completions of a request. ready: future that is done when the request is prepared, or None if the request needs
        no preparation."""
        if ready is not None:
            self._preparing.append((ready, seqs))
            return
        ahead = 1 if self._shares else len(seqs)
        for seq in seqs[:ahead]:
            self._scheduler.add(seq)
        if seqs[ahead:]:
            self._siblings[seqs[0].request_id] = seqs[ahead:]

    def poll(self, idle: bool) -> list[tuple[list[Sequence], str]]:
        """Pass prepared requests to the scheduler. Returns the sequences and the reason of each failed request. idle: True to
        wait briefly for the first request to be prepared."""
        if not self._preparing:
            return []
        if idle:
            wait([ready for ready, _ in self._preparing], _LONGEST_WAIT, return_when=FIRST_COMPLETED)
        failed = []
        done = [each for each in self._preparing if each[0].done()]
        self._preparing = [each for each in self._preparing if each not in done]
        for ready, seqs in done:
            error = ready.exception()
            if error is None:
                self.add(seqs, None)
            else:
                failed.append((seqs, str(error)))
        return failed

    def launched(self, step: ScheduledStep) -> None:
        """Pass waiting completions to the scheduler if this step completes the prompt of their request."""
        if not self._siblings:
            return
        for seq, _, _, samples, _ in step.individual:  # members of the batch had their prompts computed before
            if samples and seq.request_id in self._siblings:
                self._scheduler.add_first(self._siblings.pop(seq.request_id))

    def ended(self, seqs: Items[Sequence]) -> None:
        """Forget ended sequences, and pass the completions that waited for them to the scheduler."""
        if not self.occupied:
            return
        kept = [(ready, [seq for seq in waiting if not seq.finished]) for ready, waiting in self._preparing]
        for ready, waiting in kept:
            if not waiting:
                ready.cancel()  # the preparation is no longer needed
        self._preparing = [each for each in kept if each[1]]
        for seq in seqs:
            waiting = [other for other in self._siblings.pop(seq.request_id, ()) if not other.finished]
            if waiting and seq not in waiting:
                self.add(waiting, None)
