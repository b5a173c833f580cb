"""Batch-invariant operations (deterministic mode): a row's bits do not depend on other rows.

On a GPU, the linear kernel `invariant` runs half-precision weights with any number of rows, inside the usual operations. For all
other weights, every GEMM has a fixed number of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad, relu

from headway.core.contract.errors import BackendError, ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.weights import WeightFormat
from headway.kernels.experts.bound import Experts, ExpertsLayers, ExpertsOptions
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.choice import INVARIANT, LinearChoice
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import ACTIVATE, Activation
from headway.kernels.step.operations import Heads, Norm, Operations, Rope
from headway.kernels.step.torch_operations import experts_by

TILE_ROWS = {"cpu": 16, "cuda": 128}
"""Device type -> number of rows of each GEMM.

On a CPU, weights are packed for this number of rows. On a GPU, a GEMM with about this number of rows is limited equally by memory
bandwidth and by the tensor cores, so neither decode nor prefill takes longer than necessary.
"""

log = logging.getLogger("headway")
Softcap = Callable[[Tensor, float], Tensor]


class InvariantOperations:
    """Operations whose GEMMs always have the same number of rows. Inputs are padded with rows of zeros.

    A library selects a GEMM kernel, and therefore the order of summation, by the shape of the GEMM. With one shape, the order is
    always the same. A row's position in a tile must not change its result, which `check` tests. All other operations compute each
    row independently anyway.
    """

    def __init__(
        self,
        inner: Operations,
        rows: int,
        activate: Mapping[Activation, Callable[[Tensor], Tensor]],
        cap: Softcap,
        experts: ExpertsOptions | None = None,
    ) -> None:
        """Wrap `inner`.

        rows: number of rows of every GEMM. activate: function for each activation. cap: function that replaces
        `Operations.softcap`. experts: as in `TorchOperations`.
        """
        self._inner = inner
        self._experts_options = replace(experts or ExpertsOptions(), invariant=True)
        self._experts: ExpertsLayers | None = None
        self._rows = rows
        self._activate = activate
        self.rotate_latent = inner.rotate_latent
        self.latent_layer = inner.latent_layer
        self.gate = inner.gate
        self.embed = inner.embed
        self.norm = inner.norm
        self.add_norm = inner.add_norm
        self.softcap = cap

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """Return the arguments unchanged."""
        return norm, linear

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """Return the choices that have a third-party kernel as a candidate, so that it is tried at startup. Measured times are
        not used.
        """
        return [choice for choice in self._inner.linear_choices((linear, False) for linear, _ in products) if choice.is_open]

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """Return the linear layer's output, computed in tiles of a fixed number of rows."""
        if linear.choice is not None and linear.choice.is_invariant:
            return self._inner.product(x, linear, out)
        expanded = isinstance(linear.weight, Tensor)
        tiles = self._tiles(x)
        whole = torch.cat([linear(tile) if expanded else self._inner.product(tile, linear) for tile in tiles])[: x.shape[0]]
        return whole if out is None else out.copy_(whole)  # the last tile may be longer than what is left of `out`

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        """Return the result of norm, linear layer and activation, computed in tiles."""
        y = self.product(self._normed(x, norm), linear)
        return y if activation is None else self.activated(y, activation, gated=False)

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        """Return the result of norm and gated linear layer, computed in tiles."""
        return self.activated(self.product(self._normed(x, norm), linear), activation, gated=True)

    def activated(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        """Return the activation of y or, if gated, the activation of its first half times its second half."""
        if not gated:
            return self._activate[activation](y)
        gate, up = y.chunk(2, dim=1)
        return self._activate[activation](gate) * up

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, computed in tiles."""
        return self._by_tile(lambda rows, tile_rope: self._inner.norm_qkv(rows, norm, linear, heads, tile_rope), x, rope)

    def rotate_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of a linear layer's output, normed and rotated in tiles."""
        return self._by_tile(lambda rows, tile_rope: self._inner.rotate_heads(rows, heads, tile_rope), qkv, rope)

    def _by_tile(
        self, step: Callable[[Tensor, Rope | None], tuple[Tensor, Tensor, Tensor]], x: Tensor, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply `step` to x in tiles of rows, and return the concatenated q, k and v."""
        tiles = self._tiles(x)
        tile_ropes: Iterable[Rope | None] = [None] * len(tiles)
        if rope is not None:
            tile_ropes = zip(self._tiles(rope[0]), self._tiles(rope[1]), strict=True)
        parts = [step(rows, tile_rope) for rows, tile_rope in zip(tiles, tile_ropes, strict=True)]
        q, k, v = (torch.cat([part[place] for part in parts])[: x.shape[0]] for place in range(3))
        return q, k, v

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else self.norm(x, norm)

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """Return residual + linear layer, computed in tiles."""
        return residual + self.product(x, linear)

    def add_products(self, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
        """Return residual + the linear layers, added one by one."""
        return Operations.add_products(self, residual, terms)

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> Experts:
        """Bind a layer of experts. Headway's kernels compute rows independently. On a GPU, the tile sizes are the same for any
        number of tokens."""
        if weights.router.is_cuda:
            return self._inner.experts(config, weights, norm)
        if self._experts is None:
            self._experts = experts_by(self, self._experts_options, self._activate["silu"])
        return self._experts.bind(config, weights, norm)

    def _tiles(self, x: Tensor) -> Sequence[Tensor]:
        """Split x [rows, ...] into padded, aligned copies of tiles. At least one tile is returned, since a step may sample no
        rows."""
        missing = -x.shape[0] % self._rows if x.shape[0] else self._rows
        return torch.split(pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)), self._rows)

    def check(self, linears: Iterable[Linear]) -> None:
        """Try one GEMM per shape and weight format. A row must keep its bits if rows move within a tile, and if all other rows
        are zeros.

        :raises ModelError: if a row's bits change on this machine, with these libraries and this number of threads.
        """
        tried = {(linear.in_features, linear.out_features, _form(linear)): linear for linear in linears}
        for (in_features, out_features, form), linear in tried.items():
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(self._rows, in_features, generator=generator).to(linear.device, linear.dtype)
            y = self.product(x, linear)
            moved = all(torch.equal(self.product(x.roll(by, 0), linear), y.roll(by, 0)) for by in (1, self._rows // 2 + 1))
            if not moved or not torch.equal(self.product(x[-1:], linear), y[-1:]):
                choice = linear.choice
                if choice is not None and choice.is_invariant:
                    raise BackendError(
                        f"linear kernel {choice.kernel_for(1)}: needs rows whose bits do not depend on the others "
                        f"(batch_invariant), got others for {choice.name}"
                    )
                raise ModelError(
                    f"deterministic: needs products whose rows have the same bits wherever they stand, got others from "
                    f"{self._rows} x {in_features} times {in_features} x {out_features} ({form}) in {x.dtype} on {x.device.type} "
                    f"with torch {torch.__version__}: try another --dtype, --device or --num-threads"
                )


def _form(linear: Linear) -> str:
    """Return a description of the format of the weight that a layer reads."""
    if isinstance(linear.weight, Tensor):
        return "packed of fewer bits" if linear.reads_quantized else "plain"
    return str(WeightFormat.of(linear.weight))


def silu_by_exp(x: Tensor) -> Tensor:
    """Return SiLU on a CPU. torch's SiLU computes the exponential differently for the last elements of each thread's range."""
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def gelu_by_exp(x: Tensor) -> Tensor:
    """Return GELU (tanh approximation) on a CPU. Like in `silu_by_exp`, the factor (1 + tanh(y)) / 2 is computed as 1 / (1 +
    exp(-2 y))."""
    wide = x.float()
    return (wide / (1 + torch.exp(-1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)))).to(x.dtype)


def gelu_in_double(x: Tensor) -> Tensor:
    """Return GELU on a CPU, computed in float64. The last bits, which may depend on an element's position, vanish when the result
    is rounded."""
    return gelu(x.double()).to(x.dtype)


def softcap_by_exp(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), in place, on a CPU: tanh(y) = 1 - 2 / (1 + exp(2 y))."""
    return logits.copy_(cap - 2 * cap / (1 + torch.exp(logits.float() * (2 / cap))))


ON_CPU: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu_by_exp,
    "gelu": gelu_in_double,
    "gelu_tanh": gelu_by_exp,
    "relu": relu,
    "relu2": ACTIVATE["relu2"],
}
"""Activation -> implementation whose result for an element does not depend on the element's position."""


def invariant_operations(
    operations: Operations, linears: Iterable[Linear], device: torch.device, experts: ExpertsOptions | None = None
) -> Operations:
    """Wrap a device's operations so that rows of the given linear layers have the same bits in any batch.

    On a GPU, the operations stay as they are if INVARIANT computes all layers. Each quantized layer uses one kernel. The rule
    selects it for the number of rows of a tile, regardless of cached times, and the log names it.

    :raises ModelError: if a row's bits depend on its position in a GEMM (`InvariantOperations.check`).
    """
    activate, cap = (ON_CPU, softcap_by_exp) if device.type == "cpu" else (ACTIVATE, operations.softcap)
    linears, rows = list(linears), TILE_ROWS[device.type]
    kinds = operations.linear_choices((linear, False) for linear in linears)
    own = [linear for linear in linears if linear.choice is not None and [*linear.choice.serving()] == [INVARIANT]]
    if own:
        check_counts(operations, min(own, key=lambda linear: linear.in_features * linear.out_features))
    if len(own) == len(linears):
        log.info("deterministic: linear layers use %s for any number of rows", INVARIANT)
        return operations
    invariant = InvariantOperations(operations, rows, activate, cap, experts)
    invariant.check(linear for linear in linears if linear not in own)
    for kind in kinds:
        tile = "any number of rows" if kind.is_invariant else f"every tile of {rows} rows"
        log.info("deterministic: linear %s uses %s for %s", kind.name, kind.kernel_for(rows), tile)
    return invariant


def check_counts(operations: Operations, linear: Linear) -> None:
    """Compute one layer with various numbers of rows, whose tiles differ.

    :raises ModelError: if a row's bits depend on the number of rows.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, linear.in_features, generator=generator).to(linear.device, linear.dtype)
    y = operations.product(x, linear)
    for count in (1, 17, 33, 65):
        different = int((operations.product(x[-count:].contiguous(), linear) != y[-count:]).sum())
        if different:
            raise ModelError(
                f"deterministic: needs the same bits from {INVARIANT} for any number of rows, got {different} others for {count} "
                f"of 300 rows of {linear.in_features}x{linear.out_features} in {x.dtype} on {x.device}"
            )
