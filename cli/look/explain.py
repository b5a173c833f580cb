"""`headway backends explain`: the backend that a step would take, and why it would take no other."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.cli.measure.bench_crossover import GEOMETRY, LAYERS, layer
from headway.cli.options import PluginFiles, dtype_of
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from headway.core.contract.spec import AttentionSpec
    from headway.core.contract.state import StateSpec
    from headway.core.select.costs import CostTable, Shape, StepCosts
    from headway.core.select.layer_specs import LayerSpecs
    from headway.core.select.selection import Workload
    from headway.core.select.selector import Selector
    from headway.core.select.state_selector import RatedState
    from headway.kernels.linear.linear import Linear
    from headway.registry import Registry
    from headway.tuning.table.schema import Cell, CrossoverTable, PriorRecord


def tell_products(
    model: str | None, quantization: str | None, dtype: str, device: str | None, as_json: bool, registry: Registry
) -> None:
    """Print what serves a model's products, as a list or as JSON. Nothing is measured, and no weights are read.

    :raises HeadwayError: no model, one that Headway's decoder does not compute, or options that it does not take.
    """
    from headway.models.layers.decoder import Decoder
    from headway.models.loader import LoadOptions, load_model
    from headway.tuning.measure.device import resolve_device

    if model is None:
        raise ConfigError("--linear", "a model whose products are meant", "none", "--model NAME")
    place = resolve_device(device)
    shapes = load_model(
        model,
        "float32" if dtype == "auto" and place.type == "cpu" else dtype,
        "meta",
        "dummy",
        skip_tokenizer_init=True,
        model_impl="headway",
        options=LoadOptions(quantization=quantization),
    )
    assert isinstance(shapes.decoder, Decoder)
    found = explain_products(shapes.decoder.products, place, registry)
    if as_json:
        print(json.dumps({"model": shapes.name, "device": str(place), "products": found}, indent=2))
    else:
        print_products(found, Terminal())


def explain_products(products: Sequence[tuple[Linear, bool]], device: torch.device, registry: Registry) -> list[dict[str, Any]]:
    """Say what would serve a model's products on a device, as plain data: kept times choose, or where there are none the rule.

    products: whose weights need no elements; and whether each is gated.
    """
    from torch import Tensor

    from headway.tuning.measure.device import identify_device
    from headway.tuning.measure.products import obey_kept, obey_shipped

    kernels, on_cpu = registry.linear_kernels(device), device.type == "cpu"
    specs = [(linear, linear.spec(device, gated and not on_cpu)) for linear, gated in products]
    chosen = [(linear, kernels.choice(spec)) for linear, spec in specs]
    kinds = Counter(choice for linear, choice in chosen if choice.is_open or not isinstance(linear.weight, Tensor))
    identity = identify_device(device)
    for kind in kinds:
        if (kind.is_open or not on_cpu) and not obey_kept(kind, identity):
            obey_shipped(kind, identity)
    return [
        {
            "product": kind.name,
            "layers": count,
            "ways": kind.changes(),
            "by": kind.source if kind.is_open or not on_cpu else "the form, nothing is measured",
            "refused": {way: support.brief for way, support in kind.refused.items()},
        }
        for kind, count in kinds.items()
    ]


def print_products(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print what `explain_products` found."""
    if not found:
        console.print("no product over a quantised weight: --quantization rounds plain ones", soft_wrap=True)
    for row in found:
        console.print(Text(row["product"], "bold").append(f", {row['layers']} layers", "default"))
        ways = ", ".join(f"{way} from {rows}" for rows, way in row["ways"].items())
        console.print(Text(f"  {ways} rows on", "green"))
        console.print(Text(f"  by: {row['by']}", "dim"))
        for why, names in _by_reason(row.get("refused", {})).items():
            console.print(Text(f"  {', '.join(names)}: {why}", "dim"), soft_wrap=True)


