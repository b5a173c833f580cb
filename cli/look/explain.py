"""`headway backends explain`: the backend that a step would use, and the reasons against the other backends."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.measure.bench_crossover import GEOMETRY, LAYERS, layer
from headway.cli.options import PluginFiles, dtype_of, parse_attention_rules
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Row, Section, Terminal, show

if TYPE_CHECKING:
    import torch

    from headway.core.contract.experts import ExpertsSpec
    from headway.core.contract.spec import AttentionSpec
    from headway.core.contract.state import StateSpec
    from headway.core.select.choice import ChoiceRow, Rated
    from headway.core.select.costs import CountAxis, Shape
    from headway.core.select.request import BackendRequest, LayerSpecs, Workload
    from headway.core.select.selector import AttentionGroup, Selector
    from headway.kernels.experts.bound import ExpertsKind
    from headway.kernels.linear.choice import LinearChoice
    from headway.kernels.linear.linear import Linear
    from headway.registry import Registry
    from headway.tuning.table.schema import Cell, CrossoverTable, PriorRecord


def explain_weights(
    model: str | None,
    quantization: str | None,
    dtype: str,
    device: str | None,
    registry: Registry,
    kinds: Collection[str],
    fixed: bool,
) -> tuple[dict[str, Any], list[Section]]:
    """Return the kernels for a model's linear layers or layers of experts, as plain data and as sections to print.

    Nothing is measured, and no weights are read. kinds: "linear", "experts" or both. fixed: True for deterministic mode.

    :raises HeadwayError: if no model is given, Headway's decoder does not support it, or an option is not valid.
    """
    from headway.kernels.experts.bound import ExpertsOptions
    from headway.models.layers.decoder import Decoder
    from headway.models.loader import LoadOptions, load_model
    from headway.tuning.measure.device import resolve_device

    if model is None:
        raise ConfigError(" and ".join(f"--{kind}" for kind in kinds), "a model whose layers are meant", "none", "--model NAME")
    place, experts = resolve_device(device), ExpertsOptions()
    shapes = load_model(
        model,
        "float32" if dtype == "auto" and place.type == "cpu" else dtype,
        "meta",
        "dummy",
        skip_tokenizer_init=True,
        model_impl="headway",
        options=LoadOptions(quantization=quantization, experts=experts),
    )
    decoder, plain, sections = shapes.decoder, dict[str, Any](model=shapes.name, device=str(place)), list[Section]()
    assert isinstance(decoder, Decoder)
    for kind in kinds:
        if kind == "linear":
            found = _linear([*decoder.products, (decoder.lm_head, False)], place, registry, fixed)
            none = "no linear layer with a quantized weight; --quantization quantizes plain ones"
        else:
            found, none = _experts(experts.specs, place, registry, fixed), "no layer of experts"
        plain["products" if kind == "linear" else kind] = found
        sections += list(map(kernel_section, found)) or [Section(none)]
    return plain, sections


def _linear(
    products: Sequence[tuple[Linear, bool]], device: torch.device, registry: Registry, fixed: bool
) -> list[dict[str, Any]]:
    """Return the kernels for a model's linear layers on a device. products: (layer on the meta device, whether it is gated)."""
    from torch import Tensor

    from headway.kernels.linear.choice import ROWS
    from headway.tuning.measure.device import identify_device
    from headway.tuning.measure.linear import linear_layer

    kernels, on_cpu = registry.linear_kernels(device, invariant=fixed), device.type == "cpu"
    specs = [(linear, linear.spec(device, gated and not on_cpu)) for linear, gated in products]
    chosen = [(linear, kernels.choice(spec)) for linear, spec in specs]
    kinds = Counter(choice for linear, choice in chosen if choice.third_party or not isinstance(linear.weight, Tensor))
    identity, found = identify_device(device), list[dict[str, Any]]()
    for kind, count in kinds.items():
        timed = kind.is_open or not on_cpu
        if timed and not fixed:
            linear_layer(kind, identity, registry=registry).obey(0.0)
        data = {"product": kind.name, **choice_data(kind, count, ROWS)}
        if not timed:
            data["by"] = "the form, nothing is measured"
            data["refused"] = {name: why for name, why in data["refused"].items() if kind.is_third_party(name)}
        found.append(data)
    return found


