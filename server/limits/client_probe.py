"""A client that sends no more: whether it waits for its answer, or has gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

_START: Final = b"HTTP/1.1 "
"""The bytes that every answer begins with."""
_FIRST_LOOK: Final = 0.01
_LONGEST_LOOK: Final = 0.5
"""Seconds between two looks at the connection, which double up to this."""
_FIRST_PAUSE: Final = 0.2
"""Seconds between the first two bytes sent early; each pause is three times the last, so nine bytes last 11 minutes."""


class ClientProbe:
    """Finds out whether a client that has closed its sending side still reads.

    A client that waits for its answer (`nc -N`, `shutdown(SHUT_WR)`) and one that has gone look the same: the system reports that
    nobody reads only after bytes were sent. So the first bytes of the answer, the same for all, are sent early, one by one.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop, begun: bool, gone: Callable[[], None]) -> None:
        """begun: an answer is being written already. gone: called once nobody reads any more."""
        self._transport = transport
        self._loop = loop
        self._gone = gone
        self._sent = b""
        self._unsent = b"" if begun else _START
        self._look_after = _FIRST_LOOK
        self._pause = _FIRST_PAUSE
        self._due = 0.0
        """When the next byte is sent."""
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def write(self, data: bytes) -> None:
        """Write a part of the answer, without the bytes that were sent early."""
        sent = self._sent
        self._sent = b""
        self._unsent = b""
        self._transport.write(data.removeprefix(sent))

    def stop(self) -> None:
        """Look no more."""
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
