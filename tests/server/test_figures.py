"""/metrics: the names that dashboards read, each request counted once; and a span for each request (--otlp-traces-endpoint)."""

from __future__ import annotations

import json
import re
import sys
import time

import httpx
import openai
import pytest
from openai import OpenAI

from headway import LLM
from headway.core.contract.errors import ConfigError
from headway.server.operators.tracing import Tracing, tracing_to
from headway.server.options import ServerOptions
from server_thread import Running, raw, running

TEXT = "/v1/completions"
LONG = {"prompt": [3, 4], "max_tokens": 200, "ignore_eos": True}


def page_of(served: Running) -> str:
    return httpx.get(f"{served.url}/metrics").text


def ended(served: Running) -> dict[str, float]:
    """finished_reason -> completions, those that there are."""
    found = re.findall(r'^vllm:request_success_total\{.*finished_reason="(\w+)".*\} (\S+)', page_of(served), re.MULTILINE)
    return {reason: float(count) for reason, count in found if float(count)}


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.01), step())[1])
    return llm


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended_and_counted(slow: LLM, stream: bool) -> None:
    with running(slow, ServerOptions(served_model_names=("tiny",), request_timeout=0.2)) as served:
        answer = httpx.post(served.url + TEXT, json={**LONG, "stream": stream, "n": 2}, timeout=20)
        assert answer.status_code == (200 if stream else 504)
        assert '"type":"timeout_error"' in answer.text
        assert "request_timeout" in answer.text
        assert ended(served) == {"abort": 2.0}
        if stream:
            client = OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
            asked = client.completions.create(
                model="tiny", prompt=[3], max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            with pytest.raises(openai.APIError, match="request_timeout"):
                list(asked)


@pytest.mark.parametrize(("count", "stream"), [(1, False), (1, True), (2, True)])
def test_requests_end_with_their_clients_connection_and_are_counted(slow: LLM, count: int, stream: bool) -> None:
    """One, and one with another behind it."""
    before = slow.engine.stats.num_output_tokens
    with running(slow) as served:
        with served.connect() as sock:
            sock.sendall(raw("POST", TEXT, json.dumps({**LONG, "stream": stream}).encode()) * count)
            while not served.llm.num_running:
                time.sleep(0.001)
        served.wait_idle()
        assert ended(served) == {"abort": 1.0}
        assert re.search(r"^vllm:request_prompt_tokens_sum\{.*\} 2.0$", page_of(served), re.MULTILINE)
        assert slow.engine.stats.num_output_tokens - before < 150


def test_a_request_that_fails_is_counted_as_a_failure(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    short = {**LONG, "max_tokens": 3}
    impossible = {**short, "structured_outputs": {"grammar": "start: nothing"}}
    with running(llm) as served:
        assert httpx.post(served.url + TEXT, json=short).status_code == 200
        for stream in (False, True):
            assert httpx.post(served.url + TEXT, json={**impossible, "stream": stream}, timeout=20).status_code == 400
        assert ended(served) == {"length": 1.0, "error": 2.0}


def test_figures_have_the_names_that_dashboards_read(llm: LLM) -> None:
    before = llm.engine.stats.snapshot()
    with running(llm, ServerOptions(served_model_names=("tiny",))) as served:
        assert httpx.post(served.url + TEXT, json={**LONG, "max_tokens": 5}).status_code == 200
        assert httpx.post(served.url + TEXT, json={**LONG, "max_tokens": 7, "stream": True}).status_code == 200
        assert httpx.post(served.url + TEXT, json={"prompt": "a", "n": -1}).status_code == 400
        page = page_of(served)
    labels = '{engine="0",model_name="tiny"}'
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")
    totals = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
    for name in (*gauges, *(f"{total}_total" for total in totals)):
        assert f"vllm:{name}{labels}" in page
    for name, value in {
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 4 + 6,
        "time_per_output_token_seconds_count": 4 + 6,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_generation_tokens_count": 2,
        "request_params_max_tokens_count": 2,
        "request_params_max_tokens_sum": 5 + 7,
        "request_max_num_generation_tokens_sum": 5 + 7,
    }.items():
        assert f"vllm:{name}{labels} {value:.1f}" in page
    assert re.search(r'vllm:request_success_total\{.*finished_reason="length".*\} 2.0', page)
    assert re.search(r'headway:steps_total\{.*backend="sdpa".*phase="decode".*\} \d', page)
    assert re.search(r'headway:requests_refused_total\{.*status="400".*\} 1.0', page)
    assert "process_resident_memory_bytes " in page
    stats, made = llm.engine.stats, llm.engine.stats - before
    tokens = stats.num_prefill_tokens + stats.num_decode_tokens
    for name, count in (("count", stats.num_steps), ("sum", tokens)):
        assert re.search(rf"vllm:iteration_tokens_total_{name}\{{.*\}} {count:.1f}", page)
    assert made.steps_by_tokens[1] >= 4 + 6  # decodes of one sequence
    assert made.steps_by_tokens.total() == made.num_steps


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