def _experts(specs: Mapping[ExpertsSpec, int], device: torch.device, registry: Registry, fixed: bool) -> list[dict[str, Any]]:
    """Return the kernels for a model's layers of experts on a device, chosen by stored times, else by the heuristic.

    specs: spec of a layer on the meta device -> number of layers with this spec.
    """
    from headway.core.contract.weights import WeightFormat
    from headway.kernels.experts.bound import ExpertsLayers, ExpertsOptions
    from headway.kernels.experts.builtin import TOKENS
    from headway.kernels.experts.weights import examples_of
    from headway.models.loader import reads_expert_weight
    from headway.tuning.measure.device import identify_device
    from headway.tuning.measure.experts import expert_layer

    def unbound(*_: object) -> Any:
        raise AssertionError("no layer is bound")

    options, identity = ExpertsOptions(registry.experts.classes, invariant=fixed), identify_device(device)
    found: list[dict[str, Any]] = []
    layers = ExpertsLayers(options, lambda config: unbound, lambda kernel, spec, shared: kernel(spec))
    able = {name: registry.experts.able(name, device.type) for name in registry.experts.meant_for(device.type)}
    for spec, count in specs.items():
        formats = [
            each if example is None or reads_expert_weight(example, spec.dtype, device, options) else WeightFormat("plain")
            for each, example in zip((spec.gate_up, spec.down), examples_of(spec), strict=True)
        ]
        kind = layers.kind(replace(spec, device=device, gate_up=formats[0], down=formats[1]))
        if kind.chooses and not fixed:
            expert_layer(kind, identity, registry=registry).obey(0.0)
        data = choice_data(kind, count, TOKENS)
        data["refused"] |= {name: support.brief for name, support in able.items() if not support}
        found.append({"experts": str(kind.spec), **data})
    return found


def choice_data(kind: LinearChoice | ExpertsKind, layers: int, axis: CountAxis) -> dict[str, Any]:
    """Return the kernel for each number of rows or tokens, measured times, and reasons against other kernels, as plain data."""
    us = {} if kind.times is None else kind.times.us
    return {
        "layers": layers,
        "unit": axis.unit,
        "ways": kind.changes(),
        "us": {name: dict(zip(axis.counts, times, strict=True)) for name, times in us.items() if any(times)},
        "by": kind.source,
        "refused": {name: support.brief for name, support in kind.refused.items()},
    }


_TIMED = (1, 16, 256, 4096)
"""Numbers of rows or tokens for which times are shown."""


def kernel_section(found: Mapping[str, Any]) -> Section:
    """Return the section for one kind of linear layer or layer of experts. found: an item of `explain_weights`."""
    starts, us = list(found["ways"]), found["us"]
    ends = [*(f" to {start - 1:,}" for start in starts[1:]), " on"]

    def times(name: str) -> list[str]:
        known = us.get(name, {})
        return [f"{known[count]:,.1f}" if known.get(count) else "-" * bool(name) for count in _TIMED] if us else []

    rows = [
        Row((way, f"from {start:,}{end}", *times(way)), (0,))
        for (start, way), end in zip(found["ways"].items(), ends, strict=True)
    ]
    rows += [Row((name, "", *times(name))) for name in us if name not in found["ways"].values()]
    rows += [Row((name, use, *times(""))) for name, use in found.get("overlapped", {}).items()]
    refused: dict[str, list[str]] = {}
    for name, why in found["refused"].items():
        refused.setdefault(why, []).append(name)
    rows += [Row((", ".join(names), "", *times("")), why_not=why) for why, names in refused.items()]
    title = found.get("sums") or f"{found.get('product') or found['experts']}, {found['layers']} layers"
    columns = ("kernel", found["unit"], *(f"{count:,}" for count in _TIMED if us))
    remarks = [f"{', '.join(columns[2:])}: microseconds per layer at this number of {found['unit']}"] if us else []
    return Section(title, columns=columns, rows=rows, remarks=remarks, notes=[f"by: {found['by']}"])


