"""/v1/files and /v1/batches: broken lines, restarts, and what is gone."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from headway import LLM
from headway.server.options import ServerOptions
from server_thread import Running, running

CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, tokens: int = 4, **body: Any) -> str:
    body = {"model": "tiny", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **body}
    body |= {"messages": [{"role": "user", "content": f"fox {number}"}]} if url == CHAT else {}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body})


@pytest.fixture
def options(tmp_path: Path) -> ServerOptions:
    return ServerOptions(served_model_names=("tiny",), files_dir=tmp_path / "files", batch_concurrency=3)


@pytest.fixture
def own(llm: LLM, options: ServerOptions) -> Iterator[Running]:
    with running(llm, options) as found:
        yield found


@pytest.fixture
def api(own: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def ended(api: OpenAI, batch_id: str, seconds: float = 30) -> Any:
    ends = time.monotonic() + seconds
    while (batch := api.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < ends, batch
        time.sleep(0.02)
    return batch


def begin(api: OpenAI, *lines: str, endpoint: Any = CHAT) -> Any:
    sent = api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return api.batches.create(input_file_id=sent.id, endpoint=endpoint, completion_window="24h", metadata={"who": "me"})


def results(api: OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in api.files.content(file_id).text.splitlines()]


def test_a_broken_line_fails_and_the_rest_runs(own: Running, api: OpenAI) -> None:
    broken = ["{", "[]", json.dumps({"custom_id": "x"}), line(1), "", line(7, stream=True), line(8, temperature=-1)]
    batch = ended(api, begin(api, line(1), *broken, line(2)).id)
    assert (batch.status, batch.metadata) == ("completed", {"who": "me"})
    assert batch.request_counts.model_dump() == {"total": 8, "completed": 2, "failed": 6}
    good, bad = results(api, batch.output_file_id), results(api, batch.error_file_id)
    assert [each["custom_id"] for each in good] == ["r1", "r2"]
    body = json.loads(line(2))["body"]
    same = httpx.post(own.url + CHAT, json=body).json()
    assert good[1]["response"]["status_code"] == 200
    assert good[1]["response"]["body"]["choices"] == same["choices"]
    codes = [each["error"]["code"] if each["error"] else each["response"]["status_code"] for each in bad]
    assert codes == [*("invalid_json_line", "invalid_json_line", "invalid_url", "duplicate_custom_id", "invalid_body"), 400]
    assert bad[0]["error"]["message"].startswith("line 2: needs a JSON object")
    assert all("\n" not in each["error"]["message"] for each in bad if each["error"])
    assert bad[-1]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.slow
def test_a_batch_goes_on_after_a_restart_and_loses_nothing(llm: LLM, options: ServerOptions) -> None:
    lines = [line(number, tokens=40) for number in range(40)]
    with running(llm, options) as first, OpenAI(base_url=f"{first.url}/v1", api_key="none") as api:
        batch = begin(api, *lines)
        while not api.batches.retrieve(batch.id).request_counts.completed:
            time.sleep(0.005)
        first.server.should_exit = True
    (journal,) = options.files_dir.glob("batches/*.journal")
    done = journal.read_bytes().splitlines()
    assert 0 < len(done) < 40
    journal.write_bytes(b"\n".join([*done, done[0][:50]]))  # as a killed process leaves it
    with running(llm, options) as second, OpenAI(base_url=f"{second.url}/v1", api_key="none") as api:
        batch = ended(api, batch.id)
        assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
        found = results(api, batch.output_file_id)
        assert [each["custom_id"] for each in found] == [f"r{number}" for number in range(40)]
        assert {json.dumps(json.loads(each)) for each in done} <= {json.dumps(each) for each in found}
    assert not list(options.files_dir.glob("batches/*.journal"))


def test_a_batch_is_cancelled_with_what_it_has(own: Running, api: OpenAI) -> None:
    batch = begin(api, *(line(number, tokens=60) for number in range(60)))
    waiting = begin(api, line(1))
    with pytest.raises(openai.ConflictError, match="reads this file"):
        api.files.delete(batch.input_file_id)
    while not api.batches.retrieve(batch.id).request_counts.completed:
        time.sleep(0.005)
    assert api.batches.cancel(batch.id).status == "cancelling"
    batch = ended(api, batch.id)
    assert batch.status == "cancelled"
    assert 0 < len(results(api, batch.output_file_id)) == batch.request_counts.completed < 60
    assert ended(api, waiting.id).status == "completed"
    assert {each.id for each in api.batches.list()} == {waiting.id, batch.id}
    with pytest.raises(openai.ConflictError, match="this one is cancelled"):
        api.batches.cancel(batch.id)


def test_files_are_kept_listed_and_removed(own: Running, api: OpenAI) -> None:
    sent = api.files.create(file=io.BytesIO(b"a\nb\n"), purpose="batch")
    assert (sent.bytes, sent.purpose, sent.status) == (4, "batch", "processed")
    assert [each.id for each in api.files.list()] == [sent.id]
    assert api.files.content(sent.id).read() == b"a\nb\n"
    assert api.files.delete(sent.id).deleted
    for gone in (sent.id, "file-../../etc/passwd", "batch-" + "0" * 32):
        answer = httpx.get(f"{own.url}/v1/files/{gone}")
        assert answer.status_code == 404
    for body, param in (
        ({"input_file_id": sent.id, "endpoint": CHAT}, "input_file_id"),
        ({"input_file_id": sent.id, "endpoint": "/v1/images"}, "endpoint"),
        ({"endpoint": CHAT}, "input_file_id"),
    ):
        error = httpx.post(f"{own.url}/v1/batches", json=body)
        assert (error.status_code, error.json()["error"]["param"]) == (400, param)


def test_uploads_are_bounded_and_never_a_pages(llm: LLM, tmp_path: Path, served: Running) -> None:
    form = {"files": {"file": b"x" * 100_000}, "data": {"purpose": "batch"}}
    small = ServerOptions(served_model_names=("tiny",), files_dir=tmp_path, max_file_bytes=1000)
    with running(llm, small) as own:
        url = f"{own.url}/v1/files"
        assert httpx.post(url, **form).status_code == 413
        assert httpx.post(url, **form, headers={"origin": "https://example.org"}).status_code == 415
        form["files"] = {"file": b"x"}
        assert httpx.post(url, **form).status_code == 200
        assert httpx.post(url, **{**form, "data": {"purpose": "fine-tune"}}).json()["error"]["param"] == "purpose"
        assert httpx.post(url, files={"other": b"x"}).json()["error"]["param"] == "file"
    answer = httpx.get(f"{served.url}/v1/files")
    assert (answer.status_code, "--files-dir" in answer.json()["error"]["message"]) == (404, True)
