"""Result files for several GPUs: earlier predictions, and a comparison of the files of one folder."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.table import Table

from headway.bench.generate.results import OfflineCell, OfflineReport, PeersFile
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.core.system.terminal import Terminal
from headway.tuning.table.convert import to_times
from headway.tuning.table.files import read_table

_NAME: Final = re.compile(r"throughput-(.+)-tp(\d+)\.json")
SMALLEST_SUM: Final = 8192
"""Bytes of the smallest tensor to report: one token of a model with hidden size 4,096 in half precision."""


class PlannedRun(BaseModel):
    """Prediction of `headway plan` for one workload on a number of GPUs."""

    model_config = ConfigDict(extra="forbid")

    model: str
    weights: str
    """Weight format of `headway plan`: model or fp8."""
    ranks: int
    batch: int
    input_len: int
    output_len: int
    tokens_per_second: float
    """Output tokens divided by the time from the first request to the last token."""
    first_token_ms: float
    """Mean over the requests in milliseconds; the same applies to per_token_ms."""
    per_token_ms: float


class RanksPrediction(ResultFile):
    """Predictions for GPUs of one kind, made before any measurement."""

    schema_: Literal["headway.ranks-prediction/1"] = Field(default="headway.ranks-prediction/1", alias="schema")
    command: str
    origin: Origin | None = None
    date: str
    gpu: str
    """Name of the GPU in the driver."""
    runs: list[PlannedRun]
    sum_bytes: list[int]
    """Bytes of the tensors that ranks sum."""
    sum_us: dict[str, list[float]]
    """Number of ranks -> microseconds for each size in sum_bytes, from the published tables that predictions use."""


class RanksRow(BaseModel):
    """One workload on several GPUs, compared with one GPU, with vLLM on as many GPUs, and with its prediction."""

    model_config = ConfigDict(extra="forbid")

    work: str
    ranks: int
    tokens_per_second: float
    one: float | None = None
    """Tokens per second on one GPU. None if not measured."""
    speedup: float | None = None
    """`tokens_per_second` divided by `one`."""
    vllm: float | None = None
    """vLLM's output tokens per second on as many GPUs."""
    ratio: float | None = None
    """`tokens_per_second` divided by `vllm`."""
    planned: float | None = None
    """Predicted tokens per second. None without an earlier prediction."""
    off: float | None = None
    """Relative error of the prediction in percent."""
    planned_one: float | None = None
    """Predicted tokens per second on one GPU; `off_one` is the relative error of this prediction in percent."""
    off_one: float | None = None


class RanksReport(ResultFile):
    """Comparison of the files of one folder for several GPUs."""

    schema_: Literal["headway.ranks/1"] = Field(default="headway.ranks/1", alias="schema")
    date: str
    """Date of the newest file."""
    device: str
    origin: Origin | None = None
    """Code that wrote the newest file."""
    rows: list[RanksRow]
    median_off: float | None
    """Median absolute error of all predictions in percent. None without predictions."""
    sums: dict[str, list[float | None]]
    """All-reduce method -> measured microseconds in CUDA graphs for each size in sum_bytes."""
    sum_bytes: list[int]


class _Measured(NamedTuple):
    """One workload of one file."""

    name: str
    """Model name in the file's name."""
    ranks: int
    report: OfflineReport
    cell: OfflineCell

    @property
    def work(self) -> str:
        """Text that describes the workload."""
        return f"{self.report.model}{', fp8' if self.weights == 'fp8' else ''}, {self.cell.label}"

    @property
    def weights(self) -> str:
        """Weight format, as in `headway plan`."""
        return "fp8" if "--quantization fp8" in self.report.command else "model"


def report_of(folder: Path) -> RanksReport:
    """Compare the files of a folder: throughput-NAME-tpN.json, vllm-NAME-tpN.json, predicted.json, all-reduce.json.
    :raises ConfigError: if there is no file of a run on several GPUs."""
    measured = [each for path in sorted(folder.glob("throughput-*-tp*.json")) for each in _read(path)]
    several = [each for each in measured if each.ranks > 1]
    if not several:
        raise ConfigError("report", "files such as throughput-8b-tp2.json", f"none in {folder}")
    ones = {(each.name, each.cell.label): each for each in measured if each.ranks == 1}
    predicted = folder / "predicted.json"
    planned = RanksPrediction.read(predicted) if predicted.exists() else None
    rows = [_row(each, ones.get((each.name, each.cell.label)), _vllm(folder, each), planned) for each in several]
    off = [abs(error) for row in rows for error in (row.off, row.off_one) if error is not None]
    newest = max((each.report for each in several), key=lambda report: report.date)
    sum_bytes, sums = _sums(folder / "all-reduce.json")
    return RanksReport(
        date=newest.date,
        device=newest.device.name,
        origin=newest.origin,
        rows=rows,
        median_off=statistics.median(off) if off else None,
        sums=sums,
        sum_bytes=sum_bytes,
    )


