"""The kit of layers with a state: it passes what is right, finds and names what is planted, and tells its cells apart."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.metadata import Phase
from headway.core.contract.state import KEY_VALUE, STATE_KINDS, StateMetadata
from headway.core.contract.state_backend import StateCapabilities
from headway.testing.broken.plain_states import PlainStates
from headway.testing.broken.planted_states import PLANTED_STATES
from headway.testing.checking import Wanted, check
from headway.testing.kit import Kit, make_kit, run_cell
from headway.testing.report import CellResult
from headway.testing.state_cells import StateCell, parse_cell
from headway.testing.state_kit import StateKit
from headway.testing.state_subject import state_subject_of
from headway.testing.subject import load_subject

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


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    right = StateKit(state_subject_of(PlainStates, torch.device("cpu")))
    results = [right.run(cell) for cell, _ in NAMED.values()]
    assert [result.status for result in results] == ["passed"] * len(results), results


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.slow
def test_the_quick_run_finds_every_planted_mistake(name: str) -> None:
    tried = kit(f"broken:{name}")
    cells = [cell for cell in tried.cells(quick=True) if cell.check in ("answer", "graph")]
    assert any(tried.run(cell).status == "failed" for cell in cells)


@pytest.mark.parametrize(
    "checks",
    [
        ("claims", "refuse", "tolerance", "session"),
        pytest.param(("answer", "graph"), marks=pytest.mark.slow),
        pytest.param(("repeat", "memory"), marks=pytest.mark.slow),
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


def test_a_class_in_a_file_is_recognised_and_runs_in_children(tmp_path: Path) -> None:
    file = tmp_path / "own_states.py"
    file.write_text(
        "from headway.testing.broken.plain_states import PlainStates\n\n\n"
        "class Own(PlainStates):\n    name = 'own'\n\n    def is_real(self, slot):\n        return True\n"
    )
    cell = str(StateCell("answer", "decode", "conv"))
    report = check(Wanted(f"{file}:Own", cell=cell))
    assert report.subject == "own"
    assert [(result.cell, result.status, result.guess) for result in report.cells] == [(cell, "failed", "writes padding rows")]
    assert report.cells[0].feature == "conv"
    with pytest.raises(ConfigError, match="for layers with a state"):
        load_subject(f"{file}:Own", torch.device("cpu"))


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
