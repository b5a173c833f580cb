"""Result file of offline runs, schema `headway.offline/1`, files of peers' results, and their tables."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Results of one workload, all from the timed pass with the median rate (for two passes, the slower pass)."""

    model_config = ConfigDict(extra="forbid")

    label: str
    num_adapters: int = 0
    """Number of random adapters that the requests used in rotation. 0 means none, as in files from before 2026-11-26."""
    batch_size: int
    """Number of requests, all sent at once."""
    input_len: int | None
    """Length of each prompt. None if the prompts differ in length; the same applies to output_len."""
    output_len: int | None
    temperature: float
    prompt_tokens: int
    output_tokens: int
    seconds: float
    """Seconds from the first request to the last token."""
    tokens_per_second: float
    """Number of output tokens divided by `seconds`."""
    fastest: float
    """Tokens per second of the fastest timed pass. `slowest` is the rate of the slowest pass."""
    slowest: float
    time_to_first_token_ms: float
    """Mean time to first token over the requests, in milliseconds."""
    time_per_output_token_ms: float | None
    """Mean over the requests of the time per token after the first. None if no request has two tokens."""
    roofline_share: float | None
    """Ratio floor_seconds / seconds. This and the next two fields are None for transformers implementations, whose GEMMs are not
    counted."""
    floor_seconds: float | None
    """Minimum seconds according to headway.bench.generate.roofline, including prefill_floor_seconds."""
    prefill_floor_seconds: float | None
    """Minimum seconds of the prompts: their operations divided by the device's matrix rate."""
    num_steps: int
    num_graph_steps: int
    """Number of steps that replayed one CUDA graph."""
    steps_in_pieces: dict[str, int] = Field(default_factory=dict)
    """Reason -> number of steps with piecewise CUDA graphs; empty in files from before 2026-11-22."""
    steps_without_graph: dict[str, int] = Field(default_factory=dict)
    """Reason -> number of steps without a CUDA graph while graphs were enabled; empty in files from before 2026-11-22."""
    compilations: dict[str, int] = Field(default_factory=dict)
    """Kernel's name -> number of compilations during the pass; empty in files from before 2026-11-22."""
    num_preemptions: int
    host_ms_per_step: float
    """Host time per step in milliseconds, without waiting for the device."""
    host_ms_by_part: dict[str, float] = Field(default_factory=dict)
    """Part of the host time -> milliseconds per step. The client's part ("outputs") is additional to the host time. Empty in
    files from before 2026-11-23."""
    wait_ms_per_step: float
    """Time per step, in milliseconds, during which the host waits for the device."""
    gpu_idle_share: float | None
    """1 - (kernel and copy time per step) / (step time), as measured by headway.bench.generate.profile. None on a CPU."""
    steps_by_backend: dict[str, int]


class OfflineReport(ResultFile):
    """One run: an engine, built once, and its workloads."""

    schema_: Literal["headway.offline/1"] = Field(default="headway.offline/1", alias="schema")
    command: str
    origin: Origin | None = None
    """The code that wrote the file. None in files from before 2026-11-22."""
    busy: str = ""
    """CPU load of other processes at the start or end of the run; empty if negligible."""
    date: str
    """Date and time of the run: UTC, ISO 8601."""
    model: str
    load_format: str
    dtype: str
    warmup: int
    """Number of untimed passes of each workload."""
    repeat: int
    """Number of timed passes."""
    start_seconds: float
    """Seconds until the engine was ready (weights, self-tests, cache, graphs), without imports."""
    settings: dict[str, str]
    """Name -> value of settings in effect: backends by phase, cache and limits."""
    device: DeviceInfo
    read_gbps: float
    """Measured read rate of a large sum, used by the roofline."""
    cells: list[OfflineCell]


class PeerEngine(BaseModel):
    """Another engine's results for the same workloads."""

    model_config = ConfigDict(extra="forbid")

    name: str
    version: str
    settings: str
    tokens_per_second: dict[str, float]
    """Workload label -> output tokens per second."""
    passes: dict[str, list[float]] = Field(default_factory=dict)
    """Workload label -> tokens per second of each timed pass; empty if not recorded."""


class PeersFile(ResultFile):
    """Results measured elsewhere, for reference columns."""

    schema_: Literal["headway.offline-peers/1"] = Field(default="headway.offline-peers/1", alias="schema")
    device: str
    model: str
    date: str
    measured_by: str = ""
    """Source of the results if not a command of Headway; empty for `python -m headway.bench.studies.engines`."""
    command: str = ""
    """Command of the run that measured the results, as typed."""
    origin: Origin | None = None
    peers: list[PeerEngine]


class Share(BaseModel):
    """Speed relative to the fastest library, over the cells of one phase."""

    model_config = ConfigDict(extra="forbid")

    mean: float
    """Geometric mean over all cells."""
    lowest: float | None
    """Lowest of the geometric means over the cells of one model geometry. None if not recorded."""