def explain_states(
    specs: Sequence[StateSpec], registry: Registry, asked: BackendRequest, workload: Workload
) -> tuple[dict[str, Any], Section, list[ChoiceRow]]:
    """Return the kernels for state layers, ranked by the times that auto would use, as plain data, as a section to print, and as
    rows of the plan.

    Nothing is measured. specs: spec of each layer. asked: kernels that the user named.

    :raises HeadwayError: if the requested backend cannot be used; the error has all reasons.
    """
    from headway.core.contract.operation import STATE
    from headway.core.select.kernels import VERBS, StateCandidates
    from headway.core.select.request import ALL_AUTO, LayerSpecs
    from headway.core.select.selector import KernelSelector
    from headway.tuning.autotune import TableRequest, costs_for

    timed = LayerSpecs([], states=[] if specs[0].invariance else specs)  # deterministic mode uses no times
    costs = costs_for(timed, registry, ALL_AUTO, TableRequest(budget=0.0), kind=STATE)
    candidates = StateCandidates(registry.states, specs)
    chosen = (selector := KernelSelector(candidates, asked, costs, workload)).selection
    steps = {shape.phase: shape for shape, _ in candidates.steps(workload)}
    rated = {verb: selector.rated(steps[phase], chosen.names[phase]) for phase, verb in VERBS.items()}
    able = registry.states.all_able(specs[0].device.type)
    layers = [(count, str(spec), chosen.layout.bytes_per_slot(spec)) for spec, count in candidates.counts.items()]

    def candidates_of(verb: str) -> list[dict[str, Any]]:
        """Return the candidate backends for `scan` or `step` as plain data."""
        found = [(each, list(map(str, each.reasons))) for each in rated[verb]]
        return [
            {"name": each.name, "serves": not why, "mean_us": each.us, "reasons": why, "runs_here": each.name in able}
            for each, why in found
        ]

    plain = {
        "layers": [{"count": count, "spec": spec, "bytes_per_slot": size} for count, spec, size in layers],
        "selection": str(chosen),
        "layout": chosen.layout.name,
        "why": chosen.why,
        "workload": str(workload),
        **{verb: {"choice": chosen.names[phase], "candidates": candidates_of(verb)} for phase, verb in VERBS.items()},
    }
    measured = any(each.us is not None for found in rated.values() for each in found)
    verbs = [f"{verb}, us" if measured else verb for verb in VERBS.values()]
    rows = [_state_row(each.name, rated, [chosen.names[phase] for phase in VERBS], able) for each in rated["step"]]
    us = f"; us: microseconds of all layers in a mean step of {workload}" if measured else ""
    section = Section(
        "states: ",
        ", ".join(f"{phase.value}={name}" for phase, name in chosen.names.items()),
        [f"{count} layers with a state: {spec}; {size / 2**20:.2f} MiB each in a slot" for count, spec, size in layers],
        ["state backend", *verbs],
        rows,
        notes=[f"scan: prefill and extend; step: decode{us}", f"selection: {chosen}"],
    )
    return plain, section, selector.plan("state")


def _state_row(name: str, rated: Mapping[str, Iterable[Rated]], choices: Sequence[str], able: Collection[str]) -> Row:
    found = {verb: next(each for each in every if each.name == name) for verb, every in rated.items()}
    cells = [f"{each.us:,.0f}" if each.us is not None else "no" if each.reasons else "yes" for each in found.values()]
    lacking = {verb: str(each.reasons[0]) for verb, each in found.items() if each.reasons}
    same = len(lacking) == len(found) and len(set(lacking.values())) == 1
    why = [lacking["scan"]] if same else [f"{verb}: {reason}" for verb, reason in lacking.items()]
    chosen = [number for number, choice in enumerate(choices, 1) if choice == name]
    return Row((name, *cells), chosen, "; ".join(why), name in able)


