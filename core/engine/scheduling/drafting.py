"""Speculation: decides whether the next step verifies drafts, and how many drafts, to maximize tokens per second."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from headway.core.contract.text_plugins import BatchProposer, Proposer, SequenceProposer
from headway.core.engine.data.config import MAX_DRAFT_TOKENS
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.data.step import ScheduledStep
from headway.core.speculation.proposers import NO_DRAFTS, PLAIN, WIDTHS, StepTimes, size_class, width_of

log = logging.getLogger("headway")

FIRST_ACCEPTANCE = 0.8
"""Acceptance rate assumed until drafts have been verified. The rate is high, so that some drafts are verified and their
acceptance is measured."""
_HOPE = 0.5  # Minimum acceptance rate assumed in a trial after a rest
_PRIOR, _MEMORY, _LONG_MEMORY = 4, 20, 50
"""Three numbers of draft tokens: the weight of the mean over all sequences, the memory of a sequence's running mean, and the
memory of the mean over all sequences. The memories are long enough that good drafts seldom look bad by chance."""
_SHORT_REST, _LONG_REST = 4, 64
"""Minimum and maximum number of steps without drafts before a trial. The number doubles as long as drafts do not pay. A trial
assumes that half of its drafts are accepted, so it takes at most twice as long as a plain step. One trial in 64 steps thus costs
less than 2 %."""
_REFUSED = 32  # Trials refused because of step times, after which these times are measured anew

COSTLY, NOTHING_FOUND, MEASURING = "costs more than it gains", "no guess", "measuring steps without"


@dataclass(slots=True)
class _DraftRecord:
    proposer: SequenceProposer | None  # The proposer of this sequence. None if it has raised
    share: float = 0.0  # Running mean of acceptance after accepted drafts; a draft not found counts as rejected
    seen: int = 0  # Draft tokens in that mean

    def acceptance(self, of_all: float) -> float:
        """Return the sequence's acceptance rate. While few of its drafts were verified, the rate is averaged with `of_all`, the
        rate over all sequences."""
        return (self.seen * self.share + _PRIOR * of_all) / (self.seen + _PRIOR)


class Drafting:
    """Proposes draft tokens for the running sequences if speculation is faster than plain steps.

    A step that verifies k drafts for each of n sequences writes n + sum(a + a^2 + ... + a^k) tokens, where a is a sequence's
    measured acceptance rate. But it takes longer than a plain step. Acceptance rates and step times are measured as steps run. If
    no width gives more tokens per second than a plain step, drafting rests: the host runs ahead of the device again, and steps
    are as fast as without speculation. After a rest, drafts are tried again.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, most: int = MAX_DRAFT_TOKENS, times: StepTimes | None = None) -> None:
        """most: maximum number of drafts per sequence and step. times: measured step times, or None to verify every draft."""
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._times = times
        self._at_once = proposer if isinstance(proposer, BatchProposer) else None  # an isinstance check in every step costs 10 us
        self._widths = sorted({*(width for width in WIDTHS if width <= most), most + 1})
        self._known: dict[Sequence, _DraftRecord] = {}
        self._acceptance = FIRST_ACCEPTANCE
        self._seen = _PRIOR  # Acceptance over all sequences, assumed for a new one; and the draft tokens in that mean
        self._resting = 0
        self._rest = _SHORT_REST
        self._rest_class = -1
        self._trial = False
        self._measuring = False
        self._refused = 0
        """`_trial`: True if the next step may try drafts after a rest. `_measuring`: True if a trial measures step times, which
        takes several consecutive steps, because the first step after a rest takes longer. `_refused`: number of trials refused
        because of step times."""
        self._reason = ""
        self._rest_reason = COSTLY
        self._last: tuple[float, int, int] | None = None  # The last step's launch time, number of sequences, and width

    @property
    def rests(self) -> bool:
        """True if the next step will not have drafts, so that the host may run ahead."""
        return self._resting > 0

    def plan(self, running: Items[Sequence]) -> bool:
        """Set the next step's drafts, and return whether there are any. running: candidate sequences, empty while a step is in
        flight."""
        ready = [seq for seq in running if not seq.num_pending and seq.num_to_compute == 1 and seq.num_computed]
        if self._resting and ready and size_class(len(ready)) != self._rest_class:
            self._resting = 0  # drafts that did not pay may pay at another number of sequences
        if self._resting or not ready:
            self._resting = max(self._resting - 1, 0)
            self._trial = not self._resting
            return False
        self._measuring = False
        self._reason = self._draft(ready)
        self._trial = self._measuring and not self._reason
        if self._reason:
            for seq in ready:
                seq.draft_token_ids = []
        return not self._reason

    def _draft(self, ready: list[Sequence]) -> str:
        """Set the drafts of sequences. Returns the reason why no sequence gets drafts, or an empty string."""
        times, count = self._times, len(ready)
        known = [self._of(seq) for seq in ready]
        hope = _HOPE if self._trial else 0.0
        likely = [max(each.acceptance(self._acceptance), hope) for each in known]
        seconds: dict[int, float] = {}
        most = self._widths[-1] - 1
        if times is not None:
            kv_len = sum(seq.num_tokens for seq in ready) // count
            seconds = times.of(count, self._widths, kv_len)
            if not seconds:
                return self._start_rest(count, MEASURING)
            best = self._best(seconds, likely, [most] * count)
            if best == PLAIN and self._trial:
                best = self._trial_width(times, seconds, likely)
                self._measuring = best != PLAIN
            if best == PLAIN:
                return self._start_rest(count, COSTLY)
            most = best - 1
        proposed = self._propose_all(ready, known, most)
        for each, draft in zip(known, proposed, strict=True):
            if not draft:
                self._learn(each, 0, 1)
        if not any(proposed):
            return NOTHING_FOUND
        if times is not None:
            if self._measuring:
                if times.is_measured(count, width_of(max(map(len, proposed)) + 1)):  # too few drafts for the unknown width
                    self._refuse(times, count)
                    most = 0
            elif any(len(draft) < most for draft in proposed):
                most = self._best(seconds, likely, [len(draft) for draft in proposed]) - 1
            if most < 1:
                return self._start_rest(count, COSTLY)
            if not self._trial:  # a trial has yet to show that drafts are accepted
                self._rest = _SHORT_REST
        for seq, draft in zip(ready, proposed, strict=True):
            seq.draft_token_ids = draft[:most]
        return ""

    def _best(self, seconds: Mapping[int, float], likely: list[float], most: list[int]) -> int:
        """Return the width with the most tokens per second, which may be PLAIN. most: maximum number of drafts for each
        sequence."""

        def rate(width: int) -> float:
            written = sum(expected(share, min(k, width - 1)) for share, k in zip(likely, most, strict=True))
            return written / seconds[width]

        return max(seconds, key=rate)

    def _trial_width(self, times: StepTimes, seconds: dict[int, float], likely: list[float]) -> int:
        """Return the width for a trial in which every width looks too slow: PLAIN, unless some step times are only estimates,
        which the trial can replace by measurements."""
        count = len(likely)
        unknown = {width: seconds[width] for width in self._widths if not times.is_measured(count, width)}
        if unknown:
            return self._best(unknown, likely, [self._widths[-1] - 1] * count)
        self._refuse(times, count)
        return PLAIN

    def _refuse(self, times: StepTimes, count: int) -> None:
        """Count a trial that is refused because of measured step times. After many refusals, discard these times, so that they
        are measured again."""
        self._refused += 1
        if self._refused % _REFUSED == 0:
            times.forget(count)

    def _start_rest(self, count: int, reason: str) -> str:
        if reason is MEASURING:
            self._resting = _SHORT_REST
        else:
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONG_REST)
        self._rest_class = size_class(count)
        self._rest_reason = reason
        return reason

    def _of(self, seq: Sequence) -> _DraftRecord:
        known = self._known.get(seq)
        if known is None:
            proposer: SequenceProposer | None = None
            try:
                proposer = self._proposer.begin(seq.num_prompt_tokens)
            except (Exception, SystemExit) as error:
                self._failed(seq, error)
            known = self._known[seq] = _DraftRecord(proposer)
        return known

    def _propose_all(self, ready: list[Sequence], known: list[_DraftRecord], most: int) -> list[list[int]]:
        if self._at_once is None:
            return [self._propose(seq, each, most) for seq, each in zip(ready, known, strict=True)]
        counts = [max(min(most, seq.max_len - seq.num_tokens - 1), 0) for seq in ready]
        return self._at_once.propose_batch([seq.token_ids for seq in ready], counts)

    def _propose(self, seq: Sequence, known: _DraftRecord, most: int) -> list[int]:
        """Return the proposer's drafts for a sequence. If the proposer raises an error or returns invalid ids, it is not called
        for this sequence again."""
        most = min(most, seq.max_len - seq.num_tokens - 1)
        if known.proposer is None or most < 1:
            return []
        try:
            draft = list(known.proposer.propose(seq.token_ids, most))[:most]
            if not all(0 <= token < self._vocab_size for token in draft):
                raise ValueError(f"token ids from 0 to {self._vocab_size - 1} are needed, got {draft}")
        except (Exception, SystemExit) as error:  # any error of a plugin
            known.proposer = None
            self._failed(seq, error)
            return []
        return draft

    def _failed(self, seq: Sequence, error: BaseException) -> None:
        log.warning("speculation: request %s continues without drafts, because its proposer raised %r", seq.request_id, error)

    def verified(self, seq: Sequence, drafts: int, accepted: int) -> None:
        """Record that a step verified `drafts` drafts of a sequence and accepted the first `accepted` of them."""
        known = self._known.get(seq)
        if known is not None:
            self._learn(known, accepted, int(accepted < drafts))

    def _learn(self, known: _DraftRecord, held: int, failed: int) -> None:
        for hit in (1.0,) * held + (0.0,) * failed:
            known.seen = min(known.seen + 1, _MEMORY)
            self._seen = min(self._seen + 1, _LONG_MEMORY)
            known.share += (hit - known.share) / known.seen
            self._acceptance += (hit - self._acceptance) / self._seen

    def stepped(self, step: ScheduledStep, read: bool, stats: EngineStats) -> None:
        """Record that a step was launched. read: True if this step has been read; False if the previous step was read instead."""
        now = time.perf_counter()
        drafts = max((each.num_draft_tokens for each in step.individual), default=0)  # members of the decode batch have no drafts
        reason = self._reason
        self._reason = ""
        width = width_of(drafts + 1) if drafts else NO_DRAFTS if reason is NOTHING_FOUND else PLAIN
        decodes = bool(step) and all(
            each.num_new_tokens == each.num_draft_tokens + 1 and each.context_len for each in step.individual
        )
        if decodes and not drafts:
            stats.steps_without_drafts[reason or self._rest_reason] += 1
        if not decodes:
            self._last = None
            return
        if self._times is not None and self._last is not None:
            began, *before = self._last
            count, timed = (len(step), width) if read else before
            # Between the two calls the host waited for the step to time. A plain step is timed only after another plain step:
            # then it takes as long as where the host runs ahead before and after it.
            if timed != PLAIN or width == before[1] == PLAIN:
                self._times.note(count, timed, now - began)
        self._last = now, len(step), width

    def finish(self, seq: Sequence) -> None:
        """Notify the proposer that a sequence has ended, and forget the sequence."""
        known = self._known.pop(seq, None)
        try:
            if known is not None and known.proposer is not None:
                known.proposer.finish(seq.token_ids)
        except (Exception, SystemExit) as error:
            self._failed(seq, error)


def expected(acceptance: float, drafts: int) -> float:
    """Return the expected number of tokens per sequence from a step with drafts: 1 + a + a^2 + ... + a^drafts, where a is the
    acceptance rate (Leviathan et al. 2023)."""
    return drafts + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
