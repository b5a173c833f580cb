"""The way of one request through the server: admitted, prepared, queued, and answered whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response

from headway.intake import CheckedRequest
from headway.outputs import RequestOutput
from headway.server.errors import ApiError, api_error
from headway.server.service import Service, Ticket
from headway.server.shapes import DONE, Shape, check_ended, usage
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
        self._left = self._started = False
        self._outputs: dict[int, RequestOutput] = {}
        """The last output of each prompt."""
        self._written: dict[int, int] = {}
        """Tokens that were sent of each prompt's completions."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve it; the request ends with its client's connection."""
        arrived, watcher, ticket = time.perf_counter(), None, None
        try:
            ticket = self._service.admit()
            watcher = asyncio.ensure_future(self._watch(receive))
            async with asyncio.timeout(self._service.options.request_timeout):
                await self._serve(ticket, send)
        except TimeoutError:
            seconds = self._service.options.request_timeout
            await self._fail(ApiError(504, f"the request has taken longer than {seconds} s (request_timeout)"), send)
        except Exception as error:
            await self._fail(error, send)
        finally:
            if watcher is not None:
                watcher.cancel()
            for stream in self._streams:
                stream.close()
            if ticket is not None:
                ticket.begun()
            self._service.took(time.perf_counter() - arrived)

    async def _serve(self, ticket: Ticket, send: Send) -> None:
        requests = await self._prepare()
        if self._left:
            return
        llm, priority = self._service.llm, self._asked.priority
        for number, request in enumerate(requests):
            self._streams.append(llm.submit(request, f"{self._shape.id}-{number}", priority=priority))
        ticket.submitted()
        parts = [self._read(number, ticket, send) for number in range(len(requests))]
        await (parts[0] if len(parts) == 1 else _all(parts))
        if self._left:
            return
        outputs = [self._outputs[number] for number in range(len(requests))]
        if not self._asked.stream:
            await self._send_whole(self._shape.whole(outputs), send)
            return
        end = DONE
        if self._shape.includes_usage:
            used = usage([(output, self._written[number]) for number, output in enumerate(outputs)])
            end = self._shape.chunk([], used) + DONE
        await self._write(send, end, more=False)

    async def _read(self, number: int, ticket: Ticket, send: Send) -> None:
        """Follow one prompt to its end."""
        first = number * (self._asked.n or 1)
        metrics, streamed = self._service.metrics, self._asked.stream
        last: dict[int, float] = {}
        structured = self._asked.response_format is not None or self._asked.structured_outputs is not None
        reasons: dict[int, str] = {}
        written = 0
        async for output in self._streams[number]:
            now = time.perf_counter()
            if not last:
                ticket.begun()
            parts = []
            for new in output.outputs:
                if new.finish_reason is not None:
                    reasons[new.index] = new.finish_reason
                    check_ended(new, structured)
                tokens = len(new.token_ids)
                written += tokens
                before = last.get(new.index)
                last[new.index] = now
                if streamed:
                    if before is None:
                        parts.append(self._shape.begin(first + new.index, output))
                        if number not in self._outputs:
                            metrics.first_token(now - output.metrics.arrival_time)
                    elif tokens:
                        metrics.next_tokens((now - before) / tokens, tokens)
                    parts.append(self._shape.piece(first + new.index, new, output, written))
                    self._outputs[number] = output
            self._outputs[number], self._written[number] = output, written
            if streamed:
                await self._write(send, b"".join(parts))
        if self._outputs.get(number) is not None:
            self._note(self._outputs[number], written, reasons)

    def _note(self, output: RequestOutput, written: int, reasons: dict[int, str]) -> None:
        """Count a request that has ended."""
        ended = [reasons.get(index, "abort") for index in range(self._asked.n or 1)]
        times, metrics = output.metrics, self._service.metrics
        metrics.finished(times, len(output.prompt_token_ids), written, ended)
        if not self._asked.stream and times.first_token_time is not None and times.finished_time is not None:
            metrics.first_token(times.time_to_first_token)
            later = written - len(ended)
            if later > 0:  # nobody has seen the tokens one by one: their mean stands for each
                metrics.next_tokens((times.finished_time - times.first_token_time) * len(ended) / later, later)

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
