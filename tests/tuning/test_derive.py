"""Times derived from the table of another layer or another GPU, and a first start that uses them instead of measuring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.bench.crossover.regret import derived_regret
from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.core.select.costs import CostTable, Shape
from headway.core.select.request import ALL_AUTO, LayerSpecs
from headway.core.select.selector import Selector
from headway.core.system.json_files import write_json
from headway.registry import Registry, create_registry
from headway.tuning import autotune
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.measure.derive import SAME, Limits, derive, derived_prior, limits_between, near_tables
from headway.tuning.measure.points import Point, grid
from headway.tuning.measure.run import CrossoverOptions, run_kernel_level
from headway.tuning.table.files import prior_path, read_table, shipped, table_path
from headway.tuning.table.schema import Cell, CrossoverTable, DeviceIdentity, DeviceRates, KernelRecord, SpecRecord
from tables import SPEC, a_cell, a_device, a_table
from tiny_bench import half_of_the_rows, with_backend

WIDE = replace(SPEC, num_heads=8, num_kv_heads=4)
HEADS_64 = AttentionSpec(4, 2, 64, 0.125)
GPU = a_device(type="cuda", name="Some GPU", compute_capability="9.0", sm_count=100, clock_mhz=2000, threads=None, compilers={})
_PLACE = ("phase", "batch", "query_len", "kv_len", "case", "kernel")
RATES = DeviceRates(copy_gbps=3000.0, matrix_tflops=800.0)


def law(name: str, point: Point, record: SpecRecord, speed: float = 1.0) -> float:
    """A time that follows the model: a floor and the longer of two limits, over the share of the GPU that the programs fill."""
    spec = record.to_spec(torch.device("cpu"))
    work = point.work(spec)
    heads = spec.num_kv_heads if point.phase in ("decode", "verify") else spec.num_heads
    programs = point.batch * heads * -(-point.query_len // 64)
    full = min(1.0, programs / {"sdpa": 256, "sdpa.math": 32}[name])
    peak = {"sdpa": 3e6, "sdpa.math": 1e6}[name] * speed
    moved = work.kv_bytes + work.num_tokens * spec.num_heads * 2 * spec.head_dim * 4
    return {"sdpa": 20.0, "sdpa.math": 5.0}[name] + max(moved / peak, work.flops / (100 * peak)) / full


def a_law_table(
    record: SpecRecord, device: DeviceIdentity = GPU, points: Sequence[Point] = (), speed: float = 1.0, **changes: object
) -> CrossoverTable:
    cells = [
        a_cell(law(name, at, record, speed), kernel=name, case=at.case, **{field: getattr(at, field) for field in _PLACE[:4]})
        for at in points or grid("cuda")
        for name in ("sdpa", "sdpa.math")
    ]
    return a_table(*cells, spec=record, device=device, rates=RATES, **changes)


@pytest.mark.parametrize("spec", [WIDE, HEADS_64, replace(SPEC, num_heads=8)])
def test_a_layer_that_was_never_measured_follows_the_law_of_another(spec: object) -> None:
    wanted = grid("cuda")
    found = derive([(a_law_table(SpecRecord.of(SPEC)), SAME)], SpecRecord.of(spec), wanted)
    assert {cell.point for cell in found.cells} == {point.key for point in wanted}
    assert {cell.source for cell in found.cells} == {"derived"}
    errors, right, places = [], 0, {point.key: point for point in wanted}
    for key, point in places.items():
        true = {name: law(name, point, found.attention) for name in ("sdpa", "sdpa.math")}
        us = {cell.kernel: cell.median_us for cell in found.cells if cell.point == key}
        errors += [abs(us[name] / true[name] - 1) for name in true]
        right += true[min(us, key=us.__getitem__)] < 1.05 * min(true.values())
    errors.sort()
    assert errors[len(errors) // 2] < 0.05
    assert errors[int(0.9 * len(errors))] < 0.25, "at the edges of the table a kernel's share of the GPU is not known"
    assert right >= 0.95 * len(places)


def test_another_gpu_scales_the_limits() -> None:
    """A GPU with twice the bandwidth and GEMM rate takes half of the time beyond the floor."""
    source = a_law_table(SpecRecord.of(SPEC))
    found = derive([(source, Limits(copy=2.0, gemm=2.0))], SpecRecord.of(SPEC), grid("cuda"))
    large = [cell for cell in found.cells if cell.phase == "decode" and cell.batch * cell.kv_len == 2**20]
    assert large
    for cell in large:
        point = Point(cell.phase, cell.batch, cell.query_len, cell.kv_len)
        assert cell.median_us == pytest.approx(law(cell.kernel, point, found.attention, speed=2.0), rel=0.05)
    assert found.prior is not None
    assert found.prior.limits == {"copy": 2.0, "gemm": 2.0, "clock": 1.0, "sms": 1.0}
    other = GPU.model_copy(update={"name": "Another GPU", "sm_count": 50, "clock_mhz": 1000})
    twice = DeviceRates(copy_gbps=6000.0, matrix_tflops=800.0)
    assert limits_between(source, other, twice) == Limits(copy=2.0, gemm=1.0, clock=0.5, sms=0.5)
    with pytest.raises(ConfigError, match="needs the rates of both GPUs.*no rates of Another GPU"):
        limits_between(source, other, None)


def test_cells_without_a_time_give_none_and_older_files_are_read() -> None:
    source = a_law_table(SpecRecord.of(SPEC))
    lost = [
        cell if (cell.kernel, cell.phase) != ("sdpa", "extend") else a_cell(None, **cell.model_dump(include={*_PLACE}))
        for cell in source.cells
    ]
    found = derive([(source.model_copy(update={"cells": lost}), SAME)], SpecRecord.of(WIDE), grid("cuda"))
    assert {cell.kernel for cell in found.cells if cell.phase == "extend"} == {"sdpa.math"}
    same = derive([(source, SAME), (a_law_table(SpecRecord.of(WIDE)), SAME)], SpecRecord.of(SPEC), grid("cuda"))
    times = {cell.key: cell.median_us for cell in source.cells}
    assert {cell.key: cell.median_us for cell in same.cells} == pytest.approx(times, rel=2e-3), (
        "another layer's times change none"
    )
    plain = a_cell().model_dump(exclude={"source"})
    assert Cell.model_validate(plain | {"prior": True}).source == "prior"
    assert Cell.model_validate(plain | {"prior": False}).source == "measured"


SHIPPED = {
    (device, rest[:8]): path for path in shipped() for device, named, rest in [path.name.partition("-attention-")] if named
}
H100, H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"


@pytest.mark.parametrize(
    ("measured", "source", "mean", "worst"),
    [
        ((H100, "32-8-128"), H100, 1.02, 1.35),
        ((H100, "16-8-128"), H100, 1.02, 1.35),
        ((H200, "32-8-128"), H200, 1.01, 1.2),
        ((H200, "16-8-128"), H200, 1.01, 1.2),
        ((H200, "32-8-64-"), H200, 1.03, 1.35),
        ((H200, "16-8-256"), H200, 1.03, 1.4),  # hopper_decode has smaller tiles above 128 elements
        ((H200, "16-8-128"), H100, 1.02, 1.35),
        ((H200, "32-8-64-"), H100, 1.04, 1.85),  # triton verified more than 16 rows faster then
    ],
)
def test_choices_by_derived_times_lose_little_on_the_shipped_tables(
    measured: tuple[str, str], source: str, mean: float, worst: float
) -> None:
    """The sources are all other tables of one GPU."""
    sources = [read_table(path) for key, path in SHIPPED.items() if key[0] == source and key != measured]
    report = derived_regret(read_table(SHIPPED[measured]), sources)
    assert len(report.trials) > 250
    assert 1.0 < report.geometric_mean <= mean
    assert report.worst <= worst


Start = Callable[..., CostTable | None]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Start:
    """An engine's start on a GPU that has a shipped table of SPEC, for the table of WIDE. Without `speed`, it may not measure."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADWAY_PRIORS", str(tmp_path / "priors"))
    monkeypatch.delenv("HEADWAY_AUTOTUNE_BUDGET", raising=False)
    monkeypatch.setattr("headway.backends.native.native_support", lambda: Support.no("C compiler", "gcc or clang", "none"))
    caplog.set_level(logging.INFO, "headway")
    write_json(a_law_table(SpecRecord.of(SPEC)), prior_path(GPU, SpecRecord.of(SPEC)))

    def begin(
        budget: float | None = None, registry: Registry | None = None, device: DeviceIdentity = GPU, speed: float | None = None
    ) -> CostTable | None:
        monkeypatch.setattr(autotune, "identify_device", lambda _: device)
        monkeypatch.setattr("headway.tuning.measure.run.identify_device", lambda _: device)
        monkeypatch.setattr(autotune, "rates_of", lambda *_: DeviceRates(copy_gbps=6000.0, matrix_tflops=800.0))

        def run(options: CrossoverOptions, registry: Registry) -> CrossoverTable:
            if not options.grid:
                return run_kernel_level(options, registry)
            assert speed, "this start measures"
            kernels = [KernelRecord(name=name, owner="built-in", available=True) for name in options.backends or ()]
            old = read_table(options.output) if options.resume else None
            table = a_law_table(SpecRecord.of(WIDE), device, options.grid, speed=speed, kernels=kernels)
            if old is not None:
                table = table.model_copy(update={"cells": [*old.cells, *table.cells], "prior": old.prior})
            write_json(table, options.output)
            return table

        monkeypatch.setattr(autotune, "run_kernel_level", run)
        found = costs_for(
            LayerSpecs([WIDE]), registry or create_registry(load_entry_points=False), ALL_AUTO, TableRequest(budget=budget)
        )
        return None if found is None else found[WIDE]

    return begin


