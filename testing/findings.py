"""What a check of the kit ends with where it does not pass."""

from __future__ import annotations

from headway.core.contract.support import Support


class Finding(Exception):
    """The backend, layout or option under test breaks the contract."""

    def __init__(self, what: str, *, guess: str = "", error: float | None = None, tolerance: float | None = None) -> None:
        """what: what was expected and what came; guess: what it looks like; error: relative, against the declared tolerance."""
        super().__init__(what)
        self.guess = guess
        self.error = error
        self.tolerance = tolerance


class Skipped(Exception):
    """The check does not apply: the backend refuses, rightly, or the machine has not what it needs."""

    @classmethod
    def refused(cls, support: Support) -> Skipped:
        """With the backend's own reasons."""
        return cls(str(support).removeprefix("no: "))
