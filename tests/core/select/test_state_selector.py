"""The choice of state backends: by measured costs where there are any, and by rank order else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from headway.backends.states.torch_states import TorchStates
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.metadata import Phase
from headway.core.contract.state import GATED_DELTA, StateCapabilities, StateSpec
from headway.core.select.backend_request import ALL_AUTO, BackendRequest
from headway.core.select.costs import CostTable, Sample
from headway.core.select.selection import Workload
from headway.core.select.state_selector import NO_BLOCKS, StateSelector, state_shape
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


def select(registry: Registry, table: CostTable | None, request: BackendRequest = ALL_AUTO, **options: int) -> StateSelector:
    return StateSelector(registry.states, [LAYER] * 3, request, None if table is None else {LAYER: table}, WORK, **options)


SPLIT: Times = {("torch", "key_value"): (100.0, 50.0), ("swift", "key_value"): (300.0, 10.0)}


def test_each_verb_goes_to_the_fastest_and_the_figures_are_told(registry: Registry) -> None:
    chosen = select(registry, costs(SPLIT)).selection
    assert (chosen.scan, chosen.step, chosen.layout.name) == ("torch", "swift", "key_value")
    expected = "auto: measured, scan 301 us (swift 901), step 31 us (torch 151), for 3 layers in a mean step of 4x64+10; "
    expected += "state table of today"
    assert chosen.why == expected
    assert select(registry, None).selection.why == "auto: rank order"


def test_the_layout_is_that_of_least_total_cost_and_a_small_gain_moves_nothing(registry: Registry) -> None:
    both: Times = SPLIT | {("torch", "value_key"): (150.0, 2.0)}
    assert str(select(registry, costs(both)).selection).startswith("torch, states in layout value_key (auto: measured")
    slightly: Times = SPLIT | {("torch", "value_key"): (99.0, 10.0)}
    assert select(registry, costs(slightly)).selection.layout.name == "key_value"


def test_layers_of_several_kinds_count_by_their_number(registry: Registry) -> None:
    """The one wide layer is much faster with swift, which the three others outweigh."""
    tables = {
        LAYER: costs({("torch", "key_value"): (100.0, 50.0), ("swift", "key_value"): (100.0, 80.0)}),
        WIDE: costs({("torch", "key_value"): (100.0, 90.0), ("swift", "key_value"): (100.0, 10.0)}),
    }
    assert StateSelector(registry.states, [LAYER] * 3 + [WIDE], costs=tables, workload=WORK).selection.step == "torch"
    assert StateSelector(registry.states, [LAYER, WIDE], costs=tables, workload=WORK).selection.step == "swift"


def test_a_verb_that_is_named_is_not_weighed(registry: Registry) -> None:
    both: Times = SPLIT | {("torch", "value_key"): (1.0, 20.0), ("swift", "value_key"): (1.0, 11.0)}
    named = select(registry, costs(both), BackendRequest.parse("prefill=swift")).selection
    assert (named.scan, named.step, named.layout.name) == ("swift", "swift", "key_value")
    assert select(registry, costs(both), BackendRequest("torch", "torch")).selection.why == "asked for"


def test_with_drafts_their_times_decide(registry: Registry) -> None:
    table = costs(SPLIT, drafts_us={"swift": 500.0})
    assert select(registry, table).selection.step == "swift"
    assert select(registry, table, decode_len=4).selection.step == "torch"


def test_without_a_time_for_either_verb_the_rank_order_decides(registry: Registry) -> None:
    chosen = select(registry, costs({("torch", "key_value"): (100.0, math.inf), ("swift", "key_value"): (1.0, math.inf)}))
    assert chosen.selection.why == "auto: not measured far enough, rank order"
    assert chosen.selection.scan == "swift"


def test_what_failed_is_never_chosen_and_says_why(registry: Registry) -> None:
    selector = select(registry, costs(SPLIT, excluded={"swift": "self-test, step: relative error 1"}))
    assert (selector.selection.scan, selector.selection.step) == ("torch", "torch")
    rated = {each.name: each for each in selector.rated(Phase.DECODE)}
    assert next(iter(rated)) == "torch"
    assert rated["torch"].us == pytest.approx(151.0)
    assert "relative error 1" in str(rated["swift"].reasons[0])


def test_a_backend_without_a_convolution_is_chosen_with_one_that_helps() -> None:
    registry = create_registry([NoConvolution], load_entry_points=False)
    table = costs({("torch", "key_value"): (100.0, 50.0), ("bare", "key_value"): (300.0, 10.0)})
    selector = select(registry, table)
    assert selector.selection.convolution == {("bare", Phase.DECODE): "torch"}
    assert selector.step[LAYER].name == "bare"
    assert "decode=bare, convolutions by torch" in str(selector.selection)


class FewDrafts(TorchStates):
    name = "few"
    capabilities = replace(TorchStates.capabilities, max_draft_tokens=2)


def test_a_backend_is_asked_for_no_more_drafts_than_it_claims() -> None:
    registry, few = create_registry([FewDrafts], load_entry_points=False), BackendRequest("few", "few")
    assert select(registry, None, few, decode_len=3).selection.step == "few"
    with pytest.raises(UnsupportedError, match="max_draft_tokens: needs at most 2 drafts of a sequence, got 3"):
        select(registry, None, few, decode_len=4)
    assert select(registry, None, decode_len=4).selection.step != "few"
