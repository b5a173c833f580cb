"""Launches of the kernels that add what adapters say to products: two for a product, whatever the number of adapters."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.backends.triton.launch import FixedLauncher, Workspace
from headway.backends.triton.layer import INTERPRETED
from headway.core.contract.errors import ModelError
from headway.models.config import Activation
from headway.models.lora.bank import AdaptedProduct, AdapterBank
from headway.models.lora.kernels import expand_gated, expand_rows, shrink_rows

_BLOCK_M = 64
"""Rows of a tile, whatever their number, so that a row's bits do not depend on it."""
_MOST_SPLITS = 16
_FEWEST_COLUMNS = 512
"""Columns that a program of `shrink_rows` sums over at least: with few rows the slots and splits are all that fills the GPU."""
_MOST_SHRUNK = 64
_WIDE = 128
"""Columns that one product of `expand_rows` sums over: the ranks of several slots, or a part of one's."""
_BLOCK_N = 128
_BLOCK_K = 128
_FEWEST = 16
"""Columns that a program serves at least."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class FusedAdditions:
    """Additions by our kernels. No call synchronises or looks at values, so that graphs hold them.

    The cut of a product follows from its shape alone: a row's bits are the same in any batch.
    """

    def __init__(self, device: torch.device, bank: AdapterBank) -> None:
        """:raises ModelError: a product whose modules do not begin at multiples of what a kernel's program serves."""
        self._device = device
        self._sums = Workspace(device)
        self._launchers: dict[Hashable, FixedLauncher] = {}
        self._modules: dict[tuple[AdaptedProduct, int], Tensor] = {}
        self._blocks = {product: _block_n(product) for product in bank.products.values()}

    def add(self, y: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor) -> Tensor:
        """See Additions. Two launches."""
        rows = x.shape[0]
        if rows:
            sums, splits = self._shrink(x, product, slots)
            block = self._blocks[product][0]
            launch = self._launcher("expand", product, splits, x.dtype, block, None)
            modules = self._modules_of(product, block, product.out_features)
            grid = triton.cdiv(product.out_features, block), triton.cdiv(rows, _BLOCK_M), 1
            launch(grid, sums, product.b, slots, modules, y, rows)
        return y

    def activated(self, both: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor, activation: Activation) -> Tensor | None:
        """Return activation(gate) * up [rows, out_features / 2] of a product with what adapters add. Two launches.

        both: [rows, out_features], gate before up. None: modules begin at odd places.
        """
        rows, size, block = x.shape[0], product.out_features // 2, self._blocks[product][1]
        if block < _FEWEST:
            return None
        y = torch.empty(rows, size, dtype=both.dtype, device=self._device)
        if rows:
            sums, splits = self._shrink(x, product, slots)
            launch = self._launcher("gated", product, splits, x.dtype, block, activation)
            modules = self._modules_of(product, block, size)
            launch((triton.cdiv(size, block), triton.cdiv(rows, _BLOCK_M), 1), sums, product.b, slots, modules, both, y, rows)
        return y

    def _shrink(self, x: Tensor, product: AdaptedProduct, slots: Tensor) -> tuple[Tensor, int]:
        """float32 [splits, rows, modules * rank], and the number of splits."""
        rows, in_features = x.shape
        num_slots, width, _ = product.a.shape
        split = _split_columns(in_features)
        splits = triton.cdiv(in_features, split)
        sums = self._sums.floats(splits * rows * width)
        key = "shrink", width, in_features, product.a.stride(0), x.dtype
        launch = self._launchers.get(key)
        if launch is None:
            sizes = {"SLOT_STRIDE": product.a.stride(0), "N": width, "K": in_features, "SPLIT_K": split}
            tile = {"BLOCK_M": _BLOCK_M, "BLOCK_N": _shrink_block(width), "BLOCK_K": min(_BLOCK_K, split)}
            launch = self._launchers[key] = FixedLauncher(shrink_rows, 4, self._device, **sizes, **tile, **_dot(x.dtype))
        tiles = splits * triton.cdiv(width, _shrink_block(width))
        launch((triton.cdiv(rows, _BLOCK_M), num_slots, tiles), x, product.a, slots, sums, rows)
        return sums, splits

    def _launcher(
        self, kind: str, product: AdaptedProduct, splits: int, dtype: torch.dtype, block: int, activation: Activation | None
    ) -> FixedLauncher:
        """The launcher of one of the two kernels that expand."""
        num_slots, width, _ = product.a.shape
        key = kind, product.out_features, width, product.rank, splits, product.b.stride(0), dtype, block, activation
        launch = self._launchers.get(key)
        if launch is None:
            gated = activation is not None
            rank, most = product.rank, 1 << (num_slots - 1).bit_length()
            ranks = min(rank, _WIDE)
            sizes = {
                "SLOT_STRIDE": product.b.stride(0),
                "N": product.out_features // 2 if gated else product.out_features,
                "MODULES": width // rank,
                "RANK": rank,
                "SPLITS": splits,
                "SLOTS": num_slots,
                "TOGETHER": min(_WIDE // ranks, most),
                "RANKS": ranks,
                "BLOCK_M": _BLOCK_M,
                "BLOCK_N": block,
                **({"ACTIVATION": activation} if gated else {}),
            }
            kernel = expand_gated if gated else expand_rows
            launch = self._launchers[key] = FixedLauncher(kernel, 4, self._device, **sizes, **_dot(dtype))
        return launch

    def _modules_of(self, product: AdaptedProduct, block: int, size: int) -> Tensor:
        """int32: the module of each block of columns; of two halves, of `size` columns each, those of the second behind."""
        key = product, size
        known = self._modules.get(key)
        if known is None:
            firsts = [half + first for half in range(0, product.out_features, size) for first in range(0, size, block)]
            modules = [next(part.module for part in product.parts if part.start <= first < part.end) for first in firsts]
            known = self._modules[key] = torch.tensor(modules, dtype=torch.int32, device=self._device)
        return known


def _dot(dtype: torch.dtype) -> dict[str, object]:
    """What products are computed in: float32 stays exact, and the interpreter multiplies the raw bits of bfloat16."""
    return {"DOT": tl.float32 if INTERPRETED else _TYPES[dtype], "PRECISION": "ieee"}


def _shrink_block(width: int) -> int:
    """Columns of A^T that a program of `shrink_rows` serves. width: modules * rank."""
    return min(max(1 << (width - 1).bit_length(), 16), _MOST_SHRUNK)


def _split_columns(in_features: int) -> int:
    """Columns of a split: a power of two times the block, so that at most `_MOST_SPLITS` programs share a sum."""
    columns = _FEWEST_COLUMNS
    while columns * _MOST_SPLITS < in_features:
        columns *= 2
    return min(columns, max(1 << (in_features - 1).bit_length(), 16))


def _block_n(product: AdaptedProduct) -> tuple[int, int]:
    """Columns of a program, all of one module: of `expand_rows`, and of `expand_gated`.

    :raises ModelError: modules begin at odd places.
    """
    edges = [part.start for part in product.parts]
    block = math.gcd(_BLOCK_N, *edges)
    if block < _FEWEST:
        names = ", ".join(product.origin.modules)
        raise ModelError(f"enable_lora: needs modules whose rows are multiples of 16 on a GPU, got {names} with parts at {edges}")
    return block, math.gcd(_BLOCK_N // 2, *edges, product.out_features // 2)
