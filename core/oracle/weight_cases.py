"""float64 references for linear and MoE layers, and random cases for testing kernels.

The references follow the definitions of the weights' fields element by element, and share no code with the kernels or the
contract.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig, ExpertsWeights
from headway.core.contract.linear import LinearParts
from headway.core.contract.weights import FP4_VALUES, MX_GROUP, Float4Weight, Float8Weight, Int4Weight, Int8Weight, Weight

NUMBERS = ("normal", "mean", "uneven", "large", "tiny")
"""Regimes of random numbers. mean: most terms are positive, so sums grow. uneven: scales and rows of x differ by powers of two.
large, tiny: x is multiplied by a large or small power of two."""
WEIGHTS = (
    *("plain", "int8", "mxfp4", "fp8-rows", "fp8-tensor", "fp8-128x128"),
    *(f"int4-{size}{zeros}{order}" for size in (128, 64, 32) for zeros in ("", "-zeros") for order in ("", "-order")),
)
"""Weight formats for testing kernels. Each consists of a name in FORMATS and variants: the block or group that shares a scale,
zero points, and reordered columns."""


@dataclass(frozen=True)
class Drawn:
    """Generator of random numbers of one regime, on the CPU."""

    generator: torch.Generator
    numbers: str = NUMBERS[0]
    most: int = 6
    """Maximum exponent of the power of two by which the regimes `uneven`, `large` and `tiny` scale numbers."""

    def normal(self, *shape: int) -> Tensor:
        """Return normally distributed float32 numbers; in the regime `mean`, mostly positive numbers."""
        drawn = torch.randn(shape, generator=self.generator)
        return 0.5 * drawn + 1.0 if self.numbers == "mean" else drawn

    def whole(self, least: int, end: int, *shape: int) -> Tensor:
        """Return integers from `least` to `end` - 1; in the regime `mean`, only from the upper half of this range."""
        return torch.randint((least + end) // 2 if self.numbers == "mean" else least, end, shape, generator=self.generator)

    def powers(self, *shape: int) -> Tensor:
        """Return exponents of 2. They are 0, or in the regime `uneven` from -most to most."""
        most = self.most if self.numbers == "uneven" else 0
        return torch.randint(-most, most + 1, shape, generator=self.generator)

    def scales(self, size: float, *shape: int) -> Tensor:
        """Return random float32 scales near `size`; in the regime `uneven`, also multiplied by powers of two."""
        return size * (0.5 + torch.rand(shape, generator=self.generator)) * 2.0 ** self.powers(*shape)

    def rows(self, count: int, size: int) -> Tensor:
        """Return the rows of x, float32 [count, size]."""
        factor = {"large": 2.0 ** (self.most - 1), "tiny": 2.0**-self.most}.get(self.numbers, 1.0)
        return self.normal(count, size) * 2.0 ** self.powers(count, 1) * factor


def make_weight(name: str, shape: tuple[int, int], dtype: torch.dtype, drawn: Drawn) -> Weight:
    """Return a random weight in the format `name` (see WEIGHTS), on the CPU, with rows of about unit length. dtype: dtype of a
    plain weight."""
    kind, *words = name.split("-")
    (n, k), size = shape, shape[1] ** -0.5
    if kind == "plain":
        plain: Tensor = drawn.normal(n, k) * size * 2.0 ** drawn.powers(n, 1)
        return plain.to(dtype)
    if kind == "int8":
        return Int8Weight((drawn.whole(-127, 128, n, k)).to(torch.int8), drawn.scales(size / 73, n))
    if kind == "fp8":
        block = {"rows": (1, k), "tensor": (n, k), "128x128": (128, 128)}[words[0]]
        scales = drawn.scales(size, -(-n // block[0]), -(-k // block[1]))
        return Float8Weight(drawn.normal(n, k).to(torch.float8_e4m3fn), scales, block)
    group = MX_GROUP if kind == "mxfp4" else int(words[0])
    codes = drawn.whole(0, 8 if kind == "mxfp4" and drawn.numbers == "mean" else 16, n, k // group, 2, group // 2)
    packed = (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1).to(torch.uint8)
    if kind == "mxfp4":
        exponents = 125 + torch.tensor(size).log2().round().int() + drawn.powers(n, k // group)
        return Float4Weight(packed, exponents.to(torch.uint8))
    zeros = torch.randint(0, 11, (n, k // group), generator=drawn.generator).to(torch.uint8) if "zeros" in words else None
    order = torch.randperm(k, generator=drawn.generator).int() if "order" in words else None
    scales = drawn.scales(size / 5, n, k // group).to(torch.float32 if dtype == torch.float32 else dtype)
    return Int4Weight(packed, scales, zeros, group, order)


@lru_cache(maxsize=4)
def dequantized(weight: Weight) -> Tensor:
    """Return a weight in float64 on the CPU, [N, K], with columns in the order of the inputs."""
    weight = on_device(weight, torch.device("cpu"))
    if isinstance(weight, Tensor):
        return weight.double()
    rows, columns = torch.arange(weight.shape[0])[:, None], torch.arange(weight.shape[1])
    if isinstance(weight, Int8Weight):
        return weight.values.double() * weight.scales.double()[rows]
    if isinstance(weight, Float8Weight):
        return weight.values.double() * weight.scales.double()[rows // weight.block[0], columns // weight.block[1]]
    assert isinstance(weight, Float4Weight | Int4Weight)
    size = MX_GROUP if isinstance(weight, Float4Weight) else weight.group_size
    group, place = columns // size, columns % size
    codes = weight.packed[:, group * (size // 2) + place % (size // 2)].long() >> 4 * (place >= size // 2) & 15
    if isinstance(weight, Float4Weight):
        return torch.tensor(FP4_VALUES, dtype=torch.float64)[codes] * 2.0 ** (weight.exponents.double()[rows, group] - 127)
    zeros = 8 if weight.zeros is None else weight.zeros.long()[rows, group]
    values = (codes - zeros) * weight.scales.double()[rows, group]
    return values if weight.order is None else torch.zeros_like(values).index_copy_(1, weight.order.long(), values)


def on_device(given: Any, device: torch.device) -> Any:
    """Return a copy of a weight, or of expert weights, with all tensors on `device`."""
    if isinstance(given, Tensor):
        return given.to(device, copy=True)
    if not is_dataclass(given):
        return given
    return replace(given, **{each.name: on_device(getattr(given, each.name), device) for each in fields(given)})  # type: ignore[type-var]


def tensors_of(given: Any) -> list[Tensor]:
    """Return the tensors of a weight, or of expert weights."""
    if isinstance(given, Tensor):
        return [given]
    parts = [getattr(given, each.name) for each in fields(given)] if is_dataclass(given) else []
    return [tensor for part in parts for tensor in tensors_of(part)]


@dataclass(frozen=True)
class WeightCase:
    """One call of a linear or MoE kernel, with the expected result."""

    weight: Any
    """`Weight` of a linear layer, or `ExpertsWeights` of an MoE layer."""
    given: tuple[Tensor, ...]
    """Arguments of `apply` before the weight: (x,) or (x, experts, scores)."""
    onto: Tensor | None
    """Content of `out` before the call. None if the call overwrites `out`."""
    right: Tensor
    """float64 [rows, out_features]: expected content of `out` after the call."""
    spread: Tensor
    """float64 [rows, out_features]: expected magnitude of random sums with these operands. Errors are divided by it."""
    config: ExpertsConfig | None = None
    """Configuration of an MoE layer. None for a linear layer."""
    parts: LinearParts | None = None
    """Operations that a linear kernel fuses with the GEMM. None means only the GEMM."""

    def call(self, kernel: Any, prepared: Any, out: Tensor) -> None:
        """Call the kernel with this case's arguments."""
        if self.parts is None:
            kernel.apply(*(*self.given, prepared, out))
        else:
            kernel.apply_fused(*self.given, prepared, self.parts, out)

    def subset(self, rows: Tensor) -> WeightCase:
        """Return the case limited to some rows. rows: int64 indices."""
        onto, on = self.onto, rows.to(self.given[0].device)
        given = tuple(each[on] for each in self.given)
        return replace(
            self, given=given, onto=None if onto is None else onto[on], right=self.right[rows], spread=self.spread[rows]
        )


