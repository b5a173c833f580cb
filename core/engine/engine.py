"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

import torch

from headway.core.contract.errors import ConfigError, PromptError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.model import Model
from headway.core.contract.spec import AttentionSpec
from headway.core.engine import deterministic, pool
from headway.core.engine.attention import PagedAttention
from headway.core.engine.blocks import BlockManager
from headway.core.engine.config import EngineConfig
from headway.core.engine.graphs import capture_sizes
from headway.core.engine.memory import cache_memory
from headway.core.engine.runner import Launched, Runner
from headway.core.engine.scheduler import Scheduled, Scheduler
from headway.core.engine.sequence import Sequence
from headway.core.engine.stats import EngineStats
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import NOT_A_TOKEN, TORCH_SAMPLING, SamplingOps
from headway.core.select.costs import CostTable
from headway.core.select.selector import BackendSource, Selector
from headway.core.select.workload import Workload

log = logging.getLogger("headway")


class Engine:
    """Continuous batching of one model over one paged pool: call `step` until nothing is left.

    On a GPU a step is launched before the one before it has been read (async_scheduling), so that the host's work hides behind
    the device's; tokens then come one call later, and one sampled past the end of a sequence is dropped.
    """

    def __init__(
        self,
        model: Model,
        source: BackendSource,
        config: EngineConfig | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        sampling: SamplingOps = TORCH_SAMPLING,
        costs: Mapping[AttentionSpec, CostTable] | None = None,
    ) -> None:
        """sampling: how tokens are chosen, where something does it faster than torch.

        costs: measured times of each distinct layer, which `auto` obeys; None: the order that plugins propose.

        :raises HeadwayError: options that cannot work together, with what would.
        """
        specs = list(model.attention_specs)
        device = specs[0].device
        config = (config or EngineConfig()).for_device(device)
        if config.deterministic:
            config = deterministic.prepare(source, specs, config)
        self.config = config
        self._eos = eos_token_ids
        self._vocab_size = model.vocab_size
        asked = config.attn_backend, config.kv_layout, config.block_size, config.attn_options
        selector = Selector(source, specs, *asked, costs, Workload.parse(config.workload))
        self.selection = selector.selection
        if config.deterministic:
            self.selection = replace(self.selection, why="deterministic: pinned")
        block_size = self.selection.block_size
        memory = config.kv_cache_memory
        if memory is None and device.type == "cuda":
            sizes = config.step_tokens, config.max_num_seqs
            memory = cache_memory(model, selector.instances, *sizes, config.gpu_memory_utilization, device)
        self.max_model_len = _max_model_len(config, model, self.selection.layout, block_size, memory)
        config.check_budget(self.max_model_len)
        self._longer_prompts = _longer_prompts(config, self.max_model_len, model.max_position_embeddings)
        self.pool = pool.pool_size(specs, self.selection.layout, block_size, self.max_model_len, config.max_num_seqs, memory)
        self.caches = pool.allocate(specs, self.selection.layout, self.pool)
        writer = source.layout(self.selection.layout.name).load_writer(device)
        attention = PagedAttention(specs, self.caches, writer)
        self.blocks = BlockManager(self.pool.num_blocks, block_size, config.enable_prefix_caching)
        scheduler = deterministic.IndependentScheduler if config.deterministic else Scheduler
        self.scheduler = scheduler(self.blocks, config.step_tokens, config.max_num_seqs, config.enable_chunked_prefill)
        self._runner = Runner(model, attention, selector, sampling, block_size, config.max_num_seqs, self.max_model_len)
        self._flying: deque[Launched] = deque()
        """Steps that have been launched and not read yet."""
        self._seeds = torch.Generator().manual_seed(config.seed)
        self.stats = EngineStats()
        log.info("attention: %s", self.selection)
        log.info("pool: %d blocks of %d tokens, %.2f GiB", self.pool.num_blocks, block_size, self.pool.num_bytes / pool.GIB)
        if attention.debug:
            log.warning("HEADWAY_DEBUG=1: every layer is looked at for NaN, so no CUDA graphs")
        elif device.type == "cuda" and not config.enforce_eager:
            self._runner.capture(config.cudagraph_capture_sizes or capture_sizes(config.max_num_seqs))

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
        for token in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token < self._vocab_size:
                raise PromptError("prompt", f"token ids from 0 to {self._vocab_size - 1}", token)

    def add_request(self, request_id: str, prompt_token_ids: Items[int], params: SamplingParams) -> list[Sequence]:
        """Queue a request; returns its n sequences, which `step` fills.

        :raises PromptError: see `check_prompt`.
        """
        self.check_prompt(prompt_token_ids)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        seqs = []
        for index in range(params.n):
            seed = self._draw_seed() if params.seed is None else params.seed + index
            seq = Sequence(request_id, index, prompt_token_ids, params, stops, self.max_model_len, seed)
            self.scheduler.add(seq)
            seqs.append(seq)
        return seqs

    def _draw_seed(self) -> int:
        return int(torch.randint(2**62, (), generator=self._seeds))

    def step(self) -> list[Sequence]:
        """Launch the next step and read the one before it, or the same one without async_scheduling.

        Returns the sequences that got a token or failed, finished ones included. A backend that raises ends the sequences of its
        step with finish_reason "error" and the reason in `error`; the others go on.
        """
        started, waited = time.perf_counter(), self.stats.wait_seconds
        changed = self._read_until(1)  # more are left only by an interrupt
        scheduled = self.scheduler.schedule()
        assert scheduled or self._flying, "nothing to schedule although something is unfinished"
        failure: Exception | None = None
        if scheduled:
            try:
                self._flying.append(self._runner.launch(scheduled))
            except Exception as error:  # whatever a backend raises
                failure = error
            else:
                self.scheduler.launched(scheduled)
                self.stats.count(scheduled, self._flying[-1].backends, self._flying[-1].graph)
        ahead = 1 if self.config.async_scheduling and scheduled and failure is None else 0
        changed += self._read_until(ahead)
        if failure is not None:
            changed += self._recover(scheduled, failure)
        self.stats.num_preemptions = self.scheduler.num_preemptions
        self.stats.host_seconds += time.perf_counter() - started - (self.stats.wait_seconds - waited)
        return list(dict.fromkeys(changed))

    def _read_until(self, left: int) -> list[Sequence]:
        """Read the oldest steps until so many are left; an interrupt while the host waits loses none of them."""
        changed = []
        while len(self._flying) > left:
            changed += self._read(self._flying[0])
            self._flying.popleft()
        if any(seq.finished for seq in changed):
            self.scheduler.remove_finished()
        return changed

    def _read(self, launched: Launched) -> list[Sequence]:
        """Wait for a step's tokens and append them."""
        started = time.perf_counter()
        try:
            tokens = launched.wait()
        except Exception as error:  # a kernel's fault shows when the host waits for it
            return self._fail(launched.step, error)
        self.stats.wait_seconds += time.perf_counter() - started
        changed = []
        for share, token in zip(launched.sampled, tokens, strict=True):
            seq = share.seq
            seq.num_pending -= 1
            if seq.finished:
                continue
            if token == NOT_A_TOKEN:
                found = launched.first_nan or "HEADWAY_DEBUG=1 says which layer made the first"
                seq.fail(f"the logits of token {seq.num_tokens} hold a NaN; {found}")
            else:
                seq.append(token)
            changed.append(seq)
        return changed

    def _recover(self, step: list[Scheduled], error: Exception) -> list[Sequence]:
        """After a step that did not run. Returns the sequences this ends.

        Where memory was too small, smaller steps from now on let sequences wait rather than end.
        """
        tokens = sum(share.num_new_tokens for share in step)
        smallest = 1 if self.config.enable_chunked_prefill else max(share.num_new_tokens for share in step)
        if not isinstance(error, torch.OutOfMemoryError) or tokens <= smallest:
            return self._fail(step, error)
        torch.cuda.empty_cache()
        self.scheduler.max_num_batched_tokens = max(tokens // 2, smallest)
        log.warning(
            "out of memory in a step of %d tokens: steps have at most %d from now on; a lower max_num_batched_tokens or "
            "gpu_memory_utilization leaves room from the start",
            tokens,
            self.scheduler.max_num_batched_tokens,
        )
        return []

    def _fail(self, step: list[Scheduled], error: Exception) -> list[Sequence]:
        """End the sequences of a step for a fault in it."""
        log.error("a step of %d sequences failed: %s", len(step), error)
        self.blocks.forget_prefixes()  # what the step was to write may have been published already
        failed = [share.seq for share in step if not share.seq.finished]
        for seq in failed:
            seq.fail(str(error))
        self.scheduler.remove_finished()
        return failed

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
    if not config.enable_chunked_prefill and max_model_len >= config.step_tokens:
        return "shorten it, raise max_num_batched_tokens, or turn chunked prefill on"
    return "shorten it or raise kv_cache_memory"


def _max_model_len(config: EngineConfig, model: Model, layout: CacheLayout, block_size: int, memory: int | None) -> int:
    made_for = model.max_position_embeddings
    if config.max_model_len is None:
        fits = pool.longest_that_fits(model.attention_specs, layout, block_size, memory, made_for)
        if not config.enable_chunked_prefill:
            fits = min(fits, config.step_tokens)
        if 0 < fits < made_for:
            log.info("max_model_len: %d, what the pool holds; the model was made for %d", fits, made_for)
        return max(fits, 1)
    if config.max_model_len > made_for:
        raise ConfigError("max_model_len", f"at most {made_for}, the positions the model was made for", config.max_model_len)
    return config.max_model_len