def _read(path: Path) -> list[_Measured]:
    match = _NAME.fullmatch(path.name)
    report = OfflineReport.read(path)
    return [_Measured(match[1], int(match[2]), report, cell) for cell in report.cells] if match else []


def _row(each: _Measured, one: _Measured | None, vllm: float | None, planned: RanksPrediction | None) -> RanksRow:
    rate = each.cell.tokens_per_second
    here, alone = _planned(each, planned), None if one is None else _planned(one, planned)
    return RanksRow(
        work=each.work,
        ranks=each.ranks,
        tokens_per_second=rate,
        one=None if one is None else one.cell.tokens_per_second,
        speedup=None if one is None else rate / one.cell.tokens_per_second,
        vllm=vllm,
        ratio=None if vllm is None else rate / vllm,
        planned=here,
        off=None if here is None else 100 * (here / rate - 1),
        planned_one=alone,
        off_one=None if alone is None or one is None else 100 * (alone / one.cell.tokens_per_second - 1),
    )


def _planned(each: _Measured, planned: RanksPrediction | None) -> float | None:
    """Return the prediction for a run if the prediction is for the same GPU and older than the run, else None."""
    if planned is None or planned.gpu != each.report.device.name or planned.date >= each.report.date:
        return None
    cell = each.cell
    wanted_key = (each.report.model, each.weights, each.ranks, cell.batch_size, cell.input_len, cell.output_len)
    return next((run.tokens_per_second for run in planned.runs if _key(run) == wanted_key), None)


def _key(run: PlannedRun) -> tuple[object, ...]:
    return run.model, run.weights, run.ranks, run.batch, run.input_len, run.output_len


def _vllm(folder: Path, each: _Measured) -> float | None:
    path = folder / f"vllm-{each.name}-tp{each.ranks}.json"
    return PeersFile.read(path).peers[0].tokens_per_second.get(each.cell.label) if path.exists() else None


def _sums(path: Path) -> tuple[list[int], dict[str, list[float | None]]]:
    """Return the sizes of at least SMALLEST_SUM bytes and each method's times; both are empty if the file does not exist."""
    if not path.exists():
        return [], {}
    found = read_table(path, "all_reduce")
    sizes = sorted({cell.batch for cell in found.cells if cell.batch >= SMALLEST_SUM})
    return sizes, to_times(found, sizes)


def columns_of(report: RanksReport) -> dict[str, list[str]]:
    """Return the table of end-to-end generation: heading -> text of each row."""
    rows = report.rows
    columns: Mapping[str, Sequence[str]] = {
        "work": [row.work for row in rows],
        "GPUs": [str(row.ranks) for row in rows],
        "tokens/s": [f"{row.tokens_per_second:,.0f}" for row in rows],
        "one GPU": [_shown(row.one, ",.0f") for row in rows],
        "times": [_shown(row.speedup, ".2f") for row in rows],
        "vLLM": [_shown(row.vllm, ",.0f") for row in rows],
        "times vLLM": [_shown(row.ratio, ".2f") for row in rows],
        "planned": [_shown(row.planned, ",.0f") for row in rows],
        "off by, %": [_shown(row.off, "+.1f") for row in rows],
        "one GPU, planned": [_shown(row.planned_one, ",.0f") for row in rows],
    }
    return {name: list(texts) for name, texts in columns.items() if any(texts)}


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def median_text(report: RanksReport) -> str:
    """Return the error of the predictions in words."""
    if report.median_off is None:
        return "No prediction was made before the measurement."
    return f"The predictions that `headway plan` made before the measurement have a median error of {report.median_off:.1f} %."


def print_report(report: RanksReport, console: Terminal) -> None:
    """Print the tables of end-to-end generation and of all-reduce times."""
    columns = columns_of(report)
    table = Table(title=f"{report.device}, output tokens per second", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="left" if name == "work" else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    console.print(median_text(report))
    if report.sums:
        sums = Table(title="us of a sum, bfloat16", box=box.SIMPLE_HEAD)
        for name in ("bytes", *report.sums):
            sums.add_column(name, justify="right")
        for cell, size in enumerate(report.sum_bytes):
            sums.add_row(f"{size:,}", *(_shown(us[cell], ".1f") for us in report.sums.values()))
        console.print(sums)


def markdown(report: RanksReport) -> str:
    """Return the tables of end-to-end generation and of all-reduce times as Markdown."""
    columns = columns_of(report)
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in zip(*columns.values(), strict=True)]
    lines += ["", median_text(report)]
    if report.sums:
        lines += ["", "| bytes | " + " | ".join(report.sums) + " |", "|---" * (len(report.sums) + 1) + "|"]
        for cell, size in enumerate(report.sum_bytes):
            lines.append(f"| {size:,} | " + " | ".join(_shown(us[cell], ".1f") or "-" for us in report.sums.values()) + " |")
    return "\n".join(lines)
