"""Servers under one load, one after the other on one device.

    python -m headway.bench.studies.servers.compare --at-once 256 --rate 0.5x,0.9x --mix 512/128 --output FILE.json \\
        --server 'vllm=vllm serve FOLDER --load-format dummy --port {port}' \\
        --server 'headway=headway serve FOLDER --load-format dummy --port {port}' \\
        --server 'no-http=in-process {"model": "FOLDER", "load_format": "dummy"}'

Each is started, warmed up with other prompts of the same lengths, loaded with the same requests at the same times, and stopped
before the next. A rate such as 0.9x is that share of the requests a second that the first server answered when all came at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.serve.client import Client
from headway.bench.serve.load import Length, Load, limits_of, parse_mix
from headway.bench.serve.results import ServeCell, Spread
from headway.bench.serve.run import Sending, ServePlan, run_cell
from headway.bench.studies.command import run_study
from headway.bench.studies.servers.contenders import ServerContender, Started, started
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import ResultFile, write_json
from headway.core.system.provenance import Origin, command_line
from headway.tuning.measure.device import crowding, default_device, identify_device
from headway.tuning.table.schema import DeviceIdentity


class Measured(BaseModel):
    """One contender."""

    model_config = ConfigDict(extra="forbid")

    name: str
    command: str
    version: str
    """What the server says of itself; empty where it says nothing."""
    ready_seconds: float
    """From its start until it answered."""
    cells: list[ServeCell]
    """First those of all requests at once, then a cell for each rate."""


class Comparison(ResultFile):
    """One run."""

    schema_: Literal["headway.serve_compare/1"] = Field(default="headway.serve_compare/1", alias="schema")
    command: str
    origin: Origin
    date: str
    """UTC, ISO 8601."""
    busy: str = ""
    """What other processes took of the CPU when the run ended."""
    device: DeviceIdentity
    load: dict[str, str]
    limits_ms: dict[str, float]
    """What goodput asks for: ttft, tpot, e2e -> milliseconds."""
    contenders: list[Measured]


@dataclass(frozen=True)
class LoadOptions:
    """What every contender gets."""

    mix: Sequence[Length]
    at_once: int
    """Requests of a run in which all come at once; 0: no such run."""
    passes: int
    """Such runs."""
    rates: Sequence[str]
    """Requests a second; with x at the end, shares of the first contender's rate at once."""
    seconds: float
    """Seconds that the requests of a rate take to arrive."""
    warmup: int
    """Requests at once before anything is measured."""
    limits: dict[str, float]
    vocab_size: int
    seed: int


async def measure(contender: ServerContender, work: LoadOptions, reference: float | None, tell: Console) -> Measured:
    """Start a contender, give it the work, and stop it.

    reference: requests a second of which rates are shares; None: its own.

    :raises HeadwayError: it does not start, or a rate is a share of nothing.
    """
    began = time.perf_counter()
    tell.print(f"{contender.name}: starting", highlight=False)
    cells: list[ServeCell] = []
    async with started(contender) as found:
        ready = time.perf_counter() - began
        tell.print(f"{contender.name}: ready after {ready:.0f} s", highlight=False)
        for number in range(2):  # the second finds what the first has compiled
            await _cell(found, work, ServePlan("offline"), work.warmup, work.seed + 1_000_000 + number)
        for number in range(work.passes if work.at_once else 0):
            cells.append(await _cell(found, work, ServePlan("offline"), work.at_once, work.seed + number))
            found_rate = cells[-1].requests_per_second
            tell.print(f"{contender.name}: {work.at_once} at once: {found_rate:.1f} requests/s", highlight=False)
        own = max((cell.requests_per_second for cell in cells), default=None)
        for number, rate in enumerate(rates_of(work.rates, reference or own)):
            count = max(round(rate * work.seconds), 1)
            cells.append(await _cell(found, work, ServePlan("online", rate), count, work.seed + 1_000 + number))
            tell.print(f"{contender.name}: {rate:.1f}/s: first token {_ms(cells[-1].time_to_first_token_ms)} ms", highlight=False)
    return Measured(name=contender.name, command=contender.command, version=found.version, ready_seconds=ready, cells=cells)


async def _cell(found: Started, work: LoadOptions, plan: ServePlan, count: int, seed: int) -> ServeCell:
    """Run one cell. Its prompts have a seed of their own: a prefix cache would serve those of another cell again."""
    load = Load(count, work.mix, vocab_size=work.vocab_size, seed=seed)
    return await run_cell(found.client, load, plan, Sending(found.model), work.limits)


