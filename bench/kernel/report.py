"""Result tables of `headway bench kernel`, including states, and comparison of backends with one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.bench.kernel.results import DevicePeak, KernelCell, KernelReport, SlowerCell, SpeedComparison
from headway.core.contract.errors import ConfigError
from headway.core.contract.state import KEY_VALUE, StateSpec
from headway.core.oracle.state_cases import gate_shapes
from headway.tuning.table.noise import MOST_DRIFT
from headway.tuning.table.schema import Cell, CrossoverTable, DeviceInfo, points


def compare(cells: Sequence[KernelCell], than: str, most: float) -> SpeedComparison:
    """Compare every backend's times with the times of `than`, for the same layout and block size if measured, or else with its
    fastest time.

    Unsupported cells are not compared; a wrong result or an error counts as failed.
    """
    found = [
        each for cell in cells if cell.owner == "backend" and cell.backend != than for each in _slower_cells(cell, cells, than)
    ]
    slower = [each for each in found if each.factor is None or each.factor > most]
    return SpeedComparison(than=than, most=most, compared=len(found), slower=slower)


def check_request(most: float | None, than: str | None, phase: str) -> None:
    """Check `--fail-if-slower` and `--than`.
    :raises ConfigError: if only one is given, the factor is invalid, or the phase has no backends."""
    if (most is None) != (than is None):
        given, missing = ("--fail-if-slower", "--than NAME") if than is None else ("--than", "--fail-if-slower FACTOR")
        raise ConfigError(given, f"{missing} beside it", f"{given} alone", "both together say what is too slow")
    if most is not None and not 0 < most < float("inf"):
        raise ConfigError("--fail-if-slower", "a factor above 0, such as 1.1", most)
    if most is not None and phase == "write":
        raise ConfigError("--fail-if-slower", "--phase decode or prefill, which compare backends", "--phase write")


def _slower_cells(cell: KernelCell, cells: Sequence[KernelCell], than: str) -> Iterator[SlowerCell]:
    same = [other for other in cells if other.backend == than and _work(other) == _work(cell) and other.median_us is not None]
    alike = [other for other in same if (other.layout, other.block_size) == (cell.layout, cell.block_size)]
    times = [other.median_us for other in alike or same if other.median_us is not None]
    if cell.status == "unsupported" or not times:
        return
    us = cell.median_us
    yield SlowerCell(
        backend=cell.backend,
        phase=cell.phase,
        case=cell.case,
        geometry=cell.geometry,
        layout=cell.layout,
        block_size=cell.block_size,
        median_us=us,
        than_us=min(times),
        factor=None if us is None else us / min(times),
        reason=cell.reason,
    )


def _work(cell: KernelCell) -> tuple[str, ...]:
    return cell.phase, cell.case, cell.geometry, cell.dtype, cell.kv_dtype


def step_bytes(spec: StateSpec, batch: int, query_len: int) -> int:
    """Return the bytes that a step must move: states read once and written after each token, tokens, and convolution weights."""
    state = KEY_VALUE.bytes_per_slot(spec)  # equal in every layout
    gates = sum(math.prod(shape) for shape in gate_shapes(spec))
    token = spec.input_channels + spec.out_channels + gates
    weights = spec.conv_channels * (spec.conv_width + 1)
    return batch * (1 + query_len) * state + (batch * query_len * token + weights) * spec.dtype.itemsize


def print_state_report(table: CrossoverTable, spec: StateSpec, peak: DevicePeak, copy_gbps: float, console: Console) -> None:
    """Print the layer, tables of steps and scans, and reasons for missing times. peak: peak rates of the device. If the peak
    bandwidth is unknown, rates are given as fractions of the measured copy rate."""
    most = peak.gbps or copy_gbps
    of = f"{most:,.0f} GB/s, " + (f"the peak ({peak.source})" if peak.gbps else "the measured rate of a large copy")
    console.print(Text(f"{table.device.name}, {table.spec}"), soft_wrap=True)
    for verb, rate in (("step", f"GB/s of states read and written, and share of {of}"), ("scan", "tokens per second")):
        cells = [cell for cell in table.cells if cell.phase == verb and cell.median_us is not None]
        console.print(_state_table(f"{verb}: median us of one layer, {rate}", cells, spec, most))
    places: dict[str, list[str]] = {}
    for record in table.kernels:
        if record.reason:
            places.setdefault(f"{record.name}: {record.reason}", [])
    for cell in table.cells:
        if cell.reason:
            places.setdefault(f"{cell.kernel} {cell.status}: {cell.reason}", []).append(
                f"{cell.phase} {_case(cell)} {cell.layout}"
            )
    if table.busy:
        places.setdefault(f"measured on a busy machine, {table.busy}: times may be too long", [])
    for line, where in places.items():
        console.print(Text(line + f" [{', '.join(where)}]" * bool(where)), soft_wrap=True)


def _case(cell: Cell) -> str:
    return f"{cell.batch}x{cell.query_len}"


def _state_table(title: str, cells: list[Cell], spec: StateSpec, most: float) -> Table:
    """Return a table with one row per cell, fastest first for each case. most: GB/s that rates are divided by."""
    steps = bool(cells) and cells[0].phase == "step"
    hosts = any(cell.graph or cell.host_us is not None for cell in cells)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("case", "backend", "layout"):
        table.add_column(column, no_wrap=True)
    for column in ("us", *(["host us"] * hosts), *(["GB/s", "share"] if steps else ["tokens/s"]), "error"):
        table.add_column(column, justify="right", no_wrap=True)
    by_point = sorted(
        points(cells).values(), key=lambda found: (found[0].query_len if steps else 0, found[0].batch, found[0].query_len)
    )
    for found in by_point:
        rivals = sorted(found, key=lambda cell: cell.layer_us or math.inf)
        for number, cell in enumerate(rivals):
            us = cell.median_us or math.inf
            gbps = step_bytes(spec, cell.batch, cell.query_len) / us * 1e-3
            rate = [f"{gbps:,.3g}", f"{gbps / most:.0%}"] if steps else [f"{cell.batch * cell.query_len / us * 1e6:,.0f}"]
            host = ["graph" if cell.graph else "" if cell.host_us is None else f"{cell.host_us:,.1f}"] * hosts
            case = "" if number else _case(cell)
            shown = (case, cell.kernel, cell.layout, f"{us:,.1f}", *host, *rate, f"{cell.relative_error:.1e}")
            table.add_row(*shown, style="" if number else "bold green", end_section=cell is rivals[-1])
    return table


RATE_OF = {
    "decode": "GB/s of K and V read once",
    "prefill": "TFLOP/s of the keys within the causal mask",
    "write": "GB/s read plus written",
}


def print_report(report: KernelReport, console: Console) -> None:
    """Print the device, a table per phase, geometry and dtype, and reasons for missing times."""
    console.print(describe(report.device), highlight=False)
    if report.peak is not None:
        console.print(_peak(report.peak, report.device.matrix_dtype), highlight=False)
    groups: dict[tuple[str, str, str, str], list[KernelCell]] = {}
    for cell in report.cells:
        groups.setdefault((cell.phase, cell.geometry, cell.dtype, cell.kv_dtype), []).append(cell)
    for (phase, geometry, dtype, kv_dtype), cells in groups.items():
        cache = "" if kv_dtype == dtype else f", {kv_dtype} cache"
        limit = "matrix" if phase == "prefill" else "copy"
        shares = f"share of the {limit} rate" + " · of the peak" * any(cell.peak_fraction is not None for cell in cells)
        title = f"{phase}, {geometry}, {dtype}{cache}\nmedian us · {RATE_OF[phase]} · {shares} · relative error"
        console.print(_table(title, cells))
    for line in notes(report):
        console.print(line, highlight=False, markup=False)


def describe(device: DeviceInfo) -> str:
    """Return two lines: the device with its software, and the device's measured limits."""
    parts = [device.name]
    parts += [f"compute capability {device.compute_capability}, {device.sm_count} SMs"] if device.sm_count else []
    parts += [f"{device.threads} thread{'s' if device.threads > 1 else ''}"] if device.threads else []
    parts += [f"driver {device.driver}"] if device.driver else []
    parts += [f"torch {device.torch}", *(f"{name} {version}" for name, version in device.libraries.items() if name != "headway")]
    limits = f"copy {device.copy_gbps:.0f} GB/s read+write, {device.matrix_dtype} GEMM {device.matrix_tflops:.3g} TFLOP/s"
    return f"{', '.join(parts)}\nmeasured limits: {limits}"


