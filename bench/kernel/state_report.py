"""A table of states for people: microseconds, the rate at which a step moves states, and tokens a second of a scan."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.bench.kernel.peaks import DevicePeak
from headway.core.contract.state import KEY_VALUE, StateSpec
from headway.core.oracle.state_cases import gate_shapes
from headway.tuning.table.schema import MeasuredState, StateTable


def step_bytes(spec: StateSpec, batch: int, query_len: int) -> int:
    """Bytes that a step must move: states read once and written after each token, the tokens, the convolution's weights."""
    state = KEY_VALUE.bytes_per_slot(spec)  # as large in every layout
    gates = sum(math.prod(shape) for shape in gate_shapes(spec))
    token = spec.input_channels + spec.out_channels + gates
    weights = spec.conv_channels * (spec.conv_width + 1)
    return batch * (1 + query_len) * state + (batch * query_len * token + weights) * spec.dtype.itemsize


def print_state_report(table: StateTable, spec: StateSpec, peak: DevicePeak, copy_gbps: float, console: Console) -> None:
    """Print the layer, a table of steps and one of scans, and why any cell has no time.

    peak: of the device; where its bandwidth is not known, rates are shares of what a copy was measured at.
    """
    most = peak.gbps or copy_gbps
    of = f"{most:,.0f} GB/s, " + (f"the peak ({peak.source})" if peak.gbps else "what a large copy was measured at")
    console.print(Text(f"{table.device.name}, {table.spec}"), soft_wrap=True)
    for verb, rate in (("step", f"GB/s of states read and written, and share of {of}"), ("scan", "tokens a second")):
        cells = [cell for cell in table.cells if cell.verb == verb and cell.median_us is not None]
        console.print(_table(f"{verb}: median us of one layer, {rate}", cells, spec, most))
    told: dict[str, list[str]] = {}
    for record in table.backends:
        if record.reason:
            told.setdefault(f"{record.name}: {record.reason}", [])
    for cell in table.cells:
        if cell.reason:
            told.setdefault(f"{cell.backend} {cell.status}: {cell.reason}", []).append(f"{cell.verb} {_case(cell)} {cell.layout}")
    if table.busy:
        told.setdefault(f"measured on a busy machine, {table.busy}: times may be too long", [])
    for line, where in told.items():
        console.print(Text(line + f" [{', '.join(where)}]" * bool(where)), soft_wrap=True)


def _case(cell: MeasuredState) -> str:
    return f"{cell.batch}x{cell.query_len}"


def _table(title: str, cells: list[MeasuredState], spec: StateSpec, most: float) -> Table:
    """One row for each cell, the fastest of a case first. most: GB/s of which rates are shares."""
    steps = bool(cells) and cells[0].verb == "step"
    hosts = any(cell.graph or cell.host_us is not None for cell in cells)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("case", "backend", "layout"):
        table.add_column(column, no_wrap=True)
    for column in ("us", *(["host us"] * hosts), *(["GB/s", "share"] if steps else ["tokens/s"]), "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in sorted({cell.point for cell in cells}, key=lambda point: (point[2] if steps else 0, point[1], point[2])):
        rivals = sorted((cell for cell in cells if cell.point == point), key=lambda cell: cell.layer_us or math.inf)
        for number, cell in enumerate(rivals):
            us = cell.median_us or math.inf
            gbps = step_bytes(spec, cell.batch, cell.query_len) / us * 1e-3
            rate = [f"{gbps:,.3g}", f"{gbps / most:.0%}"] if steps else [f"{cell.batch * cell.query_len / us * 1e6:,.0f}"]
            host = ["graph" if cell.graph else "" if cell.host_us is None else f"{cell.host_us:,.1f}"] * hosts
            case = "" if number else _case(cell)
            shown = (case, cell.backend, cell.layout, f"{us:,.1f}", *host, *rate, f"{cell.relative_error:.1e}")
            table.add_row(*shown, style="" if number else "bold green", end_section=cell is rivals[-1])
    return table
