"""`headway bench serve`: load test for a server, by its URL."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headway.cli.options import names_of, write_result
from headway.core.contract.errors import ConfigError

if TYPE_CHECKING:
    from headway.bench.serve.client import Client
    from headway.bench.serve.load import Load
    from headway.bench.serve.results import ServeReport
    from headway.bench.serve.run import Sending, ServePlan
    from headway.hosting.profiling import ProfileRequest

_MODES = ("online", "offline", "naive")


def serve(
    url: Annotated[str, typer.Option(help="URL of a server with OpenAI's API.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name to request. Default: the first of /v1/models.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key to send as Authorization: Bearer KEY.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="Endpoint: completions (prompts of token ids) or chat (words).")] = "completions",
    modes: Annotated[
        str, typer.Option(help="Modes, comma-separated: online (requests at --rate), offline (all at once), naive (one by one).")
    ] = "online,offline,naive",
    rate: Annotated[str, typer.Option(help="Requests per second in online mode: N, or a list such as 1,4,16.")] = "4",
    burstiness: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Shape of the gamma distribution of gaps between requests. 1 means Poisson arrivals; less is burstier.",
        ),
    ] = 1.0,
    num_requests: Annotated[int, typer.Option(min=1, help="Number of conversations per run.")] = 100,
    num_naive: Annotated[int, typer.Option(min=1, help="Number of conversations in the naive run, which takes longest.")] = 10,
    mix: Annotated[
        str, typer.Option(help="Input/output tokens of requests, optionally with weights: 512/128, or 128/64:3,4096/256:1.")
    ] = "512/128",
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Number of tokens in a system prompt before every conversation. 0 means no system prompt.")
    ] = 0,
    num_prefixes: Annotated[int, typer.Option(min=1, help="Number of different system prompts.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="Number of user messages per conversation.")] = 1,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of concurrent conversations. Default: no limit.")
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(help="Latency limits in milliseconds of a good request, such as ttft:200,tpot:20. Names: ttft, tpot, e2e."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=200, help="Upper bound of token ids in prompts, exclusive.")] = 10000,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature. 0 means greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed for lengths, prompts and arrival times.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Maximum duration of a request in seconds.")] = 600.0,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Report where a server with --profile-dir spends step time, and trace some steps."),
    ] = False,
    profile_skip: Annotated[int, typer.Option(min=0, help="Number of steps before the trace begins.")] = 50,
    profile_steps: Annotated[int, typer.Option(min=1, max=1000, help="Number of steps to trace.")] = 20,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="With --profile: mark these steps for Nsight Systems instead of tracing them.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to draw charts to.")] = None,
) -> None:
    """Load-test a server: time to first token, time per token, rates, and goodput.

    Limits, lengths and arrival times are the same for every server, so that reports are comparable.
    """
    try:
        from headway.bench.serve.client import Client
    except ImportError as error:
        raise ConfigError("headway bench serve", "its libraries", str(error), "pip install 'headway[serve]'") from error
    from headway.bench.serve.load import Load, limits_of, parse_mix
    from headway.bench.serve.results import draw, print_report
    from headway.bench.serve.run import Sending, ServePlan
    from headway.hosting.profiling import ProfileRequest

    if endpoint not in ("completions", "chat"):
        raise ConfigError("--endpoint", "completions or chat", repr(endpoint))
    chosen = names_of(modes) or []
    if not chosen or not set(chosen) <= set(_MODES):
        raise ConfigError("--modes", f"some of {', '.join(_MODES)}", repr(modes))
    limits, rates = limits_of(goodput), _rates(rate)
    plans = [ServePlan("online", each, burstiness, max_concurrency) for each in rates] if "online" in chosen else []
    plans += [ServePlan(mode, max_concurrency=max_concurrency) for mode in ("offline", "naive") if mode in chosen]
    load = Load(num_requests, parse_mix(mix), shared_prefix, num_prefixes, turns, vocab_size, seed)
    client = Client(url, api_key, timeout)
    name = model or client.run(client.model())
    sending = Sending(name, endpoint, temperature)  # type: ignore[arg-type]
    asked = ProfileRequest(skip_steps=profile_skip, num_steps=profile_steps, nvtx=nvtx) if profile else None
    report = _run(client, url, load, num_naive, plans, sending, limits, asked)
    print_report(report, Console())
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    write_result(report, output, err)
    for path in draw(report, plots) if plots is not None else ():
        err.print(f"drawn to {path}")
    if not any(cell.completed for cell in report.cells):
        raise ConfigError("--url", "a server that answers", "no request was answered")


def _run(
    client: Client,
    url: str,
    load: Load,
    num_naive: int,
    plans: list[ServePlan],
    sending: Sending,
    limits: dict[str, float],
    profile: ProfileRequest | None,
) -> ServeReport:
    from dataclasses import replace

    from headway.bench.serve.results import ServeReport, begin, end
    from headway.bench.serve.run import run_cell
    from headway.core.system.provenance import Origin, command_line
    from headway.tuning.measure.device import crowding

    cells, busy = [], crowding()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for plan in plans:
            own = replace(load, num_requests=min(load.num_requests, num_naive)) if plan.mode == "naive" else load
            what = plan.mode if plan.mode != "online" else f"online, {plan.rate:g}/s"
            task = progress.add_task(what, total=own.num_requests * own.turns)
            if profile is not None:
                client.run(begin(client, profile))
            cells.append(
                client.run(run_cell(client, own, plan, sending, limits, lambda task=task: progress.update(task, advance=1)))  # type: ignore[misc]
            )
            if profile is not None:
                cells[-1].profile = client.run(end(client))
    sent = {
        "conversations": str(load.num_requests),
        "tokens in/out": ",".join(map(str, load.mix)),
        "shared prefix": f"{load.num_prefixes} x {load.shared_prefix}" if load.shared_prefix else "none",
        "turns": str(load.turns),
        "burstiness": f"{plans[0].burstiness:g}",
        "seed": str(load.seed),
    }
    return ServeReport(
        command=command_line(),
        origin=Origin.here(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        busy=busy or crowding(),
        url=url,
        model=sending.model,
        endpoint=sending.endpoint,
        load=sent,
        limits_ms=limits,
        cells=cells,
    )


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in names_of(text) or ()]
    except ValueError:
        rates = []
    if not rates or not all(0 < each < math.inf for each in rates):
        raise ConfigError("--rate", "requests per second, such as 4 or 1,2,4", repr(text))
    return rates
