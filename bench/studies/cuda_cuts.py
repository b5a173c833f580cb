"""Cuts of our CUDA C++ products over quantised weights, and of experts, timed beside the rules' own: what the rules came from.

python -m headway.bench.studies.cuda_cuts products --shape 4096x14336 --form int4 --rows 16,64
python -m headway.bench.studies.cuda_cuts experts --shape gpt-oss-20b --form mxfp4 --rows 16,64

A time is of one product, or one layer of experts, in a CUDA graph over weights that are larger together than the L2 cache. A cut
whose answer is wrong, or that does not fit, has no time, and its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor

from headway.backends.compile_ahead import compile_ahead
from headway.bench.kernel.product_layers import FORMS, ProductLayers, tolerance
from headway.bench.studies.command import run_study
from headway.bench.studies.experts.run import EXPERT_FORMS, TOLERANCE, RandomLayer, parse_form, parse_shape
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal
from headway.models.experts.cuda_lots import CudaLots
from headway.models.fused.cuda_cuts import (
    CudaCut,
    CudaCutRule,
    few_rows_cut,
    float8_cut,
    float8_cut_narrow,
    shared_rows_cut,
    shared_rows_cut_narrow,
)
from headway.models.fused.cuda_products import CudaProducts, Float8Products
from headway.tuning.measure.device import resolve_device
from headway.tuning.measure.graph_replay import captured
from headway.tuning.measure.timing import InterleavedTimer, Timing

log = logging.getLogger("headway")
GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
RULES: Mapping[str, Mapping[str, CudaCutRule]] = {
    "few_rows": {"rule": few_rows_cut},
    "shared_rows": {"rule": shared_rows_cut, "rule, narrow": shared_rows_cut_narrow},
    "w8a8": {"rule": float8_cut, "rule, narrow": float8_cut_narrow},
}
_SHARED = tuple((tiles, warps, splits) for tiles in (1, 2) for warps in (4, 8) for splits in (1, 2, 4, 8))
"""(tiles, warps, blocks of threads that share a sum)"""
_FEW = (1, 8, 4), (1, 8, 6), (2, 8, 3), (2, 8, 5), (1, 16, 3), (2, 4, 6), (4, 4, 4), (4, 8, 2)
"""(tiles, warps, stages)"""
_QUANTIZED = tuple(name for name, make in EXPERT_FORMS.items() if make is not None)
_LOTS = (2, 4, 3), (2, 4, 4), (1, 4, 4), (1, 4, 5), (1, 4, 6), (1, 8, 2), (1, 8, 3), (2, 8, 2)
"""(tiles, warps, blocks of threads of a multiprocessor)"""


def fixed(cut: CudaCut) -> Callable[..., CudaCut]:
    """A rule that knows one cut."""
    return lambda *_: cut


def product_cuts(kernel: str) -> dict[str, CudaCutRule]:
    """Name -> rule: the kernel's own, and cuts that it might have chosen."""
    found = dict(RULES[kernel])
    if kernel == "few_rows":
        for tiles, warps, stages in _FEW:
            for kept in (False, True):
                name = f"{tiles} x {warps} warps, {stages} stages{', x kept' if kept else ''}"
                found[name] = fixed(CudaCut(tiles, warps, stages, kept=kept))
        return found
    for tiles, warps, splits in _SHARED:
        for alone in (False, True):
            name = f"{tiles} x {warps} warps, {splits} blocks a sum{', alone' if alone else ''}"
            found[name] = fixed(CudaCut(tiles, warps, 5 if tiles == 1 else 3, splits, alone=alone))
    return found


def times(calls: Mapping[str, Callable[[], None]], each: int) -> Iterator[tuple[str, float | None, str]]:
    """(name, microseconds of one of `each`, why there are none), the fastest first."""
    timer, found = InterleavedTimer(rounds=2, round_ms=2.0), list[tuple[str, float | None, str]]()
    for name, call in calls.items():
        try:
            timing = timer.time([captured(call).replay], GPU)[0]
        except Exception as raised:  # a cut that does not fit is a result
            timing = raised
        if isinstance(timing, Timing):
            found.append((name, timing.median_us / each, ""))
        else:
            found.append((name, None, " ".join(str(timing).split())[:60]))
    yield from sorted(found, key=lambda item: item[1] or float("inf"))


