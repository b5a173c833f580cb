"""Result of `headway bench serve`, schema `headway.serve/1`: file, tables, charts, and the server's profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.charts import bars
from headway.bench.serve.client import RequestSender
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import ResultFile, write_bytes
from headway.core.system.json_text import parse_model
from headway.core.system.provenance import Origin
from headway.hosting.profiling import ProfileRequest, StepsProfile


async def begin(client: RequestSender, capture: ProfileRequest) -> None:
    """Start the server's profile. :raises ConfigError: if the server does not start it."""
    answer = await client.ask("/start_profile", capture.model_dump())
    if answer.error:
        hint = "start it with headway serve --profile-dir FOLDER"
        raise ConfigError("--profile", "a server that answers /start_profile", answer.error, hint)


async def end(client: RequestSender) -> StepsProfile | None:
    """Stop the server's profile and return it; None if the server returns no profile data.
    :raises ConfigError: if the server does not stop the profile.
    """
    answer = await client.ask("/stop_profile", {})
    if answer.error:
        raise ConfigError("--profile", "a server that answers /stop_profile", answer.error)
    try:
        return parse_model(answer.text, StepsProfile)
    except ValueError:  # pydantic's is one
        return None


def print_profile(label: str, found: StepsProfile, console: Console) -> None:
    """Print how the step time was spent, and the longest kernels."""
    console.print(
        f"{label}: {found.steps} steps of {found.step_ms:.2f} ms, {found.output_tokens:,} tokens written, "
        f"{found.prefill_tokens:,} of prompts computed",
        highlight=False,
    )
    console.print("; ".join(f"{name}: {count} steps" for name, count in found.steps_by_phase.items()), highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part of a step", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for name, ms in found.parts_ms.items():
        table.add_row(name, f"{ms:.3f}", f"{ms / found.step_ms:.0%}" if found.step_ms else "")
    console.print(table)
    if found.kernels_ms:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(f"longest in {found.traced_steps} traced steps", overflow="ellipsis", no_wrap=True, max_width=60)
        table.add_column("ms per step", justify="right", no_wrap=True)
        for name, ms in found.kernels_ms.items():
            table.add_row(name, f"{ms:.3f}")
        console.print(table)
    console.print(f"trace, on the server's machine: {found.trace}" if found.trace else _why_none(found), soft_wrap=True)


def _why_none(found: StepsProfile) -> str:
    if found.traced_steps:
        return f"no trace was written: {found.traced_steps} steps were marked for Nsight Systems"
    return f"no trace: the {found.steps} steps were fewer than --profile-skip asks to leave out"


class Spread(BaseModel):
    """Mean and percentiles of a time in milliseconds, over requests or tokens."""

    model_config = ConfigDict(extra="forbid")

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self | None:
        """Return the mean and percentiles of times, or None without values."""
        if not seconds:
            return None
        values = sorted(1e3 * each for each in seconds)
        return cls(
            mean=sum(values) / len(values), p50=quantile(values, 0.5), p95=quantile(values, 0.95), p99=quantile(values, 0.99)
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ascending values, by linear interpolation."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


class ServeCell(BaseModel):
    """Results of one mode at one rate."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["online", "offline", "naive"]
    """Mode of arrival. online: requests arrive at a rate; offline: all at once; naive: one after the other."""
    rate: float | None
    """Requests per second, in online mode."""
    burstiness: float | None
    """Shape of the gamma distribution of gaps, in online mode; 1 is Poisson."""
    completed: int
    failed: int
    errors: dict[str, int]
    """Error -> number of requests that failed with it."""
    seconds: float
    """Seconds from the first request to the last token."""
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Number of prompt tokens that were prefix cache hits on the server; 0 if the server does not report this number."""
    time_to_first_token_ms: Spread | None
    time_per_output_token_ms: Spread | None
    """Each request's mean time per token after the first."""
    inter_token_latency_ms: Spread | None
    """Time from each event with text to the next such event."""
    end_to_end_ms: Spread | None
    lateness_ms: Spread | None
    """Client's own delay: time from the planned to the actual sending of each request."""
    goodput: float | None
    """Requests per second that met every limit. None without limits."""
    good_share: float | None
    """Fraction of all requests that met every limit."""
    profile: StepsProfile | None = None
    """Breakdown of the server's step time. None without --profile."""

    @property
    def label(self) -> str:
        """Name of the cell in tables and charts."""
        return self.mode if self.rate is None else f"{self.rate:g}/s"


class ServeReport(ResultFile):
    """Result of one run against one server."""

    schema_: Literal["headway.serve/1"] = Field(default="headway.serve/1", alias="schema")
    command: str
    origin: Origin
    date: str
    """Date and time of the run: UTC, ISO 8601."""
    busy: str = ""
    """Load of other processes on the client's CPU at the start or end of the run."""
    url: str
    model: str
    endpoint: str
    load: dict[str, str]
    """Description of the load."""
    limits_ms: dict[str, float]
    """Limits for goodput: ttft, tpot, e2e -> milliseconds."""
    cells: list[ServeCell]


_TIMES = {
    "time_to_first_token_ms": "time to first token",
    "time_per_output_token_ms": "time per output token",
    "inter_token_latency_ms": "inter-token latency",
    "end_to_end_ms": "end to end",
}


def print_report(report: ServeReport, console: Console) -> None:
    """Print rates first, then the times of each cell."""
    console.print(f"{report.model} at {report.url}, /v1/{report.endpoint}", highlight=False)
    console.print(f"{report.load['conversations']} conversations of {report.load['turns']}, {_rest(report)}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    names = ["requests", "failed", "req/s", "tokens/s", "cached", *(["goodput/s", "good"] if report.limits_ms else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in report.cells:
        table.add_row(cell.label, *_rates(cell))
    console.print(table)
    table = Table(title="milliseconds", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(("", "time", "mean", "p50", "p95", "p99")):
        table.add_column(name, justify="right" if number > 1 else "left", style="" if number else "bold", no_wrap=True)
    for cell in report.cells:
        for number, (field, name) in enumerate(_TIMES.items()):
            found: Spread | None = getattr(cell, field)
            figures = ["-"] * 4 if found is None else [_ms(each) for each in (found.mean, found.p50, found.p95, found.p99)]
            table.add_row("" if number else cell.label, name, *figures, end_section=number == len(_TIMES) - 1)
    console.print(table)
    for line in notes(report):
        console.print(line, highlight=False)
    for cell in report.cells:
        if cell.profile is not None:
            print_profile(cell.label, cell.profile, console)


def _rest(report: ServeReport) -> str:
    """Return a description of the load's token counts and shared prefix."""
    prefix = report.load["shared prefix"]
    return f"tokens {report.load['tokens in/out']}" + ("" if prefix == "none" else f", shared prefix {prefix}")


def notes(report: ServeReport) -> list[str]:
    """Return notes below the tables."""
    lines = [f"measured on a busy machine, {report.busy}: times may be too long"] if report.busy else []
    if report.limits_ms:
        lines.append("good: " + ", ".join(f"{name} of at most {most:g} ms" for name, most in report.limits_ms.items()))
    for cell in report.cells:
        lines += [f"{cell.label}: {count} failed: {error}" for error, count in cell.errors.items()]
        if cell.lateness_ms is not None and cell.lateness_ms.p99 > 20:
            lines.append(f"{cell.label}: the client sent its requests late, p99 {cell.lateness_ms.p99:.0f} ms")
    return lines


def _rates(cell: ServeCell) -> list[str]:
    cached = f"{cell.cached_tokens / cell.prompt_tokens:.0%}" if cell.prompt_tokens else ""
    rates = f"{cell.requests_per_second:.2f}", f"{cell.output_tokens_per_second:,.0f}"
    good = [] if cell.goodput is None else [f"{cell.goodput:.2f}", f"{cell.good_share:.0%}"]
    return [str(cell.completed), str(cell.failed), *rates, cached, *good]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def draw(report: ServeReport, folder: Path) -> list[Path]:
    """Draw charts of time to first token, time per token and rates. Return their files.
    :raises ConfigError: if matplotlib is not installed or the folder is not writable."""
    groups = [cell.label for cell in report.cells]
    cells = [cell for cell in report.cells if cell.completed]
    if not cells:
        return []
    groups = [cell.label for cell in cells]
    xlabel = "requests that arrive per second; offline: all at once; naive: one after the other"
    made = []
    for field in ("time_to_first_token_ms", "time_per_output_token_ms"):
        spreads: list[Spread | None] = [getattr(cell, field) for cell in cells]
        series = {name: [None if each is None else getattr(each, name) for each in spreads] for name in ("p50", "p95", "p99")}
        if any(each is not None for each in spreads):
            title = f"{_TIMES[field].capitalize()}, {report.model}, {report.date[:10]}"
            made.append((field.removesuffix("_ms"), bars(title, groups, series, "milliseconds", xlabel)))
    rates = {"output tokens": [cell.output_tokens_per_second for cell in cells]}
    made.append(
        ("tokens_per_second", bars(f"Output, {report.model}, {report.date[:10]}", groups, rates, "tokens per second", xlabel))
    )
    paths = [folder / f"{name}.png" for name, _ in made]
    for path, (_, picture) in zip(paths, made, strict=True):
        write_bytes(picture, path, "--plots")
    return paths
