"""`headway bench kernel`: every backend, peer and cache writer on every workload, checked against float64 and then timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from headway.bench.kernel.contenders import Entry, KernelPeer, entrants, peer_contender
from headway.bench.kernel.results import DevicePeak, KernelCell, KernelReport, peak_of
from headway.core.contract.backend import make_backend
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.rule import AttentionRule
from headway.core.contract.spec import DTYPE_NAMES, KV_DTYPE_NAMES, AttentionSpec
from headway.core.contract.support import Support
from headway.core.oracle.cases import Case, parse_case, reference, relative_error
from headway.core.select.request import LayerSpecs
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin
from headway.core.system.terminal import progress_bar
from headway.registry import Registry
from headway.tuning.isolated.trial import create_registry
from headway.tuning.measure.contender import (
    Contender,
    GuardedInputs,
    Measurement,
    backend_contender,
    failed,
    measure,
    writer_contender,
)
from headway.tuning.measure.device import crowding, default_device, describe_device
from headway.tuning.measure.timing import Timer, on_device
from headway.tuning.measure.workloads import (
    DEFAULT_CASES,
    AttentionWork,
    Geometry,
    PhaseName,
    build_case,
    build_write,
    make_spec,
    make_work,
)


@dataclass(frozen=True)
class KernelOptions:
    """Options of a run. The defaults suit the device."""

    phase: PhaseName = "decode"
    backends: Sequence[str] | None = None
    """Names of registered backends. None means all that are available."""
    peers: Sequence[KernelPeer] = ()
    """Kernels of other libraries to call in the same run."""
    geometries: Sequence[Geometry] = (Geometry(32, 8, 128),)
    cases: Sequence[str] | None = None
    """Cases in the grammar of headway.core.oracle.cases. None means the device's default cells."""
    dtype: torch.dtype | None = None
    """Element type. None means bfloat16 on a GPU, float32 on a CPU."""
    kv_dtype: torch.dtype | None = None
    """Element type of the KV cache. None means `dtype`."""
    layouts: Sequence[str] | None = None
    """Cache layouts. None means each backend's preferred layout, or all layouts for cache writers."""
    block_sizes: Sequence[int] | None = None
    """Block sizes. None means 16 and 256, as far as a backend supports them."""
    device: torch.device = field(default_factory=default_device)
    timer: Timer = field(default_factory=Timer)
    seed: int = 0
    peak_gbps: float | None = None
    """Peak memory bandwidth in GB/s. None means the data sheet's value, if known."""
    peak_tflops: float | None = None
    """Peak compute in TFLOP/s for the element type of the run. None means the data sheet's value, if known."""
    output: Path | None = None
    """Result file, rewritten after each case, so that an interrupted run keeps its results."""
    command: str = ""
    """The command as typed, for the result file."""
    rule: AttentionRule | None = None
    """Attention rule of the layers."""


def run_kernel_bench(options: KernelOptions, registry: Registry | None = None, console: Console | None = None) -> KernelReport:
    """Measure every contender on every workload. Failures are recorded in the report, never raised. registry: None creates one
    with every installed plugin. console: shows the progress bar; None shows none.
    :raises ConfigError: if a layout, case or dtype is unknown. :raises UnknownBackendError: if a backend is unknown."""
    registry = registry or create_registry()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    dtype = options.dtype or (torch.float32 if options.device.type == "cpu" else torch.bfloat16)
    if dtype not in DTYPE_NAMES:
        raise ConfigError("--dtype", " or ".join(DTYPE_NAMES.values()), str(dtype))
    kinds = DEFAULT_CASES.get(options.device.type, DEFAULT_CASES["cuda"])
    works = [
        make_work(options.phase, case, geometry, _spec(geometry, dtype, case, options))
        for geometry in options.geometries
        for case in options.cases or kinds[options.phase]
    ]
    contenders, entries_of = entrants(options.phase, options.backends, options.peers, options.device, registry)
    rounds = [(work, entries_of(work, options.layouts, options.block_sizes)) for work in works]

    with torch.no_grad(), on_device(options.device), progress_bar(console) as progress:
        task = progress.add_task("device", total=1 + sum(len(entries) for _, entries in rounds))
        device = describe_device(options.device, dtype, options.timer)
        report = KernelReport(
            command=options.command or " ".join(sys.argv),
            origin=Origin.here(),
            busy=crowding(),
            date=date,
            warmup_ms=options.timer.warmup_ms,
            rep_ms=options.timer.rep_ms,
            seed=options.seed,
            device=device,
            peak=peak_of(device.name, DTYPE_NAMES[dtype], options.peak_gbps, options.peak_tflops),
            contenders=contenders,
            rule="" if options.rule is None else str(options.rule),
            cells=[],
        )
        progress.advance(task)
        for work, entries in rounds:
            results: dict[int, KernelCell] = {}
            for number, measurement in _run_work(work, entries, options):
                results[number] = _to_cell(work, entries[number], measurement, report)
                progress.update(task, advance=1, description=f"{work.geometry} {work.case} {entries[number].name}")
            report.cells += [results[number] for number in sorted(results)]
            report.busy = report.busy or crowding()
            if options.output is not None:
                write_json(report, options.output)
    return report


