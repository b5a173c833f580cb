"""Few rows of a table that hold every combination of some of its columns."""

from __future__ import annotations

import numpy


def greedy(table: numpy.ndarray, served: numpy.ndarray, sets: list[tuple[int, ...]]) -> list[int]:
    """Numbers of few rows that hold every combination of each set's columns, in every phase that has it."""
    sizes = table.max(axis=0) + 1
    codes, missing = [], []
    for columns in sets:
        code = numpy.zeros(len(table), dtype=numpy.int64)
        for column in columns:
            code = code * int(sizes[column]) + table[:, column]
        left = numpy.zeros((int(code.max()) + 1, served.shape[1]), dtype=numpy.int32)
        for phase in range(served.shape[1]):
            left[code[served[:, phase]], phase] = 1
        codes.append(code)
        missing.append(left)
    chosen: list[int] = []
    weights = served.astype(numpy.int32)
    while any(left.any() for left in missing):
        gains = sum(numpy.einsum("np,np->n", left[code], weights) for left, code in zip(missing, codes, strict=True))
        best = int(numpy.argmax(gains))
        chosen.append(best)
        for left, code in zip(missing, codes, strict=True):
            left[code[best]][served[best]] = 0
    return chosen
