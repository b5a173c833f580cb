"""Ctrl-C put off while what it would break is half done, and raised again where Python would drop it."""

from __future__ import annotations

import _thread
import signal
import sys
from collections.abc import Iterator
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

    Python drops one that hits a callback, after which a library may fail over what it has not got; and in an import C extensions
    make other errors of one, or abort. One that was dropped is raised again a moment later, or in place of an error that comes
    before that. One that comes during an import is raised at its end; the next is raised at once, for the import may hang.
    """
    handler = _Handler()
    hook, sys.unraisablehook = sys.unraisablehook, handler.see_dropped
    takes = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    except (Exception, SystemExit) as error:
        if handler.owes_one:
            raise KeyboardInterrupt from error
        raise
    finally:
        handler.forget()
        sys.unraisablehook = hook
        if takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def left_to_asyncio() -> Iterator[None]:
    """Within it Ctrl-C is Python's own again, which asyncio.run makes an end of its main task: it replaces no other handler."""
    before = signal.getsignal(signal.SIGINT)
    if not isinstance(before, _Handler) or current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Handler:
    """A handler of SIGINT that raises KeyboardInterrupt as Python's does, but tears no import."""

    def __init__(self) -> None:
        self._timer: Timer | None = None
        """Until it calls this handler again, and not longer: a call that finds it is a second Ctrl-C."""

    @property
    def owes_one(self) -> bool:
        """Whether a Ctrl-C has come that has ended nothing yet."""
        return self._timer is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._timer is None and _imports(frame):
            self._put_off()
        else:
            self.forget()
            signal.default_int_handler(number, frame)

    def see_dropped(self, ignored: UnraisableHookArgs) -> None:
        """An unraisablehook: Python has dropped an exception."""
        if ignored.exc_type is KeyboardInterrupt:
            self._put_off()
        else:
            sys.__unraisablehook__(ignored)

    def forget(self) -> None:
        """What was owed is raised, or there is nothing left that it could end."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _put_off(self) -> None:
        self.forget()
        self._timer = Timer(_AGAIN_AFTER, self._interrupt)
        self._timer.daemon = True
        self._timer.start()

    def _interrupt(self) -> None:
        self._timer = None
        if sys.platform == "win32":
            _thread.interrupt_main()
        else:  # which would not wake it from a wait
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


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
