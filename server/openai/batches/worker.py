"""Lines of a batch, a run over these lines, and the worker that runs a server's batches one after the other."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.system.json_text import JsonError, parse_json
from headway.core.system.logs import log_traceback
from headway.core.system.system_errors import is_rust_panic
from headway.core.system.text import shown
from headway.hosting.host import EngineDeadError
from headway.server.errors import ApiError, api_error
from headway.server.openai.batches.store import OPEN, BatchStore, FileStore, Journal
from headway.server.routing import DirectMiddleware, Endpoint

log = logging.getLogger("headway")

_AGAIN: Final = frozenset((429, 503))  # Transient statuses: a full queue, or a restarting engine
LONGEST_END: Final = 10.0
"""Maximum seconds to wait for a batch's requests to end after their cancellation."""
_PAUSE: Final = 0.5  # Seconds before a transient failure is retried


class BatchRun:
    """A run over the requests of one file, with their journal."""

    def __init__(
        self, source: Path, journal: Journal, answers: LineAnswers, *, most_bytes: int, endpoint: str | None = None
    ) -> None:
        """most_bytes: maximum number of bytes per line. endpoint: the path that all lines must name; None allows any path."""
        self._source = source
        self.journal = journal
        self._answers = answers
        self._most_bytes = most_bytes
        self._urls = answers.urls if endpoint is None else {endpoint: answers.urls[endpoint]}
        self._ids: set[str] = set()

    def count(self) -> int:
        """Return the number of lines. Reads the whole file. :raises OSError: if the file cannot be read."""
        return sum(1 for _ in lines_of(self._source, self._most_bytes))

    async def answer_all(self, concurrency: int, after_each: Callable[[], None] = lambda: None) -> None:
        """Answer every line that has no answer yet. concurrency: number of concurrent requests. after_each: function to call
        after each answer.

        :raises OSError: if reading or journaling fails.
        :raises EngineDeadError: if the engine has ended permanently.
        """
        lines = lines_of(self._source, self._most_bytes)
        tasks = [asyncio.ensure_future(self._work(lines, after_each)) for _ in range(concurrency)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            done, late = await asyncio.wait(tasks, timeout=LONGEST_END)
            for task in done:  # the first fault is enough
                _ = task.cancelled() or task.exception()
            if late:
                log.error("batch: ends without %d lines, because their requests cannot be cancelled", len(late))

    async def _work(self, lines: Iterator[RawLine], after_each: Callable[[], None]) -> None:
        """Answer lines one after another. Several tasks run this method with the same iterator."""
        for line in lines:
            await self._answer(line)
            after_each()
            await asyncio.sleep(0)  # so that a file full of invalid or answered lines does not block others

    async def _answer(self, raw: RawLine) -> None:
        try:
            line = parse_line(raw, self._urls)
            if line.custom_id in self._ids:
                problem = f"line {raw.number}: custom_id: needs one of its own, got {line.custom_id[:60]!r} again"
                raise LineError("duplicate_custom_id", problem, line.custom_id)
        except LineError as error:
            if error.custom_id is not None:
                self._ids.add(error.custom_id)
            if raw.number not in self.journal:
                failure = {"code": error.code, "message": str(error)}
                self.journal.add(raw.number, error.custom_id, None, failure)
            return
        self._ids.add(line.custom_id)
        if raw.number in self.journal:
            return
        while True:
            status, body = await self._answers.answer(line)
            if status not in _AGAIN:
                break
            if self._answers.is_lost():
                raise EngineDeadError(body["error"]["message"])
            await asyncio.sleep(_PAUSE)
        request_id = body.get("id") if isinstance(body, dict) else None
        response = {"status_code": status, "request_id": request_id or f"req_{uuid4().hex}", "body": body}
        self.journal.add(raw.number, line.custom_id, response)


_LONGEST_ID: Final = 512  # Maximum characters of a custom_id, which results and errors repeat


class RawLine(NamedTuple):
    """A non-empty line of a file."""

    number: int
    """Number of the line, starting at 1."""
    text: bytes | None
    """Text of the line. None if the line is longer than a request may be."""


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(Exception):
    """Error for a line that is not a valid request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        """code: error code for programs. custom_id: the line's id, if it has one."""
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def lines_of(path: Path, most_bytes: int) -> Iterator[RawLine]:
    """Yield the non-empty lines; lines longer than most_bytes have no text. :raises OSError: if the file cannot be read."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(most_bytes + 1):
            number += 1
            text = text if number > 1 else text.removeprefix(codecs.BOM_UTF8)
            long = len(text) > most_bytes and not text.endswith(b"\n")
            while long and (rest := file.readline(most_bytes + 1)):  # skip the rest of the line, in pieces
                if rest.endswith(b"\n"):
                    break
            if long or text.strip():
                yield RawLine(number, None if long else text)


def parse_line(line: RawLine, urls: Mapping[str, Any]) -> BatchLine:
    """Return a line's request. urls: paths that a line may name. :raises LineError: if the line is not a request for one of these
    paths."""
    place = f"line {line.number}"
    if line.text is None:
        raise LineError("line_too_long", f"{place}: needs at most as many bytes as a request's body may have (max_body)")
    try:
        found = parse_json(line.text, place, dict, any_number=True)  # the endpoint rejects such a number with its path
    except JsonError as error:
        raise LineError("invalid_json_line", str(error)) from None
    custom_id, url, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("missing_custom_id", f"{place}: custom_id: needs a text, got {shown(custom_id, 60)}")
    if len(custom_id) > _LONGEST_ID:
        got = f"{len(custom_id)}: {custom_id[:60]!r}..."
        raise LineError("invalid_custom_id", f"{place}: custom_id: needs at most {_LONGEST_ID} characters, got {got}")
    if found.get("method", "POST") != "POST":
        raise LineError("invalid_method", f"{place}: method: needs POST, got {shown(found['method'], 60)}", custom_id)
    if not isinstance(url, str) or url not in urls:
        raise LineError("invalid_url", f"{place}: url: needs {' or '.join(urls)}, got {shown(url, 60)}", custom_id)
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"{place}: body: needs an object, got a {type(body).__name__}", custom_id)
    if body.get("stream"):
        raise LineError("invalid_body", f"{place}: body.stream: needs false, because a file holds whole answers", custom_id)
    return BatchLine(custom_id, url, body)


class LineAnswers:
    """Caller of a server's endpoints for the requests in a batch's lines."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        refuse: Callable[[Request, Exception], Awaitable[Response]],
        is_lost: Callable[[], bool],
    ) -> None:
        """endpoints: path -> endpoint. refuse: function that makes the response if an endpoint raises an error. is_lost: function
        that returns whether the engine is dead."""
        self.urls = endpoints
        self.is_lost = is_lost
        self._app = DirectMiddleware(_nothing_there, endpoints, refuse)

    async def answer(self, line: BatchLine) -> tuple[int, Any]:
        """Return the status and body of the answer to a request, or of an error response if anything raises."""
        try:
            return await self._answer(line)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_rust_panic(error):
                raise
            log.error("batch: a line failed", exc_info=error)
            refused = api_error(error)
            return refused.status, refused.body

    async def _answer(self, line: BatchLine) -> tuple[int, Any]:
        data, sent, status, parts = json.dumps(line.body).encode(), False, 500, []

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.get_running_loop().create_future()  # a client that never disconnects
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message["body"])

        await self._app({**_SCOPE, "path": line.url, "headers": [(b"content-length", str(len(data)).encode())]}, receive, send)
        try:
            return status, parse_json(b"".join(parts), line.url, any_number=True)
        except JsonError as error:
            raise ApiError(500, f"the answer cannot be kept in a file: {error}") from None