def _by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of the ways that share a reason."""
    found: dict[str, list[str]] = {}
    for name, why in refused.items():
        found.setdefault(why, []).append(name)
    return found


def explain_states(specs: Sequence[StateSpec], registry: Registry, asked: str, workload: Workload) -> dict[str, Any]:
    """Say what would serve layers with a state, as plain data, by the times that auto would use; nothing is measured.

    specs: that of each layer. asked: the option --state-backend.

    :raises HeadwayError: what was asked for cannot be had, with every reason.
    """
    from headway.core.select.backend_request import ALL_AUTO, BackendRequest
    from headway.core.select.state_candidates import VERBS
    from headway.core.select.state_selector import StateSelector
    from headway.tuning.autotune import TableRequest
    from headway.tuning.autotune_states import state_costs_for

    costs = state_costs_for(specs, registry, ALL_AUTO, TableRequest(budget=0.0))
    selector = StateSelector(registry.states, specs, BackendRequest.parse(asked, "state_backend"), costs, workload)
    chosen, able = selector.selection, registry.states.all_able(specs[0].device.type)
    return {
        "layers": [
            {"count": count, "spec": str(spec), "bytes_per_slot": chosen.layout.bytes_per_slot(spec)}
            for spec, count in Counter(specs).items()
        ],
        "selection": str(chosen),
        "layout": chosen.layout.name,
        "why": chosen.why,
        "workload": str(workload),
        **{
            verb: {"choice": chosen.name_for(phase), "candidates": [_candidate(each, able) for each in selector.rated(phase)]}
            for phase, verb in VERBS.items()
        },
    }


def _candidate(rated: RatedState, able: Sequence[str]) -> dict[str, Any]:
    reasons = [str(reason) for reason in rated.reasons]
    return {"name": rated.name, "serves": not reasons, "mean_us": rated.us, "reasons": reasons, "runs_here": rated.name in able}


def print_states(found: Mapping[str, Any], console: Console, all_backends: bool) -> None:
    """Print what `explain_states` found. all_backends: also those that cannot run on the device."""
    for row in found["layers"]:
        line = Text(f"{row['count']} layers with a state: ", "bold").append(row["spec"], "default")
        console.print(line.append(f"; {row['bytes_per_slot'] / 2**20:.2f} MiB each in a slot"))
    console.print(Text(f"states: {found['selection']}", "dim"))
    verbs = {
        verb: {each["name"]: each for each in found[verb]["candidates"] if all_backends or each["runs_here"]}
        for verb in ("scan", "step")
    }
    measured = any(each["mean_us"] is not None for rows in verbs.values() for each in rows.values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("state backend", no_wrap=True)
    for verb in verbs:
        table.add_column(f"{verb}, us" if measured else verb, justify="right", no_wrap=True)
    if any(each["reasons"] for rows in verbs.values() for each in rows.values()):
        table.add_column("why not", overflow="fold")
    for name in verbs["step"]:
        cells = [_cell(verbs[verb][name], name == found[verb]["choice"]) for verb in verbs]
        lacking = {verb: each[name]["reasons"] for verb, each in verbs.items() if each[name]["reasons"]}
        same = len(lacking) == len(verbs) and len({tuple(reasons) for reasons in lacking.values()}) == 1
        told = [lacking["scan"][0]] if same else [f"{verb}: {reasons[0]}" for verb, reasons in lacking.items()]
        table.add_row(*[Text(name), *cells, *([Text("; ".join(told))] if told else [])])
    console.print(table)
    words = "scan: prefill and extend; step: decode" + ("; bold: chosen" if console.is_terminal else "")
    us = f"; us: microseconds of all layers in a mean step of {found['workload']}" if measured else ""
    console.print(Text(words + us, "dim"))


def _cell(candidate: Mapping[str, Any], chosen: bool) -> Text:
    """Whether a backend serves a verb, and its time where that was measured."""
    us = candidate["mean_us"]
    text = f"{us:,.0f}" if us is not None else "yes" if candidate["serves"] else "no"
    return Text(text, "bold green" if chosen else "" if candidate["serves"] else "red")


@dataclass(frozen=True)
class BackendTime:
    """One backend's time in a step, or the reasons for having none."""

    name: str
    step_us: float | None
    """Microseconds of the plan and all layers of a step; None: not measured, or the backend cannot serve the step."""
    reasons: tuple[str, ...]
    """Why the backend has no time, or takes no part."""
    runs_here: bool = True
    """True if the backend can run on the device of the step."""


