"""Measuring state backends: right answers first, a table for each layer, and what a start makes of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.backends.states.torch_states import TorchStates
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import STATE
from headway.core.contract.state import CONV, GATED_DELTA, MAMBA1, MAMBA2, StateCapabilities, StateLayout, StateSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineParts, make_engine
from headway.core.select.choice import Selection
from headway.core.select.costs import NO_BLOCKS, CostTable, state_shape
from headway.core.select.kernels import StateCandidates
from headway.core.select.request import ALL_AUTO, BackendRequest, LayerSpecs
from headway.core.select.selector import KernelSelector
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.registry import Registry, create_registry
from headway.tuning import autotune
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.isolated.measure_in_child import measure_in_child
from headway.tuning.measure import kinds
from headway.tuning.measure.points import state_points
from headway.tuning.measure.run import CrossoverOptions, run_kernel_level
from headway.tuning.table.convert import to_costs
from headway.tuning.table.files import TableError, read_table, stored_tables, table_path
from headway.tuning.table.schema import CRASHED, CrossoverTable, StateSpecRecord
from stateful_model import MODELS
from tables import QUICK, a_device

LAYER = StateSpec(GATED_DELTA, 4, 2, key_dim=4, value_dim=8, conv_channels=48, conv_width=4, scale=0.5, qk_norm=True)
GRID = [*state_points("step", (2, 1, 0)), *state_points("scan", (1, 70, 0)), *state_points("step", (2, 4, 1))]


class Twin(TorchStates):
    """As right as torch, and slow in its scans."""

    name = "twin"

    def scan(self, *call: Any) -> None:
        time.sleep(0.03)  # more than others' work adds to torch's time
        super().scan(*call)


class Wrong(TorchStates):
    name = "wrong"

    def step(self, x: Tensor, gates: Sequence[Tensor], *rest: Any) -> None:
        super().step(x, gates, *rest)
        rest[-1].mul_(1.001)


class Stray(TorchStates):
    """Its answers are right, and it spoils a slot that is not its own."""

    name = "stray"

    def step(self, x: Tensor, gates: Sequence[Tensor], parameters: Any, cache: Any, plan: Any, out: Tensor) -> None:
        super().step(x, gates, parameters, cache, plan, out)
        used = {*plan.metadata.slots_cpu.tolist(), *plan.metadata.out_slots_cpu.flatten().tolist()}
        cache.logical_recurrent[next(slot for slot in range(cache.num_slots) if slot not in used)] = 0.0


class FailsLate(TorchStates):
    name = "late"

    def scan(self, x: Tensor, *rest: Any) -> None:
        if x.shape[0] == 70:
            raise RuntimeError("too long for me")
        super().scan(x, *rest)


class Bare(TorchStates):
    name = "bare"
    capabilities = StateCapabilities(frozenset({GATED_DELTA}), convolution=False, devices=("cpu",))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and a quick grid."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "TIMER", QUICK)
    monkeypatch.setattr(kinds, "state_grid", lambda device: GRID)
    return tmp_path


def registry_of(*backends: object) -> Registry:
    return create_registry(backends, load_entry_points=False)


def measure(*backends: type[TorchStates], **changes: Any) -> CrossoverTable:
    names = ["torch", *(each.name for each in backends)]  # none for a GPU, where there is one
    options = CrossoverOptions(**{"spec": LAYER, "grid": GRID, "timer": QUICK, "backends": names, **changes})
    return run_kernel_level(options, registry_of(*backends))


def state_costs_for(
    specs: Sequence[StateSpec], registry: Registry, backend_request: BackendRequest, table_request: TableRequest
) -> dict[StateSpec, CostTable] | None:
    return costs_for(LayerSpecs([], states=specs), registry, backend_request, table_request, kind=STATE)


def selected(registry: Registry, specs: Sequence[StateSpec], costs: Mapping[StateSpec, CostTable]) -> Selection[StateLayout]:
    return KernelSelector(StateCandidates(registry.states, specs), ALL_AUTO, costs).selection


def test_every_backend_over_every_layout_is_checked_and_timed() -> None:
    table = measure(Twin, timer=replace(QUICK, long_ms=math.inf))  # however busy the machine is, none is given up
    assert table.complete
    assert len(table.cells) == len(GRID) * 2 * 2
    assert {cell.layout for cell in table.cells} == {"key_value", "value_key"}
    assert {cell.status for cell in table.cells} <= {"ok", "tie"}
    assert all(cell.relative_error is not None and cell.relative_error < 2e-5 for cell in table.cells)
    costs = to_costs(table)
    scan = state_shape(Phase.EXTEND, 1, 70)
    assert costs.at(scan, "twin", "key_value", NO_BLOCKS)[0] > 30_000
    assert selected(registry_of(Twin), [LAYER], {LAYER: costs}).names[Phase.PREFILL] == "torch"


@pytest.mark.parametrize("kind", [MAMBA1, MAMBA2, CONV])
def test_other_kinds_of_layers_can_be_measured(kind: str) -> None:
    heads = {CONV: (0, 0, 0, 0, 12, 3), MAMBA1: (6, 6, 4, 1, 6, 4), MAMBA2: (4, 2, 4, 8, 48, 4)}[kind]
    table = measure(spec=StateSpec(kind, *heads, activation="none" if kind == CONV else "silu"))
    assert {cell.status for cell in table.cells} <= {"ok", "tie"}


@pytest.mark.parametrize(("backend", "words"), [(Wrong, "relative error 0.001"), (Stray, "relative error inf")])
def test_a_wrong_backend_takes_no_part(backend: type[TorchStates], words: str) -> None:
    table = measure(backend)
    record = next(record for record in table.kernels if record.name == backend.name)
    assert record.reason.startswith(f"self-test, step of {backend.name} over key_value: {words}")
    assert {cell.kernel for cell in table.cells} == {"torch"}
    with pytest.raises(UnsupportedError, match="a backend that runs and passes its self-test"):
        measure(backend, backends=[backend.name])


def test_a_point_at_which_a_backend_fails_has_no_time_and_is_never_chosen() -> None:
    table = measure(FailsLate)
    late = [cell for cell in table.cells if cell.kernel == "late" and cell.phase == "scan"]
    assert {(cell.status, cell.reason) for cell in late} == {("error", "RuntimeError: too long for me")}
    assert selected(registry_of(FailsLate), [LAYER], {LAYER: to_costs(table)}).names[Phase.PREFILL] == "torch"


def test_the_first_start_measures_and_the_next_one_reads(caplog: pytest.LogCaptureFixture) -> None:
    registry = registry_of(Twin)
    first = state_costs_for([LAYER] * 3, registry, ALL_AUTO, TableRequest(budget=60))
    assert "measuring state backends for gated_delta" in caplog.text
    path = table_path(a_device(), StateSpecRecord.of(LAYER))
    assert read_table(path, "state").complete
    with pytest.raises(TableError, match=r"needs a table of attention, got one of state"):
        read_table(path)
    assert stored_tables() == [], "tables of attention are files of their own"
    caplog.clear()
    second = state_costs_for([LAYER], registry, ALL_AUTO, TableRequest(budget=60))
    assert caplog.text == ""
    step = state_shape(Phase.DECODE, 2, 1)
    assert first[LAYER].at(step, "twin", "key_value", NO_BLOCKS) == second[LAYER].at(step, "twin", "key_value", NO_BLOCKS)
    assert "auto: state table of " in str(selected(registry, [LAYER], second))


def test_nothing_is_measured_without_a_budget_a_choice_or_states(cache: Path) -> None:
    registry, request = registry_of(Twin), TableRequest(budget=60)
    assert state_costs_for([LAYER], registry, ALL_AUTO, TableRequest(budget=0)) is None
    assert state_costs_for([], registry, ALL_AUTO, request) is None
    assert state_costs_for([LAYER], registry_of(), ALL_AUTO, request) is None, "one backend"
    assert state_costs_for([LAYER], registry, BackendRequest("torch", "twin"), request) is None
    assert state_costs_for([LAYER], registry_of(Bare), ALL_AUTO, TableRequest(budget=0)) is None
    assert not (cache / "crossover").exists()


def test_a_start_that_ran_out_of_time_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    more = [*GRID, *state_points("scan", (2, 40, 0)), *state_points("step", (3, 1, 0))]
    monkeypatch.setattr(kinds, "state_grid", lambda device: more)
    path, counts = table_path(a_device(), StateSpecRecord.of(LAYER)), []
    for _ in range(2):
        state_costs_for([LAYER], registry_of(Twin), ALL_AUTO, TableRequest(budget=1e-9))
        counts.append(len({cell.point for cell in read_table(path, "state").cells}))
    assert counts[0] == 2, "a point of each verb"
    assert counts[1] > 2
    state_costs_for([LAYER], registry_of(Twin), ALL_AUTO, TableRequest(budget=60))
    assert read_table(path, "state").complete


def test_an_engine_takes_what_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, registry = MODELS["gated delta"], registry_of(Twin)
    specs = [layer.spec for layer in model.state_layers]
    costs = state_costs_for(specs, registry, ALL_AUTO, TableRequest(budget=60))
    config = EngineConfig(attn_backend="sdpa", block_size=8, kv_cache_memory=2**21, max_num_seqs=2)
    make_engine(EngineParts(model=model, source=registry, config=config, state_costs=costs))
    chosen = selected(registry, specs, costs)
    assert "auto: state table of " in chosen.why
    assert f"states: {chosen}" in caplog.text


@pytest.mark.gpu
def test_steps_on_a_gpu_are_replays_of_graphs_and_scans_are_launched() -> None:
    layer = replace(LAYER, key_dim=64, value_dim=64, conv_channels=512, dtype=torch.bfloat16, device=torch.device("cuda"))
    table = measure(spec=layer, backends=["torch", "triton"], compile_ahead=compile_ahead(layer.device))
    assert {cell.status for cell in table.cells} <= {"ok", "tie"}
    assert "triton" in {cell.kernel for cell in table.cells}
    for cell in table.cells:
        assert cell.graph is (cell.phase == "step")
        assert (cell.host_us is None) is cell.graph


CRASHES = """
import os
from headway.backends.states.torch_states import TorchStates

class Filed(TorchStates):
    name = "filed"

    def scan(self, x, *rest):
        if x.shape[0] == 70:
            os.abort()
        super().scan(x, *rest)
"""


@pytest.mark.slow  # two processes that import torch
def test_a_plugin_that_crashes_ends_its_process_and_no_start(tmp_path: Path) -> None:
    file = tmp_path / "in_a_file.py"
    file.write_text(CRASHES)
    registry = create_registry([f"{file}:Filed"], load_entry_points=False)
    options = CrossoverOptions(LAYER, ["filed", "torch"], grid=GRID, timer=QUICK, budget=60.0, output=tmp_path / "states.json")
    table = measure_in_child(options, registry)
    reason = {record.name: record.reason for record in table.kernels}
    assert reason["filed"].startswith(f"{CRASHED} in scan 1q70")
    assert reason["torch"] == ""
    assert {cell.kernel for cell in table.cells} == {"torch"}
    assert table.complete
