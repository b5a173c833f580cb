"""Result of `headway diff`, schema `headway.diff/1`: file, terminal tables and chart."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.bench.charts import bare, new_figure, png
from headway.core.contract.metadata import Phase
from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.tuning.table.schema import DeviceIdentity

Error = float | None
"""Relative error ||a - b|| / ||b||. None if a side's result is not finite."""


class LayerDiff(BaseModel):
    """Errors of one layer in one phase."""

    model_config = ConfigDict(extra="forbid")

    layer: int
    relative_error: Error
    """Error of the layer's whole output, for the same q, k and v."""
    heads: list[Error]
    """Error of each query head."""
    free_running: Error
    """Error of the layer's output if each side uses q, k and v of its own run. It includes errors of earlier layers."""

    @property
    def worst_head(self) -> int:
        """The query head with the largest error, or the first without a finite error."""
        return max(range(len(self.heads)), key=lambda head: size(self.heads[head]))

    @property
    def mean(self) -> Error:
        """Mean error of the heads. None if any head's error is not finite."""
        numbers = [error for error in self.heads if error is not None]
        return sum(numbers) / len(numbers) if len(numbers) == len(self.heads) else None


class Flip(BaseModel):
    """A position after which the two sides would greedily generate different tokens."""

    model_config = ConfigDict(extra="forbid")

    prompt: int
    position: int
    """Position in the prompt's sequence of the token before the differing tokens."""
    token_a: int
    token_b: int
    gap: Error
    """B's logit of its own token minus B's logit of A's token. A small gap is a near-tie."""
    kl: Error = None
    """KL(A || B) of the next token's distribution at this position, in nats. None if not finite, and in files from before
    2026-11-25."""


class PhaseDiff(BaseModel):
    """Differences over all tokens of one phase."""

    model_config = ConfigDict(extra="forbid")

    phase: Phase
    backend_a: str
    backend_b: str
    kernel_a: str
    kernel_b: str
    tokens: int
    tolerance: float
    """Sum of the two sides' declared tolerances for this dtype, since each may deviate from the exact result."""
    layers: list[LayerDiff]
    first_beyond: int | None
    """First layer whose relative_error exceeds the tolerance. None if no layer exceeds it."""
    hidden_error: Error
    """Relative error of the last hidden states between separate runs of the two sides."""
    logits_error: Error
    """Relative error of the logits between separate runs of the two sides."""
    flip_rate: float
    """Fraction of positions at which separate runs of the two sides over the same tokens have different greedy next tokens."""
    flips: list[Flip]
    """The first flips found, at most MAX_FLIPS."""
    kl_mean: Error
    """Mean KL(A || B) of the next token's distribution in nats, between separate runs of the two sides."""
    kl_max: Error


class SideReport(BaseModel):
    """One side of the comparison, as requested and as run."""

    model_config = ConfigDict(extra="forbid")

    name: str
    kv_layout: str
    block_size: int
    weights: str = ""
    """Description of the side's weights; "" if both sides have the same weights."""
    products: list[str] = []
    """Kernel used for each kind of quantized linear layer for which there is a choice."""


class DiffReport(ResultFile):
    """Result of one run of `headway diff`."""

    schema_: Literal["headway.diff/1"] = Field(default="headway.diff/1", alias="schema")
    command: str
    origin: Origin | None = None
    """The code that wrote the file. None in files from before 2026-11-22."""
    device: DeviceIdentity
    model: str
    dtype: str
    a: SideReport
    b: SideReport
    prompts: int
    max_tokens: int
    phases: list[PhaseDiff]

    @property
    def within_tolerance(self) -> bool:
        """True if no layer exceeds the tolerance in any phase."""
        return all(phase.first_beyond is None for phase in self.phases)


def size(error: Error) -> float:
    """Return an error as a number to compare, which is infinity if the error is not finite."""
    return float("inf") if error is None else error


