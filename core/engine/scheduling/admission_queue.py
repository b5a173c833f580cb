"""Sequences on their way to the scheduler: until their request is prepared, and until a sibling has computed their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from headway.core.engine.data.schedule import ScheduledStep
from headway.core.engine.data.sequence import Sequence as Completion
from headway.core.engine.scheduling.scheduler import Scheduler

_LONGEST_WAIT = 0.02
"""Seconds that an idle engine waits for a request's preparation before it looks for new requests again."""


class AdmissionQueue:
    """Holds sequences back that cannot run yet, or had better wait.

    The first completion of a request goes ahead; the others follow once its prompt is under way, and find it in the prefix cache:
    whole blocks are shared, and the part of a block is copied, so that the prompt is computed once.
    """

    def __init__(self, scheduler: Scheduler, shares_prompts: bool) -> None:
        """shares_prompts: whether there is a prefix cache."""
        self._scheduler = scheduler
        self._shares = shares_prompts
        self._preparing: list[tuple[Future[None], list[Completion]]] = []
        self._siblings: dict[str, list[Completion]] = {}

    @property
    def occupied(self) -> bool:
        """Whether any sequence is held back."""
        return bool(self._preparing or self._siblings)

    @property
    def num_waiting(self) -> int:
        """Completions that are held back."""
        return sum(len(seqs) for _, seqs in self._preparing) + sum(map(len, self._siblings.values()))

    def add(self, seqs: list[Completion], ready: Future[None] | None) -> None:
        """Take the completions of a request. ready: ends when the request has been prepared; None: nothing was to be prepared."""
        if ready is not None:
            self._preparing.append((ready, seqs))
            return
        ahead = 1 if self._shares else len(seqs)
        for seq in seqs[:ahead]:
            self._scheduler.add(seq)
        if seqs[ahead:]:
            self._siblings[seqs[0].request_id] = seqs[ahead:]

    def poll(self, idle: bool) -> list[tuple[list[Completion], str]]:
        """Hand prepared requests on; returns the completions of requests that cannot be prepared, with the reason.

        idle: there is nothing else to do, so wait for the first request, for a moment at most: new ones may come.
        """
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
        """Hand on the siblings of sequences whose whole prompt this step computes."""
        if not self._siblings:
            return
        for seq, _, _, samples, _ in step.individual:  # the batch's members had their prompts computed before
            if samples and seq.request_id in self._siblings:
                self._scheduler.add_first(self._siblings.pop(seq.request_id))

    def ended(self, seqs: Sequence[Completion]) -> None:
        """Forget sequences that ended, and hand on siblings that waited for one of them."""
        if not self.occupied:
            return
        kept = [(ready, [seq for seq in waiting if not seq.finished]) for ready, waiting in self._preparing]
        for ready, waiting in kept:
            if not waiting:
                ready.cancel()  # nobody waits for the request's preparation any more
        self._preparing = [each for each in kept if each[1]]
        for seq in seqs:
            waiting = [other for other in self._siblings.pop(seq.request_id, ()) if not other.finished]
            if waiting and seq not in waiting:
                self.add(waiting, None)
