"""The layers of a model, as cells of the kit: each distinct one, in its type, heads, scale, window and features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPE_NAMES, AttentionSpec
from headway.core.contract.support import Support
from headway.core.oracle.cells import EXPANDED, PHASES, CheckCell, Skipped, check_refusal, telling_sinks
from headway.core.oracle.inputs import deal
from headway.models.loader import read_layer_specs
from headway.testing.kit.subject import AttentionSubject

_FEATURES = {"sliding_window": "window", "softcap": "softcap", "alibi_slopes": "alibi", "sinks": "sinks"}
_QUICK, _WHOLE = 5, 14
"""Cells of a layer in each phase: every kind of work once; every kind of work and of scores twice."""
MOST_QUICK_WORK, MOST_WORK = 6e7, 4e8
"""As for other cells (`inputs`); the layers of one model are few and large."""

Place = tuple[str, int]
"""A layout's name and a block size."""


@dataclass(frozen=True)
class ModelLayer:
    """Layers of a model that have one spec."""

    name: str
    """The number of the first of them, as a cell's name has it; `-expanded` behind it for prompts of latent attention."""
    spec: AttentionSpec
    numbers: tuple[int, ...]
    of: int
    """Layers of the model."""
    phases: frozenset[Phase]
    """Phases in which the engine asks for the spec."""

    def __str__(self) -> str:
        window = "" if self.spec.sliding_window is None else f" ({self.spec.sliding_window})"
        form = ", expanded" if self.name.endswith(EXPANDED) else ""
        return f"{len(self.numbers)} of {self.of} layers, first {self.numbers[0]}{form}: {self.spec}{window}"

    @property
    def cell(self) -> CheckCell:
        """The cell of the layer in the check `serves`; others have its values."""
        return CheckCell(
            "serves",
            head_dim=self.spec.head_dim,
            group=self.spec.group_size,
            dtype=DTYPE_NAMES[self.spec.dtype],
            feature=_feature(self.spec),
            kv_heads=self.spec.num_kv_heads,
            layer=self.name,
        )

    def support(self, subject: AttentionSubject, layout: str, block_size: int, phase: Phase) -> Support:
        """Whether a subject serves the layer over such a cache."""
        return subject.supports(self.spec, layout, block_size, phase)


def read_model_layers(model: str, device: torch.device) -> Mapping[str, ModelLayer]:
    """Each distinct layer of a model by its name, in the order of the layers. model: see `read_layer_specs`.

    :raises HeadwayError: there is no such model, or its configuration cannot be read.
    """
    kind, found = read_layer_specs(model, device), {}
    for cached in kind.distinct:
        numbers = tuple(number for number, spec in enumerate(kind.cached) if spec == cached)
        specs = {str(numbers[0]): cached}
        if cached in kind.expanded:
            specs[f"{numbers[0]}{EXPANDED}"] = kind.expanded[cached]
        for name, spec in specs.items():
            told = spec if spec.sinks is None else replace(spec, sinks=telling_sinks(spec.num_heads))
            found[name] = ModelLayer(name, told, numbers, len(kind.cached), kind.phases_of(spec))
    return found


def layer_cells(
    layer: ModelLayer,
    subject: AttentionSubject,
    block_sizes: tuple[int, ...],
    quick: bool,
    many_steps: Callable[[CheckCell, frozenset[str]], list[CheckCell]],
) -> Iterator[CheckCell]:
    """The cells of a layer: who serves it; if the subject does, its answers with the inputs that bite, and checks of many steps.

    many_steps: makes those cells for a layer and the phases (of PHASES) in which it is served.
    """
    yield layer.cell
    served = _served(layer, subject, block_sizes)
    cells, first = [], dict[str, CheckCell]()
    for phase in PHASES:
        places = [place for place, phases in served.items() if phase in phases]
        for number in range(max(_QUICK if quick else _WHOLE, len({layout for layout, _ in places})) if places else 0):
            layout, block_size = places[number % len(places)]
            cells.append(layer.cell.plain("answer", phase=phase, layout=layout, block_size=block_size))
            first.setdefault(phase, cells[-1])
    yield from deal(cells, MOST_QUICK_WORK if quick else MOST_WORK)
    if not first:
        return
    if subject.claims.lse:
        yield from deal([cell.plain("lse") for cell in first.values()], MOST_QUICK_WORK)
    whole = max(served, key=lambda place: len(served[place]))
    yield from many_steps(layer.cell.plain("answer", layout=whole[0], block_size=whole[1]), served[whole])


def serves(layer: ModelLayer, subject: AttentionSubject, block_sizes: tuple[int, ...]) -> str:
    """Say in which phases a subject serves a layer, and why not in others.

    :raises Skipped: in none, with the reasons.
    :raises Finding: a reason does not say what is needed and what was got.
    """
    yes, no = [], []
    for phase in (phase for phase in Phase if phase in layer.phases):
        answers = [layer.support(subject, name, size, phase) for name, size in _places(layer, subject, block_sizes)]
        if any(answers):
            yes.append(phase.value)
            continue
        nearest = min(answers, key=lambda answer: len(answer.reasons))
        check_refusal(nearest)
        no.append((phase.value, str(nearest).removeprefix("no: ")))
    if not yes:
        raise Skipped(f"would not serve {layer}: {_said(no)}")
    return f"serves {layer}" if not no else f"serves in {' and '.join(yes)} {layer}; not in {_said(no)}"


def _said(refusals: list[tuple[str, str]]) -> str:
    """Phases and reasons, each reason once."""
    reasons = dict.fromkeys(reason for _, reason in refusals)
    parts = [(" and ".join(phase for phase, said in refusals if said == reason), reason) for reason in reasons]
    return "; ".join(f"{phases}: {reason}" for phases, reason in parts)


def _places(layer: ModelLayer, subject: AttentionSubject, block_sizes: tuple[int, ...]) -> list[Place]:
    """Caches that the layer fits into; layouts by turns, so that few cells have them all."""
    return [(name, size) for size in block_sizes for name, layout in subject.layouts.items() if layout.check(layer.spec, size)]


def _served(layer: ModelLayer, subject: AttentionSubject, block_sizes: tuple[int, ...]) -> dict[Place, frozenset[str]]:
    """Where and in which phases (of PHASES) the subject serves the layer and the engine asks for it."""
    found = {}
    for name, size in _places(layer, subject, block_sizes):
        taken = {phase for phase in layer.phases if layer.support(subject, name, size, phase)}
        if phases := frozenset(each for each, needed in PHASES.items() if needed <= taken):
            found[name, size] = phases
    return found


def _feature(spec: AttentionSpec) -> str:
    """What the layer asks for, in a word out of cells.FEATURES."""
    names = [_FEATURES[name] for name in _FEATURES if name in spec.features]
    if spec.value_in_key:
        return "latent"
    if names:
        return names[0] if len(names) == 1 else "together"
    return "none" if spec.v_head_dim == spec.head_dim else "v_head_dim" if spec.v_head_dim < spec.head_dim else "longer_v"
