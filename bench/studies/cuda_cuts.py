"""Cuts of our CUDA C++ products over quantised weights, and of experts, timed beside the rules' own: what the rules came from.

python -m headway.bench.studies.cuda_cuts products --shape 4096x14336 --form int4 --rows 16,64
python -m headway.bench.studies.cuda_cuts experts --shape gpt-oss-20b --form mxfp4 --rows 16,64

Products are timed as `studies.products` does, layers of experts as `studies.experts` does: each answer is checked first, and a
cut that is wrong, or does not fit, has a reason in place of a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table

from headway.bench.generate.roofline import measure_read_gbps
from headway.bench.kernel.product_layers import FORMS, ProductLayers
from headway.bench.studies.command import run_study
from headway.bench.studies.experts.run import EXPERT_FORMS, RandomLayer, parse_form, parse_shape
from headway.bench.studies.products import Study
from headway.cli.measure.bench_kernel import product_shape
from headway.cli.options import sizes_of
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal
from headway.kernels.experts.cuda_lots import LOTS, CudaLots
from headway.kernels.linear.cuda_products import CudaProducts
from headway.kernels.linear.cuda_variant import CudaCut
from headway.kernels.linear.quantized_choice import FEW, FLOAT8, SHARED
from headway.kernels.linear.quantized_ways import QuantizedWays
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.tuning.measure.device import describe_device, resolve_device
from headway.tuning.measure.timing import Timer

GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
KERNELS = FEW, SHARED, FLOAT8
_SHARED = tuple((tiles, warps, splits) for tiles in (1, 2) for warps in (4, 8) for splits in (1, 2, 4, 8))
"""(tiles, warps, blocks of threads that share a sum)"""
_FEW = (1, 8, 4), (1, 8, 6), (2, 8, 3), (2, 8, 5), (1, 16, 3), (2, 4, 6), (4, 4, 4), (4, 8, 2)
"""(tiles, warps, stages)"""
_LOTS = (2, 4, 3), (2, 4, 4), (1, 4, 4), (1, 4, 5), (1, 4, 6), (1, 8, 2), (1, 8, 3), (2, 8, 2)
"""(tiles, warps, blocks of threads of a multiprocessor)"""
_QUANTIZED = tuple(name for name, make in EXPERT_FORMS.items() if make is not None)
Row = tuple[str, float | None, str]
"""A cut, its microseconds, and why there are none."""


def fixed(cut: CudaCut) -> Callable[..., CudaCut]:
    """A rule that knows one cut."""
    return lambda *_: cut


def cuts(kernel: str) -> dict[str, CudaCut]:
    """Name -> a cut that a kernel's rule might have chosen."""
    if kernel == FEW:
        few = [(CudaCut(*each, kept=kept), kept) for each in _FEW for kept in (False, True)]
        return {f"{cut.tiles} x {cut.warps} warps, {cut.stages} stages{', x kept' * kept}": cut for cut, kept in few}
    shared = [CudaCut(*each[:2], 5 if each[0] == 1 else 3, each[2], alone=alone) for each in _SHARED for alone in (False, True)]
    return {f"{cut.tiles} x {cut.warps} warps, {cut.splits} blocks a sum{', alone' * cut.alone}": cut for cut in shared}


def cut_products(kernel: str, shape: tuple[int, int], form: str, rows: int) -> list[Row]:
    """Time cuts of one kernel over one form, beside the ways that an engine has of it."""
    ways = {name: way.kernel for name, way in QuantizedWays(GPU).ways.items() if name.split()[0] == kernel}
    tried = {f"the rule of {name}": made for name, made in ways.items() if isinstance(made, CudaProducts)}
    tried |= {name: type(tried[f"the rule of {kernel}"])(GPU, fixed(cut)) for name, cut in cuts(kernel).items()}
    layers, x, study = ProductLayers.drawn(shape, form, GPU), torch.randn(rows, shape[1], device=GPU, dtype=BF16), Study(math.inf)
    ahead = compile_ahead(GPU)
    assert ahead is not None
    with ahead():
        for product in tried.values():
            with suppress(Exception):  # the trial meets it again, and names it
                product(x, layers.linears[0])
    for name, product in tried.items():
        study.us(layers, x, product, kernel, name, rounds=kernel == FLOAT8)
    return [(cell.cut, cell.us, cell.reason) for cell in study.cells]


