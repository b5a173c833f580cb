"""Who begins next where many ask at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

_AT_ONCE: Final = 8
"""Requests that are begun before the event loop looks at its sockets again, about as many as connections that it accepts then:
2 ms of work."""


class Rounds:
    """Begins requests, a few in each round of the event loop. A crowd's would otherwise all be begun before the next connection
    is accepted and the next probe answered, which is seconds."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._begun = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        """That has been asked for the next round; None: there is nothing to be done in it."""

    def begin(self, request: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Begin a request, in this round or in a later one."""
        if self._begun < _AT_ONCE and not self._waiting:
            self._begun += 1
            request()
        else:
            self._waiting.append(request)
        if self._loop is None:
            self._loop = loop
            loop.call_soon(self._next)

    def _next(self) -> None:
        """A new round."""
        self._begun = 0
        while self._waiting and self._begun < _AT_ONCE:
            self._begun += 1
            self._waiting.popleft()()
        loop, self._loop = self._loop, None
        if self._begun and loop is not None:
            self._loop = loop
            loop.call_soon(self._next)