def _peak(peak: DevicePeak, dtype: str) -> str:
    """Return a line with the known peaks and the options for unknown ones."""
    known = [f"{peak.gbps:.0f} GB/s"] if peak.gbps is not None else []
    known += [f"{peak.tflops:.3g} TFLOP/s in {dtype}"] if peak.tflops is not None else []
    unknown = [] if peak.gbps is not None else ["--peak-bandwidth GB/s"]
    unknown += [] if peak.tflops is not None else ["--peak-flops TFLOP/s"]
    line = f"peak ({peak.source}): {', '.join(known)}" if known else "peak: no data sheet of this device is known here"
    return f"{line}; {' and '.join(unknown)} would give shares of it" if unknown else line


def notes(report: KernelReport) -> list[str]:
    """Return notes on unavailable contenders, and the reasons for missing times with their cases."""
    absent: dict[str, list[str]] = {}
    for contender in report.contenders:
        if not contender.available:
            absent.setdefault(f"{contender.owner} not here: {contender.reason}", []).append(contender.name)
    lines = [f"{', '.join(names)}: {reason}" for reason, names in absent.items()]
    cases: dict[str, list[str]] = {}
    for cell in report.cells:
        if cell.status != "ok":
            cases.setdefault(f"{cell.label} {cell.status}: {cell.reason}", []).append(cell.case)
    if report.busy:
        lines.append(f"measured on a busy machine, {report.busy}: times may be too long")
    shaken = [cell for cell in report.cells if cell.spread is not None and cell.spread > MOST_DRIFT]
    if shaken:
        worst = max(shaken, key=lambda cell: cell.spread or 0.0)
        lines.append(
            f"runs of the same call spread by more than {MOST_DRIFT:.0%} in {len(shaken)} of {len(report.cells)} cells (most by "
            f"{worst.spread:.0%}: {worst.label}, {worst.case}): the machine was not steady"
        )
    return lines + [f"{reason} [{', '.join(dict.fromkeys(names))}]" for reason, names in cases.items()]


