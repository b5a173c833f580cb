"""Records that a header, a signal or `LLM.record` requests, and `headway replay` of their files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from headway import LLM, SamplingParams
from headway.core.engine.record import Record
from sandbox import Result, assert_refused
from server_thread import running

Headway = Callable[..., Result]
PROMPT = {"prompt": "the quick", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def recorded(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Path]:
    folder = tmp_path_factory.mktemp("records")
    options = {"kv_cache_memory": "8MiB", "num_threads": 1, "block_size": 16}
    return LLM(str(tiny_model_folder), record_steps=8, record_folder=str(folder), **options), folder  # type: ignore[arg-type]


def test_a_header_requests_a_record(recorded: tuple[LLM, Path]) -> None:
    llm, folder = recorded
    with running(llm) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**PROMPT, "stream": stream}, headers={"X-Headway-Record": "1"})
            assert answer.status_code == 200
            record = Record.read(folder / answer.headers["x-headway-record"])
            assert record.judge()[1] is None
            assert record.meta.calls
        assert "x-headway-record" not in http.post("/v1/completions", json=PROMPT).headers


def test_a_server_without_a_ring_says_so_in_the_header(llm: LLM) -> None:
    with running(llm) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=PROMPT, headers={"X-Headway-Record": "1"}, timeout=30)
    assert answer.status_code == 200
    assert answer.headers["x-headway-record"].startswith("none: a record: needs record_steps")


def test_a_signal_requests_a_record(recorded: tuple[LLM, Path]) -> None:
    llm, folder = recorded
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    before = set(folder.iterdir())
    os.kill(os.getpid(), signal.SIGUSR2)
    ends = time.monotonic() + 10
    while not (new := set(folder.iterdir()) - before):
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert Record.read(new.pop()).meta.reason == "SIGUSR2"


def test_replay_prints_a_table_and_runs_other_backends(recorded: tuple[LLM, Path], headway: Headway) -> None:
    llm, _ = recorded
    llm.generate([[1, 2, 3], list(range(20))], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    path = llm.record()
    result = headway("replay", str(path), "--attn-backend", "sdpa.math,reference", "--kv-layout", "auto")
    assert result.code == 0, result
    assert "within tolerance" in result.out
    assert "sdpa.math" in result.out
    named = headway("replay", str(path), "--attn-backend", "hopper,sdpa,decode=sdpa.math,window:decode=sdpa", columns=300)
    assert named.code == 2, named
    refused, *lines, window = named.out.splitlines()[-4:]
    assert "cuda" in refused.lower(), named
    assert lines == ["sdpa: within tolerance (decode, prefill)", "decode=sdpa.math: within tolerance (decode)"]
    assert window.startswith("window:decode=sdpa: not checked: the file has no call")
    assert all(len(line) <= 80 for line in result.out.splitlines()[2:])
    assert_refused(headway("replay", str(path), "--model", "other"), "--model", "got other")
    assert_refused(headway("replay", str(path), "--attn-backend", "flsh"), "'flsh'")
    assert_refused(headway("replay", str(path) + "x"), "no file")


def test_a_record_of_the_level_full_runs_on_other_backends(tiny_model_folder: Path, tmp_path: Path, headway: Headway) -> None:
    llm = LLM(str(tiny_model_folder), deterministic="full", record_steps=8, record_folder=str(tmp_path), num_threads=1)
    llm.generate([list(range(20))], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    result = headway("replay", str(llm.record()), "--attn-backend", "sdpa,reference", "--kv-layout", "auto")
    assert result.code == 0, result
    assert "reference: within tolerance" in result.out


def test_replay_names_what_differs(recorded: tuple[LLM, Path], headway: Headway) -> None:
    llm, _ = recorded
    llm.generate([[1, 2, 3], list(range(20))], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    cache = llm.engine.executor.caches[1]
    block = int(llm.engine.executor.runner.tables.tables[0][1, 0])
    cache.logical_value[block, 7, 0] *= 3
    result = headway("replay", str(llm.record()))
    assert result.code == 1, result
    last = result.out.splitlines()[-1]
    assert last.startswith(
        "layer 1, sequence 1 (of 2), kv head 0 / query heads 0 to 1, row 7 (position 7): cached value: error 2"
    )


async def test_async(recorded: tuple[LLM, Path]) -> None:
    from headway import AsyncLLM

    llm, folder = recorded
    served = AsyncLLM.from_llm(llm)
    assert (await served.record()).parent == folder
    served.shutdown()
