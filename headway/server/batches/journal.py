"""What has been answered of a batch: a file that grows by a line for each answer, and outlives the process at any moment."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import orjson

from headway.core.contract.errors import ConfigError
from headway.core.system.files import write_whole


class Place(NamedTuple):
    """Where an answer lies in the file."""

    start: int
    end: int
    failed: bool


class Journal:
    """The answers of one batch by the numbers of their lines.

    An answer is `{"id", "custom_id", "response", "error"}`, as OpenAI writes it; the id ends with the batch's name and the line's
    number. A line that a process was writing when it was killed is dropped, and answered again.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Open the file, or begin one. name: the batch's; letters and digits.

        :raises ConfigError: the file is another batch's.
        :raises OSError: it cannot be opened.
        """
        self.path, self._name = path, name
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
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                try:
                    found = orjson.loads(line) if line.endswith(b"\n") else None
                except ValueError:  # the last piece of a write that was cut short
                    break
                if found is None:
                    break
                name, _, number = str(found["id"]).removeprefix("batch_req_").rpartition("_")
                if name != self._name or not number.isdigit():
                    need, got = "the answers to this file", "answers to another, or to what it once held"
                    raise ConfigError(str(self.path), need, got, "name another output, or remove it to begin anew")
                self._note(int(number), end, end + len(line), found)
                end += len(line)
        return end

    def _note(self, number: int, start: int, end: int, told: Mapping[str, Any]) -> None:
        failed = told["error"] is not None or told["response"] is None or told["response"]["status_code"] >= 400
        self._places[number] = Place(start, end, failed)
        self.num_failed += failed

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
        line = orjson.dumps(told) + b"\n"
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError:
            os.ftruncate(self._handle, self._end)
            raise
        self._note(number, self._end, self._end + len(line), told)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
