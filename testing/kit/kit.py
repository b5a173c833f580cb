"""The conformance kit: which cells a backend or a layout is tried in, and one cell's result."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

from headway.core.contract.errors import ConfigError
from headway.core.oracle.cells import CACHE_TYPES, NEEDLE, PHASES, CheckCell
from headway.core.oracle.inputs import MOST_QUICK_WORK, MOST_WORK, deal, possible
from headway.core.oracle.steps import CellErrors
from headway.registry.plugin_sources import split_target
from headway.testing.kit.checks import answers, claims, engine, graphs, layouts, steps
from headway.testing.kit.cover import DTYPES
from headway.testing.kit.model_layers import ModelLayer, layer_cells, read_model_layers
from headway.testing.kit.report import CellResult, result_of
from headway.testing.kit.stage import Stage
from headway.testing.kit.state_kit import StateKit, describe
from headway.testing.kit.state_subject import StateCell, StateSubject, parse_cell
from headway.testing.kit.subject import Subject, load_any_subject

Check = Callable[[Stage, CheckCell], str]
CHECKS: dict[str, tuple[Check, str]] = {
    "claims": (claims.claims, "the class keeps what it says of itself"),
    "process": (claims.process, "what the trial of plugins at a start would refuse"),
    "serves": (claims.serves, "the model's layers that it serves"),
    "cold": (steps.cold, "time of the first call, compilation included"),
    "refuse": (claims.refuse, "what is not claimed is refused, with reasons"),
    "options": (claims.options, "--attn-opt: declared ones read, others refused"),
    "tolerance": (answers.tolerance, "the declared tolerance is honest"),
    "answer": (answers.answer, "answers against float64, every bit watched"),
    "long": (answers.answer, "more than 1,024 tokens"),
    "graph": (graphs.graph, "planned once at the longest, replayed at others"),
    "prompt": (graphs.prompt, "one prompt captured at a length, replayed with shorter ones"),
    "siblings": (answers.siblings, "layers that differ in numbers alone, by turns"),
    "shared": (answers.shared, "layers of a kind over one plan"),
    "bounds": (answers.bounds, "upper bounds as host lengths in decode"),
    "lse": (answers.lse, "the log-sum-exp of every query"),
    "turns": (steps.turns, "turns on one cache with sdpa.math"),
    "steps": (steps.steps, "fifty steps of one instance"),
    "thousand": (steps.thousand, "a thousand steps of one instance"),
    "repeat": (steps.repeat, "the same bits each time"),
    "invariant": (answers.invariant, "the same bits in any batch"),
    "memory": (steps.memory, "memory does not grow"),
    "sync": (steps.sync, "no waiting for the device"),
    "engine": (engine.engine, "greedy tokens through the engine"),
    "layout": (layouts.layout, "a layout's writer, check and gather"),
}
"""Name -> the check and what it holds a backend to, in the order of the scorecard."""
_OF_NO_LAYOUT = ("claims", "process", "serves")


class Kit:
    """Everything that is tried of one subject."""

    def __init__(self, subject: Subject, layers: Mapping[str, ModelLayer] | None = None) -> None:
        """layers: of `read_model_layers`, which are tried in place of the kit's own; None: the kit's."""
        self.layers = layers or {}
        self.stage = Stage(subject, self.layers)

    @property
    def name(self) -> str:
        """The name that the subject is registered by."""
        return self.stage.subject.name

    @property
    def checks(self) -> Iterable[str]:
        """The names of all checks."""
        return CHECKS

    @property
    def layouts(self) -> Iterable[str]:
        """The names of all registered layouts."""
        return self.stage.subject.layouts

    def cells(self, quick: bool = False) -> list[CheckCell]:
        """The cells of a backend; quick: each value once in place of each pair."""
        claimed = self.stage.claimed
        if self.layers:
            sizes = self.stage.block_sizes
            made = (layer_cells(each, claimed.subject, sizes, quick, self._many_steps) for each in self.layers.values())
            return list(dict.fromkeys(chain.from_iterable(made)))
        cells = [CheckCell("claims")]
        plain = [claimed.plainest(phase) for phase in PHASES]
        some = next((cell for cell in plain if cell is not None), None)
        if some is None:
            return cells
        cells += [cell.plain("cold", phase=phase) for phase, cell in zip(PHASES, plain, strict=True) if cell is not None]
        cells += claimed.refusals()
        cells.append(some.plain("options"))
        cells += [cell.plain("tolerance") for cell in _distinct(claimed.plainest(p, dtype=d) for d in DTYPES for p in PHASES)]
        single = claimed.with_others(claimed.cover(1))
        rows = single if quick else [*claimed.cover(2), *single]
        answers = [cell for phase in ("prefill", "mixed", "decode") for cell in claimed.around(phase)]
        answers += [cell.plain("answer", phase=phase) for cell, phases in rows for phase in PHASES if phase in phases]
        cells += deal(answers, MOST_QUICK_WORK if quick else MOST_WORK, self._accepts)
        cells += claimed.of_models()
        cells += claimed.many_heads(quick)
        cells += self._sums_of_many(quick)
        cells += self._siblings()
        cells += self._sharing()
        cells += self._at_a_distance()
        few = [(phase, claimed.plainest(phase)) for phase in ("verify", "extend")]
        cells += [replace(cell, phase=phase, kv_heads=32) for phase, cell in few if cell is not None and cell.feature != "latent"]
        cells += self._log_sums(single, quick)
        cells += self._deep(single[:1] if quick else single[:4])
        return list(dict.fromkeys(cells))

    def layout_cells(self, name: str) -> list[CheckCell]:
        """The cells of a layout: block sizes, odd head sizes and every element type."""
        sizes, dims = (1, 8, 16, 24, 256), (64, 128, *layouts.ODD_HEAD_DIMS)
        cells = [CheckCell("layout", layout=name, block_size=size) for size in sizes]
        cells += [
            CheckCell("layout", layout=name, head_dim=dim, dtype=dtype) for dim in dims for dtype in ("float32", "bfloat16")
        ]
        cells += [CheckCell("layout", layout=name, dtype="float16")]
        cells += [CheckCell("layout", layout=name, head_dim=dim, dtype="bfloat16", feature="fp8") for dim in dims]
        own = self.stage.subject.layouts[name].dtypes.get("key")
        for feature, dtype in CACHE_TYPES.items():
            if dtype == own:  # a layout that holds one type of cache
                cells = [cell.plain("layout", feature=feature) for cell in cells]
        return list(dict.fromkeys(cells))

    def listed(self, quick: bool = False, layout: str = "", cell: str = "") -> dict[str, Any]:
        """The subject's name, owner and plugin, why it is not available on this device, and else the names of its cells.

        cell: the one that is to run, which need not be among them and is named alone; "": all are.

        :raises ConfigError: nobody registered that layout.
        """
        subject = self.stage.subject
        if layout:
            subject.registry.layout(layout)
        here, owner = subject.registry.availability(subject.name), subject.registry.backends[subject.name].owner
        found = describe(subject, here, owner)
        names = [cell] if cell and not found["unavailable"] else []
        if not found["unavailable"] and not cell:
            names = [str(each) for each in (self.layout_cells(layout) if layout else self.cells(quick))]
        return found | {"cells": names}

    def run(self, cell: CheckCell, *, guesses: bool = True) -> CellResult:
        """One cell's result; whatever the backend raises is in it. guesses: whether a failure says what it looks like."""
        self.stage.errors = CellErrors()
        self.stage.guesses = guesses
        check, _ = CHECKS[cell.check]
        return result_of(cell, lambda: check(self.stage, cell), self.stage.errors)

    def _accepts(self, cell: CheckCell) -> bool:
        """Return whether the subject serves a part of the cell's steps, whose kv heads or scale it may refuse."""
        return self.name in self.stage.parts(cell)

    def _log_sums(self, rows: list[tuple[CheckCell, frozenset[str]]], quick: bool) -> list[CheckCell]:
        """The log-sum-exp of every type and feature, in every phase; quick: in one phase of several new tokens and one of a
        single one, by turns, and for the plainest in all."""
        if not self.stage.subject.claims.lse:
            return []
        plain = [(cell, frozenset({phase})) for phase in PHASES if (cell := self.stage.claimed.plainest(phase)) is not None]
        found = [cell.plain("lse", phase=phase) for cell, phases in plain for phase in phases]
        for number, (cell, phases) in enumerate(rows):
            for turns in (("extend", "mixed", "verify", "prefill"), ("decode", "ragged")):
                served = [phase for phase in turns if phase in phases]
                picked = served[number % len(served) :][:1] if quick and served else served
                found += [cell.plain("lse", phase=phase) for phase in picked]
        return deal(found, MOST_QUICK_WORK, self._accepts)

    def _siblings(self) -> list[CheckCell]:
        """The layer with the most features, and with each type of cache, in the phase that holds most others."""
        found, features = [], self.stage.claimed.values["feature"]
        cached = [(f"{name}-together", name) for name in CACHE_TYPES]
        plain = [str(name) for name in features if name not in {*chain.from_iterable(cached)}]
        for kinds in (("together", "window", "softcap", "alibi", "sinks", "none", *plain), *cached):
            places = product(kinds, ("mixed", "decode", "extend", "prefill"))
            cells = [(phase, self.stage.claimed.plainest(phase, feature=feature)) for feature, phase in places]
            found += [cell.plain("siblings", phase=phase) for phase, cell in cells if cell is not None][:1]
        return found

    def _sharing(self) -> list[CheckCell]:
        """A layer with sinks, and one with an fp8 cache, in every phase: those whose plans are shared."""
        if not self.stage.subject.claims.shares_plans:
            return []
        places = product(("sinks", "fp8"), ("mixed", *PHASES))
        cells = [(phase, self.stage.claimed.plainest(phase, feature=feature)) for feature, phase in places]
        return [cell.plain("shared", phase=phase) for phase, cell in cells if cell is not None]

    def _at_a_distance(self) -> list[CheckCell]:
        """What a key's distance changes, where distances are beyond a thousand and no nearer window hides them."""
        features = ("alibi", "window-1024", "sinks", "softcap")
        plain = [(phase, self.stage.claimed.plainest(phase, feature=name)) for name in features for phase in ("decode", "extend")]
        return [cell.plain("answer", phase=phase, work="tables") for phase, cell in plain if cell is not None]

    def _sums_of_many(self, quick: bool) -> list[CheckCell]:
        """Thousands of equal weights, and one key far above them, in types whose sums lose what is small beside them."""
        shorts = [name for name in DTYPES if name != "float32"]
        plain = [(phase, self.stage.claimed.plainest(phase, dtype=dtype)) for dtype in shorts for phase in ("decode", "extend")]
        cells = [cell.plain("answer", phase=phase, work="deep") for phase, cell in plain if cell is not None]
        found = [[replace(cell, scores=scores) for cell in cells] for scores in ("equal", NEEDLE)]
        return [cell for each in found for cell in [cell for cell in each if possible(cell)][: 1 if quick else None]]

    def _deep(self, rows: list[tuple[CheckCell, frozenset[str]]]) -> list[CheckCell]:
        """Checks that take many steps, for layers in which every value occurs and, first of all, for the plainest."""
        claimed = self.stage.claimed
        cells: list[CheckCell] = []
        plain = {phase: claimed.plainest(phase) for phase in PHASES}
        whole = plain["mixed"] or plain["decode"] or plain["extend"] or plain["prefill"]
        assert whole is not None
        for phase, cell in plain.items():
            if cell is not None:
                cells += [cell.plain("repeat", phase=phase), cell.plain("sync", phase=phase)]
        for cell, phases in [(whole, frozenset(p for p in PHASES if plain[p])), *rows]:
            cells += self._many_steps(cell, phases)
        return [*cells, whole.plain("thousand"), whole.plain("memory")]

    def _many_steps(self, cell: CheckCell, phases: frozenset[str]) -> list[CheckCell]:
        """Checks of a layer that take many steps. phases: those of PHASES in which the subject serves it."""
        said, backend = self.stage.subject.claims, self.stage.subject.backend
        graph_phases = ("decode", "verify") if backend.captures(2) else ("decode",)
        cells = [cell.plain("graph", phase=phase) for phase in graph_phases if phase in phases]
        if cell.memory != "own":
            return cells
        cells += [cell.plain("prompt", phase="prefill")] if "prefill" in phases else []
        cells += [cell.plain("bounds", phase="decode")] if "decode" in phases and not said.exact_host_lengths else []
        modelled = cell.dtype in DTYPES or bool(cell.layer)  # the engine and the baseline know no other types
        if phases & {"decode", "extend"}:
            mixed = cell.plain("steps")
            cells += [mixed, mixed.plain("turns")] if modelled else [mixed]
            cells += [] if cell.layer else [mixed.plain("long", phase="long")]  # of a large layer it would take minutes
        cells += [cell.plain("engine")] if modelled and phases & {"decode", "extend"} else []
        cells += [cell.plain("invariant")] if said.batch_invariant and cell.feature in ("none", *CACHE_TYPES) else []
        return cells


