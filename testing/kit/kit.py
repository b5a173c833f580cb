"""Conformance kit: the cells of a kernel or a layout, and the result of each cell."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, EXPERTS, LINEAR, STATE
from headway.core.oracle.cells import CheckCell, KitCell
from headway.core.oracle.steps import CellErrors
from headway.registry import create_registry
from headway.registry.plugin_sources import HUB, split_target
from headway.testing.kit import weights
from headway.testing.kit.attention import AttentionStage
from headway.testing.kit.checks import answers, claims, engine, every, graphs, layouts, states
from headway.testing.kit.cover import ModelLayer, read_model_layers, rule_layers
from headway.testing.kit.report import CellResult, result_of
from headway.testing.kit.stage import Stage
from headway.testing.kit.states import StateStage
from headway.testing.kit.subject import BASELINE, WORDS, AttentionSubject, Subject, load_any_subject
from headway.testing.kit.weights import ExpertsStage, LinearStage

Check = Callable[[Any, Any], str]
"""Function that checks one cell on a stage. It returns a note if the cell passes, else raises `Finding` or `Skipped`."""
Checks = dict[str, tuple[Check, str]]
CHECKS: Checks = {
    "claims": (claims.claims, "the class keeps what it says of itself"),
    "process": (claims.process, "what the trial of plugins at a start would refuse"),
    "serves": (claims.serves, "the model's layers that it serves"),
    "cold": (answers.cold, "time of the first call, compilation included"),
    "refuse": (every.refuse, "what is not claimed is refused, with reasons"),
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
    "keyless": (answers.keyless, "rows that see no key: zeros and -inf, or not written"),
    "turns": (answers.turns, "turns on one cache with sdpa.math"),
    "steps": (answers.steps, "fifty steps of one instance"),
    "thousand": (answers.thousand, "a thousand steps of one instance"),
    "repeat": (every.repeat, "the same bits each time"),
    "invariant": (answers.invariant, "the same bits in any batch"),
    "memory": (every.memory, "memory does not grow"),
    "sync": (every.sync, "no waiting for the device"),
    "engine": (engine.engine, "greedy tokens through the engine"),
    "layout": (layouts.layout, "a layout's writer, check and gather"),
}
"""Name of an attention check -> (function, description), in the order of the scorecard."""
STATE_CHECKS: Checks = {
    "claims": (states.claims, "the class keeps what it says of itself"),
    "refuse": (every.refuse, "what is not claimed is refused, with reasons"),
    "tolerance": (every.tolerance, "the declared tolerance is honest"),
    "answer": (states.answer, "answers against float64, every bit watched"),
    "session": (states.session, "prompts cut anywhere, drafts that hold in part, prefixes taken up"),
    "graph": (states.graph, "planned once over static tensors, replayed for others"),
    "repeat": (every.repeat, "the same bits each time"),
    "memory": (every.memory, "memory does not grow"),
    "sync": (every.sync, "no waiting for the device"),
}
WEIGHT_CHECKS: Checks = {
    "claims": (weights.claims, "the class keeps what it says of itself"),
    "refuse": (every.refuse, "what is not claimed is refused, with reasons"),
    "tolerance": (every.tolerance, "the declared tolerance is honest"),
    "answer": (weights.answer, "answers against float64, every bit watched"),
    "prepare": (weights.prepare, "one instance for several layers, one of them prepared twice"),
    "instances": (weights.instances, "two instances by turns"),
    "graph": (weights.graph, "captured once, replayed for other rows"),
    "invariant": (weights.invariant, "the bits of a row do not depend on the other rows (batch_invariant)"),
    "repeat": (every.repeat, "the same bits each time"),
    "memory": (every.memory, "memory does not grow"),
    "sync": (every.sync, "no waiting for the device"),
}
KINDS: Final[Mapping[str, tuple[type[Stage[Any, Any]], Checks]]] = {
    ATTENTION.name: (AttentionStage, CHECKS),
    STATE.name: (StateStage, STATE_CHECKS),
    LINEAR.name: (LinearStage, WEIGHT_CHECKS),
    EXPERTS.name: (ExpertsStage, WEIGHT_CHECKS),
}
"""Kind of operation -> (stage class, checks)."""
_OF_NO_LAYOUT = ("claims", "process", "serves")


def words_of_checks() -> dict[str, str]:
    """Return name -> description for all checks, in scorecard order. A name shared by several kinds of operation has the
    description of the attention check."""
    ordered = {name: words for _, checks in reversed([*KINDS.values()]) for name, (_, words) in checks.items()}
    return ordered | {name: words for name, (_, words) in CHECKS.items()}


def parse_cell(text: str) -> KitCell:
    """Parse the name of a cell of any kind.

    :raises ConfigError: if the text is not a cell's name.
    """
    marked = {stage.cell.mark: stage.cell for stage, _ in KINDS.values()}
    mark = "".join(text.split(":")[1:2])
    return marked.get(mark, CheckCell).parse(text)


@dataclass
class Kit:
    """All checks of one subject."""

    subject: Subject
    layers: Mapping[str, ModelLayer] = field(default_factory=dict)
    """Name -> layer of a model, from `read_model_layers`. These layers are tested if there are any; empty means the kit's own
    layers."""

    def __post_init__(self) -> None:
        stage, checks = KINDS[self.subject.kind.name]
        found, layers = self.subject, self.layers
        self.stage: Any = AttentionStage(found, layers) if isinstance(found, AttentionSubject) else stage(found)
        """Stage that runs the subject; its class depends on the subject's kind of operation."""
        self.checks: Checks = checks

    @property
    def name(self) -> str:
        """Name under which the subject is registered."""
        return self.subject.name

    def cells(self, quick: bool = False) -> list[Any]:
        """Return the cells of a kernel. quick: True to cover each value once instead of each pair of values."""
        found: list[Any] = self.stage.cells(quick)
        return found

    def layout_cells(self, name: str) -> list[CheckCell]:
        """Return the cells of a layout, which cover block sizes, odd head dimensions and every dtype."""
        found: list[CheckCell] = self.stage.layout_cells(name)
        return found

    def listed(self, quick: bool = False, layout: str = "", cell: str = "") -> dict[str, Any]:
        """Return the subject's name, owner and plugin, the names of its cells and, if the subject is not available on this
        device, the reason.

        cell: name of the only cell to list; it need not be among the usual cells. "" lists all cells.

        :raises ConfigError: if the layout is not registered, or if the subject has no layouts.
        """
        if layout and not isinstance(self.subject, AttentionSubject):
            raise ConfigError("--layout", "a layout of a cache", f"{layout!r} beside a {WORDS[self.subject.kind.name]}")
        if layout:
            self.subject.registry.layout(layout)
        found = self.subject.described()
        names = [cell] if cell and not found["unavailable"] else []
        if not found["unavailable"] and not cell:
            names = [str(each) for each in (self.layout_cells(layout) if layout else self.cells(quick))]
        return found | {"cells": names}

    def run(self, cell: Any, *, guesses: bool = True) -> CellResult:
        """Return the result of one cell. An exception of the kernel becomes a failed result. guesses: True if a failure includes
        a likely cause."""
        self.stage.errors = CellErrors()
        self.stage.guesses = guesses
        check, _ = self.checks[cell.check]
        return result_of(cell, lambda: check(self.stage, cell), self.stage.errors)