def cut_experts(layer: RandomLayer, lot: int, tokens: int, timer: Timer, limits: tuple[float, float]) -> list[Row]:
    """Time cuts of lots of up to `lot` rows of an expert. limits: GB/s that the GPU reads, and its TFLOP/s."""
    methods = layer.kind.methods
    base = methods[f"cuda.lots{lot}"]
    assert isinstance(base, CudaLots)
    if not base.takes(tokens, BF16):
        return [("every cut", None, f"lots of {lot} do not serve {tokens} tokens here")]
    others = [
        base.cut_by(fixed(CudaCut(tiles, warps, 12, per_multiprocessor=blocks)), f"{tiles} x {warps} warps, {blocks} blocks")
        for tiles, warps, blocks in _LOTS
    ]
    layer.kind.methods = {each.name: each for each in (base, *others)}
    found = [(cell.way, cell.median_us, cell.reason) for cell in layer.cells(tokens, (), timer, *limits)]
    layer.kind.methods = methods
    return found


def show(title: str, rows: Iterable[Row]) -> None:
    """One table, the fastest first."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("cut")
    table.add_column("us", justify="right")
    table.add_column("")
    for name, us, reason in sorted(rows, key=lambda row: row[1] or math.inf):
        table.add_row(name, "" if us is None else f"{us:.1f}", reason[:50])
    Terminal(width=120).print(table)


def cuda_cuts(
    what: Annotated[str, typer.Argument(help="products or experts.")],
    shape: Annotated[str, typer.Option(help="OUTxIN; of experts a model's name or experts/top_k/intermediate/hidden.")],
    form: Annotated[str, typer.Option(help=f"Of products {', '.join(FORMS)}; of experts {', '.join(_QUANTIZED)}.")],
    rows: Annotated[str, typer.Option(help="Rows of x, or tokens, several with commas.")] = "16,64",
    kernel: Annotated[str, typer.Option(help=f"Of products: {', '.join(KERNELS)}.")] = SHARED,
    lots: Annotated[str, typer.Option(help=f"Of experts: of {LOTS}, several with commas.")] = "8,16",
) -> None:
    """Time every cut, the rule's among them."""
    for option, value, known in (("WHAT", what, ("products", "experts")), ("--kernel", kernel, KERNELS)):
        if value not in known:
            raise ConfigError(option, f"one of {', '.join(known)}", value)
    forms = tuple(FORMS) if what == "products" else _QUANTIZED
    if form not in forms:
        raise ConfigError("--form", f"one of {', '.join(forms)}", form)
    counts, of_lots = sizes_of("--rows", rows) or [], sizes_of("--lots", lots) or []
    if unknown := [lot for lot in of_lots if lot not in LOTS]:
        raise ConfigError("--lots", f"of {', '.join(map(str, LOTS))}", unknown[0])
    out_in, sizes = (product_shape(shape, "--shape"), None) if what == "products" else (None, parse_shape(shape))
    if resolve_device(None).type != "cuda":
        raise ConfigError("cuda_cuts", "a CUDA GPU", "none")
    with torch.inference_mode():
        if out_in is not None:
            for count in counts:
                show(f"{kernel}, {shape} {form}, {count} rows", cut_products(kernel, out_in, form, count))
        if sizes is not None:
            timer, layer = Timer(5.0, 25.0), RandomLayer(sizes, BF16, GPU, parse_form(form))
            limits = measure_read_gbps(GPU, timer), describe_device(GPU, BF16, timer).matrix_tflops
            for lot in of_lots:
                for count in counts:
                    show(f"lots of {lot}, {shape} {form}, {count} tokens", cut_experts(layer, lot, count, timer, limits))


if __name__ == "__main__":
    run_study(cuda_cuts)
