"""`python -m headway.bench.studies.plan check|fit|measure`: how far `headway plan` is off.

check predicts every time of a whole generation in bench/results/h200, and the latencies of two rates of arrivals; fit chooses the
numbers of `headway.plan.devices` from half of those times; measure times generations on the GPU that is here, and prints
predicted beside measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.bench.studies.plan.points import MeasuredPoint
    from headway.plan.devices import Utilisation

_WIDTH = 100


def plan(
    what: Annotated[str, typer.Argument(help="check, fit or measure.")] = "check",
    models: Annotated[str, typer.Option(help="Shapes to measure, comma-separated.")] = "qwen3-0.6b,llama-3-8b,qwen3-30b-a3b",
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, to measure.")] = "1,8,16,64,128",
    lengths: Annotated[str, typer.Option(help="Tokens in and out of each request, to measure.")] = "512/256,2048/256",
    kv_cache_dtypes: Annotated[str, typer.Option(help="Types of the cache, to measure.")] = "auto,fp8_e4m3",
    output: Annotated[Path | None, typer.Option(help="Write what was measured and predicted to this JSON file.")] = None,
) -> None:
    """Predict, and say how far off it is."""
    from headway.bench.studies.plan.points import measured_points, weight_points
    from headway.bench.studies.plan.predict import arrivals, fit_all, halves, kernel_cells, kernel_errors
    from headway.plan.devices import H200

    console = Terminal(width=_WIDTH, highlight=False)
    if what == "check":
        chosen, judged = halves(measured_points())
        _show(chosen, H200, console, "from which the utilisations were chosen")
        _show(judged, H200, console, "by which they are judged")
        _show(weight_points(), H200, console, "of an H100, with weights in several formats")
        cells = kernel_cells()[1::2]
        found = kernel_errors(cells, H200)
        off = f"median {100 * found.median:.1f} %, worst {100 * found.worst:.0f} %"
        console.print(f"attention by the data sheet at {len(cells)} cells of tables: {off}")
        for name, measured, predicted in arrivals(H200):
            console.print(f"{name}: measured {measured:.2f}, predicted {predicted:.2f}")
    elif what == "fit":
        chosen, judged = halves(measured_points())
        reached = fit_all(chosen, H200, console.print)
        console.print(reached)
        _show(chosen, reached, console, "chosen from")
        _show(judged, reached, console, "judged by")
    elif what == "measure":
        from headway.bench.studies.plan.measure import measure

        points = measure(models.split(","), batch_sizes.split(","), lengths.split(","), kv_cache_dtypes.split(","), console.print)
        _show(points, H200, console, "measured here")
        if output is not None:
            _write(points, H200, output)
    else:
        raise ConfigError("WHAT", "check, fit or measure", repr(what))


def _show(points: Sequence[MeasuredPoint], reached: Utilisation, console: Terminal, title: str) -> None:
    from headway.bench.studies.plan.predict import errors, predict

    table = Table(box=box.SIMPLE_HEAD, width=_WIDTH, title=f"{len(points)} points {title}")
    for column in ("point", "figure", "measured", "predicted", "off by"):
        table.add_column(column, justify="left" if column in ("point", "figure") else "right")
    for point in points:
        found = predict(point, reached)
        off = f"{100 * (found / point.measured - 1):+.1f} %"
        table.add_row(str(point), point.metric, f"{point.measured:.3f}", f"{found:.3f}", off)
    console.print(table)
    off_by = errors(points, reached)
    console.print(f"median {100 * off_by.median:.1f} %, worst {100 * off_by.worst:.1f} %")


def _write(points: Sequence[MeasuredPoint], reached: Utilisation, path: Path) -> None:
    from dataclasses import asdict

    from headway.bench.studies.plan.predict import predict
    from headway.core.system.json_files import write_bytes
    from headway.core.system.provenance import Origin, command_line

    found = {
        "schema": "headway.plan-study/1",
        "command": command_line("python", "-m", "headway.bench.studies.plan"),
        "origin": Origin.here().model_dump(),
        "utilisation": asdict(reached),
        "points": [{**asdict(point), "predicted": predict(point, reached)} for point in points],
    }
    write_bytes(json.dumps(found, indent=1).encode(), path)


if __name__ == "__main__":
    run_study(plan)
