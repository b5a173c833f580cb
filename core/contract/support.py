"""Support: the answer to "can this run, and if not, why not", for the selector, the command line, error texts and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

_MOST: Final = 400
"""Most characters of `got` that are shown, for it may be a whole file's text."""


class Reason(NamedTuple):
    """Why something is refused."""

    what: str
    """What was looked at: "head_dim", "device", "block_size"."""
    need: str
    """What would have been accepted."""
    got: str
    """What was found."""
    hint: str = ""
    """What to do about it; only remedies that the resolver would honour."""

    def __str__(self) -> str:
        got = self.got if len(self.got) <= _MOST else f"{self.got[: _MOST // 2]}...{self.got[-_MOST // 2 :]}"
        text = f"{self.what}: needs {self.need}, got {got}"
        return f"{text} ({self.hint})" if self.hint else text


@dataclass(frozen=True, slots=True)
class Support:
    """The answer to a question of support: truthy if supported, else with every reason, not only the first."""

    reasons: tuple[Reason, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __and__(self, other: Support) -> Support:
        return Support(self.reasons + tuple(reason for reason in other.reasons if reason not in self.reasons))

    def __str__(self) -> str:
        return "yes" if self else "no: " + "; ".join(map(str, self.reasons))

    @property
    def brief(self) -> str:
        """The first reason and the number of others, in one line."""
        if not self.reasons:
            return "yes"
        more = f"; and {len(self.reasons) - 1} more" if len(self.reasons) > 1 else ""
        return str(self.reasons[0]) + more

    @property
    def needs_gpu(self) -> bool:
        """Return whether an NVIDIA GPU is needed and there is none that torch can use."""
        return any(reason.what == "device" and "cuda" in reason.need.lower() for reason in self.reasons)

    @classmethod
    def no(cls, what: str, need: str, got: object, hint: str = "") -> Support:
        """Make a refusal with one reason."""
        return cls((Reason(what, need, str(got), hint),))


YES = Support()