@dataclass(frozen=True)
class Explanation:
    """What `auto` (or a named backend) would do with one step."""

    shape: Shape
    layers: int
    selection: str
    choice: str
    candidates: list[BackendTime]
    """The choice first, then the others by time, then those without a time."""
    nearest: Cell | None
    """The row of the table that lies nearest to the step; None without a table."""
    covered: bool
    """Whether the times were measured around the step; else they are those of the nearest measured edge. True without times."""
    table: str
    age: str
    prior: PriorRecord | None
    """The shipped table that cells of the table are taken from; None: all of them were measured on its machine."""

    @property
    def gap(self) -> tuple[str, float] | None:
        """(the fastest of the others, its time over the choice's); below 1 where a slower backend was named."""
        timed = [candidate for candidate in self.candidates if candidate.step_us is not None]
        if len(timed) < 2 or timed[0].name != self.choice:
            return None
        return timed[1].name, (timed[1].step_us or 0.0) / (timed[0].step_us or 1.0)


def print_explanation(found: Explanation, console: Console, all_backends: bool) -> None:
    """Print a summary of at most three lines, the times of the backends, and what they are taken from."""
    shape = found.shape
    console.print(Text(f"{shape.phase.value}, {_in_words(shape)}: ", "bold").append(found.choice, "bold green"))
    if found.gap is not None:
        name, factor = found.gap
        verdict = "as fast within a hundredth" if abs(factor - 1) < 0.01 else f"{factor:.2f} times as long"
        rank = "runner-up" if factor > 0.99 else "faster here,"
        console.print(Text(f"{rank} {name}: {verdict}"))
    shown = [each for each in found.candidates if all_backends or each.runs_here]
    if hidden := len(found.candidates) - len(shown):
        console.print(Text(f"not listed: {hidden} backends that cannot run on this device (--all)", "dim"))
    console.print(_times(found, shown))
    if any(each.step_us is not None for each in shown):
        console.print(Text("us: microseconds of all layers, with the step's plan", "dim"))
    if shape.captured:
        console.print(Text("one prompt alone is one graph: launches cost the host nothing here, beside other sequences they do"))
    if not found.covered:
        console.print(Text("the step lies beyond what was measured: these are times of the nearest measured edge"))
    each_step = "; |: chosen for each step by its lengths" if "|" in found.selection else ""
    console.print(Text(f"selection: {found.selection}{each_step}", "dim"))
    if found.nearest is not None:
        cell = found.nearest
        time = "no time"
        if cell.median_us is not None:
            time = f"{cell.median_us:.1f} us per layer (p20 {cell.p20_us:.1f}, p80 {cell.p80_us:.1f})"
        where = f"{cell.layout} {cell.block_size}" if cell.layout else "any layout"
        checked = "" if found.prior is None else ", prior, checked here" if found.prior.checked else ", prior, not checked here"
        source = checked if cell.prior or found.prior is None else ", measured here"
        row = f"{cell.phase}, {_in_words(cell)}, {cell.backend}, {where}: {time}, {cell.status}{source}"
        console.print(Text(f"nearest row of the table: {row}"))
        console.print(Text(f"table: {found.table}, {found.age}", "dim"))
    if found.prior is not None:
        console.print(Text(f"prior: {found.prior}", "dim"))
        for title, lines in (
            ("other there:", found.prior.differs),
            ("not used around", found.prior.disagreed),
            ("corrected around", found.prior.corrected),
        ):
            for line in lines:
                console.print(Text(f"  {title} {line}", "dim"))


def _in_words(step: Shape | Cell) -> str:
    sequences = "1 sequence" if step.batch == 1 else f"{step.batch} sequences"
    return f"{sequences}, {step.query_len} new of {step.kv_len} tokens"


