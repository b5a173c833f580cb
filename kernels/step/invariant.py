"""Batch-invariant operations: a row's bits depend on no other row, because every product runs in tiles of one fixed shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad, relu

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.kernels.experts.bound import BoundExperts, ExpertsLayers, ExpertsOptions
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.choice import LinearChoice
from headway.kernels.linear.forms import format_of
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import ACTIVATE, Heads, Norm, Operations, Rope, add_one_by_one, experts_by, softcap

TILE_ROWS = {"cpu": 16, "cuda": 128}
"""Rows of a product, by device. On a CPU what its weights are packed for; on a GPU about where a product that reads its weights
at the memory's rate has the matrix units busy as well, so that neither a decode nor a prompt pays more than it must."""

log = logging.getLogger("headway")
Softcap = Callable[[Tensor, float], Tensor]


class InvariantOperations:
    """Operations whose products always have the same number of rows: inputs are padded with rows of zeros.

    A library picks a product's kernel, and with it the order of its sums, by the shape: one shape is one order. Within a tile a
    row's place must not matter, which `check` tests. All other operations work row by row anyway.
    """

    def __init__(
        self,
        inner: Operations,
        rows: int,
        activate: Mapping[Activation, Callable[[Tensor], Tensor]],
        cap: Softcap,
        experts: ExpertsOptions | None = None,
    ) -> None:
        """rows: rows of every product; activate: functions of a matrix by activation; cap: as Operations.softcap; experts: see
        TorchOperations."""
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
        """As they are."""
        return norm, linear

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """Return those in which a third party's kernel takes part, which is tried at the start; nothing is chosen by times."""
        return [choice for choice in self._inner.linear_choices((linear, False) for linear, _ in products) if choice.is_open]

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """See Operations."""
        if linear.choice is not None and linear.choice.is_invariant:
            return self._inner.product(x, linear, out)
        expanded = isinstance(linear.weight, Tensor)
        tiles = self._tiles(x)
        whole = torch.cat([linear(tile) if expanded else self._inner.product(tile, linear) for tile in tiles])[: x.shape[0]]
        return whole if out is None else out.copy_(whole)  # whose last tile may be longer than what is left of `out`

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        """See Operations."""
        y = self.product(self._normed(x, norm), linear)
        return y if activation is None else self.activated(y, activation, gated=False)

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        """See Operations."""
        return self.activated(self.product(self._normed(x, norm), linear), activation, gated=True)

    def activated(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        """See Operations."""
        if not gated:
            return self._activate[activation](y)
        gate, up = y.chunk(2, dim=1)
        return self._activate[activation](gate) * up

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Operations."""
        return self._by_tile(lambda rows, turn: self._inner.norm_qkv(rows, norm, linear, heads, turn), x, rope)

    def turn_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """See Operations."""
        return self._by_tile(lambda rows, turn: self._inner.turn_heads(rows, heads, turn), qkv, rope)

    def _by_tile(
        self, step: Callable[[Tensor, Rope | None], tuple[Tensor, Tensor, Tensor]], x: Tensor, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v that a step gives of the rows of x, tile by tile."""
        tiles = self._tiles(x)
        turns: Iterable[Rope | None] = [None] * len(tiles)
        if rope is not None:
            turns = zip(self._tiles(rope[0]), self._tiles(rope[1]), strict=True)
        parts = [step(rows, turn) for rows, turn in zip(tiles, turns, strict=True)]
        q, k, v = (torch.cat([part[place] for part in parts])[: x.shape[0]] for place in range(3))
        return q, k, v

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else self.norm(x, norm)

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """See Operations."""
        return residual + self.product(x, linear)

    def add_products(self, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
        """See Operations."""
        return add_one_by_one(self, residual, terms)

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> BoundExperts:
        """See Operations. Rows do not depend on each other in Headway's own kernels; on a GPU all are in one tiling."""
        if self._experts is None:
            if weights.router.is_cuda:
                from headway.kernels.step.fused import invariant_experts

                self._experts = invariant_experts(self._experts_options, weights.router.device)
            else:
                self._experts = experts_by(self, self._experts_options, self._activate["silu"])
        return self._experts.bind(config, weights, norm)

    def _tiles(self, x: Tensor) -> Sequence[Tensor]:
        """x: [rows, ...]. At least one tile, for a step may sample no row at all; copies, which begin at aligned addresses."""
        missing = -x.shape[0] % self._rows if x.shape[0] else self._rows
        return torch.split(pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)), self._rows)

    def check(self, linears: Iterable[Linear]) -> None:
        """Try one product of each shape and form: rows moved within a tile, and a row among zeros, must keep their bits.

        :raises ModelError: they do not on this machine, with these libraries and threads.
        """
        tried = {(linear.in_features, linear.out_features, _form(linear)): linear for linear in linears}
        for (in_features, out_features, form), linear in tried.items():
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(self._rows, in_features, generator=generator).to(linear.device, linear.dtype)
            y = self.product(x, linear)
            moved = all(torch.equal(self.product(x.roll(by, 0), linear), y.roll(by, 0)) for by in (1, self._rows // 2 + 1))
            if not moved or not torch.equal(self.product(x[-1:], linear), y[-1:]):
                raise ModelError(
                    f"deterministic: needs products whose rows have the same bits wherever they stand, got others from "
                    f"{self._rows} x {in_features} times {in_features} x {out_features} ({form}) in {x.dtype} on {x.device.type} "
                    f"with torch {torch.__version__}: try another --dtype, --device or --num-threads"
                )


def _form(linear: Linear) -> str:
    """What the layer's product reads, in words."""
    if isinstance(linear.weight, Tensor):
        return "packed of fewer bits" if linear.reads_quantized else "plain"
    return str(format_of(linear.weight))


def silu_by_exp(x: Tensor) -> Tensor:
    """SiLU on a CPU, where torch's own takes another exponential for what is left over at the end of a thread's share."""
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def gelu_by_exp(x: Tensor) -> Tensor:
    """GELU's approximation by tanh on a CPU, for the same reason: (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y))."""
    wide = x.float()
    return (wide / (1 + torch.exp(-1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)))).to(x.dtype)


def gelu_in_double(x: Tensor) -> Tensor:
    """GELU on a CPU: what is left over differs in the last bits of float64, which the rounding drops."""
    return gelu(x.double()).to(x.dtype)


def softcap_by_exp(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap) in place, on a CPU: tanh(y) = 1 - 2 / (1 + exp(2 y))."""
    return logits.copy_(cap - 2 * cap / (1 + torch.exp(logits.float() * (2 / cap))))


ON_CPU: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu_by_exp,
    "gelu": gelu_in_double,
    "gelu_tanh": gelu_by_exp,
    "relu": relu,
    "relu2": ACTIVATE["relu2"],
}
"""Activations whose bits are the same wherever an element lies."""


def invariant_operations(
    operations: Operations, linears: Iterable[Linear], device: torch.device, experts: ExpertsOptions | None = None
) -> Operations:
    """Wrap operations of a device so that the rows of the given products keep their bits.

    Products over quantised weights have one way each, by the rule for a tile's rows, whatever times are kept; the log names it.

    :raises ModelError: a product's rows depend on their place (`InvariantOperations.check`).
    """
    activate, cap = (ON_CPU, softcap_by_exp) if device.type == "cpu" else (ACTIVATE, softcap)
    linears, rows = list(linears), TILE_ROWS[device.type]
    invariant = InvariantOperations(operations, rows, activate, cap, experts)
    kinds = operations.linear_choices((linear, False) for linear in linears)
    invariant.check(linears)
    for kind in kinds:
        tile = "any number of rows" if kind.is_invariant else f"every tile of {rows} rows"
        log.info("deterministic: products %s by %s, for %s", kind.name, kind.kernel_for(rows), tile)
    return invariant
