"""Products of few rows over quantised weights by CUDA C++ of our own: which it computes, how it is cut, and its launch.

Triton cannot say that a thread multiplies the very bytes that it has copied, which is most of what csrc/product.cuh is about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from struct import Struct

import numpy
import torch
from torch import Tensor

from headway.backends.nvrtc.arguments import Arguments
from headway.backends.nvrtc.compiler import Variant, architecture
from headway.backends.nvrtc.launch import Kernel, Launch
from headway.backends.nvrtc.store import load
from headway.backends.nvrtc.tensor_map import MAP_BYTES, tensor_map
from headway.core.contract.support import YES, Support
from headway.models.config import Activation
from headway.models.fused.cuda_cuts import PART_ROWS, SHARED_BYTES, SLICE_BYTES, CudaCut, CudaCutRule, most_rows_of, two_fit
from headway.models.fused.quantized import InOrder, WeightBytes, weight_bytes
from headway.models.linear import Linear
from headway.models.operations import Heads, Norm, Rope
from headway.models.quantization.forms import Float4Weight, Float8Weight, Int4Weight, Int8Weight, QuantizedWeight, form_name

CSRC = Path(__file__).parent / "csrc"
MOST_FEW_ROWS, MOST_SHARED_ROWS = 16, 512
"""Rows up to which few_rows.cu and shared_rows.cu compute."""
_FULL_SUMS = 128
"""Rows times parts of a warp of shared_rows.cu above which its sums take the registers of other warps (FULL)."""
_COPY = 16
"""Bytes that a thread copies at a time."""
_KINDS = {"fp8": 0, "int4": 1, "mxfp4": 2, "int8": 3}
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5}
_HALVES = {torch.bfloat16: 0, torch.float16: 1}
POINTERS = Struct("=12Q")
"""struct Pointers of product.cuh."""
_NARROW_EXPONENT, _NARROW_SCALE = 128, 128.0
"""The largest of MXFP4's exponents, and of FP8's scales, that half precision holds beside what exponents of codes lack."""


@dataclass(frozen=True, slots=True)
class ArrangedWeight:
    """A weight as the kernel reads it."""

    described: WeightBytes
    codes: Tensor
    """uint8 [rows, bytes of a row]"""
    scales: Tensor
    """float32 [N] or [N / rows, K / columns]; of groups [K / group_size, N]"""
    zeros: Tensor | None = None
    """uint8 [K / group_size, N]"""
    wide: bool = False
    """Whether a scale is larger than the kernels' first way of unpacking has place for."""


