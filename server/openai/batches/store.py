"""Files and batches on disk: each a file of JSON beside its content, so that a server that starts again finds all of them."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from headway.core.contract.errors import ConfigError
from headway.core.system.files import make_private, read_text, write_whole
from headway.core.system.json_text import parse_json
from headway.core.system.text import harmless, shown
from headway.server.errors import ApiError, api_error

log = logging.getLogger("headway")

FileId = Annotated[str, Field(pattern=r"^file-[0-9a-f]{32}$")]
Time = Annotated[int, Field(ge=0)]
"""Seconds since 1970."""
_ID: Final = re.compile(r"(file|batch)-[0-9a-f]{32}")
_UNFINISHED: Final = ".incomplete"
OPEN: Final = frozenset(("validating", "in_progress", "finalizing", "cancelling"))
"""Statuses of batches that go on."""


class StoredFile(BaseModel):
    """The object of a file."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: FileId
    object: Literal["file"]
    bytes: Annotated[int, Field(ge=0)]
    created_at: Time
    filename: str
    purpose: str
    status: str


class RequestCounts(BaseModel):
    """Lines of a batch."""

    total: Annotated[int, Field(ge=0)]
    completed: Annotated[int, Field(ge=0)]
    failed: Annotated[int, Field(ge=0)]


class StoredBatch(BaseModel):
    """The object of a batch."""

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
    """Objects of one kind, each in a file of its own under its id. A file that holds none is logged, and left out."""

    def __init__(self, folder: Path, shape: type[StoredFile | StoredBatch]) -> None:
        """:raises OSError: the folder cannot be made."""
        make_private(folder)
        self.folder = folder
        self._shape = shape
        self._kind = "file" if shape is StoredFile else "batch"
        self._damaged: set[str] = set()
        for left in folder.glob(f"*{_UNFINISHED}"):
            with suppress(OSError):  # a folder, which is none of ours
                left.unlink()

    def new_id(self) -> str:
        """An id that nobody guesses."""
        return f"{self._kind}-{secrets.token_hex(16)}"

    def save(self, record: dict[str, Any]) -> None:
        """Write an object; it is on the disk when this returns.

        :raises OSError: it cannot be written; the old one is as it was.
        """
        write_whole(self.folder / f"{record['id']}.json", orjson.dumps(record), durable=True, private=True)

    def get(self, record_id: str, param: str | None = None) -> dict[str, Any]:
        """The object of an id. param: the field of the request that names it.

        :raises ApiError: there is none, or no longer.
        """
        found = self._read(self.folder / f"{record_id}.json") if _ID.fullmatch(record_id) else None
        if found is not None:
            return found
        place = f"{param}: " if param else ""
        raise ApiError(400 if param else 404, f"{place}there is no {self._kind} {record_id[:80]!r} (any more)", param)

    def has(self, record_id: str) -> bool:
        """Return whether there is an object of an id."""
        return (self.folder / f"{record_id}.json").is_file()

    def all(self) -> list[dict[str, Any]]:
        """All objects, the newest first."""
        read = map(self._read, self.folder.glob("*.json"))
        return sorted((each for each in read if each is not None), key=lambda each: (-each["created_at"], each["id"]))

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Read an object; None if there is none (any more) that can be used."""
        try:
            found = self._shape.model_validate(parse_json(read_text(path), "the record", dict))
            if found.id != path.stem:
                raise ConfigError("id", f"the file's name, {path.stem}", shown(found.id))
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not path.is_symlink():  # removed meanwhile
                return None
            if path.name not in self._damaged:
                self._damaged.add(path.name)
                log.warning("%s is left out: %s", harmless(str(path)), harmless(str(api_error(error))))
            return None
        return found.model_dump()

    def remove(self, record_id: str) -> None:
        """Remove an object, and what belongs to it."""
        for path in self.folder.glob(f"{record_id}.*"):
            path.unlink(missing_ok=True)


class FileStore(Records):
    """Files that clients have sent, and those that batches have written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, StoredFile)

    def content(self, file_id: str) -> Path:
        """Where a file's content lies."""
        return self.folder / f"{file_id}.jsonl"

    def add(self, source: BinaryIO, filename: str, purpose: str) -> dict[str, Any]:
        """Store a file; it is on the disk when this returns.

        :raises OSError: it cannot be written; nothing is left of it.
        """
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
        """Make the object of a file whose content is there."""
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
        """Where a batch's answers are collected."""
        return self.folder / f"{batch_id}.journal"

    def new(self, endpoint: str, input_file_id: str, window: str, metadata: dict[str, Any] | None) -> dict[str, Any]:
        """Make a batch that has not begun."""
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
        """Give a batch another status, at this time.

        :raises OSError: it cannot be written.
        """
        record.update(status=status, **{f"{status}_at": int(time.time())}, **more)
        self.save(record)


def page_of(records: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """A part of a list, in the form of OpenAI's. after: the id that the part before has ended with."""
    first = next((number + 1 for number, each in enumerate(records) if each["id"] == after), 0)
    data = records[first : first + limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": first + limit < len(records)}


def open_stores(folder: Path) -> tuple[FileStore, BatchStore]:
    """The files and the batches in a folder, which is made where there is none.

    :raises ConfigError: it cannot be used.
    """
    try:
        make_private(folder)
        return FileStore(folder / "files"), BatchStore(folder / "batches")
    except OSError as error:
        raise ConfigError("--files-dir", "a folder that this user may write to", f"{folder} ({error.strerror})") from error
