"""The ids of an engine's requests: those that callers give, and those by which the engine knows them."""

from __future__ import annotations

from itertools import count
from threading import Lock
from typing import NamedTuple

from headway.core.contract.errors import ConfigError


class RequestName(NamedTuple):
    """How a request is called."""

    request_id: str
    """By its caller, who may take the same id again as soon as the request has ended."""
    key: str
    """By the engine, for good: a step that ran when its caller gave a request up still brings it a token, which must not reach
    the next request of the same id."""


class RequestNames:
    """The ids that unfinished requests have. Any thread may call it."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._numbers = map(str, count())
        self._guard = Lock()

    def claim(self, request_id: str | None = None) -> RequestName:
        """Take an id for a request until it is released. None: any.

        :raises ConfigError: it is taken.
        """
        with self._guard:
            if request_id is None:
                request_id = key = next(each for each in self._numbers if each not in self._ids)
            elif not isinstance(request_id, str) or not request_id:
                raise ConfigError("request_id", "a text that is not empty", repr(request_id))
            elif request_id in self._ids:
                raise ConfigError("request_id", "an id that no unfinished request has", repr(request_id))
            else:
                key = f"{request_id}~{next(self._numbers)}"
            self._ids.add(request_id)
        return RequestName(request_id, key)

    def release(self, request_id: str) -> None:
        """Let an id be taken again."""
        with self._guard:
            self._ids.discard(request_id)
