"""The choice of state backends: by measured costs where there are any, and by rank order else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from headway.backends.states.torch_states import TorchStates
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.metadata import Phase
from headway.core.contract.state import GATED_DELTA, StateBackend, StateCapabilities, StateLayout, StateSpec
from headway.core.select.costs import NO_BLOCKS, CostTable, Sample, Shape, state_shape
from headway.core.select.kernels import StateCandidates
from headway.core.select.request import ALL_AUTO, BackendRequest, Workload
from headway.core.select.selector import KernelSelector
from headway.registry import Registry, create_registry

LAYER = StateSpec(GATED_DELTA, num_heads=4, num_key_heads=2, key_dim=4, value_dim=8, conv_channels=48, conv_width=4)
WIDE = replace(LAYER, value_dim=16, conv_channels=80)
WORK = Workload(batch=4, input_len=64, output_len=10)
"""One scan of all four, and ten steps."""


class Swift(TorchStates):
    name = "swift"


class NoConvolution(TorchStates):
    name = "bare"
    capabilities = StateCapabilities(frozenset({GATED_DELTA}), convolution=False, devices=("cpu",))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return create_registry([Swift], load_entry_points=False)


Times = Mapping[tuple[str, str], tuple[float, float]]
"""(backend, layout) -> microseconds of a scan and of a step of one layer."""


def costs(times: Times, excluded: Mapping[str, str] | None = None, drafts_us: Mapping[str, float] | None = None) -> CostTable:
    samples = []
    for (name, layout), (scan, step) in times.items():
        verbs = [(Phase.PREFILL, 64, scan), (Phase.DECODE, 1, step), (Phase.DECODE, 4, (drafts_us or {}).get(name, step))]
        samples += [
            Sample(state_shape(phase, 4, query_len), name, layout, NO_BLOCKS, us, plan_us=1.0)
            for phase, query_len, us in verbs
            if math.isfinite(us)
        ]
    return CostTable(samples, 0.01, "state table of today", excluded)


Selected = KernelSelector[StateSpec, StateBackend, StateLayout]


def select(registry: Registry, table: CostTable | None, request: BackendRequest = ALL_AUTO, decode_len: int = 1) -> Selected:
    candidates = StateCandidates(registry.states, [LAYER] * 3, decode_len)
    return KernelSelector(candidates, request, None if table is None else {LAYER: table}, WORK)


def names(selector: Selected) -> tuple[str, str]:
    """Who serves prompts, and who serves decodes."""
    chosen = selector.selection.names
    assert chosen.keys() == {Phase.PREFILL, Phase.DECODE}
    return chosen[Phase.PREFILL], chosen[Phase.DECODE]


SPLIT: Times = {("torch", "key_value"): (100.0, 50.0), ("swift", "key_value"): (300.0, 10.0)}


def test_each_phase_goes_to_the_fastest_and_the_source_of_the_times_is_said(registry: Registry) -> None:
    selector = select(registry, costs(SPLIT))
    assert str(selector.selection) == (
        "prefill=torch, decode=swift; state_layout=key_value (auto: state table of today, workload 4x64+10)"
    )
    scan, step = Shape(Phase.PREFILL, 4, 64, 64), Shape(Phase.DECODE, 4, 1, 1)
    figures = [(each.name, each.us) for shape in (scan, step) for each in selector.rated(shape, "torch") if each.us]
    assert figures == [
        ("torch", pytest.approx(301.0)),
        ("swift", pytest.approx(901.0)),
        ("torch", pytest.approx(151.0)),
        ("swift", pytest.approx(31.0)),
    ]
    assert select(registry, None).selection.why == "auto: no crossover table, rank order"


def test_the_layout_is_that_of_least_total_cost_and_a_small_gain_moves_nothing(registry: Registry) -> None:
    both: Times = SPLIT | {("torch", "value_key"): (150.0, 2.0)}
    chosen = select(registry, costs(both))
    assert names(chosen) == ("torch", "torch")
    assert chosen.selection.layout.name == "value_key"
    slightly: Times = SPLIT | {("torch", "value_key"): (99.0, 10.0)}
    assert select(registry, costs(slightly)).selection.layout.name == "key_value"


def test_layers_of_several_kinds_count_by_their_number(registry: Registry) -> None:
    """The one wide layer is much faster with swift, which the three others outweigh."""
    tables = {
        LAYER: costs({("torch", "key_value"): (100.0, 50.0), ("swift", "key_value"): (100.0, 80.0)}),
        WIDE: costs({("torch", "key_value"): (100.0, 90.0), ("swift", "key_value"): (100.0, 10.0)}),
    }
    for specs, fastest in (([LAYER] * 3 + [WIDE], "torch"), ([LAYER, WIDE], "swift")):
        assert names(KernelSelector(StateCandidates(registry.states, specs), ALL_AUTO, tables, WORK))[1] == fastest


def test_a_phase_that_is_named_is_not_switched_and_counts(registry: Registry) -> None:
    both: Times = SPLIT | {("torch", "value_key"): (1.0, 20.0), ("swift", "value_key"): (1.0, 11.0)}
    named = select(registry, costs(both), BackendRequest.parse("prefill=swift"))
    assert names(named) == ("swift", "swift")
    assert named.selection.layout.name == "value_key", "its scan is much faster there, its step a little slower"
    assert select(registry, costs(both), BackendRequest("torch", "torch")).selection.why == "asked for"


def test_with_drafts_their_times_decide(registry: Registry) -> None:
    table = costs(SPLIT, drafts_us={"swift": 500.0})
    assert names(select(registry, table))[1] == "swift"
    assert names(select(registry, table, decode_len=4))[1] == "torch"


def test_without_a_time_for_either_verb_the_rank_order_decides(registry: Registry) -> None:
    chosen = select(registry, costs({("torch", "key_value"): (100.0, math.inf), ("swift", "key_value"): (1.0, math.inf)}))
    assert chosen.selection.why == "auto: state table of today has no times for this layout and block size, rank order"
    assert names(chosen)[0] == "swift"


def test_what_failed_is_never_chosen_and_says_why(registry: Registry) -> None:
    selector = select(registry, costs(SPLIT, excluded={"swift": "self-test, step: relative error 1"}))
    assert names(selector) == ("torch", "torch")
    rated = {each.name: each for each in selector.rated(Shape(Phase.DECODE, 4, 1, 1), "torch")}
    assert next(iter(rated)) == "torch"
    assert rated["torch"].us == pytest.approx(151.0)
    assert "relative error 1" in str(rated["swift"].reasons[0])


def test_a_backend_without_a_convolution_is_chosen_with_one_that_helps() -> None:
    registry = create_registry([NoConvolution], load_entry_points=False)
    table = costs({("torch", "key_value"): (100.0, 50.0), ("bare", "key_value"): (300.0, 10.0)})
    selector = select(registry, table)
    assert selector.selection.helpers == {Phase.DECODE: "torch"}
    assert selector.backends_for(Phase.DECODE)[LAYER].name == "bare"
    assert "decode=bare, convolutions by torch" in str(selector.selection)


class FewDrafts(TorchStates):
    name = "few"
    capabilities = replace(TorchStates.capabilities, max_draft_tokens=2)


def test_a_backend_is_asked_for_no_more_drafts_than_it_claims() -> None:
    registry, few = create_registry([FewDrafts], load_entry_points=False), BackendRequest("few", "few")
    assert names(select(registry, None, few, decode_len=3))[1] == "few"
    with pytest.raises(UnsupportedError, match="max_draft_tokens: needs at most 2 drafts of a sequence, got 3"):
        select(registry, None, few, decode_len=4)
    assert names(select(registry, None, decode_len=4))[1] != "few"
