"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items

import torch

from headway.core import cache
from headway.core.attention import PagedAttention
from headway.core.blocks import BlockManager
from headway.core.config import EngineConfig
from headway.core.errors import ConfigError, PromptError
from headway.core.model import Model
from headway.core.runner import Runner
from headway.core.sampling_params import SamplingParams
from headway.core.scheduler import Scheduler
from headway.core.selector import BackendSource, Selector
from headway.core.sequence import Sequence

log = logging.getLogger("headway")


class Engine:
    """Continuous batching of one model over one paged pool. Synchronous: call `step` until nothing is left."""

    def __init__(
        self, model: Model, source: BackendSource, config: EngineConfig | None = None, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        """:raises HeadwayError: options that cannot work together, with what would."""
        self.config = config = config or EngineConfig()
        self._eos = eos_token_ids
        self._vocab_size = model.vocab_size
        specs = list(model.attention_specs)
        selector = Selector(source, specs, config.attn_backend, config.kv_layout, config.block_size, config.attn_options)
        self.selection = selector.selection
        block_size = self.selection.block_size
        self.max_model_len = _max_model_len(config, model, block_size)
        config.check_budget(self.max_model_len)
        self._longer_prompts = _longer_prompts(config, self.max_model_len, model.max_position_embeddings)
        self.pool = cache.pool_size(specs, block_size, self.max_model_len, config.max_num_seqs, config.kv_cache_memory)
        self.caches = cache.allocate(specs, self.selection.layout, self.pool)
        writer = source.layout(self.selection.layout.name).load_writer(specs[0].device)
        attention = PagedAttention(specs, self.caches, writer)
        self.blocks = BlockManager(self.pool.num_blocks, block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(self.blocks, config.max_num_batched_tokens, config.max_num_seqs, config.enable_chunked_prefill)
        self._runner = Runner(model, attention, selector, block_size)
        self._device = specs[0].device
        self._seeds = torch.Generator().manual_seed(config.seed)
        log.info("attention: %s", self.selection)
        log.info("pool: %d blocks of %d tokens, %.2f GiB", self.pool.num_blocks, block_size, self.pool.num_bytes / cache.GIB)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still wants tokens."""
        return self.scheduler.has_unfinished

    def check_prompt(self, prompt_token_ids: Items[int]) -> None:
        """Check a prompt before anything is queued.

        :raises PromptError: it is empty, leaves no room for one token, or has ids outside the vocabulary.
        """
        if not prompt_token_ids:
            raise PromptError("prompt", "at least one token", "an empty prompt")
        if len(prompt_token_ids) >= self.max_model_len:
            raise PromptError(
                "prompt",
                f"at most {self.max_model_len - 1} tokens (max_model_len={self.max_model_len}, one is for the output)",
                f"{len(prompt_token_ids)} tokens",
                self._longer_prompts,
            )
        wrong = next((token for token in prompt_token_ids if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise PromptError("prompt", f"token ids from 0 to {self._vocab_size - 1}", wrong)

    def add_request(self, request_id: str, prompt_token_ids: Items[int], params: SamplingParams) -> list[Sequence]:
        """Queue a request; returns its n sequences, which `step` fills.

        :raises PromptError: see `check_prompt`.
        """
        self.check_prompt(prompt_token_ids)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        seqs = []
        for index in range(params.n):
            seq = Sequence(request_id, index, prompt_token_ids, params, stops, self._generator(params, index))
            self.scheduler.add(seq)
            seqs.append(seq)
        return seqs

    def _generator(self, params: SamplingParams, index: int) -> torch.Generator | None:
        if params.greedy:
            return None
        drawn = int(torch.randint(2**62, (), generator=self._seeds))
        seed = drawn if params.seed is None else params.seed + index
        return torch.Generator(device=self._device).manual_seed(seed)

    def step(self) -> list[Sequence]:
        """Run one step; returns the sequences that got a token, finished ones included.

        :raises BackendError: the attention backend raised; every unfinished sequence has been dropped and its blocks freed.
        """
        step = self.scheduler.schedule()
        assert step, "nothing to schedule although something is unfinished"
        try:
            tokens = iter(self._runner.run(step))
        except Exception:
            self.abort_all()
            raise
        sampled = [share.seq for share in step if share.samples]
        self.scheduler.computed(step)
        for seq in sampled:
            seq.append(next(tokens), self.max_model_len)
        if any(seq.finished for seq in sampled):
            self.scheduler.remove_finished()
        return sampled

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence from outside (a stop text was found, a caller went away) and free its blocks."""
        seq.finish(reason)
        self.scheduler.remove_finished()

    def abort_all(self) -> None:
        """Drop everything unfinished; the engine is then as new."""
        for seq in (*self.scheduler.running, *self.scheduler.waiting):
            seq.finish("abort")
        self.scheduler.remove_finished()


def _longer_prompts(config: EngineConfig, max_model_len: int, made_for: int) -> str:
    """What to do about a prompt that is too long: only what would help."""
    if max_model_len >= made_for:
        return "shorten it; the model was made for no more"
    if config.max_model_len is not None:
        return "shorten it or raise max_model_len"
    if not config.enable_chunked_prefill and max_model_len >= config.max_num_batched_tokens:
        return "shorten it, raise max_num_batched_tokens, or turn chunked prefill on"
    return "shorten it or raise kv_cache_memory"


def _max_model_len(config: EngineConfig, model: Model, block_size: int) -> int:
    made_for = model.max_position_embeddings
    if config.max_model_len is None:
        fits = cache.longest_that_fits(model.attention_specs, block_size, config.kv_cache_memory, made_for)
        if not config.enable_chunked_prefill:
            fits = min(fits, config.max_num_batched_tokens)
        if 0 < fits < made_for:
            log.info("max_model_len: %d, what the pool holds; the model was made for %d", fits, made_for)
        return max(fits, 1)
    if config.max_model_len > made_for:
        raise ConfigError("max_model_len", f"at most {made_for}, the positions the model was made for", config.max_model_len)
    return config.max_model_len
