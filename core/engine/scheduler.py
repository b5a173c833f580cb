"""Which sequences get how many tokens in the next step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headway.core.contract.metadata import Phase
from headway.core.engine.blocks import BlockManager
from headway.core.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's share of a step, as it was when scheduled: the sequence moves on before the step has run."""

    seq: Sequence
    num_new_tokens: int
    context_len: int
    """Tokens of it that the cache holds before the step."""
    samples: bool
    """Whether the last token's logits are wanted: not in the middle of a prompt."""

    @classmethod
    def of(cls, seq: Sequence, num_new_tokens: int) -> Scheduled:
        """The next tokens of a sequence."""
        return cls(seq, num_new_tokens, seq.num_computed, num_new_tokens == seq.num_to_compute)

    @property
    def phase(self) -> Phase:
        """Of these tokens."""
        return Phase.of(self.num_new_tokens, self.context_len)


class Scheduler:
    """Continuous batching with a token budget: who runs goes on, then who waits is admitted, first come first served.

    A prompt longer than what the budget leaves is cut into chunks (Agrawal et al. 2023, Sarathi). When the pool runs dry, the
    youngest running sequence gives its blocks back and waits at the head of the queue, to be computed again (vLLM's recompute).

    `schedule` may be called while earlier steps are still running on the device: tokens those will sample count as pending. What
    it frees may be handed out at once, because the device runs steps in order.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        enable_chunked_prefill: bool = True,
    ) -> None:
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.enable_chunked_prefill = enable_chunked_prefill
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(seq)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step: sequences that prefill or extend first, then those that decode.

        Empty if all that run only wait for a token under way.
        """
        budget = self.max_num_batched_tokens
        scheduled: list[Scheduled] = []
        preempted = skipped = False
        position = 0
        while position < len(self.running) and budget > 0:
            seq = self.running[position]
            count = self._share(seq, budget)
            if count == 0:
                skipped = skipped or seq.num_to_compute > 0
                position += 1
                continue
            while not self.blocks.reserve(seq, self._room(seq, count)):
                preempted = True
                if self._preempt_last() is seq:
                    break
            else:
                scheduled.append(Scheduled.of(seq, count))
                budget -= count
                position += 1
        while self.waiting and not (preempted or skipped) and budget > 0 and len(self.running) < self.max_num_seqs:
            count = self._admit(self.waiting[0], budget)
            if count == 0:
                break
            seq = self.waiting.popleft()
            self.running.append(seq)
            seq.status, seq.row = Status.RUNNING, self._free_rows.pop()
            scheduled.append(Scheduled.of(seq, count))
            budget -= count
        scheduled.sort(key=lambda share: share.phase is Phase.DECODE)  # stable: first come first served within each part
        return scheduled

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Tokens that a waiting sequence gets in this step; 0 if there is no room, and then it holds nothing."""
        spared = self.blocks.attach_prefix(seq)
        count = self._share(seq, budget)
        whole = count == seq.num_to_compute
        if count and (whole or self.enable_chunked_prefill) and self.blocks.reserve(seq, self._room(seq, count)):
            if seq.num_preemptions == 0:
                seq.num_cached_tokens = spared
            return count
        self.blocks.release(seq)
        return 0

    def _share(self, seq: Sequence, budget: int) -> int:
        """Tokens that a sequence gets of what is left of a step."""
        return min(seq.num_to_compute, budget)

    def _room(self, seq: Sequence, count: int) -> int:
        """Tokens for which a sequence must hold blocks when it gets `count`."""
        return count

    def _preempt_last(self) -> Sequence:
        seq = self.running.pop()
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)
        return seq

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        if seq.row is not None:
            self._free_rows.append(seq.row)
            seq.row = None

    def launched(self, scheduled: list[Scheduled]) -> None:
        """Account for a step the device has been given: its tokens count as computed, and those it samples as pending."""
        for share in scheduled:
            share.seq.num_computed += share.num_new_tokens
            share.seq.num_pending += share.samples
            self.blocks.publish(share.seq)

    def remove_finished(self) -> None:
        """Free what finished sequences held."""
        for seq in (*self.running, *self.waiting):
            if seq.finished:
                self._release(seq)
        self.running = [seq for seq in self.running if not seq.finished]
        self.waiting = deque(seq for seq in self.waiting if not seq.finished)
