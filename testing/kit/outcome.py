"""What came of one cell: a result, whatever the backend raised."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import torch

from headway.core.contract.errors import HeadwayError, known_cause
from headway.core.contract.layout import SCALES
from headway.core.oracle.cells import Finding, Skipped
from headway.core.oracle.steps import CellErrors
from headway.testing.kit.report import CellResult

_NOTE = 400
_TWO_SIZES = re.compile(
    r"(?:size of tensor a|expanded size of the tensor|got) \(?(\d+)\)?.*?(?:size of tensor b|existing size|to match) \(?(\d+)\)?"
)
_LEAST_ROUND = 128
"""Sizes from which on a number in an error is one that was chosen for a buffer."""


def _round(size: int) -> bool:
    """Whether a size is one that a programmer chooses: a power of two, or that and one."""
    return size >= _LEAST_ROUND and (size & (size - 1) == 0 or size % 1000 == 0 or (size - 1) & (size - 2) == 0)


class AnyCell(Protocol):
    """What a result needs of a cell."""

    @property
    def check(self) -> str:
        """The name of its check."""

    @property
    def axes(self) -> dict[str, str | int]:
        """The result's fields for its axes."""


def result_of(cell: AnyCell, run: Callable[[], str], errors: CellErrors | None = None) -> CellResult:
    """Run one cell and return its result; whatever the backend raises is in it.

    run: returns a note on a cell that passed. errors: what the cell measures; None if it measures nothing.
    """
    started = time.perf_counter()
    torch.manual_seed(0)
    try:
        with torch.inference_mode():  # as in the engine, caches and inputs included
            note, status, found = run(), "passed", None
    except Skipped as reason:
        note, status, found = str(reason), "skipped", None
    except Finding as finding:
        note, status, found = str(finding), "failed", finding
    except Exception as error:
        found = finding_of(error)
        note, status = str(found), "failed"
    measured = CellErrors(found.error, found.tolerance) if found is not None else errors or CellErrors()
    return CellResult(
        cell=str(cell),
        check=cell.check,
        status=status,  # type: ignore[arg-type]
        reason=note[: 2 * _NOTE],
        guess=found.guess if found is not None else "",
        relative_error=measured.error if measured.error is not None and measured.error < 1e30 else None,
        tolerance=measured.tolerance,
        seconds=round(time.perf_counter() - started, 4),
        **cell.axes,  # type: ignore[arg-type]
    )


def finding_of(error: Exception) -> Finding:
    """What a backend raised, as a finding."""
    return Finding(_raised(error), guess=_guess_of(error), named=False)


def _raised(error: Exception) -> str:
    """What a backend raised and where, in one line."""
    if isinstance(error, HeadwayError) and error.__cause__ is not None:  # the engine's word around what the backend raised
        frames = traceback.extract_tb(error.__cause__.__traceback__)[-1:]
        where = f" ({frames[0].filename.rsplit('/', 1)[-1]}:{frames[0].lineno})" if frames else ""
        return f"{' '.join(str(error).split())[:_NOTE]}{where}"
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = (
        f" ({frames[0].filename.rsplit('/', 1)[-1]}:{frames[0].lineno})" if frames and not isinstance(error, HeadwayError) else ""
    )
    return f"raised {type(error).__name__}: {' '.join(str(error).split())[:_NOTE]}{where}"


def _guess_of(error: BaseException) -> str:
    error = error.__cause__ or error
    text = str(error)
    if isinstance(error, KeyError) and text.strip("'") in ("key", "value", *SCALES):
        return f"asks for the tensor {text}, which this layout does not have: read `cache.layout`, or refuse it in supports()"
    if "non-zero size" in text:
        return "reduces over no keys at all: a sequence, or a part of it, for which it finds none"
    if "out of range" in text or "out of bounds" in text:
        return "reads or writes outside of a tensor: of the block table or the cache, or of a buffer of its own"
    sizes = _TWO_SIZES.search(text)
    if sizes is not None and _round(min(map(int, sizes.groups()))):
        least, most = sorted(map(int, sizes.groups()))
        return f"holds a size of {least:,} where this step needs {most:,}: a buffer or a table of fixed size"
    if "view size is not compatible" in text or "contiguous" in text:
        return "needs tensors in one piece: .view() of a slice"
    return known_cause(text)
