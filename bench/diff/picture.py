"""A comparison of two backends as a picture: the error of each layer, by phase. Drawn with matplotlib (the extra `plot`)."""

from __future__ import annotations

import math
from typing import Any

from headway.bench.charts import bare, new_figure, png
from headway.bench.diff.report import DiffReport, Error, PhaseDiff

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
    verdict = "within the declared tolerance" if report.within_tolerance else "beyond the declared tolerance"
    figure.suptitle(
        f"{report.a.name} against {report.b.name}: {verdict}\n{report.model}, {report.dtype}, {report.device.name}, "
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
