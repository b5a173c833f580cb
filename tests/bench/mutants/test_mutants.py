"""The kit's score: mistakes by a grammar and by hand, planted in a right backend."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from headway.bench.studies.mutants import reference
from headway.bench.studies.mutants.equivalent import changes_nothing
from headway.bench.studies.mutants.grammar import mistakes
from headway.bench.studies.mutants.score import everything, score
from headway.bench.studies.mutants.states import planted
from headway.testing.kit.kit import Kit
from headway.testing.kit.subject import subject_of

SEED = 29
TEXT = Path(reference.__file__).read_text()


def test_each_mistake_of_the_grammar_changes_the_text_in_one_place() -> None:
    found = list(mistakes(TEXT, "TiledAttention"))
    assert len(found) > 200
    assert len({each.text for each in found}) > 0.95 * len(found)
    assert {each.kind for each in found} == {"operator", "mask", "condition", "number", "index", "name", "type", "statement"}


def test_mistakes_of_every_kind_are_planted_by_hand() -> None:
    assert {kind for kind, _, _ in planted()} == {"limit", "layout", "state", "protocol"}
    assert len({name for _, name, _ in planted()}) == len(list(planted()))


@pytest.mark.slow
def test_the_backend_without_a_mistake_passes_its_plain_cells() -> None:
    kit = Kit(subject_of(reference.TiledAttention, torch.device("cpu")))
    cells = [cell for cell in kit.cells(quick=True) if cell.head_dim == 64 and cell.block_size == 16][:60]
    assert len(cells) > 30
    assert not [result.cell for result in map(kit.run, cells) if result.status == "failed"]


class _ScalesTheSoftcap(reference.TiledAttention):
    """Differs where a layer has a soft-cap, in the last bits."""

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return super().capped(scores) * (1.0 if self.spec.softcap is None else 1.00001)


class _HalvesWhatItStores(reference.TiledAttention):
    """Differs in what it writes alone, and there in an fp8 cache alone."""

    def stored(self, rows: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        found = super().stored(rows, dtype, scale)
        return found if dtype == rows.dtype else (found.float() * 0.5).to(dtype)


def test_a_change_that_random_steps_cannot_see_is_told_from_a_mistake() -> None:
    assert changes_nothing(reference.TiledAttention, steps=40)
    assert not changes_nothing(_ScalesTheSoftcap)
    assert not changes_nothing(_HalvesWhatItStores)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_kit_finds_most_of_a_sample() -> None:
    """The floor that CI holds, with some out of a hundred; `python -m headway.bench.studies.mutants --quick` tries all."""
    numbers = random.Random(SEED).sample(range(len(everything())), 100)[12:20]
    outcomes = [each for each in score(numbers, quick=True, jobs=1) if not each.raises and not each.equivalent]
    assert sum(bool(each.caught) for each in outcomes) >= 0.85 * len(outcomes), outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.soak) for kind in ("layout", "protocol")])
def test_the_quick_kit_finds_mistakes_that_no_change_of_one_token_makes(kind: str) -> None:
    numbers = [number for number, (each, _) in enumerate(everything()) if each == kind]
    outcomes = list(score(numbers, quick=True, jobs=1))
    assert sum(bool(each.caught) for each in outcomes) >= 0.85 * len(numbers), outcomes


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_quick_kit_finds_most_mistakes() -> None:
    numbers = list(range(len(everything())))
    outcomes = [each for each in score(numbers, quick=True, jobs=2) if not each.raises and not each.equivalent]
    assert sum(bool(each.caught) for each in outcomes) >= 0.85 * len(outcomes), [
        each.where for each in outcomes if not each.caught
    ]
