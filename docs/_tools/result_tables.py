"""Result files as Markdown tables between markers of a document, so that no result is typed by hand.

    python docs/_tools/result_tables.py docs/benchmarks.md docs/benchmarks/*.md

A marker is `<!-- kernel FILE PHASE GEOMETRY -->`, `<!-- shares FILE -->`, `<!-- throughput FILE [PEERS] -->`, `<!-- ranks FILE
-->` or `<!-- crossover FILE -->`; its table ends at `<!-- end -->`. The files are relative to the working folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Protocol

from headway.bench.crossover.report import to_section, view
from headway.bench.generate.results import OfflineReport, PeersFile, markdown
from headway.bench.kernel.results import KernelCell, KernelReport
from headway.bench.studies.ranks_report import RanksReport
from headway.bench.studies.ranks_report import markdown as ranks_markdown
from headway.core.system.files import write_whole
from headway.core.system.provenance import Origin
from headway.tuning.table.files import read_table

_BLOCK = re.compile(r"(<!-- kernel (\S+) (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SHARES = re.compile(r"(<!-- shares (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CROSSOVER = re.compile(r"(<!-- crossover (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_RANKS = re.compile(r"(<!-- ranks (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OFFLINE = re.compile(r"(<!-- throughput (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str, read: Callable[[Path], KernelReport] = KernelReport.read) -> str:
    """Return the document with every marked table rendered again from its file.

    :raises ConfigError: if a file is missing or is not a result file.
    """

    files: list[_Result] = [read(Path(match[2])) for marker in (_BLOCK, _SHARES) for match in marker.finditer(text)]
    files += [OfflineReport.read(Path(match[2])) for match in _OFFLINE.finditer(text)]
    files += [read_table(Path(match[2])) for match in _CROSSOVER.finditer(text)]
    files += [RanksReport.read(Path(match[2])) for match in _RANKS.finditer(text)]
    newest = max(files, key=lambda file: file.date, default=None)

    def table(match: re.Match[str]) -> str:
        report = read(Path(match[2]))
        cells = [cell for cell in report.cells if (cell.phase, cell.geometry) == (match[3], match[4])]
        about = f"{_device(report)} {made_by(report, newest)}"
        return f"{match[1]}\n```console\n$ {command_today(report.command)}\n```\n\n{about}\n\n{_table(cells)}\n{match[5]}"

    def shares(match: re.Match[str]) -> str:
        report = read(Path(match[2]))
        about = f"{_device(report)} {made_by(report, newest)}"
        command = f"```console\n$ {command_today(report.command)}\n```"
        return f"{match[1]}\n{command}\n\n{about}\n\n{shares_of_fastest(report.cells)}\n{match[3]}"

    def offline(match: re.Match[str]) -> str:
        peers = PeersFile.read(Path(match[3])) if match[3] else None
        report = OfflineReport.read(Path(match[2]))
        return f"{match[1]}\n{made_by(report, newest)}\n\n{markdown(report, peers)}\n{match[4]}"

    def crossover(match: re.Match[str]) -> str:
        report = read_table(Path(match[2]))
        return f"{match[1]}\n{made_by(report, newest)}\n\n{to_section(view(report))}\n{match[3]}"

    def ranks(match: re.Match[str]) -> str:
        report = RanksReport.read(Path(match[2]))
        return f"{match[1]}\n{report.device}. {made_by(report, newest)}\n\n{ranks_markdown(report)}\n{match[3]}"

    text = _RANKS.sub(ranks, text)
    return _CROSSOVER.sub(crossover, _OFFLINE.sub(offline, _SHARES.sub(shares, _BLOCK.sub(table, text))))


def command_today(command: str) -> str:
    """Return today's form of a recorded command; `headway bench kernel` also timed other libraries until 2026-11-23."""
    before = "headway bench kernel "
    if not command.startswith(before) or "--phase write" in command:
        return command
    alone = command.replace("--no-peers ", "")
    return alone if alone != command else "python -m headway.bench.studies.kernel_peers " + command.removeprefix(before)


class _Result(Protocol):
    """Common fields of all result files."""

    @property
    def date(self) -> str:
        """Date in UTC, ISO 8601."""

    @property
    def origin(self) -> Origin | None:
        """Version of the code that made it; None in files without one."""


