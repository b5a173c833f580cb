"""`headway bench kernel`: time attention, state and linear kernels."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import (
    Command,
    PluginFiles,
    block_sizes_of,
    dtype_of,
    names_of,
    report_written,
    sizes_of,
    with_flags,
    write_result,
)
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.bench.kernel.run import KernelOptions

_FILE_WIDTH = 240  # Columns of the table if the output is not a terminal


class TimedPhase(str, Enum):  # noqa: UP042  (typer prints the values of a str Enum)
    """Operation to time."""

    decode = "decode"
    prefill = "prefill"
    write = "write"


def options_of(
    phase: Annotated[
        TimedPhase, typer.Option(help="Operation to time: decode or prefill attention, or the cache writers.")
    ] = TimedPhase.decode,
    backends: Annotated[
        str | None, typer.Option(help="Backends to time, comma-separated. Default: all available backends.")
    ] = None,
    geometry: Annotated[
        list[str] | None,
        typer.Option(help="Query heads/KV heads/head_dim, plus v_head_dim if it differs, such as 32/8/128. Repeatable."),
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(help="Cases to time, comma-separated, such as 8q1s2k,1q1s512. Default: typical cases of the device."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type: float32, bfloat16, float16 or auto.")] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="Element type of the KV cache: auto (as --dtype), fp8_e4m3 or int8_per_token_head.")
    ] = "auto",
    layouts: Annotated[str | None, typer.Option(help="KV cache layouts, comma-separated. Default: the preferred layout.")] = None,
    block_sizes: Annotated[
        str | None, typer.Option(help="KV cache block sizes, comma-separated. Default: 16 and 256, if supported.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda or cuda:N. Default: the GPU if there is one.")] = None,
    warmup_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of warm-up before timing.")] = 15.0,
    rep_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of timed runs.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the inputs.")] = 0,
    peak_bandwidth: Annotated[
        float | None, typer.Option(help="Peak memory bandwidth of the device in GB/s. Default: the data sheet value, if known.")
    ] = None,
    peak_flops: Annotated[
        float | None,
        typer.Option(help="Peak compute of the device in TFLOP/s at --dtype. Default: the data sheet value, if known."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> Any:
    """Return the `KernelOptions` of a command line; typer reads the options from this function's parameters."""
    from headway.bench.kernel.run import KernelOptions
    from headway.core.contract.spec import DTYPES, KV_DTYPES
    from headway.core.system.provenance import command_line
    from headway.machine.process import set_threads
    from headway.tuning.measure.device import resolve_device
    from headway.tuning.measure.timing import Timer
    from headway.tuning.measure.workloads import Geometry

    place = resolve_device(device)
    if place.type == "cpu":
        set_threads()
    return KernelOptions(
        phase=phase.value,
        backends=names_of(backends),
        geometries=[Geometry.parse(text) for text in geometry or ["32/8/128"]],
        cases=names_of(cases),
        dtype=dtype_of("--dtype", dtype, DTYPES),
        kv_dtype=dtype_of("--kv-dtype", kv_dtype, {**DTYPES, **KV_DTYPES}),
        layouts=names_of(layouts),
        block_sizes=block_sizes_of(block_sizes),
        device=place,
        timer=Timer(warmup_ms, rep_ms),
        seed=seed,
        peak_gbps=_peak("--peak-bandwidth", peak_bandwidth),
        peak_tflops=_peak("--peak-flops", peak_flops),
        output=output,
        command=command_line(),
    )


def _peak(option: str, rate: float | None) -> float | None:
    """Return `rate` after checking it. :raises ConfigError: if the rate is not a finite positive number."""
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(option, "a rate above 0", rate)
    return rate


def takes_kernel_options(command: Command) -> Command:
    """Replace a command's parameter `options` by the options of `options_of`."""
    flags = inspect.signature(options_of, eval_str=True).parameters.values()
    by_name = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in flags]
    return with_flags(command, "options", by_name, lambda values: options_of(**values))


