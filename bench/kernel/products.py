"""`headway bench kernel --linear`: every linear kernel, checked and then timed, and the table of results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from headway.bench.kernel.linear_kernels import (
    PLAIN_FORMS,
    LinearCandidates,
    ProductLayers,
    TimedProduct,
    candidates_of,
    tolerance,
)
from headway.bench.kernel.results import DevicePeak, peak_of
from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.system.json_files import ResultFile, write_json
from headway.core.system.provenance import Origin
from headway.core.system.terminal import progress_bar
from headway.tuning.measure.contender import Contender, Status, captured, failed, measure
from headway.tuning.measure.device import crowding, default_device, describe_device
from headway.tuning.measure.timing import Timer, on_device
from headway.tuning.table.schema import DeviceInfo

PLAIN = "plain"
_FORM_OF = {"int4": "int4", "fp8": "fp8 rows", "fp8-blocks": "fp8 blocks", "mxfp4": "mxfp4", PLAIN: PLAIN}
FORM_NAMES = tuple(_FORM_OF)
"""Names of weight formats: int4 in groups of 128, fp8 with one scale per row, fp8 in blocks of 128 x 128, mxfp4, and plain
weights in the element type of x."""
_MULTIPLES = {"int4": 128, "mxfp4": 32}
"""Format -> number of which in_features must be a multiple."""


@dataclass(frozen=True)
class ProductOptions:
    """Options of `headway bench kernel --linear`."""

    shapes: Sequence[tuple[int, int]]
    """(out_features, in_features) of each layer."""
    forms: Sequence[str] = FORM_NAMES
    rows: Sequence[int] = (1, 4, 16, 64)
    """Numbers of rows of x to time."""
    dtype: torch.dtype | None = None
    """Element type of x. None means bfloat16 on a GPU, float32 on a CPU."""
    device: torch.device = field(default_factory=default_device)
    timer: Timer = field(default_factory=Timer)
    seed: int = 0
    peak_gbps: float | None = None
    peak_tflops: float | None = None
    """This and `peak_gbps`: see `KernelOptions`."""
    output: Path | None = None
    """Result file, rewritten after each shape and format."""
    command: str = ""

    def __post_init__(self) -> None:
        for form in self.forms:
            if form not in FORM_NAMES:
                raise ConfigError("--form", " or ".join(FORM_NAMES), repr(form))
            for out_features, in_features in self.shapes:
                if in_features % (multiple := _MULTIPLES.get(form, 1)):
                    need = f"in_features, the second number, a multiple of {multiple} for {form}"
                    raise ConfigError("--linear", need, f"{out_features}x{in_features}")


class ProductTime(BaseModel):
    """Result of one kernel for one shape, format and number of rows. Only correct kernels have a time."""

    model_config = ConfigDict(extra="forbid")

    shape: str
    """Shape of the weight as OUTxIN."""
    form: str
    rows: int
    way: str
    """Name of the kernel."""
    chosen: bool
    """True if an engine chooses this kernel for this number of rows."""
    status: Status
    reason: str = ""
    median_us: float | None = None
    """Microseconds per GEMM. Weights are read in rotation and together exceed the device's cache."""
    p20_us: float | None = None
    p80_us: float | None = None
    floor_us: float
    """Larger of two lower bounds, in microseconds: the bytes at the memory's rate, and the operations at the rate for x's element
    type."""
    bound: Literal["bytes", "operations"]
    """The larger of the two lower bounds."""
    relative_error: float | None = None
    """||y - x W^T|| / ||x W^T|| with the dequantized weight in float32."""
    tolerance: float | None = None


