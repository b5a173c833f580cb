"""Processing of one request: admission, preparation, queueing, and the answer as a whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import Response

from headway.core.engine.data.request_limits import CheckedRequest
from headway.core.sampling.params import SamplingParams
from headway.hosting.host import EngineDeadError
from headway.outputs import RequestOutput
from headway.requests.streams import RequestStream
from headway.server.errors import ApiError, api_error
from headway.server.openai.answers import Answer, num_written
from headway.server.operators.metrics import Metrics
from headway.server.service import RunningAnswer, Service, Ticket

log = logging.getLogger("headway")


Ended = Callable[[RequestOutput, int], None]


class PromptReader:
    """Reader of one prompt's stream."""

    def __init__(self, stream: RequestStream, number: int, answer: Answer, ticket: Ticket, metrics: Metrics, end: Ended) -> None:
        """number: the prompt's index in its request. end: function called at the end with the output and its number of tokens."""
        self._stream = stream
        self._answer = answer
        self._ticket = ticket
        self._metrics = metrics
        self._end = end
        self._n = answer.body.n or 1
        self._first = number * self._n  # index of the prompt's first choice
        self._reasons: dict[int, str] = {}
        self._noted = False
        self.num_written = 0
        """Number of tokens generated so far, over all completions of the prompt."""

    @property
    def output(self) -> RequestOutput:
        """The complete output so far."""
        return self._stream.state.output()

    async def whole(self) -> RequestOutput | None:
        """Return the finished output, or None if the request was ended before it finished. :raises ApiError: if a completion has
        failed."""
        async for last in self._stream:
            if last.finished:
                break
        else:
            return None
        self._ticket.begun()
        for new in last.outputs:
            self._reasons[new.index] = str(new.finish_reason)
            self._answer.check_ended(new)
        self.note()
        return last

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the prompt's choices as they come. :raises ApiError: if a completion has failed."""
        stream, answer, observe, state = self._stream, self._answer, self._metrics.next_tokens, self._stream.state
        times: dict[int, float] = {}
        while (news := await stream.news()) is not None:
            now, parts = time.perf_counter(), []
            if not times:
                self._ticket.begun()
                self._metrics.first_token(now - state.arrival_time)
            for new in news:
                index, tokens = new.index, len(new.token_ids)
                if new.finish_reason is not None:
                    self._reasons[index] = new.finish_reason
                    answer.check_ended(new)
                self.num_written += tokens
                before = times.get(index)
                times[index] = now
                if before is None:
                    parts.append(answer.begin(self._first + index, state.output))
                    tokens -= 1  # the first token has no predecessor; tokens of the same step took no time
                if tokens > 0:
                    observe((now - (before or now)) / tokens, tokens)
                used = (self.output, self.num_written) if answer.reports_usage else None
                parts.append(answer.piece(self._first + index, new, used))
            if found := parts[0] if len(parts) == 1 else b"".join(parts):
                yield found
        self.note()

    def note(self) -> None:
        """Record the ended prompt's metrics, once. A completion without a finish reason counts as aborted."""
        if self._noted:
            return
        self._noted = True
        output = self.output
        self.num_written = max(self.num_written, num_written(output))
        self._end(output, self.num_written)
        ended = [self._reasons.get(index, "abort") for index in range(self._n)]
        times, metrics = output.metrics, self._metrics
        longest = max((len(each.token_ids) for each in output.outputs), default=0)
        metrics.finished(times, len(output.prompt_token_ids), self.num_written, ended, longest, self._answer.body.most_tokens)
        if not self._answer.body.stream and times.first_token_time is not None and times.finished_time is not None:
            metrics.first_token(times.time_to_first_token)
            later = self.num_written - len(ended)
            if later > 0:  # tokens were not observed one by one: count their mean for each
                metrics.next_tokens((times.finished_time - times.first_token_time) * len(ended) / later, later)


Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]
Prepare = Callable[[], Awaitable[Sequence[CheckedRequest]]]
"""Function that tokenizes and checks the prompts of a request."""

