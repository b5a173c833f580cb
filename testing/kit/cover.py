"""Selection of the layers with which a backend is tested: a covering set of the combinations that the backend claims.

For a backend that supports everything, there are about 40,000 combinations of values. Kernel faults depend on one value or on a
pair of values (a block size with a head_dim, a window with a phase). Every pair of claimed values is therefore tested in every
phase. Because a kernel is compiled for each distinct layer, few layers are used; they are found by greedy covering by (phase,
pair).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, product

import numpy
import torch

from headway.core.contract.metadata import Phase
from headway.core.contract.rule import AttentionRule
from headway.core.contract.spec import DTYPE_NAMES, AttentionSpec
from headway.core.contract.support import Support
from headway.core.oracle.cells import (
    AXES,
    BIDIRECTIONAL,
    CACHE_TYPES,
    EXPANDED,
    FEATURES,
    FEW,
    KV_HEADS,
    MEMORIES,
    MODEL_SOFTCAPS,
    MODEL_WINDOWS,
    PHASES,
    RULE_LAYERS,
    SCALE,
    USUAL_SCALE,
    CheckCell,
    Skipped,
    check_refusal,
    decisive_sinks,
    make_spec,
)
from headway.core.oracle.inputs import deal, possible, steps_of
from headway.core.oracle.steps import TABLE_BLOCKS
from headway.core.select.request import LayerSpecs
from headway.models.loader import read_layer_specs
from headway.testing.kit.stage import greedy, shuffled
from headway.testing.kit.subject import AttentionSubject

_FEATURES = {"sliding_window": "window", "softcap": "softcap", "alibi_slopes": "alibi", "sinks": "sinks"}
_QUICK, _WHOLE = 5, 14
"""Minimum number of cells per layer and phase. A quick run covers every kind of work once; a full run covers every kind of work
and every distribution of scores twice."""
MOST_QUICK_WORK, MOST_WORK = 6e7, 4e8
"""Work limits of a model's layers in a quick and in a full run. They are higher than the limits in `core.oracle.inputs`, because
a model has few and large layers."""

_LONGEST = 1 << 17
"""Number of tokens that no sequence of the kit exceeds."""
Place = tuple[str, int]
"""Pair of a layout's name and a block size."""


@dataclass(frozen=True)
class ModelLayer:
    """Group of a model's layers that have the same spec."""

    name: str
    """Index of the group's first layer, as used in the name of a cell. It has the suffix `-expanded` for prompts of latent
    attention (MLA)."""
    spec: AttentionSpec
    numbers: tuple[int, ...]
    of: int
    """Number of layers in the model."""
    phases: frozenset[Phase]
    """Phases in which the engine uses the spec."""

    def __str__(self) -> str:
        window = "" if self.spec.sliding_window is None else f" ({self.spec.sliding_window})"
        form = ", expanded" if self.name.endswith(EXPANDED) else ""
        return f"{len(self.numbers)} of {self.of} layers, first {self.numbers[0]}{form}: {self.spec}{window}"

    @property
    def cell(self) -> CheckCell:
        """Cell of the check `serves` for the layer. Other cells of the layer copy the values of this cell."""
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
        """Return whether a subject supports the layer with this cache."""
        return subject.supports(self.spec, layout, block_size, phase)


def read_model_layers(model: str, device: torch.device) -> Mapping[str, ModelLayer]:
    """Return name -> distinct layer of a model, in layer order. model: as in `read_layer_specs`.

    :raises HeadwayError: if the model does not exist, or its configuration cannot be read.
    """
    kind, found = read_layer_specs(model, device), {}
    for cached in kind.distinct:
        numbers = tuple(number for number, spec in enumerate(kind.cached) if spec == cached)
        specs = {str(numbers[0]): cached}
        if cached in kind.expanded:
            specs[f"{numbers[0]}{EXPANDED}"] = kind.expanded[cached]
        for name, spec in specs.items():
            shown_spec = spec if spec.sinks is None else replace(spec, sinks=decisive_sinks(spec.num_heads))
            found[name] = ModelLayer(name, shown_spec, numbers, len(kind.cached), kind.phases_of(spec))
    return found