_GEOMETRY = (
    "num_heads/num_kv_heads/head_dim of the layers. Latent attention (MLA) takes absorbed+non-absorbed, such as "
    "16/1/576/512+16/16/192/128/dense."
)
_MODEL = "Model whose layers to use: a folder, a config.json or a name. No weights are read. Replaces --geometry and --layers."
_LAYERS = "Number of layers that share a step's plan. Default: the number in a known model of this geometry, else 32."
_ALL = "Also list backends that cannot run on this device, and why."
_LINEAR = "With --model: show the kernel of each kind of quantized linear layer by number of rows instead."
_EXPERTS = "With --model: show the kernel of each kind of expert layer by number of tokens instead."


class StepPhase(str, Enum):  # noqa: UP042  (typer prints the values of a str Enum)
    """Phase of a step's sequences. verify is a decode with several draft tokens."""

    prefill = "prefill"
    extend = "extend"
    decode = "decode"
    verify = "verify"


def explain(
    phase: Annotated[StepPhase, typer.Option(help="Phase of the step.")] = StepPhase.decode,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences in the step.")] = 1,
    length: Annotated[int, typer.Option("--len", min=1, help="Number of cached plus new tokens per sequence.")] = 1024,
    query_len: Annotated[
        int | None, typer.Option(min=1, help="Number of new tokens per sequence. Default: typical for the phase.")
    ] = None,
    attn_backend: Annotated[
        str, typer.Option(help="Attention backend: auto, NAME, or prefill=NAME,decode=NAME; by kind: window:decode=NAME.")
    ] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="Cache dtype: auto or a name; by kind: full=fp8_e4m3.")] = "auto",
    kv_layout: Annotated[str, typer.Option(help="KV cache layout: auto, nhd, hnd, vllm_5d, nhd_int8, or a plugin's.")] = "auto",
    block_size: Annotated[
        int | None, typer.Option(help="Number of tokens per KV cache block. Default: selected automatically.")
    ] = None,
    workload: Annotated[str, typer.Option(help="Expected workload: chat, long, batch, or BATCHxINPUT+OUTPUT.")] = "chat",
    model: Annotated[str | None, typer.Option(help=_MODEL)] = None,
    geometry: Annotated[str | None, typer.Option(help=_GEOMETRY)] = None,
    layers: Annotated[int | None, typer.Option(min=1, help=_LAYERS)] = None,
    state_backend: Annotated[str, typer.Option(help="State backend, in the form of --attn-backend.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Element type: float32, bfloat16, float16 or auto.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda or cuda:N. Default: the GPU if there is one.")] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Number of ranks. Above 1 adds the all-reduce kernels by size.")
    ] = 1,
    crossover_table: Annotated[
        list[Path] | None, typer.Option(help="Crossover table of any machine. Repeatable. Default: this machine's.")
    ] = None,
    linear: Annotated[bool, typer.Option("--linear", help=_LINEAR)] = False,
    experts: Annotated[bool, typer.Option("--experts", help=_EXPERTS)] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Show the kernels of deterministic mode.")] = False,
    deterministic_level: Annotated[str, typer.Option(help="What deterministic mode keeps: batch or full.")] = "batch",
    quantization: Annotated[
        str | None, typer.Option(help="With --linear or --experts: format to quantize plain weights to: fp8.")
    ] = None,
    attention_rule: Annotated[
        list[str] | None, typer.Option(help="Attention rule of layers, as FILE.py:CLASS or KEY=FILE.py:CLASS. Repeatable.")
    ] = None,
    plugin: PluginFiles = None,
    all_backends: Annotated[bool, typer.Option("--all", help=_ALL)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all backends and reasons instead of text.")] = False,
) -> None:
    """Show the backend that a step uses, the runner-up and the gap between them.

    The table lists each backend's time, or the reason why the backend has no time.
    """
    if linear or experts or quantization is not None:
        from headway.tuning.isolated.trial import create_registry

        kinds = [name for name, wanted in (("linear", linear or not experts), ("experts", experts)) if wanted]
        plain, sections = explain_weights(model, quantization, dtype, device, create_registry(plugin or ()), kinds, deterministic)
        return _print(plain, sections, all_backends, as_json)
    from headway.core.contract.ranks import RankGroup
    from headway.core.engine.data.config import EngineConfig
    from headway.core.engine.scheduling.deterministic import prepare_deterministic
    from headway.core.select.choice import plan_text
    from headway.core.select.kernels import check_names
    from headway.core.select.request import Workload
    from headway.core.select.selector import Selector
    from headway.tuning.isolated.trial import create_registry
    from headway.tuning.measure.all_reduce import explain_sums
    from headway.tuning.table.convert import to_costs

    config = EngineConfig(attn_backend=attn_backend, state_backend=state_backend, kv_layout=kv_layout, block_size=block_size)
    config = replace(config, deterministic=deterministic, deterministic_level=deterministic_level)
    kind, registry = _layers(model, geometry, layers, dtype, device).with_cache(kv_cache_dtype), create_registry(plugin or ())
    rules = {key: registry.attention_rule(text) for key, text in parse_attention_rules(attention_rule or []).items()}
    kind = kind.with_rules(rules, range(len(kind.cached)), length)
    check_names(registry, config.backend_request, kv_layout)
    asked, shape = Workload.parse(workload), _shape(phase, batch, query_len, length)
    if kind.cached and shape.phase not in kind.phases:
        raise ConfigError("--phase", "prefill, because layers of this geometry have no cache", phase.value, "--phase prefill")
    if deterministic:
        config = prepare_deterministic(registry, kind := kind.invariant(config.invariance), config)
    request = config.backend_request
    tables = {spec: None if deterministic else _table(crossover_table or [], spec, registry) for spec in kind.counts}
    costs = {spec: to_costs(table, phases=kind.phases_of(spec)) for spec, table in tables.items() if table is not None}
    for option, draft in (("attn_backend", request.names_kind("draft")), ("kv_cache_dtype", "draft=" in kv_cache_dtype)):
        if draft:
            raise ConfigError(option, "kinds of the model's own layers", "draft", "an engine with a draft model logs its plan")
    known = costs if len(costs) == len(tables) else None
    selector = Selector(registry, kind, request, kv_layout=kv_layout, block_size=block_size, costs=known, workload=asked)
    plain, sections = _explain_kinds(selector, kind, shape, tables, registry.able(kind.device))
    plan = selector.plan() if kind.cached else []
    if tensor_parallel_size > 1:
        group = RankGroup(0, tensor_parallel_size, kind.device)
        plain["all_reduce"] = explain_sums(registry.all_reduce, group, in_order=deterministic)
        sections.append(kernel_section(plain["all_reduce"]))
    if kind.states:
        plain["states"], section, rows = explain_states(kind.states, registry, config.state_request, asked)
        sections.append(section)
        plan += rows
    plain["plan"] = [row._asdict() for row in plan]
    sections += [Section("plan", summary=plan_text(plan).splitlines())] * bool(plan)
    _print(plain, sections, all_backends, as_json)