class ProductsBench(ResultFile):
    """Result of one run of `headway bench kernel --linear`."""

    schema_: Literal["headway.kernel_products/1"] = Field(default="headway.kernel_products/1", alias="schema")
    command: str
    origin: Origin
    busy: str = ""
    date: str
    """Start of the run: UTC, ISO 8601."""
    warmup_ms: float
    rep_ms: float
    seed: int
    device: DeviceInfo
    dtype: str
    """Element type of x."""
    peak: DevicePeak
    choices: dict[str, str] = Field(default_factory=dict)
    """Shape and format -> source of the engine's choice."""
    cells: list[ProductTime]

    @property
    def rates(self) -> tuple[float, float]:
        """GB/s and TFLOP/s of the lower bounds: the device's peak rates, or the measured rate if a peak is unknown."""
        return self.peak.gbps or self.device.copy_gbps, self.peak.tflops or self.device.matrix_tflops


def run_products_bench(options: ProductOptions, console: Console | None = None) -> ProductsBench:
    """Time all kernels for all layers. Failures are recorded in the report. console: shows the progress bar."""
    dtype = options.dtype or (torch.float32 if options.device.type == "cpu" else torch.bfloat16)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    works = [(shape, form) for shape in options.shapes for form in options.forms]
    with torch.inference_mode(), on_device(options.device), progress_bar(console) as progress:
        task = progress.add_task("device", total=1 + len(works) * len(options.rows))
        torch.manual_seed(options.seed)
        device = describe_device(options.device, dtype, options.timer)
        report = ProductsBench(
            command=options.command,
            origin=Origin.here(),
            busy=crowding(),
            date=date,
            warmup_ms=options.timer.warmup_ms,
            rep_ms=options.timer.rep_ms,
            seed=options.seed,
            device=device,
            dtype=DTYPE_NAMES[dtype],
            peak=peak_of(device.name, DTYPE_NAMES[dtype], options.peak_gbps, options.peak_tflops),
            cells=[],
        )
        progress.advance(task)
        for shape, form in works:
            for cells in _run_work(shape, form, dtype, options, report):
                report.cells += cells
                progress.update(task, advance=1, description=f"{shape[0]}x{shape[1]} {form}")
            report.busy = report.busy or crowding()
            if options.output is not None:
                write_json(report, options.output)
    return report


def _run_work(
    shape: tuple[int, int], form: str, dtype: torch.dtype, options: ProductOptions, report: ProductsBench
) -> Iterator[list[ProductTime]]:
    """Yield the cells of each number of rows. All kernels for one number of rows use the same x."""
    held = next(name for name, each in PLAIN_FORMS.items() if each == dtype) if form == PLAIN else _FORM_OF[form]
    try:
        layers = ProductLayers.drawn(shape, held, options.device, dtype)
        kernels = candidates_of(layers, dtype, options.device)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        got = f"{shape[0]}x{shape[1]} {form}: {failed(error).reason}"
        raise ConfigError("--linear", f"weights that fit into the memory of {options.device}", got) from error
    report.choices[f"{shape[0]}x{shape[1]} {form}"] = kernels.source
    for rows in options.rows:
        x = torch.randn(rows, shape[1], device=options.device, dtype=dtype)
        yield [_cell(layers, form, timed, kernels, x, options, report) for timed in kernels.of(x)]


def _cell(
    layers: ProductLayers,
    form: str,
    timed: TimedProduct,
    kernels: LinearCandidates,
    x: Tensor,
    options: ProductOptions,
    report: ProductsBench,
) -> ProductTime:
    try:
        measured = measure(partial(_contender, layers, timed, x), options.device, options.timer)
    except Exception as error:
        measured = failed(error)
    floor, bound = _floor(layers, x, report.rates)
    times = {}
    if measured.timing is not None:
        names, count = ("median_us", "p20_us", "p80_us"), len(timed.linears)
        times = {name: getattr(measured.timing, name) / count for name in names}
    return ProductTime(
        shape=f"{layers.shape[0]}x{layers.shape[1]}",
        form=form,
        rows=len(x),
        way=timed.name,
        chosen=timed.name == kernels.chosen(len(x)),
        status=measured.status,
        reason=measured.reason,
        floor_us=floor,
        bound=bound,
        relative_error=measured.relative_error,
        tolerance=measured.tolerance,
        **times,
    )


