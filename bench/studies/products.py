"""Products over quantised weights on a GPU: every way and cut held to the dequantised weight, timed, and the best of each.

python -m headway.bench.studies.products --shapes 8192x8192,4096x4096 --rows 1,4,16,64,256,2048 --seconds 180 --output FILE

First all cuts are tried in the first shape, for two forms and a few numbers of rows; then the five that were best there in every
shape and form. A time is of one product in a CUDA graph, of as many as have weights larger together than the L2 cache, which is
flushed before: the host is not measured. A variant that raises or is wrong is left out, named, and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from headway.bench.kernel.product_layers import FORMS, ProductLayers, tolerance
from headway.bench.studies.command import run_study
from headway.bench.studies.product_cells import THE_RULES, Change, ProductCell, ProductsReport, changes
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin, command_line
from headway.core.system.terminal import Terminal
from headway.kernels.linear.forms import weight_bytes
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.product_kernels import FewRows
from headway.kernels.linear.quantized import QuantizedCut, QuantizedProducts, quantized_cut
from headway.kernels.linear.quantized_choice import KERNEL
from headway.kernels.linear.quantized_ways import QuantizedWays, changed
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.tuning.measure.device import identify_device, resolve_device
from headway.tuning.measure.graph_replay import captured
from headway.tuning.measure.timing import InterleavedTimer, Timing

SHAPES = "8192x8192,6144x4096,4096x4096,28672x4096,4096x14336"
"""out_features x in_features: of 70B shapes one, and of 8B shapes q, k, v; o; gate and up; down."""
ROWS = "1,4,16,64,256,2048"
GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
Step = Callable[[Tensor, Linear], Tensor]
_BEST = 5
SWEPT = {"int4": "int4", "fp8 rows": "fp8 rows", "fp8 blocks": "fp8 rows", "mxfp4": "int4"}
"""Form -> the one among those whose cuts are all tried."""
SWEPT_ROWS = (1, 16, 64)


@dataclass
class Study:
    """What was found, and what was not."""

    deadline: float
    timer: InterleavedTimer = field(default_factory=lambda: InterleavedTimer(rounds=2, round_ms=2.0))
    cells: list[ProductCell] = field(default_factory=list)
    late: int = 0
    """Measurements that there was no time for."""
    ranked: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """The cuts of a swept form and number of rows, the fastest first."""

    def us(self, layers: ProductLayers, x: Tensor, step: Step, way: str, cut: str = "", rounds: bool = False) -> float | None:
        """Microseconds of a step whose answer is right; None of another, and when time is up. rounds: x to 8 bits."""
        if time.perf_counter() > self.deadline:
            self.late += 1
            return None
        cell = ProductCell(shape=_shape(layers.shape), form=layers.form, rows=len(x), way=way, cut=cut)
        self.cells.append(cell)
        try:
            error = layers.error(step(x, layers.linears[0]), x)
            if error >= tolerance(rounds):
                cell.reason = f"off by {error:.1e}"
                return None

            def all_layers() -> None:
                for linear in layers.linears:
                    step(x, linear)

            graph = captured(all_layers)
            timing = self.timer.time([graph.replay], GPU)[0]
            if not isinstance(timing, Timing):
                raise timing
            cell.us = timing.median_us / len(layers.linears)
        except Exception as raised:
            lines = str(raised).strip().splitlines() or [""]
            cell.reason = f"{type(raised).__name__}: {lines[-1]}"
            if isinstance(raised, torch.AcceleratorError):
                raise ConfigError("products", "a GPU that goes on", str(cell), "run again without this variant") from raised
        return cell.us

    def tried(self, form: str, rows: int) -> dict[str, Change]:
        """The cuts that were best, and the rule's."""
        alike = 1 if rows <= 8 else 16 if rows <= 16 else 64  # of SWEPT_ROWS, the one that is cut likewise
        best = self.ranked.get((SWEPT[form], alike), [])[:_BEST]
        return {name: change for name, change in changes(rows).items() if name in {THE_RULES, *best}}


def kernels_of(layers: ProductLayers, rows: int, tried: Mapping[str, Change]) -> dict[str, QuantizedProducts]:
    """The kernel's launchers by the name of the cut; of equal cuts the first."""
    weight, mps = layers.linears[0].weight, torch.cuda.get_device_properties(GPU).multi_processor_count
    assert not isinstance(weight, Tensor)
    described, found = weight_bytes(weight), dict[QuantizedCut, str]()
    assert described is not None
    for name, change in tried.items():
        found.setdefault(change(quantized_cut(described, rows, layers.shape[0], False, mps)), name)
    return {name: QuantizedProducts(GPU, changed(tried[name])) for name in found.values()}


def time_kernels(study: Study, layers: ProductLayers, tried: Mapping[int, Mapping[str, Change]]) -> dict[int, dict[str, float]]:
    """Number of rows -> cut -> microseconds, all compiled first. tried: number of rows -> cuts."""
    kernels = {rows: kernels_of(layers, rows, cuts) for rows, cuts in tried.items()}
    inputs = {rows: torch.randn(rows, layers.shape[1], device=GPU, dtype=BF16) for rows in tried}
    ahead = compile_ahead(GPU)
    if ahead is not None and time.perf_counter() < study.deadline:
        with ahead():
            for rows, named in kernels.items():
                for products in named.values():
                    products(inputs[rows], layers.linears[0])
    found: dict[int, dict[str, float]] = {}
    for rows, named in kernels.items():
        times = {name: study.us(layers, inputs[rows], products, KERNEL, name) for name, products in named.items()}
        found[rows] = dict(sorted(((name, us) for name, us in times.items() if us is not None), key=lambda item: item[1]))
    return found