def us(costs: CostTable | None, name: str, batch: int = 4, kv_len: int = 512) -> float:
    assert costs is not None
    return costs.at(Shape(Phase.DECODE, batch, 1, kv_len), name, "nhd", 16)[0]


def kept(device: DeviceIdentity = GPU) -> CrossoverTable:
    return read_table(table_path(device, SpecRecord.of(WIDE)))


def test_a_start_derives_its_times_and_measures_nothing(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    costs = start()
    assert us(costs, "sdpa") == pytest.approx(law("sdpa", Point("decode", 4, 1, 512), SpecRecord.of(WIDE)), rel=0.3)
    text = "times for 8/4 heads x 32 float32 are derived from the table for 4/2 heads x 32 float32 of 2026-11-21 (Some GPU"
    assert text in caplog.text
    assert "they are checked while the engine is idle" in caplog.text
    assert costs is not None
    assert costs.source.startswith("derived from the table for 4/2 heads x 32 float32")
    assert kept().derived
    assert {cell.source for cell in kept().cells} == {"derived"}
    caplog.clear()
    assert us(start(), "sdpa") == us(costs, "sdpa")
    assert "derived, not measured here" in caplog.text, "the next start reads, and says so"
    assert "are derived from" not in caplog.text


def test_a_named_budget_measures_and_replaces_derived_times(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    derived = us(start(budget=0.0), "sdpa.math")
    assert not table_path(GPU, SpecRecord.of(WIDE)).exists(), "without measuring, nothing was tested and nothing is kept"
    assert us(start(), "sdpa.math") == derived
    measured = us(start(budget=10.0, speed=0.5), "sdpa.math")
    assert measured == pytest.approx(law("sdpa.math", Point("decode", 4, 1, 512), SpecRecord.of(WIDE), speed=0.5))
    assert "has only derived times and is replaced" in caplog.text
    assert kept().prior is None
    assert us(start(), "sdpa.math") == measured


def ship_with(name: str) -> None:
    """Ship a table in which one more backend takes an eighth of sdpa's time."""
    table = a_law_table(SpecRecord.of(SPEC))
    fast = [cell.model_copy(update={"kernel": name} | _shorter(cell)) for cell in table.cells if cell.kernel == "sdpa"]
    kernels = [*table.kernels, KernelRecord(name=name, owner="built-in", available=True)]
    write_json(table.model_copy(update={"cells": [*table.cells, *fast], "kernels": kernels}), prior_path(GPU, table.spec))


def _shorter(cell: Cell) -> dict[str, float]:
    return {field: getattr(cell, field) / 8 for field in ("median_us", "p20_us", "p80_us")}


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_backend_is_left_out_with_its_numbers(start: Start, caplog: pytest.LogCaptureFixture, wrong: bool) -> None:
    ship_with("quick")
    registry = with_backend("quick", **({"decode": half_of_the_rows} if wrong else {}))
    costs = start(registry=registry)
    chosen = Selector(registry, LayerSpecs([WIDE]), costs={WIDE: costs}).selection.names[Phase.DECODE]
    assert ("quick" in kept_names()) is not wrong
    assert (chosen == "quick") is not wrong
    assert ("auto: excluding quick: self-test: " in caplog.text) is wrong
    assert ("relative error" in caplog.text) is wrong


def kept_names() -> set[str]:
    return {cell.kernel for cell in kept().cells}


def test_a_backend_without_times_is_measured_with_all_others(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start(registry=with_backend("newcomer"), speed=1.0)
    assert "these times are not used, because they do not contain newcomer" in caplog.text
    assert kept().prior is None
    assert {cell.source for cell in kept().cells} == {"measured"}


def test_another_gpu_of_the_same_architecture_scales_the_times(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    other = GPU.model_copy(update={"name": "Another GPU"})
    start(device=other)
    assert kept(other).prior.limits == {"copy": 2.0, "gemm": 1.0, "clock": 1.0, "sms": 1.0}
    older = GPU.model_copy(update={"name": "Older GPU", "compute_capability": "8.0"})
    start(device=older)
    assert kept(older).derived


def test_sources_are_chosen_by_device_and_sizes(start: Start) -> None:
    record = SpecRecord.of(WIDE)
    other = GPU.model_copy(update={"name": "Another GPU"})
    assert near_tables(other, record) == []
    assert [table.device.name for _, table in near_tables(other, record, elsewhere=True)] == ["Some GPU"]
    start()
    assert kept().derived
    windowed = SpecRecord.of(replace(WIDE, sliding_window=64))
    assert [table.spec for _, table in near_tables(GPU, windowed)] == [SpecRecord.of(SPEC)], "derived times serve no other layer"
    assert near_tables(GPU, record.model_copy(update={"dtype": "bfloat16", "kv_dtype": "bfloat16"})) == []
    assert near_tables(GPU, record.model_copy(update={"value_in_key": True})) == []


def test_a_kernel_that_this_gpu_never_timed_comes_scaled_from_another_gpu(start: Start) -> None:
    """A third kernel takes an eighth of sdpa's time in the other GPU's table."""
    other = GPU.model_copy(update={"name": "Another GPU"})
    ship_with("quick")
    rates = {"rates": DeviceRates(copy_gbps=6000.0, matrix_tflops=1600.0)}  # so that a start need not measure them
    own = a_law_table(SpecRecord.of(SPEC), other, speed=2.0).model_copy(update=rates)
    write_json(own, prior_path(other, SpecRecord.of(SPEC)))
    names = ["sdpa", "quick"]
    for kernels in (names[:1], names):
        found = derived_prior(other, SpecRecord.of(WIDE), grid("cuda"), {}, pytest.fail, kernels=kernels)
        assert found is not None
        assert {cell.kernel for cell in found.table.cells} == set(kernels)
    assert found.table.prior is not None
    assert {name: "Some GPU" in text for name, (text,) in found.table.prior.sources.items()} == {"sdpa": False, "quick": True}
    at = {cell.kernel: cell.median_us for cell in found.table.cells if cell.point == ("decode", "64q1s16k")}
    assert at["quick"] == pytest.approx(at["sdpa"] / 8, rel=0.3)


@pytest.mark.parametrize(
    "wanted", ["64/8/64 sinks 128", "64/8/64 sinks 0", "16/8/256 plain 1024", "8/2/512 plain 0", "32/8/128 fp8 0"]
)
def test_shipped_tables_serve_models_with_windows_sinks_and_narrow_caches(wanted: str) -> None:
    heads, feature, window = wanted.split()
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), map(int, heads.split("/")), strict=True))
    more = {"plain": {}, "sinks": {"sinks": (0.5,) * 64}, "fp8": {"kv_dtype": torch.float8_e4m3fn}}[feature]
    spec = AttentionSpec(**sizes, scale=0.1, dtype=torch.bfloat16, sliding_window=int(window) or None, **more)
    plain = SpecRecord.of(replace(spec, sliding_window=None, sinks=None, kv_dtype=None))
    device = read_table(SHIPPED[H200, "32-8-64-"]).device
    us = []
    for record in (SpecRecord.of(spec), plain):
        found = derived_prior(device, record, grid("cuda"), {}, None, kernels=["triton"])
        assert found is not None
        assert found.table.complete
        us.append({cell.point: cell.median_us for cell in found.table.cells if cell.block_size in (None, 16)})
    share = min(us[0][point] / us[1][point] for point in [("decode", "64q1s16k"), ("prefill", "1q32k")])
    assert share < 0.7 if window != "0" or feature == "fp8" else share == pytest.approx(1.0)
