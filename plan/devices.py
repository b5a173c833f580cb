"""Kinds of GPUs: data sheets, the fractions of peak rates that kernels reach, and all-reduce times within a host."""

from __future__ import annotations

import difflib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from headway.core.contract.errors import ConfigError


@dataclass(frozen=True)
class Utilisation:
    """Fractions of a GPU's peak rates that kernels reach, and fixed times, fitted on an H200 (`bench.studies.plan fit`). For
    other GPUs the values are estimates."""

    product_read: float = 0.84
    """Fraction of the memory bandwidth at which a GEMM reads its weights."""
    product_matrix: float = 0.748
    """Fraction of the matrix rate that a GEMM with many rows reaches: 740 of 989 TFLOP/s, the median `matrix_tflops` in
    bench/results/h200."""
    product_depth: float = 220.0
    """Number of weight columns (K) that take as long to process as the prologue and epilogue of a tile. A GEMM with a short K
    therefore reaches a smaller fraction of the matrix rate."""
    product_us: float = 1.07
    """Fixed time per GEMM in microseconds: launch in a graph, first wave and last wave."""
    layer_us: float = 3.19
    """Time of a layer's other work (norms, RoPE, activations) in a step of few tokens, in microseconds."""
    element_read: float = 0.445
    """Fraction of the memory bandwidth reached when activations are written and read between GEMMs."""
    expert_us: float = 11.1
    """Time of an expert layer besides reading its weights, in microseconds: routing and sorting."""
    expert_matrix: float = 0.45
    """Fraction of the matrix rate that expert GEMMs with many token-expert pairs reach."""
    alone_us: float = 3.66
    """Launch time of a CUDA graph in microseconds. A crossover table's decode times include this launch, which a kernel inside a
    step's graph does not need."""
    decode_read: float = 0.86
    """Fraction of the memory bandwidth at which decode reads keys and values, used without a crossover table."""
    decode_us: float = 7.95
    """Fixed time of a layer's decode attention, in microseconds."""
    narrow_us: float = 7.0
    """Extra time of decode attention with an 8-bit cache, in microseconds: the time in bench/results/h200/decode-fp8.json minus
    the time to read the cache's bytes."""
    prefill_matrix: float = 0.629
    """Fraction of the matrix rate that prefill attention reaches, used without a crossover table."""
    prefill_us: float = 13.5
    """Fixed time of a layer's prefill attention, in microseconds."""
    state_read: float = 0.78
    """Fraction of the memory bandwidth at which a step reads and writes states."""
    state_us: float = 5.0
    """Fixed time of a state layer, in microseconds."""
    scan_flops: float = 6e13
    """Operations per second of a prompt's state scan on a whole GPU, counting 6 operations per state element and token."""
    step_us: float = 22.0
    """Time that a step spends outside its layers (embedding, sampling, copies), in microseconds."""
    host_us: float = 300.0
    """Host time per step in microseconds, overlapped with device work. The measured total, including `host_sequence_us`, is 0.84
    ms at 256 sequences (bench/results/h200/host-256.json) and 0.38 ms at one sequence (throughput-auto-512.json)."""
    host_sequence_us: float = 2.1
    """Host time per sequence of a step, in microseconds."""
    host_layer_us: float = 80.6
    """Host time per layer of prefill steps without a CUDA graph, in microseconds."""
    host_mixed_us: float = 210.0
    """Host time per layer of a step with both decode and prefill, in microseconds. Such a step runs as piecewise CUDA graphs with
    two attention launches between them. The value is chosen to match the latencies in bench/results/h200/server.json."""
    request_us: float = 434.0
    """Time from a request's arrival until the scheduler sees it, in microseconds."""


H200: Final = Utilisation()
"""Utilisation of an H200, fitted to bench/results/h200; docs/plan.md states the accuracy of the fit."""


GIB: Final = 1024**3
MESSAGE_BYTES: Final = tuple(2**power for power in range(13, 29, 2))
"""Message sizes in bytes for which an `AllReduceTimes` has a time: 8 KiB to 128 MiB."""


@dataclass(frozen=True)
class AllReduceTimes:
    """All-reduce times within a host, inside a CUDA graph, as a function of the bytes per rank."""

    source: str
    by_ranks: Mapping[int, Sequence[float]]
    """Number of ranks -> microseconds per all-reduce, for each size in MESSAGE_BYTES."""

    def us(self, ranks: int, num_bytes: float) -> float:
        """Return the time in microseconds, interpolated on logarithmic scales between measured sizes and numbers of ranks. The
        time is constant below the smallest size and proportional to the size above the largest."""
        if ranks == 1:
            return 0.0
        known = sorted(self.by_ranks)
        assert ranks <= known[-1], f"{ranks} ranks on one host"
        after = next(count for count in known if count >= ranks)
        if after == ranks:
            return self._measured(ranks, num_bytes)
        before = max(count for count in known if count < ranks)
        share = math.log(ranks / before) / math.log(after / before)
        return _between(self._measured(before, num_bytes), self._measured(after, num_bytes), share)

    def _measured(self, ranks: int, num_bytes: float) -> float:
        times = self.by_ranks[ranks]
        if num_bytes <= MESSAGE_BYTES[0]:
            return times[0]
        if num_bytes >= MESSAGE_BYTES[-1]:
            return float(times[-1] * num_bytes / MESSAGE_BYTES[-1])
        at = bisect_right(MESSAGE_BYTES, num_bytes)
        (low, high), (start, end) = list(pairwise(MESSAGE_BYTES))[at - 1], list(pairwise(times))[at - 1]
        share = math.log(num_bytes / low) / math.log(high / low)
        return _between(start, end, share)


