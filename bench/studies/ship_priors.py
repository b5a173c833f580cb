"""`python -m headway.bench.studies.ship_priors FILES`: measured files as those that ship with Headway.

They hold what a lookup needs, to four digits, a cell a line. A commit then holds them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import read_json, write_bytes
from headway.tuning.measure import experts, products
from headway.tuning.measure.kept import KeptTimes
from headway.tuning.table.files import read_table, table_path
from headway.tuning.table.schema import SCHEMA, Cell, CrossoverTable

_DIGITS = 4
_UNSHIPPED = {"kernel", "relative_error", "tolerance", "prior"}
"""Fields of a cell that no lookup reads."""
_KEPT: dict[str, tuple[str, type[KeptTimes]]] = {
    products.SCHEMA: ("products", products.ProductsFile),
    experts.SCHEMA: ("experts", experts.ExpertsFile),
}
"""Schema of times that a start keeps -> the folder that they ship in, and the kind of file."""


def ship(path: Path, folder: Path) -> Path:
    """Write a measured file as one that ships; returns where it lies.

    path: a whole crossover table of level kernel, or times of products or experts that a start has kept.

    :raises ConfigError: another file, one that was not measured in full, or made by changed or unknown sources.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("ship", "a measured file", f"{path}: {error}") from error
    found = found if isinstance(found, dict) else {}
    schema = str(found.get("schema") or found.get("file_schema"))
    if schema in _KEPT:
        name, kind = _KEPT[schema]
        kept = read_json(path, kind, schema)
        return _write(path, kept, folder / name / path.name, f"{kept.model_dump_json(indent=1)}\n", bool(kept.prior))
    if schema != SCHEMA:
        need = ", ".join([SCHEMA, *_KEPT])
        raise ConfigError("ship", f"a file of schema {need}", f"{path} of schema {schema}")
    table = read_table(path)
    if table.level != "kernel" or not table.complete:
        raise ConfigError("ship", "a whole table of level kernel", f"{path}: level {table.level}, complete: {table.complete}")
    return _write(path, table, folder / table_path(table.device, table.spec).name, as_text(table), table.prior is not None)


def _write(path: Path, model: BaseModel, target: Path, text: str, borrowed: bool) -> Path:
    """:raises ConfigError: the file has times of another shipped one, or nobody knows which sources made it."""
    origin = getattr(model, "origin", None)
    if borrowed:
        raise ConfigError("ship", "times that were all measured by one run", f"{path}, which has some of a shipped file")
    if origin is None or origin.commit is None or origin.modified:
        hint = "commit first, or name the commit of a copy by HEADWAY_COMMIT"
        raise ConfigError("ship", "a file made by the sources of one commit", f"{path}: {origin}", hint)
    write_bytes(text.encode(), target)
    return target


def as_text(table: CrossoverTable) -> str:
    """A table without what no lookup reads, as JSON with a line for each cell."""
    lines = [json.dumps(_plain(cell), separators=(",", ":")) for cell in table.cells if cell.status != "unsupported"]
    head = table.model_dump(mode="json", by_alias=True, exclude={"cells"}, exclude_defaults=True)
    head |= {"schema": SCHEMA, "cells": []}
    return re.sub(r'"cells": \[\]', lambda _: '"cells": [\n' + ",\n".join(lines) + "\n]", json.dumps(head, indent=1)) + "\n"


def _plain(cell: Cell) -> dict[str, object]:
    found = cell.model_dump(mode="json", exclude=_UNSHIPPED, exclude_defaults=True)
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in found.items()} | {
        name: getattr(cell, name) for name in ("layout", "block_size")
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def ship_priors(
    files: Annotated[list[Path], typer.Argument(help="Whole tables of level kernel, and kept times of products or experts.")],
    folder: Annotated[Path, typer.Option("--to", help="The package's folder.")] = Path("tuning/priors"),
) -> None:
    """Write measured files as those that ship with Headway."""
    for path in files:
        shipped = ship(path, folder)
        print(f"{shipped}: {shipped.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    run_study(ship_priors)
