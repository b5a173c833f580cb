"""The operator's paths: a pause, requests that are ended, and what needs leave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import pytest

from headway import LLM
from headway.hosting.live_model import Worker
from headway.server.options import ServerOptions
from server_thread import Running, running

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

    def cached() -> int:
        used = httpx.post(own.url + PATH, json=body).json()["usage"]
        return int(used["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert httpx.post(f"{own.url}/reset_prefix_cache").status_code == 200
    assert cached() == 0


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
