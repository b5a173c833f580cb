"""A result file as tables for people: one row a case, one column a contender, the error next to every time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.bench.kernel.peaks import DevicePeak
from headway.bench.kernel.results import KernelCell, KernelReport
from headway.tuning.table.noise import MOST_DRIFT
from headway.tuning.table.schema import DeviceInfo

RATE_OF = {
    "decode": "GB/s of K and V read once",
    "prefill": "TFLOP/s of the keys that causality shows",
    "write": "GB/s read plus written",
}


def print_report(report: KernelReport, console: Console) -> None:
    """Print the device, a table for each phase, geometry and dtype, and why any cell has no time."""
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
    """Two lines: the device with its software, and its measured limits."""
    parts = [device.name]
    parts += [f"compute capability {device.compute_capability}, {device.sm_count} SMs"] if device.sm_count else []
    parts += [f"{device.threads} thread{'s' if device.threads > 1 else ''}"] if device.threads else []
    parts += [f"driver {device.driver}"] if device.driver else []
    parts += [f"torch {device.torch}", *(f"{name} {version}" for name, version in device.libraries.items() if name != "headway")]
    limits = f"copy {device.copy_gbps:.0f} GB/s read+write, {device.matrix_dtype} product {device.matrix_tflops:.3g} TFLOP/s"
    return f"{', '.join(parts)}\nmeasured limits: {limits}"


def _peak(peak: DevicePeak, dtype: str) -> str:
    """One line: the peaks that are known, and how to give those that are not."""
    known = [f"{peak.gbps:.0f} GB/s"] if peak.gbps is not None else []
    known += [f"{peak.tflops:.3g} TFLOP/s in {dtype}"] if peak.tflops is not None else []
    unknown = [] if peak.gbps is not None else ["--peak-bandwidth GB/s"]
    unknown += [] if peak.tflops is not None else ["--peak-flops TFLOP/s"]
    line = f"peak ({peak.source}): {', '.join(known)}" if known else "peak: no data sheet of this device is known here"
    return f"{line}; {' and '.join(unknown)} would give shares of it" if unknown else line


def notes(report: KernelReport) -> list[str]:
    """Every contender that could not come, and every reason for a cell without a time with the cases it holds for."""
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
