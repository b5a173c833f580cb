"""`python -m headway.bench.studies.requests`: what the ways in which people ask cost, and what guesses and memory gain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.studies.command import run_study
from headway.cli.engine_options import takes_engine_options
from headway.cli.options import dtype_of, sizes_of
from headway.core.contract.errors import ConfigError
from headway.core.system.provenance import command_line
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.bench.studies.requests.results import RequestsCell, RequestsReport

_OWN = ("attn_backend", "autotune_budget", "gpu_memory_utilization", "num_threads", "plugins")
"""Options of the engine that hold for every study; each sets the others as it needs them."""


@takes_engine_options(*_OWN)
def requests(
    engine: dict[str, Any],
    studies: Annotated[
        list[str] | None, typer.Argument(help="sampling, speculation, second-turn, overload. Default: all.")
    ] = None,
    model: Annotated[str, typer.Option(help="A model's name or folder; its weights are not read.")] = "qwen3-0.6b",
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU where there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="auto is bfloat16, and float32 on a CPU.")] = "auto",
    batch_size: Annotated[str, typer.Option(help="Sequences at once, comma-separated; overload takes the last.")] = "1,64",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt; four times as many for overload.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens written for each; four times as many for overload.")] = 128,
    second_turn_len: Annotated[int, typer.Option(min=16, help="Tokens of the first turn.")] = 4000,
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of guesses that are right.")] = 0.7,
    repeat: Annotated[int, typer.Option(min=1, help="Timed turns after the warm-up; the median counts.")] = 5,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Time what requests ask for: sampling parameters, guessed tokens, a second turn, more than the cache holds.

    Weights are random. Every way of a load is timed in the same process; what the engine counted stands beside the times.
    """
    import torch

    from headway.bench.studies.requests.engines import Engines, Sizes
    from headway.bench.studies.requests.run import STUDIES, run_requests_bench
    from headway.core.contract.spec import DTYPES
    from headway.tuning.measure.device import resolve_device

    for name in studies or ():
        if name not in STUDIES:
            raise ConfigError("study", ", ".join(STUDIES), repr(name))
    place = resolve_device(device)
    kind = dtype_of("--dtype", dtype, DTYPES) or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    sizes = Sizes(sizes_of("--batch-size", batch_size) or [], input_len, output_len, second_turn_len, acceptance, repeat)
    engines = Engines(model, {**engine, "device": str(place), "dtype": str(kind).removeprefix("torch.")})
    console = Terminal(stderr=True)
    chosen = [study for study in STUDIES if not studies or study in studies]
    with console.status(chosen[0]) as status:
        report = run_requests_bench(
            chosen,
            engines,
            sizes,
            place,
            kind,
            command_line("python", "-m", "headway.bench.studies.requests"),
            output,
            tell=lambda cell: status.update(f"{cell.study}, {cell.load}: {cell.way} {cell.gain:.2f}"),
        )
    console = Terminal()
    print_report(report, console)
    if output is not None:
        console.print(f"written to {output}", highlight=False)


def print_report(report: RequestsReport, console: Console) -> None:
    """A table for each study, and under it what the engine counted."""
    console.print(f"{report.model}, {report.dtype}, {report.device.name}, torch {report.device.torch}", highlight=False)
    for study in dict.fromkeys(cell.study for cell in report.cells):
        cells = [cell for cell in report.cells if cell.study == study]
        console.print(_table(study, cells))
        for cell in cells:
            if cell.counts:
                counts = ", ".join(f"{name} {_number(value)}" for name, value in cell.counts.items())
                console.print(f"{cell.load}, {cell.way}: {counts}", highlight=False, markup=False)
    if report.busy:
        console.print(report.busy, highlight=False)


def _table(study: str, cells: list[RequestsCell]) -> Table:
    table = Table(title=study, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("load")
    table.add_column("way")
    table.add_column(f"median {cells[0].unit}", justify="right")
    table.add_column("spread", justify="right")
    table.add_column("times as fast", justify="right")
    table.add_column("same tokens", justify="right")
    for cell in cells:
        spread = (max(cell.all) - min(cell.all)) / 2 / cell.median
        equal = "" if cell.equal is None else f"{cell.equal:.0%}"
        table.add_row(cell.load, cell.way, _number(cell.median), f"±{spread:.0%}", f"{cell.gain:.2f}", equal)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


if __name__ == "__main__":
    run_study(requests)