def sweep(study: Study, shape: tuple[int, int], form: str, rows: list[int]) -> Iterator[list[str]]:
    """Try all cuts of a form, remember their order, and tell the best."""
    layers = ProductLayers.drawn(shape, form, GPU)
    for count, times in time_kernels(study, layers, {count: changes(count) for count in rows}).items():
        study.ranked[form, count] = list(times)
        best = [f"{name} {us:.1f}" for name, us in list(times.items())[:_BEST]]
        told = [f"{THE_RULES} {times[THE_RULES]:.1f}"] if THE_RULES in times else []
        yield [f"{form}, {count} rows, {len(times)} cuts: {', '.join(best + told)}"]


def measure_form(study: Study, form: str, shape: tuple[int, int], rows: list[int]) -> Iterator[list[str]]:
    """Lines of a table for one form: the kernel's best, and the other ways."""
    layers, ways = ProductLayers.drawn(shape, form, GPU), QuantizedWays(GPU)
    kernel = time_kernels(study, layers, {count: study.tried(form, count) for count in rows})
    yield [
        f"{form} (floor {layers.num_bytes / 4.19e6:.1f})",
        *(_cell(min(kernel[count].values(), default=None)) for count in rows),
    ]
    yield ["  the rule's cut", *(_cell(kernel[count].get(THE_RULES)) for count in rows)]
    kind = ways.kind(layers.linears[0], BF16)
    assert kind is not None
    for way in (way for name, way in ways.ways.items() if name in kind.ways and not name.startswith(KERNEL)):
        with suppress(Exception):  # the first step meets it again, and names it
            for linear in layers.linears:
                way.prepare(linear)
        able = [way.most_rows is None or count <= way.most_rows for count in rows]
        inputs = [torch.randn(count, shape[1], device=GPU, dtype=BF16) for count in rows]
        times = [
            study.us(layers, x, way, way.name, rounds=way.rounds) if may else None for x, may in zip(inputs, able, strict=True)
        ]
        yield [f"  {way.name}", *map(_cell, times)]
        for linear in layers.linears:
            way.release(linear)
    yield from ([f"  {name}: {why.brief}"[:160]] for name, why in kind.refused.items())


def measure_dense(study: Study, shape: tuple[int, int], rows: list[int]) -> Iterator[list[str]]:
    """Lines for the weight in bfloat16."""
    layers, few_rows, mm, ours = ProductLayers.drawn(shape, "bf16", GPU), FewRows(GPU), [], []
    for count in rows:
        x = torch.randn(count, shape[1], device=GPU, dtype=BF16)
        mm.append(_cell(study.us(layers, x, lambda x, linear: linear(x), "torch.mm")))
        takes = few_rows.takes(x, layers.linears[0])
        ours.append(_cell(study.us(layers, x, few_rows, "few_rows") if takes else None))
    yield [f"bf16 torch.mm (floor {layers.num_bytes / 4.19e6:.1f})", *mm]
    yield ["  few_rows", *ours]


def tables(study: Study, sizes: list[tuple[int, int]], forms: list[str], rows: list[int]) -> Iterator[list[str]]:
    """All lines, as they are found."""
    swept = [count for count in SWEPT_ROWS if count <= max(rows)]
    for form in dict.fromkeys(SWEPT[form] for form in forms):
        yield from sweep(study, sizes[0], form, swept)
    for shape in sizes:
        yield [_shape(shape), *map(str, rows)]
        yield from measure_dense(study, shape, rows)
        for form in forms:
            yield from measure_form(study, form, shape, rows)


def main(
    shapes: Annotated[str, typer.Option(help="OUTxIN, several with commas; in the first all cuts are tried.")] = SHAPES,
    rows: Annotated[str, typer.Option(help="Rows of x, several with commas.")] = ROWS,
    forms: Annotated[str, typer.Option(help=", ".join(FORMS))] = ",".join(FORMS),
    seconds: Annotated[float, typer.Option(help="After so long nothing more is begun.")] = 180.0,
    output: Annotated[Path | None, typer.Option(help="JSON file for all cells.")] = None,
) -> None:
    """Print a table for each shape, and what was left out."""
    if resolve_device(None).type != "cuda":
        raise typer.BadParameter("needs a CUDA GPU, got none")
    sizes = [(int(out), int(inner)) for out, _, inner in (shape.partition("x") for shape in shapes.split(","))]
    counts, study, terminal = [int(count) for count in rows.split(",")], Study(time.perf_counter() + seconds), Terminal(width=80)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    who, began = identify_device(GPU), datetime.now(UTC).isoformat(timespec="seconds")
    terminal.print(f"{who.name}, torch {who.torch}: us", highlight=False)
    try:
        with torch.inference_mode():
            for line in tables(study, sizes, forms.split(","), counts):
                terminal.print(_line(line), highlight=False)
    finally:
        if output is not None:
            command = command_line("python", "-m", "headway.bench.studies.products")
            report = ProductsReport(
                command=command, origin=Origin.here(), date=began, device=who, late=study.late, cells=study.cells
            )
            write_json(report, output)
    out = [cell for cell in study.cells if cell.reason]
    terminal.print(f"left out: {len(out)}; no time for {study.late}", highlight=False)
    for cell in out:
        told = f"  {cell.form} {cell.shape} {cell.rows} rows, {cell.way} {cell.cut}: {cell.reason}"
        terminal.print(told[:160], highlight=False, markup=False)


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _cell(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def _line(cells: list[str]) -> str:
    return f"  {cells[0]}" if len(cells) == 1 else f"{cells[0]:<32}" + "".join(f"{cell:>8}" for cell in cells[1:])


if __name__ == "__main__":
    run_study(main)
