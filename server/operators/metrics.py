"""Metrics of /metrics in Prometheus' text format, with the names that dashboards for vLLM and llm-d expect."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from headway.compat.vllm_views import COUNTERS
from headway.core.engine.data.stats import EngineSnapshot, EngineStats
from headway.outputs import RequestMetrics


class Histogram:
    """Counts of values by upper bound. Not thread-safe, but much faster than prometheus_client, since every token adds a
    value."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: ascending upper bounds. Larger values are counted in the bucket for infinity."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds in Prometheus' notation, each with the number of values up to the bound."""
        total, listed = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            listed.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return listed


Samples = Iterable[tuple[Sequence[str], float]]


class Labels:
    """Factory for metric families whose samples all have the labels of one model."""

    def __init__(self, model_name: str) -> None:
        self._names = ("model_name", "engine")
        self._values = (model_name, "0")

    def gauge(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        """Return a gauge. samples: pairs (values of `labels`, value of the gauge)."""
        return self._filled(GaugeMetricFamily(name, text, labels=[*self._names, *labels]), samples)

    def counter(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        """Return a counter; see `gauge`."""
        return self._filled(CounterMetricFamily(name, text, labels=[*self._names, *labels]), samples)

    def histogram(self, name: str, text: str, buckets: Sequence[tuple[str, float]], total: float) -> Metric:
        """Return a histogram. total: the sum of all values."""
        family = HistogramMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, buckets, total)
        return family

    def refused(self, counts: Mapping[str, int]) -> Metric:
        """Return the counter of error responses. counts: status -> number of responses."""
        samples = (((status,), count) for status, count in counts.items())
        return self.counter("headway:requests_refused", "Requests answered by an error.", samples, "status")

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
        for values, value in samples:
            family.add_metric([*self._values, *values], value)
        return family


PROCESS: Final = ProcessCollector(registry=None)
"""`process_*`: CPU time, memory, open files and start time of the server's process, on Linux."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_FIRST: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN: Final = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_SECONDS: Final = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_COUNT: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": ("Seconds from a request's arrival to its first token.", _FIRST),
    "inter_token_latency_seconds": ("Seconds from a token to the next.", _TOKEN),
    "request_time_per_output_token_seconds": ("Seconds per token after the first, of each request.", _TOKEN),
    "e2e_request_latency_seconds": ("Seconds from a request's arrival to its end.", REQUEST_SECONDS),
    "request_queue_time_seconds": ("Seconds from a request's arrival to its first step.", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("Seconds from a request's first step to its first token.", REQUEST_SECONDS),
    "request_decode_time_seconds": ("Seconds from a request's first token to its last.", REQUEST_SECONDS),
    "request_inference_time_seconds": ("Seconds from a request's first step to its last token.", REQUEST_SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _COUNT),
    "request_generation_tokens": ("Tokens of a request's completions.", _COUNT),
    "request_max_num_generation_tokens": ("Tokens of a request's longest completion.", _COUNT),
    "request_params_max_tokens": ("Maximum number of tokens that a request asks for, if it sets one.", _COUNT),
    "request_params_n": ("Completions per request.", (1, 2, 5, 10, 20, 50, 100)),
}
_REASONS: Final = ("stop", "length", "abort", "error")


class Metrics:
    """Counts and times of the server's requests. For use only in the server's event loop."""

    def __init__(self, model_name: str, block_size: int) -> None:
        """model_name: label of every metric. block_size: tokens per KV cache block."""
        self._labels = Labels(model_name)
        self._block_size = block_size
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._reasons: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))
        self.refused: Counter[str] = Counter()
        """Status -> number of error responses."""
        self.first_token = self._histograms["time_to_first_token_seconds"].observe
        self.next_tokens = self._histograms["inter_token_latency_seconds"].observe
        """Function to call with (seconds per token, number of tokens)."""

    def finished(
        self, times: RequestMetrics, prompt_tokens: int, output_tokens: int, reasons: list[str], longest: int, most: int | None
    ) -> None:
        """Add a finished request. reasons: finish_reason of each completion. longest: number of tokens in the longest completion.
        most: the request's max_tokens."""
        self._reasons.update(reasons)
        found = self._histograms
        found["request_prompt_tokens"].observe(prompt_tokens)
        found["request_generation_tokens"].observe(output_tokens)
        found["request_max_num_generation_tokens"].observe(longest)
        if most is not None:
            found["request_params_max_tokens"].observe(most)
        found["request_params_n"].observe(len(reasons))
        arrival, begun, first, end = times.arrival_time, times.scheduled_time, times.first_token_time, times.finished_time
        if end is None or first is None:
            return
        found["e2e_request_latency_seconds"].observe(end - arrival)
        found["request_decode_time_seconds"].observe(end - first)
        tokens = output_tokens // len(reasons)
        if tokens > 1:
            found["request_time_per_output_token_seconds"].observe((end - first) / (tokens - 1))
        if begun is not None:
            found["request_queue_time_seconds"].observe(max(begun - arrival, 0.0))
            found["request_prefill_time_seconds"].observe(first - begun)
            found["request_inference_time_seconds"].observe(end - begun)

    def page(self, engine: EngineSnapshot, queued: int) -> bytes:
        """Return all metrics as text. queued: number of requests not yet passed to the engine."""
        families = [*self._engine(engine, queued), *self._requests()]
        return exposition([*families, *PROCESS.collect()])

    def _engine(self, now: EngineSnapshot, queued: int) -> Iterator[Metric]:
        used = now.num_used_blocks / now.num_blocks if now.num_blocks else 0.0
        states = "Cached states for prefix reuse, for models with state layers."
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in running steps.", now.num_running),
            ("vllm:num_requests_waiting", "Requests and sequences that wait.", now.num_waiting + queued),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 means all.", used),
            ("vllm:gpu_cache_usage_perc", "Share of the KV cache's blocks in use, by its name in older dashboards.", used),
            ("headway:num_kept_states", states, now.num_kept_states),
            ("headway:kept_state_bytes", "Bytes of cached states.", now.kept_state_bytes),
            ("headway:num_offloaded_states", "States offloaded to host memory.", now.num_offloaded_states),
        ):
            yield self._labels.gauge(name, text, [((), value)])
        sizes = str(self._block_size), str(now.num_blocks)
        yield self._labels.gauge("vllm:cache_config_info", "Sizes of the KV cache.", [(sizes, 1)], "block_size", "num_gpu_blocks")
        for name, (text, field) in COUNTERS.items():
            yield self._labels.counter(f"vllm:{name}", text, [((), getattr(now.totals, field))])
        for name, text, value in (
            ("tuned_points", "Points measured while the engine was idle.", now.totals.tuned_points),
            ("tuning_changes", "Times that the engine took other kernels after it.", now.totals.tuning_changes),
            ("tuning_saved_seconds", "Attention time that these would have saved before.", now.totals.tuning_saved_seconds),
        ):
            yield self._labels.counter(f"headway:{name}", text, [((), value)])
        yield self._step_tokens(now.totals)
        yield from self._steps(now.totals)

    def _step_tokens(self, totals: EngineStats) -> Metric:
        """Return the histogram of tokens per step. Its bounds are one less than powers of two, because the engine counts steps in
        these ranges."""
        buckets, total = [], 0
        for bits in range(1, max(totals.steps_by_tokens, default=1) + 1):
            total += totals.steps_by_tokens[bits]
            buckets.append((repr(float(2**bits - 1)), float(total)))
        buckets.append(("+Inf", float(total)))
        sum_of_all = totals.num_prefill_tokens + totals.num_decode_tokens
        return self._labels.histogram("vllm:iteration_tokens_total", "Tokens per step.", buckets, sum_of_all)

    def _steps(self, totals: EngineStats) -> Iterator[Metric]:
        text = "Steps by phase and backend."
        yield self._labels.counter("headway:steps", text, sorted(totals.steps_by_phase.items()), "phase", "backend")
        for name, text, counts in (
            ("steps_without_graph", "Steps without a CUDA graph, by reason.", totals.steps_without_graph),
            ("steps_in_pieces", "Steps with piecewise CUDA graphs, by reason.", totals.steps_in_pieces),
            ("rows_gathered", "Rows of logits gathered from all ranks, by reason.", totals.rows_gathered_for),
            ("prefix_cache_missed_tokens", "Prompt tokens not found in the prefix cache, by reason.", totals.missed_tokens),
            ("prefix_cache_evictions", "Pages and states evicted from the prefix cache, by cause.", totals.evictions),
            ("compilations", "Kernels compiled while requests waited, by name.", totals.compilations),
        ):
            samples = (((reason,), count) for reason, count in sorted(counts.items()))
            yield self._labels.counter(f"headway:{name}", text, samples, "reason")

    def _requests(self) -> Iterator[Metric]:
        for name, found in self._histograms.items():
            yield self._labels.histogram(f"vllm:{name}", _HISTOGRAMS[name][0], found.buckets, found.sum)
            if name == "inter_token_latency_seconds":  # its name in older dashboards
                yield self._labels.histogram(
                    "vllm:time_per_output_token_seconds", "Seconds per token (older name).", found.buckets, found.sum
                )
        reasons = (((reason,), count) for reason, count in self._reasons.items())
        yield self._labels.counter("vllm:request_success", "Completions that ended.", reasons, "finished_reason")
        yield self._labels.refused(self.refused)


class Figures(Collector):
    """Collector that returns the given metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        """Return the families."""
        return self._families


def exposition(families: Iterable[Metric]) -> bytes:
    """Return metric families in Prometheus' text format; see CONTENT_TYPE."""
    registry = CollectorRegistry()
    registry.register(Figures(families))
    return generate_latest(registry)
