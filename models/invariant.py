"""Operations whose rows keep their bits whatever the other rows and their number: every product in tiles of a fixed shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from headway.core.contract.errors import ModelError
from headway.models.device_operations import operations_for
from headway.models.linear import Linear
from headway.models.operations import Heads, Norm, Operations, Rope

TILE_ROWS = {"cpu": 16, "cuda": 128}
"""Rows of a product, by device. On a CPU what its weights are packed for; on a GPU about where a product that reads its weights
at the memory's rate has the matrix units busy as well, so that neither a decode nor a prompt pays more than it must."""


class InTiles:
    """Another's operations, with products of always the same number of rows, the last ones zero.

    A library picks a product's kernel, and with it the order of its sums, by the shape: one shape is one order. Within a tile a
    row's place must not matter; `check` makes sure. What is no product goes row by row anyway.
    """

    def __init__(self, inner: Operations, rows: int, gate: Callable[[Tensor], Tensor]) -> None:
        """rows: of every product; gate: SiLU of a matrix."""
        self._inner = inner
        self._rows = rows
        self._gate = gate
        self.embed, self.norm = inner.embed, inner.norm

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """As they are."""
        return norm, linear

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """See Operations."""
        whole = torch.cat([linear(tile) for tile in self._tiles(x)])[: x.shape[0]]
        return whole if out is None else out.copy_(whole)  # whose last tile may be longer than what is left of `out`

    def norm_qkv(self, x: Tensor, norm: Norm, linear: Linear, heads: Heads, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """See Operations."""
        tiles = zip(*map(self._tiles, (x, *rope)), strict=True)
        parts = [self._inner.norm_qkv(rows, norm, linear, heads, (cos, sin)) for rows, cos, sin in tiles]
        q, k, v = (torch.cat(tensors)[: x.shape[0]] for tensors in zip(*parts, strict=True))
        return q, k, v

    def norm_gated_product(self, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """See Operations."""
        gate, up = self.product(self.norm(x, norm), linear).chunk(2, dim=1)
        return self._gate(gate) * up

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """See Operations."""
        return residual + self.product(x, linear)

    def _tiles(self, x: Tensor) -> Sequence[Tensor]:
        """x: [rows, ...]. At least one tile, for a step may sample no row at all; copies, which begin at aligned addresses."""
        missing = -x.shape[0] % self._rows if x.shape[0] else self._rows
        return torch.split(pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)), self._rows)

    def check(self, linears: Iterable[Linear]) -> None:
        """Try one product of each shape: rows moved within a tile, and a row among zeros, must keep their bits.

        :raises ModelError: they do not on this machine, with these libraries and threads.
        """
        shapes = {(linear.in_features, linear.out_features): linear for linear in linears}
        for (in_features, out_features), linear in shapes.items():
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(self._rows, in_features, generator=generator).to(linear.weight)
            y = self.product(x, linear)
            moved = all(torch.equal(self.product(x.roll(by, 0), linear), y.roll(by, 0)) for by in (1, self._rows // 2 + 1))
            if not moved or not torch.equal(self.product(x[-1:], linear), y[-1:]):
                raise ModelError(
                    f"deterministic: needs products whose rows have the same bits wherever they stand, got others from "
                    f"{self._rows} x {in_features} times {in_features} x {out_features} in {x.dtype} on {x.device.type} "
                    f"with torch {torch.__version__}: try another --dtype, --device or --num-threads"
                )


def silu_by_exp(x: Tensor) -> Tensor:
    """SiLU on a CPU, where torch's own takes another exponential for what is left over at the end of a thread's share."""
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def invariant_operations(inv_freq: Tensor, rope_factor: float, linears: Iterable[Linear]) -> Operations:
    """As `operations_for`, with rows that keep their bits in the products named.

    inv_freq: float32 [head_dim / 2], on the model's device.

    :raises ModelError: see `InTiles.check`.
    """
    device = inv_freq.device.type
    gate = silu_by_exp if device == "cpu" else silu
    tiles = InTiles(operations_for(inv_freq, rope_factor), TILE_ROWS[device], gate)
    tiles.check(linears)
    return tiles
