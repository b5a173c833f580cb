"""Backends with one planted mistake each: the kit must catch every one of them and name its mistake."""

from __future__ import annotations

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import ConfigError


def find(name: str) -> type[AttentionBackend]:
    """The planted backend of a name.

    :raises ConfigError: there is none of that name.
    """
    from headway.testing.broken.planted import PLANTED

    if name not in PLANTED:
        raise ConfigError("broken:NAME", f"one of {', '.join(PLANTED)}", repr(name))
    return PLANTED[name]
