"""Triton GEMV and skinny GEMM over dense weights for 1 to 16 rows. Reading the weights takes most of the time, so loads start
early.

A program holds BLOCK_N complete rows of the weight, in chunks of BLOCK_K. It loads the first DEPTH chunks before it waits for x,
so that they arrive while the previous kernel still runs (PDL, see step_kernels.py). Split-K is not used: one program computes
each sum over K, in the same order for any number of rows.

A fused RMSNorm needs no extra pass over x. Its weight multiplies x, and the complete sum is multiplied by 1 / sqrt(mean of
squares), which is known by then. QK-norm and rotary embedding (RoPE) need whole heads. Programs count arrivals, and the program
that completes a head reads it back and rotates it, which saves a launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.linear import FUSED, LinearCapabilities, LinearSpec
from headway.core.contract.support import Support
from headway.core.contract.weights import FORMATS
from headway.kernels.linear.choice import GEMV
from headway.kernels.linear.forms import Operand
from headway.kernels.linear.fused_kernel import FusedKernel
from headway.kernels.runtime.triton_launch import INTERPRETED, FixedLauncher, can_launch, shared_memory
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Heads, Norm, Rope
from headway.kernels.step.step_kernels import activate, either, rotate


@triton.jit
def one_row(
    x_ptr,  # [K]
    weight_ptr,  # [N, K]; GATED: [2 N, K], gate over up
    norm_ptr,  # [K], weight of the RMSNorm of x (NORM)
    bias_ptr,  # [N] or [2 N] (BIAS)
    y_ptr,  # [N], written; added to (ADD)
    eps,
    cos_ptr,  # float32 [rows, HEAD_DIM / 2] (HEADS > 0, like the following four)
    sin_ptr,
    q_norm_ptr,  # [HEAD_DIM] (QK_NORM)
    k_norm_ptr,
    arrivals_ptr,  # int32 [HEADS + KV_HEADS], zero between launches
    head_eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # activation of the gate, or of everything; empty means none
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,  # q heads to rotate, in the first rows of the weight, followed by those of k; 0 means no RoPE
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # a multiple of BLOCK_N
    BLOCK_HALF: tl.constexpr,  # HEAD_DIM / 2 rounded up to a power of two
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = W norm(x) + bias (GEMV), optionally activated, gated, or added to y. Grid (cdiv(N, BLOCK_N)). Sums in float32."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    live = (n < N)[:, None]
    chunks = ()
    for c in tl.static_range(DEPTH):
        chunks = chunks + (_chunk(weight_ptr, norm_ptr, at, live, k, c, N, K, BLOCK_N, BLOCK_K, NORM, GATED),)
    if BIAS:
        gate_bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
    low_weight, high_weight = head_norms(q_norm_ptr, k_norm_ptr, BLOCK_N, HEADS, KV_HEADS, HEAD_DIM, BLOCK_HALF, QK_NORM)
    if PDL:
        gdc_launch_dependents()  # not earlier: the next kernel's loads must not precede this kernel's
        gdc_wait()
    if ADD:  # loaded here instead of at its use, because the latency is as long as the GEMV
        residual = tl.load(y_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for c in tl.static_range(CHUNKS):
        x = tl.load(x_ptr + c * BLOCK_K + k, mask=c * BLOCK_K + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= chunks[c][2].to(tl.float32)
        gate += chunks[c][0].to(tl.float32) * x[None, :]
        if GATED:
            up += chunks[c][1].to(tl.float32) * x[None, :]
        if c + DEPTH < CHUNKS:
            chunks = chunks + (_chunk(weight_ptr, norm_ptr, at, live, k, c + DEPTH, N, K, BLOCK_N, BLOCK_K, NORM, GATED),)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y = tl.sum(gate, 1) * factor
    if BIAS:
        y += gate_bias
    if GATED:
        y_up = tl.sum(up, 1) * factor
        if BIAS:
            y_up += up_bias
        y = activate(y, ACTIVATION) * y_up
    elif ACTIVATION != "":
        y = activate(y, ACTIVATION)
    if ADD:
        y += residual
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)
    if HEADS > 0:
        rotate_whole_head(y_ptr, cos_ptr, sin_ptr, low_weight, high_weight, arrivals_ptr, head_eps, 1, N, BLOCK_N, 1,
                         HEADS, KV_HEADS, HEAD_DIM, BLOCK_HALF, QK_NORM)  # fmt: skip


# Similar to `one_row`, but separate: each is compiled independently, tiles here have one more axis and use tensor cores, and
# loads and waits are placed for the hardware.
@triton.jit(do_not_specialize=["rows"])
def few_rows(
    x_ptr,  # [rows, K]
    weight_ptr,  # [N, K]; GATED: [2 N, K], gate over up
    norm_ptr,  # [K], weight of the RMSNorm of x (NORM)
    bias_ptr,  # [N] or [2 N] (BIAS)
    y_ptr,  # [rows, N], written; added to (ADD)
    eps,
    cos_ptr,  # float32 [rows, HEAD_DIM / 2] (HEADS > 0, like the following four)
    sin_ptr,
    q_norm_ptr,  # [HEAD_DIM] (QK_NORM)
    k_norm_ptr,
    arrivals_ptr,  # int32 [HEADS + KV_HEADS], zero between launches
    head_eps,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows rounded up to a size that tensor cores support
    SLICES: tl.constexpr,  # parts of BLOCK_K, one per warp
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # activation of the gate, or of everything; empty means none
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,  # q heads to rotate, in the first rows of the weight, followed by those of k; 0 means no RoPE
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # a multiple of BLOCK_N
    BLOCK_HALF: tl.constexpr,  # HEAD_DIM / 2 rounded up to a power of two
    QK_NORM: tl.constexpr,
    DOT: tl.constexpr,  # type of the operands of tl.dot
    PDL: tl.constexpr,
):
    """y = W norm(x) + bias for `rows` rows on tensor cores (skinny GEMM, W x^T), with warps placed along K. Grid (cdiv(N,
    BLOCK_N)).
    """
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEP: tl.constexpr = BLOCK_K // SLICES
    EARLY: tl.constexpr = BLOCK_M == 8  # complete steps with attention are faster with it at 8 rows, and as fast at 16
    if PDL and EARLY:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_M)
    k = tl.arange(0, SLICES)[:, None] * STEP + tl.arange(0, STEP)[None, :]  # [SLICES, STEP]
    at = n.to(tl.int64)[None, :, None] * K + k[:, None, :]
    live = (n < N)[None, :, None]
    chunks = ()
    for c in tl.static_range(DEPTH):
        chunks = chunks + (_chunk(weight_ptr, norm_ptr, at, live, k, c, N, K, BLOCK_N, BLOCK_K, NORM, GATED),)
    if BIAS:
        gate_bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_bias = tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + r[None, :] * N + n[:, None]
    mask = (r < rows)[None, :] & (n < N)[:, None]
    x_at = r.to(tl.int64)[None, None, :] * K + k[:, :, None]
    low_weight, high_weight = head_norms(q_norm_ptr, k_norm_ptr, BLOCK_N, HEADS, KV_HEADS, HEAD_DIM, BLOCK_HALF, QK_NORM)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    if ADD:
        residual = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((SLICES, BLOCK_M), tl.float32)
    for c in tl.static_range(CHUNKS):
        x_inside = (r < rows)[None, None, :] & (c * BLOCK_K + k < K)[:, :, None]
        x = tl.load(x_ptr + c * BLOCK_K + x_at, mask=x_inside, other=0.0)
        if NORM:
            exact = x.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            x = exact * chunks[c][2].to(tl.float32)[:, :, None]
        gate = tl.dot(chunks[c][0].to(DOT), x.to(DOT), gate)
        if GATED:
            up = tl.dot(chunks[c][1].to(DOT), x.to(DOT), up)
        if c + DEPTH < CHUNKS:
            chunks = chunks + (_chunk(weight_ptr, norm_ptr, at, live, k, c + DEPTH, N, K, BLOCK_N, BLOCK_K, NORM, GATED),)
    factor = tl.full((BLOCK_M,), 1.0, tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y = tl.sum(gate, 0) * factor[None, :]  # [BLOCK_N, BLOCK_M]
    if BIAS:
        y += gate_bias
    if GATED:
        y_up = tl.sum(up, 0) * factor[None, :]
        if BIAS:
            y_up += up_bias
        y = activate(y, ACTIVATION) * y_up
    elif ACTIVATION != "":
        y = activate(y, ACTIVATION)
    if ADD:
        y += residual
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if HEADS > 0:
        rotate_whole_head(y_ptr, cos_ptr, sin_ptr, low_weight, high_weight, arrivals_ptr, head_eps, rows, N, BLOCK_N, BLOCK_M,
                         HEADS, KV_HEADS, HEAD_DIM, BLOCK_HALF, QK_NORM)  # fmt: skip


@triton.jit
def _chunk(weight_ptr, norm_ptr, at, live, k, c, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           NORM: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """Load columns k of chunk c from the weight, the up rows (GATED) and the norm's weight (NORM)."""
    inside = c * BLOCK_K + k < K
    ptr, mask = weight_ptr + c * BLOCK_K, live & tl.expand_dims(inside, -2)
    gate = _weights(ptr, at, mask, N, K, BLOCK_N, BLOCK_K)
    up, scales = gate, gate
    if GATED:
        up = _weights(ptr + N * K, at, mask, N, K, BLOCK_N, BLOCK_K)
    if NORM:
        scales = tl.load(norm_ptr + c * BLOCK_K + k, mask=inside, other=0.0)
    return gate, up, scales


