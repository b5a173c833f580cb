"""Connections that cost a server something while they give it nothing: too many, too slow, or never read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.server.errors import ApiError
from headway.server.service import ServerOptions

_MOST_HEAD: Final = 64 * 1024
"""Bytes of a request line and its headers."""


def limited_protocol(options: ServerOptions) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with the limits of these options."""

    class LimitedProtocol(HttpToolsProtocol):
        """Times the heads of requests and the reading of answers; counts connections."""

        _timer: asyncio.TimerHandle | None = None
        _head = 0
        _in_head = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > options.max_connections:
                self._refuse(ApiError(503, f"there are {options.max_connections} connections already", retry_after=1))
                return
            self._await(options.read_timeout, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self._rest()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head += len(data)
            super().data_received(data)
            if self._in_head and self._head > _MOST_HEAD and not self.transport.is_closing():
                self._refuse(ApiError(431, f"the headers: needs at most {_MOST_HEAD} bytes"))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head = True
            if self._timer is None:
                self._await(options.read_timeout, self.transport.abort)

        def on_headers_complete(self) -> None:
            self._in_head, self._head = False, 0
            self._rest()
            super().on_headers_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await(options.write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            self._rest()
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, msg))

        def _await(self, seconds: float, then: Callable[[], None]) -> None:
            self._rest()
            self._timer = self.loop.call_later(seconds, then)

        def _rest(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse(self, error: ApiError) -> None:
            """Answer what never becomes a request, and close."""
            body = orjson.dumps(error.body)
            retry = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self.transport.close()

    return LimitedProtocol
