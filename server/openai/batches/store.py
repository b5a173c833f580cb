"""Files, batches and their journals on disk, which survive a restart of the server."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, NamedTuple, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field

from headway.core.contract.errors import ConfigError
from headway.core.system.files import make_private, read_text, write_whole
from headway.core.system.json_text import parse_json
from headway.core.system.text import harmless, shown
from headway.server.errors import ApiError, api_error

log = logging.getLogger("headway")


class Place(NamedTuple):
    """Position of an answer in the journal's file."""

    start: int
    end: int
    failed: bool


class BatchResponse(BaseModel):
    """The server's response to a line."""

    status_code: Annotated[int, Field(strict=True)]


class BatchAnswer(BaseModel):
    """A line of a journal and of a batch's output, reduced to the fields that a journal reads."""

    id: Annotated[str, Field(pattern=r"^batch_req_.*_\d{1,18}$")]
    response: BatchResponse | None
    error: dict[str, Any] | None

    @property
    def failed(self) -> bool:
        """True if the answer is an error."""
        return self.error is not None or self.response is None or self.response.status_code >= 400


class Journal:
    """Answers of one batch by line number, in an append-only file.

    An answer is `{"id", "custom_id", "response", "error"}`, as in OpenAI's API; the id ends with the batch's name and the line
    number. An incomplete or damaged answer, for example after a crash, is dropped, and its line is answered again.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Open or create the file. name: the batch's name.

        :raises ConfigError: if the file belongs to a different batch, or another process writes to it.
        :raises OSError: if the file cannot be opened.
        """
        self.path = path
        self._name = name
        self._start = f'{{"id":"batch_req_{name}_'.encode()
        self._places: dict[int, Place] = {}
        self.num_failed = 0
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
        """Read the existing answers. Return the end of the last complete line."""
        end = num_lines = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # an incomplete write
                    is_own = bool(self._places) or line.startswith(self._start[: len(line)])
                    if not is_own:
                        raise self._foreign("a text that is no answer")
                    break
                num_lines += 1
                try:
                    found = BatchAnswer.model_validate(parse_json(line, f"line {num_lines}", dict, any_number=True))
                except ValueError as error:
                    log.warning(
                        "%s: line %d is not usable; its request is answered again: %s", self.path, num_lines, api_error(error)
                    )
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
        """Number of lines with a successful answer."""
        return len(self._places) - self.num_failed

    def add(self, number: int, custom_id: str | None, response: Mapping[str, Any] | None, error: object = None) -> None:
        """Write an answer. :raises OSError: if the answer cannot be written; the file is then unchanged."""
        entry = {"id": f"batch_req_{self._name}_{number}", "custom_id": custom_id, "response": response, "error": error}
        failed = error is not None or response is None or response["status_code"] >= 400
        line = orjson.dumps(entry) + b"\n"
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
        """Write answers to a file, in line order. Return the number of answers; no file is written if there are none. failed:
        True writes only failed answers, False only successful answers, None all answers.

        :raises OSError: if the file cannot be written.
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
        self._handle = -1  # so that a late answer is not written to another file with this descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


FileId = Annotated[str, Field(pattern=r"^file-[0-9a-f]{32}$")]
Time = Annotated[int, Field(ge=0)]
"""Time in seconds since 1970."""
_ID: Final = re.compile(r"(file|batch)-[0-9a-f]{32}")
_UNFINISHED: Final = ".incomplete"
OPEN: Final = frozenset(("validating", "in_progress", "finalizing", "cancelling"))
"""Statuses of unfinished batches."""


class StoredFile(BaseModel):
    """OpenAI's object for a file."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: FileId
    object: Literal["file"]
    bytes: Annotated[int, Field(ge=0)]
    created_at: Time
    filename: str
    purpose: str
    status: str


class RequestCounts(BaseModel):
    """Numbers of lines of a batch."""

    total: Annotated[int, Field(ge=0)]
    completed: Annotated[int, Field(ge=0)]
    failed: Annotated[int, Field(ge=0)]