def make_kit(target: str, device: str, plugins: Sequence[str] = (), model: str = "") -> Kit | StateKit:
    """Load what is to be tried. model: whose layers; "": those of the kit. See `load_subject` and `read_layer_specs`.

    :raises HeadwayError: there is no such subject or model, or it does not load.
    """
    place = torch.device(device)
    found = load_any_subject(target, place, plugins=plugins)
    if isinstance(found, StateSubject):
        if model:
            raise ConfigError(
                "--model", "a backend of attention to try its layers with", f"{found.name}, for layers with a state"
            )
        return StateKit(found)
    return Kit(found, read_model_layers(model, place) if model else {})


def _distinct(cells: Iterable[CheckCell | None]) -> list[CheckCell]:
    return list({cell.dtype: cell for cell in cells if cell is not None}.values())


def list_cells(kit: Kit | StateKit, quick: bool, layout: str, cell: str) -> dict[str, Any]:
    """What the kit's `listed` tells.

    :raises ConfigError: nobody registered that layout, or the kit has no such cell.
    """
    if cell:
        wanted = parse_cell(cell)
        _known(kit, wanted)
        cell = str(wanted)
    return kit.listed(quick, layout, cell) | {"digest": _digest(kit.stage.subject if isinstance(kit, Kit) else kit.subject)}