def _explain_kinds(
    selector: Selector,
    layers: LayerSpecs,
    shape: Shape,
    tables: Mapping[AttentionSpec, CrossoverTable | None],
    able: Collection[str],
) -> tuple[dict[str, Any], list[Section]]:
    """Return `explain_attention` for each kind of layer. The plain data is that of the kind with the most layers."""
    if not layers.cached:
        chosen = selector.selection
        return {"selection": str(chosen)}, [Section(f"attention: {chosen.why}, and no attention backend is asked")]
    found, sections = dict[str, Any](), list[Section]()
    for kind, part in layers.groups.items():
        group, table = selector.groups[kind], tables[part.in_phase(part.cached[0], shape.phase).kind]
        plain, section = explain_attention(group, able, shape, len(part.cached), table)
        sections.append(replace(section, title=f"{kind}: {section.title}" if len(layers.groups) > 1 else section.title))
        if group is selector.main:
            found = plain
    return found, sections


def _print(plain: Mapping[str, Any], sections: Sequence[Section], all_backends: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(plain, indent=2))
        return
    for section in sections:
        show(section, Terminal(highlight=False), all_backends)


def explain_attention(
    selector: AttentionGroup, able: Collection[str], shape: Shape, layers: int, table: CrossoverTable | None
) -> tuple[dict[str, Any], Section]:
    """Return the choice for one step of layers of one kind, and each backend's time or reasons, as plain data and as a section to
    print.

    able: names of backends that can run on the device. table: table of the first layer; None if there is none.
    """
    from headway.core.engine.execution.graph_set import as_run

    chosen = selector.selection
    spec = next(iter(next(iter(selector.instances.values()))))
    shape = as_run(shape, spec.device.type)
    choice = selector.name_of(shape)
    costs = selector.all_costs
    covered = costs is None or costs.covers(shape)
    rated = selector.rated(shape, choice)
    reasons = {each.name: list(map(str, each.reasons)) for each in rated}
    for each in rated:
        if each.us is None and not each.reasons:
            fixed = "no time: deterministic mode uses one backend in all steps"
            reasons[each.name] = [fixed if spec.invariance else _unmeasured(each.name, shape, table)]
    timed = [(each.name, each.us) for each in rated if each.us is not None]
    gap = (timed[1][0], timed[1][1] / timed[0][1]) if len(timed) > 1 and timed[0][0] == choice else None
    nearest = None if table is None else _nearest(table, shape, choice, chosen.layout.name, chosen.block_size)
    prior = None if table is None else table.prior
    plain = {
        "phase": shape.phase.value,
        "batch": shape.batch,
        "query_len": shape.query_len,
        "kv_len": shape.kv_len,
        "selection": str(chosen),
        "choice": choice,
        "runner_up": None if gap is None else {"name": gap[0], "factor": gap[1]},
        "candidates": [{"name": each.name, "step_us": each.us, "reasons": reasons[each.name]} for each in rated],
        "covered": covered,
        "nearest_row": None if nearest is None else nearest.model_dump(),
        "table": "" if table is None else table.title,
        "age": "" if table is None else _age(table.date),
        "prior": None if prior is None else prior.model_dump() | {"text": str(prior)},
    }
    remarks = ["us: microseconds of all layers, with the step's plan"] if timed else []
    if shape.captured:
        remarks.append("a single prompt is one graph: the host launches nothing unless other sequences run too")
    if not covered:
        remarks.append("the step is outside the measured range; the times are those of the nearest measured edge")
    notes = [f"selection: {chosen}" + "; |: chosen for each step by its lengths" * ("|" in str(chosen))]
    if nearest is not None:
        notes += [_row_in_words(nearest, prior), f"table: {plain['table']}, {plain['age']}"]
    return plain, Section(
        f"{shape.phase.value}, {_in_words(shape)}: ",
        choice,
        [] if gap is None else [_gap_in_words(*gap)],
        ("backend", f"us per step of {layers} layers"),
        [_row(each, reasons[each.name], choice, able) for each in rated],
        remarks,
        notes + ([] if prior is None else _prior_in_words(prior)),
    )