def rule_layers(rule: AttentionRule, layers: Mapping[str, ModelLayer], device: torch.device) -> Mapping[str, ModelLayer]:
    """Return layers with an attention rule. layers: layers of a model to apply it to; empty means layers of the kit's own.

    :raises ConfigError: if the rule does not pass its check, or does not fit a layer.
    """
    heads = rule.num_heads or 8
    sizes = [(max(1, heads // 4), 64, torch.float32, None), (heads, 80, torch.bfloat16, None), (1, 64, torch.float32, 37)]
    plain = [
        AttentionSpec(heads, kv_heads, dim, SCALE * dim**-0.5, dtype, device, sliding_window=window)
        for kv_heads, dim, dtype, window in sizes
        if heads % kv_heads == 0 and (window is None or "blocks" not in rule.parts)
    ]
    own = [ModelLayer(str(n), spec, (n,), len(plain), frozenset(Phase)) for n, spec in enumerate(plain)]
    found = {}
    for layer in layers.values() or own:
        ruled = (
            LayerSpecs([replace(layer.spec, dense=False)]).with_rules({"all": rule}, [0], min(rule.max_len, _LONGEST)).cached[0]
        )
        found[layer.name] = replace(layer, spec=replace(layer.spec, rule=ruled.rule))
    return found


def layer_cells(
    layer: ModelLayer,
    subject: AttentionSubject,
    block_sizes: tuple[int, ...],
    quick: bool,
    many_steps: Callable[[CheckCell, frozenset[str]], list[CheckCell]],
) -> Iterator[CheckCell]:
    """Yield the cells of a layer. The first cell tests its support. If the subject supports the layer, further cells test answers
    for demanding inputs and run many steps.

    many_steps: function that returns the cells with many steps, for a layer and its supported phases (names in PHASES).
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
    longest = _LONGEST if layer.spec.rule is None else layer.spec.rule.max_len
    dealt = [*deal(cells, MOST_QUICK_WORK if quick else MOST_WORK)]
    if subject.claims.lse and longest >= _LONGEST:
        dealt += deal([cell.plain("lse") for cell in first.values()], MOST_QUICK_WORK)
    yield from (cell for each in dealt if (cell := _shorter(each, longest)) is not None)
    if not first:
        return
    if longest < _LONGEST:
        return
    whole = max(served, key=lambda place: len(served[place]))
    yield from many_steps(layer.cell.plain("answer", layout=whole[0], block_size=whole[1]), served[whole])


def _shorter(cell: CheckCell, longest: int) -> CheckCell | None:
    """Return a cell whose sequences have at most `longest` tokens, or None if no kind of work has such sequences."""

    def fits(work: str) -> bool:
        lens = [*chain.from_iterable(steps_of(work, cell.phase, cell.block_size))]
        return bool(lens) and all(new + context <= longest for new, context, _ in lens)

    works = (cell.work, "edges", "level", FEW)
    return next((replace(cell, work=work) for work in works if longest >= _LONGEST or fits(work)), None)


def layer_support(layer: ModelLayer, subject: AttentionSubject, block_sizes: tuple[int, ...]) -> str:
    """Return the phases in which a subject supports a layer, in words, and the reasons for the unsupported phases.

    :raises Skipped: if no phase is supported; the message contains the reasons.
    :raises Finding: if a reason does not state the needed value and the given value.
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
    """Return phases and their reasons in words. Phases with the same reason are combined."""
    reasons = dict.fromkeys(reason for _, reason in refusals)
    parts = [(" and ".join(phase for phase, said in refusals if said == reason), reason) for reason in reasons]
    return "; ".join(f"{phases}: {reason}" for phases, reason in parts)


def _places(layer: ModelLayer, subject: AttentionSubject, block_sizes: tuple[int, ...]) -> list[Place]:
    """Return the (layout, block size) pairs that can hold the layer. Layouts alternate in the list, so that a few cells cover all
    layouts."""
    return [(name, size) for size in block_sizes for name, layout in subject.layouts.items() if layout.check(layer.spec, size)]


def _served(layer: ModelLayer, subject: AttentionSubject, block_sizes: tuple[int, ...]) -> dict[Place, frozenset[str]]:
    """Return (layout, block size) -> phases (names in PHASES) that the subject supports and the engine uses."""
    found = {}
    for name, size in _places(layer, subject, block_sizes):
        taken = {phase for phase in layer.phases if layer.support(subject, name, size, phase)}
        if phases := frozenset(each for each, needed in PHASES.items() if needed <= taken):
            found[name, size] = phases
    return found


def _feature(spec: AttentionSpec) -> str:
    """Return the name of the layer's feature, as listed in cells.FEATURES."""
    names = [_FEATURES[name] for name in _FEATURES if name in spec.features]
    if spec.rule is not None:
        return RULE_LAYERS["blocks" in spec.rule.parts]
    if spec.value_in_key:
        return "latent"
    if names:
        return names[0] if len(names) == 1 else "together"
    return "none" if spec.v_head_dim == spec.head_dim else "v_head_dim" if spec.v_head_dim < spec.head_dim else "longer_v"


Value = str | int
Row = tuple[CheckCell, frozenset[str]]
"""Pair of a layer, as a cell, and the phases in which the layer is tested."""
BLOCK_SIZES = (16, 8, 64, 128, 256)
HEAD_DIMS = (64, 80, 96, 128, 256)
LATENT_DIM = 576
"""Head dimension of DeepSeek's MLA, tested only if values may be part of the keys."""
MOST_OWN_DIMS = 4
"""Maximum number of head dimensions to test that are not in HEAD_DIMS. If a backend lists more of them, only the smallest and the
largest are tested."""
GROUPS = (4, 1, 7, 8)
DTYPES = ("float32", "bfloat16", "float16")
UNCLAIMED: dict[str, Value] = {"dtype": "float64"}
"""Axis -> value that no backend claims and every backend must refuse."""
OTHERS: dict[str, tuple[int, ...]] = {
    "block_size": (32, 24),
    "head_dim": (48, 72, 100, 112, 144, 160, 192, 512),
    "group": (2, 3, 5, 6, 12, 16, 32),
}
"""Axis -> further values, some from real models. Each value must be refused with reasons, or is tested in every phase with a
few layers."""
_SEARCHED: dict[str, tuple[Value, ...]] = {
    "feature": ("none", *CACHE_TYPES, "latent", "v_head_dim", "longer_v", *BIDIRECTIONAL),
    "block_size": (16, 1, 4, *range(8, 136, 8), 256, 512),
    "kv_heads": tuple(dict.fromkeys((*KV_HEADS, *range(1, 17), 20, 24, 32))),
    "scale": ("odd", USUAL_SCALE),
    "group": tuple(range(1, 17)),
    "head_dim": tuple(range(8, 264, 8)),
}
"""Axis -> values to search for an accepted layer if no combination of the usual values is accepted."""
MANY_HEADS: dict[str, tuple[int, ...]] = {"latent": (128, 96), "none": (71, 64)}
"""Feature -> numbers of query heads per kv head that exceed or fill a kernel's tile, because layers with few heads do not test
several tiles. 128: DeepSeek-V3. 71: Falcon-7B. 96: not a power of two. 64: fills a tile. Each number is tested, or must be
refused with reasons."""
_LAYER_AXES = len(AXES) - AXES.index("head_dim")
"""Number of trailing AXES that define a cell's layer. The other axes define its cache."""
_MOST_PHASES = (4, 2)
"""Maximum number of phases in which the first and the second number in MANY_HEADS are tested."""
_BY_HEADS = ("decode", "extend", "mixed", "verify", "prefill")
"""Phases in descending order of the number of errors that they reveal in layers with many heads."""


@dataclass(frozen=True)
class Claimed:
    """Layers that a subject accepts, out of all combinations of axis values."""

    subject: AttentionSubject
    layers: Mapping[str, ModelLayer] = field(default_factory=dict)
    """Name -> layer of the model that the kit tests; empty for the kit's own layers."""
    _plainest: dict[tuple[str, ...], dict[tuple[Value, ...], CheckCell]] = field(default_factory=dict, init=False, repr=False)
    """Axis names -> (phase, *values) -> the simplest accepted layer with these values."""

    @property
    def values(self) -> Mapping[str, tuple[Value, ...]]:
        """Values of each axis, claimed or unclaimed, the simplest first."""
        return self._found[0]

    @property
    def rows(self) -> list[Row]:
        """Every accepted layer, with the phases in which it is accepted. The value of the axis `memory` is `own` in all layers;
        other values of this axis are added later."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[Mapping[str, tuple[Value, ...]], list[Row]]:
        """Pair of `values` and `rows`. If the usual values give no accepted layer, the values of a layer found by a search are
        tried as well."""
        values: Mapping[str, tuple[Value, ...]] = self.usual
        rows = self._accepted(values, CheckCell("answer"))
        if not rows and (base := self._searched()) is not None:
            values = {axis: tuple(dict.fromkeys((getattr(base, axis), *usual))) for axis, usual in self.usual.items()}
            rows = self._accepted(values, base)
        return values, rows

    @cached_property
    def usual(self) -> dict[str, tuple[Value, ...]]:
        """Usual values of each axis, the simplest first."""
        claims = self.subject.claims
        blocks = sorted({*BLOCK_SIZES, *([claims.block_multiple] if claims.block_multiple > 1 else [])})
        own = sorted({*(claims.head_dims or ()), *(pair[0] for pair in claims.v_head_dims or ())} - {*HEAD_DIMS})
        dims = {*HEAD_DIMS, *(own if len(own) <= MOST_OWN_DIMS else (own[0], own[-1]))}
        dims |= {LATENT_DIM} if claims.value_in_key else set()
        least = {"together": 2, **{f"{name}-together": 1 for name in CACHE_TYPES}}
        models = MODEL_WINDOWS | MODEL_SOFTCAPS  # tried by `of_models`
        features = [each for each in FEATURES if len(claims.features) >= least.get(each, 0) and each not in models]
        return {
            "layout": tuple(self.subject.layouts),
            "memory": MEMORIES,
            "block_size": tuple(sorted(blocks, key=lambda size: (size != 16, size))),
            "head_dim": tuple(sorted(dims, key=lambda dim: (dim != 64, dim))),
            "group": GROUPS,
            "dtype": (*DTYPES, *(("float64",) if torch.float64 in claims.dtypes else ())),
            "feature": tuple(features),
        }

    def spec(self, cell: CheckCell) -> AttentionSpec:
        """Return the layer of a cell."""
        if cell.layer:
            return self.layers[cell.layer].spec
        claims = self.subject.claims
        pairs = [pair for pair in claims.v_head_dims or () if pair[0] == cell.head_dim]
        longer = cell.feature == "longer_v"
        named = next((v_head_dim for head_dim, v_head_dim in pairs if (v_head_dim > head_dim) == longer), 0)
        v_head_dim = named if cell.feature in ("v_head_dim", "longer_v", "latent") else 0
        return make_spec(cell, self.subject.device, claims.features, v_head_dim)

    def support(self, cell: CheckCell, phase: str) -> Support:
        """Return the subject's support for a cell in a phase (a name in PHASES)."""
        support = Support()
        for each in PHASES[phase]:
            support &= self.subject.supports(self.spec(cell), cell.layout, cell.block_size, each)
        return support

    def _searched(self) -> CheckCell | None:
        """Return an accepted layer of a subject that rejects the usual values, for example a subject for one number of kv heads;
        None if no such layer is found."""
        claims = self.subject.claims
        layout = next(
            (name for name, each in self.subject.layouts.items() if claims.layouts is None or each in claims.layouts), ""
        )
        dtype = next((name for name in self.usual["dtype"] if getattr(torch, str(name)) in claims.dtypes), "")
        phase = next((name for name, needed in PHASES.items() if needed <= claims.phases), "")
        if not (layout and dtype and phase):
            return None
        plain = CheckCell("answer", layout=layout, dtype=str(dtype))
        ranges = _SEARCHED | {"feature": tuple(name for name in _SEARCHED["feature"] if name in self.usual["feature"])}
        if claims.head_dims:
            ranges["head_dim"] = tuple(claims.head_dims)
        for picked in product(*ranges.values()):
            cell = plain.having(dict(zip(ranges, picked, strict=True)))
            if self.support(cell, phase):
                return cell
        return None

    def _accepted(self, values: Mapping[str, tuple[Value, ...]], plain: CheckCell) -> list[Row]:
        """Return every accepted layer for some values of the axes, with the inputs of `plain`."""
        found: list[Row] = []
        specs: dict[tuple[Value, ...], AttentionSpec] = {}
        axes = [values[axis] if axis != "memory" else ("own",) for axis in AXES]
        for picked in product(*axes):
            cell = plain.having(dict(zip(AXES, picked, strict=True)))
            if cell.head_dim == LATENT_DIM and cell.feature != "latent":
                continue
            layer = picked[-_LAYER_AXES:]
            spec = specs[layer] = specs.get(layer) or self.spec(cell)
            served = {phase: bool(self.subject.supports(spec, cell.layout, cell.block_size, phase)) for phase in Phase}
            phases = frozenset(name for name, needed in PHASES.items() if all(served[each] for each in needed))
            if phases:
                found.append((cell, phases))
        return found

    def cover(self, strength: int) -> list[Row]:
        """Return a small set of layers that contains, in every phase, each accepted combination of `strength` values."""
        if not self.rows:
            return []
        order, table, served = shuffled(self.rows, {axis: self.values[axis] for axis in AXES}, tuple(PHASES))
        memories = range(len(MEMORIES)) if strength > 1 else (0,)
        column = AXES.index("memory")
        table = numpy.concatenate([_with(table, column, memory) for memory in memories])
        served, order = numpy.tile(served, (len(memories), 1)), numpy.tile(order, len(memories))
        chosen = greedy(table, served, list(combinations(range(len(AXES)), strength)))
        cells = []
        for number in chosen:
            cell, phases = self.rows[order[number]]
            cells.append((cell.plain("answer", memory=MEMORIES[table[number, column]]), phases))
        return sorted(cells, key=lambda each: str(each[0]))

    def plainest(self, phase: str, **wanted: Value) -> CheckCell | None:
        """Return the simplest layer with the values in `wanted` that is accepted in a phase; None if no such layer exists."""
        axes = tuple(wanted)
        if axes not in self._plainest:
            found: dict[tuple[Value, ...], CheckCell] = {}
            for cell, phases in self.rows:
                values = [getattr(cell, axis) for axis in axes]
                for each in phases:
                    found.setdefault((each, *values), cell)
            self._plainest[axes] = found
        return self._plainest[axes].get((phase, *wanted.values()))

    def around(self, phase: str) -> list[CheckCell]:
        """Return the simplest accepted layer in a phase for each feature and for each value of `memory`, to detect mistakes that
        depend only on one of these values."""
        found = [self.plainest(phase, feature=feature) for feature in self.values["feature"]]
        plain = self.plainest(phase)
        memories = [replace(plain, memory=memory) for memory in MEMORIES] if plain is not None else []
        return [cell.plain("answer", phase=phase) for cell in (*found, *memories) if cell is not None]

    def refusals(self) -> list[CheckCell]:
        """Return one `refuse` cell for each axis value, including unusual values, that is never accepted although the other
        values of the layer are accepted. The cell's `about` is the axis."""
        if not self.rows:
            return []
        plain, cells = self.rows[0][0], []
        for axis in AXES:
            taken = {getattr(cell, axis) for cell, _ in self.rows}
            odd = (*OTHERS.get(axis, ()), *([UNCLAIMED[axis]] if axis in UNCLAIMED else []))
            for value in dict.fromkeys((*self.values[axis], *odd)) if axis != "memory" else ():
                cell = plain.plain("refuse", axis, phase=min(self.rows[0][1])).having({axis: value})
                unclaimed = value in UNCLAIMED.values() and value not in self.values[axis]
                if (value not in taken and not self.support(cell, cell.phase)) or unclaimed:
                    cells.append(cell)
        phases = {phase for _, served in self.rows for phase in served}
        return cells + [plain.plain("refuse", "phase", phase=phase) for phase in PHASES if phase not in phases]

    def with_others(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with the accepted values of OTHERS added. An added value replaces a value that other rows also have; if
        this is not possible, a row is added."""
        found, most = list(rows), max((len(phases) for _, phases in rows), default=0)
        whole = [row for row in rows if len(row[1]) == most]
        for axis, values in OTHERS.items():
            changed: set[int] = set()
            for value in values:
                counts = Counter(getattr(cell, axis) for cell, _ in found)
                turn = len(changed) % max(1, len(whole))
                free = [n for n, (cell, _) in enumerate(found) if n >= len(rows) or counts[getattr(cell, axis)] > 1]
                places = [(n, found[n]) for n in free if n not in changed and len(found[n][1]) == most]
                places += [(len(found), row) for row in (*whole[turn:], *whole[:turn])]
                able = (place for place in places if self._takes(place[1][0], place[1][1], axis, value))
                picked = None if value in counts else next(able, None)
                if picked is not None:
                    number, (cell, phases) = picked
                    found[number:] = [(cell.having({axis: value}), phases), *found[number + 1 :]]
                    changed.add(number)
        return found

    def _takes(self, cell: CheckCell, phases: frozenset[str], axis: str, value: Value) -> bool:
        return all(self.support(cell.having({axis: value}), phase) for phase in phases)

    def of_models(self) -> list[CheckCell]:
        """Return cells with windows and soft-caps of real models, in decode and extend, with sequences and scores that
        reach these limits."""
        cells = []
        for phase in ("decode", "extend"):
            for name, window in MODEL_WINDOWS.items():
                if (cell := self.plainest(phase, feature="window")) is not None:
                    sizes = sorted({int(size) for size in (*self.values["block_size"], *OTHERS["block_size"])})
                    longer = (size for size in sizes if window < TABLE_BLOCKS * size)
                    fits = (size for size in longer if self._takes(cell, frozenset({phase}), "block_size", size))
                    cells += [replace(cell, phase=phase, feature=name, block_size=size, work="tables") for size in fits][:1]
            for name in MODEL_SOFTCAPS:
                if (cell := self.plainest(phase, feature="softcap")) is not None:
                    cells.append(replace(cell, phase=phase, feature=name, scores="alternating"))
        return [cell for cell in cells if possible(cell) and self.support(cell, cell.phase)]

    def many_heads(self, quick: bool) -> list[CheckCell]:
        """Return answer cells for layers with the numbers of query heads per kv head in MANY_HEADS, plus log-sum-exp and graph
        cells if supported.

        quick: True for only one answer cell per number. A number that is refused in every phase gives a `refuse` cell.
        """
        cells = []
        for feature, groups in MANY_HEADS.items():
            for group, most in zip(groups, _MOST_PHASES, strict=True):
                asked = [layer for phase in _BY_HEADS if (layer := self._of_heads(phase, feature, group)) is not None]
                taken = [layer for layer in asked if self.support(layer, layer.phase)]
                cells += taken[: 1 if quick else most] or [each.plain("refuse", "group", work="edges") for each in asked[:1]]
                if taken and taken[0].phase == "decode" and not quick and group == groups[0]:
                    cells += [taken[0].plain("lse")] if self.subject.claims.lse else []
                    cells.append(taken[0].plain("graph"))
        return cells

    def _of_heads(self, phase: str, feature: str, group: int) -> CheckCell | None:
        """Return a phase's simplest layer with `group` query heads per kv head, even if the subject refuses it. The result is
        None if layers with few heads are refused.

        The layer has dtype bfloat16, as in real models, and latents of DeepSeek's size, if the subject accepts these values.
        """
        wanted: dict[str, Value] = {"head_dim": LATENT_DIM} if feature == "latent" else {}
        plain = self.plainest(phase, feature=feature, dtype="bfloat16", **wanted) or self.plainest(phase, feature=feature)
        if plain is None:
            return None
        kv_heads = plain.kv_heads if feature == "latent" else 1
        return replace(plain, phase=phase, group=group, work=FEW, kv_heads=kv_heads)


def _with(table: numpy.ndarray, column: int, value: int) -> numpy.ndarray:
    changed = table.copy()
    changed[:, column] = value
    return changed
