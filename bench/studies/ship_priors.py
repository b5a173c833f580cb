"""`python -m headway.bench.studies.ship_priors FILES`: convert measured tables to the format that ships with Headway.

The files contain only the fields that a lookup needs, with four digits and one cell per line. The files must then be committed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_bytes
from headway.tuning.table.files import read_table, table_path
from headway.tuning.table.schema import SCHEMA, Cell, CrossoverTable

_DIGITS = 4
_UNSHIPPED = {"variant", "relative_error", "tolerance", "source"}
"""Fields of a cell that lookups do not read."""


def ship(path: Path, folder: Path) -> Path:
    """Write a measured table in the format that ships. Return the path of the new file. path: a complete kernel-level table of
    any kind.
    :raises ConfigError: if the file is not such a table, is incomplete, or was made by modified or unknown sources.
    """
    table = read_table(path, kind=None)
    if table.level != "kernel" or not table.complete:
        raise ConfigError("ship", "a whole table of level kernel", f"{path}: level {table.level}, complete: {table.complete}")
    if table.prior is not None:
        raise ConfigError("ship", "times that were all measured by one run", f"{path}, which has some of a shipped file")
    origin = table.origin
    if origin is None or origin.commit is None or origin.modified:
        hint = "commit first, or name the commit of a copy by HEADWAY_COMMIT"
        raise ConfigError("ship", "a file made by the sources of one commit", f"{path}: {origin}", hint)
    target = folder / table_path(table.device, table.spec).name
    write_bytes(as_text(table).encode(), target)
    return target


def as_text(table: CrossoverTable) -> str:
    """Return a table as JSON with one line per cell, without fields that lookups do not read."""
    lines = [json.dumps(_plain(cell), separators=(",", ":")) for cell in table.cells if cell.status != "unsupported"]
    head = table.model_dump(mode="json", by_alias=True, exclude={"cells"}, exclude_defaults=True)
    head |= {"schema": SCHEMA, "kind": table.kind, "cells": []}
    return re.sub(r'"cells": \[\]', lambda _: '"cells": [\n' + ",\n".join(lines) + "\n]", json.dumps(head, indent=1)) + "\n"


def _plain(cell: Cell) -> dict[str, object]:
    found = cell.model_dump(mode="json", exclude=_UNSHIPPED, exclude_defaults=True)
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in found.items()} | {
        name: value for name in ("layout", "block_size") if (value := getattr(cell, name)) is not None
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def ship_priors(
    files: Annotated[list[Path], typer.Argument(help="Complete kernel-level tables.")],
    folder: Annotated[Path, typer.Option("--to", help="Folder of the package for the tables.")] = Path("tuning/priors"),
) -> None:
    """Write measured tables in the format that ships with Headway."""
    for path in files:
        shipped = ship(path, folder)
        print(f"{shipped}: {shipped.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    run_study(ship_priors)
