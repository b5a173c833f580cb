"""The picture of `headway plan`: what a GPU gives against what a user gets, a curve for each layout."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from headway.bench.charts import BAR_COLOURS, bare, heading, new_figure, png

if TYPE_CHECKING:
    from headway.plan.results import PlanReport, PlanRow


def to_picture(report: PlanReport) -> bytes:
    """Draw a report's full load as a PNG: batch sizes along each curve, and the plan that was chosen.

    :raises ConfigError: matplotlib is not installed.
    """
    figure = new_figure(8.0, 5.2, "leave --picture out")
    axis = figure.subplots()
    for number, (name, rows) in enumerate(groupby(report.full_load, key=_name)):
        curve = list(rows)
        colour, style = BAR_COLOURS[number % len(BAR_COLOURS)], "-" if number < len(BAR_COLOURS) else "--"
        x, y = [row.tokens_per_second_per_user for row in curve], [row.tokens_per_second_per_gpu for row in curve]
        axis.plot(x, y, color=colour, linestyle=style, marker="o", markersize=4, label=name)
    axis.set(
        xlabel="Output tokens a second of one user",
        ylabel="Output tokens a second of one GPU",
        xscale="log",
        yscale="log",
    )
    if report.max_per_token_ms is not None:
        axis.axvline(1e3 / report.max_per_token_ms, color="#444444", linewidth=1, linestyle=":", label="limit of time per token")
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter, axis.yaxis.set_major_formatter):
        formatter("{x:,.0f}")
    bare(axis)
    lengths = f"{report.input_len:,} tokens in, {report.output_len:,} out"
    heading(figure, f"{report.model} on {report.num_gpus:,} x {report.gpu}, {lengths}: predicted, each point a batch size")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return png(figure)


def _name(row: PlanRow) -> str:
    cache = "" if row.kv_cache_dtype == "auto" else f", {row.kv_cache_dtype}"
    weights = "" if row.weights == "model" else f", {row.weights} weights"
    return f"tp {row.tensor_parallel_size}{cache}{weights}"
