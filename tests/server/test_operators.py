"""The operator's paths: a pause, requests that are ended, what needs leave, profiles, figures and traces."""

from __future__ import annotations

import gzip
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import openai
import pytest
from openai import OpenAI

from headway import LLM
from headway.bench.serve.results import ServeReport
from headway.core.contract.errors import ConfigError
from headway.core.engine.data.stats import PARTS, no_ranges
from headway.hosting.live_model import Worker
from headway.server.operators.tracing import Tracing, tracing_to
from headway.server.options import ServerOptions
from sandbox import Result
from server_thread import Running, raw, running

BODY = {"prompt": "the quick", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
PATH = "/v1/completions"


@pytest.fixture
def own(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerOptions(served_model_names=("tiny",), operator_paths=True)) as found:
        yield found


def test_a_paused_server_begins_nothing_and_then_goes_on(own: Running) -> None:
    with httpx.Client(base_url=own.url, timeout=30) as http, ThreadPoolExecutor(2) as threads:
        assert http.post("/pause", params={"mode": "wait"}).json() == {"status": "paused"}
        assert http.get("/is_paused").json() == {"is_paused": True}
        waiting = threads.submit(httpx.post, own.url + PATH, json={**BODY, "max_tokens": 2}, timeout=30)
        while http.get("/load").json() != {"server_load": 1}:
            assert not waiting.done()
        with own.connect() as gone:  # a client that leaves while it waits
            data = json.dumps(BODY).encode()
            gone.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n")
            gone.sendall(f"content-length: {len(data)}\r\n\r\n".encode() + data)
            while http.get("/load").json() != {"server_load": 2}:
                pass
        while http.get("/load").json() != {"server_load": 1}:
            pass
        assert not own.llm.num_unfinished_requests
        assert http.post("/resume").json() == {"status": "resumed"}
        assert waiting.result().status_code == 200
        assert http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("by", ["/abort_requests", "/pause"])
def test_requests_are_ended(own: Running, by: str) -> None:
    begun, told = Event(), {}

    def stream() -> str:
        with httpx.stream("POST", own.url + PATH, json={**BODY, "stream": True, "n": 2}, timeout=30) as answer:
            lines = []
            for line in answer.iter_lines():
                if line.startswith("data: {") and "id" not in told:
                    told["id"] = json.loads(line.removeprefix("data: "))["id"]
                    begun.set()
                lines.append(line)
            return "\n".join(lines)

    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(stream)
        assert begun.wait(20)
        body = {"request_ids": [told["id"], "unknown"]} if by == "/abort_requests" else None
        assert httpx.post(own.url + by, json=body).status_code == 200
        assert '"code":"aborted"' in found.result(20) or own.llm.num_unfinished_requests == 0
    if by == "/pause":
        assert httpx.post(f"{own.url}/resume").status_code == 200
    assert httpx.post(own.url + PATH, json={**BODY, "max_tokens": 2}).status_code == 200


def test_a_sleeping_server_refuses_until_it_is_woken(own: Running, llm: LLM) -> None:
    with httpx.Client(base_url=own.url, timeout=30) as http:
        text = http.post(PATH, json={**BODY, "max_tokens": 4}).json()["choices"][0]["text"]
        assert http.post("/sleep", params={"level": 3}).json()["error"]["message"].startswith("level: needs 1")
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert http.post("/sleep", params={"level": 1}).status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        refused = http.post(PATH, json=BODY)
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the engine sleeps; POST /wake_up wakes it")
        assert http.get("/health").status_code == 200
        assert http.post("/wake_up", params={"tags": "weights"}).status_code == 200
        assert http.post(PATH, json=BODY).status_code == 503
        assert http.post("/wake_up").status_code == 200
        assert http.post(PATH, json={**BODY, "max_tokens": 4}).json()["choices"][0]["text"] == text
        assert http.post("/collective_rpc", json={"method": "reload_weights"}).json() == {"results": [None]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"method": "__init__"}, "method: needs a public name, got '__init__'"),
        ({"method": "frob" * 1000}, "method: needs faulty, get_model, reload_weights, sleep, update_config, wake_up"),
        ({"method": "sleep", "args": [[1]]}, "level of sleep: needs 1"),
        ({"method": "wake_up", "args": [5]}, "tags of wake_up: needs a list of weights and kv_cache, got 5"),
        ({"method": "update_config", "args": ["x"]}, "overrides of update_config: needs load_config"),
        ({"method": "reload_weights", "kwargs": {"x": 1}}, "args and kwargs: needs those of reload_weights(), got"),
        ({"method": "faulty"}, "method: faulty failed: KeyError: 'of its own'"),
    ],
)
def test_calls_of_the_worker_that_cannot_work_are_refused_in_one_line(
    own: Running, body: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(worker: Worker) -> None:
        raise KeyError("of its own")

    monkeypatch.setattr(Worker, "faulty", faulty, raising=False)
    answer = httpx.post(f"{own.url}/collective_rpc", json=body, timeout=30)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    message = answer.json()["error"]["message"]
    assert message.startswith(words)
    assert len(message) < 500
    assert "\n" not in message


def test_the_prefix_cache_is_emptied(own: Running) -> None:
    body = {**BODY, "prompt": "the quick brown fox jumps over the lazy dog " * 3, "max_tokens": 1}

    def cached(**more: object) -> int:
        used = httpx.post(own.url + PATH, json={**body, **more}).json()["usage"]
        details = used["prompt_tokens_details"]
        assert ("missed" in details) is bool(more)
        if more:
            assert sum(details["missed"].values()) + details["cached_tokens"] == used["prompt_tokens"]
            missed.append(details["missed"])
        return int(details["cached_tokens"])

    missed: list[dict[str, int]] = []
    cached()
    assert cached(return_cache_report=True) > 0
    assert httpx.post(f"{own.url}/reset_prefix_cache").status_code == 200
    assert cached(return_cache_report=True) == 0
    assert (missed[0], "forgotten" in missed[1]) == ({"last_token": 1}, True)
    assert cached(return_cache_report=True, cache_salt="another") == 0
    assert missed[2].keys() == {"unseen", "last_token"}, "it does not show what was sent without the salt"
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_cache_report": True}
    assert '"missed":{"last_token":1}' in httpx.post(own.url + PATH, json=stream).text
    page = httpx.get(f"{own.url}/metrics").text
    assert 'headway:prefix_cache_missed_tokens_total{engine="0",model_name="' in page
    assert 'reason="forgotten"' in page


def test_what_others_feel_needs_leave(served: Running, http: httpx.Client) -> None:
    for path, body in (
        ("/pause", None),
        ("/resume", None),
        ("/reset_prefix_cache", None),
        ("/abort_requests", {"request_ids": []}),
    ):
        answer = http.post(path, json=body) if body else http.post(path)
        assert (answer.status_code, "--operator-paths" in answer.json()["error"]["message"]) == (404, True)


def test_the_tokenizer_is_told(served: Running, http: httpx.Client, llm: LLM) -> None:
    found = http.get("/tokenizer_info").json()
    tokenizer = llm.get_tokenizer()
    assert found["chat_template"] == tokenizer.chat_template
    assert found["tokenizer_class"] == type(tokenizer).__name__
    assert found["eos_token"] == "<eos>"


LOAD = ("--modes", "offline", "--num-requests", "3", "--mix", "9/12", "--vocab-size", "200", "--profile")


def test_a_load_tells_where_the_time_of_steps_goes(llm: LLM, headway: Callable[..., Result], tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    with running(llm, ServerOptions(profile_dir=tmp_path / "traces")) as served:
        options = "--url", served.url, *LOAD, "--output", str(report)
        result = headway("bench", "serve", *options, "--profile-skip", "3", "--profile-steps", "4")
        assert result.code == 0, result
        assert "no trace" in headway("bench", "serve", *options).out
        assert httpx.post(f"{served.url}/stop_profile").status_code == 409
    assert llm.engine.clock.enter_range is no_ranges
    (trace,) = (tmp_path / "traces").iterdir()
    with gzip.open(trace) as file:
        ranges = Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
    assert {part: ranges[f"headway.{part}"] >= 4 for part in PARTS} == dict.fromkeys(PARTS, True)
    profile = ServeReport.read(report).cells[0].profile
    assert (profile.traced_steps, profile.trace) == (0, None)
    assert profile.output_tokens == 3 * 12
    assert sum(profile.parts_ms.values()) == pytest.approx(profile.step_ms, rel=1e-3)


def test_profile_is_refused_without_a_folder(llm: LLM, headway: Callable[..., Result]) -> None:
    with running(llm) as served:
        for path in ("/start_profile", "/stop_profile"):
            answer = httpx.post(f"{served.url}{path}")
            assert (answer.status_code, "--profile-dir" in answer.text) == (404, True)
        result = headway("bench", "serve", "--url", served.url, *LOAD)
        assert (result.code, "headway serve --profile-dir FOLDER" in result.err) == (2, True)


def test_one_profile_at_a_time(llm: LLM, tmp_path: Path) -> None:
    with running(llm, ServerOptions(profile_dir=tmp_path)) as served, httpx.Client(base_url=served.url, timeout=30) as http:
        assert http.post("/start_profile", json={"num_steps": 0}).status_code == 400
        assert http.post("/start_profile").status_code == 200
        assert http.post("/start_profile").status_code == 409
        found = http.post("/stop_profile").json()
        assert (found["steps"], found["trace"]) == (0, None)


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
