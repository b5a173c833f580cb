"""A step as plain data: what is scheduled, its input, its samples, and what clients are told of it."""

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
    """The sequences that decode one token in every step, as arrays that advance for all members at once, instead of sequence by
    sequence (after vLLM's persistent batch).

    A member has one token to compute, the one that the executor has sampled last, and no drafts. `Sequence.num_computed` and what
    depends on it count the batch's steps, so a member can be read like any other sequence; before more of it than its pages is
    changed, it must be taken out.
    """

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        """Members in the order of the arrays. The list is never changed in place: a step that was launched goes on holding it."""
        self.places: NDArray[numpy.int32] = _NO_MEMBERS
        """[3, members]: `row`, `state_index` and `adapter_slot` of each, which stay while a sequence decodes without drafts. The
        array is never changed in place either."""
        self._steps = StepCount()
        self._counts: NDArray[numpy.int64] = _NO_MEMBERS.astype(numpy.int64)
        """[3, members]: computed tokens minus the steps counted; steps after which the pages are full or the last token is on its
        way; steps after which a page may be named or given back."""
        self._changed: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.members)

    def context_lens(self) -> NDArray[numpy.int32]:
        """int32 [members]: cached tokens of each before the next step."""
        lens: NDArray[numpy.int32] = (self._counts[0] + self._steps.taken).astype(numpy.int32)
        return lens

    def due(self) -> list[int]:
        """Indexes of the members that cannot take the next step as they are; see `Sequence.lasts_until`."""
        places: list[int] = numpy.flatnonzero(self._counts[1] <= self._steps.taken).tolist()
        return places

    def renew(self, place: int) -> None:
        """Note that the member at this index has got pages."""
        seq = self.members[place]
        self._counts[1, place] = seq.lasts_until - self._counts[0, place]
        self._changed.append(seq)

    def step(self) -> list[int]:
        """Count a step that has been launched. Returns the indexes of the members whose pages may have been filled."""
        self._steps.taken += 1
        places: list[int] = numpy.flatnonzero(self._counts[2] <= self._steps.taken).tolist()
        return places

    def passed(self, place: int) -> None:
        """Note that the filled pages of the member at this index have been named."""
        seq = self.members[place]
        self._counts[2, place] = seq.next_boundary - self._counts[0, place]
        if seq.table_changes:
            self._changed.append(seq)

    def take_changed(self) -> list[Sequence]:
        """The members whose tables have changed since the last call; some may have no change that the executor does not know."""
        changed = self._changed
        self._changed = []
        return changed

    def add(self, seqs: Items[Sequence]) -> None:
        """Take in sequences that decode one token next; see the class."""
        if not seqs:
            return
        taken = self._steps.taken
        for seq in seqs:
            seq.join(self._steps)
        self._changed += [seq for seq in seqs if seq.table_changes]
        counts = (
            [seq.num_computed - taken for seq in seqs],
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
        """Take members out; others are left alone."""
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
        """Take all members out."""
        self.remove(self.members)


class ScheduledSequence(NamedTuple):
    """A sequence's part of a step, as the sequence was when scheduled: it moves on before the step has run."""

    seq: Sequence
    num_new_tokens: int
    """Tokens that the step computes of it, drafts included."""
    context_len: int
    """Tokens of it that the cache holds before the step."""
    samples: bool
    """Whether the logits of the last new token are wanted: not in the middle of a prompt."""
    num_draft_tokens: int = 0
    """How many of the new tokens, the last ones, are guesses to be verified."""

    @property
    def phase(self) -> Phase:
        """The phase of these tokens."""
        return Phase.DECODE if self.num_draft_tokens else Phase.of(self.num_new_tokens, self.context_len)


class ScheduledStep:
    """A step: sequences that are scheduled individually, and after them the members of the decode batch."""

    def __init__(self, individual: list[ScheduledSequence], batch: DecodeBatch | None) -> None:
        """individual: those that prefill or extend come first. batch: its members take the step; it moves on before that runs."""
        self.individual = individual
        self.members: list[Sequence] = [] if batch is None else batch.members
        places = _NO_MEMBERS if batch is None else batch.places
        self.rows: NDArray[numpy.int32] = places[0]
        self.state_indices: NDArray[numpy.int32] = places[1]
        self.adapter_slots: NDArray[numpy.int32] = places[2]
        """int32 [members] each: row, slot of the row that holds the state, and slot of the adapter."""
        self.context_lens: NDArray[numpy.int32] = _NO_MEMBERS[0] if batch is None else batch.context_lens()
        """int32 [members]: tokens that the cache holds before the step."""
        self.changed: list[Sequence] = [] if batch is None else batch.take_changed()
        """Members whose tables have changed since the step before."""

    def __len__(self) -> int:
        return len(self.individual) + len(self.members)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        yield from self.individual
        for seq, context_len in zip(self.members, self.context_lens.tolist(), strict=True):
            yield ScheduledSequence(seq, 1, context_len, True)

    @property
    def seqs(self) -> list[Sequence]:
        """Every sequence, in the step's order."""
        return [*(each.seq for each in self.individual), *self.members] if self.individual else self.members

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences whose next token the step samples."""
        return [*(each.seq for each in self.individual if each.samples), *self.members] if self.individual else self.members


NEWEST = -1
"""Stands for the token that the executor has sampled last in the same row; the host need not have seen that token."""


class StartedRow(NamedTuple):
    """A sequence that begins, or begins again, in a row: what was known of the row before is void."""

    row: int
    params: SamplingParams
    seed: int
    token_ids: tuple[int, ...] = ()
    """The tokens known so far, where the parameters ask for more than a draw (`row_needs.OF_TOKENS`)."""
    num_prompt_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that min_tokens keeps from coming."""


class NewPages(NamedTuple):
    """New pages in the table of a row, from its `start`-th page on."""

    row: int
    start: int
    pages: list[int]
    group: int = 0


class PageCopy(NamedTuple):
    """A copy of the first `num_tokens` slots of a group's page into another one, before the step runs."""

    group: int
    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """Everything the device's side must know of a step, in order; rows and copies come first, copies read before any writes."""

    rows: NDArray[numpy.int32]
    """[num_seqs]: each sequence's place in the executor's per-sequence buffers. Those that prefill or extend come first."""
    query_lens: NDArray[numpy.int32]
    """[num_seqs]: new tokens, drafts included."""
    context_lens: NDArray[numpy.int32]
    """[num_seqs]: cached tokens before the step, hence the position of the first new one."""
    num_draft_tokens: NDArray[numpy.int32]
    """[num_seqs]: how many of the new tokens, the last ones, are guesses to be verified."""
    samples: NDArray[numpy.bool_]
    """[num_seqs]: whether the logits after the last token are wanted, and with drafts those before each of them too."""
    token_ids: NDArray[numpy.int64]
    """[num_tokens]: the new tokens of all sequences, one sequence after the other; NEWEST for what only the device knows."""
    goes_on: bool
    """Whether every sequence has one new token, the one that was sampled last: what a captured decode runs."""
    verifies: bool = False
    """Whether drafts are verified, and nothing else is done but to decode: what a captured verification runs."""
    started: tuple[StartedRow, ...] = ()
    new_pages: tuple[NewPages, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    state_indices: NDArray[numpy.int32] | None = None
    """[num_seqs], where layers keep states: which slot of its row holds each sequence's."""
    restored: tuple[tuple[int, int], ...] = ()
    """(slot of a checkpoint, row): states to be copied before the step runs."""
    checkpoints: NDArray[numpy.int32] = field(default_factory=lambda: numpy.zeros((0, 3), dtype=numpy.int32))
    """[num_checkpoints, 3]: see `StateMetadata.checkpoints`."""
    embedded: tuple[tuple[int, Tensor], ...] = ()
    """(index of a new token, rows): rows of embeddings on the host that this token and the next ones have in place of ids."""
    adapters: NDArray[numpy.int32] | None = None
    """[num_seqs]: the slot of each sequence's adapter, NO_ADAPTER for one without; None: no sequence has any."""
    adapter_loads: tuple[AdapterLoad, ...] = ()
    """Adapters that slots are to hold before the step runs."""
    shows_logits: bool = False
    """Whether somebody looks at the step's logits, so that all ranks put them together."""

    @classmethod
    def going_on(
        cls,
        rows: NDArray[numpy.int32],
        context_lens: NDArray[numpy.int32],
        new_pages: tuple[NewPages, ...] = (),
        state_indices: NDArray[numpy.int32] | None = None,
    ) -> StepInput:
        """A step in which every sequence goes on with the token that was sampled last: what most steps are."""
        count = len(rows)
        return cls(
            rows=rows,
            query_lens=numpy.ones(count, dtype=numpy.int32),
            context_lens=context_lens,
            num_draft_tokens=numpy.zeros(count, dtype=numpy.int32),
            samples=numpy.ones(count, dtype=numpy.bool_),
            token_ids=numpy.full(count, NEWEST, dtype=numpy.int64),
            goes_on=True,
            new_pages=new_pages,
            state_indices=state_indices,
        )

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """New tokens in the step."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampledExtras:
    """What a step has brought beside tokens."""

    errors: Mapping[int, str]
    """Why a sampling sequence cannot go on, by its index among the sampling sequences."""
    logprobs: Mapping[int, list[TokenLogprobs]]
    """Log-probabilities of a sampling sequence's tokens, refused drafts included, by the same index."""
    prompt_logprobs: Mapping[int, tuple[int, list[TokenLogprobs]]]
    """Log-probabilities of prompt tokens, by the sequence's index in the step: position of the first, and an entry for each."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The tokens of a step, for the sequences that sample, in the step's order."""

    tokens: NDArray[numpy.int64]
    """[rows, drafts + 1]: the verified drafts and the token after them; NOT_A_TOKEN where the logits hold a NaN, and
    NO_TOKEN_LEFT where nothing may come."""
    counts: NDArray[numpy.int64]
    """[rows]: how many of the tokens hold: 1 without drafts."""
    extras: SampledExtras | None = None

    def plain_tokens(self) -> list[int] | None:
        """The token of each row, where a step has brought nothing else; else None."""
        if self.extras is not None or self.tokens.shape[1] != 1 or (self.tokens < 0).any():
            return None
        tokens: list[int] = self.tokens[:, 0].tolist()
        return tokens

    def token_lists(self) -> list[list[int]]:
        """The tokens of each row that hold."""
        if self.tokens.shape[1] == 1:
            rows: list[list[int]] = self.tokens.tolist()
            return rows
        return [row[:count] for row, count in zip(self.tokens.tolist(), self.counts.tolist(), strict=True)]


NO_TOKEN_LEFT: Final = "what the request forbids leaves no token"
"""Part of the error of a completion that was ended by its own parameters, not by a fault."""


class OutputDelta(NamedTuple):
    """What a step has added to one completion of a request. Immutable; a request has ended when all its completions have."""

    request_id: str
    completion: int
    new_token_ids: tuple[int, ...]
    """Sampled since the last delta; a stop token that ended the completion is the last."""
    finish_reason: str | None = None
    """"stop" (end-of-text or stop token), "length" or "error"; None while the completion runs."""
    error: str | None = None
    """What went wrong, where finish_reason is "error"."""
    num_cached_tokens: int = 0
    """Prompt tokens whose k and v were in the cache already when the sequence was admitted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each of new_token_ids, where they are wanted."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Entries of the prompt's tokens from the second on, where they are wanted: with the first token of completion 0."""
    admitted_time: float | None = None
    """When the sequence was first admitted (time.perf_counter): set with its first token, afterwards perhaps None."""