def made_by(report: _Result, newest: _Result | None) -> str:
    """Return the code version of a file in words, and whether the newest file on the page has another."""
    day = report.date[:10]
    unknown = f"Measured on {day}, before result files recorded their commit."
    who = f"Measured by {in_words([report.origin])} on {day}." if report.origin else unknown
    if newest is None or newest.origin is None or (report.origin and report.origin.commit == newest.origin.commit):
        return who
    latest = f"{newest.date[:10]} ({in_words([newest.origin])})"
    return f"{who} **Older than the newest results on this page**, which are from {latest}."


def in_words(origins: Sequence[Origin]) -> str:
    """Return versions of the code in words, such as "Headway at commits 1a2b3c and 4d5e6f"."""
    commits: dict[str, list[str]] = {}
    for text in dict.fromkeys(map(str, origins)):
        name, _, commit = text.replace("headway", "Headway", 1).partition(", commit ")
        commits.setdefault(name, []).extend([commit] if commit else [])
    parts = []
    for name, some in commits.items():
        known = " and ".join(filter(None, [", ".join(some[:-1]), *some[-1:]]))
        parts.append(f"{name} at commit{'s' if some[1:] else ''} {known}" if known else name)
    return " and ".join(parts)


def _device(report: KernelReport) -> str:
    device = report.device
    software = [
        f"torch {device.torch}",
        *(f"{name} {version}" for name, version in device.libraries.items() if name != "headway"),
    ]
    rates = f"a copy reached {device.copy_gbps:.0f} GB/s and a {device.matrix_dtype} GEMM {device.matrix_tflops:.0f} TFLOP/s"
    return f"{device.name}, driver {device.driver}, {', '.join(software)}. In the same run, {rates}."


def _table(cells: list[KernelCell]) -> str:
    labels = list(dict.fromkeys(cell.label for cell in cells))
    lines = ["| case | " + " | ".join(labels) + " |", "|---" * (len(labels) + 1) + "|"]
    for case in dict.fromkeys(cell.case for cell in cells):
        row = {cell.label: cell for cell in cells if cell.case == case}
        best = min((cell.median_us for cell in row.values() if cell.median_us is not None), default=None)
        lines.append(f"| {case} | " + " | ".join(_show(row.get(label), best) for label in labels) + " |")
    return "\n".join(lines)


def shares_of_fastest(cells: Sequence[KernelCell]) -> str:
    """Return each contender's speed relative to the fastest library in the same cell, as geometric means per geometry and
    overall.

    A cell is one case of one geometry. A contender without a time there (such as after an error) is left out of it; the column
    `cells` gives the number of cells in which it was timed. A value above 1 is faster than every library.
    """
    times: dict[tuple[str, str], dict[str, float]] = {}
    libraries = {cell.label for cell in cells if cell.owner == "peer"}
    for cell in cells:
        if cell.median_us is not None:
            times.setdefault((cell.geometry, cell.case), {})[cell.label] = cell.median_us
    best = {at: min(row[name] for name in row.keys() & libraries) for at, row in times.items() if row.keys() & libraries}
    geometries = list(dict.fromkeys(geometry for geometry, _ in best))
    lines = [f"| kernel | {' | '.join(geometries)} | all | lowest | cells |", "|---" * (len(geometries) + 4) + "|"]
    for label in dict.fromkeys(cell.label for cell in cells):
        share = {at: best[at] / times[at][label] for at in best if label in times[at]}
        means = [_mean([value for at, value in share.items() if at[0] == geometry]) for geometry in geometries]
        every = list(share.values())
        lines.append(f"| {label} | {' | '.join(means)} | {_mean(every)} | {min(every, default=0.0):.2f} | {len(every)} |")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    return f"{geometric_mean(values):.3f}" if values else ""


def _show(cell: KernelCell | None, best: float | None) -> str:
    if cell is None:
        return ""
    if cell.median_us is None:
        return cell.status
    rate = f"{cell.gbps:.0f}" if cell.gbps is not None else f"{cell.tflops:.0f}"
    text = f"{cell.median_us:.1f} ({rate})"
    return f"**{text}**" if cell.median_us == best else text


def main() -> None:
    """Rewrite the documents named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        write_whole(path, render(path.read_text()).encode())


if __name__ == "__main__":
    main()
