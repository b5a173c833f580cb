"""Ctrl-C put off while what it would break is half done, and raised again where Python would drop it."""

from __future__ import annotations

import _thread
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_AFTER: Final = 0.05
"""Seconds."""


@contextmanager
def never_lost() -> Iterator[None]:
    """Within it each Ctrl-C ends the main thread's work, and ends it by a KeyboardInterrupt.

    Python drops one that hits a callback, and in an import its C extensions make other errors of one, or abort. One that comes
    during an import is therefore raised at the import's end; the next is raised at once, for the import may hang.
    """
    hook, sys.unraisablehook = sys.unraisablehook, _again_after_a_callback
    takes = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes:
        signal.signal(signal.SIGINT, _AfterImports())
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def left_to_asyncio() -> Iterator[None]:
    """Within it Ctrl-C is Python's own again, which asyncio.run makes an end of its main task: it replaces no other handler."""
    before = signal.getsignal(signal.SIGINT)
    if not isinstance(before, _AfterImports) or current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _AfterImports:
    """A handler of SIGINT that raises KeyboardInterrupt as Python's does, but tears no import."""

    def __init__(self) -> None:
        self._waits: Timer | None = None
        self._again = False
        """Whether the next call is the timer's, and not a second Ctrl-C."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self._again = self._again, False
        if _imports(frame) and (again or self._waits is None):
            self._waits = _soon(self._interrupt)
            return
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None
        signal.default_int_handler(number, frame)

    def _interrupt(self) -> None:
        self._again = True
        _thread.interrupt_main()


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _again_after_a_callback(ignored: UnraisableHookArgs) -> None:
    if ignored.exc_type is KeyboardInterrupt:
        _soon(_thread.interrupt_main)  # here it would be dropped as well
    else:
        sys.__unraisablehook__(ignored)


def _soon(interrupt: Callable[[], None]) -> Timer:
    timer = Timer(_AGAIN_AFTER, interrupt)
    timer.daemon = True
    timer.start()
    return timer


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
