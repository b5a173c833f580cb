"""Backends that compile kernels tell of each one here, so that an engine knows what delayed a step."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

Listener = Callable[[str], None]

_LISTENERS: list[WeakMethod[Listener]] = []
"""Of the process, as kernels are: one that is compiled for one engine serves all."""


def listen(listener: Listener) -> None:
    """Have a bound method called with the name of every kernel that is compiled from now on, as long as its object lives."""
    _LISTENERS[:] = [each for each in _LISTENERS if each() is not None]
    _LISTENERS.append(WeakMethod(listener))


def announce(name: str) -> None:
    """Tell that a kernel has been compiled or loaded, outside what Triton tells of itself."""
    for each in list(_LISTENERS):
        listener = each()
        if listener is not None:
            listener(name)
