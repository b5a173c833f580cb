"""Decides whether the next step verifies drafts, and how many: the number that gives the most tokens per second."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from headway.core.contract.sampling_plugins import BatchProposer, Proposer, SequenceProposer
from headway.core.engine.data.config import MAX_DRAFT_TOKENS
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.data.step import ScheduledStep
from headway.core.speculation.proposers import PLAIN, UNGUESSED, WIDTHS, StepTimes, size_class, width_of

log = logging.getLogger("headway")

FIRST_ACCEPTANCE = 0.8
"""Share of guesses expected to hold before any was verified: so high that some are verified, since only these teach anything."""
_HOPE = 0.5  # Share of guesses expected to hold, at least, in a trial after a rest
_PRIOR, _MEMORY, _LONG_MEMORY = 4, 20, 50
"""Number of its own guesses that count as much for a sequence as the mean of all sequences; guesses that the running mean of a
sequence reaches back, and that of all sequences: enough that chance alone seldom makes good guesses look bad."""
_SHORT_REST, _LONG_REST = 4, 64
"""Steps without guesses after which guesses are tried again: the first number, doubled up to the second while they do not pay. A
trial expects half of its guesses to hold, so it takes at most twice as long as a step without: one in 64 costs less than 2 %."""
_REFUSED = 32  # Trials refused because of the times of steps, after which these times are measured anew

COSTLY, NO_GUESS, MEASURING = "costs more than it gains", "no guess", "measuring steps without"


@dataclass(slots=True)
class _GuessRecord:
    proposer: SequenceProposer | None  # The proposer of this sequence; None: it has raised
    share: float = 0.0  # Running mean of how often a guess holds after held ones; one not found counts as not holding
    seen: int = 0  # Guesses in that mean

    def acceptance(self, of_all: float) -> float:
        """Probability that a guess holds: from the sequence's own guesses, and while these are few, from those of all."""
        return (self.seen * self.share + _PRIOR * of_all) / (self.seen + _PRIOR)


