"""/metrics after requests that did not end by themselves: each is counted once, whoever ended it."""

from __future__ import annotations

import re
import time

import httpx
import pytest

from headway import LLM
from headway.server.options import ServerOptions
from server_thread import Running, raw, running

TEXT = "/v1/completions"
LONG = {"prompt": [3, 4], "max_tokens": 200, "ignore_eos": True}


def ended(served: Running) -> dict[str, float]:
    """finished_reason -> completions, those that there are."""
    page = httpx.get(f"{served.url}/metrics").text
    found = re.findall(r'^vllm:request_success_total\{.*finished_reason="(\w+)".*\} (\S+)', page, re.MULTILINE)
    return {reason: float(count) for reason, count in found if float(count)}


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.02), step())[1])
    return llm


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_counted(slow: LLM, stream: bool) -> None:
    with running(slow, ServerOptions(request_timeout=0.3)) as served:
        answer = httpx.post(served.url + TEXT, json={**LONG, "stream": stream, "n": 2}, timeout=20)
        assert "request_timeout" in answer.text
        assert ended(served) == {"abort": 2.0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_leaves_is_counted(slow: LLM, stream: bool) -> None:
    body = b'{"prompt": [3, 4], "max_tokens": 200, "ignore_eos": true, "stream": %s}' % str(stream).lower().encode()
    with running(slow) as served:
        with served.connect() as sock:
            sock.sendall(raw("POST", TEXT, body))
            while not served.llm.num_running:
                time.sleep(0.001)
        while served.service.running:
            time.sleep(0.005)
        assert ended(served) == {"abort": 1.0}
        page = httpx.get(f"{served.url}/metrics").text
        assert re.search(r"^vllm:request_prompt_tokens_sum\{.*\} 2.0$", page, re.MULTILINE)


def test_a_request_that_fails_is_counted_as_a_failure(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    short = {**LONG, "max_tokens": 3}
    impossible = {**short, "structured_outputs": {"grammar": "start: nothing"}}
    with running(llm) as served:
        assert httpx.post(served.url + TEXT, json=short).status_code == 200
        for stream in (False, True):
            assert httpx.post(served.url + TEXT, json={**impossible, "stream": stream}, timeout=20).status_code == 400
        assert ended(served) == {"length": 1.0, "error": 2.0}
