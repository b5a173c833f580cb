"""What an engine's process and its parent tell each other."""

from __future__ import annotations

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
    result: Any


class Failed(NamedTuple):
    """The error of a task, or (number None) of the start."""

    number: int | None
    error: BaseException


class Stepped(NamedTuple):
    """What a step has added."""

    deltas: list[tuple[Any, ...]]
    """Each an OutputDelta as a plain tuple, which takes half as long to pickle."""
    num_sequences: tuple[int, int]
    """That run, that wait."""

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
