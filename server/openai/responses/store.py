"""Responses that can be asked for again and continued: the last ones, in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from headway.server.errors import ApiError
from headway.server.openai.responses.requests import Item

MOST_BYTES: Final = 64 * 2**20
"""Bytes of JSON of all stored responses and their conversations."""


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation up to it."""

    response: dict[str, Any]
    before: Sequence[Item]
    """Items of the conversation that the request continued."""
    input: Sequence[Item]
    """Items of the request."""

    @property
    def conversation(self) -> list[Item]:
        """All items, those of the answer included."""
        return [*self.before, *self.input, *self.response["output"]]


class ResponseStore:
    """The last responses of a server; the oldest give way. For the server's event loop alone."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        """most: number of responses; 0: none is stored. most_bytes: of their JSON; the newest stays, whatever its size."""
        self.most = most
        self._most_bytes = most_bytes
        self._found: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Store a response, where any are stored."""
        if not self.most:
            return
        size = len(orjson.dumps([stored.response, stored.before, stored.input]))
        self._found[stored.response["id"]] = stored, size
        self._bytes += size
        while len(self._found) > self.most or (self._bytes > self._most_bytes and len(self._found) > 1):
            _, (_, gone) = self._found.popitem(last=False)
            self._bytes -= gone

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """The response of an id. param: the field of the request that names it.

        :raises ApiError: it is not stored, or is no longer.
        """
        found = self._found.get(response_id)
        if found is None:
            kept = (
                f"the last {self.most} responses, at most {self._most_bytes >> 20} MiB, since its start" if self.most else "none"
            )
            place = f"{param}: " if param else ""
            message = f"{place}no response {response_id[:80]!r} is stored; this server keeps {kept}"
            raise ApiError(400 if param else 404, message, param, "previous_response_not_found" if param else None)
        return found[0]

    def remove(self, response_id: str) -> None:
        """Forget a response.

        :raises ApiError: it is not stored.
        """
        self.get(response_id)
        _, size = self._found.pop(response_id)
        self._bytes -= size