def _times(found: Explanation, candidates: Sequence[BackendTime]) -> Table:
    """Return a table of the candidates' times, with reasons if any of them has none."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("backend", no_wrap=True)
    shown.add_column(f"us per step of {found.layers} layers", justify="right")
    if any(candidate.reasons for candidate in candidates):
        shown.add_column("why not", overflow="fold")
    for candidate in candidates:
        us = "" if candidate.step_us is None else f"{candidate.step_us:,.0f}"
        style = "bold green" if candidate.name == found.choice else ""
        more = f"; and {len(candidate.reasons) - 1} more" if len(candidate.reasons) > 1 else ""
        cells = [Text(candidate.name, style), Text(us), Text("".join(candidate.reasons[:1]) + more)]
        shown.add_row(*cells[: len(shown.columns)])
    return shown


_GEOMETRY = (
    "num_heads/num_kv_heads/head_dim of the layers; of latent attention absorbed and expanded, 16/1/576/512+16/16/192/128/dense."
)

_MODEL = "A model's layers, by a folder, a config.json or a name; no weights are read. In place of --geometry and --layers."

_LAYERS = "Number of layers that share a step's plan. Default: those of the model with this geometry; 32 for another one."

_ALL = "List all backends, also those that cannot run on this device, with the reasons."

_LINEAR = "With --model: say instead which way multiplies over each kind of quantised weight, for how many rows."


class StepPhase(str, Enum):  # noqa: UP042  (typer prints the values of a str Enum)
    """The phase of a part of a step; verify is a decode of several drafts."""

    prefill = "prefill"
    extend = "extend"
    decode = "decode"
    verify = "verify"


def explain(
    phase: Annotated[StepPhase, typer.Option(help="Phase of the step.")] = StepPhase.decode,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the step.")] = 1,
    length: Annotated[int, typer.Option("--len", min=1, help="Tokens of each sequence, cached and new.")] = 1024,
    query_len: Annotated[int | None, typer.Option(min=1, help="New tokens of each sequence. Default: as the phase has.")] = None,
    attn_backend: Annotated[str, typer.Option(help="auto, NAME, or prefill=NAME,decode=NAME.")] = "auto",
    kv_layout: Annotated[str, typer.Option(help="Cache layout: auto, nhd, hnd, vllm_5d, nhd_int8, or a plugin's.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Tokens in a cache block. Default: auto.")] = None,
    workload: Annotated[str, typer.Option(help="chat, long, batch, or BATCHxINPUT+OUTPUT.")] = "chat",
    model: Annotated[str | None, typer.Option(help=_MODEL)] = None,
    geometry: Annotated[str | None, typer.Option(help=_GEOMETRY)] = None,
    layers: Annotated[int | None, typer.Option(min=1, help=_LAYERS)] = None,
    state_backend: Annotated[str, typer.Option(help="For layers with a state, as --attn-backend.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: the GPU if there is one.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks: also say how they sum, by bytes.")] = 1,
    crossover_table: Annotated[
        list[Path] | None, typer.Option(help="A table file, of any machine. Repeatable. Default: this one's.")
    ] = None,
    linear: Annotated[bool, typer.Option("--linear", help=_LINEAR)] = False,
    quantization: Annotated[str | None, typer.Option(help="With --linear: what plain weights are rounded to (fp8).")] = None,
    plugin: PluginFiles = None,
    all_backends: Annotated[bool, typer.Option("--all", help=_ALL)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all backends and reasons.")] = False,
) -> None:
    """Show the backend that a step takes, the runner-up and the gap between them.

    The table below lists each backend's time, or the reason why it has none.
    """
    if linear or quantization is not None:
        from headway.tuning.isolated.trial import create_registry

        tell_products(model, quantization, dtype, device, as_json, create_registry(plugin or ()))
        return
    from headway.core.engine.data.config import check_block_size
    from headway.core.select.backend_request import BackendRequest
    from headway.core.select.selection import Workload
    from headway.core.select.selector import Selector
    from headway.tuning.isolated.trial import create_registry
    from headway.tuning.measure.all_reduce import describe_kept

    if block_size is not None:
        check_block_size(block_size, "--block-size")
    kind = _layers(model, geometry, layers, dtype, device)
    registry = create_registry(plugin or ())
    shape = _shape(phase, batch, query_len, length)
    if kind.cached and shape.phase not in kind.phases:
        raise ConfigError("--phase", "prefill, because layers of this geometry have no cache", phase.value, "--phase prefill")
    tables = {spec: _table(crossover_table or [], spec, registry) for spec in kind.counts}
    costs = _costs(kind, tables)
    selector = Selector(
        registry,
        kind,
        BackendRequest.parse(attn_backend),
        kv_layout=kv_layout,
        block_size=block_size,
        costs=costs,
        workload=Workload.parse(workload),
    )
    found = None
    if kind.cached:
        spec = kind.in_phase(kind.cached[0], shape.phase)
        times = None if costs is None else _step_costs(selector, kind, costs)
        found = explanation(selector, registry, spec, shape, len(kind.cached), tables[spec], times)
    states = explain_states(kind.states, registry, state_backend, Workload.parse(workload)) if kind.states else None
    sums = None if tensor_parallel_size == 1 else describe_kept(kind.device, tensor_parallel_size)
    if as_json:
        more = {"states": states, "all_reduce": sums}
        plain = {"selection": str(selector.selection)} if found is None else _plain(found)
        print(json.dumps(plain | {name: value for name, value in more.items() if value is not None}, indent=2))
        return
    if found is None:
        Terminal().print(Text(f"attention: {selector.selection.why}, and no attention backend is asked", "bold"), soft_wrap=True)
    else:
        print_explanation(found, Terminal(highlight=False), all_backends)
    if sums is not None:
        Terminal().print(Text(f"sums over {tensor_parallel_size} ranks: {sums}", "dim"), soft_wrap=True)
    if states is not None:
        print_states(states, Terminal(highlight=False), all_backends)


def explanation(
    selector: Selector,
    registry: Registry,
    spec: AttentionSpec,
    shape: Shape,
    layers: int,
    table: CrossoverTable | None,
    costs: StepCosts | None,
) -> Explanation:
    """Explain what a selector would do with one step, with each backend's time or reasons.

    costs: the measured times over the selection's layout and block size, whether or not they decided; None: there are none.
    """
    from headway.core.engine.execution.graph_set import as_run

    shape = as_run(shape, spec.device.type)
    choice = next(iter(selector.backends_of(shape).values())).name
    chosen = selector.selection
    failed = {} if table is None else {record.name: record.reason for record in table.backends if record.available}
    candidates, able = [], registry.able(spec.device)
    for name in registry.backends:
        support = registry.supports(name, spec, selector.layout_of(spec), chosen.block_size, shape.phase)
        reasons = [str(reason) for reason in support.reasons] + ([failed[name]] if failed.get(name) else [])
        us = costs.step_us(name, shape) if costs is not None and not reasons else float("inf")
        if us == float("inf") and not reasons:
            reasons = [_unmeasured(name, shape, table)]
        candidates.append(BackendTime(name, us if us < float("inf") else None, tuple(reasons), name in able))
    candidates.sort(key=lambda candidate: (candidate.name != choice, candidate.step_us is None, candidate.step_us or 0.0))
    nearest = None if table is None else _nearest(table, shape, choice, chosen.layout.name, chosen.block_size)
    age = "" if table is None else _age(table.date)
    title = "" if table is None else table.title
    prior = None if table is None else table.prior
    covered = costs is None or costs.covers(shape)
    return Explanation(shape, layers, str(chosen), choice, candidates, nearest, covered, title, age, prior)


def _layers(model: str | None, geometry: str | None, layers: int | None, dtype: str, device: str | None) -> LayerSpecs:
    """The layers of a model, or as many of a geometry as are asked for, in the element type that an engine would take.

    :raises HeadwayError: options that cannot be read or exclude each other, or a model that is not there.
    """
    import torch

    from headway.core.contract.spec import DTYPES
    from headway.core.select.layer_specs import LayerSpecs
    from headway.tuning.measure.device import resolve_device

    place = resolve_device(device)
    if model is None:
        specs = [layer(part, dtype, "auto", place) for part in (geometry.split("+", 1) if geometry else [None])]
        expanded = {} if len(specs) == 1 else {specs[0]: replace(specs[1], dense=True)}
        named = geometry or GEOMETRY.get(place.type, GEOMETRY["cuda"])
        return LayerSpecs(specs[:1] * (layers or LAYERS.get(named, 32)), expanded)
    if geometry is not None or layers is not None:
        raise ConfigError("--model", "no --geometry and no --layers, which the model has", geometry or layers)
    from headway.models.loader import read_layer_specs

    asked = dtype_of("--dtype", dtype, DTYPES)
    return read_layer_specs(model, place, torch.float32 if asked is None and place.type == "cpu" else asked)


def _costs(kind: LayerSpecs, tables: Mapping[AttentionSpec, CrossoverTable | None]) -> dict[AttentionSpec, CostTable] | None:
    """The times of every spec that layers ask for; None where a table is missing."""
    from headway.tuning.table.convert import to_costs

    costs = {spec: to_costs(table, phases=kind.phases_of(spec)) for spec, table in tables.items() if table is not None}
    return costs if len(costs) == len(tables) else None


def _step_costs(selector: Selector, kind: LayerSpecs, costs: Mapping[AttentionSpec, CostTable]) -> StepCosts:
    """The times over the layout and block size that the selector has chosen: a backend that was named by hand has them too."""
    from headway.core.select.costs import StepCosts

    parts = [(costs[spec], count) for spec, count in kind.counts.items()]
    return StepCosts(parts, selector.selection.layout.name, selector.selection.block_size)


def _table(paths: list[Path], spec: AttentionSpec, registry: Registry) -> CrossoverTable | None:
    """The first of the files that holds a layer's times, unchecked against this machine; without files the table that auto would
    use, or None.

    :raises ConfigError: no file holds them.
    """
    from headway.core.select.backend_request import ALL_AUTO
    from headway.core.select.layer_specs import LayerSpecs
    from headway.tuning.autotune import TableRequest, tables_for
    from headway.tuning.table.files import read_table
    from headway.tuning.table.schema import SpecRecord

    if paths:
        tables = [read_table(path) for path in paths]
        found = next((table for table in tables if table.spec.kind == SpecRecord.of(spec).kind), None)
        if found is None:
            got = " and ".join(f"one for {table.spec}" for table in tables)
            raise ConfigError("--crossover-table", f"a table for {spec}", got, "say --geometry and --dtype")
        return found
    usable = tables_for(LayerSpecs([spec]), registry, ALL_AUTO, TableRequest(budget=0.0))
    return None if usable is None else usable[spec]


def _shape(phase: StepPhase, batch: int, query_len: int | None, length: int) -> Shape:
    from headway.core.contract.metadata import Phase
    from headway.core.select.costs import Shape

    usual = {"prefill": length, "extend": min(256, max(length // 2, 1)), "decode": 1, "verify": 4}
    new = query_len or usual[phase.value]
    if new > length or (new == length and phase is not StepPhase.prefill):
        raise ConfigError("--len", f"more than the {new} new tokens of a sequence, for {phase.value}", length)
    if phase is StepPhase.prefill and new != length:
        raise ConfigError("--query-len", f"{length} as --len in prefill, where nothing is cached", new, "--phase extend")
    core = Phase.DECODE if phase is StepPhase.verify else Phase(phase.value)
    return Shape(core, batch, new, length)


def _unmeasured(name: str, shape: Shape, table: CrossoverTable | None) -> str:
    """Why a backend that could serve a step has no time."""
    if table is None:
        return "no crossover table: headway bench crossover measures one"
    known = [cell for cell in table.cells if cell.backend == name and cell.phase == _table_phase(shape)]
    reason = next((cell.reason for cell in known if cell.reason and cell.median_us is None), "")
    return f"not measured around here{f' ({reason})' if reason else ''}"


def _table_phase(shape: Shape) -> str:
    """A step's phase as tables name it: verification is a decode of several tokens."""
    return "verify" if shape.phase.value == "decode" and shape.query_len > 1 else shape.phase.value


