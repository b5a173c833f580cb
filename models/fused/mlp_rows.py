"""The MLP of a few rows in one launch of CUDA C++ of our own: which are computed so, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from struct import Struct

import numpy
import torch
from torch import Tensor

from headway.backends.nvrtc.arguments import Arguments
from headway.backends.nvrtc.compiler import Variant, architecture, find_compiler
from headway.backends.nvrtc.launch import Kernel, Launch
from headway.backends.nvrtc.store import load
from headway.backends.probe import HALF_DTYPES, capability, untried
from headway.core.contract.support import YES, Support
from headway.models.config import Activation
from headway.models.fused.cuda_variant import ACTIVATIONS, CSRC, HALVES
from headway.models.linear import Linear
from headway.models.operations import Norm

POINTERS = Struct("=9Q")
"""struct MlpPointers of mlp_rows.cu."""
MOST_ROWS = 8
TILE = 8
"""Rows of x, and rows of a weight, that the matrix units take."""
WARPS = 16
THREADS = WARPS * 32 + MOST_ROWS * TILE
_STEP_BYTES = WARPS * 1024
"""Bytes of weights that a block of threads multiplies at a time."""
_MOST_STAGES = 10
"""Steps of the ring: 160 KB, beside which a block of the next launch finds room."""
_BESIDE_BYTES = 2 * 8192 + WARPS * MOST_ROWS * 4 + 40
"""Shared memory beside the ring: two tiles' sums, sums of squares, and barriers."""
MOST_BYTES = 2 * _MOST_STAGES * _STEP_BYTES
"""Bytes of weights for each multiprocessor up to which one launch is chosen. The ring holds half of them before x is there. For
what is beyond that a running kernel asks, as two launches do, which have more bytes under way. 320 KB take a multiprocessor of
an H200 9 us, beside which the 4 to 5 us that each launch costs are half."""
_MOST_QUADS = 12
"""Pieces of 8 columns of x that a thread keeps in registers for a product."""


