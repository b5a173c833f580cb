"""Launches of the LoRA kernels: at most two for a linear layer, whatever the number of adapters."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.kernels.lora.adapter_kernels import expand_gated, expand_rows, norm_and_shrink, shrink_rows
from headway.kernels.lora.bank import AdaptedProduct, AdapterBank, Shrunk
from headway.kernels.runtime.triton_launch import INTERPRETED, FixedLauncher, Workspace
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Norm

_BLOCK_M = 64
"""Number of rows per tile. It is the same for any number of rows, so that a row's bits do not depend on the batch."""
_MOST_SPLITS = 16
_FEWEST_COLUMNS = 512
"""Minimum number of columns per program of `shrink_rows`. With few rows, only the slots and the splits of a row provide enough
programs to fill the GPU."""
_MOST_SHRUNK = 64
_WIDE = 128
"""Number of columns that one GEMM of `expand_rows` sums over: the ranks of several slots, or some of the ranks of one slot."""
_BLOCK_N = 64
_BLOCK_K = 128
_LONGEST = 8192
"""Maximum number of elements in a row that one program norms."""
_FEWEST = 16
"""Minimum number of output columns per program of the kernels that expand."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class FusedAdditions:
    """LoRA additions by Triton kernels. No call synchronises or reads values on the host, so CUDA graphs can capture all calls.

    The number of splits over K depends only on a linear layer's shape, so a row's bits are the same in any batch.
    """

    def __init__(self, device: torch.device, bank: AdapterBank) -> None:
        """Prepare the launches.

        :raises ModelError: if the modules of a linear layer do not start at multiples of 16 rows.
        """
        self._device = device
        self._sums = Workspace(device)
        self._squares = Workspace(device)
        self._launchers: dict[Hashable, FixedLauncher] = {}
        self._modules: dict[tuple[AdaptedProduct, int], Tensor] = {}
        self._blocks = {product: _block_n(product) for product in bank.products.values()}

    def normed(self, x: Tensor, norm: Norm, product: AdaptedProduct, slots: Tensor) -> tuple[Tensor, Shrunk] | None:
        """Norm rows and compute the first half of the adapters' additions, in one launch."""
        rows, in_features = x.shape
        if not rows or norm.bias is not None or norm.share is not None or in_features > _LONGEST:
            return None
        tiling = _tiling_of(product)
        squares = self._squares.floats(tiling.splits * rows)
        low = Shrunk(self._sums.floats(tiling.splits * rows * tiling.width), squares, in_features, norm.eps)
        y = torch.empty_like(x)
        key = "norm", tiling, product.a.stride(0), x.dtype, norm.weight.dtype
        launch = self._launchers.get(key)
        if launch is None:
            block = 1 << (in_features - 1).bit_length()
            sizes = {**_shrink_sizes(product, tiling), "SLOTS": len(product.a), "BLOCK": block, **_dot(x.dtype)}
            launch = FixedLauncher(norm_and_shrink, 4 if block <= 4096 else 8, self._device, sizes)
            self._launchers[key] = launch
        programs = rows + triton.cdiv(rows, _BLOCK_M) * len(product.a) * tiling.splits * tiling.tiles
        launch(
            (programs, 1, 1),
            x_ptr=x,
            norm_ptr=norm.weight,
            a_ptr=product.a,
            slots_ptr=slots,
            y_ptr=y,
            sums_ptr=low.sums,
            squares_ptr=squares,
            eps=norm.eps,
            rows=rows,
        )
        return y, low

    def add(self, y: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor, low: Shrunk | None = None) -> Tensor:
        """Add the adapters' output to y in two launches, or in one after `normed`."""
        if len(x):
            self._launch_plain(product, low or self._shrink(x, product, slots), x.dtype, slots, y, "expand")
        return y

    def _launch_plain(
        self, product: AdaptedProduct, low: Shrunk, dtype: torch.dtype, slots: Tensor, y: Tensor, kind: str
    ) -> None:
        """Launch `expand_rows`. kind: "expand", or "joined" if each row of `low.sums` contains the linear layer's output before
        the sums, or "joined, added" if y is added to as well."""
        size, block = product.out_features, self._blocks[product][0]
        launch = self._launcher(kind, product, low.normed, dtype, block, None, joined=kind != "expand")
        launch(
            (triton.cdiv(size, block), triton.cdiv(len(y), _BLOCK_M), 1),
            sums_ptr=low.sums,
            squares_ptr=low.squares,
            b_ptr=product.b,
            slots_ptr=slots,
            modules_ptr=self._modules_of(product, block, size),
            y_ptr=y,
            eps=low.eps,
            rows=len(y),
        )

    def activated(
        self, both: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor, activation: Activation, low: Shrunk | None = None
    ) -> Tensor | None:
        """Add the adapters' output to gate and up and activate, in the same number of launches as `add`. Return None if modules
        do not start at multiples of a program's columns. low: if `low.sums` is `both`, each row of `both` contains the sums after
        the linear layer's columns."""
        rows, size, block = x.shape[0], product.out_features // 2, self._blocks[product][1]
        if block < _FEWEST:
            return None
        y = torch.empty(rows, size, dtype=both.dtype, device=self._device)
        if not rows:
            return y
        low = low or self._shrink(x, product, slots)
        launch = self._launcher("gated", product, low.normed, both.dtype, block, activation, joined=low.sums is both)
        modules = self._modules_of(product, block, size)
        launch(
            (triton.cdiv(size, block), triton.cdiv(rows, _BLOCK_M), 1),
            sums_ptr=low.sums,
            squares_ptr=low.squares,
            b_ptr=product.b,
            slots_ptr=slots,
            modules_ptr=modules,
            both_ptr=both,
            y_ptr=y,
            eps=low.eps,
            rows=rows,
        )
        return y

    def joined(self, both: Tensor, product: AdaptedProduct, slots: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Return the linear layer's output plus the adapters' output, in one launch."""
        y = torch.empty(len(both), product.out_features, dtype=both.dtype, device=self._device) if add_to is None else add_to
        if len(both):
            kind = "joined" if add_to is None else "joined, added"
            self._launch_plain(product, Shrunk(both, both, 0, 0.0), both.dtype, slots, y, kind)
        return y

    def joined_activated(self, both: Tensor, product: AdaptedProduct, slots: Tensor, activation: Activation) -> Tensor | None:
        """Add the adapters' output and activate, in one launch. Return None if modules do not start at multiples of a program's
        columns."""
        return self.activated(both, both, product, slots, activation, Shrunk(both, both, 0, 0.0))

    def _shrink(self, x: Tensor, product: AdaptedProduct, slots: Tensor) -> Shrunk:
        rows, tiling = x.shape[0], _tiling_of(product)
        sums = self._sums.floats(tiling.splits * rows * tiling.width)
        key = "shrink", tiling, product.a.stride(0), x.dtype
        launch = self._launchers.get(key)
        if launch is None:
            sizes = {**_shrink_sizes(product, tiling), **_dot(x.dtype)}
            launch = self._launchers[key] = FixedLauncher(shrink_rows, 4, self._device, sizes)
        grid = triton.cdiv(rows, _BLOCK_M), len(product.a), tiling.splits * tiling.tiles
        launch(grid, x_ptr=x, a_ptr=product.a, slots_ptr=slots, sums_ptr=sums, rows=rows)
        return Shrunk(sums, sums, 0, 0.0)

    def _launcher(
        self,
        kind: str,
        product: AdaptedProduct,
        normed: int,
        dtype: torch.dtype,
        block: int,
        activation: Activation | None,
        joined: bool = False,
    ) -> FixedLauncher:
        """Return the launcher of a kernel that expands. joined: True if each row contains the sums after the linear layer's
        columns."""
        tiling = _tiling_of(product)
        key = kind, product.out_features, tiling, product.b.stride(0), dtype, block, activation, normed, joined
        launch = self._launchers.get(key)
        if launch is None:
            gated, rank, num_slots = activation is not None, product.rank, len(product.b)
            ranks = min(rank, _WIDE)
            sizes: dict[str, object] = {
                "SLOT_STRIDE": product.b.stride(0),
                "N": product.out_features // 2 if gated else product.out_features,
                "MODULES": tiling.width // rank,
                "RANK": rank,
                "SLOTS": num_slots,
                "TOGETHER": min(_WIDE // ranks, 1 << (num_slots - 1).bit_length()),
                "RANKS": ranks,
                "BLOCK_M": _BLOCK_M,
                "BLOCK_N": block,
            }
            sizes |= {"SPLITS": 1 if joined else tiling.splits, "NORMED": normed, "BEHIND": product.out_features if joined else 0}
            sizes |= {"ACTIVATION": activation} if gated else {"ADD": kind == "joined, added"}
            kernel = expand_gated if gated else expand_rows
            launch = self._launchers[key] = FixedLauncher(kernel, 4, self._device, {**sizes, **_dot(dtype)})
        return launch

    def _modules_of(self, product: AdaptedProduct, block: int, size: int) -> Tensor:
        """Return the index of the module to which each block of columns belongs, int32.

        size: number of columns of the output. For gate and up, it is the number of columns of each half, and the blocks of up
        follow the blocks of gate.
        """
        key = product, size
        known = self._modules.get(key)
        if known is None:
            firsts = [half + first for half in range(0, product.out_features, size) for first in range(0, size, block)]
            modules = [next(part.module for part in product.parts if part.start <= first < part.end) for first in firsts]
            known = self._modules[key] = torch.tensor(modules, dtype=torch.int32, device=self._device)
        return known


def _dot(dtype: torch.dtype) -> dict[str, object]:
    """Return compile-time constants for tl.dot. float32 operands stay exact, and the interpreter uses float32 because it would
    multiply the raw bits of bfloat16."""
    return {"DOT": tl.float32 if INTERPRETED else _TYPES[dtype], "PRECISION": "ieee"}


class _ShrinkTiling(NamedTuple):
    """Split of x A^T into programs, determined by a linear layer's shape."""

    in_features: int
    width: int
    """Number of rows of A: modules * rank."""
    split: int
    """Number of columns per program (split-K)."""
    block: int
    """Number of rows of A per program."""

    @property
    def splits(self) -> int:
        """Number of programs that split a sum over K."""
        return -(-self.in_features // self.split)

    @property
    def tiles(self) -> int:
        """Number of programs along the rows of A."""
        return -(-self.width // self.block)


def _tiling_of(product: AdaptedProduct) -> _ShrinkTiling:
    _, width, in_features = product.a.shape
    columns = _FEWEST_COLUMNS
    while columns * _MOST_SPLITS < in_features:
        columns *= 2
    split = min(columns, max(1 << (in_features - 1).bit_length(), 16))
    return _ShrinkTiling(in_features, width, split, min(max(1 << (width - 1).bit_length(), 16), _MOST_SHRUNK))


def _shrink_sizes(product: AdaptedProduct, tiling: _ShrinkTiling) -> dict[str, object]:
    """Return the compile-time constants of the kernels that compute x A^T."""
    tile = {"BLOCK_M": _BLOCK_M, "BLOCK_N": tiling.block, "BLOCK_K": min(_BLOCK_K, tiling.split)}
    return {"SLOT_STRIDE": product.a.stride(0), "N": tiling.width, "K": tiling.in_features, "SPLIT_K": tiling.split, **tile}


def _block_n(product: AdaptedProduct) -> tuple[int, int]:
    """Return the number of columns per program for `expand_rows` and for `expand_gated`. All columns of a program must belong to
    one module.

    :raises ModelError: if modules do not start at multiples of 16 rows.
    """
    edges = [part.start for part in product.parts]
    block = math.gcd(_BLOCK_N, *edges)
    if block < _FEWEST:
        names = ", ".join(product.origin.modules)
        raise ModelError(f"enable_lora: needs modules whose rows are multiples of 16 on a GPU, got {names} with parts at {edges}")
    return block, math.gcd(block, product.out_features // 2)
