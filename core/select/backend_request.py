"""The option --attn-backend, read once: everything below the options takes a `BackendRequest`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.system.text import shown

AUTO = "auto"
"""Stands in place of a backend's name where the selector chooses."""


@dataclass(frozen=True)
class BackendRequest:
    """The backend that a user named for each phase, or auto."""

    prefill: str = AUTO
    """Serves PREFILL and EXTEND."""
    decode: str = AUTO
    text: str = field(default="", compare=False)
    """The user's words; empty: made from the names."""

    def __post_init__(self) -> None:
        pair = f"prefill={self.prefill},decode={self.decode}"
        object.__setattr__(self, "text", self.text or (self.prefill if self.prefill == self.decode else pair))

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: object, option: str = "attn_backend") -> BackendRequest:
        """Read auto, NAME, or prefill=NAME,decode=NAME; a phase that is not mentioned is auto.

        A request is taken as it is, and so is what dataclasses.asdict makes of one.

        option: the name of the option, for the error.

        :raises ConfigError: text of another form, or no text.
        """
        if isinstance(text, BackendRequest):
            return text
        if isinstance(text, Mapping):
            text = text.get("text")
        if not isinstance(text, str):
            raise ConfigError(option, "a text", shown(text))
        text = text.strip()
        if text and "=" not in text and "," not in text:
            return cls(text, text)
        names: dict[str, str] = {}
        for part in text.split(","):
            key, _, name = (piece.strip() for piece in part.partition("="))
            if key not in ("prefill", "decode") or not name or key in names:
                raise ConfigError(option, "auto, NAME, or prefill=NAME,decode=NAME", repr(text))
            names[key] = name
        return cls(names.get("prefill", AUTO), names.get("decode", AUTO), text)

    @classmethod
    def for_backend(cls, name: str, phases: Iterable[Phase]) -> BackendRequest:
        """The request by which this backend serves the phases it claims, and auto the others."""
        served = set(phases)
        prompts = {Phase.PREFILL, Phase.EXTEND} <= served
        if Phase.DECODE not in served and prompts:
            return cls(prefill=name)
        return cls(decode=name) if Phase.DECODE in served and not prompts else cls(name, name)

    def name_for(self, phase: Phase) -> str:
        """The backend named for a phase, or auto."""
        return self.decode if phase is Phase.DECODE else self.prefill

    @property
    def names(self) -> Sequence[str]:
        """The backends that are named, each once; without auto."""
        return [name for name in dict.fromkeys((self.prefill, self.decode)) if name != AUTO]

    @property
    def auto_phases(self) -> Sequence[Phase]:
        """The phases that are left to the selector."""
        return [phase for phase in Phase if self.name_for(phase) == AUTO]


ALL_AUTO = BackendRequest()
"""The request of a user who names no backend."""