@dataclass(frozen=True, slots=True)
class MlpVariant:
    """All that mlp_rows.cu is compiled for."""

    dtype: torch.dtype
    in_features: int
    inner: int
    out_features: int
    gated: bool
    activation: Activation | None
    normed: bool
    norm_weight: torch.dtype | None
    """Type of the RMSNorm's weight; None: there is no norm, or only the factor of each row is left of it."""
    up_bias: bool
    down_bias: bool
    multiprocessors: int

    @property
    def blocks(self) -> int:
        """Blocks of threads: one on a multiprocessor, unless there are fewer tiles."""
        return min(self.multiprocessors, (self.inner + self.out_features) // TILE)

    @property
    def quads(self) -> tuple[int, int]:
        """Pieces of 8 columns of x that a thread keeps, of each product."""
        up = _steps(self.in_features, self.gated) * (1 if self.gated else 2)
        return up, 2 * _steps(self.inner, False)

    @property
    def steps(self) -> int:
        """Steps of the block of threads that has most, idle ones of single warps included."""
        up, down = (-(-size // (TILE * self.blocks)) for size in (self.inner, self.out_features))
        return up * _steps(self.in_features, self.gated) + down * _steps(self.inner, False)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights of the block of threads that has most."""
        return self.steps * _STEP_BYTES

    @property
    def stages(self) -> int:
        """Steps of the ring."""
        return min(_MOST_STAGES, self.steps)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a launch."""
        return self.stages * _STEP_BYTES + _BESIDE_BYTES

    @property
    def source(self) -> Variant:
        """What the compiler is given."""
        constants: dict[str, str | int] = {
            "HALF_TYPE": HALVES[self.dtype],
            "K": self.in_features,
            "INNER": self.inner,
            "N": self.out_features,
            "GATED": int(self.gated),
            "ACTIVATION": ACTIVATIONS[self.activation],
            "NORM": int(self.normed),
            "NORM_WEIGHT": int(self.norm_weight is not None),
            "NORM_FLOAT": int(self.norm_weight == torch.float32),
            "UP_BIAS": int(self.up_bias),
            "DOWN_BIAS": int(self.down_bias),
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
        }
        return Variant(CSRC, "mlp_rows.cu", tuple(constants.items()))


def _steps(columns: int, paired: bool) -> int:
    """Steps of a warp in a tile: of 32 columns of two rows that belong together, or of 64 of one."""
    return -(-columns // ((32 if paired else 64) * WARPS))


class MlpRows:
    """MLPs of up to MOST_ROWS rows over weights in half precision, added to the residual, a launch each. One thread at a time.

    The order of a row's sums follows from the shape alone: its result does not depend on the other rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        found = capability(device)
        self.support = untried()
        """Whether this device computes any."""
        if found != (9, 0):
            got = "none" if found is None else "{}.{}".format(*found)
            self.support &= Support.no("compute capability", "9.0, for whose memory it is cut", got)
        self.support &= find_compiler()[1]
        cuda = device.type == "cuda"
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 4
        self._arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        """The counter by which the grids of a stream's launches meet; never freed, since captured graphs keep its address."""
        self._launchers: dict[MlpVariant, MlpLauncher] = {}

    def takes(self, x: Tensor, up: Linear, down: Linear, gated: bool) -> Support:
        """Whether the MLP of x [rows, in_features] is computed, and why not."""
        if not self.support:
            return self.support
        if not 0 < len(x) <= MOST_ROWS or not x.is_contiguous():
            return Support.no("rows", f"1 to {MOST_ROWS}, contiguous", len(x))
        return takes_weights(x.dtype, up, down, gated, self._multiprocessors)

    def __call__(
        self, x: Tensor, residual: Tensor, norm: Norm | None, up: Linear, down: Linear, activation: Activation | None, gated: bool
    ) -> Tensor:
        """Add down(activation(up(norm of x))) to the residual [rows, out_features], in place, and return it.

        x: [rows, in_features], perhaps the residual itself. gated: the first half of `up` is activated, and times the second.
        """
        rows, in_features = x.shape
        normed, weight = norm is not None, None if norm is None or norm.absorbed else norm.weight.dtype
        biased = up.bias is not None, down.bias is not None
        shape = x.dtype, in_features, down.in_features, down.out_features, gated, activation, normed, weight
        variant = MlpVariant(*shape, *biased, self._multiprocessors)
        launch = self._launchers.get(variant)
        if launch is None:
            launch = self._launchers[variant] = MlpLauncher(variant, self._device)
        assert isinstance(up.weight, Tensor)
        assert isinstance(down.weight, Tensor)
        if x.data_ptr() % 16:  # reads are of 16 bytes
            x = x.clone()
        inner = torch.empty(rows, down.in_features, dtype=x.dtype, device=self._device)
        norm_weight = None if norm is None else norm.weight
        tensors = x, norm_weight, up.weight, up.bias, inner, down.weight, down.bias, residual, self._arrivals
        launch(tensors, 0.0 if norm is None else norm.eps, rows)
        return residual


class MlpLauncher:
    """mlp_rows.cu: one launch."""

    def __init__(self, variant: MlpVariant, device: torch.device) -> None:
        self._kernel: Kernel = load(variant.source, "mlp_rows", device, architecture(device))
        self._kernel.allow_shared(variant.shared_bytes)
        self._arguments = Arguments(bytes(POINTERS.size), numpy.float32(0), numpy.int32(0))
        self._launch = Launch((variant.blocks, 1, 1), THREADS, variant.shared_bytes, overlaps=True)

    def __call__(self, tensors: tuple[Tensor | None, ...], eps: float, rows: int) -> None:
        """Launch with the tensors of `struct MlpPointers`, in its order."""
        self._arguments.set(pointers(tensors), numpy.float32(eps), numpy.int32(rows))
        self._kernel(self._launch, self._arguments)


def pointers(tensors: tuple[Tensor | None, ...]) -> bytes:
    """`struct MlpPointers`."""
    return POINTERS.pack(*[0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def takes_weights(dtype: torch.dtype, up: Linear, down: Linear, gated: bool, multiprocessors: int) -> Support:
    """Whether the MLP of rows of a type over these weights gains from one launch, and why not."""
    if dtype not in HALF_DTYPES or not all(_is_plain(linear, dtype) for linear in (up, down)):
        return Support.no(
            "weights", "plain ones of x's type, bfloat16 or float16, at addresses of 16 bytes", f"{dtype}, or others"
        )
    return takes_sizes(up.in_features, down.in_features, down.out_features, gated, multiprocessors)


def _is_plain(linear: Linear, dtype: torch.dtype) -> bool:
    weight = linear.weight
    if not linear.is_dense or not isinstance(weight, Tensor):
        return False
    return weight.dtype == dtype and weight.is_contiguous() and not weight.data_ptr() % 16


@cache
def takes_sizes(in_features: int, inner: int, out_features: int, gated: bool, multiprocessors: int) -> Support:
    """Whether one launch computes an MLP of these sizes, and gains by it; and why not."""
    if in_features % 64 or inner % 64 or out_features % TILE:
        got = f"{in_features}, {inner} and {out_features}"
        return Support.no("shape", f"multiples of 64, 64 and {TILE} columns", got)
    sizes = in_features, inner, out_features, gated
    variant = MlpVariant(torch.bfloat16, *sizes, None, False, None, False, False, multiprocessors)
    if max(variant.quads) > _MOST_QUADS:
        return Support.no("columns of x", f"at most {_MOST_QUADS} pieces for a thread", max(variant.quads))
    if variant.weight_bytes > MOST_BYTES:
        return Support.no("weights", f"at most {MOST_BYTES} bytes for a multiprocessor", variant.weight_bytes)
    return YES
