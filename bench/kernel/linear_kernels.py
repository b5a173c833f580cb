"""Random weights in each format, the linear kernels for them on a device, and the kernel that an engine would choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from headway.core.contract.linear import LinearKernel
from headway.core.contract.weights import MX_GROUP, Float4Weight, Float8Weight, Int4Weight, QuantizedWeight
from headway.kernels.linear.choice import ON_GPU, builtin_kernels
from headway.kernels.linear.cpu_kernels import can_pack
from headway.kernels.linear.linear import Linear
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.linear import linear_layer

_EXACT, _ROUNDED = 1e-2, 8e-2
_MOST_COPIES = 16
_CPU_CACHE = 32 << 20
"""Assumed size of a CPU's cache in bytes, which torch does not report."""


def float8(rows: int, columns: int, device: torch.device, block: tuple[int, int] | None = None) -> Float8Weight:
    """Return a random weight. block: rows and columns per scale; None means one scale per row."""
    high, wide = block or (1, columns)
    scales = torch.rand(-(-rows // high), -(-columns // wide), device=device) + 0.5
    return Float8Weight(torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn), scales, (high, wide))


def int4(rows: int, columns: int, device: torch.device) -> Int4Weight:
    """Return a random weight with groups of 128."""
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    return Int4Weight(packed, (torch.rand(rows, columns // 128, device=device) + 0.5).half(), None, 128)


def mxfp4(rows: int, columns: int, device: torch.device) -> Float4Weight:
    """Return a random weight."""
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    return Float4Weight(packed, torch.randint(120, 132, (rows, columns // MX_GROUP), dtype=torch.uint8, device=device))


FORMS: Mapping[str, Callable[[int, int, torch.device], QuantizedWeight]] = {
    "int4": int4,
    "fp8 rows": float8,
    "fp8 blocks": partial(float8, block=(128, 128)),
    "mxfp4": mxfp4,
}


@dataclass
class ProductLayers:
    """Layers of one shape and format, together larger than the device's cache."""

    shape: tuple[int, int]
    """(out_features, in_features)."""
    form: str
    weights: list[Tensor | QuantizedWeight]
    linears: list[Linear]
    dense: Tensor
    """float32 [out_features, in_features]: the first layer's dequantized weight."""
    num_bytes: int
    """Size of one weight in bytes, including its scales."""

    @classmethod
    def drawn(cls, shape: tuple[int, int], form: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> ProductLayers:
        """Return layers with random weights. form: name in FORMS or PLAIN_FORMS. dtype: element type of x."""
        plain = PLAIN_FORMS.get(form)
        cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _CPU_CACHE
        weights: list[Tensor | QuantizedWeight] = []
        while not weights or (2 * cache > len(weights) * weights[0].nbytes and len(weights) < _MOST_COPIES):
            weights.append(FORMS[form](*shape, device) if plain is None else torch.randn(*shape, device=device, dtype=plain))
        first = weights[0]
        dense = first.float() if isinstance(first, Tensor) else first.dequantized(torch.float32)
        return cls(shape, form, weights, [Linear(weight, dtype=dtype) for weight in weights], dense, first.nbytes)

    def error(self, y: Tensor, x: Tensor) -> float:
        """Return the relative error (norm) of the first layer's output. x: [rows, in_features]."""
        expected = x.float() @ self.dense.t()
        return float((y.float() - expected).norm() / expected.norm())


PLAIN_FORMS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Name of an unquantized format -> its element type."""


def tolerance(rounds: bool) -> float:
    """Return the maximum relative error (norm). rounds: True if the kernel rounds x from bfloat16 to FP8."""
    return _ROUNDED if rounds else _EXACT


Step = Callable[[Tensor, Linear], Tensor]
EXPANDED, PACKED, MM = "expanded", "packed", "torch.mm"
"""Names of kernels. EXPANDED: the weight is dequantized at load time. PACKED: torch's GEMM with a weight packed for a CPU. MM:
torch.mm with a weight that is not packed."""


@dataclass(frozen=True, slots=True)
class TimedProduct:
    """One kernel that computes x [rows, in_features] times each layer's weight."""

    name: str
    step: Step
    linears: Sequence[Linear]
    rounds: bool = False
    """True if x is rounded to FP8."""


@dataclass(frozen=True, slots=True)
class LinearCandidates:
    """All kernels for some layers."""

    of: Callable[[Tensor], Sequence[TimedProduct]]
    """Function that returns the kernels that support x."""
    chosen: Callable[[int], str] = field(default=lambda rows: "")
    """Function that returns the kernel that an engine chooses for a number of rows; "" without a choice."""
    source: str = "its form"
    """Source of the choice: measurement or heuristic."""


def candidates_of(layers: ProductLayers, dtype: torch.dtype, device: torch.device) -> LinearCandidates:
    """Return the kernels for the layers' weights. dtype: element type of x."""
    weight = layers.weights[0]
    if device.type == "cuda":
        return _on_gpu(layers, device)
    if isinstance(weight, Tensor):
        name = PACKED if can_pack(layers.linears[0].dtype) else MM
        return LinearCandidates(lambda x: [TimedProduct(name, _call, layers.linears)])
    dense = [Linear(each if isinstance(each, Tensor) else each.dequantized(dtype)) for each in layers.weights]
    timed = [TimedProduct(EXPANDED, _call, dense)]
    if layers.linears[0].reads_quantized:
        timed.insert(0, TimedProduct(PACKED, _call, layers.linears))
    return LinearCandidates(lambda x: timed, lambda rows: timed[0].name, "its form")


def _on_gpu(layers: ProductLayers, device: torch.device) -> LinearCandidates:
    """Return the engine's own kernels, chosen by cached times or the heuristic."""
    choice = builtin_kernels(device, ON_GPU).choice(layers.linears[0].spec(device))
    plain = isinstance(layers.weights[0], Tensor)
    if not plain:
        linear_layer(choice, identify_device(device)).obey(0.0)
    timed = {
        name: TimedProduct(name, _by(kernel), layers.linears, kernel.rounds_input) for name, kernel in choice.kernels.items()
    }

    def able(x: Tensor) -> list[TimedProduct]:
        return [timed[name] for name in choice.able(len(x))]

    return LinearCandidates(able) if plain else LinearCandidates(able, choice.kernel_for, choice.source)


def _by(kernel: LinearKernel) -> Step:
    """Return a step that runs one kernel, which is bound to each layer once."""
    bound: dict[Linear, Callable[..., Tensor]] = {}

    def step(x: Tensor, linear: Linear) -> Tensor:
        if linear not in bound:
            bound[linear] = linear.bound_to(kernel)
        return bound[linear](x)

    return step


def _call(x: Tensor, linear: Linear) -> Tensor:
    return linear(x)