@triton.jit
def _weights(ptr, at, inside, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load a tile of the weight, with a mask only if needed. The tile is read once, so it need not stay in the cache."""
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        tile = tl.load(ptr + at, eviction_policy="evict_first")
    else:
        tile = tl.load(ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def head_norms(q_norm_ptr, k_norm_ptr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, QK_NORM: tl.constexpr):  # fmt: skip
    """Return both halves [1, BLOCK_HALF] of the norm weight of this program's head, or 1 twice if there is no such norm."""
    low, high = 1.0, 1.0
    if HEADS > 0 and QK_NORM:
        HALF: tl.constexpr = HEAD_DIM // 2
        head = tl.program_id(0) * BLOCK_N // HEAD_DIM + tl.arange(0, 1)[:, None]  # a block, like what it is compared with
        h = tl.arange(0, BLOCK_HALF)[None, :]
        mask = (h < HALF) & (head < HEADS + KV_HEADS)
        low = either(q_norm_ptr, k_norm_ptr, h, head < HEADS, mask)
        high = either(q_norm_ptr, k_norm_ptr, h + HALF, head < HEADS, mask)
    return low, high


@triton.jit
def rotate_whole_head(y_ptr, cos_ptr, sin_ptr, low_weight, high_weight, arrivals_ptr, eps, rows, N: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                     HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, QK_NORM: tl.constexpr):  # fmt: skip
    """Norm and rotate this program's head of q or k in all rows of y, if this program was the last to store some of the head's
    columns."""
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(0) * BLOCK_N // HEAD_DIM
    if head < HEADS + KV_HEADS:
        tl.debug_barrier()  # the atomic below releases the stores of all threads of this program
        arrived = tl.atomic_add(arrivals_ptr + head, 1, sem="acq_rel", scope="gpu")
        if arrived == HEAD_DIM // BLOCK_N - 1:
            r = tl.arange(0, BLOCK_M)[:, None]
            h = tl.arange(0, BLOCK_HALF)[None, :]
            mask = (r < rows) & (h < HALF)
            cos = tl.load(cos_ptr + r * HALF + h, mask=mask, other=0.0)
            sin = tl.load(sin_ptr + r * HALF + h, mask=mask, other=0.0)
            at = y_ptr + r * N + head * HEAD_DIM + h
            # .cg bypasses this SM's L1 cache, which may lack what other programs stored
            low = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            high = tl.load(at + HALF, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            low, high = rotate(low, high, cos, sin, low_weight, high_weight, eps, HEAD_DIM, QK_NORM)
            tl.store(at, low.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(at + HALF, high.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(arrivals_ptr + head, 0)


MAX_ROWS = 16
"""Maximum number of rows. This and the following constants were measured on an H200, against cuBLAS (docs/kernels.md)."""
MAX_WEIGHT = 2**24
"""Maximum number of weight elements with which the kernel runs several rows. With more than MAX_ROWS / 2 rows, the maximum is
half of this.

cuBLAS is equally fast or faster for larger weights. In a step of gpt-oss-20b on an H100 with 16 rows, cuBLAS takes 16 us for 5120
x 2880 and for 2880 x 4096, and these kernels take 22 us. These times include the operations before and after the GEMM.
"""
HEAD_MULTIPLE = 16
"""Number of weight rows, of which the head dimension must be a multiple for fused RoPE."""
DEVICES: Final = ("cuda", "cpu") if INTERPRETED else ("cuda",)
QUANTIZED: Final = frozenset(FORMATS) - {"plain"}
T = TypeVar("T")
_BLOCK_K = 1024
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class ProductCase:
    """Properties of a linear layer and its fused operations that kernels are compiled for, except the tiling."""

    dtype: torch.dtype
    in_features: int
    out_features: int
    norm: bool
    gated: bool
    activation: Activation | None
    add: bool
    bias: bool
    heads: tuple[int, int, int, bool] | None
    """num_heads, num_kv_heads, head_dim, and True if heads are normed. None means no RoPE."""

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Operand,
        norm: Norm | None,
        gated: bool,
        activation: Activation | None,
        add_to: Tensor | None,
        rotated: tuple[Heads, Rope] | None,
    ) -> ProductCase:
        """Return the case for the arguments of a call of `Gemv.compute`."""
        shape = None
        if rotated is not None:
            heads = rotated[0]
            shape = heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.q_norm is not None and heads.k_norm is not None
        return cls(
            dtype=x.dtype,
            in_features=x.shape[1],
            out_features=weight.out_features // 2 if gated else weight.out_features,
            norm=norm is not None,
            gated=gated,
            activation=activation,
            add=add_to is not None,
            bias=weight.bias is not None,
            heads=shape,
        )

    @property
    def dot(self) -> Any:
        """Operand type of tl.dot. float32 in Triton's interpreter, which would multiply the raw bits of bfloat16."""
        return tl.float32 if INTERPRETED else _TYPES[self.dtype]

    def constants(self, head_dim: int) -> dict[str, Any]:
        """Return the compile-time constants. head_dim: placeholder for kernels without RoPE."""
        num_heads, num_kv_heads, head_dim, qk_norm = self.heads or (0, 0, head_dim, False)
        return {
            "N": self.out_features,
            "K": self.in_features,
            "NORM": self.norm,
            "GATED": self.gated,
            "ACTIVATION": self.activation or "",
            "ADD": self.add,
            "BIAS": self.bias,
            "HEADS": num_heads,
            "KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
            "QK_NORM": qk_norm,
        }


class RotationArguments:
    """Arguments of kernels with fused RoPE, and their arrival counters."""

    def __init__(self, device: torch.device) -> None:
        self._arrivals = cache(lambda count: torch.zeros(count, dtype=torch.int32, device=device))
        """Number of counters -> int32 counters, which are zero between launches. They are never freed, since captured graphs use
        their addresses."""

    def __call__(
        self, rotated: tuple[Heads, Rope] | None, unused: T
    ) -> tuple[Tensor | T, Tensor | T, Tensor | T, Tensor | T, Tensor | T, float]:
        """Return cos, sin, the weights of the norms of q and k, counters and epsilon. unused: placeholder for missing tensors."""
        if rotated is None:
            return unused, unused, unused, unused, unused, 0.0
        heads, (cos, sin) = rotated
        arrivals = self._arrivals(heads.num_heads + heads.num_kv_heads)
        if heads.q_norm is None or heads.k_norm is None:
            return cos, sin, unused, unused, arrivals, 0.0
        return cos, sin, heads.q_norm.weight, heads.k_norm.weight, arrivals, heads.q_norm.eps


class TritonProducts(FusedKernel):
    """Base of the linear kernels in Triton."""

    @classmethod
    def available(cls) -> Support:
        """Return whether Triton can run kernels in this process."""
        return can_launch()


class Gemv(TritonProducts):
    """GEMV and skinny GEMM over dense weights, for up to MAX_ROWS rows in half precision, in one launch.

    The kernel depends only on the number of rows and the shape. A row's result does not depend on the other rows.
    """

    name = GEMV
    capabilities = LinearCapabilities(frozenset({"plain"}), devices=DEVICES, fused=frozenset(FUSED))
    arrangement = "plain"

    def __init__(self, spec: LinearSpec, variant: str = "") -> None:
        super().__init__(spec, variant)
        self._launcher = cache(partial(_launcher, spec.device))
        self._rotation = RotationArguments(spec.device)

    def runs(self, rows: int) -> bool:
        """Return whether the weight is small enough for this number of rows."""
        size = self.spec.out_features * self.spec.in_features
        most = MAX_ROWS if size <= MAX_WEIGHT // 2 else MAX_ROWS // 2 if size <= MAX_WEIGHT else 1
        return rows <= most

    def rotates(self, rows: int, weight: Operand, heads: Heads) -> bool:
        """Return whether the kernels also apply RoPE to the heads."""
        return heads.head_dim % HEAD_MULTIPLE == 0

    def compute(
        self,
        x: Tensor,
        weight: Operand,
        norm: Norm | None = None,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        rotated: tuple[Heads, Rope] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output for x [rows, in_features]: [rows, out_features], or half of the columns if gated.

        norm: RMSNorm of x. activation: function applied to the output or, if gated, to the first half of its columns, which is
        then multiplied by the second half. add_to: tensor to which the output is added, in place. rotated: q and k heads to be
        normed and rotated. out: contiguous tensor for the output, unless add_to is given.
        """
        rows, case = x.shape[0], ProductCase.of(x, weight, norm, gated, activation, add_to, rotated)
        y = add_to if add_to is not None else out if out is not None else x.new_empty(rows, case.out_features)
        block_m = 1 if rows == 1 else 8 if rows <= 8 else 16
        launch, programs = self._launcher(case, block_m)
        cos, sin, q_norm, k_norm, arrivals, head_eps = self._rotation(rotated, x)
        launch(
            (programs, 1, 1),
            x_ptr=x,
            weight_ptr=weight.weight,
            norm_ptr=x if norm is None else norm.weight,
            bias_ptr=x if weight.bias is None else weight.bias,
            y_ptr=y,
            eps=0.0 if norm is None else norm.eps,
            cos_ptr=cos,
            sin_ptr=sin,
            q_norm_ptr=q_norm,
            k_norm_ptr=k_norm,
            arrivals_ptr=arrivals,
            head_eps=head_eps,
            **({} if rows == 1 else {"rows": rows}),
        )
        return y


def _launcher(device: torch.device, case: ProductCase, block_m: int) -> tuple[FixedLauncher, int]:
    """Return the kernel for a case, and its number of programs. block_m: number of rows, rounded up to a tile size of tensor
    cores; 1 means that tensor cores are not used."""
    block_k = min(max(triton.next_power_of_2(case.in_features), 128), _BLOCK_K)
    chunks = triton.cdiv(case.in_features, block_k)
    constants = {**case.constants(HEAD_MULTIPLE), "BLOCK_K": block_k}
    if block_m == 1:
        block_n = 4
        launcher = FixedLauncher(one_row, 4, device, {**constants, "BLOCK_N": block_n, "DEPTH": min(4, chunks)})
    else:
        # Every program reads all of x. If x is one chunk, larger programs fit, provided that they still fill the GPU.
        block_n = 32 if chunks == 1 and not case.gated and case.out_features >= 4096 else 16
        block_n = math.gcd(block_n, case.heads[2]) if case.heads else block_n
        room = shared_memory(device) // (2 * block_k) - 2 * block_m  # x is stored twice
        constants |= {
            "BLOCK_N": block_n,
            "BLOCK_M": block_m,
            "SLICES": 4,
            "DEPTH": max(1, min(3, chunks, room // (2 * block_n if case.gated else block_n))),
            "DOT": case.dot,
        }
        launcher = FixedLauncher(few_rows, 4, device, constants)
    return launcher, triton.cdiv(case.out_features, block_n)
