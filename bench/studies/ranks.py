"""`python -m headway.bench.studies.ranks predict|report`: several GPUs, as predicted by `headway plan` and as measured.

predict writes the predictions of `headway plan` for a kind of GPU and needs no GPU; report compares the files of one folder.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import torch
import typer
from rich import box
from rich.table import Table

from headway.bench.studies.command import run_study
from headway.bench.studies.plan_points import MeasuredPoint, latencies
from headway.bench.studies.ranks_report import PlannedRun, RanksPrediction, print_report, report_of
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin, command_line
from headway.core.system.terminal import Terminal
from headway.plan.devices import GPU_KINDS, H200, gpu_kind

LENGTHS: Final = (512, 512)
"""Input and output tokens of every request."""
SUM_BYTES: Final = tuple(2**power for power in range(13, 24))
"""Bytes of the summed tensors: 8 KiB to 8 MiB."""


class PlannedWork(NamedTuple):
    """A model with batch sizes, on several GPUs and perhaps also on one."""

    model: str
    weights: str
    batches: Sequence[int]
    alone: bool
    """True if one GPU has enough memory for the model."""


WORKS: Final = (
    PlannedWork("llama-3-8b", "model", (1, 64), True),
    PlannedWork("llama-3-70b", "model", (1,), False),
    PlannedWork("llama-3-70b", "fp8", (1,), False),
    PlannedWork("qwen3-30b-a3b", "model", (64,), True),
)


def predict_runs(gpu: str, ranks: int) -> RanksPrediction:
    """Predict every workload on one GPU and on `ranks` GPUs of a kind.
    :raises ConfigError: if `headway plan` does not know the kind or has no times for this number of GPUs."""
    kind = gpu_kind(gpu)
    runs = [
        _run(work, batch, size, kind.name)
        for work in WORKS
        for batch in work.batches
        for size in ((1, ranks) if work.alone else (ranks,))
    ]
    return RanksPrediction(
        command=command_line("python", "-m", "headway.bench.studies.ranks"),
        origin=Origin.here(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        gpu=kind.title,
        runs=runs,
        sum_bytes=list(SUM_BYTES),
        sum_us={str(ranks): [kind.all_reduce.us(ranks, num_bytes) for num_bytes in SUM_BYTES]},
    )


def _run(work: PlannedWork, batch: int, ranks: int, gpu: str) -> PlannedRun:
    point = MeasuredPoint(work.model, None, batch, *LENGTHS, "seconds", 0.0, "", gpu=gpu, ranks=ranks, weights=work.weights)
    found = latencies(point, H200)
    return PlannedRun(
        model=work.model,
        weights=work.weights,
        ranks=ranks,
        batch=batch,
        input_len=LENGTHS[0],
        output_len=LENGTHS[1],
        tokens_per_second=batch * LENGTHS[1] / found.seconds,
        first_token_ms=1e3 * statistics.mean(found.first_token),
        per_token_ms=1e3 * statistics.mean(found.per_token),
    )


def print_prediction(prediction: RanksPrediction, console: Terminal) -> None:
    """Print a prediction as a table."""
    table = Table(title=f"{prediction.gpu}, predicted", box=box.SIMPLE_HEAD)
    for column in ("model", "weights", "GPUs", "requests x in/out", "tokens/s", "first, ms", "token, ms"):
        table.add_column(column, justify="left" if column in ("model", "weights") else "right")
    for run in prediction.runs:
        work = f"{run.batch} x {run.input_len}/{run.output_len}"
        figures = f"{run.tokens_per_second:,.0f}", f"{run.first_token_ms:.1f}", f"{run.per_token_ms:.2f}"
        table.add_row(run.model, run.weights, str(run.ranks), work, *figures)
    console.print(table)


def _kind_here() -> str:
    """Return the kind of this machine's GPU, by its name in `headway plan`."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = next((kind.name for kind in GPU_KINDS.values() if kind.title == name), None)
    if found is None:
        raise ConfigError("--gpu", f"one of {', '.join(GPU_KINDS)} where the GPU that is here is none of them", name)
    return found


def ranks(
    what: Annotated[str, typer.Argument(help="Task: predict or report.")],
    folder: Annotated[Path | None, typer.Argument(help="Folder of the files to report on.")] = None,
    size: Annotated[int, typer.Option("--ranks", min=2, help="Number of ranks.")] = 2,
    gpu: Annotated[
        str | None, typer.Option(help="Kind of GPU to predict, as in `headway plan`. Default: this machine's.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Predict or report runs on several GPUs."""
    console = Terminal(width=120, highlight=False)
    if what == "predict":
        prediction = predict_runs(gpu or _kind_here(), size)
        print_prediction(prediction, console)
        if output is not None:
            write_json(prediction, output)
    elif what == "report":
        if folder is None:
            raise ConfigError("report", "the folder of the files", "none")
        report = report_of(folder)
        print_report(report, console)
        write_json(report, output or folder / "ranks.json")
    else:
        raise ConfigError("WHAT", "predict or report", repr(what))


if __name__ == "__main__":
    run_study(ranks)
