"""The batches of a server: one after the other, each to its end, over as many starts of the server as that takes."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Any

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.system.logs import log_traceback
from headway.core.system.system_errors import is_rust_panic
from headway.hosting.host import EngineDeadError
from headway.server.errors import ApiError
from headway.server.openai.batches.journal import Journal
from headway.server.openai.batches.lines import LineAnswers
from headway.server.openai.batches.run import BatchRun
from headway.server.openai.batches.store import OPEN, BatchStore, FileStore

log = logging.getLogger("headway")


class BatchWorker:
    """Runs batches in the background; for the server's event loop alone."""

    def __init__(self, files: FileStore, batches: BatchStore, answers: LineAnswers, most_bytes: int, concurrency: int) -> None:
        """most_bytes: of a line. concurrency: lines at a time."""
        self._files = files
        self._batches = batches
        self._answers = answers
        self._most_bytes = most_bytes
        self._concurrency = concurrency
        self._turn = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, tuple[dict[str, Any], BatchRun | None]] = {}
        """The objects of batches that go on, as they are now, and the run of the one whose turn it is."""
        self._answering: set[str] = set()
        """Batches that wait for their turn or are answered, whose tasks a cancellation ends; files are written to the end."""
        self._unsaved: dict[str, dict[str, Any]] = {}
        """The objects of batches that have ended while the disk could not be written."""

    def resume(self) -> None:
        """Go on with the batches that an earlier server has left, the oldest first."""
        for record in reversed(self._batches.all()):
            if record["status"] in OPEN:
                self.start(record)

    def start(self, record: dict[str, Any]) -> None:
        """Run a batch when its turn has come."""
        self._running[record["id"]] = record, None
        task = self._tasks[record["id"]] = asyncio.ensure_future(self._process(record))
        task.add_done_callback(partial(self._forget, record["id"]))

    def _forget(self, batch_id: str, _: object) -> None:
        self._tasks.pop(batch_id, None)
        self._running.pop(batch_id, None)
        self._answering.discard(batch_id)

    def now(self, batch_id: str) -> dict[str, Any]:
        """A batch with its counts at this moment.

        :raises ApiError: there is none of this id.
        """
        record, run = self._running.get(batch_id, (None, None))
        if record is not None:
            return record if run is None else {**record, "request_counts": _counts(record, run.journal)}
        ended = self._unsaved.get(batch_id)
        if ended is None:
            return self._batches.get(batch_id)
        with suppress(OSError):  # as before
            self._batches.save(ended)
            del self._unsaved[batch_id]
        return ended

    def latest(self, record: dict[str, Any]) -> dict[str, Any]:
        """A batch as `now` tells it. record: its object on the disk."""
        goes_on = record["id"] in self._running or record["id"] in self._unsaved
        return self.now(record["id"]) if goes_on else record

    def uses(self, file_id: str) -> str | None:
        """The batch that reads a file; None: there is none."""
        return next((own for own, (record, _) in self._running.items() if record["input_file_id"] == file_id), None)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """End a batch after what it has answered; one that has ended stays as it is.

        :raises ApiError: there is none of this id, or it is over.
        """
        record, _ = self._running.get(batch_id, (None, None))
        if record is None:
            status = self.now(batch_id)["status"]
            raise ApiError(409, f"a batch that goes on can be cancelled, this one is {status}")
        if record["status"] != "cancelling":
            try:
                self._batches.move(record, "cancelling")
            except OSError as error:  # it ends all the same
                log.error("batch %s: that it is cancelled cannot be written: %s", batch_id, error)
            if batch_id in self._answering:
                self._tasks[batch_id].cancel()
        return self.now(batch_id)

    async def close(self) -> None:
        """Leave the batches as they are, for the next start of a server."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _process(self, record: dict[str, Any]) -> None:
        """Run a batch to its end, which whatever is raised on the way is too."""
        try:
            if record["status"] != "cancelling":
                self._answering.add(record["id"])
                try:
                    async with self._turn:
                        await self._answer(record)
                except asyncio.CancelledError:
                    if record["status"] != "cancelling":  # the server ends
                        raise
                self._answering.discard(record["id"])
            await self._finish(record)
        except EngineDeadError:  # so does the server
            return
        except BaseException as error:
            if not isinstance(error, Exception) and not is_rust_panic(error):
                raise
            self._fail(record, error)

    async def _answer(self, record: dict[str, Any]) -> None:
        """Answer the lines that have no answer yet."""
        with Journal(self._batches.journal(record["id"]), _name(record)) as journal:
            source = self._files.content(record["input_file_id"])
            if record["endpoint"] not in self._answers.urls:
                raise ConfigError("endpoint", " or ".join(self._answers.urls), record["endpoint"])
            if not source.is_file():
                raise ConfigError("input_file_id", "a file that this server has", record["input_file_id"])
            run = BatchRun(source, journal, self._answers, most_bytes=self._most_bytes, endpoint=record["endpoint"])
            record["request_counts"]["total"] = await asyncio.to_thread(run.count)
            self._running[record["id"]] = record, run
            if record["status"] == "validating":
                self._batches.move(record, "in_progress")
            await run.answer_all(self._concurrency)

    async def _finish(self, record: dict[str, Any]) -> None:
        """Turn the journal into files. What a killed server has made of it is made again, under the same ids."""
        if record["output_file_id"] is None and record["error_file_id"] is None:
            ids = {"output_file_id": self._files.new_id(), "error_file_id": self._files.new_id()}
            record.update(ids)
            self._batches.save(record) if record["status"] == "cancelling" else self._batches.move(record, "finalizing")
        with Journal(self._batches.journal(record["id"]), _name(record)) as journal:
            counts = _counts(record, journal)
            for failed, field in ((False, "output_file_id"), (True, "error_file_id")):
                file_id = record[field]
                if await asyncio.to_thread(journal.write, self._files.content(file_id), failed):
                    self._files.register(file_id, f"{record['id']}_{'error' if failed else 'output'}.jsonl", "batch_output")
                else:
                    record[field] = None
        last = "cancelled" if record["status"] == "cancelling" else "completed"
        self._batches.move(record, last, request_counts=counts)
        self._batches.journal(record["id"]).unlink(missing_ok=True)

    def _fail(self, record: dict[str, Any], error: BaseException) -> None:
        """End a batch that cannot go on; its journal stays."""
        log.error("batch %s has failed: %s", record["id"], error)
        log_traceback("a batch", error)
        for field in ("output_file_id", "error_file_id"):
            if record[field] is not None and not self._files.has(record[field]):
                record[field] = None
        reason = error.strerror if isinstance(error, OSError) else str(error) if isinstance(error, HeadwayError) else ""
        message = reason or f"{type(error).__name__}: {error}"
        data = [{"code": "batch_failed", "message": message, "line": None, "param": None}]
        try:
            self._batches.move(record, "failed", errors={"object": "list", "data": data})
        except OSError as again:
            self._unsaved[record["id"]] = record
            log.error("batch %s goes on at the next start, because its end cannot be written: %s", record["id"], again)


def _name(record: dict[str, Any]) -> str:
    return str(record["id"]).removeprefix("batch-")


def _counts(record: dict[str, Any], journal: Journal) -> dict[str, int]:
    total = record["request_counts"]["total"]
    return {"total": total, "completed": journal.num_answered, "failed": journal.num_failed}
