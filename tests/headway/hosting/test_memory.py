"""What a start does to the memory of its process: the heap is frozen, the number of compiled products is bounded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sandbox import run_python

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
