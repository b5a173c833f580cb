"""The messages between an engine's process and its parent, and the start of the process.

This module imports little: the child is started before the parent imports what it needs itself, so that both import at once.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.core.system.child import module_path, python_command
from headway.core.system.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headway.core.engine.data.step import OutputDelta
    from headway.hosting.driver import EngineDriver
    from headway.hosting.host import EngineFacts


class StartEngine(NamedTuple):
    """The parent's first message."""

    make: Callable[[], EngineDriver]
    log_level: int


class EngineReady(NamedTuple):
    """The answer to `StartEngine`: the model is loaded."""

    name: str
    folder: Path
    tokenizer_folder: Path | None
    """None: there is no tokenizer."""
    facts: EngineFacts


class RunTask(NamedTuple):
    """A task that the parent wants done."""

    number: int
    task: bytes
    """The task, pickled by itself: one that cannot be read spoils no other message."""
    concurrently: bool
    """True: beside the engine's steps; False: between two of them."""


class TaskResult(NamedTuple):
    """The answer to `RunTask`: the result of the task."""

    number: int
    result: bytes
    """The result, pickled by itself as the task is."""
    num_sequences: tuple[int, int]
    """Sequences that run, and that wait."""


class Failed(NamedTuple):
    """The exception that a task, or (number None) the start, has raised."""

    number: int | None
    error: bytes
    """The exception, pickled by itself; empty for one that cannot be pickled."""
    text: str

    @classmethod
    def by(cls, number: int | None, error: BaseException) -> Failed:
        """Make the message about an exception."""
        text = f"{type(error).__name__}: {error}"
        try:
            return cls(number, pickle.dumps(error), text)
        except Exception:  # whatever the exception's own code raises
            return cls(number, b"", text)

    def exception(self) -> BaseException:
        """Return the exception; a RuntimeError with its text where its class cannot be imported here, a plugin's for instance."""
        try:
            found = pickle.loads(self.error)
        except Exception:
            return RuntimeError(self.text)
        return found if isinstance(found, BaseException) else RuntimeError(self.text)


class StepOutputs(NamedTuple):
    """The outputs of one step."""

    deltas: list[tuple[Any, ...]]
    """Each OutputDelta as a plain tuple, which takes a third as long to pickle."""
    num_sequences: tuple[int, int]
    """Sequences that run, and that wait."""

    @classmethod
    def of(cls, deltas: list[OutputDelta], num_sequences: tuple[int, int]) -> StepOutputs:
        """Make the message about a step."""
        return cls([tuple(each) for each in deltas], num_sequences)


class EngineFault(NamedTuple):
    """A fault has ended the engine."""

    message: str
    cause: str


class SpawnedEngine(NamedTuple):
    """A process that waits for `StartEngine`, and its wire. The process ends when the wire is closed."""

    process: subprocess.Popen[bytes]
    wire: Wire


def spawn_engine() -> SpawnedEngine:
    """Start the engine's process, with this one's module path. :raises OSError: the system starts no more processes."""
    near, far = socket.socketpair()
    with far:
        process = subprocess.Popen(
            python_command("headway.hosting.process_child", str(far.fileno())),
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent, even while the child still starts
            env={**os.environ, "PYTHONPATH": module_path()},
        )
    return SpawnedEngine(process, Wire(near))
