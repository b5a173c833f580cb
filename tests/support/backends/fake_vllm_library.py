"""vLLM's library without vLLM: its operators under the schemas of two releases, computed on a CPU from Marlin's layout.

The layout is written down anew here, from what a thread of a warp holds in mma.m16n8k16, and shares no line with what is tested.
Sums are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

_GEMM = (
    "Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, Tensor? a_scales, "
    "Tensor? global_scale, Tensor? b_zeros_or_none, {order}Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, "
    "SymInt size_k, {full}bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float{more}"
)
_REPACK = "Tensor b_q_weight, {order}SymInt size_k, SymInt size_n, int num_bits, bool is_a_8bit"
_RELEASES = {
    "0.24": (
        _GEMM.format(order="Tensor? g_idx_or_none, Tensor? perm_or_none, ", full="bool is_k_full, ", more=""),
        _REPACK.format(order="Tensor perm, "),
    ),
    "0.33": (_GEMM.format(order="", full="", more=""), _REPACK.format(order="")),
    "of the future": (_GEMM.format(order="", full="", more=", int swizzle"), _REPACK.format(order="")),
}
RELEASES = ("0.24", "0.33")
_NUMBERS = count()
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class FakeVllmLibrary:
    """One release's operators in a separate namespace."""

    def __init__(self, release: str = "0.24", capability: int = 0) -> None:
        """capability: what `cutlass_scaled_mm` was built for, as 10 times major plus minor; the CPU has 0."""
        self.namespace = f"fake_vllm_{next(_NUMBERS)}"
        self._library = torch.library.Library(self.namespace, "DEF")
        gemm, repack = _RELEASES[release]
        self._define("marlin_gemm", gemm, "Tensor", _marlin_gemm)
        self._define("gptq_marlin_repack", repack, "Tensor", _repack)
        product = "Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias"
        self._define("cutlass_scaled_mm", product, "()", _scaled_mm)
        for name in ("fp8", "block_fp8"):
            asked = f"cutlass_scaled_mm_supports_{name}(int cuda_device_capability) -> bool"
            self._library.define(asked)
            self._library.impl(asked.split("(")[0], lambda cuda_device_capability: cuda_device_capability == capability, "")

    def _define(self, name: str, arguments: str, returns: str, function: Callable[[dict[str, Any]], Any]) -> None:
        self._library.define(f"{name}({arguments}) -> {returns}")
        overload = getattr(getattr(torch.ops, self.namespace), name).default
        names = [argument.name.removesuffix("_or_none") for argument in overload._schema.arguments]
        self._library.impl(name, lambda *values: function(dict(zip(names, values, strict=True))), "CPU")


def _order(num_bits: int) -> list[int]:
    """Positions of 16 x 64 quantized values of [K, N] in four tiles of 16 x 16, in the order of the words."""
    found = []
    for lane in range(32):
        for tile in range(4):
            held = [
                256 * tile + 16 * (2 * (lane % 4) + k) + lane // 4 + n for n in (0, 8) for k in (0, 1, 8, 9)
            ]  # rows k of a thread's two fragments, and the column of each
            places = (0, 2, 4, 6, 1, 3, 5, 7) if num_bits == 4 else (0, 2, 1, 3, 4, 6, 5, 7)
            found += [held[place] for place in places]
    return found


