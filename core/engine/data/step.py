"""A step as plain data: its schedule, its input, its samples, and the deltas for clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.metadata import Phase
from headway.core.engine.data.adapters import AdapterLoad
from headway.core.engine.data.sequence import Sequence, StepCount
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.params import SamplingParams

_NO_MEMBERS: NDArray[numpy.int32] = numpy.zeros((3, 0), dtype=numpy.int32)  # The arrays of a batch without members


class DecodeBatch:
    """The sequences that decode one token in every step, as arrays that advance for all members at once (after vLLM's persistent
    batch).

    A member has one token to compute, the last one that the executor sampled, and no drafts. `Sequence.num_computed` and the
    properties that depend on it include the batch's steps, so a member can be read like any other sequence. Remove a member
    before changing anything but its pages.
    """

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        """Members in the order of the arrays. The list is never changed in place, because launched steps reference it."""
        self.places: NDArray[numpy.int32] = _NO_MEMBERS
        """int32 [3, members]: `row`, `state_index` and `adapter_slot`, constant during plain decode. Never changed in place."""
        self._steps = StepCount()
        self._counts: NDArray[numpy.int64] = _NO_MEMBERS.astype(numpy.int64)
        """int64 [3, members]. Row 0: number of computed tokens minus number of counted steps. Row 1: number of steps after which
        the pages are full or the last token is pending. Row 2: number of steps after which a page may be published or freed."""
        self._changed: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.members)

    def context_lens(self) -> NDArray[numpy.int32]:
        """Return int32 [members]: cached tokens of each member before the next step."""
        lens: NDArray[numpy.int32] = (self._counts[0] + self._steps.num_steps).astype(numpy.int32)
        return lens

    def due(self) -> list[int]:
        """Return the indices of members that need pages, or must leave the batch, before the next step."""
        places: list[int] = numpy.flatnonzero(self._counts[1] <= self._steps.num_steps).tolist()
        return places

    def renew(self, place: int) -> None:
        """Update the counts of the member at index `place` after it got new pages."""
        seq = self.members[place]
        self._counts[1, place] = seq.lasts_until - self._counts[0, place]
        self._changed.append(seq)

    def step(self) -> list[int]:
        """Count a launched step. Returns the indices of members whose pages may have been filled."""
        self._steps.num_steps += 1
        places: list[int] = numpy.flatnonzero(self._counts[2] <= self._steps.num_steps).tolist()
        return places

    def passed(self, place: int) -> None:
        """Record that the filled pages of the member at this index have been published."""
        seq = self.members[place]
        self._counts[2, place] = seq.next_boundary - self._counts[0, place]
        if seq.table_changes:
            self._changed.append(seq)

    def take_changed(self) -> list[Sequence]:
        """Return the members whose tables changed since the last call. The executor may already know some of the changes."""
        changed = self._changed
        self._changed = []
        return changed

    def add(self, seqs: Items[Sequence]) -> None:
        """Add sequences that decode one token next; see the class."""
        if not seqs:
            return
        num_steps = self._steps.num_steps
        for seq in seqs:
            seq.join(self._steps)
        self._changed += [seq for seq in seqs if seq.table_changes]
        counts = (
            [seq.num_computed - num_steps for seq in seqs],
            [seq.lasts_until for seq in seqs],
            [seq.next_boundary for seq in seqs],
        )
        new = numpy.array(counts, dtype=numpy.int64)
        new[1:] -= new[0]
        places = [seq.row for seq in seqs], [seq.state_index for seq in seqs], [seq.adapter_slot for seq in seqs]
        self.members = [*self.members, *seqs]
        self.places = numpy.concatenate([self.places, numpy.array(places, dtype=numpy.int32)], axis=1)
        self._counts = numpy.concatenate([self._counts, new], axis=1)

    def remove(self, leaving: Iterable[Sequence]) -> None:
        """Remove members; sequences outside the batch are ignored."""
        gone = {seq for seq in leaving if seq.in_decode_batch}
        if not gone:
            return
        kept = numpy.array([seq not in gone for seq in self.members], dtype=numpy.bool_)
        self.members = [seq for seq in self.members if seq not in gone]
        self.places = self.places.compress(kept, axis=1)
        self._counts = self._counts.compress(kept, axis=1)
        self._changed = [seq for seq in self._changed if seq not in gone]
        for seq in gone:
            seq.leave()

    def clear(self) -> None:
        """Remove all members."""
        self.remove(self.members)


class ScheduledSequence(NamedTuple):
    """A sequence's part of a step. A snapshot, because the sequence advances before the step has run."""

    seq: Sequence
    num_new_tokens: int
    """Number of tokens that the step computes for the sequence, drafts included."""
    context_len: int
    """Number of the sequence's tokens in the cache before the step."""
    samples: bool
    """True if the logits of the last new token are needed. False in the middle of a prompt."""
    num_draft_tokens: int = 0
    """Number of draft tokens, which are the last of the new tokens."""

    @property
    def phase(self) -> Phase:
        """Phase of these tokens."""
        return Phase.DECODE if self.num_draft_tokens else Phase.of(self.num_new_tokens, self.context_len)


