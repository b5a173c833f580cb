"""Memory of a process: the heap is frozen, compiled products are bounded, and long mixed work gives back all that it took."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import soak
from headway.core.system.child import module_path
from sandbox import run_python, save_tiny_model

GROWTH = """
import psutil, random, sys, torch
from headway.machine.process import bound_kernel_caches
from headway.kernels.linear.linear import Linear

if sys.argv[1] == "bounded":
    bound_kernel_caches()
layers = [Linear(torch.randn(out, 64)) for out in (64, 192, 256, 320)]
rows, held = list(range(1, 513)), []
random.Random(0).shuffle(rows)
for number, count in enumerate(rows):
    if number % 128 == 0:
        held.append(psutil.Process().memory_info().rss)
    for layer in layers:
        layer(torch.ones(count, 64))
held.append(psutil.Process().memory_info().rss)
print(*(each // 2**20 for each in held))
"""

CYCLE = """
import gc, weakref
from headway.machine.process import freeze_heap

class Node: pass

node = Node()
node.itself, left = node, weakref.ref(node)
freeze_heap()
del node
gc.collect()
held = left() is not None
freeze_heap()
print(gc.get_freeze_count() > 1000, held, left() is None)
"""


def test_a_cycle_of_an_earlier_start_is_freed_by_the_next(tmp_path: Path) -> None:
    assert run_python("-c", CYCLE, cwd=tmp_path).out.split() == ["True"] * 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is counted otherwise elsewhere")
def test_products_of_any_number_of_rows_take_bounded_memory(tmp_path: Path) -> None:
    """256 of 2,048 products are kept: memory does not grow after the first 512."""
    grown = {}
    for kind in ("bounded", "unbounded"):
        result = run_python("-c", GROWTH, kind, cwd=tmp_path)
        assert result.code == 0, result
        held = [int(each) for each in result.out.split()]
        grown[kind] = held[-1] - held[1]
        print(kind, held)
    assert grown["bounded"] < 40
    if grown["unbounded"] < 40:
        pytest.skip(f"products are compiled for no number of rows here: {grown['unbounded']} MiB for 1,536 of them")
    assert grown["unbounded"] > 3 * grown["bounded"]


SETTLED = 300
"""Seconds after which memory may not grow, in the long form."""

MOST_GROWTH = 600
"""MiB above what Python and its libraries hold, in the short form. The long form stays 430 above them, and up to 550 for a moment
after a reload; it passed 600 with its third engine before freed memory was given back. Pages of files are left out: of the same
libraries 230 to 400 MiB are mapped, as the system likes."""


def levels(samples: list[dict[str, float]], width: float) -> list[tuple[float, float, float, float]]:
    """For each `width` seconds: when they begin, and the median of the resident, proportional and anonymous memory, in MiB."""
    slots: dict[int, list[dict[str, float]]] = {}
    for sample in samples:
        slots.setdefault(int(sample["seconds"] // width), []).append(sample)
    names = "rss", "pss", "anonymous"
    return [
        (number * width, *(statistics.median(each[name] for each in slot) for name in names)) for number, slot in slots.items()
    ]


@pytest.mark.slow
@pytest.mark.soak
def test_mixed_work_with_faults_aborts_and_reloads_keeps_its_memory(tmp_path: Path) -> None:
    """HEADWAY_SOAK_SECONDS=1800 is the long form, and HEADWAY_SOAK_OUTPUT names a folder for its samples as JSON and CSV.

    No request is lost and every block comes back, or the process ends with an error.
    """
    seconds = float(os.environ.get("HEADWAY_SOAK_SECONDS", "50"))
    long = seconds >= 2 * SETTLED
    folder = Path(os.environ.get("HEADWAY_SOAK_OUTPUT", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    out, model = folder / "soak.json", save_tiny_model(tmp_path / "model", chat=True)
    command = [sys.executable, soak.__file__, str(model), str(out), str(seconds), str(180 if long else seconds / 3)]
    path = {"PYTHONPATH": module_path(), "HEADWAY_AUTOTUNE_BUDGET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, timeout=seconds * 2 + 300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    print(", ".join(f"{count} {what}" for what, count in sorted(found["counts"].items())))
    table = levels(found["samples"], 60 if long else 5)
    lines = [",".join(map(str, row)) for row in (("seconds", "rss_mib", "pss_mib", "anonymous_mib"), *table)]
    (folder / "soak.csv").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    for kind in ("preemptions", "steps with guesses", "failed for its own parameters", "stream, closed"):
        assert found["counts"].get(kind), f"the soak met no {kind}"
    assert found["counts"]["engines"] >= 2
    if long:
        settled = [row[1] for row in table if row[0] >= SETTLED]
        assert max(settled) <= settled[0] * 1.02, settled
        assert found["counts"]["steps that failed"]
    else:
        grown = max(row[3] for row in table) - found["samples"][0]["anonymous"]
        assert grown < MOST_GROWTH, grown
