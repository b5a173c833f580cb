"""Handlers of SIGINT (Ctrl-C), which ends a command at once while modules load."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


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
