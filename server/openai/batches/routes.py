"""OpenAI's /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import Query
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from headway.core.system.text import harmless
from headway.server.errors import ApiError, Fields
from headway.server.openai.batches.store import open_stores, page_of
from headway.server.openai.batches.worker import BatchWorker, LineAnswers
from headway.server.options import ServerOptions
from headway.server.routing import RouteGroup, answers, json_response, read_body

T = TypeVar("T")
_Limit = Annotated[int, Query(ge=1, le=10_000)]
_MOST_FIELDS: Final = 8
_FORM_BYTES: Final = 64 * 1024  # Bytes of a form besides its file


class BatchRequest(Fields):
    """The body of /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    """Ignored: a batch runs until it is done."""
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


class BatchRoutes(RouteGroup):
    """Files and batches of one server. Routes return 404 if no folder is configured."""

    def __init__(self, options: ServerOptions, answers: LineAnswers, concurrency: int) -> None:
        """concurrency: number of concurrent lines of a batch. :raises ConfigError: if the folder cannot be used."""
        self._options = options
        self._answers = answers
        self._worker: BatchWorker | None = None
        if options.files_dir is not None:
            files, batches = open_stores(options.files_dir)
            self._worker = BatchWorker(files, batches, answers, options.max_body_bytes, concurrency)

    def start(self) -> None:
        """Resume the batches that an earlier server did not finish."""
        if self._worker is not None:
            self._worker.resume()

    async def close(self) -> None:
        """Stop the batches. The next server resumes them."""
        if self._worker is not None:
            await self._worker.close()

    @answers("POST", "/v1/files")
    async def upload(self, request: Request) -> Response:
        """Store a file."""
        files = self._opened.files
        bounded = Request(request.scope, _bounded(request.receive, self._options))
        try:
            async with bounded.form(max_files=1, max_fields=_MOST_FIELDS) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise ApiError(400, "file: needs a file in a form (multipart/form-data), got none", "file")
                if purpose != "batch":
                    raise ApiError(400, f"purpose: needs batch, got {str(purpose)[:60]!r}", "purpose")
                return json_response(
                    await _on_disk(partial(files.add, file.file, harmless((file.filename or "file")[:255]), purpose))
                )
        except ClientDisconnect:
            raise ApiError(499, "the client has gone") from None
        except OSError as error:  # parts of the form are stored in temporary files
            raise _full(error) from error
        except UnicodeError as error:
            raise ApiError(400, f"the form: needs text in a charset that there is, got {error}") from None

    @answers("GET", "/v1/files")
    async def files(self, purpose: str | None = None, after: str | None = None, limit: _Limit = 10_000) -> Response:
        """List the files, newest first."""
        found = await _on_disk(self._opened.files.all)
        return json_response(page_of([each for each in found if purpose in (None, each["purpose"])], after, limit))

    @answers("GET", "/v1/files/{file_id}")
    async def file(self, file_id: str) -> Response:
        """Describe a file."""
        return json_response(self._opened.files.get(file_id))

    @answers("GET", "/v1/files/{file_id}/content")
    async def content(self, file_id: str) -> Response:
        """Return a file's content."""
        self._opened.files.get(file_id)
        path = self._opened.files.content(file_id)
        if not path.is_file():
            raise ApiError(404, f"the content of {file_id} is not there any more")
        return FileResponse(path, media_type="application/jsonl")

    @answers("DELETE", "/v1/files/{file_id}")
    async def delete(self, file_id: str) -> Response:
        """Remove a file."""
        self._opened.files.get(file_id)
        reader = self._opened.uses(file_id)
        if reader is not None:
            raise ApiError(409, f"the batch {reader} reads this file; cancel the batch first")
        await _on_disk(partial(self._opened.files.remove, file_id))
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @answers("POST", "/v1/batches", body=[BatchRequest])
    async def create(self, request: Request) -> Response:
        """Create and start a batch."""
        batches = self._opened.batches
        body = await read_body(request, BatchRequest, self._options)
        body.unknown()
        if body.endpoint not in self._answers.urls:
            need = " or ".join(self._answers.urls)
            raise ApiError(400, f"endpoint: needs {need}, got {body.endpoint[:60]!r}", "endpoint")
        self._opened.files.get(body.input_file_id, "input_file_id")
        make = partial(batches.new, body.endpoint, body.input_file_id, body.completion_window, body.metadata)
        record = await _on_disk(make)
        self._opened.start(record)
        return json_response(record)

    @answers("GET", "/v1/batches")
    async def batches(self, after: str | None = None, limit: _Limit = 20) -> Response:
        """List the batches, newest first."""
        page = page_of(await _on_disk(self._opened.batches.all), after, limit)
        return json_response({**page, "data": list(map(self._opened.latest, page["data"]))})

    @answers("GET", "/v1/batches/{batch_id}")
    async def batch(self, batch_id: str) -> Response:
        """Return a batch with its progress."""
        return json_response(self._opened.now(batch_id))

    @answers("POST", "/v1/batches/{batch_id}/cancel")
    async def cancel(self, batch_id: str) -> Response:
        """Cancel a batch; its answers so far become its files."""
        return json_response(self._opened.cancel(batch_id))

    @property
    def _opened(self) -> BatchWorker:
        if self._worker is None:
            raise ApiError(404, "this server keeps no files; start it with --files-dir FOLDER")
        return self._worker


def _bounded(receive: Callable[[], Awaitable[Any]], options: ServerOptions) -> Callable[[], Awaitable[Any]]:
    """Return a body reader that accepts at most `max_file_bytes` in total and waits at most `read_timeout` for each part."""
    size, most = 0, options.max_file_bytes

    async def bounded() -> Any:
        nonlocal size
        try:
            async with asyncio.timeout(options.read_timeout):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"a part of the body has taken longer than {options.read_timeout:g} s") from None
        size += len(message.get("body", b""))
        if size > most + _FORM_BYTES:
            raise ApiError(413, f"the file: needs at most {most} bytes (max_file_bytes)", code="body_too_large")
        return message

    return bounded


async def _on_disk(work: Callable[[], T]) -> T:
    """Run file operations in a thread. :raises ApiError: if the disk is full or not writable."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise _full(error) from error


def _full(error: OSError) -> ApiError:
    return ApiError(507, f"the file cannot be stored: {error.strerror or error}", code="storage_failed")
