"""How a worker process that generates reports to its parent: the events, both sides of the pipe, and the time limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

from headway.core.system.child import Child, ChildDied, die_with_parent, message_of, open_replies, reply

COMPILING_SECONDS = 60.0
"""How much longer than the limit the short pass before the timed ones may take: libraries may compile for each new shape then."""


def events(child: Child, request: object, cell_limit: float) -> Iterator[dict[str, Any]]:
    """Send a process its request, and hand on what it says.

    The last event is "late", when a generation took longer than `cell_limit` seconds, or "ended", with how in `reason`.
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


class Tell(Protocol):
    """Says an event."""

    def __call__(self, event: str, **found: object) -> None:
        """found: what belongs to it, as JSON has it."""


def receive_request() -> tuple[dict[str, Any], Tell]:
    """For the process: its request, and how it says events; what libraries print is kept apart from them."""
    die_with_parent()
    stream = open_replies()

    def tell(event: str, **found: object) -> None:
        reply(stream, {"event": event, **found})

    return message_of(sys.stdin.readline()), tell