def _table(title: str, cells: Sequence[KernelCell]) -> Table:
    labels = list(dict.fromkeys(cell.label for cell in cells))
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("case", no_wrap=True)
    for label in labels:
        table.add_column(label, justify="right", overflow="fold")
    for case in dict.fromkeys(cell.case for cell in cells):
        row = {cell.label: cell for cell in cells if cell.case == case}
        times = [cell.median_us for cell in row.values() if cell.median_us is not None]
        best = min(times, default=None)
        table.add_row(case, *(_show(row[label], best) if label in row else Text("") for label in labels))
    return table


def _show(cell: KernelCell, best: float | None) -> Text:
    if cell.median_us is None:
        return Text(cell.status, style="red" if cell.status in ("incorrect", "error") else "dim")
    rate = f"{cell.gbps:.0f} GB/s" if cell.gbps is not None else f"{cell.tflops:.3g} TFLOP/s"
    mark = " *" if cell.median_us == best else ""
    text = Text(f"{cell.median_us:.1f} us{mark}", style="bold green" if mark else "")
    peak = "" if cell.peak_fraction is None else f" · {cell.peak_fraction:.0%}"
    text.append(f"\n{rate} {cell.fraction:.0%}{peak}\nerr {cell.relative_error:.1e}", style="not bold default")
    if cell.host_us is not None:
        text.append(f"\nhost {cell.host_us:.0f} us", style="not bold dim")
    return text
