"""Table files: paths, reading and validation, and the priors shipped with Headway.

A prior is a table measured on a different machine of the same kind. It is used until times have been measured on this machine.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from headway.core.contract.errors import ConfigError
from headway.core.contract.support import Reason
from headway.core.system.files import cache_folder, read_text
from headway.core.system.json_files import Model, write_json
from headway.core.system.json_text import JsonError, parse_json
from headway.tuning.table.compare import differences
from headway.tuning.table.old_formats import OLD_NAMES, old_path, schema_of, upgrade
from headway.tuning.table.schema import RECORDS, SCHEMA, Cell, CrossoverTable, DeviceIdentity, LayerRecord, PriorRecord, slug

log = logging.getLogger("headway")


class TableError(ConfigError):
    """Error for a table file that cannot be used. The message names the line."""


def read_table(path: Path, kind: str | None = "attention") -> CrossoverTable:
    """Read a table; older formats are converted. kind: required kind of operation; None means any.

    :raises TableError: if the file is missing or not JSON, has the wrong schema or kind, or has an invalid value.
    """
    return _read(path, kind)[0]


def _read(path: Path, kind: str | None) -> tuple[CrossoverTable, str]:
    """Return a table and the schema of its file."""
    what, need = f"table {path}", f"a file of schema {SCHEMA}"
    try:
        text = read_text(path)
    except OSError as error:
        raise TableError(what, need, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise TableError(what, need, "a file that is no text") from error
    try:
        written = parse_json(text, str(path), any_number=True)
    except JsonError as error:
        hint = "the file ends too early: a copy that was cut short?" if "EOF" in error.reason.got else ""
        raise TableError(what, need, error.reason.got, hint) from error
    data = upgrade(written) if isinstance(written, dict) else written
    if (found := schema_of(data)) != SCHEMA:
        raise TableError(what, need, *_other_schema(found, text))
    of_kind = data.get("kind", "attention")
    if not isinstance(of_kind, str) or of_kind not in RECORDS:
        raise TableError(what, f"a table of {', '.join(RECORDS)}", f"line {line_of(text, ['kind'])}: kind {of_kind!r}")
    if kind not in (None, of_kind):
        raise TableError(what, f"a table of {kind}", f"one of {of_kind}")
    fields = data | {"spec": _validated(RECORDS[of_kind], data.get("spec"), ["spec"], text, what)}
    names = {} if data is written else OLD_NAMES
    return _validated(CrossoverTable, fields, [], text, what, names), str(schema_of(written))


def _validated(
    kind: type[Model], data: object, at: list[str], text: str, what: str, names: Mapping[str, str] | None = None
) -> Model:
    """Return data validated as a model. at: path of `data` in the text. names: field -> name of the field in the text, if the two
    names differ.

    :raises TableError: if the data is not valid; the message contains the line of the first fault.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [*at, *(str(part) for part in first["loc"])]
        if place == at and (named := first["msg"].partition("cells.")[2]):
            place = ["cells", named.split(":")[0].split(" ")[0]]
        more = f"; {error.error_count() - 1} more" if error.error_count() > 1 else ""
        where = f"{'.'.join(place)}: " if place else ""
        line = line_of(text, [(names or {}).get(part, part) for part in place])
        raise TableError(what, f"a file of schema {SCHEMA}", f"line {line}: {where}{first['msg']}{more}") from error


def _other_schema(found: object, text: str) -> tuple[str, str]:
    if not isinstance(found, str):
        return "line 1: no schema", "headway bench crossover writes such files"
    line = f"line {line_of(text, ['schema'])}: schema {found!r}"
    ours, theirs = SCHEMA.rpartition("/"), found.rpartition("/")
    newer = theirs[0] == ours[0] and theirs[2].isdigit() and int(theirs[2]) > int(ours[2])
    return line, "written by a newer release: update headway, or measure again" if newer else ""


