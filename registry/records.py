"""What is said of plugins: who brought what, what became of it, and where it went wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

BUILTIN_OWNER: Final = "built-in"
"""Who brings the backends that come with Headway."""


@dataclass(frozen=True, slots=True)
class Brought:
    """What a plugin handed in, by name."""

    hooks: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    proposers: tuple[str, ...] = ()
    logits_processors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """A plugin that is installed, or a file that the user names."""

    name: str
    owner: str
    """Name and version of its distribution; a file's name and a hash of its text."""
    file: str
    """Where its module or package lies; empty where it was not found."""
    state: Literal["loaded", "left out", "blocked"]
    """blocked: the user does not want it (`--plugins`, $HEADWAY_PLUGINS)."""
    why: str = ""
    brought: Brought = field(default_factory=Brought)
    remarks: tuple[str, ...] = ()
    """What it raised in its trial, each of which costs the part of it that raised."""
    details: str = ""
    """Tracebacks, and what it printed."""
    tried: str = ""
    """When."""
    target: str = ""
    """FILE.py or FILE.py:CLASS, of a file; empty for what is installed."""
