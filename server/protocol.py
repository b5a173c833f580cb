"""Limits on connections that could exhaust the server: too many connections, slow ones, or clients that do not read their
answer."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import orjson
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headway.server.errors import ApiError
from headway.server.middleware import PROBES
from headway.server.options import ServerOptions

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_START: Final = b"HTTP/1.1 "  # First bytes of every response
_FIRST_LOOK: Final = 0.01
_LONGEST_LOOK: Final = 0.5  # Maximum seconds between two checks of the connection, which start at _FIRST_LOOK and double
_FIRST_PAUSE: Final = 0.2
"""Seconds between the first two early bytes. Each pause is three times the previous one, so nine bytes last 11 minutes."""


class ClientProbe:
    """Detector of whether a client that has closed its sending side still reads.

    A client that waits for its answer (`nc -N`, `shutdown(SHUT_WR)`) and a client that has disconnected look the same until bytes
    are sent: only then does the system report an error. The first bytes, equal for all responses, are therefore sent early, one
    by one.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop, begun: bool, gone: Callable[[], None]) -> None:
        """begun: True if a response is already being written. gone: function called once when the client has disconnected."""
        self._transport = transport
        self._loop = loop
        self._gone = gone
        self._sent = b""
        self._unsent = b"" if begun else _START
        self._look_after = _FIRST_LOOK
        self._pause = _FIRST_PAUSE
        self._due = 0.0  # Time of the next early byte
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def write(self, data: bytes) -> None:
        """Write a part of the response, without the bytes that were sent early."""
        sent = self._sent
        self._sent = b""
        self._unsent = b""
        self._transport.write(data.removeprefix(sent))

    def stop(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._gone()
            return
        now = self._loop.time()
        if self._unsent and now >= self._due:
            early = self._unsent[:1]
            self._unsent = self._unsent[1:]
            self._sent += early
            self._due = now + self._pause
            self._pause = 3 * self._pause
            self._transport.write(early)
        self._timer = self._loop.call_later(self._look_after, self._look)
        self._look_after = min(2 * self._look_after, _LONGEST_LOOK)


_AT_ONCE: Final = 8  # Requests to start per iteration of the event loop: 2 ms of work, about as many as it accepts connections


class PacedStarts:
    """Starts a few requests per iteration of the event loop, so that many simultaneous requests do not delay new connections and
    probes."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._begun = 0
        self._loop: asyncio.AbstractEventLoop | None = None  # The loop that will call `_next`; None if no call is scheduled

    def begin(self, request: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Start a request, in this iteration or a later one."""
        if self._begun < _AT_ONCE and not self._waiting:
            self._begun += 1
            request()
        else:
            self._waiting.append(request)
        if self._loop is None:
            self._loop = loop
            loop.call_soon(self._next)

    def _next(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < _AT_ONCE:
            self._begun += 1
            self._waiting.popleft()()
        loop = self._loop
        self._loop = None
        if self._begun and loop is not None:
            self._loop = loop
            loop.call_soon(self._next)


_MOST_HEAD: Final = 64 * 1024  # Maximum bytes of a path, headers and trailers, as parsed, independent of packets
_MOST_UNPARSED: Final = 2 * _MOST_HEAD  # Maximum bytes that the parser consumes without a callback, such as an endless header
_BODY_HEADERS: Final = frozenset((b"content-length", b"transfer-encoding"))  # Headers that determine the length of a body
_MOST_PIPELINED: Final = 64  # Maximum number of requests of one connection that wait for earlier responses
_READ_GRACE: Final = 0.02  # Seconds for the event loop to read bytes that have arrived
LINGER: Final = 1.0
"""Seconds that a rejected client has to finish sending, read the response and close the connection. Closing earlier resets the
connection and may lose the response."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the number of connections, and on the time to send heads and bodies and to read
    responses."""

    options: ClassVar[ServerOptions]
    most_open: ClassVar[int]
    """Maximum number of connections that the available file descriptors allow."""
    refused: ClassVar[Counter[str]]
    """Status -> number of connections that got an error response."""
    starts: ClassVar[PacedStarts]

    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _head = 0  # Bytes of the path, headers and trailers of the request being read
    _unparsed = 0  # Bytes since the parser's last callback
    _surplus = _refused = False
    _owes_body = False  # True if the parser will not parse the current request's body because the request asks for an upgrade
    _replaying = False  # True while a new parser is fed the known head of a request
    _answering: RequestResponseCycle | None = None  # The current or last answered one; `cycle` is the newest
    _probe: ClientProbe | None = None  # Detector for a client that has closed its sending side
    _last_words: ApiError | None = None  # Error for a rejected client, sent after the responses to its earlier requests

    def connection_made(self, transport: Any) -> None:
        """Count the connection and start the timer for its first request."""
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
        """Cancel the timers and end every request of the connection."""
        self._cancel_read_timer()
        self._cancel_write_timer()
        self._unset_keepalive_if_required()
        if self._probe is not None:
            self._probe.stop()
        self.pipeline.clear()
        if self._answering is not None:  # uvicorn only ends the newest request
            _end(self._answering)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Unlike uvicorn's version, invalid HTTP is rejected after the responses to earlier requests."""
        self._unset_keepalive_if_required()
        self._unparsed += len(data)
        while data and not self._refused:
            try:
                self.parser.feed_data(data)
                break
            except HttpParserUpgrade as found:  # to a protocol that this server does not support: continue with HTTP
                data = data[found.args[0] :]
                if self._owes_body:
                    self._read_owed_body()
            except HttpParserError:
                self._refuse(ApiError(400, "the bytes that were sent are no HTTP request"))
        if self._refused:
            return
        if self._unparsed > _MOST_UNPARSED:
            self._refuse(_too_long(431, "the headers"))
        elif self._read_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect(self.options.read_timeout, self._give_up)  # empty lines, or the rest of a body that was already answered

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep answering complete requests after the client's EOF; reject incomplete ones. Return False if no answer is left to
        send."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            self._refuse(ApiError(400, "the body: needs as many bytes as its head says, got fewer"))
        if not self._answers:
            return False
        self._cancel_read_timer()
        answering = self._answering
        assert answering is not None, "_answers"
        if not self._refused:
            cycle.keep_alive = False
        self._probe = ClientProbe(self.transport, self.loop, answering.response_started, self.transport.abort)
        answering.transport.write = self._probe.write  # type: ignore[method-assign, assignment]
        return True

    def on_message_begin(self) -> None:
        """Start the timer for the rest of a head."""
        if self._replaying:
            return
        self._head = self._unparsed = 0
        super().on_message_begin()
        if self._read_timer is None:
            self._expect(self.options.read_timeout, self._give_up)

    def on_url(self, url: bytes) -> None:
        """Process a part of a path. Limits the size of the head."""
        if not self._replaying and self._takes_head(len(url), 414, "the path"):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Process a header or a trailer. Limits the size of the head."""
        if not self._replaying and self._takes_head(len(name) + len(value) + len(": \r\n"), 431, "the headers"):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start a request. The time limit for its body is checked when the body is read."""
        if self._replaying:
            return
        if self._surplus:
            self._refuse_surplus()
        elif len(self.pipeline) >= _MOST_PIPELINED:
            self._refuse(
                ApiError(429, f"more than {_MOST_PIPELINED} requests of one connection wait for their turn", retry_after=1)
            )
        if self._refused:
            return
        self._cancel_read_timer()
        self._owes_body = self.parser.should_upgrade() and any(name in _BODY_HEADERS for name, _ in self.headers)
        super().on_headers_complete()
        self.cycle.transport = _Closing(self.transport, partial(self._close_after, self.cycle))  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Pass a part of a request's body to the application."""
        self._unparsed = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Pass the end of a request's body to the application."""
        if not self._refused and not self._owes_body:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request, or send a rejected client its error after the responses to earlier requests."""
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self._last_words is not None and not self.transport.is_closing():
            self._write_last(self._last_words)
        elif is_last and self._probe is not None:
            self.transport.close()

    def _close_after(self, cycle: RequestResponseCycle) -> None:
        """Close the connection after a response; if the client still sends, first give it time to read the response."""
        if not cycle.more_body or self.transport.is_closing() or self._refused:
            self.transport.close()
            return
        self._refused = True
        self.transport.write_eof()
        self._expect(LINGER, self.transport.abort)

    def _read_owed_body(self) -> None:
        """Read the request's body with a new parser.

        Clients that prefer HTTP/2, such as Java's, ask for it in the head of any request (`Upgrade: h2c`). A server may ignore
        this header (RFC 9110, 7.8), but httptools' parser does not parse the body of such a request.
        """
        self._owes_body = False
        self._replaying = True
        known = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] in _BODY_HEADERS)
        self.parser = HttpRequestParser(self)
        if hasattr(self.parser, "set_dangerous_leniencies"):  # as uvicorn does
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + known + b"\r\n")
        self._replaying = False

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        begin = partial(super()._start_asgi_task, cycle, _until_cancelled(cycle, app))
        if cycle.scope["path"] in PROBES:  # a probe regards a slow server as dead
            begin()
        else:
            self.starts.begin(begin, self.loop)

    def pause_writing(self) -> None:
        """Start the timer that ends the connection if the client does not read."""
        super().pause_writing()
        self._cancel_write_timer()
        self._write_timer = self.loop.call_later(self.options.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Resume writing."""
        self._cancel_write_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        """Shut down with the server: complete requests continue, incomplete requests are rejected, and clients get time to read
        sent responses."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._refuse(ApiError(503, "the server is shutting down", retry_after=1))
            return
        super().shutdown()
        if self.transport.is_closing():
            self._expect(LINGER, self.transport.abort)

    def _expect(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self._cancel_read_timer()
        self._read_timer = self.loop.call_later(seconds, self._wait_for_reading, otherwise)

    def _give_up(self) -> None:
        """End a connection that was idle for too long; a request that is being answered still gets its response."""
        if self._answers:
            self._refuse(ApiError(408, f"the request behind this one has taken longer than {self.options.read_timeout:g} s"))
        else:
            self.transport.abort()

    @property
    def _answers(self) -> bool:
        found = self._answering
        return found is not None and not (found.response_complete or found.disconnected)

    def _wait_for_reading(self, otherwise: Callable[[], None]) -> None:
        """Wait a little longer after a timeout, because bytes may be unread only because the server was busy."""
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

    def _takes_head(self, size: int, status: int, what: str) -> bool:
        """Count the bytes of a head. If they exceed the limit, reject the client with `status` and return False."""
        self._unparsed = 0
        self._head += size
        if self._head > _MOST_HEAD:
            self._refuse(_too_long(status, what))
        return not self._refused

    def _refuse(self, error: ApiError) -> None:
        """Stop reading requests and send an error, after the responses to earlier requests."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        broken = self.cycle
        if broken is not None and broken.more_body and not broken.response_started:  # incomplete body: the error answers it
            _end(broken)
            if self.pipeline and self.pipeline[0][0] is broken:
                self.pipeline.popleft()
        if self._answers:
            self._last_words = error
            self._cancel_read_timer()  # the timer is for bytes that are not read any more
        else:
            self._write_last(error)

    def _write_last(self, error: ApiError) -> None:
        """Write a final response, and close the connection after the client has had time to read the response."""
        self.refused[str(error.status)] += 1
        body = orjson.dumps(error.body)
        retry = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
        head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        if self._probe is not None:  # the probe keeps the connection open otherwise
            self.transport.close()
            return
        self.transport.write_eof()
        self._expect(LINGER, self.transport.abort)


class _Closing:
    """Transport for one response. The protocol decides when to close the connection."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _too_long(status: int, what: str) -> ApiError:
    return ApiError(status, f"{what}: needs at most {_MOST_HEAD} bytes of path and headers")


def _until_cancelled(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return the application with silent cancellation. Otherwise, uvicorn would log a traceback when the server is forced to
    stop."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            _end(cycle)

    return serve


def _end(cycle: RequestResponseCycle) -> None:
    """Mark a request's client as disconnected: waiting readers wake up, and further output is dropped."""
    cycle.disconnected = True
    cycle.message_event.set()


def limited_protocol(options: ServerOptions, most_open: int, refused: Counter[str]) -> type[LimitedProtocol]:
    """Return the protocol class of a server with these options. most_open: maximum number of connections that the file
    descriptors allow. refused: status -> number of error responses, which the protocol counts."""
    own = {"options": options, "most_open": most_open, "refused": refused, "starts": PacedStarts()}
    return type("LimitedProtocol", (LimitedProtocol,), own)
