"""One completion on its way: its tokens, how far the cache holds them, and why it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from enum import Enum

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
        self.max_len = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        """Tokens of prompt and output at which it ends."""
        self.token_ids = list(prompt_token_ids)
        self.num_pending = 0
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        """"stop" or "length"; "abort" when the caller gave up, "error" with the reason in `error`."""
        self.error: str | None = None
        self.row: int | None = None
        """Its place in the engine's per-sequence buffers while it runs."""
        self.num_computed = 0
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache spared, at first admission."""
        self.num_preemptions = 0
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        """Chained hash of each full block of `token_ids`, as far as computed; kept by the block manager."""
        self.num_published = 0
        """Blocks whose names other sequences can find."""
        self.num_tabled = 0
        """Blocks entered in the runner's table."""
        self.newest_at = -1
        """Place in the sequence of the token that its row of the runner's buffer holds; -1: none."""
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.finish_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose k and v the cache does not hold yet; none once the token that ends it by length is on its way."""
        known = len(self.token_ids) + self.num_pending
        return known - self.num_computed if known < self.max_len else 0

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
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
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
        self.status, self.finish_reason, self.finish_time = Status.FINISHED, reason, time.perf_counter()