def print_report(report: DiffReport, console: Console) -> None:
    """Print layers and heads of each phase, the effect on next tokens, and the verdict."""
    a, b = report.a, report.b
    device = report.device
    written = f"{report.max_tokens} tokens written after each by {b.name}"
    lines = [
        f"{report.model}, {report.dtype} on {device.name}, torch {device.torch}",
        f"{report.prompts} prompts, {written}",
        *(f"{n} = {side.name} (kv_layout={side.kv_layout}, block_size={side.block_size})" for n, side in (("A", a), ("B", b))),
        *(f"{n}'s weights: {side.weights}" for n, side in (("A", a), ("B", b)) if side.weights),
        *(f"A's linear layers {reported}" for reported in a.products),
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    for phase in report.phases:
        console.print()
        console.print(_layers(phase))
    console.print()
    console.print(_tokens(report))
    if any(phase.flips for phase in report.phases):
        console.print(_flips(report))
    for line in verdict(report):
        console.print(line)


def verdict(report: DiffReport) -> list[Text]:
    """Return one line per phase that exceeds the tolerance, or one line if none does."""
    lines = []
    for phase in report.phases:
        if phase.first_beyond is None:
            continue
        layer = phase.layers[phase.first_beyond]
        heads = [head for head, error in enumerate(layer.heads) if size(error) > phase.tolerance]
        lines.append(
            Text("beyond tolerance: ", "bold red").append(
                f"{phase.phase.value}, first in layer {layer.layer}: {_show(layer.relative_error)} (tolerance "
                f"{_show(phase.tolerance)}); worst head {layer.worst_head}, {len(heads)} of {len(layer.heads)} heads beyond it",
                "default",
            )
        )
    lines = lines or [Text("within tolerance in every layer and phase", "bold green")]
    if report.a.weights:
        lines.append(Text("the tolerance is attention's, for the same q, k and v; weights have no declared tolerance", "dim"))
    return lines


def _layers(phase: PhaseDiff) -> Table:
    names = f"{phase.backend_a} against {phase.backend_b}"
    title = f"{phase.phase.value}, {phase.tokens} tokens, {names}, tolerance {_show(phase.tolerance)}\nA: {phase.kernel_a}\n"
    table = Table(title=f"{title}B: {phase.kernel_b}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("layer", "whole", "max of heads", "worst head", "mean of heads", "free-running"):
        table.add_column(column, justify="right")
    for layer in phase.layers:
        beyond = size(layer.relative_error) > phase.tolerance
        table.add_row(*_row(layer), style="bold red" if beyond else "")
    return table


def _row(layer: LayerDiff) -> tuple[str, ...]:
    errors = (layer.relative_error, layer.heads[layer.worst_head])
    return str(layer.layer), *map(_show, errors), str(layer.worst_head), _show(layer.mean), _show(layer.free_running)


def _tokens(report: DiffReport) -> Table:
    title = "next tokens, free-running: each side's own run over the same tokens"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("phase", "tokens", "hidden", "logits", "flipped", "gap", "KL mean", "KL max"):
        table.add_column(column, justify="right")
    for phase in report.phases:
        widest = max((flip.gap for flip in phase.flips), key=size, default=0.0)
        table.add_row(
            phase.phase.value,
            str(phase.tokens),
            _show(phase.hidden_error),
            _show(phase.logits_error),
            f"{phase.flip_rate:.2%}",
            _show(widest) if phase.flips else "",
            _show(phase.kl_mean),
            _show(phase.kl_max),
        )
    return table


def _flips(report: DiffReport) -> Table:
    """Return a table of the first positions where the sides' next tokens differ, ordered by prompt."""
    flips = ((flip, phase.phase.value) for phase in report.phases for flip in phase.flips)
    listed = sorted(flips, key=lambda found: (found[0].prompt, found[0].position))
    total = sum(round(phase.flip_rate * phase.tokens) for phase in report.phases)
    title = f"where the next token differs: {total} positions, {min(_LISTED, len(listed))} of them listed"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("prompt", "position", "phase", "A's token", "B's token", "gap", "KL"):
        table.add_column(column, justify="right")
    for flip, phase in listed[:_LISTED]:
        tokens = str(flip.token_a), str(flip.token_b)
        table.add_row(str(flip.prompt), str(flip.position), phase, *tokens, _show(flip.gap), _show(flip.kl))
    return table


_LISTED = 8
"""Maximum number of positions in the printed table. A result file lists more positions."""


def _show(error: Error) -> str:
    if error is None:
        return "no number"
    return f"{error:.1e}" if error else "0"


_WHOLE, _HEADS, _OWN, _LIMIT = "#4477aa", "#99bbdd", "#ccbb44", "#aa3377"
_SMALLEST = 1e-9
"""Position on the logarithmic axis at which errors of 0 are drawn."""


def to_png(report: DiffReport) -> bytes:
    """Return a PNG with a panel per phase: relative error by layer, the range over heads, and the declared tolerance.
    :raises ConfigError: if matplotlib is not installed."""
    figure = new_figure(8.0, 1.5 + 2.2 * len(report.phases))
    axes = figure.subplots(len(report.phases), 1, squeeze=False, sharex=True)[:, 0]
    for axis, phase in zip(axes, report.phases, strict=True):
        _panel(axis, phase)
    axes[-1].set_xlabel("layer")
    ends = "within the declared tolerance" if report.within_tolerance else "beyond the declared tolerance"
    figure.suptitle(
        f"{report.a.name} against {report.b.name}: {ends}\n{report.model}, {report.dtype}, {report.device.name}, "
        f"{report.device.date[:10]}",
        fontsize=10,
    )
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return png(figure)


def _panel(axis: Any, phase: PhaseDiff) -> None:
    layers = [layer.layer for layer in phase.layers]
    best = [_drawn(min(layer.heads, key=_drawn)) for layer in phase.layers]
    worst = [_drawn(layer.heads[layer.worst_head]) for layer in phase.layers]
    axis.fill_between(layers, best, worst, color=_HEADS, alpha=0.5, linewidth=0, label="single heads, from the best to the worst")
    whole = [_drawn(layer.relative_error) for layer in phase.layers]
    axis.plot(layers, whole, color=_WHOLE, marker="o", markersize=3, label="the layer's output, on the same q, k and v")
    own = [_drawn(layer.free_running) for layer in phase.layers]
    axis.plot(layers, own, color=_OWN, linestyle="--", label="the same, each side on its own run")
    axis.axhline(phase.tolerance, color=_LIMIT, linewidth=1, label="tolerance that the two backends declare together")
    lost = [layer.layer for layer in phase.layers if not _is_number(layer.relative_error)]
    for layer in lost:
        axis.axvspan(layer - 0.5, layer + 0.5, color=_LIMIT, alpha=0.25, linewidth=0)
    beyond = "" if phase.first_beyond is None else f", first beyond tolerance in layer {phase.first_beyond}"
    nan = f", no number in layers {', '.join(map(str, lost))}" if lost else ""
    title = f"{phase.phase.value}, {phase.tokens} tokens: {phase.flip_rate:.2%} of greedy next tokens differ{beyond}{nan}"
    axis.set_title(title, fontsize=9, loc="left")
    axis.set(yscale="log", ylabel="relative error")
    bare(axis)


def _is_number(error: Error) -> bool:
    return error is not None and math.isfinite(error)


def _drawn(error: Error) -> float:
    """Return an error's position on the axis. An error that is not finite leaves a gap, and its layer is shaded."""
    return max(error, _SMALLEST) if error is not None and math.isfinite(error) else math.nan
