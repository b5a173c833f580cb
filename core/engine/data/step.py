"""A step as plain data, which may go to another process: its input, what it has sampled, and what clients are told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headway.core.engine.data.adapters import AdapterLoad
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.params import SamplingParams

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
    """The cache group whose table it is."""


class PageCopy(NamedTuple):
    """A copy of the first `num_tokens` slots of a group's page into another one, before the step runs."""

    group: int
    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """Everything that the device's side must know of a step and has not learned from earlier steps.

    Steps come in order. What a step says about rows and copies is done first: all copies read before any of them writes.
    """

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
    """Which of the request's n completions."""
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
