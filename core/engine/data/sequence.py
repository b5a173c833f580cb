"""Sequence: the engine's record of one completion, with its tokens, its cached length, and its finish reason."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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
    """Prompt of embedding rows, as a list of zero token ids, so that lengths, chunks and pages are counted as usual."""

    rows: Tensor
    """[num_tokens, hidden_size]: embedding rows, in host memory."""
    digest: bytes
    """Digest of the embedding rows: only prompts with equal rows share cached keys and values."""

    @classmethod
    def of(cls, given: object) -> EmbeddedPrompt:
        """Return a prompt from embedding rows [num_tokens, hidden_size], or from a batch that contains one such prompt.

        :raises PromptError: if `given` is neither.
        """
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
    """State of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class PageTable:
    """Pages of a sequence's tokens in one cache group."""

    page_size: int
    pages: list[int] = field(default_factory=list)
    """Pages in token order. The null page replaces freed pages."""
    num_published: int = 0
    """Number of pages that other sequences can find by name."""
    num_freed_pages: int = 0
    """Number of pages at the start of the sequence that left the group's window and were freed."""

    @property
    def held(self) -> list[int]:
        """Pages that the sequence references."""
        return self.pages[self.num_freed_pages :]


@dataclass(slots=True)
class StepCount:
    """Number of steps that all members of a `DecodeBatch` have taken together."""

    num_steps: int = 0


_NO_STEPS = StepCount()  # Count of every sequence outside a `DecodeBatch`: it stays 0


class PrefixCopy(NamedTuple):
    """A copy of the first `num_tokens` tokens of another sequence's page into a page of this sequence."""

    group: int
    source: int
    num_tokens: int


TableChange = tuple[int, int, list[int]]
"""New pages in the table of a group, from index `start` on: (group, start, pages)."""


