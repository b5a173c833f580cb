"""`headway plugins`: every installed plugin, its file, its parts, and whether it was loaded."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from headway.registry.records import PluginRecord

_STATES = {"loaded": "green", "left out": "bold red", "blocked": "yellow"}
_KINDS = {
    "backends": "backends",
    "state_backends": "state backends",
    "layouts": "cache layouts",
    "state_layouts": "state layouts",
    "proposers": "proposers",
    "logits_processors": "logits processors",
    "chat_parsers": "chat parsers",
    "hooks": "hooks",
}


def plugins(
    retry: Annotated[bool, typer.Option("--retry", help="Try every plugin again, whatever is remembered of it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List installed plugins: what they add, or why not.

    A plugin is tried in a process of its own before it is let in, once for each version: a crash, a hang or an exit there leaves
    it out until --retry. headway -v plugins shows tracebacks and what it printed. HEADWAY_PLUGINS and --plugins choose.
    """
    from headway.core.system.terminal import Terminal
    from headway.tuning.isolated.trial import create_registry

    found = create_registry(retry=retry).plugins
    if as_json:
        print(json.dumps({"plugins": [asdict(record) for record in found]}, indent=2))
        return
    console = Terminal(highlight=False)
    if not found:
        console.print("no plugins are installed beside the built-in one; docs/backends.md says how to write one")
    for record in found:
        _show(record, console)


def _show(record: PluginRecord, console: Console) -> None:
    from rich.text import Text

    heading = Text(record.name, "bold").append(f"  {record.owner}  ", "default").append(record.state, _STATES[record.state])
    console.print(heading, soft_wrap=True)
    lines: list[tuple[str, Any]] = [("file", record.file or "not found")]
    lines += [(shown, ", ".join(getattr(record.brought, kind))) for kind, shown in _KINDS.items()]
    lines += [("tried", record.tried), ("reason", record.reason), *(("remark", remark) for remark in record.remarks)]
    for what, text in lines:
        if text:
            console.print(Text(f"  {what}: ", "dim").append(text, "default"), soft_wrap=True)
    if record.details and logging.getLogger("headway").isEnabledFor(logging.INFO):
        for line in record.details.splitlines():
            console.print(Text(f"    {line}"), soft_wrap=True)
