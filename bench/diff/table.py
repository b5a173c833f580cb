"""A comparison as tables for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.bench.diff.report import DiffReport, Error, LayerDiff, PhaseDiff, size


def print_report(report: DiffReport, console: Console) -> None:
    """Layers and heads of each phase, then what it does to the next tokens, then the verdict."""
    a, b = report.a, report.b
    device = report.device
    written = f"{report.max_tokens} tokens written after each by {b.name}"
    lines = [
        f"{report.model}, {report.dtype} on {device.name}, torch {device.torch}",
        f"{report.prompts} prompts, {written}",
        *(f"{n} = {side.name} (kv_layout={side.kv_layout}, block_size={side.block_size})" for n, side in (("A", a), ("B", b))),
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    for phase in report.phases:
        console.print()
        console.print(_layers(phase))
    console.print()
    console.print(_tokens(report))
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
    return lines or [Text("within tolerance in every layer and phase", "bold green")]


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


def _show(error: Error) -> str:
    if error is None:
        return "no number"
    return f"{error:.1e}" if error else "0"
