"""`Support`: the result of a check whether something can run, with every reason if it cannot. Selection, the command line, errors
and tests use this class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

_MOST: Final = 400
"""Maximum number of characters of `Reason.got` to show, since the value may be the text of a whole file."""


class Reason(NamedTuple):
    """One reason why a check failed."""

    what: str
    """Property that was checked, such as "head_dim", "device" or "block_size"."""
    need: str
    """Values that are accepted."""
    got: str
    """Value that was found."""
    hint: str = ""
    """Remedy, or "" if none is known. The backend selection must accept the remedy."""

    def __str__(self) -> str:
        got = self.got if len(self.got) <= _MOST else f"{self.got[: _MOST // 2]}...{self.got[-_MOST // 2 :]}"
        text = f"{self.what}: needs {self.need}, got {got}"
        return f"{text} ({self.hint})" if self.hint else text


@dataclass(frozen=True, slots=True)
class Support:
    """Result of a check: truthy if supported; otherwise falsy, with all reasons why not."""

    reasons: tuple[Reason, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __and__(self, other: Support) -> Support:
        return Support(self.reasons + tuple(reason for reason in other.reasons if reason not in self.reasons))

    def __str__(self) -> str:
        return "yes" if self else "no: " + "; ".join(map(str, self.reasons))

    @property
    def brief(self) -> str:
        """The first reason and the number of further reasons, in one line."""
        if not self.reasons:
            return "yes"
        more = f"; and {len(self.reasons) - 1} more" if len(self.reasons) > 1 else ""
        return str(self.reasons[0]) + more

    @property
    def needs_gpu(self) -> bool:
        """True if an NVIDIA GPU is needed and torch cannot use one."""
        return any(reason.what == "device" and "cuda" in reason.need.lower() for reason in self.reasons)

    @classmethod
    def no(cls, what: str, need: str, got: object, hint: str = "") -> Support:
        """Return a refusal with one reason."""
        return cls((Reason(what, need, str(got), hint),))


YES = Support()
