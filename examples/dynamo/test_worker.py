"""Test of a worker with a tiny model and Dynamo's frontend, in separate processes with file discovery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sandbox import save_tiny_model

HERE = Path(__file__).parent
PORT = 8124
URL = f"http://127.0.0.1:{PORT}"
GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("dynamo"), chat=True)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    logs = tmp_path_factory.mktemp("logs")
    env = {
        **os.environ,
        "DYN_FILE_KV": str(tmp_path_factory.mktemp("store")),
        "OMP_NUM_THREADS": "1",
        "HEADWAY_AUTOTUNE_BUDGET": "0",
    }
    options = ["--option", "kv_cache_memory=8MiB", "--option", "num_threads=1", "--option", "enable_prefix_caching=false"]
    worker = [str(HERE / "headway_dynamo.py"), "--model", str(folder), "--served-model-name", "tiny", *options]
    frontend = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(PORT), "--event-plane", "zmq"]
    processes = []
    for name, command in (("worker", worker), ("frontend", frontend)):
        with open(logs / name, "w") as log:
            command = [sys.executable, *command, "--discovery-backend", "file", "--request-plane", "tcp"]
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        deadline = time.monotonic() + 180
        while not _models():
            told = "".join((logs / name).read_text()[-3000:] for name in ("worker", "frontend"))
            assert all(each.poll() is None for each in processes), told
            assert time.monotonic() < deadline, told
            time.sleep(0.5)
        yield
    finally:
        for each in processes:
            each.terminate()
        for each in processes:
            try:
                each.wait(30)
            except subprocess.TimeoutExpired:
                each.kill()


def _models() -> list[str]:
    try:
        return [each["id"] for each in httpx.get(f"{URL}/v1/models", timeout=5).json()["data"]]
    except httpx.HTTPError:
        return []


def test_a_completion_and_a_stream_are_the_engines(served: None, folder: Path) -> None:
    from headway import LLM, SamplingParams

    llm = LLM(str(folder), kv_cache_memory="8MiB", num_threads=1)
    (expected,) = llm.generate(["ban ben"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    asked = {**GREEDY, "prompt": "ban ben", "max_tokens": 40}
    answer = httpx.post(f"{URL}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.outputs[0].text, "length")
    assert answer.json()["usage"]["completion_tokens"] == 40
    with httpx.stream("POST", f"{URL}/v1/completions", json={**asked, "stream": True}, timeout=60) as stream:
        events = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    parts = [part["choices"][0]["text"] for part in map(json.loads, events) if part["choices"]]
    assert "".join(parts) == expected.outputs[0].text
    assert len(parts) > 5


def test_a_chat_ends_by_length(served: None) -> None:
    asked = {**GREEDY, "messages": [{"role": "user", "content": "ban"}], "max_tokens": 7}
    answer = httpx.post(f"{URL}/v1/chat/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 7
