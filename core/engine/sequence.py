"""One completion on its way: its tokens, how far the cache holds them, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from headway.core.engine.config import MAX_DRAFT_TOKENS
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.params import SamplingParams


class Status(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class PageTable:
    """Which pages hold a sequence's tokens in one group of layers."""

    page_size: int
    """Tokens of a page."""
    pages: list[int] = field(default_factory=list)
    """In the order of the tokens; the null page stands for those that were given back."""
    num_published: int = 0
    """Pages whose names other sequences can find."""
    num_given_back: int = 0
    """Pages at the start that lie behind the group's window, and are not held any more."""

    @property
    def held(self) -> list[int]:
        """The pages that the sequence holds."""
        return self.pages[self.num_given_back :]


@dataclass(slots=True)
class StepCount:
    """Steps that all members of a `DecodeBatch` have taken together."""

    taken: int = 0


_APART = StepCount()
"""Of a sequence that takes its steps by itself: it stays 0."""


class PrefixCopy(NamedTuple):
    """The first `num_tokens` tokens of somebody else's page are to be copied into a sequence's own."""

    group: int
    source: int
    num_tokens: int


TableChange = tuple[int, int, list[int]]
"""A group, and the pages that stand in its table from the `start`-th on: (group, start, pages)."""


class Sequence:
    """The engine's record of one completion.

    The first `num_computed` tokens have their k and v in the pages of `tables`, or will have once the steps already launched have
    run.
    `num_pending` tokens after `token_ids` are being sampled by those steps; the device knows them before the host does.

    While the sequence is a member of a `DecodeBatch`, the batch counts its steps; see `join`.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        max_model_len: int,
        seed: int = 0,
        turn: tuple[int, int] = (0, 0),
    ) -> None:
        """seed: of its random draws; together with the token's position it decides them, whatever runs beside it."""
        self.request_id = request_id
        self.index = index
        """Which of the request's n completions."""
        self.params = params
        self.stop_token_ids = stop_token_ids
        self.seed = seed
        self.turn = turn
        """Its request's priority, and how many requests came before: where priorities count, lower ones are served first."""
        self.num_prompt_tokens = len(prompt_token_ids)
        most = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        self.max_len = min(most, max_model_len)
        """Tokens of prompt and output at which it ends."""
        self.token_ids = list(prompt_token_ids)
        self.together = False
        """Whether it is a member of a `DecodeBatch`."""
        self._steps = _APART
        self._num_computed = self._num_pending = 0
        self._newest_at = -1
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        """"stop" or "length"; "abort" when the caller gave up, "error" with the reason in `error`."""
        self.error: str | None = None
        self.row: int | None = None
        """Its place in the executor's per-sequence buffers while it runs."""
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache spared, at first admission."""
        self.admitted_time: float | None = None
        """When that was, on the clock of time.perf_counter."""
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt's tokens from the second on, as far as they have come, where they are wanted."""
        self.tables: list[PageTable] = []
        """One for each cache group while it holds pages; kept by the block manager, as are the next six."""
        self.capacity = 0
        """Tokens for which its pages have room, in every group."""
        self.next_boundary = 0
        """Known tokens from which on a page can be named or given back."""
        self.prefix_copies: list[PrefixCopy] = []
        """What the next step must copy before it computes the rest; it holds their sources until that has been launched."""
        self.table_changes: list[TableChange] = []
        """What the executor has not been told of."""
        self.block_hashes: list[bytes] = []
        """Chained hash of each full block of `token_ids`, as far as computed."""
        self.started = False
        """Whether the executor knows it in its row."""
        self.draft_token_ids: list[int] = []
        """A speculator's guesses of the tokens after `token_ids`, for the next step to verify."""
        self.num_unverified = 0
        """Drafts in `num_computed` whose verification has been launched and not been read."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose k and v the cache holds, or will hold; see the class."""
        return self._num_computed + self._steps.taken

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        assert not self.together, "a member of a decode batch leaves it first"
        self._num_computed = count

    @property
    def num_pending(self) -> int:
        """Tokens that launched steps are sampling."""
        return self.num_computed + 1 - len(self.token_ids) if self.together else self._num_pending

    @num_pending.setter
    def num_pending(self, count: int) -> None:
        assert not self.together, "a member of a decode batch leaves it first"
        self._num_pending = count

    @property
    def newest_at(self) -> int:
        """Position in the sequence of the sampled token that the executor holds for this row; -1: none."""
        return self._newest_at + self._steps.taken

    @newest_at.setter
    def newest_at(self, position: int) -> None:
        assert not self.together, "a member of a decode batch leaves it first"
        self._newest_at = position

    def join(self, steps: StepCount) -> None:
        """From now on it takes the steps that are counted here. It has one token to compute: the newest, which the executor
        holds."""
        assert self.goes_on()
        assert self.newest_at == self.num_computed
        self._num_computed -= steps.taken
        self._newest_at -= steps.taken
        self._steps, self.together = steps, True

    def leave(self) -> None:
        """From now on it takes its steps by itself."""
        computed, pending = self.num_computed, self.num_pending
        self.together = False
        """Whether it is a member of a `DecodeBatch`."""
        self._steps, self.together = _APART, False
        self._num_computed = self._newest_at = computed
        self._num_pending = pending

    @property
    def lasts_until(self) -> int:
        """Computed tokens at which it cannot go on decoding as it is: its pages are full, or its last token is on its way."""
        return min(self.capacity, self.max_len - 1)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose k and v the cache does not hold yet; 0 once the token that ends the sequence by length is on its way.

        While drafts are being verified nobody knows where the sequence goes on, and it is 0 as well.
        """
        known = len(self.token_ids) + self.num_pending
        return known - self.num_computed if known < self.max_len and not self.num_unverified else 0

    def num_drafts(self, budget: int) -> int:
        """Guesses that are verified beside the newest token, which must be known to the host. budget: tokens left beside that."""
        if self.num_pending or self.num_to_compute != 1:
            return 0
        return max(min(len(self.draft_token_ids), MAX_DRAFT_TOKENS, budget, self.max_len - self.num_tokens - 1), 0)

    @property
    def num_known(self) -> int:
        """Computed tokens that the host has seen; a token still being sampled is not."""
        return min(self.num_computed, len(self.token_ids))

    def goes_on(self) -> bool:
        """Whether it decodes one token next, without drafts, for which its pages have room."""
        computed, known = self.num_computed, len(self.token_ids) + self.num_pending
        return (
            known - computed == 1
            and 0 < computed < self.capacity
            and known < self.max_len
            and not self.draft_token_ids
            and not self.num_unverified
        )

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether the logits after every token of the prompt are still wanted, so that none may be spared."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The completion so far; a stop token that ended it is the last."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether it ended."""
        return self.status is Status.FINISHED

    def append(self, token: int) -> None:
        """Add a sampled token and see whether it ends the sequence."""
        self.token_ids.append(token)
        if token in self.stop_token_ids or len(self.token_ids) >= self.max_len:
            self.end()

    def end(self) -> None:
        """End it with its last token, which is one that stops it, or fills it up."""
        self.finish("stop" if self.token_ids[-1] in self.stop_token_ids else "length")

    def fail(self, error: str) -> None:
        """End it for a fault that is not the caller's."""
        self.error = error
        self.finish("error")

    def finish(self, reason: str) -> None:
        """End it."""
        self.status, self.finish_reason = Status.FINISHED, reason