class ScheduledStep:
    """A step: individually scheduled sequences, then the members of the decode batch."""

    def __init__(self, individual: list[ScheduledSequence], batch: DecodeBatch | None) -> None:
        """individual: individually scheduled sequences, prefill and extend first. batch: decode batch whose current members are
        in the step. The batch advances before the step runs."""
        self.individual = individual
        self.members: list[Sequence] = [] if batch is None else batch.members
        places = _NO_MEMBERS if batch is None else batch.places
        self.rows: NDArray[numpy.int32] = places[0]
        self.state_indices: NDArray[numpy.int32] = places[1]
        self.adapter_slots: NDArray[numpy.int32] = places[2]
        """int32 [members] each: row, index of the state slot within the row, and adapter slot."""
        self.context_lens: NDArray[numpy.int32] = _NO_MEMBERS[0] if batch is None else batch.context_lens()
        """int32 [members]: number of cached tokens before the step."""
        self.changed: list[Sequence] = [] if batch is None else batch.take_changed()
        """Members whose tables changed since the previous step."""

    def __len__(self) -> int:
        return len(self.individual) + len(self.members)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        yield from self.individual
        for seq, context_len in zip(self.members, self.context_lens.tolist(), strict=True):
            yield ScheduledSequence(seq, 1, context_len, True)

    @property
    def seqs(self) -> list[Sequence]:
        """All sequences, in the step's order."""
        return [*(each.seq for each in self.individual), *self.members] if self.individual else self.members

    @property
    def sampling(self) -> list[Sequence]:
        """Sequences whose next token the step samples."""
        return [*(each.seq for each in self.individual if each.samples), *self.members] if self.individual else self.members


NEWEST = -1
"""Placeholder for the last token that the executor sampled in the row. The host need not have seen that token."""