class Drafting:
    """Has tokens guessed for the running sequences, where that pays.

    A step in which k guesses are verified for each of n sequences writes n + sum(a + a^2 + ... + a^k) tokens, where a is a
    sequence's measured acceptance; it takes longer than a step without. Both are measured as steps run (`StepTimes`). Where no
    width gives more tokens per second than none, drafting rests: the host runs ahead of the device again, and a step is as fast
    as without speculation. After a rest guesses are tried once more.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, most: int = MAX_DRAFT_TOKENS, times: StepTimes | None = None) -> None:
        """most: guesses per sequence and step. times: None: every guess is verified, whatever it costs."""
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._times = times
        self._at_once = proposer if isinstance(proposer, BatchProposer) else None  # asking costs every step 10 us
        self._widths = sorted({*(width for width in WIDTHS if width <= most), most + 1})
        self._known: dict[Sequence, _GuessRecord] = {}
        self._acceptance = FIRST_ACCEPTANCE
        self._seen = _PRIOR  # Acceptance over all sequences, expected of a new one; and the guesses in that mean
        self._resting = 0
        self._rest = _SHORT_REST
        self._rest_class = -1
        self._trial = False
        self._measuring = False
        self._refused = 0
        """Whether the next step may try guesses after a rest; whether it does so to measure, which takes several in a row, for a
        step after a rest takes longer than one after its like; and the trials that the times of steps have refused."""
        self._reason = ""
        self._rest_reason = COSTLY
        self._last: tuple[float, int, int] | None = None  # The last step's launch time, number of sequences, and width

    @property
    def rests(self) -> bool:
        """Whether the next step will not want guesses either, so that the host may run ahead."""
        return self._resting > 0

    def plan(self, running: Items[Sequence]) -> bool:
        """Set the next step's drafts; return whether there are any. running: sequences that may get drafts; none in flight."""
        ready = [seq for seq in running if not seq.num_pending and seq.num_to_compute == 1 and seq.num_computed]
        if self._resting and ready and size_class(len(ready)) != self._rest_class:
            self._resting = 0  # guesses that did not pay may pay at another number of sequences
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
        """Give sequences their drafts; returns the reason why none gets any, or an empty string."""
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
        guesses = self._guesses(ready, known, most)
        for each, guess in zip(known, guesses, strict=True):
            if not guess:
                self._learn(each, 0, 1)
        if not any(guesses):
            return NO_GUESS
        if times is not None:
            if self._measuring:
                if times.is_measured(count, width_of(max(map(len, guesses)) + 1)):  # too few guesses for the unknown width
                    self._refuse(times, count)
                    most = 0
            elif any(len(guess) < most for guess in guesses):
                most = self._best(seconds, likely, [len(guess) for guess in guesses]) - 1
            if most < 1:
                return self._start_rest(count, COSTLY)
            if not self._trial:  # a trial has still to show that guesses hold
                self._rest = _SHORT_REST
        for seq, guess in zip(ready, guesses, strict=True):
            seq.draft_token_ids = guess[:most]
        return ""

    def _best(self, seconds: Mapping[int, float], likely: list[float], most: list[int]) -> int:
        """The width with the most tokens per second, out of PLAIN and others. most: guesses that each sequence can have."""

        def rate(width: int) -> float:
            written = sum(expected(share, min(k, width - 1)) for share, k in zip(likely, most, strict=True))
            return written / seconds[width]

        return max(seconds, key=rate)

    def _trial_width(self, times: StepTimes, seconds: dict[int, float], likely: list[float]) -> int:
        """The width of a trial that the times speak against: PLAIN, unless some are estimates, which only a step can refute."""
        count = len(likely)
        unknown = {width: seconds[width] for width in self._widths if not times.is_measured(count, width)}
        if unknown:
            return self._best(unknown, likely, [self._widths[-1] - 1] * count)
        self._refuse(times, count)
        return PLAIN

    def _refuse(self, times: StepTimes, count: int) -> None:
        """Count a trial that measured times refuse, and have them measured anew after many."""
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

    def _of(self, seq: Sequence) -> _GuessRecord:
        known = self._known.get(seq)
        if known is None:
            proposer: SequenceProposer | None = None
            try:
                proposer = self._proposer.begin(seq.num_prompt_tokens)
            except (Exception, SystemExit) as error:
                self._failed(seq, error)
            known = self._known[seq] = _GuessRecord(proposer)
        return known

    def _guesses(self, ready: list[Sequence], known: list[_GuessRecord], most: int) -> list[list[int]]:
        if self._at_once is None:
            return [self._guess(seq, each, most) for seq, each in zip(ready, known, strict=True)]
        counts = [max(min(most, seq.max_len - seq.num_tokens - 1), 0) for seq in ready]
        return self._at_once.propose_batch([seq.token_ids for seq in ready], counts)

    def _guess(self, seq: Sequence, known: _GuessRecord, most: int) -> list[int]:
        """Ask the proposer; one that raises, or guesses what is not a token, is not asked for this sequence again."""
        most = min(most, seq.max_len - seq.num_tokens - 1)
        if known.proposer is None or most < 1:
            return []
        try:
            guess = list(known.proposer.propose(seq.token_ids, most))[:most]
            if not all(0 <= token < self._vocab_size for token in guess):
                raise ValueError(f"token ids from 0 to {self._vocab_size - 1} are needed, got {guess}")
        except (Exception, SystemExit) as error:  # whatever a plugin raises
            known.proposer = None
            self._failed(seq, error)
            return []
        return guess

    def _failed(self, seq: Sequence, error: BaseException) -> None:
        log.warning("speculation: request %s goes on without guesses, for its proposer raised %r", seq.request_id, error)

    def verified(self, seq: Sequence, drafts: int, accepted: int) -> None:
        """Note that a step has verified the drafts of a sequence, of which the first `accepted` held."""
        known = self._known.get(seq)
        if known is not None:
            self._learn(known, accepted, int(accepted < drafts))

    def _learn(self, known: _GuessRecord, held: int, failed: int) -> None:
        for hit in (1.0,) * held + (0.0,) * failed:
            known.seen = min(known.seen + 1, _MEMORY)
            self._seen = min(self._seen + 1, _LONG_MEMORY)
            known.share += (hit - known.share) / known.seen
            self._acceptance += (hit - self._acceptance) / self._seen

    def stepped(self, step: ScheduledStep, read: bool, stats: EngineStats) -> None:
        """Note a step that was launched. read: it has been read too; else the step before it was, since the last call of this."""
        now = time.perf_counter()
        drafts = max((each.num_draft_tokens for each in step.individual), default=0)  # the batch's members have none
        reason = self._reason
        self._reason = ""
        width = width_of(drafts + 1) if drafts else UNGUESSED if reason is NO_GUESS else PLAIN
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
            # Between the two calls the host has waited for that step. A step without guesses counts only after another
            # one: then it takes as long as where the host runs ahead before and after it.
            if timed != PLAIN or width == before[1] == PLAIN:
                self._times.note(count, timed, now - began)
        self._last = now, len(step), width

    def finish(self, seq: Sequence) -> None:
        """Tell the proposer that a sequence has ended, and forget the sequence."""
        known = self._known.pop(seq, None)
        try:
            if known is not None and known.proposer is not None:
                known.proposer.finish(seq.token_ids)
        except (Exception, SystemExit) as error:
            self._failed(seq, error)


def expected(acceptance: float, drafts: int) -> float:
    """Tokens that a step with this many drafts is expected to give a sequence: 1 + a + a^2 + ... (Leviathan et al. 2023)."""
    return drafts + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
