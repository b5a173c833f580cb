"""`headway bench serve --profile`: has the server look at its steps while a load runs, and shows what it found."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.serve.client import RequestSender
from headway.core.contract.errors import ConfigError
from headway.core.system.json_text import parse_model
from headway.hosting.profiling import ProfileRequest, StepsProfile


async def begin(client: RequestSender, asked: ProfileRequest) -> None:
    """Have the server begin.

    :raises ConfigError: it does not.
    """
    answer = await client.ask("/start_profile", asked.model_dump())
    if answer.error:
        hint = "start it with headway serve --profile-dir FOLDER"
        raise ConfigError("--profile", "a server that answers /start_profile", answer.error, hint)


async def end(client: RequestSender) -> StepsProfile | None:
    """Have the server end its profile; None: another server, which keeps what it has found to itself.

    :raises ConfigError: it does not.
    """
    answer = await client.ask("/stop_profile", {})
    if answer.error:
        raise ConfigError("--profile", "a server that answers /stop_profile", answer.error)
    try:
        return parse_model(answer.text, StepsProfile)
    except ValueError:  # pydantic's is one
        return None


def print_profile(label: str, found: StepsProfile, console: Console) -> None:
    """Where the time of a step went, and what took longest on the device."""
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
        table.add_column("ms a step", justify="right", no_wrap=True)
        for name, ms in found.kernels_ms.items():
            table.add_row(name, f"{ms:.3f}")
        console.print(table)
    console.print(f"trace, on the server's machine: {found.trace}" if found.trace else _why_none(found), soft_wrap=True)


def _why_none(found: StepsProfile) -> str:
    if found.traced_steps:
        return f"no trace was written: {found.traced_steps} steps were marked for Nsight Systems"
    return f"no trace: the {found.steps} steps were fewer than --profile-skip asks to leave out"