class StartedRow(NamedTuple):
    """A sequence that starts or restarts in a row. It replaces all data of the row."""

    row: int
    params: SamplingParams
    seed: int
    token_ids: tuple[int, ...] = ()
    """Prompt and output tokens that the host knows, if sampling needs them (`sampler.OF_TOKENS`)."""
    num_prompt_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens that min_tokens suppresses."""


class NewPages(NamedTuple):
    """New pages in the table of a row, from its `start`-th page on."""

    row: int
    start: int
    pages: list[int]
    group: int = 0


class PageCopy(NamedTuple):
    """A copy of the first `num_tokens` slots of a group's page to another page, before the step runs."""

    group: int
    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """Complete input of a step for the executor. Row changes and copies take effect before the step runs. All copies read their
    sources before any copy writes."""

    rows: NDArray[numpy.int32]
    """int32 [num_seqs]: row of each sequence in the executor's buffers. Prefill and extend come first."""
    query_lens: NDArray[numpy.int32]
    """int32 [num_seqs]: number of new tokens, drafts included."""
    context_lens: NDArray[numpy.int32]
    """int32 [num_seqs]: number of cached tokens before the step, which is the position of the first new token."""
    num_draft_tokens: NDArray[numpy.int32]
    """int32 [num_seqs]: number of draft tokens, which are the last of the new tokens."""
    samples: NDArray[numpy.bool_]
    """bool [num_seqs]: True if the logits after the last token, and after each token before a draft, are needed."""
    token_ids: NDArray[numpy.int64]
    """int64 [num_tokens]: new tokens of all sequences, concatenated. NEWEST if the token is on the device."""
    continues: bool
    """True if every sequence has one new token, the last sampled one, as in the step of a captured decode graph."""
    verifies: bool = False
    """True if the step verifies drafts and otherwise only decodes, as in the step of a captured verification graph."""
    started: tuple[StartedRow, ...] = ()
    new_pages: tuple[NewPages, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    state_indices: NDArray[numpy.int32] | None = None
    """int32 [num_seqs]: index of the state slot within the row. None if no layer has a state."""
    restored: tuple[tuple[int, int], ...] = ()
    """Pairs (slot of a checkpoint, row): states to copy to rows before the step runs."""
    checkpoints: NDArray[numpy.int32] = field(default_factory=lambda: numpy.zeros((0, 3), dtype=numpy.int32))
    """int32 [num_checkpoints, 3]: see `StateMetadata.checkpoints`."""
    embedded: tuple[tuple[int, Tensor], ...] = ()
    """Pairs (index of a new token, rows): embedding rows on the host that replace the ids of this token and the following
    tokens."""
    adapters: NDArray[numpy.int32] | None = None
    """int32 [num_seqs]: adapter slot of each sequence, or NO_ADAPTER. None if no sequence uses an adapter."""
    adapter_loads: tuple[AdapterLoad, ...] = ()
    """Adapters to load into slots before the step runs."""
    shows_logits: bool = False
    """True if the step's logits are observed, so that all ranks gather them."""

    @classmethod
    def continuing(
        cls,
        rows: NDArray[numpy.int32],
        context_lens: NDArray[numpy.int32],
        new_pages: tuple[NewPages, ...] = (),
        state_indices: NDArray[numpy.int32] | None = None,
    ) -> StepInput:
        """Return the input of a step in which every sequence decodes its last sampled token: the most common step."""
        count = len(rows)
        return cls(
            rows=rows,
            query_lens=numpy.ones(count, dtype=numpy.int32),
            context_lens=context_lens,
            num_draft_tokens=numpy.zeros(count, dtype=numpy.int32),
            samples=numpy.ones(count, dtype=numpy.bool_),
            token_ids=numpy.full(count, NEWEST, dtype=numpy.int64),
            continues=True,
            new_pages=new_pages,
            state_indices=state_indices,
        )

    @property
    def num_seqs(self) -> int:
        """Number of sequences in the step."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens in the step."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampledExtras:
    """Results of a step in addition to tokens."""

    errors: Mapping[int, str]
    """Error text of a sampling sequence, keyed by its index among the sampling sequences."""
    logprobs: Mapping[int, list[TokenLogprobs]]
    """Log-probabilities of a sampling sequence's tokens, rejected drafts included, keyed as in `errors`."""
    prompt_logprobs: Mapping[int, tuple[int, list[TokenLogprobs]]]
    """Index of a sequence in the step -> position of its first scored prompt token, and the log-probabilities of each token."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Tokens of a step, for the sequences that sample, in the step's order."""

    tokens: NDArray[numpy.int64]
    """int64 [rows, drafts + 1]: accepted drafts, then the next token. The next token is NOT_A_TOKEN if the logits are NaN, and
    `sampler.NO_TOKEN_LEFT` if no token is allowed."""
    counts: NDArray[numpy.int64]
    """int64 [rows]: number of valid tokens; 1 without drafts."""
    extras: SampledExtras | None = None

    def plain_tokens(self) -> list[int] | None:
        """Return the token of each row, or None if the step has any other result."""
        if self.extras is not None or self.tokens.shape[1] != 1 or (self.tokens < 0).any():
            return None
        tokens: list[int] = self.tokens[:, 0].tolist()
        return tokens

    def token_lists(self) -> list[list[int]]:
        """Return the valid tokens of each row."""
        if self.tokens.shape[1] == 1:
            rows: list[list[int]] = self.tokens.tolist()
            return rows
        return [row[:count] for row, count in zip(self.tokens.tolist(), self.counts.tolist(), strict=True)]


NO_TOKEN_LEFT: Final = "what the request forbids leaves no token"
"""Error text for a completion whose parameters allow no next token."""


class OutputDelta(NamedTuple):
    """New output of one completion of a request. Immutable. A request has ended when all its completions have."""

    request_id: str
    completion: int
    new_token_ids: tuple[int, ...]
    """Tokens sampled since the last delta, including a stop token that ended the completion."""
    finish_reason: str | None = None
    """"stop" (end-of-text or stop token), "length" or "error". None while the completion runs."""
    error: str | None = None
    """Error text if finish_reason is "error"."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were in the cache when the sequence was admitted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities, one entry for each of new_token_ids, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt from the second token on, if requested. Set in completion 0's first delta."""
    admitted_time: float | None = None
    """Time of first admission, by time.perf_counter. Set in the delta of the first token; may be None in later deltas."""
    cache_report: Mapping[str, int] | None = None
    """Number of prompt tokens by source (`PrefixMisses.sources`), in the delta of the first token. None in later deltas."""
