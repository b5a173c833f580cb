"""Tiny kernel benchmarks: cells, runs and broken backends that several test files share."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from headway.backends.sdpa import SDPA
from headway.bench.kernel.results import KernelReport
from headway.bench.kernel.run import KernelOptions, run_kernel_bench
from headway.core.contract.backend import BackendInfo
from headway.registry import Registry, create_registry, hookimpl
from headway.tuning.measure.timing import Timer
from headway.tuning.measure.workloads import AttentionWork, Geometry, make_spec, make_work

QUICK = Timer(warmup_ms=0.0, rep_ms=0.0)
CPU = torch.device("cpu")
SMALL = Geometry(4, 2, 32)


def cell_of(phase: str, case: str, geometry: Geometry = SMALL, **dtypes: torch.dtype) -> AttentionWork:
    spec = make_spec(geometry, dtypes.get("dtype", torch.float32), dtypes.get("kv_dtype"), CPU)
    return make_work(phase, case, geometry, spec)


def run(registry: Registry, **changes: object) -> KernelReport:
    options = KernelOptions(geometries=[SMALL], device=CPU, timer=QUICK, **changes)
    return run_kernel_bench(options, registry)


def plugin(name: str, **methods: object) -> SimpleNamespace:
    """A plugin whose one backend is sdpa with some methods replaced."""
    backend = type(name, (SDPA,), {"name": name, **methods})

    class Plugin:
        @hookimpl
        def headway_register_backends(self) -> list[BackendInfo]:
            return [BackendInfo(name, "for a test", lambda: backend, api_version=2)]

    return Plugin()


def with_backend(name: str, **methods: object) -> Registry:
    return create_registry({name: plugin(name, **methods)}, load_entry_points=False)


def zeros(self, q, cache, plan, out):
    out.zero_()


def half_of_the_rows(self, q, cache, plan, out):
    out[: len(out) // 2].zero_()
