"""What an engine's process and its parent tell each other."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.engine.deltas import OutputDelta
from headway.driver import EngineDriver
from headway.engine_host import EngineFacts


class Start(NamedTuple):
    """The first message: what makes the engine, and the level of its log."""

    make: Callable[[], EngineDriver]
    log_level: int


class Ready(NamedTuple):
    """Its answer: the model is loaded."""

    name: str
    folder: Path
    has_tokenizer: bool
    facts: EngineFacts


class Asked(NamedTuple):
    """A task of the parent's."""

    number: int
    task: bytes
    """Pickled by itself: one that cannot be read costs nothing but itself."""
    aside: bool


class Answered(NamedTuple):
    """What became of a task."""

    number: int
    result: bytes
    """Pickled by itself, likewise."""
    num_sequences: tuple[int, int]
    """That run, that wait."""


class Failed(NamedTuple):
    """The error of a task, or (number None) of the start."""

    number: int | None
    error: bytes
    """Pickled by itself; empty where it cannot be."""
    said: str

    @classmethod
    def by(cls, number: int | None, error: BaseException) -> Failed:
        """Of an error."""
        said = f"{type(error).__name__}: {error}"
        try:
            return cls(number, pickle.dumps(error), said)
        except Exception:  # whatever its own code raises
            return cls(number, b"", said)

    def raised(self) -> BaseException:
        """The error; a RuntimeError with its text where its class is not to be found here, a plugin's for instance."""
        try:
            found = pickle.loads(self.error)
        except Exception:
            return RuntimeError(self.said)
        return found if isinstance(found, BaseException) else RuntimeError(self.said)


class Stepped(NamedTuple):
    """What a step has added."""

    deltas: list[tuple[Any, ...]]
    """Each an OutputDelta as a plain tuple, which takes a third as long to pickle."""
    num_sequences: tuple[int, int]

    @classmethod
    def of(cls, deltas: list[OutputDelta], num_sequences: tuple[int, int]) -> Stepped:
        """From an engine's step."""
        return cls([tuple(each) for each in deltas], num_sequences)

    def outputs(self) -> list[OutputDelta]:
        """The deltas."""
        return [OutputDelta(*each) for each in self.deltas]


class Dead(NamedTuple):
    """A fault has ended the engine."""

    message: str
    cause: str
