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

log = logging.getLogger("headway")
Differing = tuple[str, object, object]
"""What is compared, what it was in the file, and what it is here."""


class KeptTimes(BaseModel):
    """What every such file says first."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    device: DeviceIdentity
    origin: Origin


File = TypeVar("File", bound=KeptTimes)


def read_kept(
    what: str, path: Path, kind: type[File], schema: str, device: DeviceIdentity, own: Callable[[File], Sequence[Differing]]
) -> File | None:
    """The file at a path, where it is there and of this device and software; why not is logged.

    what: whose times these are, for the log. own: what else must be the same.
    """
    if not os.path.exists(path):  # a folder that may not be read counts as empty
        return None
    try:
        found = read_json(path, kind, schema)
    except ConfigError as error:
        log.warning("%s: measured times not used: %s", what, error)
        return None
    rows: list[Differing] = [
        ("device", found.device.name, device.name),
        ("driver", found.device.driver, device.driver),
        ("torch", found.device.torch, device.torch),
        *((name, found.device.libraries.get(name), device.libraries.get(name)) for name in ("triton", "headway")),
        *own(found),
    ]
    other = [f"{named}: measured with {was}, here is {now}" for named, was, now in rows if was != now]
    if other:
        log.info("%s: measured times not used: %s", what, "; ".join(other))
    return None if other else found
