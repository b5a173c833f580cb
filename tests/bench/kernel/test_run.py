"""The kernel benchmark on tiny cells: who gets a time, who does not, and what a mistake is told."""

from __future__ import annotations

import pytest
import torch

from headway.backends.sdpa import SDPA
from headway.bench.kernel.run import KernelOptions, run_kernel_bench
from headway.cli.measure.bench_kernel import kernel
from headway.core.contract.errors import ConfigError, UnknownBackendError
from headway.registry import Registry
from headway.tuning.measure.workloads import Geometry
from tiny_bench import CPU, QUICK, cell_of, half_of_the_rows, run, with_backend, zeros


@pytest.mark.parametrize(("phase", "cases"), [("decode", ["3q1s40", "2q4s21"]), ("prefill", ["2q17", "1q7s20"])])
def test_right_answers_get_times_and_rates(registry: Registry, phase: str, cases: list[str]) -> None:
    report = run(registry, phase=phase, cases=cases, layouts=["nhd", "vllm_5d"], block_sizes=[8, 16])
    cells = [cell for cell in report.cells if cell.status != "unsupported"]  # native decodes alone, on one of the layouts
    found = [(c.backend, c.layout, c.block_size) for c in cells if c.case == cases[0]]
    own = [("native", "nhd", size) for size in (8, 16)] if phase == "decode" else []
    assert [each for each in found if each[0] == "native"] == own
    assert [each for each in found if each[0] != "native"] == [
        (name, layout, size) for name in ("sdpa", "sdpa.math") for layout in ("nhd", "vllm_5d") for size in (8, 16)
    ]
    for cell in cells:
        assert cell.status == "ok", cell.reason
        assert 0 < cell.p20_us <= cell.median_us <= cell.p80_us
        assert cell.relative_error < 1e-6
        assert cell.plan_us > 0
        rate, work = (cell.tflops, 1e-6) if phase == "prefill" else (cell.gbps, 1e-3)
        one = cell_of(phase, cell.case)
        amount = one.flops if phase == "prefill" else one.kv_bytes
        assert rate == pytest.approx(amount / cell.median_us * work)
        limit = report.device.matrix_tflops if phase == "prefill" else report.device.copy_gbps
        assert cell.fraction == pytest.approx(rate / limit)
    assert report.device.type == "cpu"
    assert report.device.matrix_dtype == "float32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_held_to_the_backends_tolerance(registry: Registry, dtype: torch.dtype) -> None:
    (cell,) = run(registry, cases=["2q1s40"], dtype=dtype, backends=["sdpa"], block_sizes=[16]).cells
    assert cell.status == "ok", cell.reason
    assert 1e-5 < cell.relative_error < cell.tolerance


def test_by_default_the_preferred_layout_and_both_usual_blocks(registry: Registry) -> None:
    report = run(registry, cases=["2q1s9"], backends=["sdpa"])
    assert [(cell.layout, cell.block_size) for cell in report.cells] == [("nhd", 16), ("nhd", 256)]


def raises(self, q, cache, plan, out):
    raise RuntimeError("the kernel\nfell over")


def right_once(self, q, cache, plan, out):
    SDPA.decode(self, q, cache, plan, out)
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 1:
        out *= 2


@pytest.mark.parametrize(("decode", "reason"), [(zeros, "relative error 1,"), (half_of_the_rows, "relative error nan")])
def test_a_wrong_answer_gets_no_time(decode: object, reason: str) -> None:
    report = run(with_backend("wrong", decode=decode), cases=["4q1s20"], backends=["wrong", "sdpa"], block_sizes=[16])
    wrong, right = report.cells
    assert (wrong.status, wrong.median_us, wrong.gbps, wrong.host_us) == ("incorrect", None, None, None)
    assert reason in wrong.reason
    assert right.status == "ok"


def test_an_answer_that_changes_under_repetition_gets_no_time() -> None:
    (cell,) = run(with_backend("racy", decode=right_once), cases=["4q1s20"], backends=["racy"], block_sizes=[16]).cells
    assert (cell.status, cell.median_us) == ("incorrect", None)
    assert "after repeated calls" in cell.reason


def test_the_tolerance_is_the_backends() -> None:
    registry = with_backend("strict", tolerance={torch.float32: 1e-12})
    (cell,) = run(registry, cases=["4q1s20"], backends=["strict"], block_sizes=[16]).cells
    assert cell.status == "incorrect"
    assert 0 < cell.relative_error < 1e-6


def test_an_exception_is_a_result() -> None:
    report = run(with_backend("broken", decode=raises), cases=["4q1s20"], backends=["broken", "sdpa"], block_sizes=[16])
    assert [(cell.status, cell.reason) for cell in report.cells] == [("error", "RuntimeError: the kernel fell over"), ("ok", "")]


def test_what_is_unsupported_says_why(registry: Registry) -> None:
    report = run(registry, cases=["2q1s20"], backends=["sdpa"], layouts=["vllm_5d"], block_sizes=[16], dtype=torch.float32)
    assert report.cells[0].status == "ok"
    narrow = KernelOptions(geometries=[Geometry(2, 1, 6)], cases=["2q1s20"], layouts=["vllm_5d"], device=CPU, timer=QUICK)
    cells = run_kernel_bench(narrow, registry).cells
    assert {cell.status for cell in cells} == {"unsupported"}
    assert "head_dim: needs a multiple of 4" in cells[0].reason


def test_writers_are_checked_and_timed(registry: Registry) -> None:
    report = run(registry, phase="write", cases=["1q20", "5q1s33"], block_sizes=[16])
    assert [(c.owner, c.layout, c.status) for c in report.cells] == [("writer", n, "ok") for n in ("nhd", "hnd", "vllm_5d")] * 2
    assert report.cells[0].gbps == pytest.approx(20 * 2 * 2 * 32 * 4 * 2 / report.cells[0].median_us * 1e-3)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"cases": ["2x"]}, "case"),
        ({"cases": ["2q9"]}, "--cases for --phase decode"),
        ({"phase": "prefill", "cases": ["2q1s9"]}, "--cases for --phase prefill"),
        ({"layouts": ["nobody"]}, "kv_layout"),
        ({"dtype": torch.float64}, "--dtype"),
        ({"phase": "write", "backends": ["sdpa"]}, "--backends"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(registry: Registry, changes: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run(registry, **changes)
    assert raised.value.reason.what == what


def test_unknown_names_are_refused(registry: Registry) -> None:
    with pytest.raises(UnknownBackendError, match="nobody"):
        run(registry, backends=["nobody"])
    assert [str(Geometry.parse(text)) for text in ("32/8/128", "16/1/576/512", "16/16/192/128/dense", "4/4/8/8")] == [
        "32/8/128",
        "16/1/576/512",
        "16/16/192/128/dense",
        "4/4/8",
    ]
    for text in ("32/8", "32/5/128", "0/0/0", "a/b/c", "16/1/576/0", "16/1/576/512/sparse"):
        with pytest.raises(ConfigError, match="num_heads/num_kv_heads/head_dim"):
            Geometry.parse(text)
    for options in ({"dtype": "int8"}, {"kv_dtype": "float64"}, {"block_sizes": "16,x"}, {"device": "tpu"}):
        with pytest.raises(ConfigError):
            kernel(**options)
