"""The parts of `headway backends explain` for layers with a state and for linear layers with quantized weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from headway.core.contract.state import StateSpec
    from headway.core.select.selection import Workload
    from headway.core.select.state_selector import RatedState
    from headway.kernels.linear.linear import Linear
    from headway.registry import Registry


def tell_products(model: str | None, quantization: str | None, dtype: str, device: str | None, as_json: bool) -> None:
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
    found = explain_products(shapes.decoder.products, place)
    if as_json:
        print(json.dumps({"model": shapes.name, "device": str(place), "products": found}, indent=2))
    else:
        print_products(found, Terminal())


def explain_products(products: Sequence[tuple[Linear, bool]], device: torch.device) -> list[dict[str, Any]]:
    """Say what would serve a model's products on a device, as plain data: kept times choose, or where there are none the rule.

    products: whose weights need no elements; and whether each is gated.
    """
    return _on_cpu(products) if device.type == "cpu" else _on_gpu(products, device)


def _on_cpu(products: Sequence[tuple[Linear, bool]]) -> list[dict[str, Any]]:
    """Nothing is chosen: torch packs a form or does not."""
    from torch import Tensor

    from headway.kernels.linear.forms import form_name
    from headway.kernels.linear.linear import packs

    kinds: Counter[tuple[str, str]] = Counter()
    for linear, _ in products:
        weight = linear.weight
        if not isinstance(weight, Tensor):
            way = "torch's product over packed weights" if packs(weight, linear.dtype) else "expanded on loading"
            kinds[f"{form_name(weight)} {linear.out_features}x{linear.in_features}", way] += 1
    return [
        {"product": name, "layers": count, "ways": {1: way}, "by": "the form, nothing is measured"}
        for (name, way), count in kinds.items()
    ]


def _on_gpu(products: Sequence[tuple[Linear, bool]], device: torch.device) -> list[dict[str, Any]]:
    """Kept times choose, or the rule."""
    from headway.kernels.linear.quantized_ways import QuantizedWays
    from headway.tuning.measure.device import identify_device
    from headway.tuning.measure.products import obey_kept, obey_shipped

    ways = QuantizedWays(device)
    kinds = Counter(kind for linear, gated in products if (kind := ways.kind(linear, linear.dtype, gated)) is not None)
    identity = identify_device(device)
    for kind in kinds:
        if not obey_kept(kind, identity):
            obey_shipped(kind, identity)
    return [
        {
            "product": kind.name,
            "layers": count,
            "ways": kind.changes(),
            "by": kind.source,
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
    selector = StateSelector(registry, specs, BackendRequest.parse(asked, "state_backend"), costs, workload)
    chosen, able = selector.selection, registry.state_able(specs[0].device)
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
        table.add_row(Text(name), *cells, *([Text("; ".join(told))] if told else []))
    console.print(table)
    words = "scan: prefill and extend; step: decode" + ("; bold: chosen" if console.is_terminal else "")
    us = f"; us: microseconds of all layers in a mean step of {found['workload']}" if measured else ""
    console.print(Text(words + us, "dim"))


def _cell(candidate: Mapping[str, Any], chosen: bool) -> Text:
    """Whether a backend serves a verb, and its time where that was measured."""
    us = candidate["mean_us"]
    text = f"{us:,.0f}" if us is not None else "yes" if candidate["serves"] else "no"
    return Text(text, "bold green" if chosen else "" if candidate["serves"] else "red")
