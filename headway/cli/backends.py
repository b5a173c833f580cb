"""`headway backends`: every registered backend, its owner, its availability here, and its capabilities."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from headway.cli.options import PluginFiles
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.core.contract.support import Support


def backends(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plugin: PluginFiles = None,
) -> None:
    """Show every backend of attention and of layers with a state: available here or why not, phases, layouts, dtypes."""
    if context.invoked_subcommand is not None:
        return
    from headway.cli.backend_rows import describe, describe_states
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
    out.print(_table(rows, out.width, len(registry.layouts)))
    missing = {name: registry.availability(name) for name in registry.backends}
    _print_missing(out, missing)
    if not all(missing.values()):
        out.print(" headway doctor: every reason, and what installs the missing ones here", highlight=False)
    out.print()
    out.print(_state_table(states, out.width))
    _print_missing(out, {name: registry.state_availability(name) for name in registry.state_backends})
    for failure in registry.failures:
        out.print(Text("plugin not loaded: ", "bold red").append(str(failure), "default"))


def _print_missing(out: Terminal, supports: Mapping[str, Support]) -> None:
    for name, support in supports.items():
        if not support:  # below the table, where a whole sentence fits
            out.print(Text(f" {name} is not available: ", "red").append(support.brief, "default"))


_SHORTER = {"prefill extend decode": "all", "prefill extend": "prompts", "extend decode": "cached"}
"""Phases in a narrow terminal."""


def _table(rows: list[dict[str, Any]], width: int, num_layouts: int) -> Table:
    """One line for each backend; a narrow terminal gets shorter words for the same."""
    wide = width >= _WIDE
    table = _empty_table("attention backends", wide, ("phases", "layouts", "block", "dtypes"))
    for row in rows:
        start = _start(row, wide)
        if "phases" not in row:
            table.add_row(*start, "?", "?", "?", "?")
            continue
        multiple = row["block_multiple"]
        block = "any" if multiple == 1 else f"n x {multiple}" if wide else f"x{multiple}"
        layouts = " ".join(row["layouts"])
        if not wide and len(row["layouts"]) > 2:
            layouts = (
                "all" if len(row["layouts"]) == num_layouts else f"{' '.join(row['layouts'][:2])} +{len(row['layouts']) - 2}"
            )
        table.add_row(*start, _phases(row, wide), layouts, block, _short(row["dtypes"]))
    return table


def _state_table(rows: list[dict[str, Any]], width: int) -> Table:
    """One line for each backend that serves layers with a state."""
    from headway.core.contract.state import STATE_KINDS

    wide = width >= _WIDE
    table = _empty_table("backends of layers with a state", wide, ("phases", "layouts", "dtypes", "kinds"))
    for row in rows:
        start = _start(row, wide)
        if "phases" not in row:
            table.add_row(*start, "?", "?", "?", "?")
            continue
        kinds = "all" if len(row["state_kinds"]) == len(STATE_KINDS) else " ".join(row["state_kinds"])
        table.add_row(*start, _phases(row, wide), " ".join(row["layouts"]), _short(row["dtypes"]), kinds)
    return table


def _empty_table(title: str, wide: bool, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("kind", no_wrap=not wide, overflow="ellipsis")
    for column in ("available" if wide else "here", *columns):
        table.add_column(column, no_wrap=column != "kinds")
    return table


def _start(row: dict[str, Any], wide: bool) -> tuple[str, str, Text]:
    kind = row["kind"] if wide else row["kind"].split()[0]  # a plugin's distribution, without its version
    return row["name"], kind, Text("yes", "green") if row["available"] else Text("no", "red")


def _phases(row: dict[str, Any], wide: bool) -> str:
    phases = " ".join(row["phases"])
    return phases if wide else _SHORTER.get(phases, phases)


def _short(dtypes: Iterable[str]) -> str:
    return " ".join(_SHORT.get(dtype, dtype) for dtype in dtypes)


_WIDE = 120
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
