"""Products over quantised weights on a GPU: every way and cut held to the dequantised weight, timed, and the best of each.

python -m headway.bench.studies.products --shapes 8192x8192,4096x4096 --rows 1,4,16,64,256,2048 --seconds 180

The first shape is swept; the others try the rule's cut and the variant that was best there. A time is of the call alone, the L2
cache flushed before it. A variant that raises or is wrong is left out, named, and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor

from headway.backends.compile_ahead import compile_ahead
from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal
from headway.models.fused.products import FewRows
from headway.models.fused.quantized import QuantizedCut, QuantizedProducts, WeightBytes, quantized_cut
from headway.models.fused.quantized_choice import DEQUANTIZED, SCALED
from headway.models.fused.quantized_ways import QuantizedWays
from headway.models.linear import Linear
from headway.models.quantization.forms import MX_GROUP, Float4Weight, Float8Weight, Int4Weight, QuantizedWeight, num_bytes
from headway.tuning.measure.device import identify_device, resolve_device
from headway.tuning.measure.timing import Timer

SHAPES = "8192x8192,6144x4096,4096x4096,28672x4096,4096x14336"
"""out_features x in_features: of 70B shapes one, and of 8B shapes q, k, v; o; gate and up; down."""
ROWS = "1,4,16,64,256,2048"
GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
Change = Callable[[QuantizedCut], QuantizedCut]
_EXACT, _ROUNDED = 1e-2, 8e-2
"""Error of a right answer relative to its norm: of x in bfloat16, and of x in floats of 8 bits."""

FEW: dict[str, Change] = {
    "the rule's": lambda cut: cut,
    "n16": lambda cut: replace(cut, block_n=16),
    "n64": lambda cut: replace(cut, block_n=64),
    "splits x2": lambda cut: replace(cut, splits=2 * cut.splits),
    "splits x4": lambda cut: replace(cut, splits=4 * cut.splits),
    "n64 splits x2": lambda cut: replace(cut, block_n=64, splits=2 * cut.splits),
    "stages +2": lambda cut: replace(cut, stages=cut.stages + 2),
    "stages -1": lambda cut: replace(cut, stages=max(2, cut.stages - 1)),
    "8 warps": lambda cut: replace(cut, slices=2 * cut.slices, num_warps=8),
    "2 warps": lambda cut: replace(cut, slices=max(1, cut.slices // 2), num_warps=2, stages=cut.stages + 1),
    "late": lambda cut: replace(cut, early=False),
    "no assembly": lambda cut: replace(cut, assembly=False),
}
"""Cuts that are tried, of up to 16 rows."""
MORE: dict[str, Change] = {
    "the rule's": lambda cut: cut,
    "n128": lambda cut: replace(cut, block_n=128),
    "n128 8 warps": lambda cut: replace(cut, block_n=128, num_warps=8),
    "m32": lambda cut: replace(cut, block_m=32),
    "m128 8 warps": lambda cut: replace(cut, block_m=128, block_n=128, num_warps=8),
    "splits x2": lambda cut: replace(cut, splits=2 * cut.splits),
    "stages +2": lambda cut: replace(cut, stages=cut.stages + 2),
    "no assembly": lambda cut: replace(cut, assembly=False),
}
"""Likewise, of more."""


def float8(rows: int, columns: int, block: tuple[int, int]) -> Float8Weight:
    """A random weight."""
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), device=GPU) + 0.5
    return Float8Weight(torch.randn(rows, columns, device=GPU).to(torch.float8_e4m3fn), scales, block)


def int4(rows: int, columns: int) -> Int4Weight:
    """A random weight in groups of 128."""
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=GPU)
    return Int4Weight(packed, (torch.rand(rows, columns // 128, device=GPU) + 0.5).half(), None, 128)


def mxfp4(rows: int, columns: int) -> Float4Weight:
    """A random weight."""
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=GPU)
    return Float4Weight(packed, torch.randint(120, 132, (rows, columns // MX_GROUP), dtype=torch.uint8, device=GPU))


FORMS: Mapping[str, Callable[[int, int], QuantizedWeight]] = {
    "int4": int4,
    "fp8 blocks": partial(float8, block=(128, 128)),
    "fp8 rows": lambda rows, columns: float8(rows, columns, (1, columns)),
    "mxfp4": mxfp4,
}


@dataclass
class Study:
    """What was found, and what was not."""

    deadline: float
    timer: Timer = field(default_factory=lambda: Timer(warmup_ms=2.0, rep_ms=12.0))
    left_out: list[str] = field(default_factory=list)
    late: int = 0
    """Measurements that there was no time for."""
    best: dict[tuple[str, int], str] = field(default_factory=dict)
    """The best variant of a form and a number of rows in the first shape."""

    def us(self, name: str, call: Callable[[], Tensor], expected: Tensor, tolerance: float) -> float | None:
        """Microseconds of a call whose answer is right; None of another, and when time is up."""
        if time.perf_counter() > self.deadline:
            self.late += 1
            return None
        try:
            answer = call().float()
            torch.cuda.synchronize()
            error = float((answer - expected).norm() / expected.norm())
            if error < tolerance:
                return self.timer.time(call, GPU).median_us
            self.left_out.append(f"{name}: off by {error:.1e}")
        except Exception as raised:
            lines = str(raised).strip().splitlines() or [""]
            self.left_out.append(f"{name}: {type(raised).__name__}: {lines[-1]}")
            if isinstance(raised, torch.AcceleratorError):
                raise ConfigError(
                    "products", "a GPU that goes on", self.left_out[-1], "run again without this variant"
                ) from raised
        return None


def variants(study: Study, form: str, rows: int, swept: bool) -> dict[str, Change]:
    """What is tried of a form at so many rows."""
    every = FEW if rows <= 16 else MORE
    if swept:
        return every
    names = {"the rule's", study.best.get((form, rows), "the rule's")}
    return {name: every[name] for name in every if name in names}


def products_of(changes: Mapping[str, Change]) -> dict[str, QuantizedProducts]:
    """The kernel's launchers by variant."""

    def cut(change: Change, weight: WeightBytes, rows: int, features: int, gated: bool, multiprocessors: int) -> QuantizedCut:
        return change(quantized_cut(weight, rows, features, gated, multiprocessors))

    return {name: QuantizedProducts(GPU, partial(cut, change)) for name, change in changes.items()}