def line_of(text: str, path: list[str]) -> int:
    """Return the line (from 1) at which the value at a path of keys and indices begins. If the value does not exist, return the
    line of its nearest existing parent."""
    try:
        node = yaml.compose(text.replace("\t", " "), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:  # nearly all JSON is YAML: some characters and escapes are not
        return 1
    for part in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        items = node.value if isinstance(node, yaml.SequenceNode) else ()
        inside = {key.value: value for key, value in pairs} | {str(number): value for number, value in enumerate(items)}
        if part not in inside:
            break
        node = inside[part]
    return int(node.start_mark.line) + 1


def table_folder() -> Path:
    """Return the folder of all tables: crossover/ in Headway's cache folder."""
    return cache_folder() / "crossover"


def table_path(device: DeviceIdentity, spec: LayerRecord) -> Path:
    """Return the path of the file that `auto` reads for a layer on a device, and that measurements write by default."""
    return table_folder() / _file_name(device, spec)


def _file_name(device: DeviceIdentity, spec: LayerRecord) -> str:
    key = hashlib.sha256(repr((device.name, spec.kind, spec.key)).encode()).hexdigest()[:8]
    return f"{slug(device.name)}-{slug(spec.kind)}-{spec.sizes}-{key}.json"


def stored_table(device: DeviceIdentity, spec: LayerRecord) -> CrossoverTable | None:
    """Return the table stored for a layer on a device, or None if no table is stored. The table's contents are not compared with
    the layer or the device.

    A table in an older format is rewritten in the current format, and the conversion is logged.

    :raises TableError: if the file is faulty.
    """
    path = table_path(device, spec)
    paths = (path, cache_folder() / old_path(device, spec))
    file = next((each for each in paths if os.path.exists(each)), None)  # a folder that cannot be read counts as empty
    if file is None:
        return None
    table, schema = _read(file, spec.kind)
    if schema != SCHEMA and table.spec == spec:
        with suppress(ConfigError):  # if the file cannot be written, the old one is read again next time
            write_json(table, path)
            log.info("crossover table %s replaces %s, which is of schema %s", path, file, schema)
    return table


def stored_tables(kind: str = "attention") -> list[Path]:
    """Return the table files of a kind of operation, newest first."""
    words = {each: f"-{slug(each)}-" for each in RECORDS}
    kinds = {
        path: next((each for each, word in words.items() if word in path.name), "attention")
        for path in table_folder().glob("*.json")
    }
    return sorted((path for path, found in kinds.items() if found == kind), key=lambda path: -path.stat().st_mtime)


FOLDER_VARIABLE = "HEADWAY_PRIORS"
"""Environment variable: path of a folder whose priors replace the package's priors, such as a folder shared by many machines."""
_DECIDING = ("device", "compute capability", "level", *(record.named for record in RECORDS.values()))
"""Differences that make a prior unusable: a different kind of GPU or a different layer."""


@dataclass(frozen=True)
class Prior:
    """A table shipped with Headway for this kind of device and layer."""

    path: Path
    table: CrossoverTable
    differs: tuple[str, ...]
    """Differences between the machine that measured the prior and this one: driver, torch, libraries, Headway's commit."""

    def unknown(self, available: Collection[str]) -> list[str]:
        """Return the kernels that can run here and that were missing or failed when the prior was measured."""
        known = {record.name for record in self.table.kernels if record.usable}
        return [name for name in available if name not in known]

    def record(self) -> PriorRecord:
        """Return the record of this prior for a table that adopts times from it."""
        table = self.table
        if table.prior is not None:  # a derived table
            return table.prior
        return PriorRecord(device=table.device, origin=table.origin, date=table.date, differs=list(self.differs))

    def unchecked(self) -> CrossoverTable:
        """Return the prior's table unchanged with every time marked as not measured here, for a start that may not measure."""
        cells = [as_adopted(cell) for cell in self.table.cells]
        return self.table.model_copy(update={"cells": cells, "prior": self.record()})


def as_adopted(cell: Cell) -> Cell:
    """Return a prior's cell for the table that adopts it, marked as not measured there."""
    return cell.model_copy(update={"source": "prior"}) if cell.source == "measured" else cell


def prior_folder() -> Path:
    """Return the folder of priors: $HEADWAY_PRIORS, else the package's folder."""
    chosen = os.environ.get(FOLDER_VARIABLE, "").strip()
    return Path(chosen) if chosen else Path(__file__).resolve().parents[1] / "priors"


def prior_path(device: DeviceIdentity, spec: LayerRecord) -> Path:
    """Return the path of the prior for a layer on a device, whether or not it exists."""
    return prior_folder() / _file_name(device, spec)


def find_prior(device: DeviceIdentity, spec: LayerRecord, owners: Mapping[str, tuple[str, ...]]) -> Prior | None:
    """Return the shipped table for a kind of device and a layer, or None if there is no such table. owners: as in `differences`.

    :raises TableError: if the file is faulty, or if its device or layer does not match its name.
    """
    old = old_path(device, spec)
    paths = (prior_path(device, spec), prior_folder() / old.name, prior_folder() / old.parent.name / old.name)
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        return None
    table = read_table(path, spec.kind)
    reasons = differences(table, device, spec, owners)
    if table.level != "kernel":
        reasons.append(Reason("level", table.level, "kernel"))
    wrong = [reason for reason in reasons if reason.what in _DECIDING]
    if wrong:
        raise TableError(f"table {path}", f"{wrong[0].what} {wrong[0].got}", str(wrong[0].need))
    differing = [f"{reason.what}: {reason.need} there, {reason.got} here" for reason in reasons]
    return Prior(path, table, tuple(differing))


def shipped() -> list[Path]:
    """Return all files of priors, sorted by name."""
    return sorted(prior_folder().glob("*.json"))
