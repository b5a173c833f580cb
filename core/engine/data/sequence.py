"""One completion on its way: its tokens, how far the cache holds them, and why it ended."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.adapters import NO_ADAPTER
from headway.core.contract.errors import PromptError
from headway.core.engine.data.adapters import KnownAdapter
from headway.core.engine.data.config import MAX_DRAFT_TOKENS
from headway.core.engine.data.state_slots import Checkpoint
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.params import SamplingParams

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class EmbeddedPrompt(list[int]):
    """Token ids that are all 0, for rows given in place of embeddings, so that lengths, chunks and pages are counted as usual."""

    rows: Tensor
    """[num_tokens, hidden_size], on the host."""
    digest: bytes
    """Tells these rows from others: keys and values in the cache are shared by prompts of equal rows alone."""

    @classmethod
    def of(cls, given: object) -> EmbeddedPrompt:
        """Take rows [num_tokens, hidden_size], or one batch of them. :raises PromptError: anything else."""
        if not isinstance(given, Tensor) or given.is_nested:
            got = "a nested tensor" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise PromptError("prompt_embeds", "a torch.Tensor [num_tokens, hidden_size]", got)
        rows = given.detach()
        rows = rows[0] if rows.dim() == 3 and rows.shape[0] == 1 else rows
        if rows.dim() != 2 or rows.dtype not in _DTYPES or rows.layout != torch.strided or rows.is_meta:
            kind = "" if rows.layout == torch.strided else f", {str(rows.layout).removeprefix('torch.')}"
            got = f"{list(given.shape)} of {_name(rows.dtype)}{kind}{' without elements (meta)' if rows.is_meta else ''}"
            need = f"a dense tensor [num_tokens, hidden_size] of {', '.join(map(_name, _DTYPES))}"
            raise PromptError("prompt_embeds", need, got)
        made = cls([0] * rows.shape[0])
        made.rows = rows.to("cpu", copy=True).contiguous()
        made.digest = hashlib.blake2b(made.rows.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        return made


class Status(Enum):
    """How far a sequence has come."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class PageTable:
    """Which pages hold a sequence's tokens in one group of layers."""

    page_size: int
    pages: list[int] = field(default_factory=list)
    """Pages in the order of the tokens; the null page stands for those that were given back."""
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


_NO_STEPS = StepCount()  # The count of every sequence that is not in a `DecodeBatch`: it stays 0


class PrefixCopy(NamedTuple):
    """A copy of the first `num_tokens` tokens of another sequence's page into a sequence's own page."""

    group: int
    source: int
    num_tokens: int


TableChange = tuple[int, int, list[int]]
"""New pages in the table of a group, from the `start`-th on: (group, start, pages)."""


