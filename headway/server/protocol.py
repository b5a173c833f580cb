"""Limits on connections that cost a server much and give it nothing: too many, too slow, or never reading."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.server.errors import ApiError
from headway.server.options import ServerOptions

_AT_ONCE: Final = 8
"""Requests that begin in one round of the event loop: 2 ms of work, about as many as it accepts connections in a round."""


class PacedStarts:
    """Begins requests, a few in each round of the event loop.

    The requests of a crowd would otherwise all begin before the next connection is accepted and the next probe answered, which
    takes seconds.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._begun = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that will call `_next`; None: no further round is needed."""

    def begin(self, request: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Begin a request, in this round or a later one."""
        if self._begun < _AT_ONCE and not self._waiting:
            self._begun += 1
            request()
        else:
            self._waiting.append(request)
        if self._loop is None:
            self._loop = loop
            loop.call_soon(self._next)

    def _next(self) -> None:
        """Begin the requests of a new round."""
        self._begun = 0
        while self._waiting and self._begun < _AT_ONCE:
            self._begun += 1
            self._waiting.popleft()()
        loop, self._loop = self._loop, None
        if self._begun and loop is not None:
            self._loop = loop
            loop.call_soon(self._next)


_MOST_HEAD: Final = 64 * 1024
"""Most bytes of a request line and its headers."""
_READ_GRACE: Final = 0.02
"""Seconds in which the event loop reads bytes that have arrived."""
_PROBES: Final = frozenset(("/health", "/ping"))
"""Paths that never queue: a probe takes a server that answers slowly for a dead one."""
LINGER: Final = 1.0
"""Seconds that a refused client has to send its request, to read the answer and to close. A connection closed with unread bytes
is reset, and the client may lose the answer."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits: on the number of connections, and on the times of heads, bodies and reading of answers."""

    options: ClassVar[ServerOptions]
    most_open: ClassVar[int]
    """Connections that there are file descriptors for."""
    starts: ClassVar[PacedStarts]

    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _head = 0
    _in_head = True
    _surplus = _refused = False

    def connection_made(self, transport: Any) -> None:
        """Count the connection, and expect its first request."""
        super().connection_made(transport)
        count = len(self.connections)
        if count > self.most_open:
            transport.abort()
        elif count > self.options.max_connections:
            self._surplus = True
            self._expect(LINGER, self._refuse_surplus)
        else:
            self._expect(self.options.read_timeout, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._cancel_read_timer()
        self._cancel_write_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, and bound the size of a head."""
        if self._refused:
            return
        if self._in_head:
            self._head += len(data)
        super().data_received(data)
        if self._in_head and self._head > _MOST_HEAD and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the headers: needs at most {_MOST_HEAD} bytes"))
        elif self._read_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect(self.options.read_timeout, self.transport.abort)  # empty lines, or the body of what has been answered

    def on_message_begin(self) -> None:
        """Expect the rest of a head."""
        super().on_message_begin()
        self._in_head = True
        if self._read_timer is None:
            self._expect(self.options.read_timeout, self.transport.abort)

    def on_headers_complete(self) -> None:
        """Pass a request on; its body is timed where it is read."""
        self._in_head, self._head = False, 0
        if self._surplus:
            self._refuse_surplus()
        if self._refused:
            return
        self._cancel_read_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of a body on."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Pass the end of a body on."""
        if not self._refused:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        begin = partial(super()._start_asgi_task, cycle, app)
        if cycle.scope["path"] in _PROBES:
            begin()
        else:
            self.starts.begin(begin, self.loop)

    def pause_writing(self) -> None:
        """Expect the client to read."""
        super().pause_writing()
        self._cancel_write_timer()
        self._write_timer = self.loop.call_later(self.options.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on writing."""
        self._cancel_write_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        """End with the server: complete requests go on, one that is still being sent is refused, and an answer that was
        given has a moment to be read."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._refuse(ApiError(503, "the server is shutting down", retry_after=1))
            cycle.disconnected = True  # for what reads the body
            cycle.message_event.set()
            return
        super().shutdown()
        if self.transport.is_closing():
            self._expect(LINGER, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(ApiError(400, msg))

    def _expect(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self._cancel_read_timer()
        self._read_timer = self.loop.call_later(seconds, self._wait_for_reading, otherwise)

    def _wait_for_reading(self, otherwise: Callable[[], None]) -> None:
        """Wait a little longer after a timeout: bytes may be unread because the server was busy, not the client slow."""
        self._read_timer = self.loop.call_later(_READ_GRACE, otherwise)

    def _cancel_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse_surplus(self) -> None:
        self._refuse(ApiError(503, f"there are {self.options.max_connections} connections already", retry_after=1))

    def _refuse(self, error: ApiError) -> None:
        """Answer a connection that never becomes a request; the connection is closed once the client has had time to read."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        body = orjson.dumps(error.body)
        retry = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
        head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.write_eof()
        self._expect(LINGER, self.transport.abort)


def limited_protocol(options: ServerOptions, most_open: int) -> type[LimitedProtocol]:
    """Make the protocol of a server with these options. most_open: connections that there are file descriptors for."""
    return type("LimitedProtocol", (LimitedProtocol,), {"options": options, "most_open": most_open, "starts": PacedStarts()})
