"""What became of one backend at one point, as a cell of the table."""

from __future__ import annotations

import math
from typing import Any

import torch

from headway.core.contract.layout import CacheLayout
from headway.tuning.attempt import Attempt, failed
from headway.tuning.inputs import InputsChangedError
from headway.tuning.points import Point
from headway.tuning.schema import Cell


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
