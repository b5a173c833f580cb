"""`python -m headway.bench.studies.states`: a layer with a state alone, checked against float64, then timed in every cut.

The defaults are Qwen3-Next's layer. One call with `--sweep` tries all cuts and names the best; `--seconds` bounds it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from headway.bench.studies.command import run_study
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.bench.studies.states.sweep import StateTimes

_WIDTH = 80


def states(
    kind: Annotated[str, typer.Option(help="gated_delta, kda, mamba2 or lightning.")] = "gated_delta",
    heads: Annotated[str, typer.Option(help="Heads, key heads, key and value elements.")] = "32,16,128,128",
    conv_width: Annotated[int, typer.Option(help="Taps of the convolution; 0: none.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    state_dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    layout: Annotated[str, typer.Option(help="key_value or value_key.")] = "key_value",
    steps: Annotated[str, typer.Option(help="Sequences of a decode, comma-separated.")] = "1,16,64,256",
    prompts: Annotated[str, typer.Option(help="Sequences x tokens, comma-separated.")] = "1x1024,1x8192,8x1024",
    sweep: Annotated[bool, typer.Option("--sweep", help="Try every cut, not the default alone.")] = False,
    seconds: Annotated[float, typer.Option(help="Try nothing more after so long.")] = 280.0,
    layers: Annotated[int, typer.Option(min=1, help="Layers in the graph of a step.")] = 16,
    read_gbps: Annotated[float, typer.Option(help="What the memory moves, GB/s.")] = 4192.0,
    output: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
) -> None:
    """Check a layer on the GPU, then time it."""
    import torch

    from headway.bench.studies.states.sweep import SCAN_CUTS, STEP_CUTS, WRONG, StudyLayer, as_json, check, time_scan, time_step
    from headway.core.contract.errors import ConfigError
    from headway.core.contract.spec import DTYPES
    from headway.core.contract.state import KEY_VALUE, VALUE_KEY, StateSpec
    from headway.core.system.json_files import write_bytes
    from headway.tuning.measure.device import identify_device, resolve_device
    from headway.tuning.measure.timing import Timer

    device = resolve_device(None)
    if device.type != "cuda":
        raise ConfigError("headway.bench.studies.states", "a GPU", device.type)
    h, kh, k, v = map(int, heads.split(","))
    channels = 2 * kh * k + h * v if conv_width else 0
    delta = kind in ("gated_delta", "kda")
    spec = StateSpec(
        kind, h, kh, k, v, channels, conv_width, dtype=DTYPES[dtype], device=device, state_dtype=DTYPES[state_dtype],
        scale=k**-0.5, qk_norm=delta,
    )  # fmt: skip
    chosen = VALUE_KEY if layout == "value_key" else KEY_VALUE
    layer = StudyLayer(spec, chosen, read_gbps, layers, Timer(10.0, 30.0), time.monotonic() + seconds)
    step_cuts, scan_cuts = (STEP_CUTS, SCAN_CUTS) if sweep else (({},), (({},),))
    console = Terminal(width=_WIDTH)
    console.print(f"{spec}, {layout}; {identify_device(device).name}, torch {torch.__version__}")
    with torch.inference_mode():
        checks = check(layer)
        wrong = [each for each in checks if not max(each[1:]) < WRONG]
        for name, out, state in checks:
            console.print(f"{name:20} error of the output {out:.2e}, of states {state:.2e}", highlight=False)
        cells = [time_step(layer, int(size), step_cuts) for size in steps.split(",") if size]
        for prompt in filter(None, prompts.split(",")):
            num_seqs, length = map(int, prompt.split("x"))
            cells.append(time_scan(layer, num_seqs, length, scan_cuts))
    console.print(_table(cells))
    if time.monotonic() > layer.until:
        console.print("time was up: not every cut was tried")
    if output is not None:
        write_bytes(json.dumps(as_json(layer, checks, cells), indent=1).encode(), output)
    if wrong:
        console.print(f"WRONG: {', '.join(name for name, *_ in wrong)}")
        raise typer.Exit(1)


def _table(cells: Sequence[StateTimes]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=_WIDTH)
    for column in ("cell", "floor", "best", "alone", "cut and kernels, us"):
        table.add_column(column, justify="left" if column[0] == "c" else "right")
    for cell in cells:
        cut, best = cell.best if cell.tried else ({}, float("nan"))
        said = [f"{name}={value}" for name, value in cut.items()] + [
            f"{n.split('(')[0]} {us:.1f}" for n, us in cell.kernels.items()
        ]
        said += [f"{len(cell.faults)} of {len(cell.tried) + len(cell.faults)} failed: {cell.faults[0]}"] if cell.faults else []
        table.add_row(cell.name, f"{cell.floor_us:.1f}", f"{best:.1f}", f"{cell.alone_us:.1f}", ", ".join(said))
    return table


if __name__ == "__main__":
    run_study(states)
