"""Tables that ship with Headway: what is expected of a kind of GPU before anything has been measured on the one that is here.

Such a prior is a crossover table like any other, of another machine of the same kind. Its file says device, versions and commit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.core.contract.support import Reason
from headway.tuning.table.compare import differences
from headway.tuning.table.files import TableError, read_table, table_path
from headway.tuning.table.identity import DeviceIdentity
from headway.tuning.table.schema import CrossoverTable, PriorRecord, SpecRecord

FOLDER_VARIABLE = "HEADWAY_PRIORS"
"""Environment variable that names a folder of such files instead of the package's, such as one that many machines share."""
_DECIDING = ("device", "compute capability", SpecRecord.named, "level")
"""What must be the same: times of another kind of GPU, or of another layer, say nothing here."""


@dataclass(frozen=True)
class Prior:
    """A shipped table of this kind of device and this kind of layer."""

    path: Path
    table: CrossoverTable
    differs: tuple[str, ...]
    """What was other where it was measured: driver, torch, libraries, Headway's commit."""

    def unknown(self, available: Collection[str]) -> list[str]:
        """Backends that can run here and that took no part, or failed, where it was measured."""
        known = {record.name for record in self.table.backends if record.usable}
        return [name for name in available if name not in known]

    def record(self) -> PriorRecord:
        """What a table says of the prior that it has taken times from."""
        table = self.table
        return PriorRecord(device=table.device, origin=table.origin, date=table.date, differs=list(self.differs))

    def unchecked(self) -> CrossoverTable:
        """The prior as it is, every time marked: for a start that may measure nothing."""
        cells = [cell.model_copy(update={"prior": True}) for cell in self.table.cells]
        return self.table.model_copy(update={"cells": cells, "prior": self.record()})


def prior_folder() -> Path:
    """Where priors lie: $HEADWAY_PRIORS, else a folder of the package. Those of products and experts lie in folders of it."""
    chosen = os.environ.get(FOLDER_VARIABLE, "").strip()
    return Path(chosen) if chosen else Path(__file__).resolve().parents[1] / "priors"


def prior_path(device: DeviceIdentity, spec: SpecRecord) -> Path:
    """Where a prior for a layer on a device lies, if there is one."""
    return prior_folder() / table_path(device, spec).name


def find_prior(device: DeviceIdentity, spec: SpecRecord, owners: Mapping[str, tuple[str, str]]) -> Prior | None:
    """The shipped table of a kind of device and a kind of layer; None where there is none. owners: as in `differences`.

    :raises TableError: the file is faulty, or is of another device or layer than its name says.
    """
    path = prior_path(device, spec)
    if not path.is_file():
        return None
    table = read_table(path)
    reasons = differences(table, device, spec, owners)
    if table.level != "kernel":
        reasons.append(Reason("level", table.level, "kernel"))
    wrong = [reason for reason in reasons if reason.what in _DECIDING]
    if wrong:
        raise TableError(f"table {path}", f"{wrong[0].what} {wrong[0].got}", str(wrong[0].need))
    differing = [f"{reason.what}: {reason.need} there, {reason.got} here" for reason in reasons]
    return Prior(path, table, tuple(differing))


def shipped() -> list[Path]:
    """All files of priors, by name."""
    return sorted(prior_folder().glob("*.json"))