def rates_of(texts: Sequence[str], reference: float | None) -> list[float]:
    """Requests a second.

    :raises ConfigError: not a rate, or a share where there is no reference.
    """
    rates = []
    for text in texts:
        share = text.endswith("x")
        try:
            rates.append(float(text.removesuffix("x")) * ((reference or 0.0) if share else 1.0))
        except ValueError:
            raise ConfigError("--rate", "requests per second such as 40, or shares such as 0.5x", repr(text)) from None
        if not 0 < rates[-1] < float("inf"):
            raise ConfigError("--rate", "positive rates; shares need --at-once", repr(text))
    return rates


def goodput(measured: Measured) -> float | None:
    """The most requests a second within the limits, over all rates."""
    return max((cell.goodput for cell in measured.cells if cell.goodput is not None and cell.rate is not None), default=None)


def print_comparison(found: Comparison, console: Console) -> None:
    """A row for each cell, the cells of one load together."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="times in ms: p50, p99", caption_justify="left")
    for name in ("load", "", "req/s", "tokens/s", "first token", "per token", "good/s"):
        table.add_column(name, justify="left" if name in ("load", "") else "right", no_wrap=True)
    for number in range(len(found.contenders[0].cells)):
        for each in found.contenders:
            cell, last = each.cells[number], each is found.contenders[-1]
            label = ("at once" if cell.rate is None else f"{cell.rate:.1f}/s") if each is found.contenders[0] else ""
            good = "-" if cell.goodput is None else f"{cell.goodput:.1f}"
            times = _ms(cell.time_to_first_token_ms), _ms(cell.time_per_output_token_ms)
            rates = f"{cell.requests_per_second:.1f}", f"{cell.output_tokens_per_second:,.0f}"
            failed = f" ({cell.failed} failed)" if cell.failed else ""
            table.add_row(label, each.name + failed, *rates, *times, good, end_section=last)
    console.print(table)
    for each in found.contenders:
        if (most := goodput(each)) is not None:
            console.print(f"{each.name}: at most {most:.1f} good requests/s", highlight=False)


def _ms(spread: Spread | None) -> str:
    """The median and the 99th percentile, in about three digits."""
    if spread is None:
        return "-"
    return ", ".join(f"{each:.{0 if each >= 100 else 1 if each >= 10 else 2}f}" for each in (spread.p50, spread.p99))


def main(
    server: Annotated[list[str], typer.Option(help="NAME=COMMAND with {port}, or NAME=in-process and LLM's options as JSON.")],
    mix: Annotated[str, typer.Option(help="Tokens in/out of requests, with weights: 128/64:3,4096/256:1.")] = "512/128",
    at_once: Annotated[int, typer.Option(min=0, help="Requests that come all at once; 0: none do.")] = 0,
    passes: Annotated[int, typer.Option(min=1, help="Times that they do.")] = 2,
    rate: Annotated[str, typer.Option(help="Requests a second, or shares such as 0.5x of the first server's at once.")] = "",
    seconds: Annotated[float, typer.Option(min=0.01, help="That the requests of a rate take to arrive.")] = 15.0,
    warmup: Annotated[int, typer.Option(min=1, help="Requests at once before, twice.")] = 64,
    limits: Annotated[str | None, typer.Option("--goodput", help="Limits in ms: ttft:200,tpot:20,e2e:5000.")] = None,
    vocab_size: Annotated[int, typer.Option(min=200, help="Prompts' token ids lie below it.")] = 10000,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON, after each server.")] = None,
) -> None:
    """Load servers one after the other, and show their figures side by side."""
    err = Console(stderr=True, soft_wrap=True)
    texts = [part for part in rate.split(",") if part]
    rates_of(texts, 1.0 if at_once else None)
    work = LoadOptions(parse_mix(mix), at_once, passes, texts, seconds, warmup, limits_of(limits), vocab_size, seed)
    measured: list[Measured] = []
    for contender in [ServerContender.parse(each) for each in server]:
        own = [cell.requests_per_second for each in measured[:1] for cell in each.cells if cell.rate is None]
        measured.append(Client.run(measure(contender, work, max(own, default=None), err)))
        found = Comparison(
            command=command_line("python", "-m", "headway.bench.studies.servers.compare"),
            origin=Origin.here(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            busy=crowding(),
            device=identify_device(default_device()),
            load={"tokens in/out": ",".join(map(str, work.mix)), "seconds": f"{seconds:g}", "seed": str(seed)},
            limits_ms=work.limits,
            contenders=measured,
        )
        if output is not None:
            write_json(found, output)
    print_comparison(found, Console())


if __name__ == "__main__":
    run_study(main)
