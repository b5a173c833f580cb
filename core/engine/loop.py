"""The engine loop: queues requests, runs one step at a time, and returns tokens."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import CacheLayout
from headway.core.contract.model import embedding_size
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.text_plugins import Proposer
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.cache.checkpoints import Checkpoints
from headway.core.engine.cache.usage import CacheUsage, Occupancy, cache_usage, occupancy
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import CACHE, WEIGHTS
from headway.core.engine.data.request_limits import CheckedRequest, RequestLimits
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.stats import EngineSnapshot, EngineStats, StepClock
from headway.core.engine.data.step import OutputDelta, ScheduledSequence, ScheduledStep
from headway.core.engine.execution.host_rows import Launched
from headway.core.engine.execution.local_executor import DeviceParts, LocalExecutor, SharedParts
from headway.core.engine.offload.offloader import offloader_of
from headway.core.engine.offload.page_copier import PageCopier
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.engine.ranks.ranked_executor import RankedExecutor
from headway.core.engine.recorder import Recorder
from headway.core.engine.scheduling.adapter_slots import AdapterTable
from headway.core.engine.scheduling.deterministic import IndependentScheduler, prepare_deterministic
from headway.core.engine.scheduling.drafting import Drafting
from headway.core.engine.scheduling.scheduler import AdmissionQueue, Scheduler
from headway.core.engine.scheduling.step_input import StepResults, delta_of, prepare, smaller_budget
from headway.core.sampling.sampler import seed_of
from headway.core.select.choice import Selection
from headway.core.select.costs import CostTable
from headway.core.select.request import LayerSpecs
from headway.core.speculation.proposers import StepTimes

log = logging.getLogger("headway")


class _LaunchedStep(NamedTuple):
    """A launched step whose tokens the host has not read yet."""

    handle: Launched
    seqs: list[Sequence]
    sampling: list[Sequence]  # The sequences for which this step samples a token


class EngineLoop:
    """Continuous batching over one executor: call `step` while `has_unfinished` is True. Only one thread at a time may call its
    methods.

    With `config.async_scheduling`, a step is launched before the previous step is read, so the host works while the device does.
    Tokens then arrive one call later, and a token sampled past the end of a sequence is dropped. With speculative decoding, a
    step is read before the next step is launched, because drafts need tokens that the host has read. The client's work on the
    tokens still overlaps with the next step.
    """

    def __init__(
        self,
        executor: LocalExecutor,
        config: EngineConfig,
        limits: RequestLimits,
        eos_token_ids: frozenset[int] = frozenset(),
        scheduler: type[Scheduler] = Scheduler,
        drafting: Drafting | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """config: result of `for_device`. drafting: proposer of drafts, which does not change outputs, or None. now: clock, in
        seconds."""
        self.config = config
        self.limits = limits
        self.capacity = executor.capacity
        self.stats = EngineStats()
        self.clock = StepClock(self.stats, now)
        pool = executor.capacity.pool
        pages, states = pool.page_format, executor.capacity.states
        self.blocks = BlockManager(
            num_pages=pool.num_pages,
            block_size=pages.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            groups=pages.groups,
            smallest_chunk=pool.smallest_chunk,
            checkpoints=None if states is None else Checkpoints(states, pages.checkpoint_interval, self.stats),
            stats=self.stats,
            ahead=limits.ahead,
        )
        self.adapters = None if executor.adapters is None else AdapterTable(executor.adapters)
        """Adapters that requests may name. None means that the model has no adapter slots."""
        self._offloader = offloader_of(self.blocks, executor.mover, pages.page_bytes, config, self.stats, now)
        self.scheduler = scheduler(
            self.blocks,
            max_num_batched_tokens=config.step_tokens,
            max_num_seqs=config.max_num_seqs,
            enable_chunked_prefill=config.enable_chunked_prefill,
            by_priority=limits.by_priority,
            offloader=self._offloader,
            stats=self.stats,
            adapters=self.adapters,
        )
        self._admission = AdmissionQueue(self.scheduler, config.enable_prefix_caching)
        self.scheduler.drafting = drafting
        self._results = StepResults(self.scheduler)
        self.executor = executor
        self._eos = eos_token_ids
        self._overlaps = bool(config.async_scheduling)
        self._live: dict[str, list[Sequence]] = {}  # The unfinished sequences of each request
        self._in_flight: deque[_LaunchedStep] = deque()
        self._unreported: list[OutputDelta] = []  # Deltas for `step` to return; they survive an interrupt
        self.asleep: tuple[str, ...] = ()
        """Parts of the executor that sleep (weights, cache). Requests are refused while any part sleeps."""
        self._arrivals = count()
        self._seeds = torch.Generator().manual_seed(config.seed)
        self.recorder: Recorder | None = None
        """Recorder of the last steps. None if config.record_steps is 0."""
        self._fault = ""  # Reason for a record at the end of the step
        self._recorded = -math.inf  # Time of the last record of a fault

    @property
    def selection(self) -> Selection[CacheLayout]:
        """The backend of each phase, with the layout and block size."""
        return self.executor.selection

    @property
    def has_unfinished(self) -> bool:
        """True if any request is unfinished or has unreported tokens."""
        return self.scheduler.has_unfinished or self._admission.occupied or bool(self._unreported)

    def add_request(self, request_id: str, request: CheckedRequest) -> None:
        """Queue a request, whose n completions arrive as deltas from `step`. request: result of `limits.checked`.

        :raises ConfigError: if the engine is asleep, the id belongs to an unfinished request, or the parameters name a plugin
        that this process lacks. Also if the request's adapter cannot be used.
        """
        if self.asleep:
            raise ConfigError("the engine", "to be awake", f"one whose {' and '.join(self.asleep)} sleep", "wake_up() wakes it")
        if request_id in self._live:
            raise ConfigError("request_id", "an id not in use", repr(request_id))
        params = request.params
        endless = params.ignore_eos and params.structured_outputs is None  # the end of a structured output ends its text
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if endless else self._eos)
        ready = self.executor.prepare(params)
        wanted = request.lora_request
        adapter = None if wanted is None else self.adapter_table.claim(wanted, params.num_drawn)
        seqs, queue_key = [], (request.priority, next(self._arrivals))
        for index in range(params.num_drawn):
            seq = Sequence(
                request_id=request_id,
                index=index,
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                stop_token_ids=stops,
                max_model_len=self.capacity.max_model_len,
                seed=int(torch.randint(2**62, (), generator=self._seeds)) if params.seed is None else seed_of(params.seed, index),
                adapter=adapter,
            )
            seq.queue_key = queue_key
            seqs.append(seq)
            if index == 0 and params.prompt_logprobs is not None:
                params = replace(params, prompt_logprobs=None)  # all completions use the prompt logprobs of the first
        self._live[request_id] = seqs
        self._admission.add(list(seqs), ready)

    @property
    def adapter_table(self) -> AdapterTable:
        """The adapters that requests may name. :raises ConfigError: if the model has no adapter slots."""
        if self.adapters is None:
            raise ConfigError("an adapter", "an engine that was started with enable_lora=True", "one without")
        return self.adapters

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only its completion `index`, without returning a delta, and free its pages. Unknown requests are
        ignored."""
        ended = [seq for seq in self._live.get(request_id, ()) if index in (None, seq.index)]
        for seq in ended:
            seq.finish("abort")
        self._remove(ended)
        if self._unreported:  # left by an interrupt
            unreported = self._unreported
            self._unreported = [
                each for each in unreported if each.request_id != request_id or index not in (None, each.completion)
            ]

    def abort_all(self) -> None:
        """End every request."""
        for request_id in list(self._live):
            self.abort(request_id)

    def forget_prefixes(self, everywhere: bool = False) -> None:
        """Forget cached prompts, so that later requests recompute them. everywhere: True to also forget prompts on disk."""
        self.blocks.forget_prefixes(everywhere)

    def retune(self, costs: Mapping[AttentionSpec, CostTable] | None) -> None:
        """Choose attention kernels anew by these times, between two requests. Cached prompts are forgotten, because new kernels
        are warmed up on their pages. costs: times of each distinct layer; None means rank order."""
        assert not self.has_unfinished
        self.read_launched()
        self.blocks.forget_prefixes()
        self.executor.retune(costs)

    def sleep(self, lost: Items[Tensor] = ()) -> None:
        """Free the memory of weights and cache until `wake` is called, and forget cached prompts. lost: see
        `LocalExecutor.sleep`.

        :raises ConfigError: if a request is unfinished, or the engine has several ranks.
        """
        if self.has_unfinished:
            need, hint = "an engine without requests", "let them end, or abort them"
            raise ConfigError("sleep", need, f"{len(self._live)} unfinished ones", hint)
        self.read_launched()
        self.blocks.forget_prefixes()
        if not self.asleep:
            self.executor.sleep(lost)
            self.asleep = (WEIGHTS, CACHE)

    def wake(self, part: str) -> None:
        """Allocate the memory of one part again; see `LocalExecutor.wake`. Does nothing if the part is awake."""
        if part in self.asleep:
            self.executor.wake(part)
            self.asleep = tuple(each for each in self.asleep if each != part)

    def step(self) -> list[OutputDelta]:
        """Launch the next step, and read the previous step or, without async_scheduling, the launched step.

        Returns deltas for completions that got a token or failed. If a backend raises an error, the completions of its step end
        with finish_reason "error" and the reason in `error`. Other completions continue.

        :raises ExecutorLostError: if no further step can run.
        """
        self.clock.begin_step()
        drafting = self.scheduler.drafting  # Drafts need tokens that have been read
        self._read_until(1 if drafting is None or drafting.rests else 0)  # only an interrupt leaves more than one
        self._admit_prepared()
        scheduled = self._schedule()
        if self._offloader is not None:
            self._offloader.flush(wait=not (scheduled or self._in_flight or self._unreported))
        failure = self._launch(scheduled) if scheduled else None
        runs_ahead = self._overlaps and bool(scheduled) and failure is None
        fault = self._read_until(1 if runs_ahead else 0)
        if drafting is not None:
            drafting.stepped(scheduled, not runs_ahead, self.stats)
        if failure is not None:
            self._recover(list(scheduled), failure, fault)
        if self._offloader is not None and not self.scheduler.has_unfinished:
            self.read_launched()  # the last step wrote the token that ended a sequence, and may still fail
            self._offloader.flush(idle=True)
        if self._fault and self.recorder is not None:
            self.record_fault(self._fault)
            self._fault = ""
        self.clock.end_step()
        if self.config.check_books:
            self.check_books()
        deltas = self._unreported
        self._unreported = []
        return deltas

    def check_books(self) -> None:
        """Check that the books of cache pages and adapters balance. :raises BooksError: if those of pages do not."""
        self.blocks.check_integrity(self.scheduler.holders)
        if self._offloader is not None:
            self._offloader.tier.check_integrity(idle=False)
        if self.adapters is not None:
            self.adapters.check_integrity()

    def _admit_prepared(self) -> None:
        idle = not (self.scheduler.has_unfinished or self._in_flight or self._unreported)
        for seqs, reason in self._admission.poll(idle):
            for seq in seqs:
                seq.fail(reason)
                self._unreported.append(delta_of(seq, []))
            self._remove(seqs)

    def _schedule(self) -> ScheduledStep:
        self.clock.enter("schedule")
        scheduled = self.scheduler.schedule(all_read=not self._in_flight)
        progress = scheduled or self._in_flight or self._unreported or self._admission.occupied
        assert progress or self.scheduler.restoring, "unfinished, and nothing to schedule"
        self.clock.enter("prepare" if scheduled else "")
        return scheduled

    def _launch(self, scheduled: ScheduledStep) -> Exception | None:
        """Launch a step on the executor. Returns the error if the launch failed, otherwise None."""
        step = prepare(scheduled, self.blocks.groups, states=self.blocks.checkpoints is not None, adapters=self.adapters)
        began = self.clock.enter("launch")
        try:
            handle = self.executor.launch(step)
        except Exception as error:  # any error of a backend
            if self.recorder is not None:
                self.recorder.add(step, scheduled.seqs, None)
            self.executor.failed(error)
            return error
        if self.recorder is not None:
            self.recorder.add(step, scheduled.seqs, handle)
        self._in_flight.append(_LaunchedStep(handle, scheduled.seqs, scheduled.sampling))
        self.scheduler.launched(scheduled)
        self._admission.launched(scheduled)
        self.stats.count(step, handle)
        if self._offloader is not None:
            self._offloader.timer.launched(began)
        return None

    def read_launched(self) -> None:
        """Read every launched step; the next `step` returns their tokens."""
        self._read_until(0)

    def _read_until(self, left: int) -> Exception | None:
        """Read the oldest launched steps until `left` steps remain. An interrupt loses no step. Returns the error of a failed
        step, or None."""
        fault: Exception | None = None
        while len(self._in_flight) > left:
            fault = self._read(self._in_flight[0]) or fault
            self._in_flight.popleft()
            self.clock.enter("")
        return fault

    def _read(self, step: _LaunchedStep) -> Exception | None:
        """Wait for a step's tokens and append them to the step's sampling sequences. Returns the step's error, or None."""
        self.clock.enter("wait")
        try:
            sampled = step.handle.wait()
        except Exception as error:  # a kernel's fault appears when the host waits for it
            self.executor.failed(error)
            lost = [seq for each in self._in_flight for seq in each.seqs]  # later steps read what the failed step wrote
            while len(self._in_flight) > 1:
                self._in_flight.pop()
            if self._offloader is not None:
                self._offloader.timer.forget()
            self._fail(lost, error)
            return error
        if self._offloader is not None:
            self._offloader.timer.read()
        self.clock.enter("read")
        deltas, ended = self._results.take(step.seqs, step.sampling, sampled, step.handle.first_nan)
        self._unreported += deltas
        if ended:
            self._fault = next((seq.error for seq in ended if seq.error is not None and "hold a NaN" in seq.error), self._fault)
        self._remove(ended)
        return None

    def _recover(self, step: list[ScheduledSequence], error: Exception, fault: Exception | None) -> None:
        """End the sequences of a failed step, or retry with smaller steps if memory ran out. fault: error of the previous step,
        or None."""
        smaller = None if fault else smaller_budget(step, error, self.config.enable_chunked_prefill)
        if smaller is None:
            self._fail([scheduled.seq for scheduled in step], fault or error)
        else:
            self.scheduler.max_num_batched_tokens = smaller
            if self.blocks.checkpoints is not None:
                self.scheduler.recompute([scheduled.seq for scheduled in step])
                self.blocks.forget_prefixes()  # pages that the failed step was to write

    def _fail(self, step: Iterable[Sequence], error: Exception) -> None:
        failed = [seq for seq in dict.fromkeys(step) if not seq.finished]
        log.error("engine: a step of %d sequences failed: %s", len(failed), error)
        self._fault = f"a step failed: {type(error).__name__}"
        for seq in failed:
            seq.fail(str(error))
        self._remove(failed)
        self.blocks.forget_prefixes()  # pages that the failed step was to write may be published already
        self._unreported += [delta_of(seq, []) for seq in failed]

    def _remove(self, ended: Items[Sequence]) -> None:
        if not ended:
            return
        self.scheduler.remove_finished()
        self._admission.ended(ended)
        for seq in ended:
            if self.scheduler.drafting is not None:
                self.scheduler.drafting.finish(seq)
            if seq.adapter is not None and self.adapters is not None:
                self.adapters.release(seq.adapter)
            live = self._live[seq.request_id]
            live.remove(seq)
            if not live:
                del self._live[seq.request_id]

    def record(self, reason: str = "requested") -> Path:
        """Write the last steps to a file, between two steps, and return its path.

        :raises ConfigError: if record_steps is 0, or the folder cannot be written to.
        """
        if self.recorder is None:
            raise ConfigError("a record", "record_steps of at least 1", "0", "start with record_steps=16")
        self.read_launched()
        return self.recorder.write(reason)

    def record_fault(self, reason: str, seconds: float = 60.0) -> None:
        """Write a record, unless the recorder is off or has written one for a fault in the last `seconds`. Errors are logged."""
        now = time.monotonic()
        if self.recorder is None and not seconds:  # somebody asked for it
            log.warning("recorder: %s, but no steps are kept; record_steps=16 (--record-steps 16) keeps some", reason)
        if self.recorder is None or now < self._recorded + seconds:
            return
        self._recorded = now
        try:
            self.recorder.write(reason)
        except Exception as error:
            log.error("recorder: %s, but no file was written: %s", reason, error)

    def occupancy(self, most: int) -> Occupancy:
        """Return the engine's occupancy, with `most` holdings at most, in about 1 us per sequence and 30 ns per cached page."""
        return occupancy(self.snapshot(), self.scheduler.holders, self.scheduler.running, most)

    def cache_usage(self) -> CacheUsage:
        """Return each sequence's current use of the cache."""
        pages = self.capacity.pool.page_format
        return cache_usage(
            self.blocks,
            pages.block_size,
            pages.page_bytes,
            self.scheduler.holders,
            0 if self._offloader is None else self._offloader.num_blocks,
            self.capacity.states,
            0 if self._offloader is None else self._offloader.num_states,
        )

    def snapshot(self) -> EngineSnapshot:
        """Return the engine's current state and its totals since the start."""
        blocks, scheduler, offloader = self.blocks, self.scheduler, self._offloader
        num_checkpoints = len(blocks.checkpoints) if blocks.checkpoints is not None else 0
        return EngineSnapshot(
            time=time.perf_counter(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._admission.num_waiting,
            num_blocks=blocks.num_pages,
            num_used_blocks=blocks.num_pages - blocks.num_free,
            num_cached_blocks=blocks.num_cached,
            totals=self.stats.snapshot(),
            num_kept_states=num_checkpoints,
            kept_state_bytes=num_checkpoints * blocks.checkpoints.slots.bytes_per_slot if blocks.checkpoints is not None else 0,
            num_offloaded_blocks=0 if offloader is None else offloader.num_blocks,
            num_offloaded_states=0 if offloader is None else offloader.num_states,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts(SharedParts):
    """Parts from which an engine is made."""

    layers: LayerSpecs | None = None
    """Specs of the model's layers. None means that the specs are made from config.kv_cache_dtype, with scales of 1."""
    config: EngineConfig | None = None
    eos_token_ids: frozenset[int] = frozenset()
    proposer: Proposer | None = None
    """Proposer of draft tokens. It changes the speed but not the output. None means no speculation."""
    measured: bool = True
    """True to verify drafts only if measured step times show a gain, False to verify all drafts."""
    weights: str = ""
    """Digest that identifies the model's weights in the disk folder of cached pages."""
    name: str = ""
    """Name of the model, for records."""
    processes: RankProcesses | None = None
    """Processes of ranks 1 and above. None with one rank. This process is rank 0."""


def make_engine(parts: EngineParts) -> EngineLoop:
    """Return the engine loop of a model, with its executor, ready for requests. :raises HeadwayError: if options conflict."""
    model = parts.model
    proposer = parts.proposer
    config = parts.config or EngineConfig()
    layers = parts.layers or LayerSpecs.of(model, config.kv_cache_dtype)
    config = config.for_device(layers.device)
    chunks = 2 if config.invariance is Invariance.BATCH else 1  # `IndependentScheduler` computes half the budget at a time
    if layers.ahead * chunks > config.step_tokens:
        need = f"at least {layers.ahead * chunks}, for the first tokens that see each other by an attention rule (ahead)"
        raise ConfigError("max_num_batched_tokens", need, config.step_tokens)
    if config.record_steps and any(spec.rule is not None for spec in layers.cached):
        raise ConfigError("record_steps", "layers without an attention rule, which a record cannot contain", config.record_steps)
    if config.deterministic:
        config = prepare_deterministic(parts.source, layers, config)
    longest = 1 if proposer is None else config.num_speculative_tokens + 1
    given: dict[str, Any] = {each.name: getattr(parts, each.name) for each in fields(SharedParts)}
    device = DeviceParts(**given | {"layers": layers, "config": config, "max_decode_len": longest})
    if parts.processes is None:
        copier = partial(PageCopier, config=config, weights=parts.weights) if config.offload_bytes[0] else None
        executor = LocalExecutor(device, copier)
    else:
        executor = RankedExecutor(device, parts.processes)
    drafting = None
    if proposer is not None:
        times = StepTimes(executor.selector.decode_us) if parts.measured else None
        drafting = Drafting(proposer, model.vocab_size, config.num_speculative_tokens, times)
    limits = RequestLimits.of(
        config,
        executor.capacity.max_model_len,
        model.max_position_embeddings,
        model.vocab_size,
        embedding_size(model),
        layers.ahead,
    )
    scheduler = IndependentScheduler if config.invariance is Invariance.BATCH else Scheduler
    engine = EngineLoop(executor, config, limits, parts.eos_token_ids, scheduler, drafting)
    executor.capture()
    if config.record_steps:
        engine.recorder = Recorder(executor, config, model, parts.name)
    return engine
