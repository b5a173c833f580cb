"""The choice between ways of multiplying over a quantised weight: measured once, kept, and obeyed for each kind of product."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from headway.core.contract.linear import LinearCapabilities, LinearKernel, LinearSpec
from headway.core.contract.weights import WeightFormat
from headway.kernels.linear.choice import ROW_COUNTS, LinearChoice
from headway.kernels.linear.linear import Linear
from headway.tuning.measure.linear import choose_linear_kernels
from headway.tuning.measure.timing import Budget, InterleavedTimer, Timing
from headway.tuning.table.convert import to_times
from headway.tuning.table.files import read_table
from quantized_weights import float8, int4

NAMES = ("kernel", "kernel n64", "scaled_mm", "dequantize")


SPEC = LinearSpec(64, 32, torch.float32, torch.device("cpu"), WeightFormat("fp8"))


class FakeKernel(LinearKernel):
    """A name: what it computes, a bench does."""

    capabilities = LinearCapabilities(frozenset({"fp8"}), fused=frozenset({"bias"}))

    def __init__(self, name: str, max_rows: int | None = None) -> None:
        super().__init__(SPEC)
        self.name, self.max_rows = name, max_rows

    def runs(self, rows: int) -> bool:
        return self.max_rows is None or rows <= self.max_rows

    def prepare(self, weight: object, bias: object = None) -> object:
        return weight

    def apply(self, x: Tensor, weight: object, out: Tensor) -> None:
        raise AssertionError("the bench computes")


class RoundingKernel(FakeKernel):
    rounds_input = True


class FakeLibrary(FakeKernel):
    """A library's kernel, which copies weights; the bench counts the copies."""

    library = copies = True

    def __init__(self, broken: bool = False) -> None:
        super().__init__("library")
        self.broken = broken
        self.copied = WeakSet[Tensor]()
        self.most = 0

    def prepare(self, weight: object, bias: object = None) -> object:
        if self.broken:
            raise MemoryError("no room")
        self.copied.add(copy := torch.zeros(25))
        self.most = max(self.most, len(self.copied))
        return copy


def kernels(library: FakeLibrary | None = None) -> dict[str, FakeKernel]:
    usual = [
        RoundingKernel("scaled_mm") if name == "scaled_mm" else FakeKernel(name, 64 if " " in name else None) for name in NAMES
    ]
    return {each.name: each for each in (usual if library is None else [*usual, library])}


@dataclass
class Bench:
    """Products by torch's operations that take as long as a table says, and are as wrong as it says."""

    costs: dict[str, Callable[[int], float]]
    off: dict[str, float] = field(default_factory=dict)
    fails: frozenset[str] = frozenset()
    library: FakeLibrary | None = None
    spent: float = 0.0
    runs: int = 0
    layers: list[Linear] = field(default_factory=list)

    def kind(self, layers: Sequence[Linear], name: str = "fp8 rows 32x64 float32", gated: bool = False) -> LinearChoice:
        kind = LinearChoice(name, kernels(self.library), gated=gated)
        self.layers.extend(layers)
        for layer in layers:
            layer.choice = kind
            kind.add(layer)

        def compute(way: str, x: Tensor, linear: Linear) -> Tensor:
            linear.prepared_for(kind.kernels[way])
            self.runs += 1
            self.spent += self.costs[way](len(x))
            if way in self.fails:
                raise RuntimeError("out of something")
            assert not isinstance(linear.weight, Tensor)
            y = x @ linear.weight.dequantized(x.dtype).t()
            if gated:
                normed = torch.nn.functional.rms_norm(x, x.shape[1:], eps=1e-6)
                gate, up = (normed @ linear.weight.dequantized(x.dtype).t()).chunk(2, dim=1)
                y = torch.nn.functional.silu(gate) * up
            return y * self.off.get(way, 1.0)

        kind.compute = compute
        return kind


@dataclass(frozen=True)
class TableTimer(InterleavedTimer):
    """Tells what a bench says that calls take."""

    bench: Bench = field(default_factory=lambda: Bench({}))

    def time(
        self, calls: Sequence[Callable[[], object]], device: torch.device, check: Callable[[], object] = lambda: None
    ) -> list[Timing | Exception]:
        found: list[Timing | Exception] = []
        for call in calls:
            before = self.bench.spent
            call()
            us = self.bench.spent - before
            found.append(Timing(us, us, us))
        return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    return tmp_path / "crossover"


