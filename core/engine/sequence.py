"""One completion on its way: its tokens, how far the cache holds them, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import Enum

from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.params import SamplingParams


class Status(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """The engine's record of one completion.

    The first `num_computed` tokens have their k and v in `blocks`, or will have once the steps already launched have run.
    `num_pending` tokens after `token_ids` are being sampled by those steps; the device knows them before the host does.
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
    ) -> None:
        """seed: of its random draws; together with the token's position it decides them, whatever runs beside it."""
        self.request_id = request_id
        self.index = index
        """Which of the request's n completions."""
        self.params = params
        self.stop_token_ids = stop_token_ids
        self.seed = seed
        self.num_prompt_tokens = len(prompt_token_ids)
        most = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        self.max_len = min(most, max_model_len)
        """Tokens of prompt and output at which it ends."""
        self.token_ids = list(prompt_token_ids)
        self.num_pending = 0
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        """"stop" or "length"; "abort" when the caller gave up, "error" with the reason in `error`."""
        self.error: str | None = None
        self.row: int | None = None
        """Its place in the executor's per-sequence buffers while it runs."""
        self.num_computed = 0
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache spared, at first admission."""
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt's tokens from the second on, as far as they have come, where they are wanted."""
        self.blocks: list[int] = []
        self.prefix_copy: tuple[int, int] | None = None
        """A block of somebody else and how many of its first tokens are copied into the last block of the prefix."""
        self.block_hashes: list[bytes] = []
        """Chained hash of each full block of `token_ids`, as far as computed; kept by the block manager."""
        self.num_published = 0
        """Blocks whose names other sequences can find."""
        self.num_blocks_sent = 0
        """Blocks that the executor has been told of."""
        self.newest_at = -1
        """Position in the sequence of the sampled token that the executor holds for this row; -1: none."""
        self.draft_token_ids: list[int] = []
        """A speculator's guesses of the tokens after `token_ids`, for the next step to verify."""
        self.num_unverified = 0
        """Drafts in `num_computed` whose verification has been launched and not been read."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose k and v the cache does not hold yet; 0 once the token that ends the sequence by length is on its way.

        While drafts are being verified nobody knows where the sequence goes on, and it is 0 as well.
        """
        known = len(self.token_ids) + self.num_pending
        return known - self.num_computed if known < self.max_len and not self.num_unverified else 0

    def goes_on(self, block_size: int) -> bool:
        """Whether it decodes one token next, without drafts, for which its blocks have room."""
        computed, known = self.num_computed, len(self.token_ids) + self.num_pending
        return (
            known - computed == 1
            and 0 < computed < len(self.blocks) * block_size
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
        if token in self.stop_token_ids:
            self.finish("stop")
        elif len(self.token_ids) >= self.max_len:
            self.finish("length")

    def fail(self, error: str) -> None:
        """End it for a fault that is not the caller's."""
        self.error = error
        self.finish("error")

    def finish(self, reason: str) -> None:
        """End it."""
        self.status, self.finish_reason = Status.FINISHED, reason
