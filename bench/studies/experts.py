"""`python -m headway.bench.studies.experts`: a layer of experts, compared with other libraries' layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.studies.command import run_study
from headway.bench.studies.experts_layer import ExpertsCell, ExpertsReport, parse_shape, run_experts_bench
from headway.cli.options import dtype_of, sizes_of
from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import DTYPES
from headway.core.system.json_files import write_json
from headway.core.system.provenance import command_line
from headway.core.system.terminal import Terminal
from headway.tuning.measure.device import resolve_device
from headway.tuning.measure.timing import Timer

_FILE_WIDTH = 160
"""Width of the table in columns if the output is not a terminal."""


def experts(
    shape: Annotated[
        list[str] | None, typer.Option(help="Layer: a model name, or experts/top_k/intermediate/hidden. Repeatable.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens to time, comma-separated.")] = "1,16,64,256,4096",
    form: Annotated[
        str, typer.Option(help="Format of the experts' weights: plain, fp8-blocks, fp8-rows, mxfp4, int4 or int8.")
    ] = "plain",
    dtype: Annotated[str, typer.Option(help="Element type: float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="Device: cuda or cuda:N. Default: the GPU.")] = None,
    warmup_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of warm-up before timing.")] = 15.0,
    rep_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of timed runs.")] = 60.0,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Time a layer of experts and other libraries' layers, after checking each result against float32."""
    place = resolve_device(device)
    if place.type != "cuda":
        raise ConfigError("headway.bench.studies.experts", "a GPU", place.type)
    shapes = [parse_shape(text) for text in shape or ["qwen3-30b-a3b"]]
    console = Terminal(stderr=True)
    with torch.inference_mode(), console.status("experts") as status:
        report = run_experts_bench(
            shapes,
            sizes_of("--tokens", tokens) or [],
            dtype_of("--dtype", dtype, DTYPES) or torch.bfloat16,
            place,
            Timer(warmup_ms, rep_ms),
            command=command_line("python", "-m", "headway.bench.studies.experts"),
            on_progress=lambda what: status.update(what),
            form=form,
        )
    console = Terminal()
    print_report(report, console if console.is_terminal else Terminal(width=_FILE_WIDTH))
    if output is not None:
        write_json(report, output)
        console.print(f"written to {output}", highlight=False)


def print_report(report: ExpertsReport, console: Console) -> None:
    """Print a table per shape, with a row per token count and a column per kernel."""
    console.print(f"{report.device.name}, torch {report.device.torch}, {report.dtype}, weights {report.form}", highlight=False)
    console.print(f"read {report.read_gbps:.0f} GB/s, GEMM {report.device.matrix_tflops:.0f} TFLOP/s", highlight=False)
    for name, chosen in report.chosen.items():
        cells = [cell for cell in report.cells if cell.shape == name]
        console.print(_table(name, cells))
        console.print(f"auto: {chosen}", highlight=False)
        for line in ratios(cells):
            console.print(line, highlight=False)
    for cell in report.cells:
        if cell.reason:
            console.print(f"{cell.way}, {cell.shape}, {cell.tokens} tokens: {cell.reason}", highlight=False, markup=False)
    for peer, version in report.libraries.items():
        console.print(f"{peer} {version}", highlight=False, markup=False)


def _table(name: str, cells: list[ExpertsCell]) -> Table:
    title = f"{name}: median us of the experts' GEMMs and sum (whole layer) · share of the higher floor"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("tokens", justify="right")
    table.add_column("experts touched", justify="right")
    kernels = list(dict.fromkeys(cell.way for cell in cells))
    for kernel in kernels:
        table.add_column(kernel, justify="right")
    for count in dict.fromkeys(cell.tokens for cell in cells):
        row = {cell.way: cell for cell in cells if cell.tokens == count}
        table.add_row(str(count), str(next(iter(row.values())).touched), *(_text(row.get(kernel)) for kernel in kernels))
    return table


def _text(cell: ExpertsCell | None) -> str:
    if cell is None or cell.median_us is None:
        return "-"
    whole = "" if cell.layer_us is None else f" ({cell.layer_us:.1f})"
    return f"{cell.median_us:.1f}{whole} · {max(cell.bytes_share or 0, cell.operations_share or 0):.0%}"


def ratios(cells: list[ExpertsCell]) -> list[str]:
    """Return a line for each peer: the peer's time divided by the time of Headway's best kernel, as geometric mean over token
    counts and as minimum."""
    lines = []
    ours: dict[int, float] = {}
    for cell in cells:
        if cell.median_us is not None and not cell.peer:
            ours[cell.tokens] = min(ours.get(cell.tokens, math.inf), cell.median_us)
    for peer in dict.fromkeys(cell.way for cell in cells if cell.peer):
        found = [
            cell.median_us / ours[cell.tokens] for cell in cells if cell.way == peer and cell.median_us and cell.tokens in ours
        ]
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            lines.append(f"compared with {peer}: {mean:.2f} times as fast in the geometric mean, {min(found):.2f} at worst")
    return lines


if __name__ == "__main__":
    run_study(experts)
