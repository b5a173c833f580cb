"""The choice between kernels for experts, and between methods of summing over ranks: measured once, saved, measured again."""

from __future__ import annotations

import dataclasses
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from expert_layers import CONFIGS, Layer
from headway.cli.look.explain import kernel_section
from headway.core.contract.experts import ExpertsCapabilities
from headway.core.contract.operation import ALL_REDUCE
from headway.core.contract.ranks import AsyncAllReduceKernel, RankGroup
from headway.core.contract.support import YES
from headway.core.contract.weights import FORMATS
from headway.core.engine.ranks.torch_ranks import (
    BYTES,
    SIZES,
    Gloo,
    TorchRanks,
    describe_sums,
    fastest_sum,
    make_store,
)
from headway.core.select.costs import AxisTimes
from headway.core.system.json_files import write_json
from headway.core.system.shared_ring import LifeSigns
from headway.kernels.experts.bound import ExpertsKind
from headway.kernels.experts.builtin import TOKEN_COUNTS
from headway.kernels.experts.plain import Routed, RoutedKernel, RouteTokens, TorchExperts, route
from headway.kernels.experts.weights import RoutedWeights, spec_of
from headway.kernels.step.operations import Norm
from headway.registry import create_registry
from headway.tuning.measure import all_reduce
from headway.tuning.measure.all_reduce import choose_all_reduce, explain_sums
from headway.tuning.measure.experts import choose_experts
from headway.tuning.table.convert import to_times
from headway.tuning.table.files import prior_path, read_table

CPU = torch.device("cpu")
CONFIG = dataclasses.replace(CONFIGS["gpt_oss"], intermediate_size=64)


class Fake(RoutedKernel):
    """A kernel by torch's operations, as slow and as wrong as it is asked to be."""

    capabilities = ExpertsCapabilities(formats=frozenset(FORMATS))

    def __init__(self, name: str, seconds: float = 0.0, most: int = 10**6, off: float = 1.0, fails: bool = False) -> None:
        self.name, self.seconds, self.most, self.off, self.fails, self.calls = name, seconds, most, off, fails, 0

    def runs(self, num_tokens: int) -> bool:
        return num_tokens <= self.most

    def add(self, routed: Routed, weights: RoutedWeights, out: Tensor) -> None:
        assert not weights.router_bias.any(), "the router of a measurement spreads tokens evenly"
        self.calls += 1
        if self.fails:
            raise RuntimeError("out of something")
        if not out.any():  # where answers are compared
            plain = TorchExperts(spec_of(CONFIG, weights))
            plain.apply(routed.x, routed.experts, self.off * routed.weights, plain.prepare(weights), out)
        time.sleep(self.seconds * min(len(out), 64))


def front(weights: RoutedWeights, norm: Norm) -> RouteTokens:
    """Norms nothing."""

    def routed(x: Tensor, sorts: bool) -> Routed:
        routing = route(torch.nn.functional.linear(x, weights.router), CONFIG)
        return Routed(x, routing.experts, routing.weights)

    return routed


def kind_of(*kernels: Fake, form: str = "", hidden: int = 64) -> ExpertsKind:
    layer = Layer(CONFIG, torch.float32, hidden=hidden)
    weights = layer.quantized(form) if form else layer.weights(torch.float32)
    others = [Fake("idle", most=1)] if len(kernels) == 1 else []  # nothing is measured where there is no choice
    kind = ExpertsKind(spec_of(CONFIG, weights), [*kernels, *others], front)
    kind.example = weights
    return kind


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    return tmp_path / "crossover"


