"""--otlp-traces-endpoint: a span for each request, in the trace of its client."""

from __future__ import annotations

import sys
import time

import httpx
import pytest

from headway import LLM
from headway.core.contract.errors import ConfigError
from headway.server.operators.tracing import Tracing, tracing_to
from headway.server.options import ServerOptions
from server_thread import running

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_in_its_clients_trace(llm: LLM, stream: bool) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    body = {"prompt": ["the quick", "fox"], "max_tokens": 5, "temperature": 0.5, "ignore_eos": True, "stream": stream}
    before = time.time_ns()
    with running(llm, ServerOptions(served_model_names=("tiny",))) as own:
        own.service.tracing = Tracing.to(memory, "tiny")
        assert httpx.post(f"{own.url}/v1/completions", json=body, headers={"traceparent": PARENT}).status_code == 200
        assert httpx.post(f"{own.url}/v1/completions", json={**body, "prompt": "a"}).status_code == 200
        own.service.tracing.close()
    first, second, third = memory.get_finished_spans()
    for span in (first, second):
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (PARENT[3:35], PARENT[36:52])
    assert third.parent is None
    assert (third.name, third.kind.name, third.resource.attributes["service.name"]) == ("llm_request", "SERVER", "headway")
    found = third.attributes
    assert found["gen_ai.usage.prompt_tokens"] == len(llm.tokenizer("a")["input_ids"])
    assert (found["gen_ai.usage.completion_tokens"], found["gen_ai.request.temperature"]) == (5, 0.5)
    assert (found["gen_ai.response.finish_reasons"], found["gen_ai.request.max_tokens"]) == (("length",), 5)
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"] < 60
    assert before < third.start_time < third.end_time < time.time_ns() + 10**9
    assert abs((third.end_time - third.start_time) / 1e9 - found["gen_ai.latency.e2e"]) < 1e-3


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(ConfigError, match="grpc or http/protobuf"):
        tracing_to("http://127.0.0.1:1", "tiny")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[otel\]'"):
        tracing_to("http://127.0.0.1:1", "tiny")