@takes_kernel_options
def kernel(
    options: Any,
    plugin: PluginFiles = None,
    fail_if_slower: Annotated[
        float | None,
        typer.Option(help="Exit with code 1 if a backend takes more than N times as long as --than."),
    ] = None,
    than: Annotated[str | None, typer.Option(help="Backend that --fail-if-slower compares with.")] = None,
    rule: Annotated[
        str,
        typer.Option(help="Attention rule of the layers, as FILE.py:CLASS or a plugin's name for it.", show_default=False),
    ] = "",
    model: Annotated[
        str | None, typer.Option(help="With --states: model as a folder, a config.json or a name. No weights are read.")
    ] = None,
    states: Annotated[
        bool, typer.Option("--states", help="Time scan and step of the model's state layers instead of attention.")
    ] = False,
    linear: Annotated[
        list[str] | None,
        typer.Option(help="Time linear layers of out_features x in_features instead, such as 4096x14336. Repeatable."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(help="With --linear: weight formats, comma-separated: int4, fp8, fp8-blocks, mxfp4, plain. Default: all."),
    ] = None,
    rows: Annotated[str | None, typer.Option(help="With --linear: row counts of x, comma-separated. Default: 1,4,16,64.")] = None,
) -> None:
    """Time attention, state or linear kernels, after checking each for correctness.

    --states times state kernels, and --linear times linear kernels.
    """
    compared = fail_if_slower is not None or than is not None or bool(rule)
    if linear or form is not None or rows is not None:
        measure_products(options, linear or [], form, rows, others=bool(plugin or states or model is not None or compared))
    elif states or model is not None:
        measure_states(options, plugin, model if states else None, asked_to_compare=compared)
    else:
        measure_attention(options, plugin, fail_if_slower, than, rule)


def measure_attention(
    options: KernelOptions,
    plugin: Sequence[str] | None,
    fail_if_slower: float | None = None,
    than: str | None = None,
    rule: str = "",
) -> None:
    """Time attention kernels, and compare them with `than` if it is given. rule: attention rule of the layers, or ""."""
    from headway.bench.kernel.report import check_request, compare, print_report
    from headway.bench.kernel.run import run_kernel_bench
    from headway.tuning.isolated.trial import create_registry

    check_request(fail_if_slower, than, options.phase)
    if than is not None and options.backends is not None and than not in options.backends:
        options = replace(options, backends=[*options.backends, than])
    registry = create_registry(plugin or ())
    if rule:
        options = replace(options, rule=registry.attention_rule(rule))
    if than is not None:
        registry.backend(than)  # raises for an unregistered name
    report = run_kernel_bench(options, registry, console=Terminal(stderr=True))
    if fail_if_slower is not None and than is not None:
        report.comparison = compare(report.cells, than, fail_if_slower)
    console = Terminal()
    if not console.is_terminal:
        console = Terminal(width=_FILE_WIDTH)
    print_report(report, console)
    write_result(report, options.output, console)
    if not any(cell.status == "ok" for cell in report.cells):
        Terminal(stderr=True, soft_wrap=True).print("headway: nothing was measured: every cell failed, for the reasons above")
        raise typer.Exit(1)
    if report.comparison is not None and report.comparison.fault:
        err = Terminal(stderr=True, soft_wrap=True)
        for cell in report.comparison.slower:
            err.print(str(cell), markup=False, highlight=False)
        err.print(f"headway: {report.comparison.fault}", markup=False, highlight=False)
        raise typer.Exit(1)


def measure_states(
    options: KernelOptions, plugin: Sequence[str] | None, model: str | None, *, asked_to_compare: bool = False
) -> None:
    """Time `scan` and `step` of a model's state layers. :raises ConfigError: if an option is invalid or the model has no state
    layers."""
    import torch

    from headway.bench.kernel.report import print_state_report
    from headway.bench.kernel.results import peak_of
    from headway.core.contract.spec import DTYPE_NAMES
    from headway.kernels.runtime.compile_ahead import compile_ahead
    from headway.models.loader import read_layer_specs
    from headway.tuning.isolated.trial import create_registry
    from headway.tuning.measure.device import measured_rates
    from headway.tuning.measure.run import CrossoverOptions, run_kernel_level
    from headway.tuning.measure.timing import InterleavedTimer

    if model is None:
        raise ConfigError("--states", "the model whose layers are timed, and --model goes with --states", "one without the other")
    if asked_to_compare or options.cases or options.layouts or options.block_sizes or options.kv_dtype:
        need = "no --cases, --layouts, --block-sizes, --kv-dtype, --fail-if-slower or --than, which are of attention"
        raise ConfigError("--states", need, "one of them")
    found = read_layer_specs(model, options.device, options.dtype or (torch.float32 if options.device.type == "cpu" else None))
    specs = list(dict.fromkeys(found.states))
    if len(specs) != 1:
        raise ConfigError("--states", "a model whose layers with a state are all of one kind", f"{len(specs)} kinds in {model}")
    table = run_kernel_level(
        CrossoverOptions(
            specs[0],
            options.backends,
            timer=InterleavedTimer(round_ms=options.timer.rep_ms / 3),
            seed=options.seed,
            output=options.output,
            command=options.command,
            compile_ahead=compile_ahead(options.device),
        ),
        create_registry(plugin or ()),
        Terminal(stderr=True),
    )
    console = Terminal()
    peak = peak_of(table.device.name, DTYPE_NAMES[specs[0].dtype], options.peak_gbps, options.peak_tflops)
    print_state_report(table, specs[0], peak, measured_rates(options.device, specs[0].dtype, options.timer)[0], console)
    report_written(options.output, console)


def measure_products(options: KernelOptions, shapes: Sequence[str], form: str | None, rows: str | None, *, others: bool) -> None:
    """Time the kernels of quantized linear layers. others: True if options that do not apply were given. :raises ConfigError: if
    options are invalid."""
    from headway.bench.kernel.products import FORM_NAMES, ProductOptions, print_products, run_products_bench

    if not shapes:
        raise ConfigError("--form and --rows", "--linear with a shape", "none", "--linear 4096x14336")
    if others or options.backends or options.cases or options.layouts or options.block_sizes or options.kv_dtype:
        need = "--form, --rows, --dtype, --device, --output and times alone"
        raise ConfigError("--linear", need, "an option of attention or of states")
    given: dict[str, Any] = {each.name: getattr(options, each.name, None) for each in fields(ProductOptions)}
    given["shapes"] = [product_shape(text) for text in shapes]
    given["forms"] = names_of(form) or FORM_NAMES
    given["rows"] = sizes_of("--rows", rows) or (1, 4, 16, 64)
    report = run_products_bench(ProductOptions(**given), Terminal(stderr=True))
    console = Terminal()
    print_products(report, console)
    report_written(options.output, console)
    if not any(cell.status == "ok" for cell in report.cells):
        raise typer.Exit(1)


def product_shape(text: str) -> tuple[int, int]:
    """Return (out_features, in_features) from a text. :raises ConfigError: if the text is not OUTxIN."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isascii() and size.isdigit() and 0 < int(size) < 2**20 for size in sizes):
        raise ConfigError("--linear", "out_features x in_features, such as 4096x14336", repr(text))
    return int(sizes[0]), int(sizes[1])
