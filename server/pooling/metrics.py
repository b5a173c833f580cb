"""The figures of /metrics of a model that is pooled, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from starlette.responses import Response

from headway.core.pooling.engine import PoolingStats
from headway.server.operators.metrics import CONTENT_TYPE, REQUEST_SECONDS, Families, Histogram


class PoolingMetrics:
    """Counts and times of the server's requests, kept on its event loop."""

    def __init__(self, model_name: str) -> None:
        """model_name: label of every figure."""
        self._labels = {"model_name": model_name, "engine": "0"}
        self._seconds = Histogram(REQUEST_SECONDS)
        self._tokens = self._requests = 0
        self.refused: Counter[str] = Counter()
        """Status -> requests that were answered by an error of that status."""

    def answered(self, seconds: float, tokens: int) -> None:
        """Add a request that has its answer."""
        self._seconds.observe(seconds)
        self._tokens += tokens
        self._requests += 1

    def page(self, stats: PoolingStats, queued: int) -> Response:
        """Write all figures. queued: requests without an answer."""
        return Response(generate_latest(Families(list(self._families(stats, queued)))), media_type=CONTENT_TYPE)

    def _families(self, stats: PoolingStats, queued: int) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests without an answer.", labels=names)
        waiting.add_metric(values, queued)
        yield waiting
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of texts that were answered.", self._tokens),
            ("vllm:request_success", "Requests that were answered.", self._requests),
            ("headway:pooled_texts", "Texts that were run.", stats.num_texts),
            ("headway:pooled_batches", "Batches that were run.", stats.num_batches),
        ):
            family = CounterMetricFamily(name, text, labels=names)
            family.add_metric(values, value)
            yield family
        seconds = HistogramMetricFamily("vllm:e2e_request_latency_seconds", "Seconds from arrival to answer.", labels=names)
        seconds.add_metric(values, self._seconds.buckets, self._seconds.sum)
        yield seconds
        steps = CounterMetricFamily("headway:steps", "Batches that a backend served.", labels=[*names, "phase", "backend"])
        for backend, count in sorted(stats.batches_by_backend.items()):
            steps.add_metric([*values, "prefill", backend], count)
        yield steps
        refused = CounterMetricFamily("headway:requests_refused", "Requests answered by an error.", labels=[*names, "status"])
        for status, count in self.refused.items():
            refused.add_metric([*values, status], count)
        yield refused
