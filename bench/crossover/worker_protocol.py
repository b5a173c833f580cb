"""Protocol between a generation worker process and its parent: events, both sides of the pipe, and time limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

from headway.core.system.child import Child, ChildDied, die_with_parent, message_of, open_replies, reply

COMPILING_SECONDS = 60.0
"""Additional seconds for the short pass before the timed ones, in which libraries may compile for each new shape."""


def events(child: Child, request: object, cell_limit: float) -> Iterator[dict[str, Any]]:
    """Send a request to a worker process and yield the process's events.

    The last event is "late" if a generation took longer than `cell_limit` seconds, or "ended" with a `reason`.
    """
    child.send(request)
    limit: float | None = None
    while True:
        try:
            event = child.answer(limit)
        except ChildDied as died:
            yield {"event": "late" if died.timed_out else "ended", "reason": str(died)}
            return
        limit = {"begin": cell_limit + COMPILING_SECONDS, "pass": cell_limit}.get(event["event"])
        yield event


class Emit(Protocol):
    """Function that sends an event."""

    def __call__(self, event: str, **found: object) -> None:
        """Send an event. found: the event's JSON fields."""


def receive_request() -> tuple[dict[str, Any], Emit]:
    """Return the request to this process and a function that sends events. The output of libraries is kept separate from the
    events."""
    die_with_parent()
    stream = open_replies()

    def emit(event: str, **found: object) -> None:
        reply(stream, {"event": event, **found})

    return message_of(sys.stdin.readline()), emit