class Sequence:
    """The engine's record of one completion.

    The first `num_computed` tokens have their k and v in the pages of `tables`, or will have once the steps already launched have
    run. `num_pending` tokens after `token_ids` are being sampled by those steps; the device knows them before the host does.

    While the sequence is a member of a `DecodeBatch`, the batch counts its steps; see `join`.
    """

    index: int
    """Which of the request's n completions."""
    seed: int
    """Seed of the random draws; seed and position of a token decide its draw, whatever runs beside the sequence."""
    turn: tuple[int, int] = (0, 0)
    """The request's priority, and how many requests came before: where priorities count, lower turns are served first."""
    max_len: int
    """Tokens of prompt and output at which the sequence ends."""
    in_decode_batch: bool = False
    """Whether the sequence is a member of a `DecodeBatch`."""
    error: str | None = None
    """What went wrong, where `finish_reason` is "error"."""
    finish_reason: str | None = None
    """"stop" or "length"; "abort" when the caller gave it up, "error" with the reason in `error`."""
    row: int | None = None
    """The sequence's place in the executor's per-sequence buffers while it runs."""
    started: bool = False
    """Whether the executor knows the sequence in its row."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared, at first admission."""
    admitted_time: float | None = None
    """When the sequence was first admitted, on the clock of time.perf_counter."""
    prompt_logprobs: list[TokenLogprobs]
    """Log-probabilities of the prompt's tokens from the second on, as far as they have come, where they are wanted."""
    draft_token_ids: list[int]
    """A speculator's guesses of the tokens after `token_ids`, for the next step to verify."""
    num_unverified: int = 0
    """Drafts in `num_computed` whose verification has been launched and not been read."""

    embedded: EmbeddedPrompt | None
    """The prompt's rows of embeddings, where its tokens have no ids."""
    adapter: KnownAdapter | None
    """What the model computes it with; None: the model alone."""
    adapter_slot: int = NO_ADAPTER
    """The slot of its adapter while it runs."""
    prefix_root: bytes
    """What stands before the first block in the names of its blocks: what tells equal token ids with other keys apart."""
    num_passed: int = 0
    """Sequences with other adapters that were admitted before it while no slot was free for its own."""

    status = Status.WAITING
    num_preemptions = 0
    _steps = _NO_STEPS
    _num_computed = _num_pending = 0
    _newest_at = -1

    # Kept by the block manager:
    tables: list[PageTable]
    """One for each cache group while the sequence holds pages."""
    capacity: int = 0
    """Tokens for which its pages have room, in every group."""
    next_boundary: int = 0
    """Known tokens from which on a page can be named or given back."""
    prefix_copies: list[PrefixCopy]
    """What the next step must copy before it computes the rest; the sequence holds the sources until that has been launched."""
    table_changes: list[TableChange]
    """Changes of its tables that the executor has not been told of."""
    block_hashes: list[bytes]
    """Chained hash of each full block of `token_ids`, as far as computed."""

    # Of a model whose layers keep states:
    state_index: int = 0
    """Which slot of its row holds its state: not the first one where drafts have been verified."""
    restored_from: int | None = None
    """The slot of a checkpoint that the next step must copy to the row before anything else."""
    held_state: int | None = None
    """The same slot, where it was taken before the sequence has a row: nothing may overwrite it until that step."""
    junction: int = 0
    """Tokens at which its prompt leaves another one that the cache holds: a state is worth keeping there."""
    checkpoints: list[Checkpoint]
    """What the next step must keep, in slots that are reserved for it."""

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        max_model_len: int,
        seed: int = 0,
        adapter: KnownAdapter | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.params = params
        self.stop_token_ids = stop_token_ids
        self.seed = seed
        self.num_prompt_tokens = len(prompt_token_ids)
        most = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        self.max_len = min(most, max_model_len)
        self.token_ids = list(prompt_token_ids)
        self.embedded = prompt_token_ids if isinstance(prompt_token_ids, EmbeddedPrompt) else None
        self.prompt_logprobs = []
        self.draft_token_ids = []
        self.tables = []
        self.prefix_copies = []
        self.table_changes = []
        self.block_hashes = []
        self.checkpoints = []
        self.adapter = adapter
        self.prefix_root = b"".join(each.digest for each in (adapter, self.embedded) if each is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output that the host knows."""
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose k and v the cache holds, or will hold; see the class."""
        return self._num_computed + self._steps.taken

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        assert not self.in_decode_batch, "a member of a decode batch leaves it first"
        self._num_computed = count

    @property
    def num_pending(self) -> int:
        """Tokens that launched steps are sampling."""
        return self.num_computed + 1 - len(self.token_ids) if self.in_decode_batch else self._num_pending

    @num_pending.setter
    def num_pending(self, count: int) -> None:
        assert not self.in_decode_batch, "a member of a decode batch leaves it first"
        self._num_pending = count

    @property
    def newest_at(self) -> int:
        """Position in the sequence of the sampled token that the executor holds for this row; -1: none."""
        return self._newest_at + self._steps.taken

    @newest_at.setter
    def newest_at(self, position: int) -> None:
        assert not self.in_decode_batch, "a member of a decode batch leaves it first"
        self._newest_at = position

    def join(self, steps: StepCount) -> None:
        """Join the decode batch that counts these steps, with one token to compute: the newest, which the executor holds."""
        assert self.goes_on()
        assert self.newest_at == self.num_computed
        self._num_computed -= steps.taken
        self._newest_at -= steps.taken
        self._steps = steps
        self.in_decode_batch = True

    def leave(self) -> None:
        """Leave the decode batch, and count steps individually again."""
        computed, pending = self.num_computed, self.num_pending
        self._steps = _NO_STEPS
        self.in_decode_batch = False
        self._num_computed = self._newest_at = computed
        self._num_pending = pending

    @property
    def lasts_until(self) -> int:
        """Computed tokens at which the sequence cannot go on decoding: its pages are full, or its last token is on its way."""
        return min(self.capacity, self.max_len - 1)

    @property
    def num_to_compute(self) -> int:
        """Tokens without k and v in the cache; 0 while the last token is on its way, or drafts are being verified."""
        known = len(self.token_ids) + self.num_pending
        return known - self.num_computed if known < self.max_len and not self.num_unverified else 0

    def num_drafts(self, budget: int) -> int:
        """Drafts that a step verifies beside the newest token, which the host must know. budget: tokens left in the step."""
        if self.num_pending or self.num_to_compute != 1:
            return 0
        return max(min(len(self.draft_token_ids), MAX_DRAFT_TOKENS, budget, self.max_len - self.num_tokens - 1), 0)

    @property
    def num_known(self) -> int:
        """Computed tokens that the host has seen: not those that are still being sampled."""
        return min(self.num_computed, len(self.token_ids))

    def goes_on(self) -> bool:
        """Whether the sequence decodes one token next, without drafts, and its pages have room for that token."""
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
        """The prompt's tokens."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The completion so far; a stop token that ended it is the last."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.status is Status.FINISHED

    def append(self, token: int) -> None:
        """Add a sampled token, and end the sequence if the token does."""
        self.token_ids.append(token)
        if token in self.stop_token_ids or len(self.token_ids) >= self.max_len:
            self.end()

    def end(self) -> None:
        """End the sequence with its last token, which is a stop token or the last that it may have."""
        self.finish("stop" if self.token_ids[-1] in self.stop_token_ids else "length")

    def fail(self, error: str) -> None:
        """End the sequence for a fault that is not the caller's."""
        self.error = error
        self.finish("error")

    def finish(self, reason: str) -> None:
        """End the sequence for this reason."""
        self.status = Status.FINISHED
        self.finish_reason = reason
