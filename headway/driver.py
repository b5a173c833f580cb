"""One engine and its clients: whose turn it is to step, who hears what a step brought, and which ids are in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count
from threading import Lock
from typing import NamedTuple

from headway.assembly import Assembly
from headway.core.contract.errors import ConfigError
from headway.core.engine.deltas import OutputDelta
from headway.heap import GIVE_BACK_INTERVAL, give_back
from headway.intake import Intake
from headway.turns import Turns

Listener = Callable[[list[OutputDelta]], Iterable[tuple[str, int | None]]]
"""Hears what each step has added, about requests that it does not know too; returns the completions, as request id and index
(None: all), that the engine is to end."""


class RequestName(NamedTuple):
    """How a request is called."""

    request_id: str
    """By its caller, who may take the same id again as soon as the request has ended."""
    key: str
    """By the engine, for good: a step that ran when its caller gave a request up still brings it a token, which must not reach
    the next request of the same id."""


class EngineDriver:
    """What the clients of one engine share. Whichever steps the engine, the requests of all advance."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.engine = assembly.engine
        self.intake = Intake(assembly.model, assembly.engine.limits)
        self.turns = Turns()
        """Who may call the engine; it is held for a step at most."""
        self._listeners: tuple[Listener, ...] = ()
        self._ids: set[str] = set()
        self._numbers = map(str, count())
        self._guard = Lock()
        self.on_cpu = assembly.device.type == "cpu"
        """Whether activations and compiled products are this process's own memory, which is given back now and then."""
        self._next_give_back = time.perf_counter() + GIVE_BACK_INTERVAL

    def listen(self, listener: Listener) -> None:
        """Have a client hear of every step from now on."""
        with self._guard:
            self._listeners = (*self._listeners, listener)

    def leave(self, listener: Listener) -> None:
        """Have it hear of no more."""
        with self._guard:
            self._listeners = tuple(each for each in self._listeners if each != listener)

    def step(self) -> None:
        """Run one step of the engine. The caller has the turn."""
        deltas = self.engine.step()
        if self.assembly.stats_log is not None:
            self.assembly.stats_log.stepped(self.engine)
        started = time.perf_counter()
        self.engine.mark("outputs")
        stopped = [each for listen in self._listeners for each in listen(deltas)]
        self.engine.stats.output_seconds += time.perf_counter() - started
        self.engine.mark("")
        for request_id, index in stopped:
            self.engine.abort(request_id, index)
        if self.on_cpu and started >= self._next_give_back:
            give_back()
            self._next_give_back = started + GIVE_BACK_INTERVAL

    def claim(self, request_id: str | None = None) -> RequestName:
        """Take an id for a request until it is released. None: any.

        :raises ConfigError: it is taken.
        """
        with self._guard:
            if request_id is None:
                request_id = key = next(each for each in self._numbers if each not in self._ids)
            elif not isinstance(request_id, str) or not request_id:
                raise ConfigError("request_id", "a text that is not empty", repr(request_id))
            elif request_id in self._ids:
                raise ConfigError("request_id", "an id that no unfinished request has", repr(request_id))
            else:
                key = f"{request_id}~{next(self._numbers)}"
            self._ids.add(request_id)
        return RequestName(request_id, key)

    def release(self, request_id: str) -> None:
        """Let an id be taken again."""
        with self._guard:
            self._ids.discard(request_id)
