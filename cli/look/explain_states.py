"""The part of `headway backends explain` for layers with a state: the layers, and the backends that compute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from headway.core.contract.state import StateSpec
    from headway.core.select.selection import Workload
    from headway.core.select.state_selector import RatedState
    from headway.registry import Registry


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
