"""`headway bench throughput`: speed on real prompts, optionally compared with another engine, or on random tokens of any batch
size and length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headway.cli.engine_options import takes_engine_options
from headway.cli.options import write_result
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal
from headway.engine_args import help_texts

if TYPE_CHECKING:
    from headway.bench.generate.run import OfflineOptions
    from headway.bench.generate.throughput import TextWorkload, ThroughputReport
    from headway.bench.generate.workloads import RequestSet

MIN_SAME_TOKENS = 0.9
"""Minimum fraction of equal tokens at which two engines count as having done the same work. Near-ties in float32 may flip
tokens."""
TEXT_OUTPUT_LEN = 64


@takes_engine_options(*(name for name in help_texts() if name not in ("workload", "seed", "skip_tokenizer_init")))
def throughput(
    engine: dict[str, Any],
    compare: Annotated[str | None, typer.Option(help="Other engine to run on the same texts: transformers.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of texts, all sent at once.")] = 16,
    workload: Annotated[
        str | None, typer.Option(help="Named workload: nano (256 random prompts, as in nano-vllm's benchmark).")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Number of random prompts sent at once: N, or a list such as 1,16,64.")
    ] = None,
    input_len: Annotated[str | None, typer.Option(help="Number of tokens per random prompt: N, or a list.")] = None,
    output_len: Annotated[
        str | None,
        typer.Option(
            help="Number of tokens to generate per prompt: N, or a list parallel to --input-len. Default: 64, or --input-len."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature for random prompts. 0 means greedy. Default: 0, or 0.6 for nano.")
    ] = None,
    lora: Annotated[
        int,
        typer.Option(
            min=0,
            help="With random prompts: number of random LoRA adapters to use in turn. Passes without adapters are timed too.",
        ),
    ] = 0,
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of the random LoRA adapters.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Number of timed passes after warm-up; the median is reported.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="With random prompts: number of untimed warm-up passes.")] = 1,
    profile: Annotated[
        Path | None, typer.Option(help="With random prompts: write a Chrome trace of steps from the middle to this file.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> None:
    """Time end-to-end generation: tokens per second and latency of tokens.

    Without --workload and --batch-size, the prompts are texts.
    """
    from headway.bench.generate.run import OfflineOptions
    from headway.bench.generate.throughput import TextWorkload
    from headway.bench.generate.workloads import parse_sizes

    model = engine.pop("model")
    workloads = _workloads(workload, batch_size, input_len, output_len, temperature)
    _check(compare, engine["load_format"], profile, temperature, workloads)
    if lora:
        _set_adapters(engine, lora, lora_rank, workloads)
    if workloads:
        options = OfflineOptions(repeat, warmup, lora, profile, engine["tensor_parallel_size"])
        _run_offline(model, engine, workloads, options, output)
    else:
        (size,) = parse_sizes("--output-len", output_len or str(TEXT_OUTPUT_LEN))[:1]
        _run_texts(model, engine, TextWorkload(num_prompts, size, repeat), compare is not None, output)


def _workloads(
    workload: str | None, batch_size: str | None, input_len: str | None, output_len: str | None, temperature: float | None
) -> list[RequestSet]:
    """Return the random workloads that the options describe. An empty list means texts."""
    from headway.bench.generate.workloads import Nano, parse_sizes, random_workloads

    if workload not in (None, "nano"):
        raise ConfigError("--workload", "nano", repr(workload))
    if workload is not None:
        if batch_size or input_len or output_len:
            raise ConfigError("--workload", "no --batch-size, --input-len or --output-len beside it", "both", "nano sets its own")
        return [Nano() if temperature is None else Nano(temperature)]
    if batch_size is None and input_len is None:
        if output_len is not None and (len(sizes := parse_sizes("--output-len", output_len)) > 1 or sizes[0] < 2):
            raise ConfigError(
                "--output-len", "one number of at least 2 for texts", repr(output_len), "add --batch-size for a list"
            )
        return []
    if batch_size is None or input_len is None:
        raise ConfigError("--batch-size and --input-len", "both", "one of them")
    return random_workloads(batch_size, input_len, output_len, temperature or 0.0)


def _check(
    compare: str | None, load_format: str, profile: Path | None, temperature: float | None, workloads: Sequence[RequestSet]
) -> None:
    if compare not in (None, "transformers"):
        raise ConfigError("--compare", "transformers", repr(compare))
    if compare is not None and (workloads or load_format == "dummy"):
        got = "random ones" if workloads else "random weights"
        raise ConfigError("--compare", "texts and a checkpoint", got, "leave --workload, --batch-size and --load-format out")
    if profile is not None and len(workloads) != 1:
        need = "one random workload, such as --batch-size 16 --input-len 512"
        raise ConfigError("--profile", need, f"{len(workloads)} of them")
    if temperature is not None and not workloads:
        raise ConfigError("--temperature", "random prompts", "texts, which are greedy", "add --batch-size and --input-len")


def _set_adapters(engine: dict[str, Any], count: int, rank: int, workloads: Sequence[RequestSet]) -> None:
    if not workloads:
        raise ConfigError("--lora", "random prompts", "texts", "add --batch-size and --input-len")
    slots = max(engine["max_loras"], count)
    engine.update(enable_lora=True, max_loras=slots, max_lora_rank=rank, max_cpu_loras=max(engine["max_cpu_loras"] or 0, slots))


def _run_offline(
    model: str, engine: dict[str, Any], workloads: Sequence[RequestSet], options: OfflineOptions, output: Path | None
) -> None:
    from headway.bench.generate.results import print_offline
    from headway.bench.generate.run import run_offline
    from headway.core.system.provenance import command_line
    from headway.llm import LLM

    err = Terminal(stderr=True)
    engine["max_model_len"] = engine["max_model_len"] or max(each.max_len for each in workloads)
    started = time.perf_counter()
    with err.status(f"loading {model}"):
        llm = LLM(**{**engine, "model": model, "skip_tokenizer_init": True})
    ready = time.perf_counter() - started
    with _progress(err, len(workloads) * (options.warmup + options.repeat) * (2 if options.adapters else 1)) as advance:
        report = run_offline(
            llm,
            workloads,
            options,
            load_format=engine["load_format"],
            start_seconds=ready,
            command=command_line(),
            advance=advance,
        )
    print_offline(report, Terminal())
    write_result(report, output, err)
    if options.trace is not None:
        err.print(f"trace written to {options.trace}", highlight=False)


def _run_texts(model: str, engine: dict[str, Any], workload: TextWorkload, compare: bool, output: Path | None) -> None:
    from headway.bench.generate.throughput import num_passes, run_throughput
    from headway.core.system.provenance import command_line
    from headway.llm import LLM

    err = Terminal(stderr=True)
    with err.status(f"loading {model}"):
        llm = LLM(**{**engine, "model": model})
    if llm.tokenizer is None:
        hint = "--batch-size and --input-len send random tokens"
        raise ConfigError("--model", "a tokenizer, to read texts", f"{model}, loaded without a tokenizer", hint)
    with _progress(err, num_passes(workload, compare)) as advance:
        report = run_throughput(llm, workload, compare, command_line(), advance)
    print_report(report)
    write_result(report, output, err)
    same = report.results[-1].same_tokens
    if same is not None and same < MIN_SAME_TOKENS:
        raise ConfigError("--compare", f"engines that write the same tokens (at least {MIN_SAME_TOKENS:.0%})", f"{same:.0%}")


@contextmanager
def _progress(err: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr; yield a function to call with a name after each pass."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda name: progress.update(task, advance=1, description=f"generated: {name}")


def print_report(report: ThroughputReport) -> None:
    """Print the table of results. "same" is the fraction of equal tokens."""
    device = report.device
    threads = f", {device.threads} threads" if device.threads else ""
    title = (
        f"{report.model}, {report.dtype}, {report.num_prompts} prompts ({report.prompt_tokens} tokens) x {report.output_len} new "
        f"tokens, greedy; {device.name}{threads}, torch {device.torch}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("engine", style="bold", no_wrap=True)
    for column in ("tokens/s", "range", "first ms", "token ms", "same", "speed"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in report.results:
        spread = f"{result.slowest:.1f}-{result.fastest:.1f}"
        same = "" if result.same_tokens is None else f"{result.same_tokens:.1%}"
        speed = f"{result.tokens_per_second / report.results[-1].tokens_per_second:.2f}x"
        first, per_token = f"{result.time_to_first_token_ms:.0f}", f"{result.time_per_output_token_ms:.1f}"
        table.add_row(result.engine, f"{result.tokens_per_second:.1f}", spread, first, per_token, same, speed)
    console = Terminal()
    console.print(table)
    for line in text_notes(report):
        console.print(line, highlight=False)


def text_notes(report: ThroughputReport) -> list[str]:
    """Return notes for the report if the machine was busy or the times of an engine's passes disagree."""
    from headway.tuning.table.noise import MOST_DRIFT

    lines = [f"measured on a busy machine, {report.busy}: rates may be too low"] if report.busy else []
    return lines + [
        f"{result.engine}: passes disagree, {result.slowest:.1f} to {result.fastest:.1f} tokens/s: the machine was not steady"
        for result in report.results
        if result.fastest > (1 + MOST_DRIFT / 2) * result.slowest
    ]