class KernelShares(BaseModel):
    """Results of one kernel, compared with libraries."""

    model_config = ConfigDict(extra="forbid")

    name: str
    decode: Share
    prefill: Share
    extend: Share


class KernelPeersFile(ResultFile):
    """Comparison of kernels with libraries for shapes outside Headway's grids, measured outside Headway."""

    schema_: Literal["headway.kernel-peers/1"] = Field(default="headway.kernel-peers/1", alias="schema")
    device: str
    date: str
    measured_by: str
    what: str
    cells: dict[str, int]
    """Phase -> number of cells."""
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
"""Columns of the table, which has one row per workload. "spread": half of fastest minus slowest, divided by the median rate. "of
floor": minimum time of the roofline divided by the measured time. The times are: to first token, per later token, and host time
per step. "graphs": fraction of steps that replayed one graph; notes below the table explain the other steps."""
_ROOMY = 90
"""Minimum console width, in characters, for wide columns."""


def print_offline(report: OfflineReport, console: Console) -> None:
    """Print the device, the settings and the table of results."""
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


def _compared_with_base(cell: OfflineCell, base: OfflineCell) -> str:
    """Return a cell's speed with adapters relative to the preceding cell, which has no adapters."""
    share = cell.tokens_per_second / base.tokens_per_second
    return f"{cell.label}: {share:.3f} of the tokens/s without adapters"


def row(cell: OfflineCell) -> tuple[str, ...]:
    """Return a cell's values, in the order of COLUMNS."""
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
    """Return notes below the table."""
    lines = [f"measured on a busy machine, {report.busy}: rates may be too low"] if report.busy else []
    lines += [
        f"{cell.label}: passes disagree, {cell.slowest:,.0f} to {cell.fastest:,.0f} tokens/s: the machine was not steady"
        for cell in report.cells
        if cell.fastest > (1 + MOST_DRIFT / 2) * cell.slowest
    ]
    lines += [_compared_with_base(cell, before) for before, cell in pairwise(report.cells) if cell.num_adapters]
    for cell in report.cells:
        if cell.host_ms_by_part:
            reported = ", ".join(f"{part} {ms:.3f}" for part, ms in cell.host_ms_by_part.items())
            lines.append(f"{cell.label}: host time per step in ms: {reported}")
        for what, counted in (
            ("steps with piecewise CUDA graphs", cell.steps_in_pieces),
            ("steps without a CUDA graph", cell.steps_without_graph),
            ("kernels compiled while it ran", cell.compilations),
        ):
            if counted:
                reported = ", ".join(f"{reason} ({count})" for reason, count in counted.items())
                lines.append(f"{cell.label}: {sum(counted.values())} {what}: {reported}")
    return lines + [
        f"{cell.label}: {cell.num_preemptions} preemptions, because the pool has room for {report.settings['pool_tokens']} tokens"
        for cell in report.cells
        if cell.num_preemptions
    ]


def markdown(report: OfflineReport, peers: PeersFile | None) -> str:
    """Return the command, the device and the table. Each peer has a column of output tokens per second; the best value of a row
    is bold."""
    device = report.device
    names = [] if peers is None else [f"{peer.name} {peer.version}" for peer in peers.peers]
    lines = [
        f"    {report.command}",
        "",
        f"{report.model} ({report.load_format} weights) in {report.dtype} on {device.name}, driver {device.driver}, torch "
        f"{device.torch}, {report.date[:10]}. In the same run, reads reached {report.read_gbps:.0f} GB/s and a "
        f"{device.matrix_dtype} GEMM {device.matrix_tflops:.3g} TFLOP/s. {_passes(report.repeat)}; the engine was ready after "
        f"{report.start_seconds:.1f} s. {_in_words(report.settings)}",
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
        by = f", by {peers.measured_by}" if peers.measured_by else ""
        lines += ["", f"The peers were measured on {peers.device} on {peers.date} ({peers.model}){by}.", ""]
        lines += [f"- {peer.name} {peer.version}: {peer.settings}" for peer in peers.peers]
    return "\n".join(lines)


def _passes(repeat: int) -> str:
    return f"The values are medians of {repeat} passes" if repeat > 1 else "The values are from one pass"


def _in_words(settings: Mapping[str, str]) -> str:
    """Return the settings in sentences: name=value pairs, then the tokenizer and the prefix cache."""
    named = dict(settings)
    tokenizer, cache = named.pop("tokenizer", None), named.pop("prefix_cache", None)
    facts = [f"{'No' if tokenizer == 'no' else 'A'} tokenizer was loaded"] if tokenizer else []
    facts += [f"the prefix cache was {cache}"] if cache else []
    about = f" {', and '.join(facts)}." if facts else ""
    return f"Settings: {', '.join(f'{name}={value}' for name, value in named.items())}.{about}"


def _bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted else text