def _nearest(table: CrossoverTable, shape: Shape, name: str, layout: str, block_size: int) -> Cell | None:
    """The measured row nearest to a step, in octaves."""
    phase, places = _table_phase(shape), ((layout, block_size), (None, None))
    rows = [
        cell for cell in table.cells if (cell.backend, cell.phase) == (name, phase) and (cell.layout, cell.block_size) in places
    ]

    def far(cell: Cell) -> float:
        pairs = ((cell.batch, shape.batch), (cell.query_len, shape.query_len), (cell.kv_len, shape.kv_len))
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    return min(rows, key=far, default=None)


def _age(date: str) -> str:
    try:
        days = (datetime.now(UTC) - datetime.fromisoformat(date)).days
    except (ValueError, TypeError):
        return f"measured {date}"
    return f"measured {date}, {f'{days} days ago' if days > 0 else 'today'}"


def _plain(found: Explanation) -> dict[str, object]:
    gap = found.gap
    return {
        "phase": found.shape.phase.value,
        "batch": found.shape.batch,
        "query_len": found.shape.query_len,
        "kv_len": found.shape.kv_len,
        "selection": found.selection,
        "choice": found.choice,
        "runner_up": None if gap is None else {"name": gap[0], "factor": gap[1]},
        "candidates": [{"name": c.name, "step_us": c.step_us, "reasons": list(c.reasons)} for c in found.candidates],
        "covered": found.covered,
        "nearest_row": None if found.nearest is None else found.nearest.model_dump(),
        "table": found.table,
        "age": found.age,
        "prior": None if found.prior is None else found.prior.model_dump() | {"text": str(found.prior)},
    }