def _spec(geometry: Geometry, dtype: torch.dtype, case: str, options: KernelOptions) -> AttentionSpec:
    """Return the spec of a layer, with the run's rule. :raises ConfigError: if the rule does not pass its check for the case."""
    spec = make_spec(geometry, dtype, options.kv_dtype, options.device)
    if options.rule is None:
        return spec
    longest = max(kv_len for _, kv_len in parse_case(case))
    return LayerSpecs([spec]).with_rules({"all": options.rule}, [0], longest).cached[0]


def _run_work(work: AttentionWork, entries: Sequence[Entry], options: KernelOptions) -> Iterator[tuple[int, Measurement]]:
    """Yield (index of an entry, its result). Entries with the same layout and block size share one filled cache."""
    groups: dict[tuple[CacheLayout, int], list[int]] = {}
    for number, entry in enumerate(entries):
        if entry.support:
            groups.setdefault((entry.layout, entry.block_size), []).append(number)
        else:
            yield number, Measurement("unsupported", reason=_reasons(entry.support))
    expected: Tensor | None = None
    case: Case | None
    for (layout, block_size), numbers in groups.items():
        try:
            build = build_write if work.phase == "write" else build_case
            case = build(work, layout, block_size, options.seed)
            inputs = None
            if work.phase != "write":
                inputs = GuardedInputs.of(case, partial(build, work, layout, block_size, options.seed))
                expected = reference(case) if expected is None else expected
        except Exception as error:  # mostly out of memory: the next layout may still fit
            case, failure = None, failed(error)
        for number in numbers:
            if case is None:
                yield number, failure
            else:
                check = inputs.check if inputs is not None else lambda: None
                contender = _contender(entries[number], case, expected, block_size)
                yield number, measure(contender, options.device, options.timer, check)
        case = inputs = None
        gc.collect()  # libraries' wrappers hold caches in reference cycles, and the next cache may be as large
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


def _contender(entry: Entry, case: Case, expected: Tensor | None, block_size: int) -> Callable[[], Contender]:
    def error(out: Tensor) -> float:
        assert expected is not None
        return relative_error(out, expected, case)

    def prepare() -> Contender:
        if entry.writer is not None:
            return writer_contender(entry.writer, case)
        if entry.peer is not None:
            return peer_contender(entry.peer, case, error)
        assert entry.backend is not None
        return backend_contender(make_backend(entry.backend, case.spec, case.cache.layout, block_size), case, error)

    return prepare


def _to_cell(work: AttentionWork, entry: Entry, measured: Measurement, report: KernelReport) -> KernelCell:
    """Return the result as a cell, with rates in GB/s and TFLOP/s computed from its times."""
    times: dict[str, float | None] = {}
    if measured.timing is not None:
        us, peak = measured.timing.median_us, report.peak or DevicePeak()
        times = {"median_us": us, "p20_us": measured.timing.p20_us, "p80_us": measured.timing.p80_us}
        if work.phase == "prefill":
            rate, limit, most = work.flops / us * 1e-6, report.device.matrix_tflops, peak.tflops
        else:
            rate = (work.kv_bytes if work.phase == "decode" else work.write_bytes) / us * 1e-3
            limit, most = report.device.copy_gbps, peak.gbps
        times["tflops" if work.phase == "prefill" else "gbps"] = rate
        times |= {"fraction": rate / limit, "peak_fraction": rate / most if most else None}
    return KernelCell(
        backend=entry.name,
        owner=entry.owner,
        phase=work.phase,
        case=work.case,
        geometry=str(work.geometry),
        layout=entry.layout.name,
        block_size=None if entry.dense else entry.block_size,
        dtype=DTYPE_NAMES[work.spec.dtype],
        kv_dtype=KV_DTYPE_NAMES[work.spec.cache_dtype],
        status=measured.status,
        reason=measured.reason,
        kernel=measured.kernel,
        plan_us=measured.plan_us,
        host_us=measured.host_us,
        relative_error=measured.relative_error,
        tolerance=measured.tolerance,
        **times,
    )


def _reasons(support: Support) -> str:
    return "; ".join(map(str, support.reasons))
