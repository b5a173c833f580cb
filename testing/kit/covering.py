"""Few rows of a table that hold every combination of some of its columns."""

from __future__ import annotations

import numpy


def greedy(table: numpy.ndarray, served: numpy.ndarray, sets: list[tuple[int, ...]]) -> list[int]:
    """Numbers of few rows that hold every combination of each set's columns, in every phase that has it.

    The next row is the first of those that add most. What a row adds never grows, so that only rows are looked at again that
    added most when they were last looked at (lazy greedy: Minoux 1978).
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
