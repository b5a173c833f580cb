"""A result file of offline runs as a table: on a terminal, and in the documentation beside peers' figures."""

from __future__ import annotations

from itertools import pairwise

from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.generate.results import OfflineCell, OfflineReport, PeersFile
from headway.bench.kernel.report import describe
from headway.tuning.table.noise import MOST_DRIFT

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
            ("steps in pieces of graphs", cell.steps_in_pieces),
            ("steps launched kernel by kernel", cell.steps_without_graph),
            ("kernels compiled while it ran", cell.compilations),
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
        f"{device.torch}; read {report.read_gbps:.0f} GB/s, {device.matrix_dtype} product {device.matrix_tflops:.3g} TFLOP/s in "
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
        told = "; ".join(f"{peer.name} {peer.version}: {peer.settings}" for peer in peers.peers)
        by = f" Measured by {peers.measured_by}." if peers.measured_by else ""
        lines += ["", f"Peers: {peers.model}, on {peers.device}, {peers.date}. {told}.{by}"]
    return "\n".join(lines)


def _bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted else text
