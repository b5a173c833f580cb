"""`python -m headway.bench.studies.ship_priors FILES`: convert measured tables to the format that ships with Headway.

The files contain only the fields that a lookup needs, with four digits and one cell per line. The files must then be committed.
With `--measure 16/8/128,32/8/64`, the tables of these geometries are measured first, on a GPU, and stored under the names FILES.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_bytes
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.registry import create_registry
from headway.tuning.measure.kinds import measured_kind
from headway.tuning.measure.run import BLOCK_SIZES, CrossoverOptions, run_kernel_level
from headway.tuning.measure.timing import InterleavedTimer
from headway.tuning.measure.workloads import Geometry, make_spec
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


_LAYOUT, _BACKENDS = "nhd", ("triton", "hopper", "hopper_decode")
"""Layout and backends of a GPU's shipped tables: the layout that `auto` prefers, and backends that are fastest at some point."""


def _options(geometry: str, output: Path) -> CrossoverOptions:
    device = torch.device("cuda", 0)
    return CrossoverOptions(
        spec=make_spec(Geometry.parse(geometry), torch.bfloat16, None, device),
        backends=_BACKENDS,
        layouts=(_LAYOUT,),
        timer=InterleavedTimer(rounds=3, round_ms=2.0, host_seconds=0.01, long_ms=10.0),
        output=output,
        command=f"ship_priors --measure {geometry}",
        compile_ahead=compile_ahead(device),
    )


def compile_points(geometry: str) -> None:
    """Compile the kernels for all points of a geometry, into the caches on disk."""
    options, registry = _options(geometry, Path()), create_registry()
    measured, ahead = measured_kind(registry, options.spec), options.compile_ahead
    assert ahead is not None
    with torch.no_grad(), ahead():
        measured.compile(measured.grid, _BACKENDS, measured.pairs((_LAYOUT,), BLOCK_SIZES), {})


def measure(geometries: list[str], files: list[Path]) -> None:
    """Measure the tables of geometries on one GPU. All kernels are compiled by as many processes before the first is timed."""
    context = multiprocessing.get_context("spawn")
    compiling = [context.Process(target=compile_points, args=(geometry,)) for geometry in geometries]
    for process in compiling:
        process.start()
    for process in compiling:
        process.join()
    for geometry, path in zip(geometries, files, strict=True):
        table = run_kernel_level(_options(geometry, path), create_registry())
        print(f"{path}: {len(table.cells)} cells, noise {table.noise:.1%}", file=sys.stderr, flush=True)


def ship_priors(
    files: Annotated[list[Path], typer.Argument(help="Complete kernel-level tables.")],
    folder: Annotated[Path, typer.Option("--to", help="Folder of the package for the tables.")] = Path("tuning/priors"),
    geometries: Annotated[str | None, typer.Option("--measure", help="Geometries to measure first, one for each file.")] = None,
) -> None:
    """Write measured tables in the format that ships with Headway."""
    if geometries is not None:
        measure(geometries.split(","), files)
    for path in files:
        shipped = ship(path, folder)
        print(f"{shipped}: {shipped.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    run_study(ship_priors)
