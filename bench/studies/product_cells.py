"""The result file of `python -m headway.bench.studies.products`, and the cuts of the kernel that it tries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.kernels.linear.quantized import QuantizedCut
from headway.tuning.table.schema import DeviceIdentity

Change = Callable[[QuantizedCut], QuantizedCut]
THE_RULES = "the rule's"


class ProductCell(BaseModel):
    """One way, or one cut of the kernel, for one shape, form and number of rows. Only an answer that was right has a time."""

    model_config = ConfigDict(extra="forbid")

    shape: str
    """out_features x in_features"""
    form: str
    rows: int
    way: str
    """torch.mm, few_rows, scaled_mm, dequantize, or kernel."""
    cut: str = ""
    """Name of the kernel's cut."""
    us: float | None = None
    """Microseconds of a product, from a CUDA graph of products over weights that are larger together than the L2 cache."""
    reason: str = ""
    """Why there is no time."""


class ProductsReport(ResultFile):
    """One run."""

    schema_: Literal["headway.bench_products/1"] = Field(default="headway.bench_products/1", alias="schema")
    command: str
    origin: Origin
    date: str
    """UTC, ISO 8601."""
    device: DeviceIdentity
    late: int
    """Measurements that there was no time for."""
    cells: list[ProductCell]


def changes(rows: int) -> dict[str, Change]:
    """All that is tried of the rule's cut for so many rows: first whole grids, then one thing at a time."""
    few = rows <= 16
    grid = product((16, 32, 64, 128), (1, 2, 4), (2, 4, 8) if few else (4, 8))
    found: dict[str, Change] = {THE_RULES: lambda cut: cut}
    for block_n, splits, warps in grid:
        words = [f"n{block_n}", *([f"splits x{splits}"] if splits > 1 else []), *([f"{warps} warps"] if warps != 4 else [])]
        found[" ".join(words)] = change(block_n, splits, warps)
    found |= {f"stages {stages}": change(stages=stages) for stages in range(2, 7)}
    found |= {
        "n8": change(8),
        "splits x8": change(splits=8),
        "late": change(early=False),
        "no prefetch": change(prefetch=0),
        "prefetch 8": change(prefetch=8),
        "late no prefetch": change(early=False, prefetch=0),
        "no assembly": change(assembly=False),
    }
    more = (
        {"1 warp": change(warps=1)} if few else {"m32": change(block_m=32), "m128 n128 8 warps": change(128, 1, 8, block_m=128)}
    )
    return found | more


def change(block_n: int | None = None, splits: int = 1, warps: int = 4, **fields: int | bool) -> Change:
    """Return a change of the rule's cut. splits: times as many. warps: slices that lie side by side on them change along."""

    def changed(cut: QuantizedCut) -> QuantizedCut:
        slices = max(1, cut.slices * warps // cut.num_warps) if cut.slices > 1 else 1
        wide = replace(cut, slices=slices, splits=cut.splits * splits, num_warps=warps, **fields)  # type: ignore[arg-type]
        return wide if block_n is None else replace(wide, block_n=block_n)

    return changed
