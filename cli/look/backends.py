"""`headway backends`: every registered backend by readiness, with its owner and capabilities."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    from headway.core.contract.state_backend import StateCapabilities
    from headway.core.contract.support import Support
    from headway.registry import BackendEntry, Registry


def describe(registry: Registry, name: str) -> dict[str, Any]:
    """Describe an attention backend; its capabilities are known only where its module loads."""
    row = _identity(name, registry.backends[name], registry.availability(name))
    try:
        claims = registry.backend(name).capabilities
    except Exception:  # its reason is already in the row
        return row
    return row | {
        **_shared_claims(claims, registry.layouts),
        "block_multiple": claims.block_multiple,
        "head_dims": claims.head_dims,
        "features": sorted(claims.features),
    }


def describe_states(registry: Registry, name: str) -> dict[str, Any]:
    """Describe a backend for layers with a state; see `describe`."""
    from headway.core.contract.state import STATE_KINDS

    row = _identity(name, registry.state_backends[name], registry.state_availability(name))
    try:
        claims = registry.state_backend(name).capabilities
    except Exception:  # its reason is already in the row
        return row
    return row | {
        **_shared_claims(claims, registry.state_layouts),
        "state_kinds": [kind for kind in STATE_KINDS if kind in claims.kinds],
        "convolution": claims.convolution,
        "state_dtypes": _names(claims.state_dtypes),
        "key_dims": claims.key_dims,
        "value_dims": claims.value_dims,
        "max_draft_tokens": claims.max_draft_tokens,
    }


def _identity(name: str, entry: BackendEntry[Any], available: Support) -> dict[str, Any]:
    return {
        "name": name,
        "kind": entry.owner,
        "summary": entry.info.summary,
        "available": bool(available),
        "reasons": [str(reason) for reason in available.reasons],
    }


def _shared_claims(claims: Capabilities | StateCapabilities, layouts: Iterable[str]) -> dict[str, Any]:
    from headway.core.contract.metadata import Phase

    return {
        "phases": [phase.value for phase in Phase if phase in claims.phases],
        "layouts": [layout.name for layout in claims.layouts] if claims.layouts is not None else list(layouts),
        "dtypes": _names(claims.dtypes),
        "devices": list(claims.devices),
    }


def _names(dtypes: Iterable[torch.dtype]) -> list[str]:
    from headway.core.contract.spec import DTYPE_NAMES

    return [DTYPE_NAMES.get(dtype, str(dtype)) for dtype in dtypes]


READY, NEEDS_GPU, NOT_READY = "ready here", "needs an NVIDIA GPU", "not ready"
"""Groups of backends, in the order in which commands show them."""


Groups = Mapping[str, Sequence[str]]
"""Name of a group -> its backends; see `by_readiness`."""


def backends(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plugin: PluginFiles = None,
) -> None:
    """List the backends, those that are ready here first.

    The first table is of attention, the second of layers with a state.
    """
    if context.invoked_subcommand is not None:
        return
    from headway.tuning.isolated.trial import create_registry

    registry = create_registry(plugin or ())
    rows = [describe(registry, name) for name in registry.backends]
    states = [describe_states(registry, name) for name in registry.state_backends]
    if as_json:
        failures = [
            {"plugin": failure.name, "owner": failure.owner, "error": str(failure.error)} for failure in registry.failures
        ]
        print(json.dumps({"backends": rows, "state_backends": states, "failures": failures}, indent=2))
        return
    out = Terminal()
    groups = by_readiness(registry.backends, registry.availability)
    out.print(_table(rows, groups, out.width, len(registry.layouts)))
    _print_not_ready(out, groups, registry.availability)
    if list(groups) != [READY]:
        out.print(" headway doctor: every reason, and the commands that install what is missing", highlight=False)
    out.print()
    groups = by_readiness(registry.state_backends, registry.state_availability)
    out.print(_state_table(states, groups, out.width, len(registry.state_layouts)))
    _print_not_ready(out, groups, registry.state_availability)
    for failure in registry.failures:
        out.print(Text("plugin not loaded: ", "bold red").append(str(failure), "default"))


def by_readiness(names: Iterable[str], availability: Callable[[str], Support]) -> Groups:
    """Return the names in each group that has any."""
    groups: dict[str, list[str]] = {READY: [], NEEDS_GPU: [], NOT_READY: []}
    for name in names:
        support = availability(name)
        groups[READY if support else NEEDS_GPU if support.needs_gpu else NOT_READY].append(name)
    return {group: members for group, members in groups.items() if members}


def _print_not_ready(out: Terminal, groups: Groups, availability: Callable[[str], Support]) -> None:
    for name in groups.get(NOT_READY, ()):  # below the table, where a whole sentence fits
        out.print(Text(f" {name} is not ready: ", "red").append(availability(name).brief, "default"))


_SHORTER = {"prefill extend decode": "all", "prefill extend": "prompts", "extend decode": "cached"}
"""Phases in a narrow terminal."""


def _table(rows: list[dict[str, Any]], groups: Groups, width: int, num_layouts: int) -> Table:
    """Return a table with a row for each backend; a narrow terminal gets shorter words for the same."""
    wide = width >= _WIDE
    table = _empty_table("attention backends", wide, ("phases", "layouts", "block", "dtypes"))
    for row in _in_groups(table, rows, groups):
        start = _start(row, wide)
        if "phases" not in row:
            table.add_row(*start, "?", "?", "?", "?")
            continue
        multiple = row["block_multiple"]
        block = "any" if multiple == 1 else f"n x {multiple}" if wide else f"x{multiple}"
        table.add_row(*start, _phases(row, wide), _layouts(row, wide, num_layouts), block, _short(row["dtypes"]))
    return table


def _in_groups(table: Table, rows: list[dict[str, Any]], groups: Groups) -> Iterator[dict[str, Any]]:
    """Yield the rows by group, after adding the group's name to the table."""
    by_name = {row["name"]: row for row in rows}
    for group, names in groups.items():
        table.add_row(Text(group, "green" if group == READY else "dim" if group == NEEDS_GPU else "red"))
        for name in names:
            yield by_name[name]
        table.add_section()


