"""Measured times that a start has kept or that ship with Headway, and whether they hold for this device and this software."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import read_json, write_json
from headway.core.system.provenance import Origin
from headway.tuning.table.files import prior_folder
from headway.tuning.table.schema import DeviceIdentity

log = logging.getLogger("headway")
Differing = tuple[str, object, object]
"""What is compared, what it was in the file, and what it is here."""
Us = dict[str, list[float | None]]
"""Way -> microseconds by cell, a cell being a number of tokens, rows or bytes; None: it does not take so many, or failed."""


class KeptTimes(BaseModel):
    """What every such file says first."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    device: DeviceIdentity
    origin: Origin
    prior: str = ""
    """The shipped file whose times these are but for those that checked them, in words; empty: all were measured here."""
    us: Us

    def source(self, path: Path) -> str:
        """Where the times come from, in words. path: of this file."""
        return self.prior or f"measured {self.device.date}, {path.name}"


File = TypeVar("File", bound=KeptTimes)


@dataclass(frozen=True)
class KeptPlace(Generic[File]):
    """Where the times of something on a device are kept, and what must be the same for them to hold."""

    what: str
    """Whose times these are, for the log."""
    kind: type[File]
    path: Path
    """The file, in a folder of such files."""
    device: DeviceIdentity
    own: Mapping[str, object]
    """What else must be the same: fields of the file, and what they are here."""
    ways: Collection[str]

    def read(self) -> File | None:
        """The file, where it is there and of this device, software and ways; why not is logged."""
        found = self._read(self.path)
        if found is None:
            return None
        other = _other([*self._own(found), *_software(found, self.device), ("ways", sorted(found.us), sorted(self.ways))])
        if other:
            log.info("%s: measured times not used: %s", self.what, "; ".join(other))
        return None if other else found

    def shipped(self) -> File | None:
        """The file of the same name that ships with Headway, where there is one of this kind of device.

        Its `prior` says where it is from, and what was other there.
        """
        found = self._read(prior_folder() / self.path.parent.name / self.path.name)
        if found is None:
            return None
        wrong = _other(self._own(found))
        if wrong:
            log.info("%s: shipped times not used: %s", self.what, "; ".join(wrong))
            return None
        other = "".join(f", {line}" for line in _other(_software(found, self.device)))
        return found.model_copy(update={"prior": f"shipped times of {found.device.date[:10]} ({found.origin}{other})"})

    def keep(self, us: Us, prior: str = "") -> File:
        """Write times down; a warning says where they cannot be. prior: as in `KeptTimes`."""
        found = self.kind.model_validate({"device": self.device, "origin": Origin.here(), "prior": prior, "us": us, **self.own})
        try:
            write_json(found, self.path, "HEADWAY_CACHE")
        except ConfigError as error:
            log.warning("%s: the times are not kept: %s", self.what, error)
        return found

    def _read(self, path: Path) -> File | None:
        if not os.path.exists(path):  # a folder that may not be read counts as empty
            return None
        try:
            return read_json(path, self.kind, str(self.kind.model_fields["file_schema"].default))
        except ConfigError as error:
            log.warning("%s: measured times not used: %s", self.what, error)
            return None

    def _own(self, found: File) -> list[Differing]:
        own = [(name, getattr(found, name), here) for name, here in self.own.items()]
        return [("device", found.device.name, self.device.name), *own]


def _software(found: KeptTimes, device: DeviceIdentity) -> list[Differing]:
    return [
        ("driver", found.device.driver, device.driver),
        ("torch", found.device.torch, device.torch),
        *((name, found.device.libraries.get(name), device.libraries.get(name)) for name in ("triton", "headway")),
        *found.device.compilers_beside(device),
    ]


def _other(rows: Sequence[Differing]) -> list[str]:
    return [f"{named}: measured with {was}, here is {now}" for named, was, now in rows if was != now]


_MOST_CELLS = 4
_LOSS = 0.05
"""What the way that the shipped times name the fastest may lose in a cell that is checked, as a share."""


def times_with(
    shipped: KeptTimes | None, what: str, ways: Collection[str], count: int, measure: Callable[[Collection[int]], Us]
) -> tuple[Us, str]:
    """The times of some ways, and what `KeptTimes.prior` says of them: shipped ones that a few measured ones agree with, or all
    measured.

    what: whose times, for the log. count: of cells. measure: times the ways in some cells; the others are None.
    """
    if shipped is not None and set(ways) <= shipped.us.keys():
        us = {way: shipped.us[way] for way in ways}
        cells = cells_to_check(us)
        here = measure(cells)
        wrong = _wrong(us, here, cells)
        if not wrong:
            log.info("%s: the %s, agree here with %d measured ones", what, shipped.prior, len(cells))
            return _scaled(us, here, cells), f"{shipped.prior}, checked here in {len(cells)} of {count} cells"
        log.info("%s: the %s, are not used: %s", what, shipped.prior, wrong)
    elif shipped is not None:
        lacking = ", ".join(sorted(set(ways) - shipped.us.keys()))
        log.info("%s: the %s, are not used: %s not in them", what, shipped.prior, lacking)
    return measure(range(count)), ""


def unchecked(shipped: File | None, ways: Collection[str]) -> File | None:
    """Shipped times as they are, for a start that may measure nothing; None where they lack one of the ways."""
    if shipped is None or not set(ways) <= shipped.us.keys():
        return None
    return shipped.model_copy(update={"prior": f"{shipped.prior}, not checked here"})


def cells_to_check(us: Us) -> list[int]:
    """A few cells: the ends, and the first ones in which another way is the fastest than before."""
    timed = [cell for cell in range(min(map(len, us.values()), default=0)) if _ranked(us, cell)]
    changes = [cell for before, cell in pairwise(timed) if _ranked(us, before)[0][1] != _ranked(us, cell)[0][1]]
    return sorted(dict.fromkeys([*timed[:1], *timed[-1:], *changes[: _MOST_CELLS - 2]]))


def _ranked(us: Us, cell: int) -> list[tuple[float, str]]:
    return sorted((time, name) for name, times in us.items() if (time := times[cell]) is not None)


def _wrong(us: Us, here: Us, cells: Collection[int]) -> str:
    """Why shipped times do not hold here; empty: they do."""
    for cell in cells:
        name, found = _ranked(us, cell)[0][1], _ranked(here, cell)
        now = here[name][cell]
        if now is None:
            return f"{name} has no time here"
        if now > found[0][0] * (1 + _LOSS):
            return f"{name} takes {now / found[0][0]:.2f} times as long as {found[0][1]}"
    return "" if cells else "nothing to check them by"


def _scaled(us: Us, here: Us, cells: Collection[int]) -> Us:
    """The shipped times as long as they are here, by the median of what was measured, which stands as it is."""
    pairs = [(us[name][cell], here[name][cell]) for name in us for cell in cells]
    scale = math.exp(median(math.log(now / was) for was, now in pairs if was and now))
    return {
        name: [here[name][cell] if cell in cells else None if time is None else time * scale for cell, time in enumerate(times)]
        for name, times in us.items()
    }
