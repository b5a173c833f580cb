"""The result file of offline runs, schema `headway.offline/1`, that of peers' figures, and both as tables."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.kernel.report import describe
from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.tuning.table.noise import MOST_DRIFT
from headway.tuning.table.schema import DeviceInfo


class OfflineCell(BaseModel):
    """One workload. Every figure is of the same pass: that of the median rate among the timed ones (the slower of two)."""

    model_config = ConfigDict(extra="forbid")

    label: str
    num_adapters: int = 0
    """Adapters of random numbers that the requests had in turn; 0: none, as in files of before 2026-11-26."""
    batch_size: int
    """Requests, all sent at once."""
    input_len: int | None
    """None where requests differ; likewise output_len."""
    output_len: int | None
    temperature: float
    prompt_tokens: int
    output_tokens: int
    seconds: float
    """From the first request to the last token."""
    tokens_per_second: float
    """Output tokens over `seconds`."""
    fastest: float
    """Tokens a second of the fastest timed pass; likewise slowest."""
    slowest: float
    time_to_first_token_ms: float
    """Mean over the requests."""
    time_per_output_token_ms: float | None
    """Mean over the requests, of the time after the first token; None where none writes a second."""
    roofline_share: float | None
    """floor_seconds over seconds. None, like the next two, for a model of transformers' code, whose products are not counted."""
    floor_seconds: float | None
    """Least time by headway.bench.generate.roofline, prefill_floor_seconds included."""
    prefill_floor_seconds: float | None
    """Operations of the prompts over the device's matrix rate."""
    num_steps: int
    num_graph_steps: int
    """Steps that were one CUDA graph's replay."""
    steps_in_pieces: dict[str, int] = Field(default_factory=dict)
    """Steps that were graphs' replays with attention launched between them, by reason; empty in files of before 2026-11-22."""
    steps_without_graph: dict[str, int] = Field(default_factory=dict)
    """Steps that were launched kernel by kernel although graphs were in use, by the reason; likewise."""
    compilations: dict[str, int] = Field(default_factory=dict)
    """Kernels that were compiled during the pass, by name; likewise."""
    num_preemptions: int
    host_ms_per_step: float
    """The host's own work, without waiting for the device."""
    host_ms_by_part: dict[str, float] = Field(default_factory=dict)
    """Milliseconds per step of each part of that work, and of the client's ("outputs"), which comes on top; empty in files of
    before 2026-11-23."""
    wait_ms_per_step: float
    """The host blocked on the device."""
    gpu_idle_share: float | None
    """1 - (time in which a kernel or copy ran, a step) / (time of a step), by headway.bench.generate.profile; None on a CPU."""
    steps_by_backend: dict[str, int]


class OfflineReport(ResultFile):
    """One run: an engine built once, and its workloads."""

    schema_: Literal["headway.offline/1"] = Field(default="headway.offline/1", alias="schema")
    command: str
    origin: Origin | None = None
    """The code that made it; None in files of before 2026-11-22."""
    busy: str = ""
    """What other processes took of the CPU when the run began or ended; empty where that was too little to matter."""
    date: str
    """UTC, ISO 8601."""
    model: str
    load_format: str
    dtype: str
    warmup: int
    """Passes before the timed ones, of each workload."""
    repeat: int
    """Timed passes."""
    start_seconds: float
    """Until the engine was ready: weights, self-tests, cache, graphs; the process's imports left out."""
    settings: dict[str, str]
    """Backends by phase, cache and limits, as they came to be."""
    device: DeviceInfo
    read_gbps: float
    """Measured rate of a large sum: what the roofline divides by."""
    cells: list[OfflineCell]


class PeerEngine(BaseModel):
    """Another engine's figures for the same workloads."""

    model_config = ConfigDict(extra="forbid")

    name: str
    version: str
    settings: str
    tokens_per_second: dict[str, float]
    """Label of the workload -> output tokens per second."""
    passes: dict[str, list[float]] = Field(default_factory=dict)
    """Tokens per second of each timed pass, by label; empty where it was not written down."""


class PeersFile(ResultFile):
    """Figures that were measured elsewhere, for reference columns."""

    schema_: Literal["headway.offline-peers/1"] = Field(default="headway.offline-peers/1", alias="schema")
    device: str
    model: str
    date: str
    measured_by: str = ""
    """Who measured, where that was no command of Headway's; empty for a run of `python -m headway.bench.studies.engines`."""
    command: str = ""
    """The command of such a run, as typed."""
    origin: Origin | None = None
    peers: list[PeerEngine]


class Share(BaseModel):
    """Speed as a share of the fastest library's, over the cells of one phase."""

    model_config = ConfigDict(extra="forbid")

    mean: float
    """Geometric, over all cells."""
    lowest: float | None
    """The lowest mean of a geometry; None where it was not written down."""


class KernelShares(BaseModel):
    """One kernel."""

    model_config = ConfigDict(extra="forbid")

    name: str
    decode: Share
    prefill: Share
    extend: Share


class KernelPeersFile(ResultFile):
    """Kernels beside libraries over shapes that no grid of ours holds, measured outside Headway."""

    schema_: Literal["headway.kernel-peers/1"] = Field(default="headway.kernel-peers/1", alias="schema")
    device: str
    date: str
    measured_by: str
    what: str
    cells: dict[str, int]
    """How many of each phase."""
    contenders: list[KernelShares]


