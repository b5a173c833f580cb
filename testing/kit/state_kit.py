"""The conformance kit of layers with a state: which cells a backend is tried in, and one cell's result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headway.core.contract.errors import ConfigError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.state import STATE_KINDS
from headway.core.contract.support import Support
from headway.testing.kit.checks import states
from headway.testing.kit.report import CellResult, result_of
from headway.testing.kit.state_subject import WORK, StateCell, StateSubject
from headway.testing.kit.subject import Subject

StateCheck = Callable[[StateSubject, StateCell], str]
STATE_CHECKS: dict[str, tuple[StateCheck, str]] = {
    "claims": (states.claims, "the class keeps what it says of itself"),
    "refuse": (states.refuse, "what is not claimed is refused, with reasons"),
    "tolerance": (states.tolerance, "the declared tolerance is honest"),
    "answer": (states.answer, "answers against float64, every bit watched"),
    "session": (states.session, "prompts cut anywhere, drafts that hold in part, prefixes taken up"),
    "graph": (states.graph, "planned once over static tensors, replayed for others"),
    "repeat": (states.repeat, "the same bits each time"),
    "memory": (states.memory, "memory does not grow"),
    "sync": (states.sync, "no waiting for the device"),
}
"""Name -> the check and what it holds a backend to, in the order of the scorecard."""


def describe(subject: Subject | StateSubject, here: Support, owner: str) -> dict[str, Any]:
    """Return a subject's name, owner and plugin, and why it is not available on its device. here: whether it can run at all."""
    unavailable = "" if here else str(here).removeprefix("no: ")
    devices = subject.claims.devices
    if here and subject.device.type not in devices:
        unavailable = f"device: needs {' or '.join(devices)}, got {subject.device.type}"
    return {"subject": subject.name, "owner": owner, "plugin": subject.plugin, "unavailable": unavailable}


class StateKit:
    """Everything that is tried of one backend for layers with a state."""

    def __init__(self, subject: StateSubject) -> None:
        self.subject = subject

    @property
    def name(self) -> str:
        """The name that the subject is registered by."""
        return self.subject.name

    @property
    def checks(self) -> Iterable[str]:
        """The names of all checks."""
        return STATE_CHECKS

    @property
    def layouts(self) -> Iterable[str]:
        """The names of all registered layouts."""
        return self.subject.layouts

    def cells(self, quick: bool = False) -> list[StateCell]:
        """The cells of a backend; quick: each value of each kind in place of each pair, in every second phase."""
        subject = self.subject
        found = [StateCell("claims")]
        plain = subject.plainest()
        if plain is None:
            return found
        found += states.refusals(subject, plain[0])
        found += [plain[0].plain("tolerance", dtype=str(dtype)) for dtype in subject.values["dtype"]]
        # Square states of each layout: only there is one that is taken for its transpose no error.
        squares = [row for row in subject.rows if row[0] == plain[0].plain("answer", layout=row[0].layout)]
        for number, (cell, phases) in enumerate([*squares, *subject.cover(quick)]):
            tried = states.STATE_PHASES[number % 2 :: 2] if quick and number >= len(squares) else states.STATE_PHASES
            found += [cell.plain("answer", phase=phase) for phase in tried if phase in phases]
        found += self._at_work(quick)
        graphs = {"decode": GraphLevel.DECODE, "verify": GraphLevel.UNIFORM}
        for kind in STATE_KINDS:
            row = subject.plainest(kind)
            if row is None:
                continue
            cell, phases = row
            found.append(cell.plain("session"))
            found += [
                cell.plain("graph", phase=phase)
                for phase, level in graphs.items()
                if phase in phases and subject.backend.graph_level >= level
            ]
            found += [
                cell.plain(check, phase=phase)
                for check in ("repeat", "sync")
                for phase in ("extend", "ragged")
                if phase in phases
            ]
        found += [plain[0].plain("memory")]
        return list(dict.fromkeys(found))

    def _at_work(self, quick: bool) -> list[StateCell]:
        """Many sequences and long ones, with the largest states of each kind, quick: the plainest: what runs in several parts."""
        layer_of = self.subject.plainest if quick else self.subject.largest
        rows = [row for kind in STATE_KINDS if (row := layer_of(kind)) is not None]
        return [
            cell.plain("answer", phase=phase, work=work)
            for cell, phases in rows
            for work, lens in states.LENS.items()
            for phase in lens
            if work != WORK[0] and phase in phases
        ]

    def listed(self, quick: bool = False, layout: str = "", cell: str = "") -> dict[str, Any]:
        """See `Kit.listed`.

        :raises ConfigError: a layout is asked for, which has no cells of its own here.
        """
        if layout:
            raise ConfigError("--layout", "a layout of a cache", f"{layout!r} beside a backend for layers with a state")
        registry, name = self.subject.registry, self.subject.name
        found = describe(self.subject, registry.states.availability(name), registry.states.entries[name].owner)
        names = [] if found["unavailable"] else [cell] if cell else [str(each) for each in self.cells(quick)]
        return found | {"cells": names}

    def run(self, cell: StateCell) -> CellResult:
        """One cell's result; whatever the backend raises is in it."""
        check, _ = STATE_CHECKS[cell.check]
        return result_of(cell, lambda: check(self.subject, cell))
