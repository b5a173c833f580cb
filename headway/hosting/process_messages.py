"""Messages between an engine's process and its parent, and the start of the process.

This module imports little: the child is started before the parent's heavy imports, so that both processes import in parallel.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.core.system.child import Wire, module_path, python_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headway.hosting.driver import EngineDriver
    from headway.hosting.host import EngineFacts


class StartEngine(NamedTuple):
    """First message from the parent: the request to load the model."""

    make: Callable[[], EngineDriver]
    log_level: int


class EngineReady(NamedTuple):
    """Reply to `StartEngine`: the model is loaded."""

    name: str
    folder: Path
    tokenizer_folder: Path | None
    """Folder of the tokenizer. None if the model has no tokenizer."""
    facts: EngineFacts


class RunTask(NamedTuple):
    """Request to run a task."""

    number: int
    task: bytes
    """The task, pickled separately so that an unreadable task does not affect other messages."""
    concurrently: bool
    """True to run the task during steps, False to run it between two steps."""


class TaskResult(NamedTuple):
    """Reply to `RunTask` with the task's result."""

    number: int
    result: bytes
    """The task's result, pickled separately like the task."""
    num_sequences: tuple[int, int]
    """Numbers of running and waiting sequences."""


class Failed(NamedTuple):
    """Message with the exception that a task or the start has raised."""

    number: int | None
    error: bytes
    """The exception, pickled separately; empty if it cannot be pickled."""
    text: str

    @classmethod
    def by(cls, number: int | None, error: BaseException) -> Failed:
        """Make the message for an exception."""
        text = f"{type(error).__name__}: {error}"
        try:
            return cls(number, pickle.dumps(error), text)
        except Exception:  # whatever the exception's own code raises
            return cls(number, b"", text)

    def exception(self) -> BaseException:
        """Return the exception, or a RuntimeError with its text if its class (such as a plugin's) cannot be imported here."""
        try:
            found = pickle.loads(self.error)
        except Exception:
            return RuntimeError(self.text)
        return found if isinstance(found, BaseException) else RuntimeError(self.text)


class StepOutputs(NamedTuple):
    """Outputs of one step."""

    deltas: list[tuple[Any, ...]]
    """Each OutputDelta as a plain tuple, which pickles in a third of the time."""
    num_sequences: tuple[int, int]
    """Numbers of running and waiting sequences."""


class EngineFault(NamedTuple):
    """Notice that a fault has ended the engine."""

    message: str
    cause: str


class SpawnedEngine(NamedTuple):
    """A child process that waits for `StartEngine`, and its wire. The process ends when the wire is closed."""

    process: subprocess.Popen[bytes]
    wire: Wire


def spawn_engine() -> SpawnedEngine:
    """Start the engine's process with this process's module path. :raises OSError: if the system cannot start a process."""
    near, far = socket.socketpair()
    with far:
        process = subprocess.Popen(
            python_command("headway.hosting.process_child", str(far.fileno())),
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C in a terminal reaches only the parent
            env={**os.environ, "PYTHONPATH": module_path()},
        )
    return SpawnedEngine(process, Wire(near))