_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Reply(Response):
    """Answer to one request, sent directly through ASGI, without a task, lock or queue between the engine's tokens and the
    socket."""

    def __init__(self, service: Service, answer: Answer, prepare: Prepare, ignored: Sequence[str] = ()) -> None:
        """ignored: names of the request's fields that are ignored."""
        super().__init__()
        self._ignored = ignored
        self._service = service
        self._answer = answer
        self._prepare = prepare
        self._body = answer.body
        self._streams: list[RequestStream] = []
        self._readers: Sequence[PromptReader] = ()
        self._watcher: asyncio.Task[None] | None = None
        self._left = self._started = False
        self._path = ""
        self._request_headers: Sequence[tuple[bytes, bytes]] = ()
        self._more_headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        arrived, ticket = time.perf_counter(), None
        self._path = scope["path"]
        self._request_headers = scope["headers"]
        self._more_headers = self._service.ignored_fields.header(self._ignored, self._path)
        try:
            ticket = Ticket(self._service)
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
            for reader in self._readers:
                reader.note()
            self._service.running.pop(self._answer.key, None)
            if ticket is not None:
                ticket.begun()
            self._service.took(time.perf_counter() - arrived)

    async def _serve(self, ticket: Ticket, receive: Receive, send: Send) -> None:
        requests = await self._prepare()
        llm, metrics = self._service.llm, self._service.metrics
        if self._service.is_paused and not await self._wait_resumed(receive):
            return
        for number, request in enumerate(requests):
            self._streams.append(llm.submit(request, f"{self._answer.key}-{number}"))
        ticket.submitted()
        self._note_running()
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch(receive))  # detects at once a client that has already disconnected
        ends = [partial(self._trace, each.params) for each in requests]
        readers = self._readers = [
            PromptReader(each, number, self._answer, ticket, metrics, ends[number]) for number, each in enumerate(self._streams)
        ]
        if not self._body.stream:
            outputs = [await reader.whole() for reader in readers]
            if not self._left:
                await self._send_whole(self._answer.whole([each for each in outputs if each is not None]), send)
            return
        parts = [self._stream(reader, send) for reader in readers]
        await (parts[0] if len(parts) == 1 else _all(parts))
        if self._left:
            return
        await self._write(send, self._answer.end([(reader.output, reader.num_written) for reader in readers]), more=False)

    def _note_running(self) -> None:
        """Register the engine's ids of this request for the operator paths."""
        self._service.running[self._answer.key] = RunningAnswer(self._answer.id, [each.request_id for each in self._streams])

    def _trace(self, params: SamplingParams, output: RequestOutput, written: int) -> None:
        if self._service.tracing is not None:
            self._service.tracing.finished(output, written, params, self._request_headers)

    async def _wait_resumed(self, receive: Receive) -> bool:
        """Wait until a paused server resumes. Return False if the client has disconnected. Raises the same errors as
        `Service.resumed`."""
        self._watcher = asyncio.ensure_future(self._watch(receive))
        resumed = asyncio.ensure_future(self._service.resumed())
        try:
            await asyncio.wait((self._watcher, resumed), return_when=asyncio.FIRST_COMPLETED)
            if resumed.done() and not self._left:
                resumed.result()
        finally:
            resumed.cancel()
        return not self._left

    async def _stream(self, reader: PromptReader, send: Send) -> None:
        async with aclosing(reader.events()) as events:
            async for part in events:
                await self._write(send, part)

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        """Send a part of a stream. If the client does not read, wait until `write_timeout` ends the connection."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS + self._more_headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_whole(self, body: bytes, send: Send) -> None:
        self._started = True
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *self._more_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _watch(self, receive: Receive) -> None:
        """Wait until the client has disconnected, then end its request."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        for stream in self._streams:
            stream.close()

    async def _fail(self, error: Exception, send: Send) -> None:
        """Send the client an error: as a status or, if a stream has begun, as an event."""
        failure = api_error(error)
        if failure.status >= 500 and not isinstance(error, (ApiError, EngineDeadError)):  # the host already logs a dead engine
            log.error("server: a request failed", exc_info=error)
        self._service.metrics.refused[str(failure.status)] += 1
        if self._left:
            return
        if self._started:
            await send({"type": "http.response.body", "body": self._answer.failed(failure), "more_body": False})
            return
        await failure.response(self._path)({"type": "http"}, _nothing, send)


async def _nothing() -> Any:
    raise AssertionError("an answer reads nothing")


async def _all(parts: Sequence[Awaitable[None]]) -> None:
    """Run all parts concurrently; the first exception ends the other parts."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
