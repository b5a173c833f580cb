"""`headway bench crossover`: run the measurement, print the table and export it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from headway.cli.options import PluginFiles, block_sizes_of, dtype_of, names_of, requests_of, sizes_of
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from headway.bench.crossover.engine_level import EngineOptions
    from headway.core.contract.spec import AttentionSpec
    from headway.registry import Registry
    from headway.tuning.measure.run import CrossoverOptions
    from headway.tuning.table.schema import CrossoverTable

GEOMETRY = {"cpu": "9/3/64", "cuda": "32/8/128"}
"""Device type -> geometry. On a CPU, it is the geometry of smollm2, the default model of `headway generate`; on a GPU, the
geometry of an 8B model."""
LAYERS = {"9/3/64": 30, "32/8/128": 32}
"""Geometry -> number of layers of a model with this geometry."""
_FILE_WIDTH = 160  # Columns of the table if the output is not a terminal


_OWN_OPTIONS = {
    "engine": ("model", "load_format", "mixed", "repeat", "cell_limit", "crossover_table", "workload"),
    "kernel": ("geometry", "kv_dtype", "rule", "layouts", "block_sizes", "phases", "refine", "graph_len"),
}
"""Level -> the options that only this level reads."""


class Level(str, Enum):  # noqa: UP042  (typer prints the values of a str Enum)
    """Level at which to measure: attention kernels or end-to-end generation."""

    kernel = "kernel"
    engine = "engine"


def crossover(
    level: Annotated[
        Level, typer.Option(help="Level to measure: attention kernels, or whole generations (engine).")
    ] = Level.kernel,
    model: Annotated[
        str, typer.Option(help="Engine level: smollm2, a folder, a .gguf file, or a Hugging Face Hub id.")
    ] = "smollm2",
    load_format: Annotated[str, typer.Option(help="Engine level: auto, or dummy for random weights.")] = "auto",
    mixed: Annotated[
        str | None,
        typer.Option(help="Engine level: requests instead of the grid, such as 48q128s256_2q8ks8448 (input, input + output)."),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Engine level: minimum number of timed passes. Short generations get more.")
    ] = 1,
    cell_limit: Annotated[str, typer.Option(help="Engine level: maximum time per generation, such as 120s or 5m.")] = "120s",
    crossover_table: Annotated[
        list[Path] | None, typer.Option(help="Engine level: crossover table for auto to use. Repeatable.")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="Engine level: expected workload: chat, long, batch, or BATCHxINPUT+OUTPUT.")
    ] = "chat",
    backends: Annotated[
        str | None,
        typer.Option(help="Backends, comma-separated. Engine level: also prefill=NAME,decode=NAME. Default: all available."),
    ] = None,
    geometry: Annotated[
        str | None,
        typer.Option(help="Query heads/KV heads/head_dim, such as 32/8/128. Optional: /v_head_dim, /dense, /bidirectional."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type: float32, bfloat16, float16 or auto.")] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="Element type of the KV cache: auto (as --dtype), fp8_e4m3 or int8_per_token_head.")
    ] = "auto",
    rule: Annotated[
        str, typer.Option(help="Attention rule of the layer, as FILE.py:CLASS or a plugin's name for it.", show_default=False)
    ] = "",
    layouts: Annotated[str | None, typer.Option(help="KV cache layouts, comma-separated. Default: all.")] = None,
    block_sizes: Annotated[str | None, typer.Option(help="KV cache block sizes, comma-separated. Default: 16 and 256.")] = None,
    phases: Annotated[
        str | None, typer.Option(help="Phases to measure, comma-separated: prefill, extend, decode, verify. Default: all.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Batch sizes, comma-separated. Default: typical sizes for the device.")
    ] = None,
    input_lens: Annotated[
        str | None, typer.Option(help="Input lengths in tokens, comma-separated. Default: typical lengths for the device.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda or cuda:N. Default: the GPU if there is one.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Maximum measuring time, such as 120s or 5m. Important points come first.")
    ] = None,
    refine: Annotated[
        int, typer.Option(min=0, help="Number of rounds that add points between neighbours whose fastest backends differ.")
    ] = 2,
    graph_len: Annotated[
        int | None, typer.Option(min=1, help="Context length in tokens for which decode graphs are captured. Default: 32,768.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted measurement.")] = False,
    plugin: PluginFiles = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the inputs.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="File for the table. Default: the file that auto reads, if the grid is complete.")
    ] = None,
    export_to: Annotated[
        list[Path] | None, typer.Option("--export", help="Also export to this .csv, .md, .html or .png file. Repeatable.")
    ] = None,
) -> None:
    """Measure the fastest backend at each point, and save a table for auto.

    Each backend is checked against float64 before it is timed.
    """
    given = SimpleNamespace(**locals())
    from headway.bench.crossover.engine_level import run_engine_level
    from headway.bench.crossover.export import check_target
    from headway.machine.process import set_threads
    from headway.tuning.isolated.trial import create_registry
    from headway.tuning.measure.device import resolve_device
    from headway.tuning.measure.run import run_kernel_level

    _refuse_other_level(level, vars(given))
    for path in export_to or ():
        check_target(path, output)
    parse_seconds("--cell-limit", cell_limit)
    place, registry = resolve_device(device), create_registry(plugin or ())
    if level is Level.engine:
        finish(run_engine_level(_engine_run(given, place), registry, Terminal(stderr=True)), output, export_to or [])
        return
    if place.type == "cpu":
        set_threads()  # as an engine does; at level engine it sets them in its own process
    options = _kernel_run(given, place, registry)
    finish(run_kernel_level(options, registry, Terminal(stderr=True)), options.output, export_to or [])


def _engine_run(given: Any, device: torch.device) -> EngineOptions:
    """Return the engine-level run that the options in `given` describe. :raises ConfigError: if an option is invalid."""
    from headway.bench.crossover.engine_level import SIZES, EngineOptions, cases
    from headway.core.system.provenance import command_line

    batches, lens = sizes_of("--batch-sizes", given.batch_sizes), sizes_of("--input-lens", given.input_lens)
    usual = SIZES.get(device.type, SIZES["cuda"])
    llm: dict[str, Any] = {name: getattr(given, name) for name in ("model", "load_format", "dtype", "workload")}
    llm["device"] = given.device or "auto"
    llm |= {"plugins": given.plugin} if given.plugin else {}
    llm |= {"crossover_table": [str(path) for path in given.crossover_table]} if given.crossover_table else {}
    return EngineOptions(
        device=device,
        llm=llm,
        cases=[given.mixed] if given.mixed else cases(batches or usual[0], lens or usual[1]),
        backends=requests_of(given.backends),
        repeat=given.repeat,
        cell_limit=parse_seconds("--cell-limit", given.cell_limit) or 0.0,
        seed=given.seed,
        budget=parse_seconds("--budget", given.budget),
        output=given.output,
        resume=given.resume,
        command=command_line(),
    )


def _kernel_run(given: Any, device: torch.device, registry: Registry) -> CrossoverOptions:
    """Return the kernel-level run that the options in `given` describe. :raises ConfigError: if an option is invalid."""
    from headway.core.select.request import LayerSpecs
    from headway.core.system.provenance import command_line
    from headway.kernels.runtime.compile_ahead import compile_ahead
    from headway.tuning.measure.device import identify_device
    from headway.tuning.measure.kinds import GRAPH_LEN
    from headway.tuning.measure.points import PHASES, grid
    from headway.tuning.measure.run import BLOCK_SIZES, CrossoverOptions
    from headway.tuning.table.files import table_path
    from headway.tuning.table.schema import SpecRecord

    batches, lens = sizes_of("--batch-sizes", given.batch_sizes), sizes_of("--input-lens", given.input_lens)
    if pairs := [name for name in requests_of(given.backends) or [] if "=" in name]:
        need = "names at level kernel, which times each phase by itself"
        raise ConfigError("--backends", need, pairs[0], "--level engine takes such a pair")
    spec = layer(given.geometry, given.dtype, given.kv_dtype, device)
    chosen = names_of(given.phases) or list(PHASES)
    if unknown := [name for name in chosen if name not in PHASES]:
        raise ConfigError("--phases", ", ".join(PHASES), ", ".join(map(repr, unknown)))
    narrowed = any((given.backends, given.phases, batches, lens))
    points = grid(device.type, [phase for phase in PHASES if phase in chosen], batches, lens)
    if not points:  # before an existing table is replaced
        raise ConfigError(*_NO_POINT)
    if given.rule:
        longest = max(point.kv_len for point in points)
        spec = LayerSpecs([spec]).with_rules({"all": registry.attention_rule(given.rule)}, [0], longest).cached[0]
    return CrossoverOptions(
        spec=spec,
        backends=names_of(given.backends),
        layouts=names_of(given.layouts),
        block_sizes=block_sizes_of(given.block_sizes) or BLOCK_SIZES,
        grid=points,
        refine=given.refine,
        budget=parse_seconds("--budget", given.budget),
        graph_len=given.graph_len or GRAPH_LEN,
        seed=given.seed,
        output=given.output or (None if narrowed else table_path(identify_device(device), SpecRecord.of(spec))),
        resume=given.resume,
        command=command_line(),
        compile_ahead=compile_ahead(device),
    )


def _refuse_other_level(level: Level, given: Mapping[str, object]) -> None:
    """:raises ConfigError: if an option is given that the level does not read."""
    usual = inspect.signature(crossover).parameters
    for other, names in _OWN_OPTIONS.items():
        for name in names if other != level.value else ():
            if given[name] != usual[name].default:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(flag, f"--level {other}", f"--level {level.value}, which does not read {flag}")


_NO_POINT = "the grid", "a point that this machine's memory holds", "none", "take smaller batches or shorter inputs"
"""Arguments of the error for a grid without points."""


def finish(table: CrossoverTable, path: Path | None, exports: list[Path]) -> None:
    """Print a measured table and its path, and write its exports."""
    from headway.bench.crossover.export import export
    from headway.bench.crossover.report import print_view, view

    console = Terminal()
    console = console if console.is_terminal else Terminal(width=_FILE_WIDTH)
    if not table.cells:
        if not table.complete:
            raise typer.Exit(130)
        raise ConfigError(*_NO_POINT)
    shown = view(table)
    print_view(shown, console)
    for target in exports:
        export(shown, target)
    if path is None:
        console.print(Text("not saved: auto needs a table with every backend, phase and length; --output FILE saves it"))
    for target in [*([path] if path else []), *exports]:
        console.print(Text(f"written to {target}"), soft_wrap=True)


def layer(geometry: str | None, dtype: str, kv_dtype: str, device: torch.device) -> AttentionSpec:
    """Return the layer that the options describe. :raises ConfigError: if a geometry or dtype is invalid."""
    import torch

    from headway.core.contract.spec import DTYPES, KV_DTYPES
    from headway.tuning.measure.workloads import Geometry, make_spec

    heads = Geometry.parse(geometry or GEOMETRY.get(device.type, GEOMETRY["cuda"]))
    usual = torch.float32 if device.type == "cpu" else torch.bfloat16
    kv = dtype_of("--kv-dtype", kv_dtype, {**DTYPES, **KV_DTYPES})
    return make_spec(heads, dtype_of("--dtype", dtype, DTYPES) or usual, kv, device)


def parse_seconds(option: str, text: str | None) -> float | None:
    """Return the number of seconds in a text such as 120, 120s or 2m, or None if there is no text. :raises ConfigError: if the
    format differs."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|)", text.strip())
    if match is None:
        raise ConfigError(option, "a time such as 120s or 5m", repr(text))
    return float(match[1]) * (60 if match[2].startswith("m") else 1)
