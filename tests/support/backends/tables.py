"""Crossover tables made up for tests, and a quick real one."""

from __future__ import annotations

import torch

from headway.core.contract.spec import AttentionSpec
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.points import Point
from headway.tuning.measure.run import CrossoverOptions
from headway.tuning.measure.timing import InterleavedTimer
from headway.tuning.table.schema import Cell, CrossoverTable, DeviceIdentity, KernelRecord, SpecRecord

SPEC = AttentionSpec(4, 2, 32, 32**-0.5)
QUICK = InterleavedTimer(rounds=1, round_ms=0.0, min_runs=3)
POINTS = [
    *(Point("decode", batch, 1, kv_len, level) for batch, kv_len, level in ((1, 8, 0), (4, 40, 0), (2, 20, 1))),
    *(Point("prefill", batch, n, n, level) for batch, n, level in ((1, 9, 0), (3, 17, 1))),
    Point("extend", 1, 7, 20),
    Point("verify", 2, 4, 21),
]


def a_cell(us: float | None = 10.0, **changes: object) -> Cell:
    """A decode cell of backend "a"; with us None it has no time."""
    found: dict[str, object] = {"phase": "decode", "case": "1q1s64", "batch": 1, "query_len": 1, "kv_len": 64, "kernel": "a"}
    found |= {"layout": "nhd", "block_size": 16, "status": "ok"}
    if us is not None:
        found |= {"median_us": us, "p20_us": 0.99 * us, "p80_us": 1.01 * us, "plan_us": 1.0}
    else:
        found |= {"status": "error", "reason": "it fell over"}
    return Cell.model_validate(found | changes)


def a_device(**changes: object) -> DeviceIdentity:
    """This machine with what a test changes."""
    return identify_device(torch.device("cpu")).model_copy(update=changes)


def a_table(*cells: Cell, **changes: object) -> CrossoverTable:
    """A table of these cells; without any, of two backends that cross between two lengths."""
    cells = cells or tuple(
        a_cell(us, kernel=name, case=f"1q1s{kv_len}", kv_len=kv_len)
        for kv_len, times in ((64, (10.0, 30.0)), (4096, (200.0, 100.0)))
        for name, us in zip("ab", times, strict=True)
    )
    names = dict.fromkeys(cell.kernel for cell in cells)
    found: dict[str, object] = {
        "level": "kernel",
        "date": "2026-11-21T10:00:00+00:00",
        "command": "headway bench crossover",
        "complete": True,
        "device": a_device(),
        "spec": SpecRecord.of(SPEC),
        "noise": 0.02,
        "kernels": [KernelRecord(name=name, owner="built-in", available=True) for name in names],
        "cells": list(cells),
    }
    return CrossoverTable(**(found | changes))


def quick(**changes: object) -> CrossoverOptions:
    """A run of seconds on a CPU."""
    found: dict[str, object] = {
        "spec": SPEC,
        "layouts": ["nhd"],
        "block_sizes": [16],
        "grid": POINTS,
        "timer": QUICK,
        "refine": 0,
    }
    return CrossoverOptions(**(found | changes))


def a_page_table() -> CrossoverTable:
    """Table for the tests' tiny model: sdpa.math is faster for short sequences, sdpa for long ones."""
    spec = AttentionSpec(4, 2, 8, 8**-0.5)
    times = {16: {"sdpa": 30.0, "sdpa.math": 10.0}, 256: {"sdpa": 100.0, "sdpa.math": 200.0}}
    cells = []
    for length, found in times.items():
        for name, us in found.items():
            for phase, new in (("decode", 1), ("prefill", length), ("extend", length // 2)):
                for batch in (1, 4):
                    lengths = {"phase": phase, "batch": batch, "query_len": new, "kv_len": length, "kernel": name}
                    cells.append(a_cell(us * batch, case=f"{batch}q{new}s{length}", **lengths))
    return a_table(*cells, spec=SpecRecord.of(spec))
