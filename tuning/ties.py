"""Making the cells of a point, and telling which of them are ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from headway.core.contract.layout import CacheLayout
from headway.tuning.attempt import Attempt, failed
from headway.tuning.inputs import InputsChangedError
from headway.tuning.points import Point
from headway.tuning.schema import Cell

LEAST_DIFFERENCE = 0.01
"""Two times that differ by less are a tie, however steady they are."""
_MOST_NOISE = 0.10
"""Two times that differ by more are no tie, however far they spread: a busy machine is no reason to call them equal."""
TIE_RULE = (
    f"a tie: times that differ by less than {LEAST_DIFFERENCE:.0%}, or by less than {_MOST_NOISE:.0%} with ranges (p20 to p80) "
    "that overlap"
)


def new_cell(point: Point, name: str, pair: tuple[CacheLayout, int] | None, status: str, **found: Any) -> Cell:
    """A cell of a backend. pair: layout and block size; None where no cache is read, or none is meant."""
    return Cell(
        phase=point.phase,
        case=point.case,
        batch=point.batch,
        query_len=point.query_len,
        kv_len=point.kv_len,
        backend=name,
        layout=pair[0].name if pair else None,
        block_size=pair[1] if pair else None,
        status=status,  # type: ignore[arg-type]
        **found,
    )


def wrong_answer(
    point: Point, name: str, pair: tuple[CacheLayout, int] | None, error: float, attempt: Attempt, when: str = ""
) -> Cell:
    """The cell of a backend whose relative error exceeds its tolerance. when: in which run, if not the first."""
    reason = f"relative error {error:.2g}, tolerance {attempt.tolerance:.2g}{when}"
    shown = error if math.isfinite(error) else None
    found = {"relative_error": shown, "tolerance": attempt.tolerance, "kernel": attempt.kernel}
    return new_cell(point, name, pair, "incorrect", reason=reason, **found)


def failure(point: Point, name: str, pair: tuple[CacheLayout, int] | None, error: Exception) -> Cell:
    """The cell of a backend that raised, ran out of memory, or changed what it may only read."""
    if isinstance(error, InputsChangedError):
        return new_cell(point, name, pair, "incorrect", reason=str(error))
    status = "oom" if isinstance(error, (torch.OutOfMemoryError, MemoryError)) else "error"
    return new_cell(point, name, pair, status, reason=failed(error).reason)


def mark_ties(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of one point, those that cannot be told from the fastest marked as ties.

    A cell competes with those of its own layout and block size, which are those it could be switched with; see TIE_RULE.
    """
    placed: list[tuple[str | None, int | None]] = [(cell.layout, cell.block_size) for cell in cells if cell.layout]
    pairs = list(dict.fromkeys(placed)) or [(None, None)]
    tied: set[int] = set()
    for pair in pairs:
        rivals = [
            (number, cell)
            for number, cell in enumerate(cells)
            if cell.status in ("ok", "tie") and (cell.layout, cell.block_size) in (pair, (None, None))
        ]
        first, fastest = min(rivals, key=lambda rival: rival[1].layer_us or math.inf, default=(-1, None))
        same = {number for number, cell in rivals if fastest is not None and number != first and is_tie(fastest, cell)}
        tied |= same | ({first} if same else set())
    return [
        cell.model_copy(update={"status": "tie" if number in tied else "ok"}) if cell.status in ("ok", "tie") else cell
        for number, cell in enumerate(cells)
    ]


def is_tie(fastest: Cell, other: Cell) -> bool:
    """Whether a time cannot be told from the fastest, by TIE_RULE."""
    least, us = fastest.layer_us or math.inf, other.layer_us or math.inf
    # What a layer costs is the slower of device and host, at either end of the range.
    overlap = max(other.p20_us or math.inf, other.host_us or 0.0) <= max(fastest.p80_us or 0.0, fastest.host_us or 0.0)
    return us <= least * (1 + LEAST_DIFFERENCE) or (overlap and us <= least * (1 + _MOST_NOISE))


def noise_of(cells: Sequence[Cell]) -> float:
    """How far a time may be off: the median of the cells' relative spreads, between one and ten hundredths."""
    spreads = [
        (cell.p80_us - cell.p20_us) / (2 * cell.median_us)
        for cell in cells
        if cell.status in ("ok", "tie") and cell.median_us and cell.p20_us is not None and cell.p80_us is not None
    ]
    return min(max(median(spreads) if spreads else 0.0, LEAST_DIFFERENCE), _MOST_NOISE)
