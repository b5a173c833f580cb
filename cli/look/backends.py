"""`headway backends`: all registered backends, grouped by readiness, with owners and capabilities."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from headway.cli.options import PluginFiles
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from headway.core.contract.capabilities import Capabilities
    from headway.core.contract.state import StateCapabilities
    from headway.core.contract.support import Support
    from headway.core.select.kernels import KernelRegistry

Row = dict[str, Any]
"""A backend as plain data, without its capabilities if its module does not load."""


def _described(kernels: KernelRegistry[Any, Any], name: str, own: Callable[[Any], Row]) -> Row:
    """Describe a backend. own: function that returns the entries that only this kind of backend has."""
    from headway.core.contract.metadata import Phase

    entry, available = kernels.entries[name], kernels.availability(name)
    row = {
        "name": name,
        "kind": entry.owner,
        "summary": entry.info.summary,
        "available": bool(available),
        "reasons": [str(reason) for reason in available.reasons],
    }
    try:
        claims = kernels.backend(name).capabilities
    except Exception:  # its reason is already in the row
        return row
    return row | {
        "phases": [phase.value for phase in Phase if phase in claims.phases],
        "layouts": [layout.name for layout in claims.layouts] if claims.layouts is not None else list(kernels.layouts),
        "dtypes": _names(claims.dtypes),
        "devices": list(claims.devices),
        **own(claims),
    }


def _attention_claims(claims: Capabilities) -> Row:
    return {
        "block_multiple": claims.block_multiple,
        "head_dims": claims.head_dims,
        "features": sorted(claims.features),
    }


def _state_claims(claims: StateCapabilities) -> Row:
    from headway.core.contract.state import STATE_KINDS

    return {
        "state_kinds": [kind for kind in STATE_KINDS if kind in claims.kinds],
        "convolution": claims.convolution,
        "state_dtypes": _names(claims.state_dtypes),
        "key_dims": claims.key_dims,
        "value_dims": claims.value_dims,
        "max_draft_tokens": claims.max_draft_tokens,
    }


def _names(dtypes: Iterable[torch.dtype]) -> list[str]:
    from headway.core.contract.spec import DTYPE_NAMES

    return [DTYPE_NAMES.get(dtype, str(dtype)) for dtype in dtypes]


READY, NEEDS_GPU, NOT_READY = "ready here", "needs an NVIDIA GPU", "not ready"
"""Groups of backends, in the order in which commands show them."""
_COLOURS = {READY: "green", NEEDS_GPU: "dim", NOT_READY: "red"}


def backends(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plugin: PluginFiles = None,
) -> None:
    """List the backends, ready ones first.

    The first table lists attention backends, and the second lists backends for layers with a state.
    """
    if context.invoked_subcommand is not None:
        return
    from headway.core.contract.state import STATE_KINDS
    from headway.tuning.isolated.trial import create_registry

    registry = create_registry(plugin or ())
    rows = [_described(registry.attention, name, _attention_claims) for name in registry.backends]
    states = [_described(registry.states, name, _state_claims) for name in registry.states.entries]
    if as_json:
        failures = [
            {"plugin": failure.name, "owner": failure.owner, "error": str(failure.error)} for failure in registry.failures
        ]
        print(json.dumps({"backends": rows, "state_backends": states, "failures": failures}, indent=2))
        return
    out = Terminal()
    wide, num_kinds = out.width >= _WIDE, len(STATE_KINDS)
    shorter = {} if wide else _SHORTER
    columns: dict[str, Callable[[Row], str]] = {
        "phases": lambda row: shorter.get(" ".join(row["phases"]), " ".join(row["phases"])),
        "layouts": lambda row: _layouts(row["layouts"], wide, len(registry.layouts)),
        "block": lambda row: "any" if row["block_multiple"] == 1 else f"{'n x ' if wide else 'x'}{row['block_multiple']}",
        "dtypes": lambda row: _short(row["dtypes"]),
    }
    groups = _print_table(out, "attention backends", columns, rows, registry.availability)
    if list(groups) != [READY]:
        out.print(" headway doctor: every reason, and the commands that install what is missing", highlight=False)
    out.print()
    of_states: dict[str, Callable[[Row], str]] = {
        "phases": columns["phases"],
        "layouts": lambda row: _layouts(row["layouts"], wide, len(registry.states.layouts)),
        "dtypes": columns["dtypes"],
        "kinds": lambda row: "all" if len(row["state_kinds"]) == num_kinds else " ".join(row["state_kinds"]),
    }
    _print_table(out, "backends of layers with a state", of_states, states, registry.states.availability)
    for failure in registry.failures:
        out.print(Text("plugin not loaded: ", "bold red").append(str(failure), "default"))


def _print_table(
    out: Terminal,
    title: str,
    columns: Mapping[str, Callable[[Row], str]],
    rows: Iterable[Row],
    availability: Callable[[str], Support],
) -> Mapping[str, list[Row]]:
    """Print a row for each backend, grouped by readiness. Return the non-empty groups. columns: column -> function that returns
    the column's text for a row."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    wide = out.width >= _WIDE
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("kind", no_wrap=not wide, overflow="ellipsis")
    for column in columns:
        table.add_column(column, no_wrap=column != "kinds")
    groups: dict[str, list[Row]] = {READY: [], NEEDS_GPU: [], NOT_READY: []}
    for row in rows:
        support = availability(row["name"])
        groups[READY if support else NEEDS_GPU if support.needs_gpu else NOT_READY].append(row)
    groups = {group: members for group, members in groups.items() if members}
    for group, members in groups.items():
        table.add_row(Text(group, _COLOURS[group]))
        for row in members:
            kind = row["kind"] if wide else row["kind"].split()[0]  # a plugin's distribution, without its version
            cells = [show(row) if "phases" in row else "?" for show in columns.values()]
            table.add_row(*(f"  {row['name']}", kind, *cells))
        table.add_section()
    out.print(table)
    for row in groups.get(NOT_READY, ()):  # below the table, which has space for a whole sentence
        out.print(Text(f" {row['name']} is not ready: ", "red").append(availability(row["name"]).brief, "default"))
    return groups


_SHORTER = {"prefill extend decode": "all", "prefill extend": "prompts", "extend decode": "cached"}  # Phases in a narrow terminal


def _layouts(layouts: list[str], wide: bool, num_layouts: int) -> str:
    if wide or len(layouts) < 2:
        return " ".join(layouts)
    if len(layouts) == num_layouts:
        return "all"
    return " ".join(layouts[:2]) + (f" +{len(layouts) - 2}" if len(layouts) > 2 else "")


def _short(dtypes: Iterable[str]) -> str:
    return " ".join(_SHORT.get(dtype, dtype) for dtype in dtypes)


_WIDE = 120
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
