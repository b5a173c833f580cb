"""The check `process`: whether the trial of plugins, which a start makes, would let the subject's plugin in.

It needs a process that may be lost and has not loaded the plugin before, so no child of the kit runs it: how plugins are tried is
handed in, as it is to the registry.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from headway.core.oracle.cells import CheckCell, Skipped
from headway.registry.isolation import TIMEOUT, Trial
from headway.registry.plugin_sources import NamedPlugin, PluginFile, PluginSource
from headway.testing.kit.report import CellResult
from headway.testing.kit.stage import Stage

CELL = CheckCell("process")


def source_of(plugin: Sequence[str]) -> PluginSource:
    """Return a plugin by `Subject.plugin`.

    :raises ConfigError: its file is gone.
    """
    name, owner, file = plugin
    return PluginFile.of(file, name) if file else NamedPlugin(name, owner)


def try_plugin(plugin: PluginSource, trial: Trial) -> CellResult:
    """Try a plugin as a start does, whatever is remembered of it; what it did, and in which step, is the finding."""
    started = time.perf_counter()
    (verdict,) = trial([plugin])
    more = f"; {TIMEOUT}=60 in the environment gives it more time" if verdict.fault.startswith("hangs") else ""
    return CellResult(
        cell=str(CELL),
        check=CELL.check,
        status="failed" if verdict.fault else "passed",
        reason=f"refused at every start by the trial of plugins: it {verdict.fault}{more}" if verdict.fault else "",
        guess="does what no plugin may do to a process that is not its own" if verdict.fault else "",
        seconds=round(time.perf_counter() - started, 4),
        **CELL.axes,  # type: ignore[arg-type]
    )


def process(stage: Stage, cell: CheckCell) -> str:
    """Answer where there is no plugin, or nobody has handed in how plugins are tried."""
    if stage.subject.plugin is None:
        raise Skipped(f"backend {stage.subject.name} is no plugin's, and is used untried")
    raise Skipped("`headway check` tries plugins; from Python, check(wanted, trial=...) is given how")
