"""The command `headway bench kernel`: options to `KernelOptions`, and the table."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import PluginFiles, block_sizes_of, dtype_of, names_of
from headway.core.system.terminal import Terminal

_FILE_WIDTH = 240
"""Columns of the table where no terminal says how many it has."""


class PhaseChoice(str, Enum):  # noqa: UP042  (typer prints the values of a str Enum)
    """What to measure."""

    decode = "decode"
    prefill = "prefill"
    write = "write"


def kernel(
    phase: Annotated[PhaseChoice, typer.Option(help="Attention over the cache, of prompts, or the cache writers.")] = (
        PhaseChoice.decode
    ),
    backends: Annotated[str | None, typer.Option(help="Names, comma-separated. Default: all that are available.")] = None,
    peers: Annotated[bool, typer.Option(help="Time installed attention libraries, called bare, in the same run.")] = True,
    only_peers: Annotated[str | None, typer.Option(help="Only these peers, comma-separated.")] = None,
    geometry: Annotated[
        list[str] | None,
        typer.Option(help="Query heads, kv heads, head_dim, and v_head_dim where it differs: 32/8/128. Repeatable."),
    ] = None,
    cases: Annotated[str | None, typer.Option(help="Cases such as 8q1s2k,1q1s512. Default: the device's usual cells.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Element type of the cache: auto (as --dtype) or fp8_e4m3.")] = "auto",
    layouts: Annotated[str | None, typer.Option(help="Cache layouts, comma-separated. Default: the preferred one.")] = None,
    block_sizes: Annotated[str | None, typer.Option(help="Comma-separated. Default: those of 16 and 256 that fit.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: the GPU if there is one.")] = None,
    warmup_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of warm-up before timing.")] = 15.0,
    rep_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds over which runs are repeated.")] = 60.0,
    plugin: PluginFiles = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Time attention kernels, each checked against float64 first, beside the bare libraries."""
    from headway.bench.kernel.run import KernelOptions, run_kernel_bench
    from headway.bench.kernel.table import print_report
    from headway.core.contract.spec import DTYPES, KV_DTYPES
    from headway.registry import create_registry
    from headway.testing.json_files import write_json
    from headway.testing.origin import command_line
    from headway.threads import set_threads
    from headway.tuning.device import resolve_device
    from headway.tuning.timing import Timer
    from headway.tuning.work import Geometry

    place = resolve_device(device)
    if place.type == "cpu":
        set_threads()
    options = KernelOptions(
        phase=phase.value,
        backends=names_of(backends),
        peers=names_of(only_peers) or peers,
        geometries=[Geometry.parse(text) for text in geometry or ["32/8/128"]],
        cases=names_of(cases),
        dtype=dtype_of("--dtype", dtype, DTYPES),
        kv_dtype=dtype_of("--kv-dtype", kv_dtype, {**DTYPES, **KV_DTYPES}),
        layouts=names_of(layouts),
        block_sizes=block_sizes_of(block_sizes),
        device=place,
        timer=Timer(warmup_ms, rep_ms),
        seed=seed,
        output=output,
        command=command_line(),
    )
    report = run_kernel_bench(options, create_registry(plugin or ()), console=Terminal(stderr=True))
    console = Terminal()
    if not console.is_terminal:
        console = Terminal(width=_FILE_WIDTH)
    print_report(report, console)
    if output is not None:
        write_json(report, output)
        console.print(f"written to {output}", highlight=False)
    if not any(cell.status == "ok" for cell in report.cells):
        Terminal(stderr=True, soft_wrap=True).print("headway: nothing was measured: every cell failed, for the reasons above")
        raise typer.Exit(1)
