"""/v1/files and /v1/batches: broken lines, restarts, and what is gone."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from starlette.requests import Request
from starlette.responses import Response

from headway import LLM
from headway.core.contract.errors import ConfigError
from headway.server.errors import Fields, api_error
from headway.server.openai.batches import store
from headway.server.openai.batches.store import BatchStore, FileStore, Journal, open_stores
from headway.server.openai.batches.worker import BatchWorker, LineAnswers
from headway.server.options import ServerOptions
from headway.server.routing import Endpoint, read_body
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
        assert httpx.get(f"{own.url}/v1/files/{gone}").status_code == 404
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


PATH = "/v1/completions"
Faults = Callable[[Path], None]


class PanicException(BaseException):
    """As a library in Rust raises over its input."""


class SendFails(Response):
    """An answer that raises while it is sent."""

    async def __call__(self, *_: Any) -> None:
        raise RuntimeError("half an answer")


async def answer(request: Request) -> Response:
    """Answer a body, or do what it says."""
    body = await read_body(request, Fields, ServerOptions())
    what = getattr(body, "do", None)
    if what == "hang":
        await asyncio.Event().wait()
    if what == "hang on":
        for _ in range(1000):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
    if what == "text":
        return Response("no JSON")
    if what == "send":
        return SendFails()
    if what is not None:
        raise {"panic": PanicException("a panic"), "deep": RecursionError(), "key": KeyError("x"), "memory": MemoryError()}[what]
    return Response(b'{"id": "mine"}', media_type="application/json")


async def refuse(_: Request, error: Exception) -> Response:
    return api_error(error).response()


def answers_of(endpoints: Mapping[str, Endpoint] | None = None) -> LineAnswers:
    return LineAnswers({PATH: answer} if endpoints is None else endpoints, refuse, lambda: False)


def faulty_line(number: int, **body: Any) -> bytes:
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": PATH, "body": body}).encode()


class Bench:
    """Stores and a worker over endpoints that need no model."""

    def __init__(self, folder: Path, answers: LineAnswers | None = None) -> None:
        self.files, self.batches = open_stores(folder)
        self.worker = BatchWorker(self.files, self.batches, answers or answers_of(), 2**20, 2)

    def begin(self, *lines: bytes) -> str:
        sent = self.files.add(io.BytesIO(b"\n".join(lines)), "in.jsonl", "batch")
        record = self.batches.new(PATH, sent["id"], "24h", None)
        self.worker.start(record)
        return str(record["id"])

    async def ended(self, batch_id: str, seconds: float = 10) -> dict[str, Any]:
        ends = time.monotonic() + seconds
        while (found := self.worker.now(batch_id))["status"] not in ("completed", "failed", "cancelled"):
            assert time.monotonic() < ends, found
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.01)  # the end of its task
        return found

    def results(self, file_id: str | None) -> list[dict[str, Any]]:
        return [] if file_id is None else [json.loads(each) for each in self.files.content(file_id).read_bytes().splitlines()]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_whatever_a_line_holds_ends_that_line_alone(llm: LLM, tmp_path: Path) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 2, "temperature": 0}

    def chats(name: object, url: object = "/v1/chat/completions", **body: Any) -> bytes:
        return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {**chat, **body}}).encode()

    vast = chats("vast", seed=5).replace(b'"seed": 5', b'"seed": 1' + b"0" * 30)
    lines = {
        b"{": None,
        b"[" * 3000: None,
        b"\xff\xfe": None,
        b'{"custom_id": "\\ud800", "url": "x"}': None,
        b'{"custom_id": ' + b"9" * 5000 + b"}": None,
        chats(5): None,
        chats(["a"]): None,
        chats("url", {"a": 1}): "url",
        chats("none", "/nowhere"): "none",
        chats("list").replace(b'"body": {', b'"body": [], "x": {'): "list",
        chats("method").replace(b"POST", b"GET"): "method",
        chats("stream", stream=True): "stream",
        chats("n", n=10**9): "n",
        vast: "vast",
        vast.replace(b"vast", b"inf").replace(b"1" + b"0" * 30, b"1e999"): "inf",
        vast.replace(b"vast", b"nan").replace(b"1" + b"0" * 30, b"NaN"): "nan",
        chats("model", model="nobody"): "model",
        chats("roles", messages=[{"role": {"a": []}}]): "roles",
        chats("nested", tools=[[[5]]]): "nested",
        chats("x" * 300_000, temperature=-1): None,  # no answer repeats an id of that length
        chats("form", structured_outputs={"regex": "(a"}): "form",
        chats("good"): "good",  # again
    }
    content = b"\xef\xbb\xbf" + b"\r\n\r\n".join([chats("good"), *lines, chats("last")])
    options = ServerOptions(served_model_names=("tiny",), files_dir=tmp_path, batch_concurrency=2)
    with running(llm, options) as own, httpx.Client(base_url=f"{own.url}/v1", timeout=30) as http:
        sent = http.post("/files", files={"file": content}, data={"purpose": "batch"}).json()
        of_chat = {"endpoint": "/v1/chat/completions", "metadata": {"who": "me"}}
        begun = http.post("/batches", json={**of_chat, "input_file_id": sent["id"]}).json()
        while (batch := http.get(f"/batches/{begun['id']}").json())["status"] not in ("completed", "failed"):
            time.sleep(0.02)
        good, bad = (http.get(f"/files/{batch[name]}/content").text.splitlines() for name in ("output_file_id", "error_file_id"))
        assert http.get("/files/" + batch["output_file_id"]).json()["purpose"] == "batch_output"
        same = http.post("/chat/completions", json=chat).json()
    assert batch["request_counts"] == {"total": len(lines) + 2, "completed": 2, "failed": len(lines)}
    assert batch["metadata"] == {"who": "me"}
    assert [json.loads(each)["custom_id"] for each in good] == ["good", "last"]
    assert json.loads(good[0])["response"]["body"]["choices"] == same["choices"]
    found = [json.loads(each) for each in bad]
    assert [each["custom_id"] for each in found] == list(lines.values())
    assert found[0]["error"]["message"].startswith("line 3: needs a JSON object")
    assert all("\n" not in each["error"]["message"] for each in found if each["error"])
    codes = {each["custom_id"]: each["error"]["code"] for each in found if each["error"]}
    assert {"none": "invalid_url", "list": "invalid_body", "good": "duplicate_custom_id"}.items() <= codes.items(), codes
    assert all(each["error"] or 400 <= each["response"]["status_code"] < 500 for each in found)
    by_id = {each["custom_id"]: each for each in found}
    assert by_id["vast"]["response"]["body"]["error"]["param"] == by_id["inf"]["response"]["body"]["error"]["param"] == "seed"


async def test_a_fault_of_ours_ends_its_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    wrong = ["panic", "deep", "key", "memory", "text", "send"]
    found = await bench.ended(
        bench.begin(faulty_line(0), *(faulty_line(number, do=each) for number, each in enumerate(wrong, 1)), faulty_line(9))
    )
    assert (found["status"], found["request_counts"]) == ("completed", {"total": 8, "completed": 2, "failed": 6})
    bad = bench.results(found["error_file_id"])
    assert [each["custom_id"] for each in bad] == [f"r{number}" for number in range(1, 7)]
    assert {each["response"]["status_code"] for each in bad} == {500}
    assert bench.results(found["output_file_id"])[0]["response"]["request_id"] == "mine"


class Raising(LineAnswers):
    """Raises where a batch is answered, past all that guards a line."""

    def __init__(self, error: BaseException) -> None:
        super().__init__({PATH: answer}, refuse, lambda: False)
        self.error = error

    async def answer(self, _: object) -> tuple[int, Any]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (MemoryError(), "MemoryError"),
        (PanicException("a panic"), "PanicException: a panic"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/secret/place"), "No space left on device"),
    ],
)
async def test_whatever_a_batch_raises_ends_it_with_the_reason(tmp_path: Path, error: BaseException, reason: str) -> None:
    bench = Bench(tmp_path, Raising(error))
    found = await bench.ended(bench.begin(faulty_line(0), faulty_line(1)))
    assert found["status"] == "failed"
    (told,) = found["errors"]["data"]
    assert told["message"].startswith(reason)
    assert "/secret" not in told["message"]
    assert (found["failed_at"] is None, found["output_file_id"], found["error_file_id"]) == (False, None, None)
    assert bench.batches.get(found["id"]) == found


async def test_a_batch_without_its_file_or_its_path_fails(tmp_path: Path) -> None:
    bench = Bench(tmp_path, answers_of({"/v1/embeddings": answer}))
    assert "endpoint: needs /v1/embeddings" in (await bench.ended(bench.begin(faulty_line(0))))["errors"]["data"][0]["message"]
    bench = Bench(tmp_path)
    first, second = bench.begin(faulty_line(0)), bench.begin(faulty_line(0))
    bench.files.content(bench.worker.now(first)["input_file_id"]).unlink()
    bench.batches.journal(second).mkdir()
    assert "input_file_id: needs a file" in (await bench.ended(first))["errors"]["data"][0]["message"]
    assert (await bench.ended(second))["errors"]["data"][0]["message"] == "Is a directory"


def test_batches_that_hang_or_wait_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.server.openai.batches.worker.LONGEST_END", 0.1)

    async def work() -> None:
        bench = Bench(tmp_path)
        hangs, waits, last = (
            bench.begin(faulty_line(0), faulty_line(1, do="hang on")),
            bench.begin(faulty_line(2)),
            bench.begin(faulty_line(3)),
        )
        while bench.worker.now(hangs)["request_counts"]["completed"] < 1:
            await asyncio.sleep(0.005)
        assert bench.worker.cancel(waits)["status"] == "cancelling"
        assert (await bench.ended(waits))["status"] == "cancelled"
        assert bench.worker.now(hangs)["status"] == "in_progress"
        bench.worker.cancel(hangs)
        bench.worker.cancel(hangs)
        found = await bench.ended(hangs)
        assert (found["status"], found["request_counts"]) == ("cancelled", {"total": 2, "completed": 1, "failed": 0})
        assert [each["custom_id"] for each in bench.results(found["output_file_id"])] == ["r0"]
        assert (await bench.ended(last))["status"] == "completed"
        await bench.worker.close()

    loop = asyncio.new_event_loop()  # which is left with the request that no cancellation ends
    loop.run_until_complete(asyncio.wait_for(work(), 30))


def test_a_full_disk_is_answered_507(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(served_model_names=("tiny",), files_dir=tmp_path)
    with running(llm, options) as own, httpx.Client(base_url=f"{own.url}/v1") as http:
        form: dict[str, Any] = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
        sent = http.post("/files", **form).json()
        for number in (errno.ENOSPC, errno.EDQUOT):
            error = OSError(number, os.strerror(number))
            with monkeypatch.context() as patched:

                def full(*_: Any, error: OSError = error, **__: Any) -> None:
                    raise error

                patched.setattr(store, "write_whole", full)
                answers = [
                    http.post("/files", **form),
                    http.post("/batches", json={"input_file_id": sent["id"], "endpoint": PATH}),
                ]
                patched.setattr("starlette.formparsers.SpooledTemporaryFile", full)
                answers.append(http.post("/files", **form))
            for each in answers:
                assert (each.status_code, os.strerror(number) in each.json()["error"]["message"]) == (507, True)
        assert [each["id"] for each in http.get("/files").json()["data"]] == [sent["id"]]
        assert http.get("/batches").json()["data"] == []


def damaged(name: str, content: bytes | None = None) -> Faults:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content or b"")

    return write


def spoiled(**fields: Any) -> Faults:
    """A record with other values, under a name that is right."""

    def write(folder: Path) -> None:
        record = json.loads(next(folder.glob("*.json")).read_bytes())
        name = f"{record['id'].split('-')[0]}-{'e' * 32}"
        (folder / f"{name}.json").write_text(json.dumps({**record, "id": name, **fields}))

    return write


ID = "0" * 32
DAMAGES: dict[str, Faults] = {
    "empty": damaged(f"KIND-{ID}.json"),
    "no JSON": damaged(f"KIND-{ID}.json", b"\0" * 100),
    "deep": damaged(f"KIND-{ID}.json", b"[" * 10**5),
    "of a stranger": damaged("notes.json", b'{"mine": 1}'),
    "a folder": lambda folder: (folder / f"KIND-{ID}.json").mkdir(),
    "a pipe": lambda folder: os.mkfifo(folder / f"KIND-{ID}.json"),
    "a link to nothing": lambda folder: (folder / f"KIND-{ID}.json").symlink_to(f"KIND-{ID}.json"),
    "another's name": spoiled(id=f"KIND-{ID}"),
    "an id that is a path": spoiled(id="../KIND"),
    "a time that is a text": spoiled(created_at="now"),
    "no status": spoiled(status=None),
}


@pytest.mark.parametrize("kind", ["file", "batch"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, name: str) -> None:
    files, batches = open_stores(tmp_path)
    sent = files.add(io.BytesIO(b"{}"), "in.jsonl", "batch")
    batches.move(batches.new(PATH, sent["id"], "24h", None), "completed")
    records: FileStore | BatchStore = files if kind == "file" else batches
    whole = records.all()
    there = set(records.folder.iterdir())
    DAMAGES[name](records.folder)
    (broken,) = set(records.folder.iterdir()) - there
    final = broken.with_name(broken.name.replace("KIND", kind))
    broken.rename(final)
    if final.is_file() and not final.is_symlink():
        final.write_bytes(final.read_bytes().replace(b"KIND", kind.encode()))
    with caplog.at_level(logging.WARNING, "headway"):
        again = Bench(tmp_path)
        asyncio.run(resumed(again))
        records = again.files if kind == "file" else again.batches
        assert records.all() == whole == records.all()
        with pytest.raises(Exception, match="there is no"):
            records.get(final.stem)
    said = [each.getMessage() for each in caplog.records if final.name in each.getMessage()]
    assert len(said) == 1
    assert "\n" not in said[0]


async def resumed(bench: Bench) -> None:
    bench.worker.resume()
    await bench.worker.close()


def test_a_journal_leaves_out_a_damaged_line_and_touches_no_file_of_others(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, "a") as journal:
        for number in range(1, 4):
            journal.add(number, f"r{number}", {"status_code": 200, "body": {}})
        with pytest.raises(ConfigError, match="another process"):
            Journal(path, "a")
    first, _, third = path.read_bytes().splitlines()
    for spoilt in (b"\0" * 20, b"[]", b"5", b'{"id": 5}', third.replace(b"200", b'"x"'), b"[" * 10**4, first[:-5]):
        path.write_bytes(b"\n".join([first, spoilt, third, b""]))
        with Journal(path, "a") as journal:
            assert [number in journal for number in (1, 2, 3)] == [True, False, True]
            journal.add(2, "r2", {"status_code": 400, "body": {}})
            assert (journal.num_answered, journal.num_failed) == (2, 1)
            assert (journal.write(tmp_path / "all"), journal.write(tmp_path / "bad", failed=True)) == (3, 1)
        assert [json.loads(each)["custom_id"] for each in (tmp_path / "all").read_bytes().splitlines()] == ["r1", "r2", "r3"]
    for foreign in (b"my notes", b"my notes\n", b'{"mine": 1}\n', first.replace(b"req_a", b"req_b") + b"\n"):
        path.write_bytes(foreign)
        with pytest.raises(ConfigError, match="needs the answers to this file"):
            Journal(path, "a")
        assert path.read_bytes() == foreign