@pytest.mark.slow
def test_the_fastest_right_way_serves_and_is_remembered(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway")
    slow, fast, few = Fake("slow", 1.2e-3), Fake("fast", 3e-4), Fake("few", 0.0, most=2)
    wrong, failing = Fake("wrong", 0.0, off=1.3), Fake("failing", 0.0, fails=True)
    kind = kind_of(slow, fast, few, wrong, failing)
    choose_experts([kind], 60.0)
    assert [kind.kernel_for(count).name for count in (1, 4, 64)] == ["few", "fast", "fast"]
    assert "skipping wrong from 1 tokens on: ArithmeticError: its answer is off by 3.0e-01" in caplog.text
    assert "skipping failing from 1 tokens on: ArithmeticError: RuntimeError: out of something" in caplog.text
    assert ", fast from" in caplog.text
    (path,) = cache.glob("*.json")
    assert to_times(read_table(path, "experts"), TOKEN_COUNTS)["wrong"] == [None] * len(TOKEN_COUNTS)
    runs = fast.calls
    again = kind_of(slow, fast, few, wrong, failing)
    choose_experts([again], 60.0)
    assert fast.calls == runs, "nothing is measured twice"
    assert again.kernel_for(64).name == "fast"


@pytest.mark.slow
def test_shipped_times_are_used_without_measuring_and_their_choice_is_checked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway")
    choose_experts([kind_of(Fake("slow", 2e-3), Fake("fast", 3e-4), Fake("first"))], 60.0)
    (path,) = cache.glob("*.json")
    monkeypatch.setenv("HEADWAY_PRIORS", str(cache.parent / "priors"))
    table = read_table(path, "experts")
    write_json(table, prior_path(table.device, table.spec))
    path.unlink()
    caplog.clear()
    slow, fast, first = Fake("slow"), Fake("fast"), Fake("first", off=1.3)
    kind = kind_of(slow, fast, first)
    choose_experts([kind], 60.0)
    assert "measuring" not in caplog.text
    assert "excluding first: its answer is off by 3.0e-01" in caplog.text
    assert {kind.kernel_for(count).name for count in TOKEN_COUNTS} == {"fast"}
    assert not slow.calls, "a kernel that is not chosen is not checked"


def test_without_time_a_rule_chooses_and_says_so(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway")
    rows, tiles = Fake("triton.rows"), Fake("triton.tiles16")
    kind = kind_of(tiles, rows)
    choose_experts([kind], 0.0)
    assert (rows.calls, tiles.calls) == (0, 0)
    assert kind.kernel_for(1) is rows
    assert "(not measured)" in caplog.text
    assert not cache.exists()


def test_layers_of_other_weights_or_sizes_have_times_of_their_own(cache: Path) -> None:
    only, other = Fake("only"), Fake("other")
    kinds = [kind_of(only, other), *(kind_of(only, other, form=form) for form in ("fp8 rows", "mxfp4"))]
    kinds.append(kind_of(only, other, hidden=128))
    for kind in kinds:
        runs = only.calls
        choose_experts([kind], 60.0)
        assert only.calls > runs
    assert len([*cache.glob("*.json")]) == 4


US: dict[str, list[float | None]] = {
    "one_shot": [5.0 if size <= 2**17 else 20.0 if size <= 2**19 else None for size in SIZES],
    "nccl": [10.0] * len(SIZES),
}


def test_the_fastest_way_serves_the_nearest_sizes() -> None:
    times = AxisTimes(BYTES, US, "measured today")
    found = [fastest_sum(times, count, list(US)) for count in (1, 1024, 150_000, 200_000, 2**19, 2**26)]
    assert found == ["one_shot", "one_shot", "one_shot", "nccl", "nccl", "nccl"]
    assert fastest_sum(times, 1024, ["nccl"]) == "nccl"
    assert fastest_sum(AxisTimes(BYTES, {}, ""), 1024, list(US)) == "nccl"
    assert describe_sums(times) == "one_shot from 1,024, nccl from 262,144 bytes on (measured today)"


def test_sums_are_explained_as_linear_layers_are() -> None:
    kernels = create_registry(policy="none").of(ALL_REDUCE)
    assert list(kernels.entries) == ["one_shot", "two_shot", "copies", "nccl", "gloo"]
    found = explain_sums(kernels, RankGroup(0, 2, CPU))
    assert (found["ways"], found["by"], found["refused"]) == ({1: "gloo"}, "no other kernel runs here", {})
    (row,) = kernel_section(found).rows
    assert row.cells == ("gloo", "from 1 on")
    (row,) = kernel_section(explain_sums(kernels, RankGroup(0, 2, CPU), in_order=True)).rows
    assert row.cells == ("all-gather", "from 1 on")
    assert kernels.supports("gloo", RankGroup(0, 2, torch.device("cuda", 0))).brief == "device: needs cpu, got cuda"


class Doubling(Gloo):
    """Sums as gloo does; the broken one doubles them."""

    name, broken = "doubling", False
    capabilities = dataclasses.replace(Gloo.capabilities, max_bytes=SIZES[5])

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        return super().__call__(x, onto).mul_(1 + self.broken)


def ranks_of(kernel: type[Gloo], budget: float, kernels: Any = None) -> list[TorchRanks]:
    """Two ranks in threads of this process, which have chosen between gloo and another kernel, or between `kernels`."""
    one = SimpleNamespace(meant_for=lambda _: ["doubling", "gloo"], backend=lambda _: kernel, supports=lambda *_: YES)
    store = make_store(2)

    def rank(number: int) -> TorchRanks:
        joined = make_store(2, store.port) if number else store
        ranks = TorchRanks(joined, number, 2, CPU, LifeSigns(numpy.zeros(16, numpy.int64)))
        choose_all_reduce(ranks, kernels or one, budget)
        return ranks

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def test_ranks_choose_by_the_times_of_rank_0(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(all_reduce, "SIZES", SIZES[:6])
    monkeypatch.setattr(all_reduce, "BYTES", dataclasses.replace(BYTES, counts=SIZES[:6]))
    assert ranks_of(Doubling, 0.0)[1].times is None
    first, second = (ranks.times.us for ranks in ranks_of(Doubling, 5.0))
    assert first == second
    assert not any(None in times for times in first.values())
    assert ranks_of(Doubling, 5.0)[1].times.us == first, "nothing is measured twice"
    wrong = ranks_of(type("Wrong", (Doubling,), {"broken": True}), 5.0)
    assert [each.name for each in wrong[1].sums] == ["gloo"]
    assert "excluding doubling; gloo is used instead: a sum of 8 elements is off by" in caplog.text


class Beside(Doubling, AsyncAllReduceKernel):
    def start(self, x: Tensor, onto: Tensor | None = None) -> SimpleNamespace:
        return SimpleNamespace(wait=partial(Doubling.__call__, self, x, onto))


def test_an_all_reduce_that_overlaps_is_checked_but_not_chosen_by_size(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headway")
    for ranks in ranks_of(Beside, 0.0):
        assert isinstance(ranks.overlapped(), Beside)
        assert [each.name for each in ranks.sums] == ["gloo"]
    broken = ranks_of(type("Wrong", (Beside,), {"broken": True}), 0.0)
    assert [ranks.overlapped() for ranks in broken] == [None, None]
    kernels = SimpleNamespace(meant_for=lambda _: ["doubling", "gloo"], supports=lambda *_: YES)
    kernels.backend = {"doubling": Beside, "gloo": Gloo}.get
    found = explain_sums(kernels, RankGroup(0, 2, CPU))
    assert (found["ways"], list(found["overlapped"])) == ({1: "gloo"}, ["doubling"])
    assert "overlaps with the linear layers" in str([row.cells for row in kernel_section(found).rows])


class Second(Beside):
    name = "second"


def test_only_the_first_plugin_whose_sums_overlap_is_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headway")
    kernels = create_registry([Beside, Second], load_entry_points=False).all_reduce
    assert [type(ranks.overlapped()) for ranks in ranks_of(Beside, 0.0, kernels)] == [Beside, Beside]
    reason = "only one kernel overlaps with linear layers, the first one that is registered and runs here: doubling"
    assert [each.message for each in caplog.records if "second" in each.message] == [f"all-reduce: leaving out second: {reason}"]
    found = explain_sums(kernels, RankGroup(0, 2, CPU))
    assert list(found["overlapped"]) == ["doubling"]
    assert found["refused"]["second"] == reason
