"""OpenTelemetry tracing: one span per request, with vLLM's attribute names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from headway.core.contract.errors import ConfigError

if TYPE_CHECKING:  # the command line needs an exporter before it imports torch
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from headway.core.sampling.params import SamplingParams
    from headway.outputs import RequestOutput

_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_INSTALL: Final = "pip install 'headway[otel]'"


def find_exporter(endpoint: str) -> Callable[[], SpanExporter]:
    """Return the exporter class for the protocol in $OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, gRPC or HTTP. :raises ConfigError: if
    the exporter is unavailable."""
    protocol = os.environ.get(_PROTOCOL, "grpc")
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Exporter

            return partial(Exporter, endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            return partial(HttpExporter, endpoint=endpoint)
    except ImportError as error:
        raise ConfigError("--otlp-traces-endpoint", "OpenTelemetry's libraries", str(error), _INSTALL) from error
    raise ConfigError(f"${_PROTOCOL}", "grpc or http/protobuf", repr(protocol))


_HEADERS: Final = frozenset((b"traceparent", b"tracestate"))


class Tracing:
    """Creator of the spans of a server's requests. A thread of the OpenTelemetry library sends the spans."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("headway.server")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, exporter: SpanExporter, model: str) -> Tracing:
        """Return a Tracing that sends spans with an exporter."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "headway")})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, model)

    def finished(
        self, output: RequestOutput, written: int, params: SamplingParams, headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        """Add the span of a finished prompt. written: number of tokens in the prompt's completions. headers: may contain the
        parent trace."""
        from opentelemetry.trace import SpanKind

        named = {name.decode(): value.decode("latin-1") for name, value in headers if name in _HEADERS}
        times, clock = output.metrics, time.time() - time.perf_counter()
        end = times.finished_time or time.perf_counter()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(named) if named else None,
            kind=SpanKind.SERVER,
            attributes=self._attributes(output, written, params, end),
            start_time=int((clock + times.arrival_time) * 1e9),
        )
        span.end(int((clock + end) * 1e9))

    def _attributes(self, output: RequestOutput, written: int, params: SamplingParams, end: float) -> Mapping[str, Any]:
        times = output.metrics
        arrival, begun, first = times.arrival_time, times.scheduled_time, times.first_token_time
        found = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": output.request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": len(output.outputs),
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": written,
            "gen_ai.response.finish_reasons": [each.finish_reason or "abort" for each in output.outputs],
            "gen_ai.latency.e2e": end - arrival,
            "gen_ai.latency.time_in_queue": None if begun is None else begun - arrival,
            "gen_ai.latency.time_to_first_token": None if first is None else first - arrival,
            "gen_ai.latency.time_in_model_prefill": None if first is None or begun is None else first - begun,
            "gen_ai.latency.time_in_model_decode": None if first is None else end - first,
            "gen_ai.latency.time_in_model_inference": None if begun is None else end - begun,
        }
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def tracing_to(endpoint: str, model: str) -> Tracing:
    """Return a Tracing for an OTLP endpoint. Raises the same errors as `find_exporter`. model: the server's name for the
    model."""
    return Tracing.to(find_exporter(endpoint)(), model)