class Sequence:
    """The engine's record of one completion.

    The keys and values of the first `num_computed` tokens are in the pages of `tables`, or will be once the launched steps have
    run. The launched steps sample `num_pending` tokens after `token_ids`, which the device knows before the host does.

    While the sequence is a member of a `DecodeBatch`, the batch counts the sequence's steps; see `join`.
    """

    index: int
    """Index of the completion within its request."""
    seed: int
    """Random seed. The draw of a token depends only on the seed and the token's position, not on the rest of the batch."""
    queue_key: tuple[int, int] = (0, 0)
    """Priority and arrival index of the request. With priorities, the smallest key runs first."""
    max_len: int
    """Maximum length of prompt plus output, in tokens."""
    in_decode_batch: bool = False
    """True if the sequence is a member of a `DecodeBatch`."""
    error: str | None = None
    """Error text if `finish_reason` is "error"."""
    finish_reason: str | None = None
    """"stop", "length", "abort" (by the caller) or "error". None while the sequence is unfinished."""
    row: int | None = None
    """Row in the executor's per-sequence buffers while the sequence runs."""
    started: bool = False
    """True if the executor has been sent the data of the sequence's row."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache at first admission."""
    num_held: int = 0
    """Number of prompt tokens that every group had cached at the last lookup. Some of them may still have to be computed."""
    num_restored: int = 0
    """Number of tokens restored from host memory or disk before the sequence was admitted."""
    cache_report: Mapping[str, int] | None = None
    """Number of prompt tokens by source, set at first admission; see `PrefixMisses.sources`."""
    admitted_time: float | None = None
    """Time of first admission in seconds, on the clock of time.perf_counter."""
    prompt_logprobs: list[TokenLogprobs]
    """Log-probabilities of the prompt's tokens from the second on, as far as computed, if requested."""
    draft_token_ids: list[int]
    """Draft tokens after `token_ids`, for the next step to verify."""
    num_unverified: int = 0
    """Number of draft tokens in `num_computed` whose verification has been launched but not read."""

    embedded: EmbeddedPrompt | None
    """The prompt's embedding rows. None if the prompt has token ids."""
    adapter: KnownAdapter | None
    """LoRA adapter of the sequence. None means the base model."""
    adapter_slot: int = NO_ADAPTER
    """Adapter slot while the sequence runs."""
    prefix_root: bytes
    """Parent digest of the sequence's first block. It distinguishes sequences with equal token ids but different keys, because of
    an adapter or embedding rows."""
    num_passed: int = 0
    """Number of sequences with other adapters that overtook this one while it waited for an adapter slot."""

    status = Status.WAITING
    num_preemptions = 0
    _steps = _NO_STEPS
    _num_computed = _num_pending = 0
    _newest_at = -1

    # Managed by the block manager:
    tables: list[PageTable]
    """One table per cache group while the sequence references pages."""
    capacity: int = 0
    """Number of tokens that fit in the sequence's pages, in every group."""
    next_boundary: int = 0
    """Number of known tokens at which the next page can be published or freed."""
    prefix_copies: list[PrefixCopy]
    """Copies that the next step must make first. The sequence references the source pages until the copies are launched."""
    table_changes: list[TableChange]
    """Changes of the sequence's tables that have not been sent to the executor."""
    block_hashes: list[bytes]
    """Chained hash of each full block of `token_ids`, as far as computed."""

    # For models whose layers keep states:
    state_index: int = 0
    """Index, within the row's state slots, of the slot with the sequence's state. Nonzero only after accepted drafts."""
    restored_from: int | None = None
    """Slot of the checkpoint that the next step must first copy to the row."""
    held_state: int | None = None
    """Slot of a checkpoint that was reserved before the sequence got a row. The slot must not be overwritten before the step that
    starts from it is launched."""
    junction: int = 0
    """Number of tokens after which the prompt diverges from a cached prompt: a state is worth saving at this position."""
    checkpoints: list[Checkpoint]
    """States that the next step must save, with slots reserved for them."""

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
        if params.cache_salt is not None:
            self.prefix_root += hashlib.sha256(params.cache_salt.encode("utf-8", "surrogatepass")).digest()

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens that the host knows."""
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Number of tokens whose keys and values are in the cache, or will be after the launched steps."""
        return self._num_computed + self._steps.num_steps

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        assert not self.in_decode_batch, "a member of a decode batch leaves it first"
        self._num_computed = count

    @property
    def num_pending(self) -> int:
        """Number of tokens that launched steps are sampling."""
        return self.num_computed + 1 - len(self.token_ids) if self.in_decode_batch else self._num_pending

    @num_pending.setter
    def num_pending(self, count: int) -> None:
        assert not self.in_decode_batch, "a member of a decode batch leaves it first"
        self._num_pending = count

    @property
    def newest_at(self) -> int:
        """Position of the last sampled token that the executor stores for the sequence's row. -1 if there is none."""
        return self._newest_at + self._steps.num_steps

    @newest_at.setter
    def newest_at(self, position: int) -> None:
        assert not self.in_decode_batch, "a member of a decode batch leaves it first"
        self._newest_at = position

    def join(self, steps: StepCount) -> None:
        """Join the decode batch whose steps are counted by `steps`. The sequence must have one token to compute: the newest,
        which the executor stores."""
        assert self.continues()
        assert self.newest_at == self.num_computed
        self._num_computed -= steps.num_steps
        self._newest_at -= steps.num_steps
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
        """Number of computed tokens at which decoding must pause, because the pages are full or the last token is pending."""
        return min(self.capacity, self.max_len - 1)

    @property
    def num_to_compute(self) -> int:
        """Number of tokens not yet in the cache. 0 while the last token is pending, or drafts are being verified."""
        known = len(self.token_ids) + self.num_pending
        return known - self.num_computed if known < self.max_len and not self.num_unverified else 0

    def num_drafts(self, budget: int) -> int:
        """Return the number of draft tokens to verify after the newest token, or 0 if the host does not know the newest token
        yet. budget: number of tokens left in the step's token budget."""
        if self.num_pending or self.num_to_compute != 1:
            return 0
        return max(min(len(self.draft_token_ids), MAX_DRAFT_TOKENS, budget, self.max_len - self.num_tokens - 1), 0)

    @property
    def num_known(self) -> int:
        """Number of computed tokens that the host has seen, excluding tokens that are still being sampled."""
        return min(self.num_computed, len(self.token_ids))

    def continues(self) -> bool:
        """Return whether the sequence decodes one token next, without drafts, and its pages have room for the token."""
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
        """True if the logits of all prompt tokens are still needed, so that no token may come from the cache."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def finished(self) -> bool:
        """True if the sequence has ended."""
        return self.status is Status.FINISHED

    def append(self, token: int) -> None:
        """Append a sampled token. A stop token, or the last token that max_len allows, ends the sequence."""
        self.token_ids.append(token)
        if token in self.stop_token_ids or len(self.token_ids) >= self.max_len:
            self.end()

    def end(self) -> None:
        """End the sequence with its last token, which is a stop token or the last token that max_len allows."""
        self.finish("stop" if self.token_ids[-1] in self.stop_token_ids else "length")

    def fail(self, error: str) -> None:
        """End the sequence because of an error that the caller did not cause."""
        self.error = error
        self.finish("error")

    def finish(self, reason: str) -> None:
        """End the sequence with this finish reason."""
        self.status = Status.FINISHED
        self.finish_reason = reason