_SCOPE: Final = {"type": "http", "method": "POST", "query_string": b""}


async def _nothing_there(scope: Any, receive: Any, send: Any) -> None:
    await ApiError(404, "no such path").response()(scope, receive, send)


class BatchWorker:
    """Runner of batches in the background. Only for the server's event loop."""

    def __init__(self, files: FileStore, batches: BatchStore, answers: LineAnswers, most_bytes: int, concurrency: int) -> None:
        """most_bytes: maximum bytes of a line. concurrency: number of concurrent lines."""
        self.files = files
        self.batches = batches
        self._answers = answers
        self._most_bytes = most_bytes
        self._concurrency = concurrency
        self._lock = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, tuple[dict[str, Any], BatchRun | None]] = {}
        """Batch id -> current object of an unfinished batch, and its run if the batch is being answered."""
        self._answering: set[str] = set()  # batches that wait or are answered; cancelling one cancels its task
        self._unsaved: dict[str, dict[str, Any]] = {}  # objects of batches that ended while the disk was not writable

    def resume(self) -> None:
        """Resume the batches of an earlier server, oldest first."""
        for record in reversed(self.batches.all()):
            if record["status"] in OPEN:
                self.start(record)

    def start(self, record: dict[str, Any]) -> None:
        """Queue a batch to run after the earlier ones."""
        self._running[record["id"]] = record, None
        task = self._tasks[record["id"]] = asyncio.ensure_future(self._process(record))
        task.add_done_callback(partial(self._forget, record["id"]))

    def _forget(self, batch_id: str, _: object) -> None:
        self._tasks.pop(batch_id, None)
        self._running.pop(batch_id, None)
        self._answering.discard(batch_id)

    def now(self, batch_id: str) -> dict[str, Any]:
        """Return a batch with its current counts. :raises ApiError: if the id is unknown."""
        record, run = self._running.get(batch_id, (None, None))
        if record is not None:
            return record if run is None else {**record, "request_counts": _counts(record, run.journal)}
        ended = self._unsaved.get(batch_id)
        if ended is None:
            return self.batches.get(batch_id)
        with suppress(OSError):  # still not writable
            self.batches.save(ended)
            del self._unsaved[batch_id]
        return ended

    def latest(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a batch as `now` does. record: its object on disk."""
        is_running = record["id"] in self._running or record["id"] in self._unsaved
        return self.now(record["id"]) if is_running else record

    def uses(self, file_id: str) -> str | None:
        """Return the id of the batch that reads a file, or None if no batch does."""
        return next((own for own, (record, _) in self._running.items() if record["input_file_id"] == file_id), None)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Cancel a batch, keeping its answers so far. :raises ApiError: if the batch is unknown or has ended."""
        record, _ = self._running.get(batch_id, (None, None))
        if record is None:
            status = self.now(batch_id)["status"]
            raise ApiError(409, f"a batch that goes on can be cancelled, this one is {status}")
        if record["status"] != "cancelling":
            try:
                self.batches.move(record, "cancelling")
            except OSError as error:  # the batch ends anyway
                log.error("batch %s: the cancellation cannot be saved: %s", batch_id, error)
            if batch_id in self._answering:
                self._tasks[batch_id].cancel()
        return self.now(batch_id)

    async def close(self) -> None:
        """Stop the batches. The next server resumes them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _process(self, record: dict[str, Any]) -> None:
        try:
            if record["status"] != "cancelling":
                self._answering.add(record["id"])
                try:
                    async with self._lock:
                        await self._answer(record)
                except asyncio.CancelledError:
                    if record["status"] != "cancelling":  # the server is shutting down
                        raise
                self._answering.discard(record["id"])
            await self._finish(record)
        except EngineDeadError:  # so has the server
            return
        except BaseException as error:
            if not isinstance(error, Exception) and not is_rust_panic(error):
                raise
            self._fail(record, error)

    async def _answer(self, record: dict[str, Any]) -> None:
        with Journal(self.batches.journal(record["id"]), _name(record)) as journal:
            source = self.files.content(record["input_file_id"])
            if record["endpoint"] not in self._answers.urls:
                raise ConfigError("endpoint", " or ".join(self._answers.urls), record["endpoint"])
            if not source.is_file():
                raise ConfigError("input_file_id", "a file that this server has", record["input_file_id"])
            run = BatchRun(source, journal, self._answers, most_bytes=self._most_bytes, endpoint=record["endpoint"])
            record["request_counts"]["total"] = await asyncio.to_thread(run.count)
            self._running[record["id"]] = record, run
            if record["status"] == "validating":
                self.batches.move(record, "in_progress")
            await run.answer_all(self._concurrency)

    async def _finish(self, record: dict[str, Any]) -> None:
        """Write the journal's answers to files. After a crash the same files are written again under the same ids."""
        if record["output_file_id"] is None and record["error_file_id"] is None:
            ids = {"output_file_id": self.files.new_id(), "error_file_id": self.files.new_id()}
            record.update(ids)
            self.batches.save(record) if record["status"] == "cancelling" else self.batches.move(record, "finalizing")
        with Journal(self.batches.journal(record["id"]), _name(record)) as journal:
            counts = _counts(record, journal)
            for failed, field in ((False, "output_file_id"), (True, "error_file_id")):
                file_id = record[field]
                if await asyncio.to_thread(journal.write, self.files.content(file_id), failed):
                    self.files.register(file_id, f"{record['id']}_{'error' if failed else 'output'}.jsonl", "batch_output")
                else:
                    record[field] = None
        last = "cancelled" if record["status"] == "cancelling" else "completed"
        self.batches.move(record, last, request_counts=counts)
        self.batches.journal(record["id"]).unlink(missing_ok=True)

    def _fail(self, record: dict[str, Any], error: BaseException) -> None:
        """End a batch that cannot continue; its journal stays."""
        log.error("batch %s: failed: %s", record["id"], error)
        log_traceback("a batch", error)
        for field in ("output_file_id", "error_file_id"):
            if record[field] is not None and not self.files.has(record[field]):
                record[field] = None
        reason = error.strerror if isinstance(error, OSError) else str(error) if isinstance(error, HeadwayError) else ""
        message = reason or f"{type(error).__name__}: {error}"
        data = [{"code": "batch_failed", "message": message, "line": None, "param": None}]
        try:
            self.batches.move(record, "failed", errors={"object": "list", "data": data})
        except OSError as again:
            self._unsaved[record["id"]] = record
            log.error("batch %s: its end cannot be saved, so it resumes at the next start: %s", record["id"], again)


def _name(record: dict[str, Any]) -> str:
    return str(record["id"]).removeprefix("batch-")


def _counts(record: dict[str, Any], journal: Journal) -> dict[str, int]:
    total = record["request_counts"]["total"]
    return {"total": total, "completed": journal.num_answered, "failed": journal.num_failed}