COLUMNS = (
    "batch x in/out",
    "tokens/s",
    "spread",
    "of floor",
    "first ms",
    "token ms",
    "host ms",
    "GPU idle",
    "graphs",
)
"""One row for each workload. "spread": half of fastest less slowest. "of floor": the least time over the time it took, the
roofline's share. Times: to the first token, per later token, the host's own work per step.
"graphs": steps that were one graph's replay; notes below the table say what the others were."""
_ROOMY = 90
"""Characters from which the columns need not stand close."""


def print_offline(report: OfflineReport, console: Console) -> None:
    """The device, the settings, and the table."""
    console.print(describe(report.device) + f", read {report.read_gbps:.0f} GB/s", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in report.settings.items()), highlight=False)
    title = (
        f"{report.model} ({report.load_format}), {report.dtype}; median of {report.repeat}; ready in {report.start_seconds:.1f} s"
    )
    roomy = console.width >= _ROOMY
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1) if roomy else 0)
    rows = [row(cell) for cell in report.cells]
    for number, name in enumerate(COLUMNS):
        header = name if roomy or not number else name.replace(" ", "\n")
        table.add_column(header, justify="right" if number else "left", style="" if number else "bold", no_wrap=True)
    for line in rows:
        table.add_row(*line)
    console.print(table)
    for note in notes(report):
        console.print(note, highlight=False)


def _beside_the_base(cell: OfflineCell, base: OfflineCell) -> str:
    """What a cell with adapters is beside the one without, which comes before it."""
    share = cell.tokens_per_second / base.tokens_per_second
    return f"{cell.label}: {share:.3f} of the tokens/s without adapters"


def row(cell: OfflineCell) -> tuple[str, ...]:
    """A cell's figures, in the order of COLUMNS."""
    per_token, idle = cell.time_per_output_token_ms, cell.gpu_idle_share
    spread = (cell.fastest - cell.slowest) / 2 / cell.tokens_per_second
    return (
        cell.label,
        f"{cell.tokens_per_second:,.0f}",
        f"{spread:.1%}" if spread else "",
        "" if cell.roofline_share is None else f"{cell.roofline_share:.0%}",
        f"{cell.time_to_first_token_ms:.0f}",
        "" if per_token is None else f"{per_token:.2f}",
        f"{cell.host_ms_per_step:.2f}",
        "" if idle is None else f"{idle:.0%}",
        f"{cell.num_graph_steps / cell.num_steps:.0%}",
    )


def notes(report: OfflineReport) -> list[str]:
    """What is worth a line beside the table."""
    lines = [f"measured on a busy machine, {report.busy}: rates may be too low"] if report.busy else []
    lines += [
        f"{cell.label}: passes disagree, {cell.slowest:,.0f} to {cell.fastest:,.0f} tokens/s: the machine was not steady"
        for cell in report.cells
        if cell.fastest > (1 + MOST_DRIFT / 2) * cell.slowest
    ]
    lines += [_beside_the_base(cell, before) for before, cell in pairwise(report.cells) if cell.num_adapters]
    for cell in report.cells:
        if cell.host_ms_by_part:
            told = ", ".join(f"{part} {ms:.3f}" for part, ms in cell.host_ms_by_part.items())
            lines.append(f"{cell.label}: host time per step in ms: {told}")
        for what, counted in (
            ("steps with piecewise graphs", cell.steps_in_pieces),
            ("steps without a graph", cell.steps_without_graph),
            ("kernels compiled during the run", cell.compilations),
        ):
            if counted:
                told = ", ".join(f"{reason} ({count})" for reason, count in counted.items())
                lines.append(f"{cell.label}: {sum(counted.values())} {what}: {told}")
    return lines + [
        f"{cell.label}: {cell.num_preemptions} preemptions, for the pool has room for {report.settings['pool_tokens']} tokens"
        for cell in report.cells
        if cell.num_preemptions
    ]


def markdown(report: OfflineReport, peers: PeersFile | None) -> str:
    """Command, device and table; a column of output tokens a second for each peer, the best of a row in bold."""
    device = report.device
    names = [] if peers is None else [f"{peer.name} {peer.version}" for peer in peers.peers]
    lines = [
        f"    {report.command}",
        "",
        f"{report.model} ({report.load_format} weights), {report.dtype}, on {device.name}, driver {device.driver}, torch "
        f"{device.torch}; read {report.read_gbps:.0f} GB/s, {device.matrix_dtype} GEMM {device.matrix_tflops:.3g} TFLOP/s in "
        f"the same run; {report.date[:10]}. Median of {report.repeat}; engine ready after {report.start_seconds:.1f} s. "
        + ", ".join(f"{name} {value}" for name, value in report.settings.items())
        + ".",
        "",
        "| " + " | ".join([*COLUMNS, *names]) + " |",
        "|---" * (len(COLUMNS) + len(names)) + "|",
    ]
    for cell in report.cells:
        theirs = [peer.tokens_per_second.get(cell.label) for peer in (peers.peers if peers else ())]
        best = max([cell.tokens_per_second, *(rate for rate in theirs if rate is not None)])
        label, ours, *rest = row(cell)
        shown = ["" if rate is None else _bold(f"{rate:,.0f}", rate == best) for rate in theirs]
        lines.append("| " + " | ".join([label, _bold(ours, cell.tokens_per_second == best), *rest, *shown]) + " |")
    lines += [line for note in notes(report) for line in ("", f"{note}.")]
    if peers is not None:
        by = f" Measured by {peers.measured_by}." if peers.measured_by else ""
        lines += ["", f"Peers: {peers.model}, on {peers.device}, {peers.date}.{by}", ""]
        lines += [f"- {peer.name} {peer.version}: {peer.settings}" for peer in peers.peers]
    return "\n".join(lines)


def _bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted else text
