"""Keeps what every cell of the grid came to, and writes it where HEADWAY_GRID_OUT says."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cover import device_of
from headway.bench.conformance.report import GridCell, GridReport
from headway.core.contract.support import Support
from headway.tuning.device import DeviceIdentity, identify_device
from headway.tuning.json_files import write_json

VARIABLE = "HEADWAY_GRID_OUT"
_SECONDS_BETWEEN_WRITES = 2.0
_REASON_CHARACTERS = 300


@dataclass
class Outcome:
    """What a check found out while it ran."""

    refused: str = ""
    errors: list[float] = field(default_factory=list)
    tolerance: float | None = None

    def refuse(self, support: Support) -> None:
        """The backend said no, and that was right."""
        self.refused = str(support).removeprefix("no: ")

    def compare(self, error: float, tolerance: float, what: str = "") -> None:
        """Fails unless the error is a number below the tolerance."""
        self.errors.append(error)
        self.tolerance = tolerance
        assert error < tolerance, f"relative error {error:.3g}, tolerance {tolerance:.3g} {what}".rstrip()


class GridLog:
    """One report a device type: the first in the named file, others beside it. Written as it grows: a crash loses little."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.cells: dict[str, list[GridCell]] = {}
        self._devices: dict[str, DeviceIdentity] = {}
        self._written = 0.0

    @classmethod
    def from_environment(cls) -> GridLog:
        """The log of a test session."""
        name = os.environ.get(VARIABLE)
        return cls(Path(name) if name else None)

    @contextmanager
    def cell(self, device_type: str, **fields: Any) -> Iterator[Outcome]:
        """Run one check: refused if it said so, failed if it raised (and raises on), else passed."""
        outcome = Outcome()
        try:
            yield outcome
        except BaseException as error:
            self._add(device_type, outcome, fields, f"{type(error).__name__}: {error}")
            raise
        self._add(device_type, outcome, fields, "")

    def _add(self, device_type: str, outcome: Outcome, fields: dict[str, Any], failure: str) -> None:
        reason = failure or outcome.refused
        worst = max(outcome.errors, key=lambda error: math.inf if math.isnan(error) else error, default=None)
        cell = GridCell(
            status="fail" if failure else "refused" if outcome.refused else "pass",
            reason=reason[:_REASON_CHARACTERS],
            relative_error=worst if worst is not None and math.isfinite(worst) else None,
            tolerance=outcome.tolerance,
            **fields,
        )
        self.cells.setdefault(device_type, []).append(cell)
        if time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Write every report; nothing without a path."""
        if self.path is None:
            return
        for number, (device_type, cells) in enumerate(self.cells.items()):
            if device_type not in self._devices:
                self._devices[device_type] = identify_device(device_of(device_type))
            path = self.path if number == 0 else self.path.with_name(f"{self.path.stem}-{device_type}{self.path.suffix}")
            write_json(GridReport(device=self._devices[device_type], cells=cells), path)
        self._written = time.monotonic()
