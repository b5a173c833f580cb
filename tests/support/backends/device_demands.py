"""What a fake of the device holds against the engine."""

from __future__ import annotations


class Violation(BaseException):
    """The engine has asked for what is wrong. No Exception, for the engine takes those for faults of the device."""


def demand(holds: object, what: str) -> None:
    """:raises Violation: it does not hold."""
    if not holds:
        raise Violation(what)