class StoredBatch(BaseModel):
    """OpenAI's object for a batch."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: Annotated[str, Field(pattern=r"^batch-[0-9a-f]{32}$")]
    object: Literal["batch"]
    endpoint: str
    input_file_id: FileId
    completion_window: str
    status: Literal["validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"]
    created_at: Time
    output_file_id: FileId | None
    error_file_id: FileId | None
    errors: dict[str, Any] | None
    request_counts: RequestCounts
    metadata: dict[str, str]


class Records:
    """Objects of one kind, each in its own file named by its id. Invalid files are logged and ignored."""

    def __init__(self, folder: Path, shape: type[StoredFile | StoredBatch]) -> None:
        """:raises OSError: if the folder cannot be created."""
        make_private(folder)
        self.folder = folder
        self._shape = shape
        self._kind = "file" if shape is StoredFile else "batch"
        self._damaged: set[str] = set()
        for left in folder.glob(f"*{_UNFINISHED}"):
            with suppress(OSError):  # a folder, which does not belong to this class
                left.unlink()

    def new_id(self) -> str:
        """Return an unguessable id."""
        return f"{self._kind}-{secrets.token_hex(16)}"

    def save(self, record: dict[str, Any]) -> None:
        """Write an object durably. :raises OSError: if the object cannot be written; the old object is then unchanged."""
        write_whole(self.folder / f"{record['id']}.json", orjson.dumps(record), durable=True, private=True)

    def get(self, record_id: str, param: str | None = None) -> dict[str, Any]:
        """Return the object with this id. param: the request's field that contains the id. :raises ApiError: if no object has
        this id."""
        found = self._read(self.folder / f"{record_id}.json") if _ID.fullmatch(record_id) else None
        if found is not None:
            return found
        place = f"{param}: " if param else ""
        raise ApiError(400 if param else 404, f"{place}there is no {self._kind} {record_id[:80]!r} (any more)", param)

    def has(self, record_id: str) -> bool:
        """Return whether there is an object with this id."""
        return (self.folder / f"{record_id}.json").is_file()

    def all(self) -> list[dict[str, Any]]:
        """Return all objects, newest first."""
        read = map(self._read, self.folder.glob("*.json"))
        return sorted((each for each in read if each is not None), key=lambda each: (-each["created_at"], each["id"]))

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Return an object, or None if it is missing or invalid."""
        try:
            found = self._shape.model_validate(parse_json(read_text(path), "the record", dict))
            if found.id != path.stem:
                raise ConfigError("id", f"the file's name, {path.stem}", shown(found.id))
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not path.is_symlink():  # removed meanwhile
                return None
            if path.name not in self._damaged:
                self._damaged.add(path.name)
                log.warning("%s: ignored: %s", harmless(str(path)), harmless(str(api_error(error))))
            return None
        return found.model_dump()

    def remove(self, record_id: str) -> None:
        """Remove an object and its other files."""
        for path in self.folder.glob(f"{record_id}.*"):
            path.unlink(missing_ok=True)


class FileStore(Records):
    """Files that clients uploaded or batches wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, StoredFile)

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self.folder / f"{file_id}.jsonl"

    def add(self, source: BinaryIO, filename: str, purpose: str) -> dict[str, Any]:
        """Store a file durably and return its object. :raises OSError: if the file cannot be written; no partial file remains."""
        file_id = self.new_id()
        part = self.folder / f"{file_id}{_UNFINISHED}"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as target:
                shutil.copyfileobj(source, target, 2**20)
                target.flush()
                os.fsync(target.fileno())
            part.replace(self.content(file_id))
            return self.register(file_id, filename, purpose)
        except OSError:
            part.unlink(missing_ok=True)
            self.remove(file_id)
            raise

    def register(self, file_id: str, filename: str, purpose: str) -> dict[str, Any]:
        """Create and return the object of a file whose content exists."""
        size = self.content(file_id).stat().st_size
        record = {"id": file_id, "object": "file", "bytes": size, "created_at": int(time.time()), "filename": filename}
        record |= {"purpose": purpose, "status": "processed", "expires_at": None, "status_details": None}
        self.save(record)
        return record


class BatchStore(Records):
    """Batches and their journals."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, StoredBatch)

    def journal(self, batch_id: str) -> Path:
        """Return the path of a batch's journal."""
        return self.folder / f"{batch_id}.journal"

    def new(self, endpoint: str, input_file_id: str, window: str, metadata: dict[str, Any] | None) -> dict[str, Any]:
        """Create and return a batch that has not started."""
        stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled", "expires")
        record = {
            "id": self.new_id(),
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "completion_window": window,
            "status": "validating",
            "created_at": int(time.time()),
            **{f"{stage}_at": None for stage in stages},
            "output_file_id": None,
            "error_file_id": None,
            "errors": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata or {},
        }
        self.save(record)
        return record

    def move(self, record: dict[str, Any], status: str, **more: object) -> None:
        """Set a batch's status and the time of the change. more: further fields to set. :raises OSError: if the batch cannot be
        written."""
        record.update(status=status, **{f"{status}_at": int(time.time())}, **more)
        self.save(record)


def page_of(records: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """Return a page of a list in OpenAI's format. after: id of the previous page's last item."""
    first = next((number + 1 for number, each in enumerate(records) if each["id"] == after), 0)
    data = records[first : first + limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": first + limit < len(records)}


def open_stores(folder: Path) -> tuple[FileStore, BatchStore]:
    """Return the files and the batches in a folder, which is created if needed. :raises ConfigError: if the folder cannot be
    used."""
    try:
        make_private(folder)
        return FileStore(folder / "files"), BatchStore(folder / "batches")
    except OSError as error:
        raise ConfigError("--files-dir", "a folder that this user may write to", f"{folder} ({error.strerror})") from error
