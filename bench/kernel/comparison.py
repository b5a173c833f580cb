"""Whether a backend is slower than another, cell by cell: `headway bench kernel --fail-if-slower 1.1 --than sdpa`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.bench.kernel.results import KernelCell, SlowerCell, SpeedComparison
from headway.core.contract.errors import ConfigError


def compare(cells: Sequence[KernelCell], than: str, most: float) -> SpeedComparison:
    """Hold every backend to the times of another, over the same layout and block size where it has one there, else its fastest.

    A cell that a backend declines (unsupported) is not compared; one whose answer is wrong, or that raises, has failed.
    """
    found = [each for cell in cells if cell.owner == "backend" and cell.backend != than for each in _held(cell, cells, than)]
    slower = [each for each in found if each.factor is None or each.factor > most]
    return SpeedComparison(than=than, most=most, compared=len(found), slower=slower)


def check_request(most: float | None, than: str | None, phase: str) -> None:
    """Check `--fail-if-slower` and `--than`.

    :raises ConfigError: one without the other, a factor that is none, or a phase without backends.
    """
    if (most is None) != (than is None):
        given, missing = ("--fail-if-slower", "--than NAME") if than is None else ("--than", "--fail-if-slower FACTOR")
        raise ConfigError(given, f"{missing} beside it", f"{given} alone", "both together say what is too slow")
    if most is not None and not 0 < most < float("inf"):
        raise ConfigError("--fail-if-slower", "a factor above 0, such as 1.1", most)
    if most is not None and phase == "write":
        raise ConfigError("--fail-if-slower", "--phase decode or prefill, which compare backends", "--phase write")


def _held(cell: KernelCell, cells: Sequence[KernelCell], than: str) -> Iterator[SlowerCell]:
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
