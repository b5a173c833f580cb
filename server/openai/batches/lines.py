"""The lines of a batch: read, checked, and answered by the paths of a server without its socket."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from headway.core.system.json_text import JsonError, parse_json
from headway.core.system.system_errors import is_rust_panic
from headway.core.system.text import shown
from headway.server.errors import ApiError, api_error
from headway.server.routing import DirectMiddleware, Endpoint

log = logging.getLogger("headway")
_LONGEST_ID: Final = 512
"""Characters of a custom_id, which results and errors repeat."""


class RawLine(NamedTuple):
    """A line of a file that is not empty."""

    number: int
    """From 1."""
    text: bytes | None
    """None: it is longer than a request may be."""


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        """code: for programs. custom_id: the line's, where it has one."""
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def lines_of(path: Path, most_bytes: int) -> Iterator[RawLine]:
    """The lines of a file that are not empty. most_bytes: of a line; of a longer one only the number is told.

    :raises OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        number = 0
        while text := file.readline(most_bytes + 1):
            number += 1
            text = text if number > 1 else text.removeprefix(codecs.BOM_UTF8)
            long = len(text) > most_bytes and not text.endswith(b"\n")
            while long and (rest := file.readline(most_bytes + 1)):  # the rest of the line, in pieces
                if rest.endswith(b"\n"):
                    break
            if long or text.strip():
                yield RawLine(number, None if long else text)


def parse_line(line: RawLine, urls: Mapping[str, Any]) -> BatchLine:
    """Read a line. urls: the paths that a line may name.

    :raises LineError: it is no request for one of these.
    """
    place = f"line {line.number}"
    if line.text is None:
        raise LineError("line_too_long", f"{place}: needs at most as many bytes as a request's body may have (max_body)")
    try:
        found = parse_json(line.text, place, dict, any_number=True)  # what reads the body refuses such a number by its path
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
    """Answers requests by the endpoints of a server."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        refuse: Callable[[Request, Exception], Awaitable[Response]],
        is_lost: Callable[[], bool],
    ) -> None:
        """endpoints: path -> what answers it. refuse: answers where an endpoint raises. is_lost: whether the engine has ended
        for good."""
        self.urls = endpoints
        self.is_lost = is_lost
        self._app = DirectMiddleware(_nothing_there, endpoints, refuse)

    async def answer(self, line: BatchLine) -> tuple[int, Any]:
        """The status and the body of the answer to a request; those of an error where anything is raised on the way."""
        try:
            return await self._answer(line)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_rust_panic(error):
                raise
            log.error("a line of a batch has failed", exc_info=error)
            refused = api_error(error)
            return refused.status, refused.body

    async def _answer(self, line: BatchLine) -> tuple[int, Any]:
        data, sent, status, parts = json.dumps(line.body).encode(), False, 500, []

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.get_running_loop().create_future()  # a client that never leaves
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