def _contender(layers: ProductLayers, timed: TimedProduct, x: Tensor) -> Contender:
    """Return all layers, run one after another so that weights come from memory, as one contender. On a GPU, the layers are in a
    CUDA graph, as in an engine."""
    answers: list[Tensor] = []

    def all_layers() -> None:
        answers[:] = [timed.step(x, linear) for linear in timed.linears]

    replay = captured(all_layers) if x.is_cuda else all_layers

    def call() -> Tensor:
        replay()
        return answers[0]

    return Contender(
        call=call,
        error=lambda y: layers.error(y, x),
        tolerance=tolerance(timed.rounds),
        poison=lambda: [answer.fill_(math.nan) for answer in answers],
    )


def _floor(layers: ProductLayers, x: Tensor, rates: tuple[float, float]) -> tuple[float, Literal["bytes", "operations"]]:
    """Return the minimum microseconds of a GEMM and its bound. The bytes are the stored weight, x and y; the operations are 2 *
    rows * out_features * in_features."""
    rows, (out_features, in_features) = len(x), layers.shape
    moved = layers.num_bytes + rows * (out_features + in_features) * x.element_size()
    by_bytes, by_operations = moved / rates[0] * 1e-3, 2 * rows * out_features * in_features / rates[1] * 1e-6
    return (by_bytes, "bytes") if by_bytes >= by_operations else (by_operations, "operations")


def print_products(report: ProductsBench, console: Console) -> None:
    """Print the device and its rates, the tables, and reasons for missing times."""
    (gbps, tflops), peak = report.rates, report.peak
    of = (
        f"peak ({peak.source})"
        if peak.gbps and peak.tflops
        else "measured"
        if not peak.gbps
        else "peak where known, else measured"
    )
    console.print(Text(f"{report.device.name}, torch {report.device.torch}, x in {report.dtype}"), soft_wrap=True)
    console.print(Text(f"floors at {gbps:,.0f} GB/s and {tflops:,.3g} TFLOP/s: {of}"), soft_wrap=True)
    for shape, form in dict.fromkeys((cell.shape, cell.form) for cell in report.cells):
        cells = [cell for cell in report.cells if (cell.shape, cell.form) == (shape, form)]
        source = report.choices[f"{shape} {form}"]
        console.print(Text(f"\n{shape} {form}").append(f"; *: the engine's choice, by {source}", "dim"), soft_wrap=True)
        console.print(_table(cells))
    lines: dict[str, list[str]] = {}
    for cell in report.cells:
        if cell.reason:
            where = f"{cell.shape} {cell.form}, {cell.rows} rows"
            lines.setdefault(f"{cell.way} {cell.status}: {cell.reason}", []).append(where)
    for line, places in lines.items():
        console.print(Text(f"{line} [{'; '.join(places)}]"), soft_wrap=True)
    if report.busy:
        console.print(Text(f"measured on a busy machine, {report.busy}: times may be too long"), soft_wrap=True)


def _table(cells: Sequence[ProductTime]) -> Table:
    """Return a table, with the fastest kernel first for each number of rows."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("rows", justify="right")
    table.add_column("kernel", no_wrap=True)
    for column in ("us", "floor us", "of", "share", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for rows in dict.fromkeys(cell.rows for cell in cells):
        rivals = sorted((cell for cell in cells if cell.rows == rows), key=lambda cell: cell.median_us or math.inf)
        for number, cell in enumerate(rivals):
            us = cell.median_us
            timed = [cell.status, "", "", "", ""]
            if us is not None:
                timed = [
                    f"{us:,.1f}",
                    f"{cell.floor_us:,.1f}",
                    cell.bound,
                    f"{cell.floor_us / us:.0%}",
                    f"{cell.relative_error:.1e}",
                ]
            shown = ("" if number else str(rows), cell.way + " *" * cell.chosen, *timed)
            table.add_row(*shown, style="" if number else "bold green", end_section=cell is rivals[-1])
    return table
