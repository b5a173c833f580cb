"""What sends spans to an OTLP endpoint: OpenTelemetry's exporters, imported where somebody asks for them."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final

from headway.core.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace.export import SpanExporter

_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_INSTALL: Final = "pip install 'headway[otel]'"


def find_exporter(endpoint: str) -> Callable[[], SpanExporter]:
    """What makes an exporter to an endpoint, by gRPC or (see $OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) HTTP; nothing is sent.

    :raises ConfigError: a library is missing, or the protocol is unknown.
    """
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