def _between(low: float, high: float, share: float) -> float:
    """Interpolate between two numbers on a logarithmic scale. share: 0 gives `low`, 1 gives `high`."""
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


@dataclass(frozen=True)
class GpuKind:
    """Kind of GPU, described by its data sheet. Hosts are assumed to have eight GPUs."""

    name: str
    title: str
    """Name of the GPU in the driver and in crossover tables."""
    memory_bytes: int
    """Memory size in bytes, as the driver reports it."""
    read_rate: float
    """Memory bandwidth in bytes per second."""
    matrix_rate: float
    """Floating-point operations per second of dense bfloat16 GEMMs."""
    link: str
    """Name of the link between the GPUs of a host, with its bytes per second in one direction."""
    all_reduce: AllReduceTimes
    source: str
    gpus_per_host: int = 8


def _table(measured: str, *rows: Sequence[float]) -> AllReduceTimes:
    """Return all-reduce times for 2, 4 and 8 ranks: vLLM's custom all-reduce, or NCCL for messages larger than the custom
    all-reduce supports."""
    source = f"{measured}, from NVIDIA's aiconfigurator-core 0.12.0 (Apache-2.0)"
    return AllReduceTimes(source, dict(zip((2, 4, 8), rows, strict=True)))


_KINDS: Final = (
    GpuKind(
        name="h100",
        title="NVIDIA H100 80GB HBM3",
        memory_bytes=int(79.2 * GIB),
        read_rate=3.35e12,
        matrix_rate=989e12,
        link="NVLink 4, 450 GB/s",
        all_reduce=_table(
            "H100 SXM, vLLM 0.24.0",
            (4.4, 4.4, 4.8, 6.3, 12.4, 45.0, 156.3, 468.8),
            (4.8, 4.9, 5.8, 11.4, 18.6, 53.5, 191.2, 618.8),
            (5.1, 5.6, 7.9, 12.0, 19.4, 50.7, 177.8, 577.4),
        ),
        source="NVIDIA H100 data sheet, SXM",
    ),
    GpuKind(
        name="h200",
        title="NVIDIA H200",
        memory_bytes=int(139.8 * GIB),
        read_rate=4.8e12,
        matrix_rate=989e12,
        link="NVLink 4, 450 GB/s",
        all_reduce=_table(
            "H200 SXM, vLLM 0.24.0",
            (4.6, 4.6, 4.8, 6.3, 12.4, 43.0, 144.8, 463.0),
            (4.8, 4.9, 5.8, 10.5, 17.8, 51.8, 179.6, 609.0),
            (5.1, 5.7, 7.9, 11.1, 18.1, 48.4, 165.9, 562.4),
        ),
        source="NVIDIA H200 data sheet, SXM",
    ),
    GpuKind(
        name="a100",
        title="NVIDIA A100-SXM4-80GB",
        memory_bytes=int(79.3 * GIB),
        read_rate=2.039e12,
        matrix_rate=312e12,
        link="NVLink 3, 300 GB/s",
        all_reduce=_table(
            "A100 SXM, vLLM 0.14.0",
            (5.3, 5.2, 5.7, 8.0, 15.2, 89.7, 222.2, 746.1),
            (5.5, 6.0, 7.8, 14.5, 26.0, 118.0, 288.1, 996.3),
            (6.3, 6.9, 11.4, 18.9, 27.9, 129.0, 364.3, 1160.9),
        ),
        source="NVIDIA A100 data sheet, 80 GB SXM",
    ),
    GpuKind(
        name="l40s",
        title="NVIDIA L40S",
        memory_bytes=int(44.4 * GIB),
        read_rate=0.864e12,
        matrix_rate=362e12,
        link="PCIe 4, 32 GB/s",
        all_reduce=_table(
            "L40S, vLLM 0.14.0",
            (5.7, 7.4, 11.0, 32.1, 116.8, 449.9, 1776.9, 7006.7),
            (14.3, 26.0, 59.6, 219.0, 840.8, 3321.8, 13598.0, 54406.4),
            (27.6, 48.4, 108.3, 444.5, 2079.9, 8167.5, 30062.3, 120267.1),
        ),
        source="NVIDIA L40S data sheet",
    ),
    GpuKind(
        name="b200",
        title="NVIDIA B200",
        memory_bytes=int(178.4 * GIB),
        read_rate=7.7e12,
        matrix_rate=2250e12,
        link="NVLink 5, 900 GB/s",
        all_reduce=_table(
            "B200 SXM, vLLM 0.24.0",
            (7.0, 7.0, 7.4, 9.4, 25.3, 50.6, 87.2, 280.4),
            (7.1, 7.4, 8.1, 18.0, 23.8, 43.2, 119.0, 352.9),
            (7.8, 8.2, 9.4, 26.1, 20.7, 39.2, 111.3, 442.3),
        ),
        source="NVIDIA Blackwell data sheet, B200 SXM",
    ),
)
GPU_KINDS: Final[Mapping[str, GpuKind]] = {kind.name: kind for kind in _KINDS}


def gpu_kind(name: str) -> GpuKind:
    """Return the GPU kind with this name, ignoring case. :raises ConfigError: if the name is unknown; the error lists the known
    names."""
    known = GPU_KINDS.get(name.lower())
    if known is None:
        near = difflib.get_close_matches(name.lower(), GPU_KINDS, n=1)
        raise ConfigError("--gpu", f"one of {', '.join(GPU_KINDS)}", repr(name), f"did you mean {near[0]}?" if near else "")
    return known
