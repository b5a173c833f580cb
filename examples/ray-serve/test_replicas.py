"""Two replicas of a tiny model on the CPU, one of which is killed while requests run.

They run in deterministic mode. Otherwise an answer would depend on the requests that happen to be served beside it: where the
two likeliest tokens are less than about 1e-6 apart, the last bits of a sum decide between them, and the answer goes on with
another text as if it were mixed with somebody else's.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
import ray
from ray import serve
from replicas import app, prompt_of

from sandbox import save_tiny_model

pytestmark = pytest.mark.timeout(420)
URL = "http://127.0.0.1:8123"
LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = str(save_tiny_model(tmp_path_factory.mktemp("replicas"), positions=1024, chat=True))
    paths = str(Path(__file__).parent)
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}})
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    asked = {"model": folder, "min_replicas": 2, "max_replicas": 3, "kv_cache_memory": "8MiB", "num_threads": "1"}
    serve.run(app({**asked, "deterministic": "true"}), name="headway")  # texts, as from the command line
    yield folder
    serve.shutdown()
    ray.shutdown()


class Answer(NamedTuple):
    """Outcome of a request."""

    tokens: list[int]
    """Tokens received before an error."""
    wrong: str
    """Error message, or ""."""
    replica: str


def complete(prompt: str, streamed: bool = False, begun: list[str] | None = None) -> Answer:
    """Send a request. begun: list to which the replica of a started response is appended."""
    body = {**LONG, "prompt": prompt, "stream": streamed}
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=240) as answer:
        replica = answer.headers.get("x-replica", "")
        if begun is not None:
            begun.append(replica)
        whole = "".join(answer.iter_text())
    if answer.status_code != 200:
        return Answer([], f"{answer.status_code}: {whole}", replica)
    if not streamed:
        return Answer(json.loads(whole)["choices"][0]["token_ids"], "", replica)
    events = [line[6:] for line in whole.split("\n") if line.startswith("data: ")]
    parts = [json.loads(event) for event in events if event != "[DONE]"]
    tokens = [token for part in parts for choice in part.get("choices", ()) for token in choice.get("token_ids", ())]
    wrong = "".join(part["error"]["message"] for part in parts if "error" in part)
    return Answer(tokens, wrong if events[-1] == "[DONE]" else wrong or "it ends without a word", replica)


def processes() -> list[psutil.Process]:
    """Return the processes of this test's replicas."""
    own = psutil.Process().children(recursive=True)
    return [each for each in own if "Replica:headway:Replica" in " ".join(each.cmdline())]


def test_equal_prefixes_go_to_one_replica_and_others_are_spread(model: str) -> None:
    del model
    prefixes = [f"{letter * 40} the quick brown fox " for letter in "abcdef"]
    homes = [{complete(f"{prefix}{number}").replica for number in range(3)} for prefix in prefixes]
    assert all(len(home) == 1 for home in homes), homes
    assert len(set.union(*homes)) == 2, homes


def test_requests_go_on_when_a_replica_is_killed(model: str) -> None:
    del model
    prompts = [f"{letter * 30} ban ben {letter}" for letter in "abcdefghijklmnop"]
    expected = {prompt: complete(prompt).tokens for prompt in prompts}
    assert {len(tokens) for tokens in expected.values()} == {LONG["max_tokens"]}
    assert len(set(map(tuple, expected.values()))) == len(prompts)
    before = processes()
    assert len(before) == 2
    (engine,) = before[0].children()
    jobs = [(prompt, streamed) for prompt in prompts for streamed in (False, True) for _ in range(2)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        begun: list[str] = []
        running = [pool.submit(complete, *job, begun) for job in jobs]
        while (
            len(set(begun)) < 2 or len(begun) < 12
        ):  # streams of both replicas; a response that is not streamed begins when it ends
            time.sleep(0.001)
        os.kill(before[0].pid, signal.SIGKILL)
        found = [each.result() for each in running]
    answers = list(zip(jobs, found, strict=True))
    mixed = [(prompt, at) for (prompt, _), answer in answers if (at := first_other(answer.tokens, expected[prompt])) is not None]
    assert not mixed, "tokens of another answer, at these places"
    lost = [(streamed, answer.wrong) for (_, streamed), answer in answers if answer.wrong]
    assert all(streamed and "has ended" in wrong for streamed, wrong in lost), lost
    assert lost, "streams that had begun ended with their replica"
    whole = [answer.tokens == expected[prompt] for (prompt, _), answer in answers if not answer.wrong]
    assert all(whole), "an answer is cut short without a word"
    assert len(whole) >= len(jobs) // 2
    print(f"{len(whole)} of {len(jobs)} requests whole, {len(lost)} streams told that their replica had ended")
    deadline = time.monotonic() + 120
    while len({each.pid for each in processes()} - {before[0].pid}) < 2:
        assert time.monotonic() < deadline, "no replica was started for the one that was killed"
        time.sleep(0.5)
    last = complete(prompts[0])
    assert (last.tokens, last.wrong) == (expected[prompts[0]], "")
    assert psutil.wait_procs([engine], 20)[1] == [], "the engine of the replica that was killed goes on"


def first_other(tokens: list[int], whole: list[int]) -> int | None:
    """Return the first index at which the tokens differ from the complete answer, or None if they are a prefix of it."""
    return next((at for at, token in enumerate(tokens) if whole[at : at + 1] != [token]), None)


def test_errors_and_the_page_pass_through(model: str) -> None:
    answer = httpx.post(f"{URL}/v1/completions", json={"prompt": "a", "temperature": -1}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert httpx.get(f"{URL}/v1/models", timeout=60).json()["data"][0]["id"] == model
    assert "<title>Headway</title>" in httpx.get(URL, timeout=60).text
    assert httpx.get(f"{URL}/headway/state?x=1", timeout=60).json()["running"] == 0


def test_what_is_compared_is_never_empty() -> None:
    chat = [{"role": "user", "content": "hello"}]
    assert "hello" in prompt_of("/v1/chat/completions", json.dumps({"messages": chat}).encode())
    assert prompt_of("/v1/completions", b'{"prompt": "abc"}') == "abc"
    for body in (b"", b"[]", b"{", b'{"prompt": ""}', b'{"prompt": []}'):
        assert prompt_of("/v1/completions", body) == "/v1/completions"
