"""Headway's log: log output of commands on stderr, tracebacks of third-party exceptions, one-time warnings."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING, Final

from headway.core.contract.errors import BackendError, HeadwayError
from headway.core.system.text import harmless

if TYPE_CHECKING:
    from headway.core.contract.metadata import Phase

log = logging.getLogger("headway")

_QUIET: Final = ("transformers", "torch", "huggingface_hub")  # Libraries whose warnings do not concern a command's user


class LogFormatter(logging.Formatter):
    """Formatter that escapes control characters, because messages contain untrusted names."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, with control characters escaped."""
        return harmless(super().format(record), keep="\n\t")


def log_to_stderr(level: int, name: str = "headway") -> None:
    """Write messages of this level and above to stderr, each prefixed with the name of the program."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(f"{name}: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for library in _QUIET:
        logging.getLogger(library).setLevel(logging.ERROR)


def log_traceback(what: str, error: BaseException) -> None:
    """Log the traceback of an exception that users see as one line. It is only shown with -v or $HEADWAY_DEBUG=1."""
    log.log(logging.WARNING if os.environ.get("HEADWAY_DEBUG") == "1" else logging.INFO, "%s raised:", what, exc_info=error)


@cache
def warn_once(text: str) -> None:
    """Log a warning only once, even if it is issued again, for example for each layer and phase."""
    log.warning("%s", text)


def blame(error: BaseException, backend: str, phase: Phase, work: str) -> HeadwayError:
    """Return a HeadwayError unchanged, or any other error wrapped with backend (such as "backend triton"), phase and shapes."""
    if isinstance(error, HeadwayError):
        return error
    log_traceback(backend, error)
    return BackendError(f"{backend} failed in {phase.value} ({work}): {type(error).__name__}: {error}")
