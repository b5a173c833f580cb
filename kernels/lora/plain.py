"""What adapters add to a product by torch's own operations, adapter by adapter: for a CPU, and to test the kernels against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.core.contract.adapters import NO_ADAPTER
from headway.kernels.lora.bank import AdaptedProduct
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Norm


class PlainAdditions:
    """Adds to rows that have an adapter, and to no others. The host looks at the rows' slots, so that no graph can hold it."""

    def __init__(self, tile_rows: int | None = None) -> None:
        """tile_rows: rows of every product, so that a row's bits depend on no other (see `InvariantOperations`); None: any."""
        self._tile_rows = tile_rows

    def normed(self, x: Tensor, norm: Norm, product: AdaptedProduct, slots: Tensor) -> None:
        """See Additions: left to the operations."""
        return

    def add(self, y: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor, low: object = None) -> Tensor:
        """Return y with what each row's adapter adds, in place.

        y: [rows, out_features]; x: [rows, in_features], the product's input; slots: int32 [rows].
        """
        for slot in sorted(set(slots.tolist()) - {NO_ADAPTER}):
            rows = (slots == slot).nonzero().squeeze(1)
            low = self._multiplied(x.index_select(0, rows), product.a[slot])
            for start, end, module in product.parts:
                first = module * product.rank
                own = self._multiplied(low[:, first : first + product.rank], product.b[slot, start:end])
                y[:, start:end].index_add_(0, rows, own)
        return y

    def joined(self, both: Tensor, product: AdaptedProduct, slots: Tensor, add_to: Tensor | None = None) -> Tensor:
        """See Additions."""
        size, rank = product.out_features, product.rank
        y = both[:, :size].clone()
        lows = both[:, size:].reshape(len(both), *product.a.shape[:2])
        for slot in sorted(set(slots.tolist()) - {NO_ADAPTER}):
            rows = (slots == slot).nonzero().squeeze(1)
            for start, end, module in product.parts:
                low = lows[rows, slot, module * rank : (module + 1) * rank]
                y[:, start:end].index_add_(0, rows, self._multiplied(low, product.b[slot, start:end]))
        return y if add_to is None else add_to.add_(y)

    def joined_activated(self, both: Tensor, product: AdaptedProduct, slots: Tensor, activation: Activation) -> None:
        """See Additions: left to the operations."""
        return

    def activated(
        self, both: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor, activation: Activation, low: object = None
    ) -> None:
        """See Additions: left to the operations."""
        return

    def _multiplied(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, k] times weight [n, k]: [rows, n]."""
        size = self._tile_rows
        if size is None:
            return torch.mm(x, weight.t())
        tiles = torch.split(pad(x, (0, 0, 0, -len(x) % size)), size)
        return torch.cat([torch.mm(tile, weight.t()) for tile in tiles])[: len(x)]