def layers(count: int = 2, form: Callable[[Tensor], object] = float8) -> list[Linear]:
    drawn = [torch.randn(32, 64, generator=torch.Generator().manual_seed(number)) for number in range(count)]
    return [Linear(form(weight), dtype=torch.float32, kept=True) for weight in drawn]  # type: ignore[arg-type]


COSTS: dict[str, Callable[[int], float]] = {
    "kernel": lambda rows: 10.0 + rows,
    "kernel n64": lambda rows: 8.0 + rows,
    "scaled_mm": lambda rows: 50.0,
    "dequantize": lambda rows: 400.0,
}


@pytest.mark.parametrize("gated", [False, True])
def test_the_fastest_right_way_serves_each_number_of_rows(cache: Path, caplog: pytest.LogCaptureFixture, gated: bool) -> None:
    caplog.set_level(logging.INFO, "headway")
    bench = Bench(COSTS, off={"kernel n64": 1.2})
    kind = bench.kind(layers(), gated=gated)
    choose_linear_kernels([kind], 60.0, timer=TableTimer(bench=bench))
    assert [kind.kernel_for(rows) for rows in (1, 32, 33, 5000)] == ["kernel", "kernel", "scaled_mm", "scaled_mm"]
    assert "skipping kernel n64 from 1 rows on: ArithmeticError: its answer is off by 2.0e-01" in caplog.text
    assert "linear fp8 rows 32x64 float32: kernel from 1, scaled_mm from 33 rows on (measured " in caplog.text
    (path,) = cache.glob("*.json")
    us = to_times(read_table(path, "linear"), ROW_COUNTS)
    assert us["kernel"][:3] == [11.0, 12.0, 14.0], "a layer's time, not that of all"
    assert us["kernel"][-1] is None, "what was far behind is not tried with more rows"


def test_a_later_start_measures_what_an_earlier_one_had_no_time_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, first = Bench(COSTS), Budget.left
    monkeypatch.setattr(Budget, "left", property(lambda clock: 1.0 if bench.runs < 40 else 0.0))
    choose_linear_kernels([bench.kind(layers())], 60.0, timer=TableTimer(bench=bench))
    (path,) = cache.glob("*.json")
    begun = read_table(path, "linear")
    assert 0 < len({cell.point for cell in begun.cells}) < len(ROW_COUNTS)
    assert not begun.complete
    monkeypatch.setattr(Budget, "left", first)
    again = Bench(COSTS)
    choose_linear_kernels([kind := again.kind(layers())], 60.0, timer=TableTimer(bench=again))
    whole = read_table(path, "linear")
    assert whole.complete
    assert whole.cells[: len(begun.cells)] == begun.cells
    assert {cell.batch for cell in whole.cells} == set(ROW_COUNTS)
    assert [kind.kernel_for(rows) for rows in (1, 64)] == ["kernel n64", "scaled_mm"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": "1.0"}, f"torch: measured with 1.0, here is {torch.__version__}"),
        ({"compilers": {"ptxas": "12.8.61 (/opt/ptxas)"}}, "ptxas: measured with 12.8.61 (/opt/ptxas), here is none"),
        ({"libraries": {"triton": "0.1"}}, "triton: measured with 0.1, here is"),
    ],
)
def test_kinds_are_measured_apart_and_times_of_other_software_anew(
    cache: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object], said: str
) -> None:
    caplog.set_level(logging.INFO, "headway")
    slow = Bench({**COSTS, "kernel": lambda rows: 500.0, "kernel n64": lambda rows: 500.0}, fails=frozenset({"scaled_mm"}))
    fast = Bench(COSTS)
    kinds = [slow.kind(layers(form=lambda weight: int4(weight, 32)), "int4 of 32 32x64 float32"), fast.kind(layers())]
    choose_linear_kernels(kinds[:1], 60.0, timer=TableTimer(bench=slow))
    choose_linear_kernels(kinds[1:], 60.0, timer=TableTimer(bench=fast))
    assert [kind.kernel_for(1) for kind in kinds] == ["dequantize", "kernel n64"]
    assert "skipping scaled_mm from 1 rows on: RuntimeError: out of something" in caplog.text
    path = next(path for path in cache.glob("*.json") if "fp8" in path.name)
    kept = json.loads(path.read_text())
    kept["device"] |= changes
    path.write_text(json.dumps(kept))
    choose_linear_kernels([kind := fast.kind(layers())], 0)
    assert said in caplog.text
    assert kind.source == "rule, not measured"


