"""A comparison of two backends as tables, and as a picture of each layer's error by phase (matplotlib: the extra `plot`)."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.bench.charts import bare, new_figure, png
from headway.bench.diff.results import DiffReport, Error, LayerDiff, PhaseDiff, size


def print_report(report: DiffReport, console: Console) -> None:
    """Layers and heads of each phase, then what their errors do to the next tokens, then the verdict."""
    a, b = report.a, report.b
    device = report.device
    written = f"{report.max_tokens} tokens written after each by {b.name}"
    lines = [
        f"{report.model}, {report.dtype} on {device.name}, torch {device.torch}",
        f"{report.prompts} prompts, {written}",
        *(f"{n} = {side.name} (kv_layout={side.kv_layout}, block_size={side.block_size})" for n, side in (("A", a), ("B", b))),
        *(f"{n}'s weights: {side.weights}" for n, side in (("A", a), ("B", b)) if side.weights),
        *(f"A's products {told}" for told in a.products),
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
    """One line a phase that is beyond the tolerance; else one that says that none is."""
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
        lines.append(Text("that is attention's, on the same q, k and v; for weights none is declared", "dim"))
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
    """The first positions, in the order of the texts, where the sides would go on differently."""
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
"""Positions that the table lists; a result file has more."""


def _show(error: Error) -> str:
    if error is None:
        return "no number"
    return f"{error:.1e}" if error else "0"


_WHOLE, _HEADS, _OWN, _LIMIT = "#4477aa", "#99bbdd", "#ccbb44", "#aa3377"
_SMALLEST = 1e-9
"""An error of 0 is drawn here, since the axis is logarithmic."""


def to_png(report: DiffReport) -> bytes:
    """A panel for each phase: relative error by layer, that of the best to the worst head, and the declared tolerance.

    :raises ConfigError: matplotlib is not installed.
    """
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
    """Where an error is drawn; what is no number leaves a gap, and its layer is shaded."""
    return max(error, _SMALLEST) if error is not None and math.isfinite(error) else math.nan
