"""Common parts of all kinds of operations in the conformance kit: a kernel's cells, and the grid of layers that it is tested
with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, Generic, TypeVar

import numpy
import torch
from torch import Tensor

from headway.core.contract.support import Support
from headway.core.oracle.cells import KitCell
from headway.core.oracle.steps import CellErrors
from headway.testing.kit.subject import Subject

C = TypeVar("C", bound=KitCell)
S = TypeVar("S", bound=Subject)
Values = tuple[Any, ...]


class Stage(ABC, Generic[S, C]):
    """Kernel under test, its cells and their steps. Each kind of operation has a subclass."""

    cell: ClassVar[type[KitCell]]
    """Class of the cells of this kind of operation."""

    def __init__(self, subject: S) -> None:
        self.subject = subject
        self.guesses = True
        """True if failures include a likely cause."""
        self.errors = CellErrors()
        """Errors measured in the current cell."""

    @property
    def layouts(self) -> Mapping[str, Any]:
        """Name -> layout of the caches or states of this kind."""
        return {}

    @abstractmethod
    def cells(self, quick: bool = False) -> list[C]:
        """Return the cells of the subject. quick: True to cover each value once instead of each pair of values."""

    @abstractmethod
    def answers(self, cell: C) -> list[Support]:
        """Return the subject's support for a cell's layer, for each phase of the cell."""

    @abstractmethod
    def once(self, cell: C) -> Callable[[], list[Tensor]]:
        """Return a function that repeats a cell's step and returns its results."""

    @abstractmethod
    def many(self, cell: C) -> Callable[[int], None]:
        """Return a function that runs N further steps with one instance of the kernel."""

    @abstractmethod
    def launches(self, cell: C) -> tuple[str, Callable[[], object]]:
        """Return the names of the kernel's calls in a step, and a function that makes only these calls. The step has already run
        once."""


class Grid(Stage[S, C]):
    """Stage whose layers are the accepted combinations of axis values."""

    axes: ClassVar[tuple[str, ...]]
    """Fields of a cell that define its layer."""
    phases: ClassVar[tuple[str, ...]] = ("-",)
    """Phases in which a layer can run."""

    @cached_property
    @abstractmethod
    def values(self) -> Mapping[str, Values]:
        """Values of each axis to test, the simplest first."""

    @abstractmethod
    def spec(self, cell: C) -> Any:
        """Return the spec of a cell's layer."""

    @abstractmethod
    def whole(self, cell: C) -> C | None:
        """Return the cell in which each axis that its layer does not use has the simplest value; None if no such layer exists."""

    def most_tolerance(self, dtype: torch.dtype) -> float:
        """Return the maximum tolerance that a kernel of this kind may declare for a dtype."""
        return float(self.subject.kind.kernel.tolerance[dtype])

    def served(self, cell: C) -> frozenset[str]:
        """Return the phases in which the subject accepts a cell's layer."""
        return frozenset(self.phases) if all(self.answers(cell)) else frozenset()

    @cached_property
    def rows(self) -> list[tuple[C, frozenset[str]]]:
        """Every accepted layer, with the phases in which it is accepted."""
        found: dict[C, frozenset[str]] = {}
        for chosen in product(*self.values.values()):
            cell = self.whole(self.having(dict(zip(self.values, chosen, strict=True))))
            if cell is not None and cell not in found:
                found[cell] = self.served(cell)
        return [(cell, phases) for cell, phases in found.items() if phases]

    def having(self, values: Mapping[str, Any]) -> C:
        """Return a cell of the check `answer` with these axis values."""
        cell: Any = self.cell("answer")
        made: C = cell.having(values)
        return made

    def cover(self, sets: Sequence[tuple[str, ...]]) -> list[tuple[C, frozenset[str]]]:
        """Return a small set of layers that contains, in every phase, each accepted combination of values for each set of
        axes."""
        if not self.rows:
            return []
        order, table, served = shuffled(self.rows, self.values, self.phases)
        axes = list(self.values)
        chosen = greedy(table, served, [tuple(axes.index(axis) for axis in each) for each in sets])
        return [self.rows[order[number]] for number in chosen]

    def widest(self, **wanted: Any) -> tuple[C, frozenset[str]] | None:
        """Return the simplest layer among the layers with the `wanted` values that are supported in the largest number of phases;
        None if no layer has these values."""
        fitting = [row for row in self.rows if all(getattr(row[0], axis) == value for axis, value in wanted.items())]
        return max(fitting, key=lambda row: len(row[1]), default=None)


def shuffled(
    rows: Sequence[tuple[C, frozenset[str]]], values: Mapping[str, Values], phases: Sequence[str]
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Return row indices in a fixed random order. For the rows in this order, also return the value index of each axis, and
    whether each phase is supported."""
    order = numpy.random.default_rng(0).permutation(len(rows))
    numbers = {axis: {value: n for n, value in enumerate(tried)} for axis, tried in values.items()}
    table = numpy.array([[numbers[axis][getattr(cell, axis)] for axis in numbers] for cell, _ in rows])
    served = numpy.array([[phase in served for phase in phases] for _, served in rows])
    return order, table[order], served[order]


def greedy(table: numpy.ndarray, served: numpy.ndarray, sets: list[tuple[int, ...]]) -> list[int]:
    """Return indices of a small set of rows that cover each combination of each set's columns, in every phase in which the
    combination occurs.

    The next row is always the first row that adds the largest number of combinations. The number that a row adds never grows, so
    only the rows with the largest last known number are evaluated again (lazy greedy: Minoux 1978).
    """
    sizes = table.max(axis=0) + 1
    codes = numpy.zeros((len(table), len(sets)), dtype=numpy.int64)
    count = 0
    for number, columns in enumerate(sets):
        for column in columns:
            codes[:, number] = codes[:, number] * int(sizes[column]) + table[:, column]
        codes[:, number] += count
        count = int(codes[:, number].max()) + 1
    missing = numpy.zeros((count, served.shape[1]), dtype=numpy.int32)
    for phase in range(served.shape[1]):
        missing[codes[served[:, phase]], phase] = 1
    weights = served.astype(numpy.int32)

    def added(rows: numpy.ndarray) -> numpy.ndarray:
        found: numpy.ndarray = numpy.einsum("nsp,np->n", missing[codes[rows]], weights[rows])
        return found

    most = added(numpy.arange(len(table)))
    chosen: list[int] = []
    while missing.any():
        best = most.max()
        rows = numpy.flatnonzero(most == best)
        most[rows] = added(rows)
        rows = rows[most[rows] == best]
        if len(rows):
            chosen.append(int(rows[0]))
            missing[numpy.ix_(codes[rows[0]], served[rows[0]])] = 0
    return chosen


def synchronize(device: torch.device) -> None:
    """Wait until all work on the device is complete."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
