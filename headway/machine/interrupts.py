"""Ctrl-C, which ends a command at once while modules load, and waits for the end of an engine's step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


def interrupt_command(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT as Python does, but end the process by the signal where modules are being loaded.

    A KeyboardInterrupt in the middle of an import becomes another error in C extensions, aborts the process, or is dropped; and
    nothing is to be saved yet. Shells show both ends as exit code 130.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        frame = frame.f_back
    signal.default_int_handler(number, None)


@contextmanager
def handle_sigint(by: Callable[[int, FrameType | None], object], instead_of: object) -> Iterator[None]:
    """Handle SIGINT by one handler where another one does so now. Any third one stays, such as a shell's "ignore"."""
    replaces = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is instead_of
    before = signal.signal(signal.SIGINT, by) if replaces else None
    try:
        yield
    finally:
        if replaces:
            signal.signal(signal.SIGINT, before)


class HeldInterrupts:
    """Holds SIGINT back in the main thread, the only one that Python interrupts, while an engine's step runs.

    An exception between any two instructions of a step would leave pages without an owner, or a step that the device has run and
    the scheduler knows nothing of. A second Ctrl-C comes through at once, for the step may hang.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        """The handler in whose place this one stands; None: SIGINT is not held back."""
        self._pending = False

    def hold(self) -> None:
        """Hold a first SIGINT back from now on."""
        found = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        if callable(found):
            self._handler = found
            self._pending = False
            try:
                signal.signal(signal.SIGINT, self._note)
            except ValueError:  # an interpreter within this one
                self._handler = None

    def release(self) -> None:
        """Hold back no more, and handle the SIGINT that has come meanwhile."""
        if current_thread() is not main_thread() or self._handler is None:
            return
        handler = self._handler
        self._handler = None
        signal.signal(signal.SIGINT, handler)
        if self._pending:
            handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._handler(number, frame)
        self._pending = True
