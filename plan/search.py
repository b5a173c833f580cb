"""Search over all layouts of a model on one kind of GPU. Each layout is rejected by size or memory, or simulated and ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from headway.core.contract.errors import ConfigError
from headway.models.config import DecoderConfig
from headway.plan.attention_times import AttentionTimes, MeasuredLayer, Source
from headway.plan.demand import Demand
from headway.plan.devices import H200, GpuKind, Utilisation
from headway.plan.model_costs import (
    EngineLimits,
    EngineMemory,
    RankCosts,
    WeightPrecision,
    check_cache_dtype,
    engine_memory,
    rank_costs,
)
from headway.plan.simulation import Latencies, Replica
from headway.plan.step_time import StepPredictor

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_FINEST: Final = 8  # minimum difference of refined batch sizes, in sequences
_MIN_SERVED: Final = 0.9  # minimum share of the requested tokens that a replica must generate; below it the queue grows
_MOST_SEEN: Final = 1000  # maximum number of requests that fill the prefix cache before measuring
_SIMULATED = 200  # number of measured requests in a simulation of arrivals, in addition to the number running at once


@dataclass(frozen=True)
class Layout:
    """Options of one engine, except its maximum number of sequences."""

    size: int
    """Tensor-parallel size: number of GPUs of the engine."""
    kv_cache_dtype: str
    weights: WeightPrecision

    def __str__(self) -> str:
        cache = "" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} cache"
        weights = "" if self.weights.name == "model" else f", {self.weights.name} weights"
        return f"tensor-parallel size {self.size}{cache}{weights}"


@dataclass(frozen=True)
class FleetPlan:
    """One layout at one batch size on a number of GPUs, with simulated results."""

    layout: Layout
    batch: int
    """Batch size: max_num_seqs of each engine."""
    replicas: int
    num_gpus: int
    tokens_per_second: float
    """Output tokens per second of the whole fleet."""
    tokens_per_second_per_gpu: float
    """Output tokens per second per GPU. This counts all given GPUs or, if the demand has a rate, only the GPUs that the replicas
    use."""
    first_token_ms: float
    """Time to first token in milliseconds, at the percentile of the limits. The same percentile applies to `per_token_ms`."""
    per_token_ms: float
    memory_bytes: float
    """Memory per GPU in bytes."""
    cache_tokens: int
    attention: Source
    latencies: Latencies
    reason: str = ""
    """Description of the limit that the plan exceeds most; empty if the plan meets all limits."""

    @property
    def meets(self) -> bool:
        """True if the plan meets the limits."""
        return not self.reason

    @property
    def tokens_per_second_per_user(self) -> float:
        """Tokens per second of one request after its first token."""
        return 1e3 / self.per_token_ms if self.per_token_ms else 0.0


@dataclass(frozen=True)
class RefusedLayout:
    """A layout that cannot start."""

    layout: Layout
    reason: str


@dataclass
class FleetSearch:
    """Search over layouts for one model, kind of GPU and demand."""

    config: DecoderConfig
    dtype: torch.dtype
    gpu: GpuKind
    num_gpus: int
    demand: Demand
    measured: Sequence[MeasuredLayer] = ()
    """Crossover tables for this kind of GPU."""
    reached: Utilisation = H200
    refused: list[RefusedLayout] = field(default_factory=list, init=False)
    plans: list[FleetPlan] = field(default_factory=list, init=False)
    """All simulated plans, including those that miss a limit."""
    full_load: list[FleetPlan] = field(default_factory=list, init=False)
    """Plans that use all GPUs at full load, for every layout and batch size. If the demand has a rate, none of these plans is
    selected."""

    def __post_init__(self) -> None:
        """:raises ConfigError: if there is no GPU."""
        if self.num_gpus < 1:
            raise ConfigError("--num-gpus", "at least 1", self.num_gpus)
        self._attention = AttentionTimes(self.gpu, self.reached, self.measured)

    @staticmethod
    def layouts(sizes: Sequence[int], caches: Sequence[str], formats: Sequence[WeightPrecision]) -> list[Layout]:
        """Return all layouts of these tensor-parallel sizes, KV cache types and weight formats."""
        return [Layout(size, cache, weights) for size in sizes for cache in caches for weights in formats]

    def run(self, layouts: Sequence[Layout], advance: Callable[[], None] = lambda: None) -> list[FleetPlan]:
        """Simulate all layouts. For each layout, return the best plan that meets the limits, best layout first; `plans` lists all
        plans."""
        for layout in layouts:
            self._try(layout)
            advance()
        best: dict[Layout, FleetPlan] = {}
        for plan in sorted((plan for plan in self.plans if plan.meets), key=self._rank):
            best.setdefault(plan.layout, plan)
        return list(best.values())

    def _rank(self, plan: FleetPlan) -> tuple[float, ...]:
        """Return a sort key: with a rate, fewest GPUs, then lowest latency; without a rate, highest throughput per GPU."""
        if self.demand.rate is not None:
            return plan.num_gpus, plan.per_token_ms
        return (-plan.tokens_per_second_per_gpu, plan.per_token_ms)

    def closest(self) -> tuple[FleetPlan, str] | None:
        """Return the plan closest to its limits and the limit that it exceeds most; None if no plan was simulated."""
        if not self.plans:
            return None
        return min(((plan, self._missed(plan)[1]) for plan in self.plans), key=lambda pair: self._missed(pair[0])[0])

    def _try(self, layout: Layout) -> None:
        """Simulate a layout at full load with increasing batch sizes and, if there is a rate, the fleet that the rate needs."""
        reason = self._obstacle(layout)
        if reason:
            self._refuse(layout, reason)
            return
        try:
            times = self._times(layout)
        except ConfigError as error:
            self._refuse(layout, f"sizes: needs {error.reason.need} ({error.reason.hint})")
            return
        curve = list[FleetPlan]()
        memory: EngineMemory | None = None
        for batch in BATCHES:
            try:
                larger = self._memory(times.costs, batch)
            except ConfigError as error:
                if memory is None:
                    self._refuse(layout, f"memory: needs {error.reason.need}, has {error.reason.got}")
                break
            if memory is not None and larger.num_tokens < batch * self.demand.max_model_len:
                break  # further sequences would only wait for cache blocks
            memory = larger
            curve.append(self._at_full_load(layout, batch, times, memory))
            limit = self.demand.limits.per_token_ms
            if limit is not None and curve[-1].per_token_ms > limit:
                self._refine(curve, times)
                break  # larger batches are slower
        self.full_load += curve
        if self.demand.rate is None:
            self.plans += curve
        elif memory is not None:
            self.plans.append(self._with_rate(curve, times, memory))

    def _refine(self, curve: list[FleetPlan], times: StepPredictor) -> None:
        """Simulate one more batch size, between the last two of a curve, at which the time per token should just meet its
        limit."""
        limit, last = self.demand.limits.per_token_ms, curve[-1]
        if limit is None or len(curve) < 2 or last.batch - curve[-2].batch < 2 * _FINEST:
            return
        before = curve[-2]
        share = (limit - before.per_token_ms) / (last.per_token_ms - before.per_token_ms)
        batch = int(before.batch + share * (last.batch - before.batch)) // _FINEST * _FINEST
        if before.batch < batch < last.batch:
            curve.insert(-1, self._at_full_load(last.layout, batch, times, self._memory(times.costs, batch)))

    def _times(self, layout: Layout) -> StepPredictor:
        costs = rank_costs(self.config, self.dtype, layout.size, layout.kv_cache_dtype, layout.weights)
        return StepPredictor(self.gpu, costs, self.reached, self._attention)

    def _refuse(self, layout: Layout, reason: str) -> None:
        self.refused.append(RefusedLayout(layout, reason))

    def _obstacle(self, layout: Layout) -> str:
        size = layout.size
        if size > self.num_gpus:
            return f"{size} GPUs for one replica, of {self.num_gpus}"
        if size > self.gpu.gpus_per_host:
            return f"{size} GPUs are more than a host's {self.gpu.gpus_per_host}"
        return check_cache_dtype(self.config, layout.kv_cache_dtype)

    def _memory(self, costs: RankCosts, batch: int) -> EngineMemory:
        limits = EngineLimits(batch, self.demand.max_model_len, enable_prefix_caching=self.demand.prefix_len > 0)
        return engine_memory(self.gpu, costs, limits)

    def _replica(self, times: StepPredictor, memory: EngineMemory) -> Replica:
        return Replica(times, memory, request_seconds=1e-6 * self.reached.request_us)

    def _at_full_load(self, layout: Layout, batch: int, times: StepPredictor, memory: EngineMemory) -> FleetPlan:
        """Return the plan that uses all GPUs, with replicas that always run `batch` requests."""
        requests, measured = self.demand.full_load(batch)
        found = self._replica(times, memory).run(requests, batch, measured)
        replicas = self.num_gpus // layout.size
        return self._plan(layout, batch, times, memory, found, replicas, found.tokens_per_second * replicas)

    def _plan(
        self,
        layout: Layout,
        batch: int,
        times: StepPredictor,
        memory: EngineMemory,
        found: Latencies,
        replicas: int,
        total: float,
    ) -> FleetPlan:
        """Return a plan, with the reason if it misses the limits. total: output tokens per second of all replicas."""
        limits, used = self.demand.limits, replicas * layout.size
        plan = FleetPlan(
            layout=layout,
            batch=batch,
            replicas=replicas,
            num_gpus=used,
            tokens_per_second=total,
            tokens_per_second_per_gpu=total / (self.num_gpus if self.demand.rate is None else used),
            first_token_ms=found.first_token_ms(limits.percentile),
            per_token_ms=found.per_token_ms(limits.percentile),
            memory_bytes=memory.used_bytes,
            cache_tokens=memory.num_tokens,
            attention=times.attention_source,
            latencies=found,
        )
        return replace(plan, reason=self._missed(plan)[1])

    def _missed(self, plan: FleetPlan) -> tuple[float, str]:
        """Return (relative excess over the limit exceeded most, reason); (0 or less, "") if all limits are met."""
        limits = self.demand.limits
        share = "all" if limits.percentile == 100 else f"{limits.percentile:g} %"
        missed = []
        for what, got, limit in (
            ("first token", plan.first_token_ms, limits.first_token_ms),
            ("time per token", plan.per_token_ms, limits.per_token_ms),
        ):
            if limit is not None:
                missed.append((got / limit - 1, f"{what} {got:.4g} ms, limit {limit:g} ms for {share} of requests"))
        if self.demand.rate is not None:
            wanted = self.demand.rate * self.demand.mean_output_len
            able = plan.tokens_per_second
            missed.append((wanted / able - 1.001, f"throughput {able:,.0f} tokens/s, {wanted:,.0f} arrive"))
        most = max(missed, default=(0.0, ""))
        return most if most[0] > 0 else (most[0], "")

    def _with_rate(self, curve: Sequence[FleetPlan], times: StepPredictor, memory: EngineMemory) -> FleetPlan:
        """Return the plan with the fewest replicas that serve the rate within the limits, found by simulating one replica. If no
        number of replicas is enough, return a plan that uses all GPUs.

        curve: plans at full load, from which the first guess is made.
        memory: engine memory for the largest batch size, an upper bound that a replica rarely reaches.
        """
        assert self.demand.rate is not None
        full, wanted = curve[-1], self.demand.rate * self.demand.mean_output_len
        most = self.num_gpus // full.layout.size
        if wanted > 1.03 * full.tokens_per_second:
            return full
        able = max(self._within(curve), wanted / most)
        number = min(most, math.ceil(wanted / able))
        tried = self._arriving(full, times, memory, number)
        step = max(1, number // 32)
        while not tried.meets and number < most:
            number, step = min(number + step, most), 2 * step
            tried = self._arriving(full, times, memory, number)
        best, step = tried, max(1, number // 32)
        while best.meets and number > step:
            number -= step
            tried = self._arriving(full, times, memory, number)
            if not tried.meets:
                break
            best = tried
        return best

    def _within(self, curve: Sequence[FleetPlan]) -> float:
        """Return the output tokens per second of one replica at the limit of the time per token, interpolated on the curve, or at
        the largest batch size if no plan exceeds the limit."""
        limit = self.demand.limits.per_token_ms
        able = [plan.latencies.tokens_per_second for plan in curve]
        if limit is None or curve[-1].per_token_ms <= limit or len(curve) == 1:
            return able[-1]
        before, after = curve[-2].per_token_ms, curve[-1].per_token_ms
        return able[-2] + (able[-1] - able[-2]) * max(limit - before, 0.0) / (after - before)

    def _arriving(self, full: FleetPlan, times: StepPredictor, memory: EngineMemory, replicas: int) -> FleetPlan:
        """Return the plan of `replicas` replicas at the arrival rate, measured without the first and last requests."""
        demand = self.demand
        assert demand.rate is not None
        lasts = 1e-3 * full.per_token_ms * demand.output_len
        running = math.ceil(min(full.batch, demand.rate / replicas * lasts))
        seen = min(2 * demand.beginnings_of(replicas), _MOST_SEEN) if demand.prefix_len else 0
        requests = demand.arrivals(replicas, _SIMULATED + max(running, seen) + running)
        measured = range(max(running, seen), len(requests) - running)
        if len(measured) < _SIMULATED:  # arrivals from a file
            third = len(requests) // 3
            measured = range(third, len(requests) - third) if third > 1 else range(len(requests))
        found = self._replica(times, memory).run(requests, measured=measured)
        window = requests[measured[0] : measured[-1]]
        total = demand.rate * demand.mean_output_len
        if len(measured) < len(requests):
            arrived = sum(each.output_len for each in window) / (requests[measured[-1]].arrival - window[0].arrival + 1e-9)
            served = found.tokens_per_second / arrived
            total *= 1.0 if served > _MIN_SERVED else served
        return self._plan(full.layout, full.batch, times, memory, found, replicas, total)
