"""Simulation of one replica under load: arriving requests, the engine's scheduler and block manager, and predicted times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy

from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.cache.checkpoints import Checkpoints
from headway.core.engine.data.pool import SMALLEST_CHUNK
from headway.core.engine.data.sequence import Sequence as Completion
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.data.step import ScheduledStep
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.params import SamplingParams
from headway.plan.model_costs import EngineMemory
from headway.plan.step_time import StepParts, StepPredictor, StepWork


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request with its arrival time and lengths."""

    arrival: float
    """Arrival time in seconds since the start of the simulation."""
    input_len: int
    output_len: int
    prefix: int = -1
    """Index of the prompt's shared prefix. -1 means no prefix."""
    prefix_len: int = 0
    """Length of the shared prefix in tokens."""


class _InFlight(NamedTuple):
    sampling: Sequence[Completion]
    end: float


@dataclass(frozen=True)
class Latencies:
    """Latencies of requests, in seconds, in the order of the requests."""

    first_token: Sequence[float]
    per_token: Sequence[float]
    """Mean time per token after the first, for each request with more than one output token."""
    seconds: float
    """Duration of the window in which tokens were counted, in seconds. The window extends from the first arrival to the last
    token unless only some requests are measured."""
    output_tokens: int
    """Number of output tokens of all requests within `seconds`."""
    num_steps: int
    num_preemptions: int
    cached_share: float
    """Fraction of prompt tokens that were prefix cache hits."""
    parts: StepParts
    """Time of a rank per output token, in microseconds, by component."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    def first_token_ms(self, percentile: float = 50.0) -> float:
        """Return a percentile of the time to first token, in milliseconds."""
        return 1e3 * float(numpy.percentile(self.first_token, percentile))

    def per_token_ms(self, percentile: float = 50.0) -> float:
        """Return a percentile of the time per later token, in milliseconds; 0 if no request has a second token."""
        return 1e3 * float(numpy.percentile(self.per_token, percentile)) if len(self.per_token) else 0.0


@dataclass
class _Times:
    request: SimulatedRequest
    arrival: float
    first: float = 0.0
    last: float = 0.0
    spared: int = 0  # prompt tokens that were prefix cache hits


@dataclass
class Replica:
    """Simulated engine. The engine's `Scheduler` chooses the sequences of each step, and a `StepPredictor` predicts the step's
    time. Steps are launched ahead, as in `EngineLoop`."""

    times: StepPredictor
    memory: EngineMemory
    in_flight: int = 1
    """Maximum number of steps with unread results when the next step is launched. 0 means that each step is read before the next
    is launched."""
    request_seconds: float = 0.0
    """Seconds from a request's arrival until the scheduler sees it."""
    _seqs: dict[str, _Times] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        memory = self.memory
        self._stats = EngineStats()
        groups = memory.pages.groups
        interval = memory.pages.checkpoint_interval
        blocks = BlockManager(
            num_pages=memory.num_pages,
            block_size=memory.pages.block_size,
            enable_prefix_caching=memory.limits.enable_prefix_caching,
            groups=groups,
            smallest_chunk=SMALLEST_CHUNK,
            checkpoints=None if memory.states is None else Checkpoints(memory.states, interval, self._stats),
        )
        limits = memory.limits
        self.scheduler = Scheduler(blocks, limits.max_num_batched_tokens, limits.max_num_seqs, stats=self._stats)
        self._parts = dict.fromkeys(StepParts.__dataclass_fields__, 0.0)
        self._measured = range(0)
        self._left = 0
        self._num_live = 0
        self._steps = self._tokens = 0

    def run(
        self, requests: Iterable[SimulatedRequest], concurrency: int | None = None, measured: range | None = None
    ) -> Latencies:
        """Run requests until all measured requests have ended. Return the latencies of the measured requests.

        requests: requests in order of arrival.
        concurrency: number of requests that run at any time. A new request arrives whenever one ends, and arrival times are
        ignored. None uses the arrival times.
        measured: indices of the requests to measure; None means all. If not all requests are measured, tokens are counted from
        the arrival of the first measured request to the arrival of the last.
        """
        coming = deque(requests)
        measured = range(len(coming)) if measured is None else measured
        begin = coming[0].arrival if coming and concurrency is None else 0.0
        now = device_free = begin + self.request_seconds
        flights: deque[_InFlight] = deque()
        marks: list[tuple[float, int]] = []
        self._measured = measured
        self._left = len(measured)
        while self._left:
            while coming and (
                coming[0].arrival + self.request_seconds <= now if concurrency is None else self._num_live < concurrency
            ):
                if len(self._seqs) in (measured[0], measured[-1]):
                    marks.append((now, self._tokens))
                self._add(coming.popleft(), None if concurrency is None else now)
            step = self.scheduler.schedule() if self.scheduler.has_unfinished else None
            if step:
                now, device_free = self._predict(step).times(now, device_free)
                flights.append(_InFlight(step.sampling, device_free))
                self.scheduler.launched(step)
            if flights and (not step or len(flights) > self.in_flight):
                flight = flights.popleft()
                now = max(now, flight.end)
                self._read(flight, now)
            elif not step:
                now = max(now, coming[0].arrival + self.request_seconds)
        window = (marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]) if len(measured) < len(self._seqs) else None
        return self._latencies(measured, begin, window)

    def _add(self, request: SimulatedRequest, arrival: float | None) -> None:
        name = str(len(self._seqs))
        self._num_live += 1
        self._seqs[name] = _Times(request, request.arrival if arrival is None else arrival)
        params = SamplingParams(max_tokens=request.output_len, ignore_eos=True)
        prompt = self._prompt(request, len(self._seqs))
        self.scheduler.add(Completion(name, 0, prompt, params, frozenset(), self.memory.limits.max_model_len))

    def _prompt(self, request: SimulatedRequest, number: int) -> list[int]:
        """Return a prompt whose tokens equal those of other prompts only in the shared prefix."""
        shared = request.prefix_len if request.prefix >= 0 else 0
        return [request.prefix] * shared + [1_000_000 + number] * (request.input_len - shared)

    def _predict(self, step: ScheduledStep) -> StepParts:
        prompts = [each for each in step.individual if each.num_new_tokens > 1]
        single = [each for each in step.individual if each.num_new_tokens == 1]
        decodes = len(step.members) + len(single)
        context = int(step.context_lens.sum()) + sum(each.context_len for each in single)
        work = StepWork(
            query_lens=[each.num_new_tokens for each in prompts],
            kv_lens=[each.context_len + each.num_new_tokens for each in prompts],
            num_decodes=decodes,
            decode_kv=context // decodes + 1 if decodes else 0,
            num_sampled=decodes + sum(each.samples for each in prompts),
        )
        parts = self.times.step(work)
        for name in self._parts:
            self._parts[name] += getattr(parts, name)
        self._steps += 1
        return parts

    def _read(self, flight: _InFlight, now: float) -> None:
        ended, append_sampled = [], self.scheduler.append_sampled
        for seq in flight.sampling:
            if len(seq.token_ids) == seq.num_prompt_tokens and not seq.finished:
                self._seqs[seq.request_id].first = now
                self._seqs[seq.request_id].spared = seq.num_cached_tokens
            if seq.in_decode_batch:  # as `StepResults` does for most tokens
                known = seq.token_ids
                known.append(0)
                if len(known) >= seq.max_len:
                    seq.end()
                    ended.append(seq)
                continue
            if seq.finished:
                append_sampled(seq, [])
                self._tokens -= 1
                continue
            append_sampled(seq, [0])
            if seq.finished:
                ended.append(seq)
        self._tokens += len(flight.sampling)
        for seq in ended:
            self._seqs[seq.request_id].last = now
            self._num_live -= 1
            self._left -= int(seq.request_id) in self._measured
        if ended:
            self.scheduler.remove_finished()

    def _latencies(self, measured: range, begin: float, window: tuple[float, int] | None) -> Latencies:
        """Return the latencies of measured requests. window: (seconds, tokens) of the window in which tokens are counted; None
        counts all tokens."""
        done = [self._seqs[str(number)] for number in measured]
        seconds, tokens = window or (max(each.last for each in done) - begin, self._tokens)
        later = [each for each in done if each.request.output_len > 1]
        return Latencies(
            first_token=[each.first - each.arrival for each in done],
            per_token=[(each.last - each.first) / (each.request.output_len - 1) for each in later],
            seconds=seconds,
            output_tokens=tokens,
            num_steps=self._steps,
            num_preemptions=self._stats.num_preemptions,
            cached_share=sum(each.spared for each in done) / sum(each.request.input_len for each in done),
            parts=StepParts(**{name: us / self._tokens for name, us in self._parts.items()}),
        )
