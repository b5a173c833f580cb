"""Files of tables: where they lie, how they are read, and the priors that ship with Headway.

A prior is a table of another machine of the same kind, used before anything has been measured here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headway.core.contract.errors import ConfigError
from headway.core.contract.support import Reason
from headway.core.system.files import cache_folder, read_text
from headway.core.system.json_text import JsonError, parse_json
from headway.tuning.table.compare import differences
from headway.tuning.table.schema import CrossoverTable, DeviceIdentity, PriorRecord, SpecRecord, StateSpecRecord, StateTable

T = TypeVar("T", bound=BaseModel)
_SPACE = " \t\n\r"


class TableError(ConfigError):
    """A table file that cannot be used; the message names the line."""


def read_table(path: Path) -> CrossoverTable:
    """Read a table of attention.

    :raises TableError: missing, not JSON, of another schema, or with a value that cannot be.
    """
    return _read(path, CrossoverTable)


def read_state_table(path: Path) -> StateTable:
    """Read a table of layers with a state; see `read_table`."""
    return _read(path, StateTable)


def _read(path: Path, kind: type[T]) -> T:
    schema: str = kind.model_fields["schema_"].default
    what, need = f"table {path}", f"a file of schema {schema}"
    try:
        text = read_text(path)
    except OSError as error:
        raise TableError(what, need, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise TableError(what, need, "a file that is no text") from error
    try:
        data = parse_json(text, str(path), any_number=True)
    except JsonError as error:
        hint = "the file ends too early: a copy that was cut short?" if "EOF" in error.reason.got else ""
        raise TableError(what, need, error.reason.got, hint) from error
    found = data.get("schema") if isinstance(data, dict) else None
    if found != schema:
        raise TableError(what, need, *_other_schema(found, text, schema))
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [str(part) for part in first["loc"]]
        if not place and (named := first["msg"].partition("cells.")[2]):
            place = ["cells", named.split(":")[0].split(" ")[0]]
        more = f"; {error.error_count() - 1} more" if error.error_count() > 1 else ""
        where = f"{'.'.join(place)}: " if place else ""
        raise TableError(what, need, f"line {line_of(text, place)}: {where}{first['msg']}{more}") from error


def _other_schema(found: object, text: str, schema: str) -> tuple[str, str]:
    if not isinstance(found, str):
        return "line 1: no schema", "headway bench crossover writes such files"
    line = f"line {line_of(text, ['schema'])}: schema {found!r}"
    ours, theirs = schema.rpartition("/"), found.rpartition("/")
    newer = theirs[0] == ours[0] and theirs[2].isdigit() and int(theirs[2]) > int(ours[2])
    return line, "written by a newer release: update headway, or measure again" if newer else ""


def line_of(text: str, path: list[str]) -> int:
    """The line (from 1) at which the value at a path of keys and indices begins; that of the nearest parent that exists."""
    position = _skip(text, 0)
    for part in path:
        inside = _child(text, position, part)
        if inside is None:
            break
        position = inside
    return text.count("\n", 0, position) + 1


def _child(text: str, position: int, part: str) -> int | None:
    """Where the value of a key or index begins in the object or array at a position."""
    opening = text[position]
    if opening not in "{[":
        return None
    position = _skip(text, position + 1)
    number = 0
    while text[position] not in "}]":
        key: Any = str(number)
        if opening == "{":
            key, end = scanstring(text, position + 1)
            position = _skip(text, _skip(text, end) + 1)  # past the colon
        if key == part:
            return position
        _, end = json.JSONDecoder().raw_decode(text, position)
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)
        number += 1
    return None


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def table_folder() -> Path:
    """The folder of all tables: crossover/ in Headway's cache folder."""
    return cache_folder() / "crossover"


def table_path(device: DeviceIdentity, spec: SpecRecord) -> Path:
    """The file that `auto` reads for a layer on a device, and that `headway bench crossover` writes unless told otherwise."""
    return table_folder() / file_name(device, f"{spec.num_heads}-{spec.num_kv_heads}-{spec.head_dim}-{spec.dtype}", spec.kind)


def state_table_path(device: DeviceIdentity, spec: StateSpecRecord) -> Path:
    """The file that `auto` reads for a layer with a state: in a folder of its own beside the tables of attention."""
    sizes = f"{spec.recurrence}-{spec.num_heads or spec.conv_channels}-{spec.key_dim}-{spec.value_dim}-{spec.dtype}"
    return table_folder() / "states" / file_name(device, sizes, spec.kind)


def slug(text: str) -> str:
    """A text as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48]


def file_name(device: DeviceIdentity, sizes: str, kind: object) -> str:
    """The name of a file of times on a device, the same wherever `kind` is. sizes: for people who read the name."""
    key = hashlib.sha256(repr((device.name, kind)).encode()).hexdigest()[:8]
    return f"{slug(device.name)}-{sizes}-{key}.json"


def stored_tables() -> list[Path]:
    """All table files, the newest first."""
    return sorted(table_folder().glob("*.json"), key=lambda path: -path.stat().st_mtime)


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
