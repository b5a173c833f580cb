"""The log on stderr, as every command and every process of a command writes it."""

from __future__ import annotations

import logging
from typing import Final

from headway.core.system.text import harmless

_QUIET: Final = ("transformers", "torch", "huggingface_hub")
"""Their warnings are not about anything that a user of a command did."""


class _Harmless(logging.Formatter):
    """Messages without what a terminal would obey: they hold names that somebody else wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record), keep="\n\t")


def log_to_stderr(level: int) -> None:
    """Write messages of this level and above to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Harmless("headway: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for library in _QUIET:
        logging.getLogger(library).setLevel(logging.ERROR)
