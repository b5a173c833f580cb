"""The way of one request through the server: admitted, prepared, queued, and answered whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from headway.intake import CheckedRequest
from headway.server.errors import ApiError, api_error
from headway.server.reading import PromptReader
from headway.server.service import Service, Ticket
from headway.server.shapes import DONE, Shape, usage
from headway.streams import RequestStream

log = logging.getLogger("headway")

Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]
Prepare = Callable[[], Awaitable[Sequence[CheckedRequest]]]
"""Tokenises and checks the prompts of a request."""

_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Reply(Response):
    """Answers one request. It sends by ASGI itself: there is no task, lock or queue between the engine's news and the socket."""

    def __init__(self, service: Service, shape: Shape, prepare: Prepare) -> None:
        super().__init__()
        self._service, self._shape, self._prepare = service, shape, prepare
        self._asked = shape.asked
        self._streams: list[RequestStream] = []
        self._watcher: asyncio.Task[None] | None = None
        self._left = self._started = False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve it; the request ends with its client's connection."""
        arrived, ticket = time.perf_counter(), None
        try:
            ticket = self._service.admit()
            async with asyncio.timeout(self._service.options.request_timeout):
                await self._serve(ticket, receive, send)
        except TimeoutError:
            seconds = self._service.options.request_timeout
            await self._fail(ApiError(504, f"the request has taken longer than {seconds} s (request_timeout)"), send)
        except Exception as error:
            await self._fail(error, send)
        finally:
            if self._watcher is not None:
                self._watcher.cancel()
            for stream in self._streams:
                stream.close()
            if ticket is not None:
                ticket.begun()
            self._service.took(time.perf_counter() - arrived)

    async def _serve(self, ticket: Ticket, receive: Receive, send: Send) -> None:
        requests = await self._prepare()
        llm, priority, metrics = self._service.llm, self._asked.priority, self._service.metrics
        for number, request in enumerate(requests):
            self._streams.append(llm.submit(request, f"{self._shape.id}-{number}", priority=priority))
        ticket.submitted()
        self._watcher = asyncio.ensure_future(self._watch(receive))  # of a client that has left before it finds that at once
        readers = [PromptReader(each, number, self._shape, ticket, metrics) for number, each in enumerate(self._streams)]
        if not self._asked.stream:
            outputs = [await reader.whole() for reader in readers]
            if not self._left:
                await self._send_whole(self._shape.whole([each for each in outputs if each is not None]), send)
            return
        parts = [self._stream(reader, send) for reader in readers]
        await (parts[0] if len(parts) == 1 else _all(parts))
        if self._left:
            return
        end = DONE
        if self._shape.includes_usage:
            end = self._shape.chunk([], usage([(reader.output, reader.num_written) for reader in readers])) + DONE
        await self._write(send, end, more=False)

    async def _stream(self, reader: PromptReader, send: Send) -> None:
        async with aclosing(reader.events()) as events:
            async for part in events:
                await self._write(send, part)

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        """Send a part of a stream. A client that does not read is waited for, and then given up."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_whole(self, body: bytes, send: Send) -> None:
        self._started = True
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _watch(self, receive: Receive) -> None:
        """Wait until the client has gone, and then end what it asked for."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        for stream in self._streams:
            stream.close()

    async def _fail(self, error: Exception, send: Send) -> None:
        """Tell the client what went wrong: by a status, or in the stream that has begun."""
        told = api_error(error)
        if told.status >= 500 and not isinstance(error, ApiError):
            log.error("a request has failed", exc_info=error)
        self._service.metrics.refused[str(told.status)] += 1
        if self._left:
            return
        if self._started:
            await send({"type": "http.response.body", "body": told.event() + DONE, "more_body": False})
            return
        await told.response()({"type": "http"}, _nothing, send)


async def _nothing() -> Any:
    raise AssertionError("an answer reads nothing")


async def _all(parts: Sequence[Awaitable[None]]) -> None:
    """Wait for all; the first fault ends the others."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
