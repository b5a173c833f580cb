"""A batch that runs: many lines at a time, each answered once, whatever the others do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from uuid import uuid4

from headway.hosting.host import EngineDeadError
from headway.server.openai.batches.journal import Journal
from headway.server.openai.batches.lines import LineAnswers, LineError, RawLine, lines_of, parse_line

log = logging.getLogger("headway")

_AGAIN: Final = frozenset((429, 503))
"""Statuses that say nothing about a request: the queue is full, or the engine is being started again."""
LONGEST_END: Final = 10.0
"""Seconds that the requests of a batch that ends may take to notice."""
_PAUSE: Final = 0.5
"""Seconds after which such a request is made again."""


class BatchRun:
    """The requests of one file and their journal."""

    def __init__(
        self, source: Path, journal: Journal, answers: LineAnswers, *, most_bytes: int, endpoint: str | None = None
    ) -> None:
        """most_bytes: of a line. endpoint: the path that all lines must name; None: any that there is."""
        self._source = source
        self.journal = journal
        self._answers = answers
        self._most_bytes = most_bytes
        self._urls = answers.urls if endpoint is None else {endpoint: answers.urls[endpoint]}
        self._ids: set[str] = set()

    def count(self) -> int:
        """The number of lines. Reads the whole file.

        :raises OSError: it cannot be read.
        """
        return sum(1 for _ in lines_of(self._source, self._most_bytes))

    async def answer_all(self, concurrency: int, after_each: Callable[[], None] = lambda: None) -> None:
        """Answer every line that has no answer yet. concurrency: requests at a time. after_each: called after each answer.

        :raises OSError: the file cannot be read, or the journal not written.
        :raises EngineDeadError: the engine has ended for good.
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
                log.error("a batch ends without %d lines whose requests cannot be cancelled", len(late))

    async def _work(self, lines: Iterator[RawLine], after_each: Callable[[], None]) -> None:
        """Answer one line after the other, of those that nobody else has taken."""
        for line in lines:
            await self._answer(line)
            after_each()
            await asyncio.sleep(0)  # a file full of broken or answered lines must not hold up others

    async def _answer(self, raw: RawLine) -> None:
        try:
            line = parse_line(raw, self._urls)
            if line.custom_id in self._ids:
                said = f"line {raw.number}: custom_id: needs one of its own, got {line.custom_id[:60]!r} again"
                raise LineError("duplicate_custom_id", said, line.custom_id)
        except LineError as error:
            if error.custom_id is not None:
                self._ids.add(error.custom_id)
            if raw.number not in self.journal:
                told = {"code": error.code, "message": str(error)}
                self.journal.add(raw.number, error.custom_id, None, told)
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
