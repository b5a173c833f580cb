"""The backends of Headway that a user of vLLM asks for, by the name of vLLM's backend or by an environment variable."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

VARIABLE = "HEADWAY_ATTN_BACKEND"
"""auto, NAME, or prefill=NAME,decode=NAME: Headway's --attn-backend."""
AUTO = "HEADWAY"
"""vLLM's name of the backend that takes what `VARIABLE` says, `auto` where it says nothing."""


def member_name(backend: str) -> str:
    """vLLM's name of one of Headway's backends: an identifier in upper case, since vLLM reads its option so."""
    return f"{AUTO}_{re.sub(r'[^A-Za-z0-9]', '_', backend).upper()}"


def member_names(backends: Iterable[str]) -> dict[str, str]:
    """vLLM's name -> the request for Headway's selector, of all backends; those that differ in punctuation alone: the first."""
    names: dict[str, str] = {}
    for backend in backends:
        names.setdefault(member_name(backend), backend)
    return names


def environment_request() -> str | None:
    """The text of the environment variable; None where it is empty or not set."""
    return os.environ.get(VARIABLE, "").strip() or None
