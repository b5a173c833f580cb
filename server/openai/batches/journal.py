"""What has been answered of a batch: a file that grows by a line for each answer, and outlives the process at any moment."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import orjson
from pydantic import BaseModel, Field

from headway.core.contract.errors import ConfigError
from headway.core.system.files import write_whole
from headway.core.system.json_text import parse_json
from headway.server.errors import api_error

log = logging.getLogger("headway")


class Place(NamedTuple):
    """Where an answer lies in the file."""

    start: int
    end: int
    failed: bool


class BatchResponse(BaseModel):
    """What the server has answered to a line."""

    status_code: Annotated[int, Field(strict=True)]


class BatchAnswer(BaseModel):
    """A line of a journal and of a batch's output, as far as a journal reads it again."""

    id: Annotated[str, Field(pattern=r"^batch_req_.*_\d{1,18}$")]
    response: BatchResponse | None
    error: dict[str, Any] | None

    @property
    def failed(self) -> bool:
        """Whether the answer is an error."""
        return self.error is not None or self.response is None or self.response.status_code >= 400


class Journal:
    """The answers of one batch by the numbers of their lines.

    An answer is `{"id", "custom_id", "response", "error"}`, as OpenAI writes it; the id ends with the batch's name and the line's
    number. A line that a process was writing when it was killed is dropped, and answered again; so is one that was damaged.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Open the file, or begin one. name: the batch's; letters and digits.

        :raises ConfigError: the file is another batch's.
        :raises OSError: it cannot be opened.
        """
        self.path = path
        self._name = name
        self._start = f'{{"id":"batch_req_{name}_'.encode()
        self._places: dict[int, Place] = {}
        self.num_failed = 0
        """Lines whose answer is an error."""
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            self._end = self._read()
            os.ftruncate(self._handle, self._end)
        except BaseException:
            os.close(self._handle)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(str(self.path), "a file that nobody writes to", "one that another process fills") from None

    def _read(self) -> int:
        """Read what there is; returns where the last whole line ends."""
        end = num_lines = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # the last piece of a write that was cut short
                    is_own = bool(self._places) or line.startswith(self._start[: len(line)])
                    if not is_own:
                        raise self._foreign("a text that is no answer")
                    break
                num_lines += 1
                try:
                    found = BatchAnswer.model_validate(parse_json(line, f"line {num_lines}", dict, any_number=True))
                except ValueError as error:
                    log.warning("%s: line %d is left out, and answered again: %s", self.path, num_lines, api_error(error))
                else:
                    name, _, number = found.id.removeprefix("batch_req_").rpartition("_")
                    if name != self._name:
                        raise self._foreign("answers to another, or to what it once held")
                    self._note(int(number), end, end + len(line), found.failed)
                end += len(line)
        if num_lines and not self._places:
            raise self._foreign("a text without any")
        return end

    def _foreign(self, got: str) -> ConfigError:
        return ConfigError(str(self.path), "the answers to this file", got, "name another output, or remove it to begin anew")

    def _note(self, number: int, start: int, end: int, failed: bool) -> None:
        old = self._places.get(number)
        self.num_failed += failed - (old is not None and old.failed)
        self._places[number] = Place(start, end, failed)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    @property
    def num_answered(self) -> int:
        """Lines whose answer is none."""
        return len(self._places) - self.num_failed

    def add(self, number: int, custom_id: str | None, response: Mapping[str, Any] | None, error: object = None) -> None:
        """Write an answer.

        :raises OSError: it cannot be written; nothing is left of it.
        """
        told = {"id": f"batch_req_{self._name}_{number}", "custom_id": custom_id, "response": response, "error": error}
        failed = error is not None or response is None or response["status_code"] >= 400
        line = orjson.dumps(told) + b"\n"
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError:
            os.ftruncate(self._handle, self._end)
            raise
        self._note(number, self._end, self._end + len(line), failed)
        self._end += len(line)

    def write(self, path: Path, failed: bool | None = None) -> int:
        """Write answers to a file that appears whole, in the order of their lines. failed: those alone, or the others alone.

        Returns their number; for none no file is written.

        :raises OSError: the file cannot be written.
        """
        wanted = [place for _, place in sorted(self._places.items()) if failed is None or place.failed == failed]
        if wanted:
            with mmap.mmap(self._handle, self._end, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                pieces = [view[place.start : place.end] for place in wanted]
                try:
                    write_whole(path, *pieces, durable=True)
                finally:
                    for piece in pieces:
                        piece.release()
        return len(wanted)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)
        self._handle = -1  # a late answer must not be written into another file of this number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
