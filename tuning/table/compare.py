"""Comparison of a table with a machine, differences between two tables, and merging of tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headway.core.contract.errors import UnsupportedError
from headway.core.contract.support import Reason
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.table.noise import mark_ties, noise_of
from headway.tuning.table.schema import (
    Cell,
    CrossoverTable,
    DeviceIdentity,
    LayerRecord,
    points,
    without_refusals,
)

_AGAIN = "headway bench crossover measures again"
_UNUSED = ("flashinfer-python",)
"""Installed libraries whose versions do not matter, since no built-in backend calls them."""


def differences(
    table: CrossoverTable,
    device: DeviceIdentity,
    spec: LayerRecord | None = None,
    owners: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Reason]:
    """Return every difference that makes a table's times invalid: a different machine, software or layer.

    owners: (distribution, version) of each kernel registered here, from `self_test.owners`. An optional third item is the digest
    of the plugin's files; if it is given, a change of these files is a difference.
    """
    rows = identity_rows(table.device, device)
    for record in table.kernels:
        owner, version, *digest = (owners or {}).get(record.name, (record.owner, record.version))
        if record.available and owner != record.owner:  # a kernel that crashed or was wrong may have been fixed
            rows.append((f"backend {record.name} of", record.owner, owner))
        elif record.available and owner != BUILTIN_OWNER:  # Headway's own version is among the libraries
            rows.append((f"backend {record.name} of {owner}", record.version, version))
            rows += [(f"files of the plugin of {record.name}", record.digest, each) for each in digest]
    if spec is not None and (table.kind, table.spec.key) != (spec.kind, spec.key):
        rows.append((spec.named, table.spec, spec))
    return [Reason(what, str(need or "none"), str(got or "none"), _AGAIN) for what, need, got in rows if need != got]


def identity_rows(was: DeviceIdentity, device: DeviceIdentity) -> list[tuple[str, object, object]]:
    """Return (what, then, now) for each difference between two devices, or between their drivers, libraries and compilers."""
    rows: list[tuple[str, object, object]] = [
        ("device", was.name, device.name),
        ("compute capability", was.compute_capability, device.compute_capability),
        ("driver", was.driver, device.driver),
        ("torch", was.torch, device.torch),
    ]
    libraries = [name for name in {**was.libraries, **device.libraries} if name not in _UNUSED]
    rows += [(name, was.libraries.get(name), device.libraries.get(name)) for name in libraries]
    return [row for row in [*rows, *was.compiler_pairs(device)] if row[1] != row[2]]


def remarks(table: CrossoverTable, device: DeviceIdentity, available: Collection[str]) -> list[str]:
    """Return remarks about a table that do not make it invalid."""
    lines = []
    if table.prior is not None:
        taken = sum(cell.source != "measured" for cell in table.cells)
        lines.append(f"{taken} of {len(table.cells)} cells are those of the {table.prior}")
        lines += [f"that table differs in {line}" for line in table.prior.differs]
    if table.device.threads is not None and table.device.threads != device.threads:  # a GPU's table has none
        lines.append(f"measured with {table.device.threads} CPU threads, torch now uses {device.threads}")
    measured = [record.name for record in table.kernels if record.usable]
    new = [name for name in available if name not in measured]
    if new:
        lines.append(f"not in the table, and so never chosen by auto: {', '.join(new)}")
    gone = [name for name in measured if name not in available]
    if gone:
        lines.append(f"in the table, and not here: {', '.join(gone)}")
    if not table.complete:
        lines.append("not complete: the run was interrupted or its budget ended; headway bench crossover --resume goes on")
    return lines


@dataclass(frozen=True, slots=True)
class Change:
    """A cell that differs between two tables."""

    cell: Cell
    """The cell in the first table, or in the second if only the second has it."""
    before_us: float | None
    after_us: float | None
    status: str
    """Kind of change, such as "ok -> incorrect", "only in the first", "faster" or "slower"."""
    factor: float | None
    """Ratio of the times: after_us / before_us."""


def diff(first: CrossoverTable, second: CrossoverTable, at_least: float) -> list[Change]:
    """Return the cells whose time differs by more than the noise of both tables and `at_least`, or whose status differs."""
    noise = max(at_least, first.noise, second.noise)
    before, after = ({cell.key: cell for cell in table.cells} for table in (first, second))
    changes = []
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            if old is not None:
                changes.append(Change(old, old.median_us, None, "only in the first", None))
            elif new is not None:
                changes.append(Change(new, None, new.median_us, "only in the second", None))
        elif old.median_us is None or new.median_us is None:
            if old.status != new.status:
                changes.append(Change(old, old.median_us, new.median_us, f"{old.status} -> {new.status}", None))
        elif not 1 / (1 + noise) <= new.median_us / old.median_us <= 1 + noise:
            factor = new.median_us / old.median_us
            changes.append(Change(old, old.median_us, new.median_us, "slower" if factor > 1 else "faster", factor))
    return changes


def merge(tables: Sequence[CrossoverTable], names: Sequence[object] = ()) -> CrossoverTable:
    """Merge tables of the same machine and layer into one. If two tables have the same cell, the cell of the table with the later
    date is used.

    Tables with disjoint layouts and block sizes have both measured the cells without a cache (dense prefill). For these cells the
    shorter time is used, because other work on the host only adds time. A refusal applies only to the layouts of the table that
    contains it. The refusal is dropped if a different table has measured that backend at that point.

    names: file names of the tables, in the same order.

    :raises UnsupportedError: if the machine, software, layer or level of a table differs from the newest table.
    """
    named = dict(enumerate(names)) or {number: f"table {number + 1}" for number in range(len(tables))}
    *older, last = sorted(range(len(tables)), key=lambda number: tables[number].date)
    newest = tables[last]
    reasons = []
    for number in older:
        rows = [(row.what, row.got, row.need) for row in differences(tables[number], newest.device, newest.spec)]
        rows += [(what, getattr(newest, what), getattr(tables[number], what)) for what in ("level", "graph_len", "model")]
        reasons += [
            Reason(f"{what} of {named[number]}", f"{need or 'none'} as {named[last]} has", str(got or "none"))
            for what, need, got in rows
            if need != got
        ]
    if reasons:
        raise UnsupportedError("these tables put together", list(dict.fromkeys(reasons)), "keep them as files of their own")
    ordered = [tables[number] for number in (*older, last)]
    cells: dict[tuple[object, ...], Cell] = {}
    places: set[tuple[str | None, int | None]] = set()
    for table in ordered:
        own = {(cell.layout, cell.block_size) for cell in table.cells if cell.layout is not None}
        another_part = bool(own and places) and own.isdisjoint(places)
        for cell in table.cells:
            before = cells.get(cell.key) if another_part else None
            cells[cell.key] = cell if before is None else _better(before, cell)
        places |= own
    backends = {record.name: record for table in ordered for record in table.kernels if record.usable}
    absent = {record.name: record for table in ordered for record in table.kernels if record.name not in backends}
    merged = [marked for rivals in points(list(cells.values())).values() for marked in mark_ties(without_refusals(rivals))]
    return newest.model_copy(
        update={
            "kernels": [*backends.values(), *absent.values()],
            "cells": merged,
            "noise": noise_of(merged),
            "complete": all(table.complete for table in ordered),
            "prior": next((table.prior for table in reversed(ordered) if table.prior is not None), None),
            "command": "headway table merge",
        }
    )


def _better(before: Cell, after: Cell) -> Cell:
    """Return the cell that has a time. If both cells have a time, return the fully timed cell, else the faster cell."""
    timed = [cell for cell in (after, before) if cell.layer_us is not None]
    return min(timed, key=lambda cell: (cell.status == "dropped", cell.layer_us), default=after)


def partly_measured(table: CrossoverTable) -> int:
    """Return the number of points that were measured without some of the usable backends. These backends cannot be chosen at such
    a point."""
    names = {record.name for record in table.kernels if record.usable}
    return sum({cell.kernel for cell in rivals} < names for rivals in points(table.cells).values())
