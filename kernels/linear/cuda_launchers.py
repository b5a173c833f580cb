"""Launches of the products in CUDA C++: the kernels of a variant, their arguments and grids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from struct import Struct

import numpy
import torch
from torch import Tensor

from headway.kernels.linear.cuda_arranged import ArrangedWeight
from headway.kernels.linear.cuda_cuts import SLICE_BYTES
from headway.kernels.linear.cuda_variant import FLOAT8_COLUMNS, CudaVariant, Float8Variant
from headway.kernels.runtime.nvrtc.arguments import Arguments
from headway.kernels.runtime.nvrtc.compiler import architecture
from headway.kernels.runtime.nvrtc.launch import Kernel, Launch
from headway.kernels.runtime.nvrtc.store import load
from headway.kernels.runtime.nvrtc.tensor_map import MAP_BYTES, tensor_map

POINTERS = Struct("=12Q")
"""struct Pointers of product.cuh."""
_ARRANGING = 256
"""Threads of a block that arranges a row of x."""


@dataclass(frozen=True, slots=True)
class ProductOperands:
    """What one product reads and writes."""

    x: Tensor
    """[rows, in_features]"""
    weight: ArrangedWeight
    norm: Tensor | None
    eps: float
    bias: Tensor | None
    y: Tensor
    rotation: tuple[Tensor | None, ...]
    """cos, sin, the weights of q's and k's norm, and counters."""
    head_eps: float

    def pointers(self, x: Tensor) -> bytes:
        """`struct Pointers`. x: as the kernel reads it."""
        weight = self.weight
        tensors = x, weight.codes, weight.scales, weight.zeros, self.norm, self.bias, self.y, *self.rotation
        return POINTERS.pack(*[0 if tensor is None else tensor.data_ptr() for tensor in tensors])


class FewRowsLauncher:
    """few_rows.cu: one launch."""

    def __init__(self, variant: CudaVariant, device: torch.device, multiprocessors: int) -> None:
        self._kernel: Kernel = load(variant.source, variant.name, device, architecture(device))
        self._kernel.allow_shared(variant.shared_bytes)
        tiles = -(-variant.out_features // variant.tile_rows)
        blocks = min(tiles, multiprocessors * variant.cut.per_multiprocessor)
        zero = numpy.float32(0)
        self._arguments = Arguments(bytes(POINTERS.size), zero, zero, numpy.int32(0), numpy.int32(tiles))
        early = torch.cuda.get_device_capability(device) >= (9, 0)
        self._launch = Launch((blocks, 1, 1), variant.threads, variant.shared_bytes, overlaps=early)

    def __call__(self, operands: ProductOperands) -> None:
        """Compute y."""
        eps = numpy.float32(operands.eps), numpy.float32(operands.head_eps)
        self._arguments.set(operands.pointers(operands.x), *eps, numpy.int32(len(operands.x)))
        self._kernel(self._launch, self._arguments)


class ClusterLauncher:
    """A kernel whose blocks of threads, a cluster, share a sum over K, and the launch before it, which puts x into its form."""

    def __init__(self, variant: CudaVariant, device: torch.device, arranging: str, sharing: int = 1) -> None:
        """arranging: the name of the kernel of that launch. sharing: blocks of threads that share a row there."""
        specific, cut = architecture(device, specific=True), variant.cut
        self._kernel: Kernel = load(variant.source, variant.name, device, specific)
        self._kernel.allow_shared(variant.shared_bytes)
        self._arrange: Kernel = load(variant.source, arranging, device, specific)
        self._variant = variant
        self._device = device
        self._sharing = sharing
        self._tiles = -(-variant.out_features // variant.tile_rows)
        cluster, shared = (1, cut.splits, 1), variant.shared_bytes
        self._launch = partial(Launch, threads=variant.threads, shared_bytes=shared, overlaps=True, cluster=cluster)
        self._launches: dict[int, Launch] = {}
        self._arrange_launches: dict[int, Launch] = {}

    def _padded(self, rows: int) -> int:
        """Rows as blocks of threads take them: those that are missing are never stored."""
        return -(-rows // self._variant.most_rows) * self._variant.most_rows

    def _start_arranging(self, rows: int, arguments: Arguments) -> None:
        """Launch what brings x into its form."""
        launch = self._arrange_launches.get(rows)
        if launch is None:
            launch = self._arrange_launches[rows] = Launch((rows, self._sharing, 1), _ARRANGING, overlaps=True)
        self._arrange(launch, arguments)

    def _start(self, rows: int, arguments: Arguments) -> None:
        blocks = self._padded(rows) // self._variant.most_rows
        launch = self._launches.get(blocks)
        if launch is None:
            launch = self._launches[blocks] = self._launch((self._tiles * blocks, self._variant.cut.splits, 1))
        self._kernel(launch, arguments)


class SharedRowsLauncher(ClusterLauncher):
    """shared_rows.cu: x is normed and put in the order in which it is copied."""

    def __init__(self, variant: CudaVariant, device: torch.device) -> None:
        sharing = 1 if variant.norm is not None else -(-variant.in_features // (8 * _ARRANGING))  # a thread puts 8 columns
        super().__init__(variant, device, "arrange_rows", sharing)
        self._arguments = Arguments(bytes(MAP_BYTES), bytes(POINTERS.size), numpy.int32(0))
        self._arrange_arguments = Arguments(0, 0, 0, numpy.float32(0))

    def __call__(self, operands: ProductOperands) -> None:
        """Compute y."""
        rows, columns = operands.x.shape
        x = operands.x.new_empty(self._padded(rows) * columns)
        norm = 0 if operands.norm is None else operands.norm.data_ptr()
        self._arrange_arguments.set(operands.x.data_ptr(), norm, x.data_ptr(), numpy.float32(operands.eps))
        self._start_arranging(rows, self._arrange_arguments)
        codes = tensor_map(operands.weight.codes, (self._variant.tile_rows, SLICE_BYTES), 0)
        self._arguments.set(codes, operands.pointers(x), numpy.int32(rows))
        self._start(rows, self._arguments)


class Float8Launcher(ClusterLauncher):
    """w8a8.cu: x is normed and rounded to floats of 8 bits, with a scale for each row or for each group of its columns."""

    def __init__(self, variant: Float8Variant, device: torch.device) -> None:
        super().__init__(variant, device, "round_rows")
        self._groups = variant.groups
        self._arguments = Arguments(bytes(MAP_BYTES), bytes(POINTERS.size), 0, numpy.int32(0))
        self._arrange_arguments = Arguments(0, 0, 0, 0, numpy.float32(0))

    def __call__(self, operands: ProductOperands) -> None:
        """Compute y."""
        rows, columns = operands.x.shape
        padded = self._padded(rows)
        x = torch.empty(padded * columns, dtype=torch.uint8, device=self._device)
        scales = torch.empty(self._groups * padded, dtype=torch.float32, device=self._device)
        norm = 0 if operands.norm is None else operands.norm.data_ptr()
        pointers = operands.x.data_ptr(), norm, x.data_ptr(), scales.data_ptr()
        self._arrange_arguments.set(*pointers, numpy.float32(operands.eps))
        self._start_arranging(rows, self._arrange_arguments)
        codes = tensor_map(operands.weight.codes, (self._variant.tile_rows, FLOAT8_COLUMNS), 128)
        self._arguments.set(codes, operands.pointers(x), scales.data_ptr(), numpy.int32(rows))
        self._start(rows, self._arguments)
