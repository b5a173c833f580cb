"""The kit of layers with a state: it passes what is right, finds and names what is planted, and tells its cells apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.metadata import Phase
from headway.core.contract.state import (
    KEY_VALUE,
    STATE_KINDS,
    StateCache,
    StateCapabilities,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
)
from headway.core.oracle.state_reference import Rules, SequenceState, TokenOperands, advance, convolve, read
from headway.testing.broken.states import PLANTED_STATES, PlainStates
from headway.testing.kit.checking import Wanted, check
from headway.testing.kit.kit import Kit, make_kit, run_cell
from headway.testing.kit.report import CellResult
from headway.testing.kit.state_kit import StateKit
from headway.testing.kit.state_subject import ODD_LAYOUT, StateCell, parse_cell, state_subject_of
from headway.testing.kit.subject import load_subject

NAMED = {
    "begins-with-the-slot": (StateCell("answer", "prefill"), "reads the slot's old content"),
    "forgets-the-convolution": (StateCell("answer", "extend"), "ignores the inputs that the convolution remembers"),
    "writes-padding-slots": (StateCell("answer", "decode"), "writes padding rows"),
    "one-state-for-drafts": (StateCell("answer", "verify"), "the state after new token 4 of its sequence, in place of 1"),
    "late-checkpoints": (StateCell("answer", "prefill"), "the state after new token 150 of its sequence, in place of"),
    "newest-input-first": (StateCell("answer", "decode", "mamba2"), "keeps the convolution's inputs newest first"),
    "wrong-key-heads": (
        StateCell("answer", "decode", "lightning", conv="none"),
        "wrong head group: state head h reads key head h % num_key_heads",
    ),
    "transposes-states": (
        StateCell("answer", "prefill", layout="value_key", conv="none"),
        "state transposed: takes layout value_key for its",
    ),
    "overflowing-decays": (StateCell("answer", "extend", "kda", decays="strong"), "NaN"),
    "stale-slots-on-replay": (StateCell("graph", "decode", "conv"), ""),
}
"""Name -> a cell that finds it, and words of the guess; nothing where the kit has no word for it."""


@cache
def kit(target: str) -> StateKit:
    found = make_kit(target, "cpu")
    assert isinstance(found, StateKit)
    return found


def test_there_are_ten_of_them() -> None:
    assert set(NAMED) == set(PLANTED_STATES)
    assert len(NAMED) == 10


@pytest.mark.parametrize("name", NAMED)
def test_a_planted_mistake_is_caught_and_named(name: str) -> None:
    cell, words = NAMED[name]
    result = kit(f"broken:{name}").run(cell)
    assert result.status == "failed", result
    assert words in result.guess, result


def test_a_state_that_sees_the_tokens_which_fill_a_graph_up_is_caught() -> None:
    class SeesAllTokens(PlainStates):
        name = "sees-all-tokens"

        def plan_for_capture(self, metadata: StateMetadata) -> StateMetadata:
            return replace(metadata, recomputed=None)

    cell = StateCell("graph", "verify", "mamba2")
    found, right = (StateKit(state_subject_of(kind, torch.device("cpu"))).run(cell) for kind in (SeesAllTokens, PlainStates))
    assert (found.status, right.status) == ("failed", "passed")


class CachesBySlot(PlainStates):
    """Trusts what it has written to a slot, whatever the slot holds by now."""

    def __init__(self, spec: StateSpec, layout: StateLayout) -> None:
        super().__init__(spec, layout)
        self._kept: dict[tuple[int, int], SequenceState] = {}

    def begin(self, cache: StateCache, slot: int, context: int) -> SequenceState:
        kept = self._kept.get((id(cache), slot))
        return kept.copy() if context and kept is not None else super().begin(cache, slot, context)

    def keep(self, cache: StateCache, slot: int, state: SequenceState) -> None:
        super().keep(cache, slot, state)
        self._kept[id(cache), slot] = super().begin(cache, slot, 1)


class KeepsTheFirstLayersWeights(PlainStates):
    """Prepares the weights of a layer once for each instance, which serves several layers."""

    _first: StateParameters | None = None

    def advance(self, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
        self._first = self._first or parameters
        return super().advance(self._first, x, gates, state)


class KeepsNanOut(PlainStates):
    """Begins with what a slot was left with, but for NaN."""

    def begin(self, cache: StateCache, slot: int, context: int) -> SequenceState:
        return super().begin(cache, slot, max(context, 1)).changed(torch.nan_to_num)


def with_rules(**rules: object) -> type[PlainStates]:
    """A backend with a mistake in one step of the definition."""

    def wrong(self: PlainStates, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
        return advance(self.spec, parameters, x, gates, state, Rules(**rules))  # type: ignore[arg-type]

    return type("WithRules", (PlainStates,), {"advance": wrong})


def without_a_sigmoid(*given: Any) -> TokenOperands:
    return read(*given, strength=lambda gate: gate)


def of_a_head_in_turn(*given: Any) -> TokenOperands:
    right, spec = read(*given), given[0]
    dealt = torch.arange(spec.num_heads) % spec.num_key_heads * (spec.num_heads // spec.num_key_heads)
    return replace(right, key=right.key[..., dealt, :], query=right.query[..., dealt, :])


def shifted(spec: StateSpec, parameters: StateParameters, *given: Any) -> tuple[Tensor, Tensor]:
    return convolve(spec, replace(parameters, conv_weight=parameters.conv_weight.roll(1, dims=1)), *given)


@pytest.mark.parametrize(
    ("found", "cell", "where", "words"),
    [
        (CachesBySlot, StateCell("session"), "tokens", ""),
        (KeepsTheFirstLayersWeights, StateCell("session", "-", "mamba2"), "layer 1 of 2", "keeps something of a layer"),
        (KeepsNanOut, StateCell("answer", "prefill"), "token 0, head", "reads the slot's old content"),
        (with_rules(read=without_a_sigmoid), StateCell("answer", "decode"), "head", "the gate's sigmoid is missing"),
        (with_rules(read=of_a_head_in_turn), StateCell("answer", "extend", "mamba2"), "head 1", "wrong head group"),
        (with_rules(convolve=shifted), StateCell("answer", "extend", "conv"), "channel 0", "taps shifted by one"),
    ],
)
def test_what_is_kept_or_computed_wrongly_is_found_with_its_place(
    found: type[PlainStates], cell: StateCell, where: str, words: str
) -> None:
    result = StateKit(state_subject_of(found, torch.device("cpu"))).run(cell)
    assert result.status == "failed"
    assert where in result.reason, result
    assert words in result.guess, result


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    right = StateKit(state_subject_of(PlainStates, torch.device("cpu")))
    results = [right.run(cell) for cell, _ in NAMED.values()]
    assert [result.status for result in results] == ["passed"] * len(results), results


@pytest.mark.slow
@pytest.mark.sampled(3, then="soak")
@pytest.mark.parametrize("name", NAMED)
def test_the_quick_run_finds_every_planted_mistake(name: str) -> None:
    tried = kit(f"broken:{name}")
    cells = [cell for cell in tried.cells(quick=True) if cell.check in ("answer", "graph")]
    assert any(tried.run(cell).status == "failed" for cell in cells)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "checks",
    [
        ("claims", "refuse", "tolerance"),
        pytest.param(("answer", "graph"), marks=pytest.mark.slow),
        pytest.param(("session", "repeat", "memory"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_the_built_in_backend_passes_its_quick_cells(checks: tuple[str, ...]) -> None:
    cells = [cell for cell in kit("states:torch").cells(quick=True) if cell.check in checks]
    results: list[CellResult] = [kit("states:torch").run(cell) for cell in cells]
    assert {result.check for result in results} == set(checks)
    assert [result for result in results if result.status != "passed"] == []


def test_a_cell_has_a_name_that_leads_back_to_it_and_every_kind_is_covered_in_pairs() -> None:
    cells = kit("states:torch").cells()
    assert [parse_cell(str(cell)) for cell in cells] == cells
    answers = {(cell.kind, cell.layout, cell.phase) for cell in cells if cell.check == "answer"}
    assert {(kind, layout) for kind, layout, _ in answers} == {
        (kind, layout) for kind in STATE_KINDS for layout in ("key_value", "value_key", "kit_odd")
    }
    with pytest.raises(ConfigError, match="a cell's name"):
        parse_cell("answer:states:decode:rwkv")


def narrow(**claims: object) -> StateKit:
    """A backend that claims less than it can, and accepts what it claims."""
    chosen = StateCapabilities(**{"kinds": frozenset(STATE_KINDS), "devices": ("cpu",), **claims})  # type: ignore[arg-type]
    return StateKit(
        state_subject_of(type("Narrow", (PlainStates,), {"name": "narrow", "capabilities": chosen}), torch.device("cpu"))
    )


SMALL: dict[str, object] = {"layouts": (KEY_VALUE,), "dtypes": (torch.float32,), "key_dims": (16,), "value_dims": (8, 16)}
ODD: dict[str, dict[str, object]] = {
    "only convolutions": {"kinds": frozenset({"conv"})},
    "only convolutions, no type of states": {"kinds": frozenset({"conv"}), "state_dtypes": (), "dtypes": (torch.float16,)},
    "only convolutions, and none before a recurrence": {"kinds": frozenset({"conv"}), "convolution": False},
    "only mamba2 without its convolution": {"kinds": frozenset({"mamba2"}), "convolution": False},
    "mamba1, whose values have no size": {"kinds": frozenset({"mamba1"}), "value_dims": (64,)},
    "mamba1 and mamba2": {"kinds": frozenset({"mamba1", "mamba2"}), "value_dims": (64,)},
    "gated delta in one type of 16 bits": {"kinds": frozenset({"gated_delta"}), "dtypes": (torch.bfloat16,)},
    "linear attention with states of 16 bits": {"kinds": frozenset({"lightning"}), "state_dtypes": (torch.bfloat16,)},
    "only decodes, without drafts": {"kinds": frozenset({"kda"}), "phases": frozenset({Phase.DECODE}), "max_draft_tokens": 0},
    "only convolutions of decodes": {"kinds": frozenset({"conv"}), "phases": frozenset({Phase.DECODE})},
    "only prompts": {"kinds": frozenset({"mamba2"}), "phases": frozenset({Phase.PREFILL, Phase.EXTEND})},
    "only prompts without a context": {"kinds": frozenset({"lightning", "conv"}), "phases": frozenset({Phase.PREFILL})},
    "one odd width": {"kinds": frozenset({"gated_delta"}), "key_dims": (24,), "value_dims": (24,)},
    "a layout of its own": {"kinds": frozenset({"mamba2"}), "layouts": (ODD_LAYOUT,)},
}
"""Claims of right backends that serve little."""


@pytest.mark.parametrize("name", ODD)
def test_a_right_backend_that_serves_little_gives_no_alarm(name: str) -> None:
    tried = narrow(**{**SMALL, **ODD[name]})
    checks = {"claims", "refuse", "tolerance", "answer", *(["session"] if "phases" in ODD[name] else [])}
    cells = [cell for cell in tried.cells(quick=True) if cell.check in checks]
    some = {(cell.check, cell.about, cell.kind, cell.phase in ("prefill", "extend")): cell for cell in reversed(cells)}
    results = [tried.run(cell) for cell in some.values()]
    assert {result.check for result in results} == checks
    assert [result for result in results if result.status == "failed"] == []


def test_what_is_not_claimed_must_be_refused() -> None:
    claims = {"kinds": frozenset({"kda"}), "layouts": (KEY_VALUE,), "key_dims": (16,), "value_dims": (16, 32)}
    tried = narrow(**claims, convolution=False, phases=frozenset({Phase.DECODE}))
    refusals = [cell for cell in tried.cells(quick=True) if cell.check == "refuse"]
    about = {cell.about for cell in refusals}
    assert about == {"dtype", "state_dtype", "key_dim", "value_dim", "kind", "layout", "conv", "phase"}
    assert [tried.run(cell).status for cell in refusals] == ["passed"] * len(refusals)

    greedy = type(
        "Greedy", (PlainStates,), {"name": "greedy", "supports": classmethod(lambda cls, *asked: PlainStates.supports(*asked))}
    )
    greedy.capabilities = StateCapabilities(**claims, devices=("cpu",), convolution=False)  # type: ignore[attr-defined,arg-type]
    tried = StateKit(state_subject_of(greedy, torch.device("cpu")))
    failed = {cell.about for cell in tried.cells(quick=True) if cell.check == "refuse" and tried.run(cell).status == "failed"}
    assert failed == {"key_dim", "value_dim", "kind", "layout", "conv"}


def test_a_cell_of_no_registered_layout_is_no_finding() -> None:
    cell = str(StateCell("answer", "decode", layout="nosuch"))
    with pytest.raises(ConfigError, match="--cell: needs a layout out of key_value, .*got 'nosuch'"):
        check(Wanted("states:torch", cell=cell, in_process=True))


@pytest.mark.slow
def test_a_class_in_a_file_is_recognised_and_runs_in_children(tmp_path: Path) -> None:
    file = tmp_path / "own_states.py"
    file.write_text(
        "from headway.testing.broken.states import PlainStates\n\n\n"
        "class Own(PlainStates):\n    name = 'own'\n\n    def is_real(self, slot):\n        return True\n"
    )
    cell = str(StateCell("answer", "decode", "conv"))
    report = check(Wanted(f"{file}:Own", cell=cell))
    assert report.subject == "own"
    assert [(result.cell, result.status, result.guess) for result in report.cells] == [(cell, "failed", "writes padding rows")]
    assert report.cells[0].feature == "conv"
    with pytest.raises(ConfigError, match="for layers with a state"):
        load_subject(f"{file}:Own", torch.device("cpu"))


@pytest.mark.slow
def test_a_cell_of_the_other_kit_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="sdpa.math, which is a backend of attention"):
        run_cell(make_kit("sdpa.math", "cpu"), str(StateCell("answer", "decode")))
    attention = make_kit("sdpa.math", "cpu")
    assert isinstance(attention, Kit)
    with pytest.raises(ConfigError, match="torch, which is a backend for layers with a state"):
        run_cell(kit("states:torch"), str(attention.cells(quick=True)[0]))
    with pytest.raises(ConfigError, match="--model"):
        make_kit("states:torch", "cpu", model="llama-3-8b")
    with pytest.raises(HeadwayError, match="state backend: asked for 'nobody'"):
        make_kit("states:nobody", "cpu")


@pytest.mark.gpu
@pytest.mark.slow
def test_the_built_in_backend_passes_on_a_gpu_where_steps_are_captured() -> None:
    tried = make_kit("states:torch", "cuda")
    assert isinstance(tried, StateKit)
    cells = [cell for cell in tried.cells(quick=True) if cell.check in ("answer", "session", "graph", "sync")]
    assert [result for result in map(tried.run, cells) if result.status != "passed"] == []
