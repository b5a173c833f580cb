"""The ways of multiplying over weights of one form on one device, and which of them an engine takes for how many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.bench.kernel.product_layers import ProductLayers
from headway.kernels.linear.linear import Linear, can_pack, reads_as_it_is
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.products import obey_kept

Step = Callable[[Tensor, Linear], Tensor]
EXPANDED, PACKED, MM = "expanded", "packed", "torch.mm"
"""The weight expanded once, when it is loaded; torch's product over a weight packed for a CPU; and over one as it lies."""


@dataclass(frozen=True, slots=True)
class TimedProduct:
    """One way of computing x [rows, in_features] times each layer's weight."""

    name: str
    step: Step
    linears: Sequence[Linear]
    rounds: bool = False
    """Whether x is rounded to floats of 8 bits."""


@dataclass(frozen=True, slots=True)
class ProductWays:
    """All ways of some layers."""

    of: Callable[[Tensor], Sequence[TimedProduct]]
    """The ways that compute products of x."""
    chosen: Callable[[int], str] = field(default=lambda rows: "")
    """The name of the one that an engine takes for so many rows; "": there is nothing to choose."""
    source: str = "its form"
    """Whose word that is."""


def ways_of(layers: ProductLayers, dtype: torch.dtype, device: torch.device) -> ProductWays:
    """Find what multiplies over the layers' weights. dtype: of x."""
    weight = layers.weights[0]
    if isinstance(weight, Tensor):
        return _plain(layers, device)
    if device.type == "cuda" and reads_as_it_is(weight, dtype, device):
        return _on_gpu(layers, dtype, device)
    dense = [Linear(each if isinstance(each, Tensor) else each.dequantized(dtype)) for each in layers.weights]
    ways = [TimedProduct(EXPANDED, _alone, dense)]
    if reads_as_it_is(weight, dtype, device):
        ways.insert(0, TimedProduct(PACKED, _alone, layers.linears))
    return ProductWays(lambda x: ways, lambda rows: ways[0].name, "its form")


def _plain(layers: ProductLayers, device: torch.device) -> ProductWays:
    """Weights that are not quantised."""
    if device.type == "cpu":
        name = PACKED if can_pack(layers.linears[0].dtype) else MM
        return ProductWays(lambda x: [TimedProduct(name, _alone, layers.linears)])
    ways = [TimedProduct(MM, _alone, layers.linears)]
    try:
        from headway.kernels.linear.product_kernels import FewRows
    except ImportError:
        return ProductWays(lambda x: ways)
    few = FewRows(device)
    ours = TimedProduct("few_rows", few, layers.linears)
    return ProductWays(lambda x: [*ways, ours] if few.takes(x, layers.linears[0]) else ways)


def _on_gpu(layers: ProductLayers, dtype: torch.dtype, device: torch.device) -> ProductWays:
    """The engine's own: kept times choose among them, or the rule."""
    from headway.kernels.linear.quantized_ways import QuantizedWays

    quantized = QuantizedWays(device)
    kind = quantized.kind(layers.linears[0], dtype)
    assert kind is not None
    obey_kept(kind, identify_device(device))
    ways = {name: TimedProduct(name, way, layers.linears, way.rounds) for name, way in quantized.ways.items()}
    return ProductWays(lambda x: [ways[name] for name in kind.able(len(x))], kind.way_for, kind.source)


def _alone(x: Tensor, linear: Linear) -> Tensor:
    return linear(x)
