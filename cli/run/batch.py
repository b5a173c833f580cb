"""`headway batch`: answer the requests in a file without a server."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.engine_options import takes_engine_options
from headway.cli.options import AdapterModules, ConfigFile, adapters_of
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal
from headway.engine_args import EngineArgs, find_pooling_model, help_texts

if TYPE_CHECKING:
    from headway.async_llm import AsyncLLM
    from headway.pooling.assembly import AsyncPooling
    from headway.server.openai.batches.worker import BatchRun, LineAnswers

BATCH = "Batch"
JOURNAL = ".journal"
"""Suffix of the file that collects answers until the run is complete."""
_LONGEST_LINE = 2**28
_INTERVAL = 0.5  # Seconds between two progress lines


@takes_engine_options(*(name for name in help_texts() if name != "model"))
def batch(
    engine: dict[str, Any],
    file: Annotated[
        Path | None, typer.Argument(help="JSON Lines file in OpenAI's batch format: custom_id, method, url and body per line.")
    ] = None,
    input_file: Annotated[
        Path | None, typer.Option("--input-file", "-i", help="Alternative to the argument FILE.", rich_help_panel=BATCH)
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option("--output-file", "-o", help="File for the answers. Default: FILE.results.jsonl.", rich_help_panel=BATCH),
    ] = None,
    model: Annotated[str, typer.Option("--model", help=help_texts()["model"], rich_help_panel=BATCH)] = "smollm2",
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Model name that the requests use. Repeatable. Default: MODEL.", rich_help_panel=BATCH),
    ] = None,
    lora_modules: AdapterModules = None,
    config: ConfigFile = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of requests to process at a time. Default: twice --max-num-seqs.", rich_help_panel=BATCH
        ),
    ] = None,
) -> None:
    """Answer the requests in FILE, and resume a run that was stopped.

    The output has one answer or one error per request.
    """
    source = input_file or file
    if source is None or (file is not None and input_file is not None):
        raise ConfigError("headway batch", "one file of requests", "none" if source is None else "two: FILE and --input-file")
    output = output_file or source.with_suffix(".results.jsonl")
    with source.open("rb") as requests:
        name = hashlib.file_digest(requests, "sha256").hexdigest()[:32]
    err = Terminal(stderr=True)
    started = time.perf_counter()
    adapters = adapters_of(lora_modules or (), engine["enable_lora"])
    args = EngineArgs.of(**{**engine, "model": model})
    try:
        from headway.server.openai.batches.store import Journal
        from headway.server.openai.batches.worker import BatchRun
    except ImportError as error:
        raise ConfigError("headway batch", "its libraries", str(error), "pip install 'headway[serve]'") from error
    with Journal(output.with_name(output.name + JOURNAL), name) as journal:
        before = journal.num_answered + journal.num_failed
        with err.status(f"loading {model}"):
            llm = _load(args, adapters)
        try:
            answers, most = _answers(llm, tuple(served_model_name or ()) or (model,), adapters, concurrency)
            run = BatchRun(source, journal, answers, most_bytes=_LONGEST_LINE)
            asyncio.run(run.answer_all(most, _progress(err, run, before)))
        finally:
            llm.shutdown()
        journal.write(output)
        journal.path.unlink()
        summary = f"{journal.num_answered} answered, {journal.num_failed} failed"
    again = f", {before} of them by an earlier run" if before else ""
    err.print(
        f"{output}: {summary}{again}, in {time.perf_counter() - started:.1f} s", highlight=False, markup=False, soft_wrap=True
    )
    if journal.num_failed and not journal.num_answered:
        raise typer.Exit(1)


def _load(args: EngineArgs, adapters: Sequence[LoRARequest]) -> AsyncLLM | AsyncPooling:
    """Load the model and its adapters. The engine of a generation model runs in its own process, as under `headway serve`."""

    pooled = find_pooling_model(args)
    if pooled is not None:
        from headway.pooling.assembly import AsyncPooling, PoolingClient, assemble_pooling

        return AsyncPooling(PoolingClient(assemble_pooling(args, pooled)))
    from headway.async_llm import AsyncLLM
    from headway.hosting.host import add_adapter

    llm = AsyncLLM.from_engine_args(args, own_process=sys.platform != "win32")
    try:
        for adapter in adapters:
            add_adapter(llm.host, adapter)
    except BaseException:
        llm.shutdown()
        raise
    return llm


def _answers(
    llm: AsyncLLM | AsyncPooling, names: tuple[str, ...], adapters: Sequence[LoRARequest], concurrency: int | None
) -> tuple[LineAnswers, int]:
    from headway.async_llm import AsyncLLM
    from headway.server.app import create_app
    from headway.server.options import ServerOptions
    from headway.server.pooling import create_pooling_app

    most = concurrency or (2 * llm.facts.max_num_seqs if isinstance(llm, AsyncLLM) else 64)
    options = ServerOptions(
        served_model_names=names, lora_modules=adapters, max_queue=2 * most, max_body_bytes=_LONGEST_LINE, max_stored_responses=0
    )
    app = create_app(llm, options) if isinstance(llm, AsyncLLM) else create_pooling_app(llm, options)
    answers: LineAnswers = app.state.line_answers
    return answers, most


def _progress(err: Terminal, run: BatchRun, before: int) -> Callable[[], None]:
    """Return a function that prints progress at intervals. before: number of lines answered by an earlier run."""
    total, reported_at = run.count(), time.monotonic()
    if before:
        err.print(f"{before} of {total} lines were answered by an earlier run", highlight=False, markup=False)

    def show_progress() -> None:
        nonlocal reported_at
        now = time.monotonic()
        if err.is_terminal and now - reported_at >= _INTERVAL:
            reported_at = now
            done = run.journal.num_answered + run.journal.num_failed
            err.print(f"{done} of {total} lines", end="\r", highlight=False, markup=False)

    return show_progress
