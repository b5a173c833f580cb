"""Ctrl-C put off while what it would break is half done."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


class Interrupts:
    """Keeps SIGINT back in the main thread, which alone Python interrupts.

    An exception between any two instructions of an engine's step would leave pages without an owner, or a step that the device
    has run and the scheduler knows nothing of. The second Ctrl-C comes through at once, for the step may hang.
    """

    def __init__(self) -> None:
        self._before: Any = None
        """The handler that was found; None: nothing is kept back."""
        self._came = False

    def put_off(self) -> None:
        """From now on a first SIGINT waits."""
        found = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        if callable(found):
            self._before, self._came = found, False
            try:
                signal.signal(signal.SIGINT, self._note)
            except ValueError:  # an interpreter within this one
                self._before = None

    def let_through(self) -> None:
        """Serve the one that has waited, and keep none back any more."""
        if current_thread() is not main_thread() or self._before is None:
            return
        before = self._before
        signal.signal(signal.SIGINT, before)
        self._before = None
        if self._came:
            before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            self._before(number, frame)
        self._came = True