def test_without_time_a_rule_chooses_and_says_so(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway")
    bench = Bench(COSTS)
    kind = bench.kind(layers())
    choose_linear_kernels([kind], 0.0)
    assert bench.runs == 0
    assert kind.changes() == {1: "kernel", 33: "scaled_mm"}
    assert "kernel from 1, scaled_mm from 33 rows on (rule, not measured)" in caplog.text
    plain = LinearChoice("int4 of 128", {name: FakeKernel(name) for name in ("kernel", "dequantize")})
    assert plain.changes() == {1: "kernel", 257: "dequantize"}
    assert not cache.exists()


def test_a_library_keeps_what_it_arranged_only_where_it_serves(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway")
    for us, kept in ((1.0, 20), (900.0, 0)):
        library = FakeLibrary()
        bench = Bench({**COSTS, "library": lambda rows, us=us: us}, library=library)
        kind = bench.kind(layers(20), f"fp8 rows {us}")
        choose_linear_kernels([kind], 60.0, timer=TableTimer(bench=bench))
        assert library.most == max(kept, 16), "before the choice, of the layers alone that are measured"
        assert len(library.copied) == kept
        assert ("library" in kind.serving()) == bool(kept)
    assert "library uses 0.0 MB of its own for 20 layers" in caplog.text


def test_a_library_that_has_changed_since_serves_no_longer(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    costs: dict[str, Callable[[int], float]] = {**COSTS, "library": lambda rows: 1.0}
    bench = Bench(costs, library=FakeLibrary())
    choose_linear_kernels([bench.kind(layers())], 60.0, timer=TableTimer(bench=bench))
    for changed in (
        Bench(costs, library=FakeLibrary(), off={"library": 1.5}),
        Bench(costs, library=FakeLibrary(), fails=frozenset({"library"})),
        Bench(costs, library=FakeLibrary(broken=True)),
    ):
        choose_linear_kernels([kind := changed.kind(layers())], 0)
        assert kind.kernel_for(1) == "kernel n64", "the next by the same times"
        assert not changed.library.copied
        assert not kind.refused["library"]
    for why in ("ArithmeticError: its answer is off by 5.0e-01", "RuntimeError: out of something", "MemoryError: no room"):
        assert f"linear fp8 rows 32x64 float32: excluding library: {why}" in caplog.text


@pytest.fixture
def shipped(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """A file that ships with Headway, measured by a bench of COSTS with another torch; nothing is kept."""
    caplog.set_level(logging.INFO, "headway")
    monkeypatch.setenv("HEADWAY_PRIORS", str(tmp_path / "priors"))
    bench = Bench(COSTS)
    choose_linear_kernels([bench.kind(layers())], 60.0, timer=TableTimer(bench=bench))
    (path,) = cache.glob("*.json")
    found = json.loads(path.read_text())
    found["device"]["torch"] = "1.0"
    target = tmp_path / "priors" / path.name
    target.parent.mkdir(parents=True)
    target.write_text(json.dumps(found))
    path.unlink()
    return target


@pytest.mark.usefixtures("cache", "shipped")
def test_shipped_times_serve_unchecked_where_nothing_may_be_measured(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(COSTS)
    choose_linear_kernels([kind := bench.kind(layers())], 0.0)
    assert kind.source.endswith("not checked here")
    assert kind.kernel_for(1) == "kernel n64"
    more = Bench({**COSTS, "library": lambda rows: 1.0}, library=FakeLibrary())
    choose_linear_kernels([kind := more.kind(layers())], 0.0)
    assert kind.source == "rule, not measured", "they do not know the library"