def linear_case(weight: Weight, x: Tensor, device: torch.device) -> WeightCase:
    """Return the case of a linear layer on a device. weight, x: tensors on the CPU, where the reference is computed."""
    own, rows = dequantized(weight), x.double()
    right = rows @ own.t()
    spread = (rows.square() @ own.square().t() + right.square()).sqrt()
    return WeightCase(on_device(weight, device), (x.to(device),), None, right, spread)


EPS = 1e-5


def fused_case(weight: Weight, x: Tensor, around: str, layer: Drawn, drawn: Drawn, device: torch.device) -> WeightCase:
    """Return the case of a GEMM on a device with one fused operation. around: name in FUSED; "gated" includes SiLU.

    layer: generator for the layer's parameters (norm factors, bias), which are the same for every call. drawn: generator for the
    residual stream.
    """
    (rows, _), n, dtype = x.shape, weight.shape[0], x.dtype
    normed, bias, onto, parts = x.double(), None, None, LinearParts()
    if around == "norm":
        factors = 1.0 + 0.1 * layer.normal(x.shape[1])
        parts = LinearParts(factors.to(device), EPS)
        normed = normed * (normed.square().mean(1, keepdim=True) + EPS).rsqrt() * factors.double()
    elif around == "bias":
        bias = layer.normal(n).to(dtype)
        parts = LinearParts(bias=bias.to(device))
    elif around == "residual":
        onto = drawn.normal(rows, n).to(dtype)
        parts = LinearParts(residual=True)
    else:
        parts = LinearParts(activation="silu", gated=around == "gated")
    case = linear_case(weight, normed, device)
    right, spread = case.right, case.spread
    if bias is not None or onto is not None:
        added = bias if onto is None else onto
        assert added is not None
        right, spread = right + added.double(), (spread.square() + added.double().square()).sqrt()
    elif around != "norm":
        right, low = right * right.sigmoid(), right
        spread = 1.1 * spread + right.abs()
        if around == "gated":
            high, wide = low[:, n // 2 :], case.spread[:, n // 2 :]
            spread = spread[:, : n // 2] * high.abs() + right[:, : n // 2].abs() * wide + spread[:, : n // 2] * wide
            right = right[:, : n // 2] * high
    placed = None if onto is None else onto.to(device)
    return replace(case, given=(x.to(device),), onto=placed, right=right, spread=spread, parts=parts)


def experts_case(
    config: ExpertsConfig, weights: ExpertsWeights, given: tuple[Tensor, Tensor, Tensor], onto: Tensor, device: torch.device
) -> WeightCase:
    """Return the case of an MoE layer over routed rows on a device; see `ExpertsKernel.apply`.

    weights, given, onto: tensors on the CPU, where the reference is computed. given: (x, experts, scores).
    """
    right, (x, experts, scores) = onto.double(), given
    ups, downs = (dequantized_experts(each, config.num_all) for each in (weights.gate_up, weights.down))
    for expert in experts.unique().tolist():
        tokens, slots = (experts == expert).nonzero(as_tuple=True)
        up = x[tokens].double() @ ups[expert].t() + _bias(weights.gate_up_bias, expert)
        out = activated(up, config) @ downs[expert].t() + _bias(weights.down_bias, expert)
        right.index_add_(0, tokens, out * scores[tokens, slots, None].double())
    spread = right.square().mean(1, keepdim=True).sqrt().expand_as(right)
    placed = [each.to(device) for each in (*given, onto)]
    return WeightCase(on_device(weights, device), tuple(placed[:3]), placed[3], right, spread, config)


def dequantized_experts(weight: Weight, count: int) -> Tensor:
    """Return the weights of all experts in float64, [count, N, K]."""
    return dequantized(weight) if isinstance(weight, Tensor) else dequantized(weight).view(count, -1, weight.shape[1])


def _bias(biases: Tensor | None, expert: int) -> Tensor | float:
    return 0.0 if biases is None else biases[expert].double()


def activated(hidden: Tensor, config: ExpertsConfig) -> Tensor:
    """Return an expert's hidden values after the activation between its two GEMMs. hidden: float64 [rows, up_size]."""
    if not config.gated:
        return hidden.clamp(min=0.0).square()
    low, high = hidden.chunk(2, dim=1)
    if config.swiglu_limit is not None:
        low, high = low.clamp(max=config.swiglu_limit), high.clamp(-config.swiglu_limit, config.swiglu_limit) + 1.0
    return low * torch.sigmoid(config.swiglu_alpha * low) * high