def show(title: str, rows: Iterable[tuple[str, float | None, str]]) -> None:
    """One table."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("cut")
    table.add_column("us", justify="right")
    table.add_column("")
    for name, us, reason in rows:
        table.add_row(name, "" if us is None else f"{us:.1f}", reason)
    Terminal(width=100).print(table)


def launch_all(calls: Iterable[Callable[[], object]]) -> None:
    """Compile what they launch, many at a time."""
    ahead = compile_ahead(GPU)
    with ahead() if ahead is not None else nullcontext():
        for call in calls:
            try:
                call()
            except Exception as error:  # the trial meets it again, and names it
                log.debug("cuda_cuts: %s", error)


def cut_products(kernel: str, shape: str, form: str, rows: int) -> None:
    """Time cuts of one kernel over one form. shape: OUTxIN."""
    make, (out, inner) = Float8Products if kernel == "w8a8" else CudaProducts, map(int, shape.split("x"))
    layers, x = ProductLayers.drawn((out, inner), form, GPU), torch.randn(rows, inner, device=GPU, dtype=BF16)
    tried = {name: make(GPU, rule) for name, rule in product_cuts(kernel).items()}
    launch_all(partial(each, x, layers.linears[0]) for each in tried.values())
    calls = {name: partial(_all_layers, each, x, layers, kernel == "w8a8") for name, each in tried.items()}
    show(f"{kernel}, {shape} {form}, {rows} rows", times(calls, len(layers.linears)))


def _all_layers(product: Callable[..., Tensor], x: Tensor, layers: ProductLayers, rounds: bool) -> None:
    if not torch.cuda.is_current_stream_capturing():
        error = layers.error(product(x, layers.linears[0]), x)
        if not error < tolerance(rounds):
            raise ValueError(f"off by {error:.1e}")
    for linear in layers.linears:
        product(x, linear)


def cut_experts(layer: RandomLayer, lot: int, title: str, x: Tensor) -> None:
    """Time cuts of lots of up to `lot` rows of an expert."""
    base: Any = layer.kind.methods[f"cuda.lots{lot}"]
    tried = {"rule": base}
    for tiles, warps, blocks in _LOTS:
        cut = fixed(CudaCut(tiles, warps, 12, per_multiprocessor=blocks))
        tried[f"{tiles} x {warps} warps, {blocks} blocks"] = CudaLots(lot, base._config, base._router, GPU, base._arranged, cut)
    routed = base.route(x, layer._norm, layer._weights)
    launch_all(partial(each.add, x.clone(), routed, layer._weights) for each in tried.values())
    show(title, times({name: partial(_layer, each, layer, x, routed) for name, each in tried.items()}, 1))


def _layer(method: Any, layer: RandomLayer, x: Tensor, routed: Any) -> None:
    y = torch.zeros_like(x)
    method.add(y, routed, layer._weights)
    if not torch.cuda.is_current_stream_capturing():
        error = layer._error(y, routed)
        if not error < TOLERANCE:
            raise ValueError(f"off by {error:.1e}")


def cuda_cuts(
    what: Annotated[str, typer.Argument(help="products or experts.")],
    shape: Annotated[str, typer.Option(help="OUTxIN; of experts a model's name or experts/top_k/intermediate/hidden.")],
    form: Annotated[str, typer.Option(help=f"Of products {', '.join(FORMS)}; of experts {', '.join(_QUANTIZED)}.")],
    rows: Annotated[str, typer.Option(help="Rows of x, or tokens, several with commas.")] = "16,64",
    kernel: Annotated[str, typer.Option(help=f"Of products: {', '.join(RULES)}.")] = "shared_rows",
    lots: Annotated[str, typer.Option(help="Of experts: rows of a lot, several with commas.")] = "8,16",
) -> None:
    """Time every cut, the rule's among them."""
    if what not in ("products", "experts"):
        raise ConfigError("WHAT", "products or experts", what)
    if kernel not in RULES:
        raise ConfigError("--kernel", ", ".join(RULES), kernel)
    if resolve_device(None).type != "cuda":
        raise ConfigError("cuda_cuts", "a CUDA GPU", "none")
    counts = [int(each) for each in rows.split(",")]
    if what == "products":
        for count in counts:
            cut_products(kernel, shape, form, count)
        return
    sizes = parse_shape(shape)
    with torch.inference_mode():
        layer = RandomLayer(sizes, BF16, GPU, parse_form(form))
        for lot in map(int, lots.split(",")):
            for count in counts:
                x = torch.randn(count, sizes.hidden_size, device=GPU, dtype=BF16)
                cut_experts(layer, lot, f"lots of {lot}, {shape} {form}, {count} tokens", x)


if __name__ == "__main__":
    run_study(cuda_cuts)
