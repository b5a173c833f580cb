"""Pictures of the three flows of docs/design.md, with names from the code: `python docs/_tools/flows.py docs/images`.

Each step is a function or class that is imported here, so every name in a picture exists.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from diagrams import svg
from headway import LLM
from headway.bench.charts import new_figure
from headway.core.contract.backend import AttentionBackend
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.execution.attention import PagedAttention
from headway.core.engine.execution.local_executor import LocalExecutor
from headway.core.engine.execution.model_runner import ModelRunner
from headway.core.engine.execution.token_sampler import TokenSampler
from headway.core.engine.loop import EngineLoop
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.engine.scheduling.step_input import StepResults, prepare
from headway.core.select.choice import MeasuredChoice, Selection, StepChooser
from headway.core.select.costs import CostTable
from headway.core.select.request import BackendRequest
from headway.core.select.selector import Selector
from headway.core.system.json_files import write_bytes
from headway.hosting.assembly import assemble
from headway.registry.isolation import verdicts
from headway.registry.plugin_sources import given_plugins, installed_plugins
from headway.registry.registry import Registry
from headway.registry.validate import check_items
from headway.requests.request_state import OutputProcessor
from headway.requests.validation import RequestValidator
from headway.tuning.autotune import costs_for
from headway.tuning.isolated.child import run
from headway.tuning.isolated.measure_in_child import measure_in_child
from headway.tuning.isolated.trial import try_plugins
from headway.tuning.measure.run import run_kernel_level
from headway.tuning.measure.self_test import check_named

_WIDTH, _ROW = 10.0, 0.62
"""Width of a picture, and distance between steps, in inches."""
_HEIGHT = 0.72
"""Height of a box, as a fraction of the distance between steps."""
_COLOURS = ("#dbe9f6", "#e5f3e1", "#fbe9d4", "#efe3f2", "#f6dfe0")
"""Colours of the lanes, from the left."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Step:
    """One box of a flow."""

    lane: str
    """Title of its column: the part of the program that does it."""
    does: Any
    """The function, method or class."""
    says: str
    """Its purpose, in a few words."""

    @property
    def name(self) -> str:
        """Qualified name in the code."""
        return str(self.does.__qualname__)

    @property
    def file(self) -> str:
        """File that defines it, relative to the repository."""
        path = str(self.does.__module__).removeprefix("headway.").replace(".", "/")
        return next(each for each in (f"{path}.py", f"headway/{path}.py") if (ROOT / each).exists())


PROMPT = [
    Step("front", LLM.generate, "prompts in, outputs back"),
    Step("front", RequestValidator.check, "tokenise; check everything, once"),
    Step("front", OutputProcessor.add, "a state that collects tokens and text"),
    Step("engine", EngineLoop.add_request, "a sequence for each completion"),
    Step("engine", EngineLoop.step, "one step for all requests"),
    Step("schedule and cache", Scheduler.schedule, "who gets how many tokens of the step"),
    Step("schedule and cache", BlockManager.attach_prefix, "blocks that an equal prefix has filled"),
    Step("schedule and cache", prepare, "the step as plain data: a StepInput"),
    Step("device", LocalExecutor.launch, "the seam of processes"),
    Step("device", ModelRunner.launch, "one graph, graph pieces, or eager"),
    Step("device", Selector.backends_for, "the backend for these lengths"),
    Step("device", PagedAttention.begin, "plan, once for each kind of layer"),
    Step("device", AttentionBackend.decode, "each layer: attend to the cache"),
    Step("device", TokenSampler.sample, "logits to tokens"),
    Step("schedule and cache", StepResults.take, "append tokens; end what has ended"),
    Step("front", OutputProcessor.process, "deltas to texts and outputs"),
]
AUTO = [
    Step("options", BackendRequest.parse, "--attn-backend, read once"),
    Step("options", assemble, "registry, model, table, engine"),
    Step("table", costs_for, "the table of this device and layer"),
    Step("table", run_kernel_level, "measured where there is none"),
    Step("table", CostTable, "times by phase, batch and lengths"),
    Step("start", Selector, "layouts and block sizes that serve all"),
    Step("start", MeasuredChoice.select, "least expected cost of the workload"),
    Step("start", Selection, "what was chosen, and why"),
    Step("each step", Selector.backends_for, "phase, batch, query_len, kv_len"),
    Step("each step", StepChooser.choose, "one lookup; stays within the noise"),
]
PLUGIN = [
    Step("sources", installed_plugins, "entry points of the group headway"),
    Step("sources", given_plugins, "LLM(backends=[...]), --plugin FILE.py"),
    Step("trial", verdicts, "remembered for this version of its code?"),
    Step("trial", try_plugins, "a process for each plugin"),
    Step("trial", run, "import, hooks, availability, self-test"),
    Step("registry", Registry.add_plugin, "whole or not at all, or recorded"),
    Step("registry", check_items, "what it registers keeps the contract"),
    Step("use", check_named, "named: right for this model's layers?"),
    Step("use", measure_in_child, "auto: measured in a child process"),
    Step("use", Selector.backends_for, "called in a step, like any other"),
]
FLOWS = {
    "prompt": ("A prompt, from LLM.generate to its tokens", PROMPT),
    "auto": ("--attn-backend auto: once at the start, then in each step", AUTO),
    "plugin": ("A third party's plugin, from its entry point to its first call", PLUGIN),
}