@dataclass(frozen=True, slots=True)
class CudaVariant:
    """All that a kernel is compiled for."""

    dtype: torch.dtype
    weight: WeightBytes
    scale_dtype: torch.dtype
    wide: bool
    cut: CudaCut
    most_rows: int
    in_features: int
    out_features: int
    norm: torch.dtype | None
    gated: bool
    activation: Activation | None
    add: bool
    bias: bool
    heads: tuple[int, int, int] | None
    """num_heads, num_kv_heads and head_dim, where they are to be rotated."""
    head_norm: torch.dtype | None

    @property
    def constants(self) -> dict[str, str | int]:
        """Macros of few_rows.cu."""
        weight, cut = self.weight, self.cut
        num_heads, num_kv_heads, head_dim = self.heads or (0, 0, 0)
        two = two_fit(cut, self.most_rows) if cut.splits else self.most_rows <= MOST_FEW_ROWS
        return {
            "WEIGHT": _KINDS[weight.kind],
            "HALF_TYPE": _HALVES[self.dtype],
            "N": self.out_features,
            "K": self.in_features,
            "ROW": weight.row,
            "HALF": weight.half or 1,
            "SCALE_SPAN": weight.scale_span,
            "SCALE_ROWS": weight.scale_rows,
            "SCALE_SIZE": self.scale_dtype.itemsize,
            "SCALE_FLOAT16": int(self.scale_dtype == torch.float16),
            "ZEROS": int(weight.zeros),
            "WIDE": int(self.wide),
            "TILES": cut.tiles,
            "WARPS": cut.warps,
            "STAGES": cut.stages,
            "SPLITS": cut.splits,
            "RESIDENT": 2 if two and self.shared_bytes <= SHARED_BYTES else 1,
            "MOST_ROWS": self.most_rows,
            "NORM": int(self.norm is not None),
            "NORM_FLOAT": int(self.norm == torch.float32),
            "GATED": int(self.gated),
            "ACTIVATION": _ACTIVATIONS[self.activation],
            "ADD": int(self.add),
            "BIAS": int(self.bias),
            "HEADS": num_heads,
            "KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "QK_NORM": int(self.head_norm is not None),
            "HEAD_NORM_FLOAT": int(self.head_norm == torch.float32),
        }

    @property
    def source(self) -> Variant:
        """What the compiler is given."""
        name = "shared_rows" if self.cut.splits else "few_rows"
        return Variant(CSRC, f"{name}.cu", tuple(self.constants.items()))

    @property
    def threads(self) -> int:
        """Threads of a block: of the warps that multiply, and of those beside them, see the kernels' THREADS."""
        if self.cut.splits:
            beside = 4 if self.cut.tiles * self.most_rows > _FULL_SUMS else 1  # four give registers away
        else:
            beside = 1 if self.most_rows == 1 else 4
        return 32 * (self.cut.warps + beside)

    @property
    def _copied_scales(self) -> int:
        """Bytes of scales and zeros for 16 rows of a slice, in shared_rows.cu."""
        weight = self.weight
        if weight.scale_rows > 1 or weight.scale_span >= weight.row:
            return 0
        return max(1, SLICE_BYTES // weight.scale_span) * 16 * (self.scale_dtype.itemsize + int(weight.zeros))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as the kernels add it up."""
        weight, cut = self.weight, self.cut
        halves, rows = 2 if weight.half else 1, 16 * cut.tiles
        groups = max(1, SLICE_BYTES // weight.scale_span)
        by_row = weight.scale_span >= weight.row and weight.scale_rows == 1
        scales = groups * rows * self.scale_dtype.itemsize
        if by_row or weight.scale_rows > 1:
            scales = 0 if by_row else -(-cut.tiles * 4 // 16) * 16
        codes = cut.tiles * 1024 + scales + (groups * rows if weight.zeros else 0)
        window = self.most_rows * 128
        if cut.splits:
            step = 2 * window + (2 // halves) * cut.warps * cut.tiles * (1024 + self._copied_scales)
            return max(cut.stages * -(-step // 1024) * 1024, self.most_rows * (cut.warps * rows + 4) * 4) + 1024
        return cut.warps * (cut.stages * (codes + halves * window) + 2 * self.most_rows * (rows + 4) * 4)


class Arrangements:
    """Weights as the kernels read them, each arranged once."""

    def __init__(self) -> None:
        self._known: dict[QuantizedWeight, ArrangedWeight] = {}

    def __call__(self, weight: Tensor | QuantizedWeight) -> ArrangedWeight:
        """The arrangement of a weight, made now where there is none."""
        assert not isinstance(weight, Tensor)
        known = self._known.get(weight)
        if known is None:
            known = self._known[weight] = arranged(weight)
        return known

    def num_bytes(self, weight: Tensor | QuantizedWeight) -> int:
        """Bytes that the arrangement takes beside the weight: scales and zeros, in another order."""
        made = self(weight)
        return made.scales.nbytes + (0 if made.zeros is None else made.zeros.nbytes)


class _Launcher:
    """One compiled kernel with its arguments, which a launch copies."""

    def __init__(self, variant: CudaVariant, device: torch.device, multiprocessors: int) -> None:
        cut, rows = variant.cut, 16 * variant.cut.tiles // (2 if variant.gated else 1)
        name = "shared_rows" if cut.splits else "few_rows"
        self.kernel: Kernel = load(variant.source, name, device, architecture(device, specific=bool(cut.splits)))
        self.kernel.allow_shared(variant.shared_bytes)
        self._early = torch.cuda.get_device_capability(device) >= (9, 0)
        self.most_rows, self._arrange = variant.most_rows, None
        pointers, zero = bytes(POINTERS.size), numpy.float32(0)
        if cut.splits:
            self._tiles = -(-variant.out_features // (rows * cut.warps))
            self._blocks_of_tile, cluster = cut.splits, (1, cut.splits, 1)
            self._arrange = load(variant.source, "arrange_rows", device, architecture(device, specific=True))
            self._arrange_arguments = Arguments(0, 0, 0, zero)
            self.arguments = Arguments(bytes(MAP_BYTES), pointers, numpy.int32(0))
            self.box = rows * cut.warps, SLICE_BYTES
        else:
            tiles = -(-variant.out_features // rows)
            self._tiles, self._blocks_of_tile, cluster = min(tiles, multiprocessors * cut.per_multiprocessor), 1, (1, 1, 1)
            self.arguments = Arguments(pointers, zero, zero, numpy.int32(0), numpy.int32(tiles))
        threads, shared_bytes = variant.threads, variant.shared_bytes
        self._launch = partial(Launch, threads=threads, shared_bytes=shared_bytes, overlaps=self._early, cluster=cluster)
        self._launches: dict[int, Launch] = {}
        self._arrange_launches: dict[int, Launch] = {}

    def start(self, rows: int) -> None:
        """Launch the kernel over so many rows, with the arguments that were set."""
        blocks = -(-rows // self.most_rows)
        launch = self._launches.get(blocks)
        if launch is None:
            launch = self._launches[blocks] = self._launch((self._tiles * blocks, self._blocks_of_tile, 1))
        self.kernel(launch, self.arguments)

    def arranged(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """x [rows, in_features], for shared_rows.cu normed and put in the order in which it is copied, by a launch before."""
        if self._arrange is None:
            return x
        rows, columns = x.shape
        blocks = -(-rows // self.most_rows)
        y = x.new_empty(blocks * self.most_rows * columns)  # rows that are missing are never stored
        launch = self._arrange_launches.get(rows)
        if launch is None:
            launch = self._arrange_launches[rows] = Launch((rows, 1, 1), 256, overlaps=self._early)
        pointers = x.data_ptr(), 0 if norm is None else norm.data_ptr(), y.data_ptr()
        self._arrange_arguments.set(*pointers, numpy.float32(eps))
        self._arrange(launch, self._arrange_arguments)
        return y


class CudaProducts:
    """Products of up to MOST_SHARED_ROWS rows in half precision over quantised weights, with what comes before and after.

    Weights alone are quantised: x stays as it is, and sums are float32. The cut follows from the number of rows, rounded up to 1
    or a power of two from 8 on, and the shape; a row's result does not depend on the other rows. One thread at a time.
    """

    def __init__(self, device: torch.device, cut: CudaCutRule, arranged: Arrangements | None = None) -> None:
        """arranged: what several of these share."""
        self._device, self._cut, self._arranged = device, cut, arranged or Arrangements()
        cuda = device.type == "cuda"
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 4
        self._launchers: dict[CudaVariant, _Launcher] = {}
        self._in_order = InOrder()
        self._arrivals: dict[int, Tensor] = {}
        """Counters by their number, zero between launches; never freed, since captured graphs keep their addresses."""

    def turns(self, rows: int, linear: Linear, heads: Heads) -> bool:
        """Whether the kernel rotates the heads of a product that it reads, too."""
        cut = self._cut(self._arranged(linear.weight).described, rows, linear.out_features, False, self._multiprocessors)
        return not cut.splits and heads.head_dim % PART_ROWS == 0

    def __call__(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None = None,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        rotated: tuple[Heads, Rope] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `FewRows`, whose arguments these are."""
        rows, in_features = x.shape
        out_features = linear.out_features // 2 if gated else linear.out_features
        weight = self._arranged(linear.weight)
        y = add_to if add_to is not None else out
        if y is None:
            y = torch.empty(rows, out_features, dtype=x.dtype, device=self._device)
        heads = None if rotated is None else rotated[0]
        cut = self._cut(weight.described, rows, out_features, gated, self._multiprocessors)
        variant = CudaVariant(
            x.dtype,
            weight.described,
            weight.scales.dtype,
            weight.wide,
            cut,
            max(most_rows_of(rows), 8) if cut.splits else most_rows_of(rows),
            in_features,
            out_features,
            None if norm is None else norm.weight.dtype,
            gated,
            activation,
            add_to is not None,
            linear.bias is not None,
            None if heads is None else (heads.num_heads, heads.num_kv_heads, heads.head_dim),
            None if heads is None or heads.q_norm is None else heads.q_norm.weight.dtype,
        )
        launcher = self._launchers.get(variant)
        if launcher is None:
            launcher = self._launchers[variant] = _Launcher(variant, self._device, self._multiprocessors)
        x, norm_weight = self._in_order(x, norm, linear)
        if x.data_ptr() % 16:  # copies are of 16 bytes
            x = x.clone()
        x = launcher.arranged(x, norm_weight, 0.0 if norm is None else norm.eps)
        first = [x, weight.codes, weight.scales, weight.zeros, norm_weight, linear.bias, y, *self._rotation(rotated)]
        eps = 0.0 if norm is None else norm.eps
        head_eps = 0.0 if heads is None or heads.q_norm is None else heads.q_norm.eps
        pointers = POINTERS.pack(*[0 if tensor is None else tensor.data_ptr() for tensor in first])
        if cut.splits:
            launcher.arguments.set(tensor_map(weight.codes, launcher.box, 0), pointers, numpy.int32(rows))
        else:
            launcher.arguments.set(pointers, numpy.float32(eps), numpy.float32(head_eps), numpy.int32(rows))
        launcher.start(rows)
        return y

    def _rotation(self, rotated: tuple[Heads, Rope] | None) -> tuple[Tensor | None, ...]:
        """cos, sin, the weights of q's and k's norm, and counters."""
        if rotated is None:
            return (None,) * 5
        heads, rope = rotated
        count = heads.num_heads + heads.num_kv_heads
        arrivals = self._arrivals.get(count)
        if arrivals is None:
            arrivals = self._arrivals[count] = torch.zeros(count, dtype=torch.int32, device=self._device)
        q_norm, k_norm = heads.q_norm, heads.k_norm
        return (*rope, None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight, arrivals)


def computes(dtype: torch.dtype, weight: QuantizedWeight, rows: int | None = None) -> Support:
    """Whether the kernels compute products over a weight, on whatever GPU. dtype: of x.

    rows: of each expert, where the weight is that of several (expert_rows.cu); None: it is that of one product.
    """
    described, columns = weight_bytes(weight), weight.shape[1]
    if described is None or described.kind not in _KINDS or dtype not in _HALVES:
        return Support.no(form_name(weight), "fp8, int8, int4 or mxfp4 in groups that fill a row, and x in half precision", dtype)
    support, span, by_row = YES, described.scale_span, described.scale_span >= described.row
    if rows is None and (weight.shape[0] % (2 * PART_ROWS) or described.row % (SLICE_BYTES * (1 if described.half else 2))):
        support &= Support.no("shape", "multiples of 32 x 128", f"{weight.shape[0]} x {columns}")
    if rows is not None and (rows % PART_ROWS or described.row % (SLICE_BYTES if described.half >= SLICE_BYTES else _COPY)):
        support &= Support.no("shape", "experts of multiples of 16 rows of 16 bytes", f"{rows} x {columns}")
    short = described.half > 0 and SLICE_BYTES % span == 0 and span % 16 == 0  # codes are scaled, which those of bytes are not
    whole = span % SLICE_BYTES == 0 or short or by_row
    if not whole or (1 < described.scale_rows < weight.shape[0] and described.scale_rows % PART_ROWS and not by_row):
        support &= Support.no("scales", "blocks of multiples of 16 rows and 64 columns", form_name(weight))
    if described.zeros and by_row:
        support &= Support.no("zeros", "of groups that are shorter than a row", form_name(weight))
    if described.kind == "mxfp4" and dtype != torch.bfloat16:
        support &= Support.no("dtype", "bfloat16, which has place for the scales", dtype)
    return support


def arranged(weight: QuantizedWeight) -> ArrangedWeight:
    """A weight as the kernel reads it: codes where they are, scales of neighbouring rows side by side."""
    described = weight_bytes(weight)
    assert described is not None
    if isinstance(weight, Float8Weight):
        scales = weight.scales
        if described.scale_span >= described.row:  # one for a row, or for some: for each row, to be multiplied at the end
            scales = scales.view(-1).repeat_interleave(described.scale_rows)[: weight.shape[0]].contiguous()
            described = replace(described, scale_rows=1)
        elif described.scale_rows == 1:
            scales = scales.t().contiguous()
        return ArrangedWeight(described, weight.values.view(torch.uint8), scales, wide=float(scales.max()) > _NARROW_SCALE)
    if isinstance(weight, Float4Weight):
        wide = int(weight.exponents.max()) > _NARROW_EXPONENT
        return ArrangedWeight(described, weight.packed, weight.exponents.t().contiguous(), wide=wide)
    if isinstance(weight, Int8Weight):
        return ArrangedWeight(described, weight.values.view(torch.uint8), weight.scales)
    assert isinstance(weight, Int4Weight)
    if described.scale_span >= described.row:
        return ArrangedWeight(described, weight.packed, weight.scales.view(-1).float())
    zeros = None if weight.zeros is None else weight.zeros.t().contiguous()
    return ArrangedWeight(described, weight.packed, weight.scales.t().contiguous(), zeros)
