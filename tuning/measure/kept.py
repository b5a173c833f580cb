"""Files of measured times that an engine's start has kept, and whether they are of this device and this software."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import read_json
from headway.core.system.provenance import Origin
from headway.tuning.table.identity import DeviceIdentity
from headway.tuning.table.priors import prior_folder

log = logging.getLogger("headway")
Differing = tuple[str, object, object]
"""What is compared, what it was in the file, and what it is here."""


class KeptTimes(BaseModel):
    """What every such file says first."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    device: DeviceIdentity
    origin: Origin
    prior: str = ""
    """The shipped file whose times these are but for those that checked them, in words; empty: all were measured here."""
    us: dict[str, list[float | None]]
    """Way -> microseconds for each number of tokens, rows or bytes; None: it does not take so many, or failed."""

    def source(self, path: Path) -> str:
        """Where the times come from, in words. path: of this file."""
        return self.prior or f"measured {self.device.date}, {path.name}"


File = TypeVar("File", bound=KeptTimes)


def read_kept(
    what: str, path: Path, kind: type[File], schema: str, device: DeviceIdentity, own: Callable[[File], Sequence[Differing]]
) -> File | None:
    """The file at a path, where it is there and of this device and software; why not is logged.

    what: whose times these are, for the log. own: what else must be the same.
    """
    found = _read(what, path, kind, schema)
    if found is None:
        return None
    other = _other([("device", found.device.name, device.name), *_software(found, device), *own(found)])
    if other:
        log.info("%s: measured times not used: %s", what, "; ".join(other))
    return None if other else found


def read_shipped(
    what: str, path: Path, kind: type[File], schema: str, device: DeviceIdentity, own: Callable[[File], Sequence[Differing]]
) -> File | None:
    """The file of the same name that ships with Headway, where there is one of this kind of device.

    Its `prior` says where it is from, and what was other there. path: where times are kept, in a folder of their kind. own: what
    must be the same besides the device.
    """
    found = _read(what, prior_folder() / path.parent.name / path.name, kind, schema)
    if found is None:
        return None
    wrong = _other([("device", found.device.name, device.name), *own(found)])
    if wrong:
        log.info("%s: shipped times not used: %s", what, "; ".join(wrong))
        return None
    other = "".join(f", {line}" for line in _other(_software(found, device)))
    return found.model_copy(update={"prior": f"shipped times of {found.device.date[:10]} ({found.origin}{other})"})


def _read(what: str, path: Path, kind: type[File], schema: str) -> File | None:
    if not os.path.exists(path):  # a folder that may not be read counts as empty
        return None
    try:
        return read_json(path, kind, schema)
    except ConfigError as error:
        log.warning("%s: measured times not used: %s", what, error)
        return None


def _software(found: KeptTimes, device: DeviceIdentity) -> list[Differing]:
    return [
        ("driver", found.device.driver, device.driver),
        ("torch", found.device.torch, device.torch),
        *((name, found.device.libraries.get(name), device.libraries.get(name)) for name in ("triton", "headway")),
        *found.device.compilers_beside(device),
    ]


def _other(rows: Sequence[Differing]) -> list[str]:
    return [f"{named}: measured with {was}, here is {now}" for named, was, now in rows if was != now]
