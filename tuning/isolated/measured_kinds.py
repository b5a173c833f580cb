"""Measurements that can run in a child process: of attention, and of layers with a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from headway.registry import BackendEntry, Registry
from headway.registry.records import Brought
from headway.tuning.measure.run import CrossoverOptions, run_kernel_level
from headway.tuning.measure.state_run import StateOptions, run_state_level
from headway.tuning.table.files import read_state_table, read_table
from headway.tuning.table.schema import CrossoverTable
from headway.tuning.table.state_schema import StateTable

O = TypeVar("O", CrossoverOptions, StateOptions)
T = TypeVar("T", CrossoverTable, StateTable)


@dataclass(frozen=True)
class MeasuredKind(Generic[O, T]):
    """One kind of measurement, and whose backends take part in it."""

    name: str
    """The key in KINDS, under which a child process finds it."""
    run: Callable[..., T]
    """(options, registry, tell=...) -> table."""
    read: Callable[[Path], T]
    """Reads the table that `run` has written."""
    entries: Callable[[Registry], Mapping[str, BackendEntry[Any]]]
    """The backends that are registered."""
    brought: Callable[[Brought], Sequence[str]]
    """The names of those that a plugin has brought."""


ATTENTION: MeasuredKind[CrossoverOptions, CrossoverTable] = MeasuredKind(
    "attention", run_kernel_level, read_table, lambda registry: registry.backends, lambda brought: brought.backends
)
STATES: MeasuredKind[StateOptions, StateTable] = MeasuredKind(
    "states", run_state_level, read_state_table, lambda registry: registry.state_backends, lambda brought: brought.state_backends
)
KINDS: Mapping[str, MeasuredKind[Any, Any]] = {kind.name: kind for kind in (ATTENTION, STATES)}
