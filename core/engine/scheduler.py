"""Which sequences get how many tokens in the next step."""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, deque
from operator import attrgetter

from headway.core.contract.metadata import Phase
from headway.core.engine.blocks import BlockManager
from headway.core.engine.decode_batch import DecodeBatch
from headway.core.engine.offload.offloader import Offloader
from headway.core.engine.schedule import Schedule, ScheduledSequence
from headway.core.engine.sequence import Sequence, Status

_turn = attrgetter("turn")


class Scheduler:
    """Continuous batching with a token budget: who runs goes on, then who waits is admitted, first come first served.

    A prompt longer than what the budget leaves is cut into chunks (Agrawal et al. 2023, Sarathi), once the pool has room for all
    of it: a part of a prompt would only take pages from those that run, to be preempted for them. When the pool runs dry, the
    youngest running sequence gives its pages back and waits at the head of the queue, to be computed again (vLLM's recompute)
    or brought back by the offloader (its swap). Who waits for the offloader's pages does so beside the queue.
    Where priorities count, it is the youngest of the lowest priority; who runs is not preempted for who waits.

    `schedule` may be called while earlier steps are still running on the device: tokens those will sample count as pending. What
    it frees may be handed out at once, because the device runs steps in order.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        enable_chunked_prefill: bool = True,
        by_priority: bool = False,
    ) -> None:
        """by_priority: both queues are kept in the order of `Sequence.turn`, else in that of arrival."""
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.enable_chunked_prefill = enable_chunked_prefill
        self._by_priority = by_priority
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.offloader: Offloader | None = None
        """Keeps pages beyond their time in the pool; None: nobody does."""
        self.preemptions: Counter[str] = Counter()
        """By kind."""
        self.num_prompt_tokens = self.num_cached_tokens = 0
        """Of sequences at their first admission; those that the prefix cache spared."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._batch = DecodeBatch()

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running) or (self.offloader is not None and self.offloader.loads.occupied)

    @property
    def num_preemptions(self) -> int:
        """Of every kind."""
        return self.preemptions.total()

    @property
    def holders(self) -> list[Sequence]:
        """All sequences that hold pages."""
        loading = [] if self.offloader is None else self.offloader.loads.holders
        return [*self.running, *(seq for seq in self.waiting if seq.tables), *loading]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._insert(self.waiting, seq)

    def add_first(self, seqs: list[Sequence]) -> None:
        """Queue sequences before all others that wait; where priorities count, before all others of the same."""
        if self._by_priority:
            for seq in seqs:
                insort(self.waiting, seq, key=_turn)
        else:
            self.waiting.extendleft(reversed(seqs))

    def _insert(self, queue: deque[Sequence] | list[Sequence], seq: Sequence) -> None:
        """Put a sequence where its turn is."""
        if self._by_priority:
            insort(queue, seq, key=_turn)
        else:
            queue.append(seq)

    def part(self) -> None:
        """Sequences have got drafts: look at each by itself."""
        self._batch.clear()

    def schedule(self) -> Schedule:
        """Choose the next step: sequences that prefill or extend first, then those that decode.

        Empty if all that run only wait for a token under way, and those that wait, for pages.
        """
        if self.offloader is not None:
            self.add_first(self.offloader.arrived())
        together = len(self.running) <= self.max_num_batched_tokens and self._make_room()
        step = self._choose(together=True) if together else None
        if step is None:
            self._batch.clear()
            step = self._choose(together=False)
        assert step is not None
        return step

    def _make_room(self) -> bool:
        """Give the batch's members room for their next tokens; False if there are too few pages."""
        last = []
        for place in self._batch.due():
            seq = self._batch.members[place]
            if seq.num_computed >= seq.max_len - 1:  # its last token is on its way
                last.append(seq)
            elif self.blocks.reserve(seq, self._room(seq, 1)):
                self._batch.renew(place)
            else:
                return False
        self._batch.remove(last)
        return True

    def _choose(self, together: bool) -> Schedule | None:
        """together: sequences that only decode do so as the batch's members; None if that leaves another without pages, for who
        is preempted may be a member."""
        budget = self.max_num_batched_tokens - len(self._batch)
        prompts: list[ScheduledSequence] = []
        decodes: list[ScheduledSequence] = []  # within each part first come, first served
        joining: list[Sequence] = []
        preempted = skipped = gave_up = False
        position = 0 if len(self._batch) < len(self.running) else len(self.running)
        while position < len(self.running) and budget > 0:
            seq = self.running[position]
            if seq.together:
                position += 1
                continue
            if together and seq.goes_on() and seq.newest_at == seq.num_computed:
                joining.append(seq)
                budget -= 1
                position += 1
                continue
            budget = budget if prompts or decodes or joining or self._batch.members else self._alone(seq, budget)
            count = self._num_tokens(seq, budget)
            if count == 0:
                skipped = skipped or seq.num_to_compute > 0
                position += 1
                continue
            drafts = seq.num_drafts(budget - count) if seq.draft_token_ids else 0
            while not self.blocks.reserve(seq, self._room(seq, count + drafts)):
                if drafts:
                    drafts, seq.draft_token_ids = 0, []  # guesses are worth nobody's pages
                    continue
                if together:
                    return None
                if self._give_up():
                    continue
                preempted = True
                if self._preempt_last() is seq:
                    break
                count = self._num_tokens(seq, budget)
            else:
                scheduled = ScheduledSequence(seq, count + drafts, seq.num_computed, count == seq.num_to_compute, drafts)
                (decodes if scheduled.phase is Phase.DECODE else prompts).append(scheduled)
                budget -= count + drafts
                position += 1
        while self.waiting and not (preempted or skipped) and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if self.offloader is not None and not gave_up and self.offloader.bring_back(seq):
                self.waiting.popleft()
                continue
            budget = budget if prompts or decodes or joining or self._batch.members else self._alone(seq, budget)
            count = self._admit(seq, budget)
            if count == 0:
                coming = self.offloader is not None and self.offloader.loads.occupied
                if not (self.running or coming) and self._give_up():
                    gave_up = True  # so that what was freed is not taken to load anything
                    continue
                break
            self.waiting.popleft()
            if self.offloader is not None:
                self.offloader.let_go(seq)
            self._insert(self.running, seq)
            seq.status, seq.row = Status.RUNNING, self._free_rows.pop()
            scheduled = ScheduledSequence(seq, count, seq.num_computed, count == seq.num_to_compute)
            (decodes if scheduled.phase is Phase.DECODE else prompts).append(scheduled)
            budget -= count
        self._batch.add(joining)
        return Schedule(prompts + decodes, self._batch)

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Tokens that a waiting sequence gets in this step; 0 if there is no room, and then it holds nothing."""
        for partly in (True, False):  # what is copied is held beside the copy: perhaps there is room without
            spared = seq.num_computed if seq.tables else self.blocks.attach_prefix(seq, partly)
            count, wanted = self._num_tokens(seq, budget), seq.num_to_compute
            able = count == wanted or (self.enable_chunked_prefill and self.blocks.has_room(seq, wanted))
            if count and able and self.blocks.reserve(seq, self._room(seq, count)):
                if seq.num_preemptions == 0:
                    seq.num_cached_tokens, seq.admitted_time = spared, time.perf_counter()
                    self.num_prompt_tokens += seq.num_prompt_tokens
                    self.num_cached_tokens += spared
                return count
            copies = bool(seq.prefix_copies)
            self.blocks.release(seq)
            if not copies:
                break
        return 0

    def _num_tokens(self, seq: Sequence, budget: int) -> int:
        """Tokens that a sequence gets of what is left of a step."""
        if seq.num_to_compute > budget and not self.enable_chunked_prefill:
            return 0
        return self.blocks.fitting(seq, min(seq.num_to_compute, budget))

    def _alone(self, seq: Sequence, budget: int) -> int:
        """Tokens of a step that begins with a sequence: where no prompt is cut, all of it, whatever lack of memory has left."""
        return budget if self.enable_chunked_prefill else max(budget, seq.num_to_compute)

    def _room(self, seq: Sequence, count: int) -> int:
        """Tokens for which a sequence must hold pages when it gets `count`."""
        return count

    def _give_up(self) -> bool:
        """Take the pages of a sequence that does not run yet; False: none has any."""
        if self.offloader is None:
            return False
        holder = next((seq for seq in reversed(self.waiting) if seq.tables), None)
        if holder is None:
            return self.offloader.loads.give_up()
        self.blocks.release(holder)
        return True

    def _preempt_last(self) -> Sequence:
        seq = self.running.pop()
        assert not seq.together
        self.preemptions["recompute" if self.offloader is None else self.offloader.preempt(seq)] += 1
        self._release(seq)
        seq.status, seq.draft_token_ids = Status.WAITING, []
        seq.num_preemptions += 1
        self.add_first([seq])
        return seq

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        if seq.row is not None:
            self._free_rows.append(seq.row)
            seq.row = None

    def launched(self, step: Schedule) -> None:
        """Account for a step the device has been given: its tokens count as computed, and those it samples as pending."""
        for seq, count, context_len, samples, drafts in step.apart:
            seq.num_computed += count
            seq.num_unverified = drafts
            if drafts:
                seq.draft_token_ids = []
            if seq.prefix_copies:
                self.blocks.copies_launched(seq)
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

    def read(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """Append what a launched step has sampled for a sequence: the verified drafts, and the token after them.

        Returns the tokens that were appended: fewer where one of them ends the sequence. The k and v of drafts that were refused
        count as not computed; the next step overwrites them.
        """
        if not seq.together:
            seq.num_pending -= 1
        if seq.num_unverified:  # else there were no drafts, or the sequence was preempted meanwhile and is computed again
            seq.num_computed -= seq.num_unverified + 1 - len(tokens)
            seq.newest_at = seq.num_computed
            seq.num_unverified = 0
        for count, token in enumerate(tokens, start=1):
            seq.append(token)
            if seq.status is Status.FINISHED:
                return tokens[:count]
        return tokens

    def remove_finished(self) -> None:
        """Free what finished sequences held."""
        self._batch.remove(seq for seq in self._batch.members if seq.finished)
        for seq in (*self.running, *self.waiting):
            if seq.finished:
                self._release(seq)
        if self.offloader is not None:
            self.offloader.remove_finished()
        self.running = [seq for seq in self.running if not seq.finished]
        self.waiting = deque(seq for seq in self.waiting if not seq.finished)
