"""`headway backends`: every registered backend, its owner, its availability here, and its capabilities."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from headway.cli.options import PluginFiles
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.registry import Registry


def backends(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plugin: PluginFiles = None,
) -> None:
    """Show every attention backend: available here or the reason why not, phases, layouts, block sizes, dtypes."""
    if context.invoked_subcommand is not None:
        return
    from headway.tuning.isolated.trial import create_registry

    registry = create_registry(plugin or ())
    rows = [describe(registry, name) for name in registry.backends]
    if as_json:
        failures = [
            {"plugin": failure.name, "owner": failure.owner, "error": str(failure.error)} for failure in registry.failures
        ]
        print(json.dumps({"backends": rows, "failures": failures}, indent=2))
        return
    out = Terminal()
    out.print(_table(rows, out.width, len(registry.layouts)))
    missing = {name: registry.availability(name) for name in registry.backends}
    for name, support in missing.items():
        if not support:  # below the table, where a whole sentence fits
            out.print(Text(f" {name} is not available: ", "red").append(support.brief, "default"))
    if not all(missing.values()):
        out.print(" headway doctor: every reason, and what installs the missing ones here", highlight=False)
    for failure in registry.failures:
        out.print(Text("plugin not loaded: ", "bold red").append(str(failure), "default"))


def describe(registry: Registry, name: str) -> dict[str, Any]:
    """Describe a backend as plain data; its capabilities are known only where its module loads."""
    from headway.core.contract.metadata import Phase
    from headway.core.contract.spec import DTYPE_NAMES

    entry = registry.backends[name]
    available = registry.availability(name)
    row: dict[str, Any] = {
        "name": name,
        "kind": entry.owner,
        "summary": entry.info.summary,
        "available": bool(available),
        "reasons": [str(reason) for reason in available.reasons],
    }
    try:
        claims = registry.backend(name).capabilities
    except Exception:  # its reason is already in the row
        return row
    row |= {
        "phases": [phase.value for phase in Phase if phase in claims.phases],
        "layouts": [layout.name for layout in claims.layouts] if claims.layouts is not None else list(registry.layouts),
        "block_multiple": claims.block_multiple,
        "head_dims": claims.head_dims,
        "dtypes": [DTYPE_NAMES.get(dtype, str(dtype)) for dtype in claims.dtypes],
        "devices": list(claims.devices),
        "features": sorted(claims.features),
    }
    return row


_SHORTER = {"prefill extend decode": "all", "prefill extend": "prompts"}
"""Phases in a narrow terminal."""


def _table(rows: list[dict[str, Any]], width: int, num_layouts: int) -> Table:
    """One line for each backend; a narrow terminal gets shorter words for the same."""
    wide = width >= _WIDE
    table = Table(title="attention backends", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("kind", no_wrap=not wide, overflow="ellipsis")
    for column in ("available" if wide else "here", "phases", "layouts", "block", "dtypes"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        kind = row["kind"] if wide else row["kind"].split()[0]  # a plugin's distribution, without its version
        start = row["name"], kind, Text("yes", "green") if row["available"] else Text("no", "red")
        if "phases" not in row:
            table.add_row(*start, "?", "?", "?", "?")
            continue
        multiple = row["block_multiple"]
        block = "any" if multiple == 1 else f"n x {multiple}" if wide else f"x{multiple}"
        dtypes = [_SHORT.get(dtype, dtype) for dtype in row["dtypes"]]
        phases = " ".join(row["phases"]) if wide else _SHORTER.get(" ".join(row["phases"]), " ".join(row["phases"]))
        layouts = " ".join(row["layouts"])
        if not wide and len(row["layouts"]) > 2:
            layouts = (
                "all" if len(row["layouts"]) == num_layouts else f"{' '.join(row['layouts'][:2])} +{len(row['layouts']) - 2}"
            )
        table.add_row(*start, phases, layouts, block, " ".join(dtypes))
    return table


_WIDE = 120
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
