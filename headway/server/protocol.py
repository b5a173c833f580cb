"""Connections that cost a server something while they give it nothing: too many, too slow, or never read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.server.errors import ApiError
from headway.server.rounds import Rounds
from headway.server.service import ServerOptions

_MOST_HEAD: Final = 64 * 1024
"""Bytes of a request line and its headers."""
_LOOK: Final = 0.02
"""Seconds in which the event loop reads what has come."""
_PROBES: Final = frozenset(("/health", "/ping"))
"""Paths that wait for nobody: who asks takes a server that is slow to answer for a dead one."""
_LINGER: Final = 1.0
"""Seconds that a refused client has to ask, to read the answer and to close. A connection that is closed while something it has
sent is unread is reset, and the client may lose what it was told."""


def limited_protocol(options: ServerOptions, most_open: int) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with the limits of these options. most_open: connections that there are descriptors for."""

    rounds = Rounds()

    class LimitedProtocol(HttpToolsProtocol):
        """Times the heads of requests, what comes after an answer, and the reading of answers; counts connections."""

        _read_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None
        _head = 0
        _in_head = True
        _surplus = _refused = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            count = len(self.connections)
            if count > most_open:
                transport.abort()
            elif count > options.max_connections:
                self._surplus = True
                self._expect(_LINGER, self._refuse_surplus)
            else:
                self._expect(options.read_timeout, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self._rest_reading()
            self._rest_writing()
            self._unset_keepalive_if_required()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            if self._in_head:
                self._head += len(data)
            super().data_received(data)
            if self._in_head and self._head > _MOST_HEAD and not self.transport.is_closing():
                self._refuse(ApiError(431, f"the headers: needs at most {_MOST_HEAD} bytes"))
            elif self._read_timer is None and (self.cycle is None or self.cycle.response_complete):
                self._expect(options.read_timeout, self.transport.abort)  # empty lines, or the body of what has been answered

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head = True
            if self._read_timer is None:
                self._expect(options.read_timeout, self.transport.abort)

        def on_headers_complete(self) -> None:
            self._in_head, self._head = False, 0
            if self._surplus:
                self._refuse_surplus()
            if self._refused:
                return
            self._rest_reading()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused:
                super().on_message_complete()

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            begin = partial(super()._start_asgi_task, cycle, app)
            if cycle.scope["path"] in _PROBES:
                begin()
            else:
                rounds.begin(begin, self.loop)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._rest_writing()
            self._write_timer = self.loop.call_later(options.write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            self._rest_writing()
            super().resume_writing()

        def shutdown(self) -> None:
            """The server ends: requests that have come whole go on, one that is still being sent is refused, an answer that is
            given has a moment to be read."""
            cycle = self.cycle
            if cycle is not None and cycle.more_body and not cycle.response_started:
                self._refuse(ApiError(503, "the server is shutting down", retry_after=1))
                cycle.disconnected = True  # for what reads the body
                cycle.message_event.set()
                return
            super().shutdown()
            if self.transport.is_closing():
                self._expect(_LINGER, self.transport.abort)

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, msg))

        def _expect(self, seconds: float, otherwise: Callable[[], None]) -> None:
            self._rest_reading()
            self._read_timer = self.loop.call_later(seconds, self._look_again, otherwise)

        def _look_again(self, otherwise: Callable[[], None]) -> None:
            """After a time that is over: what was sent in it may be unread because the server was busy, not the client slow."""
            self._read_timer = self.loop.call_later(_LOOK, otherwise)

        def _rest_reading(self) -> None:
            if self._read_timer is not None:
                self._read_timer.cancel()
                self._read_timer = None

        def _rest_writing(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

        def _refuse_surplus(self) -> None:
            self._refuse(ApiError(503, f"there are {options.max_connections} connections already", retry_after=1))

        def _refuse(self, error: ApiError) -> None:
            """Answer what never becomes a request, and close once the client has had time to read that."""
            if self._refused or self.transport.is_closing():
                return
            self._refused = True
            body = orjson.dumps(error.body)
            retry = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self.transport.write_eof()
            self._expect(_LINGER, self.transport.abort)

    return LimitedProtocol