def _row(rated: Rated, reasons: Sequence[str], choice: str, able: Collection[str]) -> Row:
    more = f"; and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    cells, chosen = (rated.name, "" if rated.us is None else f"{rated.us:,.0f}"), [0] if rated.name == choice else []
    return Row(cells, chosen, "".join(reasons[:1]) + more, rated.name in able)


def _gap_in_words(name: str, factor: float) -> str:
    verdict = "as fast within a hundredth" if abs(factor - 1) < 0.01 else f"{factor:.2f} times as long"
    return f"{'runner-up' if factor > 0.99 else 'faster here,'} {name}: {verdict}"


def _in_words(step: Shape | Cell) -> str:
    sequences = "1 sequence" if step.batch == 1 else f"{step.batch} sequences"
    return f"{sequences}, {step.query_len} new of {step.kv_len} tokens"


def _row_in_words(cell: Cell, prior: PriorRecord | None) -> str:
    time = f"{cell.median_us:.1f} us per layer (p20 {cell.p20_us:.1f}, p80 {cell.p80_us:.1f})" if cell.median_us else "no time"
    where = f"{cell.layout} {cell.block_size}" if cell.layout else "any layout"
    source = "" if prior is None else ", measured here" if cell.source == "measured" else f", {cell.source}, not checked here"
    return f"nearest row of the table: {cell.phase}, {_in_words(cell)}, {cell.kernel}, {where}: {time}, {cell.status}{source}"