def _digest(subject: Subject | StateSubject) -> str:
    """SHA-256 of the file that defines a subject; empty if no file does."""
    try:
        path = split_target(subject.file)[0] if subject.file else Path(inspect.getfile(subject.backend))
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, TypeError):  # a class that was made by a function or typed in
        return ""


def run_cell(kit: Kit | StateKit, name: str, *, guesses: bool = True) -> CellResult:
    """Run the cell of a name. guesses: whether a failure says what it looks like.

    :raises ConfigError: the kit has no cell of that name.
    """
    cell = parse_cell(name)
    _known(kit, cell)
    result = kit.run(cell, guesses=guesses) if isinstance(kit, Kit) else kit.run(cell)  # type: ignore[arg-type]
    return result if guesses else result.model_copy(update={"guess": ""})


def _known(kit: Kit | StateKit, cell: CheckCell | StateCell) -> None:
    """Check that a kit can run a cell.

    :raises ConfigError: it is for other backends, or nobody has its check, its layout or its model's layer.
    """
    for_states = isinstance(kit, StateKit)
    if isinstance(cell, StateCell) != for_states:
        kind = "for layers with a state" if for_states else "of attention"
        raise ConfigError("--cell", f"a cell of {kit.name}, which is a backend {kind}", str(cell))
    nowhere = ["-"] if cell.check in _OF_NO_LAYOUT else []
    for what, known in (("check", [*kit.checks]), ("layout", [*nowhere, *kit.layouts])):
        got = getattr(cell, what)
        if got not in known:
            raise ConfigError("--cell", f"a {what} out of {', '.join(known)}", repr(got))
    layers = kit.layers if isinstance(kit, Kit) else {}
    if cell.layer not in layers and (cell.layer or layers):
        need = f"a cell of one of the model's layers {', '.join(sorted(layers))}" if layers else "--model, whose layer it names"
        raise ConfigError("--cell", need, str(cell))