def _tiles(codes: Tensor) -> Tensor:
    """[K, N] as rows of four tiles of 16 x 16 side by side: [K / 16 * N / 64, 1024]."""
    k, n = codes.shape
    return codes.view(k // 16, 16, n // 16, 16).transpose(1, 2).reshape(-1, 1024)


def _split(words: Tensor, num_bits: int) -> Tensor:
    """Codes of words along a last axis."""
    shifts = torch.arange(0, 32, num_bits)
    return ((words.long()[..., None] >> shifts) & (2**num_bits - 1)).flatten(-2)


def _repack(given: dict[str, Any]) -> Tensor:
    words, bits, k, n = given["b_q_weight"], given["num_bits"], given["size_k"], given["size_n"]
    assert words.dtype == torch.int32
    assert words.shape == (k * bits // 32, n)
    assert words.is_contiguous()
    assert "perm" not in given or (given["perm"].numel() == 0 and given["perm"].dtype == torch.int32)
    assert not given["is_a_8bit"]
    codes = _split(words.t(), bits).t().contiguous()
    moved = _tiles(codes)[:, _order(bits)].view(-1, 32 // bits)
    packed = (moved << torch.arange(0, 32, bits)).sum(1)
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32).view(k // 16, n * 16 * bits // 32)


def _codes(words: Tensor, bits: int, k: int, n: int) -> Tensor:
    """Undo `_repack`: [K, N]."""
    moved = _split(words.view(-1, 1024 * bits // 32), bits)
    tiles = torch.empty_like(moved)
    tiles[:, _order(bits)] = moved
    return tiles.view(k // 16, n // 16, 16, 16).transpose(1, 2).reshape(k, n)


def _grouped(values: Tensor) -> Tensor:
    """Undo the order of scales that change along k: blocks of 64 were read as 8 x 8 and transposed."""
    return values.reshape(-1, 8, 8).transpose(1, 2).reshape(values.shape)


def _whole(values: Tensor) -> Tensor:
    """Undo the order of scales that do not change along k: blocks of 32 are four groups of four pairs, which were transposed."""
    return values.reshape(-1, 4, 4, 2).transpose(1, 2).reshape(values.shape)


def _unmixed(values: Tensor, places: tuple[int, ...]) -> Tensor:
    back = torch.empty_like(values.reshape(-1, len(places)))
    back[:, list(places)] = values.reshape(-1, len(places))
    return back.view(values.shape)


def _marlin_gemm(given: dict[str, Any]) -> Tensor:
    a, scales, k, n = given["a"], given["b_scales"], given["size_k"], given["size_n"]
    assert a.shape == (given["size_m"], k)
    assert given.get("g_idx") is None
    assert given.get("is_k_full", True)
    assert given["use_fp32_reduce"]
    assert not given["workspace"].any()
    number = given["b_type_id"]
    exponent, mantissa, signed, bias = number & 255, number >> 8 & 255, number >> 16 & 1, number >> 17 & 2**32 - 1
    codes = _codes(given["b_q_weight"], exponent + mantissa + signed, k, n)
    if exponent == 4:
        raised = 2.0 ** (120 if a.dtype == torch.bfloat16 else 8)
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).double() / raised
    elif exponent == 2:
        values = torch.tensor([*_FP4, *(-value for value in _FP4)]).double()[codes]
        assert scales.dtype == torch.float8_e8m0fnu
        scales = torch.exp2(_unmixed(scales.view(torch.uint8), (0, 2, 1, 3)).double() - 127)
    elif given["b_zeros"] is not None:
        assert bias == 0
        zeros = _grouped(_unmixed(_split(given["b_zeros"], 4), (0, 2, 4, 6, 1, 3, 5, 7)))
        values = (codes - zeros.repeat_interleave(k // len(zeros), 0)).double()
    else:
        values = (codes - bias).double()
    assert exponent == 2 or scales.dtype == a.dtype
    scales = (_whole if len(scales) == 1 else _grouped)(scales.double())
    y = a.double() @ (values * scales.repeat_interleave(k // len(scales), 0))
    y = (y if given["b_bias"] is None else y + _whole(given["b_bias"].double())).to(a.dtype)
    return y if given["c"] is None else given["c"].copy_(y)


def _scaled_mm(given: dict[str, Any]) -> None:
    a, b, a_scales, b_scales = (given[name].double() for name in ("a", "b", "a_scales", "b_scales"))
    if b_scales.shape[0] > 1:
        assert given["bias"] is None
        assert given["a_scales"].stride(0) == 1
        assert len(a) % 4 == 0
        a_scales, b_scales = a_scales.repeat_interleave(128, 1), b_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        assert given["a_scales"].is_contiguous()
    y = (a * a_scales) @ (b * b_scales)
    given["out"].copy_(y if given["bias"] is None else y + given["bias"].double())