def picture(title: str, steps: list[Step]) -> bytes:
    """Return an SVG with a column for each lane, a row for each step, and arrows between consecutive steps."""
    lanes = list(dict.fromkeys(step.lane for step in steps))
    figure = new_figure(_WIDTH, _ROW * (len(steps) + 1.3))
    axis = figure.subplots()
    axis.set_xlim(0, len(lanes))
    axis.set_ylim(-len(steps) - 0.2, 0.9)
    axis.axis("off")
    axis.set_title(title, fontsize=11)
    for column, lane in enumerate(lanes):
        axis.text(column + 0.5, 0.45, lane, ha="center", va="center", fontsize=9, fontweight="bold")
    for row, step in enumerate(steps):
        _box(axis, lanes.index(step.lane), -row - 0.5, step)
    for row, (one, other) in enumerate(pairwise(steps)):
        _arrow(axis, lanes.index(one.lane), lanes.index(other.lane), -row - 0.5)
    return svg(figure)


def _box(axis: Any, column: int, middle: float, step: Step) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch((column + 0.04, middle - _HEIGHT / 2), 0.92, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.04")
    shape.set(facecolor=_COLOURS[column % len(_COLOURS)], edgecolor="#777777", linewidth=0.7)
    axis.add_patch(shape)
    lines = (
        (0.19, step.name, 7.5, "monospace", "black"),
        (-0.03, step.says, 7.5, None, "black"),
        (-0.24, step.file, 6, None, "#555555"),
    )
    for above, text, size, family, colour in lines:
        axis.text(column + 0.5, middle + above, text, ha="center", va="center", fontsize=size, family=family, color=colour)


def _arrow(axis: Any, column: int, target: int, middle: float) -> None:
    """Draw an arrow from a row's box to the next row's: straight down, or out of the side and in from above."""
    style = {"arrowstyle": "->", "color": "#444444", "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
    below = (target + 0.5, middle - 1 + _HEIGHT / 2)
    if column == target:
        axis.annotate("", xy=below, xytext=(column + 0.5, middle - _HEIGHT / 2), arrowprops=style)
    else:
        side = column + (0.96 if target > column else 0.04)
        axis.annotate("", xy=below, xytext=(side, middle), arrowprops={**style, "connectionstyle": "angle,angleA=0,angleB=90"})


def main(folder: Path) -> None:
    """Write the pictures into a folder."""
    for name, (title, steps) in FLOWS.items():
        write_bytes(picture(title, steps), folder / f"flow-{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