def measure_form(study: Study, form: str, shape: tuple[int, int], rows: list[int], swept: bool) -> Iterator[list[str]]:
    """Lines of a table for one form: the kernel's best, and the other ways."""
    weight = FORMS[form](*shape)
    linear, dense = Linear(weight, dtype=BF16), weight.dequantized(torch.float32)
    inputs = {count: torch.randn(count, shape[1], device=GPU, dtype=BF16) for count in rows}
    kernels = {count: products_of(variants(study, form, count, swept)) for count in rows}
    ahead = compile_ahead(GPU)
    if ahead is not None and time.perf_counter() < study.deadline:
        with ahead():
            for count in rows:
                for products in kernels[count].values():
                    products(inputs[count], linear)
    ways, found, cuts = QuantizedWays(GPU), {name: ["-"] * len(rows) for name in ("kernel", SCALED, DEQUANTIZED)}, []
    for place, count in enumerate(rows):
        x, expected = inputs[count], inputs[count].float() @ dense.t()
        what = f"{form} {shape[0]}x{shape[1]} {count} rows"
        times = {
            name: study.us(f"{what}, {name}", partial(products, x, linear), expected, _EXACT)
            for name, products in kernels[count].items()
        }
        right = {name: us for name, us in times.items() if us is not None}
        if right:
            best = min(right, key=lambda name: right[name])
            found["kernel"][place] = f"{right[best]:.1f}"
            if swept:
                study.best[form, count] = best
            ranked = sorted(right, key=lambda name: right[name])
            cuts.append(f"{count} rows: " + ", ".join(f"{name} {right[name]:.1f}" for name in ranked))
        for way, tolerance in ((SCALED, _ROUNDED), (DEQUANTIZED, _EXACT)):
            if way in ways.able(x, linear):
                us = study.us(f"{what}, {way}", partial(ways.product, x, linear, way=way), expected, tolerance)
                found[way][place] = "-" if us is None else f"{us:.1f}"
    floor = num_bytes(weight) / 4.19e6
    yield [f"{form} (floor {floor:.1f})", *found["kernel"]]
    yield from ([f"  {way}", *found[way]] for way in (SCALED, DEQUANTIZED) if any(cell != "-" for cell in found[way]))
    yield from ([cut] for cut in cuts)


def measure_dense(study: Study, shape: tuple[int, int], rows: list[int]) -> Iterator[list[str]]:
    """Lines for the weight in bfloat16."""
    weight = torch.randn(*shape, device=GPU, dtype=BF16)
    linear, few_rows, mm, ours = Linear(weight), FewRows(GPU), [], []
    for count in rows:
        x = torch.randn(count, shape[1], device=GPU, dtype=BF16)
        expected = x.float() @ weight.float().t()
        what = f"bf16 {shape[0]}x{shape[1]} {count} rows"
        us = study.us(f"{what}, torch.mm", partial(linear, x), expected, _EXACT)
        mm.append("-" if us is None else f"{us:.1f}")
        us = study.us(f"{what}, few_rows", partial(few_rows, x, linear), expected, _EXACT) if few_rows.takes(x, linear) else None
        ours.append("-" if us is None else f"{us:.1f}")
    yield [f"bf16 torch.mm (floor {weight.nbytes / 4.19e6:.1f})", *mm]
    yield ["bf16 few_rows", *ours]


def main(
    shapes: Annotated[str, typer.Option(help="OUTxIN, several with commas; the first is swept.")] = SHAPES,
    rows: Annotated[str, typer.Option(help="Rows of x, several with commas.")] = ROWS,
    forms: Annotated[str, typer.Option(help=", ".join(FORMS))] = ",".join(FORMS),
    seconds: Annotated[float, typer.Option(help="After so long nothing more is begun.")] = 180.0,
) -> None:
    """Print a table for each shape, and what was left out."""
    if resolve_device(None).type != "cuda":
        raise typer.BadParameter("needs a CUDA GPU, got none")
    sizes = [(int(out), int(inner)) for out, _, inner in (shape.partition("x") for shape in shapes.split(","))]
    counts, study, terminal = [int(count) for count in rows.split(",")], Study(time.perf_counter() + seconds), Terminal(width=80)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    who = identify_device(GPU)
    terminal.print(f"{who.name}, torch {who.torch}: us", highlight=False)
    with torch.inference_mode():
        for place, shape in enumerate(sizes):
            terminal.print(_line([f"{shape[0]} x {shape[1]}", *map(str, counts)]), highlight=False)
            for line in measure_dense(study, shape, counts):
                terminal.print(_line(line), highlight=False)
            for form in forms.split(","):
                for line in measure_form(study, form, shape, counts, swept=not place):
                    terminal.print(_line(line), highlight=False)
    terminal.print(f"left out: {len(study.left_out)}; no time for {study.late}", highlight=False)
    for name in study.left_out:
        terminal.print(f"  {name}"[:200], highlight=False)


def _line(cells: list[str]) -> str:
    return f"  {cells[0]}" if len(cells) == 1 else f"{cells[0]:<32}" + "".join(f"{cell:>8}" for cell in cells[1:])


if __name__ == "__main__":
    run_study(main)