def _prior_in_words(prior: PriorRecord) -> list[str]:
    return [f"prior: {prior}", *(f"  other there: {line}" for line in prior.differs)]


def _layers(model: str | None, geometry: str | None, layers: int | None, dtype: str, device: str | None) -> LayerSpecs:
    """Return the layers of a model, or of a geometry with the requested number of layers, in the dtype that an engine would use.

    :raises HeadwayError: if options are not valid or exclude each other, or the model does not exist.
    """
    import torch

    from headway.core.contract.spec import DTYPES
    from headway.core.select.request import LayerSpecs
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


def _table(paths: list[Path], spec: AttentionSpec, registry: Registry) -> CrossoverTable | None:
    """Return the table of the first file that has the layer's times, without checking the table against this machine. Without
    files, return the stored table.

    :raises ConfigError: if no file has the layer's times.
    """
    from headway.tuning.autotune import RegisteredLayer
    from headway.tuning.measure.device import identify_device
    from headway.tuning.measure.find_table import find_table
    from headway.tuning.table.files import read_table
    from headway.tuning.table.schema import SpecRecord

    if paths:
        tables = [read_table(path) for path in paths]
        found = next((table for table in tables if table.spec.key == SpecRecord.of(spec).key), None)
        if found is None:
            got = " and ".join(f"one for {table.spec}" for table in tables)
            raise ConfigError("--crossover-table", f"a table for {spec}", got, "say --geometry and --dtype")
        return found
    able = registry.able(spec.device)
    layer = RegisteredLayer.of(registry, spec, identify_device(spec.device), able)
    return find_table(layer, 0.0) if len(able) > 1 else None


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
    """Return why a supported backend has no time for a step."""
    if table is None:
        return "no crossover table: headway bench crossover measures one"
    known = [cell for cell in table.cells if cell.kernel == name and cell.phase == _table_phase(shape)]
    reason = next((cell.reason for cell in known if cell.reason and cell.median_us is None), "")
    return f"not measured around here{f' ({reason})' if reason else ''}"


def _table_phase(shape: Shape) -> str:
    """Return the phase under which tables list a step. Verification is a decode of several tokens."""
    return "verify" if shape.phase.value == "decode" and shape.query_len > 1 else shape.phase.value


def _nearest(table: CrossoverTable, shape: Shape, name: str, layout: str, block_size: int) -> Cell | None:
    """Return the measured row nearest to a step. The distance is the sum of the differences in octaves."""
    phase, places = _table_phase(shape), ((layout, block_size), (None, None))
    here = [cell for cell in table.cells if (cell.kernel, cell.phase) == (name, phase)]
    rows = [cell for cell in here if (cell.layout, cell.block_size) in places]

    def far(cell: Cell) -> float:
        pairs = ((cell.batch, shape.batch), (cell.query_len, shape.query_len), (cell.kv_len, shape.kv_len))
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    return min(rows, key=far, default=None)


def _age(date: str) -> str:
    with suppress(ValueError, TypeError):
        days = (datetime.now(UTC) - datetime.fromisoformat(date)).days
        return f"measured {date}, {f'{days} days ago' if days > 0 else 'today'}"
    return f"measured {date}"
