"""A process that generates and says how far it is: the events of both of its sides, and their limits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from headway.core.system.child import Child, Died, answers, die_with_parent, say

_COMPILING = 60.0
"""Seconds beyond the limit for the short pass before the timed ones: some libraries compile for each new shape then."""


def events(child: Child, request: object, cell_limit: float) -> Iterator[dict[str, Any]]:
    """Send a process its request, and hand on what it says.

    The last event is "late", when a generation took longer than `cell_limit` seconds, or "ended", with how in `reason`.
    """
    child.send(request)
    limit: float | None = None
    while True:
        try:
            event = child.answer(limit)
        except Died as died:
            yield {"event": "late" if died.silent else "ended", "reason": str(died)}
            return
        limit = {"begin": cell_limit + _COMPILING, "pass": cell_limit}.get(event["event"])
        yield event


class Tell(Protocol):
    """Says an event."""

    def __call__(self, event: str, **found: object) -> None:
        """found: what belongs to it, as JSON has it."""


def asked() -> tuple[dict[str, Any], Tell]:
    """For the process: its request, and how it says events; what libraries print is kept apart from them."""
    die_with_parent()
    stream = answers()

    def tell(event: str, **found: object) -> None:
        say(stream, {"event": event, **found})

    return json.loads(sys.stdin.readline()), tell
