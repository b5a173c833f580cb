"""`python -m headway.bench.studies.plan check|fit|measure`: accuracy of `headway plan`.

check predicts all end-to-end generations in bench/results/h200 and the latencies at two arrival rates. fit chooses the parameters
of `headway.plan.devices` from half of these times. measure times generations on this machine's GPU and compares them with
predictions.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich import box
from rich.table import Table

from headway.bench.studies.command import run_study
from headway.bench.studies.plan_points import (
    MeasuredPoint,
    Metric,
    errors,
    fit_all,
    halves,
    kernel_cells,
    kernel_errors,
    measured_points,
    predict,
    weight_points,
)
from headway.core.contract.errors import ConfigError
from headway.core.sampling.params import SamplingParams
from headway.core.system.json_files import write_bytes
from headway.core.system.provenance import Origin, command_line
from headway.core.system.terminal import Terminal
from headway.llm import LLM
from headway.plan.devices import GPU_KINDS, H200, Utilisation

if TYPE_CHECKING:
    from headway.outputs import RequestOutput

_WIDTH = 100


def plan(
    what: Annotated[str, typer.Argument(help="Task: check, fit or measure.")] = "check",
    models: Annotated[str, typer.Option(help="Shapes to measure, comma-separated.")] = "qwen3-0.6b,llama-3-8b,qwen3-30b-a3b",
    batch_sizes: Annotated[
        str, typer.Option(help="Numbers of concurrent requests to measure, comma-separated.")
    ] = "1,8,16,64,128",
    lengths: Annotated[
        str, typer.Option(help="Input/output tokens per request to measure, comma-separated.")
    ] = "512/256,2048/256",
    kv_cache_dtypes: Annotated[str, typer.Option(help="KV cache types to measure, comma-separated.")] = "auto,fp8_e4m3",
    output: Annotated[Path | None, typer.Option(help="Write measurements and predictions to this JSON file.")] = None,
) -> None:
    """Check or fit predictions, or measure new points."""
    from headway.bench.studies.plan_points import arrivals

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
        points = measure(models.split(","), batch_sizes.split(","), lengths.split(","), kv_cache_dtypes.split(","), console.print)
        _show(points, H200, console, "measured here")
        if output is not None:
            _write(points, H200, output)
    else:
        raise ConfigError("WHAT", "check, fit or measure", repr(what))


def _show(points: Sequence[MeasuredPoint], reached: Utilisation, console: Terminal, title: str) -> None:
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
    found = {
        "schema": "headway.plan-study/1",
        "command": command_line("python", "-m", "headway.bench.studies.plan"),
        "origin": Origin.here().model_dump(),
        "utilisation": asdict(reached),
        "points": [{**asdict(point), "predicted": predict(point, reached)} for point in points],
    }
    write_bytes(json.dumps(found, indent=1).encode(), path)


_PASSES = 3


def measure(
    models: Sequence[str],
    batch_sizes: Sequence[str],
    lengths: Sequence[str],
    kv_cache_dtypes: Sequence[str],
    report: Callable[[str], None],
) -> list[MeasuredPoint]:
    """Measure every workload of every model: the median of three passes after a warm-up pass.
    :raises ConfigError: if there is no H200, since the tables and utilizations are for an H200.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_name() != GPU_KINDS["h200"].title:
        got = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        raise ConfigError("headway.bench.studies.plan measure", f"an {GPU_KINDS['h200'].title}", got)
    found: list[MeasuredPoint] = []
    for model in models:
        for cache in kv_cache_dtypes:
            llm = LLM(model, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, kv_cache_dtype=cache)
            for batch in map(int, batch_sizes):
                for length in lengths:
                    found += measure_points(llm, model, cache, batch, *map(int, length.split("/")))
                    report(f"{found[-1]}: {found[-1].measured:.3f} {found[-1].metric}")
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    return found


def measure_points(llm: LLM, model: str, cache: str, batch: int, input_len: int, output_len: int) -> list[MeasuredPoint]:
    """Return the time per token and the time to first token of `batch` concurrent requests: medians of three passes after a
    warm-up pass."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    passes = []
    for number in range(_PASSES + 1):
        llm.engine.blocks.forget_prefixes()  # otherwise a pass would get prefix cache hits on the previous pass's prompts
        prompts = _prompts(batch, input_len, llm.model.decoder.vocab_size, seed=number)
        passes.append(llm.generate(prompts, params, use_tqdm=False))
    figures: dict[Metric, float] = {
        "per_token_ms": statistics.median(map(_per_token_ms, passes[1:])),
        "first_token_ms": statistics.median(map(_first_token_ms, passes[1:])),
    }
    return [
        MeasuredPoint(model, None, batch, input_len, output_len, metric, figure, "measured here", cache)
        for metric, figure in figures.items()
    ]


def _prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    drawn: list[list[int]] = torch.randint(3, vocab_size, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def _first_token_ms(outputs: Sequence[RequestOutput]) -> float:
    """Return the mean time to first token over the requests, all of which arrived together."""
    times = [each.metrics for each in outputs if each.metrics is not None]
    begun = min(each.arrival_time for each in times)
    return 1e3 * statistics.mean((each.first_token_time or 0.0) - begun for each in times)


def _per_token_ms(outputs: Sequence[RequestOutput]) -> float:
    """Return the mean time per token after the first token, over the requests."""
    times = [each.metrics for each in outputs if each.metrics is not None]
    counts = [len(each.outputs[0].token_ids) for each in outputs]
    spans = [(each.finished_time or 0.0) - (each.first_token_time or 0.0) for each in times]
    return 1e3 * statistics.mean(span / (count - 1) for span, count in zip(spans, counts, strict=True))


if __name__ == "__main__":
    run_study(plan)
