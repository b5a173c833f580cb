"""Tiny kernel benchmarks: cells, runs and broken backends that several test files share."""

from __future__ import annotations

import torch

from headway.backends.sdpa import SDPA
from headway.bench.kernel.results import KernelReport
from headway.bench.kernel.run import KernelOptions, run_kernel_bench
from headway.registry import Registry
from headway.tuning.measure.timing import Timer
from headway.tuning.measure.workloads import AttentionWork, Geometry, make_spec, make_work
from tiny_engine import registering

QUICK = Timer(warmup_ms=0.0, rep_ms=0.0)
CPU = torch.device("cpu")
SMALL = Geometry(4, 2, 32)


def cell_of(phase: str, case: str, geometry: Geometry = SMALL, **dtypes: torch.dtype) -> AttentionWork:
    spec = make_spec(geometry, dtypes.get("dtype", torch.float32), dtypes.get("kv_dtype"), CPU)
    return make_work(phase, case, geometry, spec)


def run(registry: Registry, **changes: object) -> KernelReport:
    return run_kernel_bench(KernelOptions(geometries=[SMALL], device=CPU, timer=QUICK, **changes), registry)


def with_backend(name: str, **methods: object) -> Registry:
    """The built-ins, and sdpa with some methods replaced under another name."""
    return registering(**{name: type(name, (SDPA,), {"name": name, **methods})})


def zeros(self, q, cache, plan, out):
    out.zero_()


def half_of_the_rows(self, q, cache, plan, out):
    out[: len(out) // 2].zero_()
