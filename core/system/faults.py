"""What the log keeps of other people's faults."""

from __future__ import annotations

import logging
import os
from functools import cache

log = logging.getLogger("headway")


def trace(what: str, error: BaseException) -> None:
    """Keep the traceback of a plugin's exception for those who ask: the log has it at -v and with $HEADWAY_DEBUG=1."""
    log.log(logging.WARNING if os.environ.get("HEADWAY_DEBUG") == "1" else logging.INFO, "%s raised:", what, exc_info=error)


@cache
def warn_once(text: str) -> None:
    """A warning that is not repeated for each layer and phase."""
    log.warning("%s", text)