def kernels_for(rule: str, model: str, device: str, plugins: Sequence[str] = ()) -> list[str]:
    """Return the names of the attention backends that support a rule in any phase of a layer. Arguments as for `make_kit`.

    :raises HeadwayError: if the rule or model does not exist, or the rule does not pass its check.
    """
    layers = make_kit(BASELINE, device, plugins, model, rule).layers.values()
    registry = create_registry(plugins)

    def serves(name: str) -> bool:
        subject = AttentionSubject(registry, name, torch.device(device))
        return any(each.support(subject, layout, 16, phase) for each in layers for layout in subject.layouts for phase in Phase)

    return [name for name in registry.able(torch.device(device)) if serves(name)]


def make_kit(target: str, device: str, plugins: Sequence[str] = (), model: str = "", rule: str = "") -> Kit:
    """Return the kit for a target; see `load_any_subject`. model: model whose layers are tested, as in `read_layer_specs`; ""
    means the kit's own. rule: attention rule of all layers, as in `Registry.attention_rule`; "" means none.

    :raises HeadwayError: if the subject, model or rule does not exist, or does not load.
    """
    place = torch.device(device)
    found = load_any_subject(target, place, plugins=plugins)
    if (model or rule) and not isinstance(found, AttentionSubject):
        need = "a backend of attention to try its layers with"
        raise ConfigError("--model" if model else "--rule", need, f"{found.name}, a {WORDS[found.kind.name]}")
    layers = read_model_layers(model, place) if model else {}
    return Kit(found, rule_layers(found.registry.attention_rule(rule), layers, place) if rule else layers)


def list_cells(kit: Kit, quick: bool, layout: str, cell: str) -> dict[str, Any]:
    """Return the result of `Kit.listed`, plus the subject's digest.

    :raises ConfigError: if the layout is not registered, or the kit has no such cell.
    """
    if cell:
        wanted = parse_cell(cell)
        _known(kit, wanted)
        cell = str(wanted)
    return kit.listed(quick, layout, cell) | {"digest": _digest(kit.subject)}


def _digest(subject: Subject) -> str:
    """Return the SHA-256 of the file that defines a subject; "" if the subject is not defined in a file."""
    try:
        if subject.name.startswith(HUB) and (source := subject.registry.source_of(subject.name)):
            return source.content_digest()
        path = split_target(subject.file)[0] if subject.file else Path(inspect.getfile(subject.backend))
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, TypeError):  # a class made by a function, or typed into an interpreter
        return ""


def run_cell(kit: Kit, name: str, *, guesses: bool = True) -> CellResult:
    """Run the cell with this name. guesses: True if a failure includes a likely cause.

    :raises ConfigError: if the kit has no cell of that name.
    """
    cell = parse_cell(name)
    _known(kit, cell)
    result = kit.run(cell, guesses=guesses)
    return result if guesses else result.model_copy(update={"guess": ""})


def _known(kit: Kit, cell: KitCell) -> None:
    """Check that a kit can run a cell.

    :raises ConfigError: if the cell is for a different kind of kernel, or its check, layout or layer is unknown.
    """
    if type(cell) is not kit.stage.cell:
        raise ConfigError("--cell", f"a cell of {kit.name}, which is a {WORDS[kit.subject.kind.name]}", str(cell))
    nowhere = ["-"] if cell.check in _OF_NO_LAYOUT else []
    for what, known in (("check", [*kit.checks]), ("layout", [*nowhere, *kit.stage.layouts])):
        got = getattr(cell, what, "")
        if got and got not in known:
            raise ConfigError("--cell", f"a {what} out of {', '.join(known)}", repr(got))
    layers, layer = kit.layers, getattr(cell, "layer", "")
    if layer not in layers and (layer or layers):
        need = f"a cell of one of the model's layers {', '.join(sorted(layers))}" if layers else "--model, whose layer it names"
        raise ConfigError("--cell", need, str(cell))