def _state_table(rows: list[dict[str, Any]], groups: Groups, width: int, num_layouts: int) -> Table:
    """Return a table with a row for each backend of layers with a state."""
    from headway.core.contract.state import STATE_KINDS

    wide = width >= _WIDE
    table = _empty_table("backends of layers with a state", wide, ("phases", "layouts", "dtypes", "kinds"))
    for row in _in_groups(table, rows, groups):
        start = _start(row, wide)
        if "phases" not in row:
            table.add_row(*start, "?", "?", "?", "?")
            continue
        kinds = "all" if len(row["state_kinds"]) == len(STATE_KINDS) else " ".join(row["state_kinds"])
        table.add_row(*start, _phases(row, wide), _layouts(row, wide, num_layouts), _short(row["dtypes"]), kinds)
    return table


def _empty_table(title: str, wide: bool, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("kind", no_wrap=not wide, overflow="ellipsis")
    for column in columns:
        table.add_column(column, no_wrap=column != "kinds")
    return table


def _start(row: dict[str, Any], wide: bool) -> tuple[str, str]:
    return f"  {row['name']}", row["kind"] if wide else row["kind"].split()[0]  # a plugin's distribution, without its version


def _phases(row: dict[str, Any], wide: bool) -> str:
    phases = " ".join(row["phases"])
    return phases if wide else _SHORTER.get(phases, phases)


def _layouts(row: dict[str, Any], wide: bool, num_layouts: int) -> str:
    layouts = row["layouts"]
    if wide or len(layouts) < 2:
        return " ".join(layouts)
    if len(layouts) == num_layouts:
        return "all"
    return " ".join(layouts[:2]) + (f" +{len(layouts) - 2}" if len(layouts) > 2 else "")


def _short(dtypes: Iterable[str]) -> str:
    return " ".join(_SHORT.get(dtype, dtype) for dtype in dtypes)


_WIDE = 120
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
