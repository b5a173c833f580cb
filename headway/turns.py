"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

from collections import deque
from threading import Lock

from headway.interrupts import Interrupts


class Turns:
    """A lock for `with`, first come first served; Ctrl-C waits until whoever holds it lets it go.

    threading.Lock may give itself to the thread that has just released it, again and again: a call that steps an engine in a
    loop would keep all others out until it has finished.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._taken = False
        self._waiting: deque[Lock] = deque()
        self._interrupts = Interrupts()

    def __enter__(self) -> None:
        self._interrupts.put_off()
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            turn = Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            self._interrupts.let_through()
            turn.acquire()
            self._interrupts.put_off()
        except BaseException:  # an interrupt while it waits
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self._pass_on()  # the turn had come already
            raise

    def __exit__(self, *_: object) -> None:
        self._pass_on()
        self._interrupts.let_through()

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
