"""One engine and its clients: whose turn it is to step, and who hears what a step brought."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

from headway.assembly import Assembly, assemble
from headway.core.engine.deltas import OutputDelta
from headway.engine_args import EngineArgs
from headway.heap import GIVE_BACK_INTERVAL, give_back
from headway.intake import Intake
from headway.request_names import RequestNames
from headway.turns import Turns

Listener = Callable[[list[OutputDelta]], Iterable[tuple[str, int | None]]]
"""Hears what each step has added, about requests that it does not know too; returns the completions, as request id and index
(None: all), that the engine is to end."""


class EngineDriver:
    """What the clients of one engine share. Whichever steps the engine, the requests of all advance."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.engine = assembly.engine
        self.intake = Intake(assembly.model, assembly.engine.limits)
        self.turns = Turns()
        """Who may call the engine; it is held for a step at most."""
        self._listeners: tuple[Listener, ...] = ()
        self._guard = Lock()
        self.names = RequestNames()
        self.kept: dict[str, Any] = {}
        """What tasks leave for later ones, by a name of their own: see headway.engine_host."""
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


def driver_of(args: EngineArgs) -> EngineDriver:
    """A driver of a new engine; see `assemble`."""
    return EngineDriver(assemble(args))
