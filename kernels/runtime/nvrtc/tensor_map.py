"""Tensor maps: what the tensor memory accelerator (TMA) of Hopper and later copies tiles by."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from headway.core.contract.errors import BackendError

_TYPES = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.float8_e4m3fn: "UINT8",
    torch.uint8: "UINT8",
}
MAP_BYTES = 128
"""Bytes of a CUtensorMap."""
_MAX_BOX = 256


def tensor_map(tensor: Tensor, box: tuple[int, ...], swizzle: int = 128, *, l2_promotion: int = 256) -> bytes:
    """The tensor map of a tensor whose last axis is contiguous; hand it to a kernel by value, as `const __grid_constant__`.

    box: what one copy moves, an extent for each axis in the tensor's order (the kernel's coordinates run the other way round, the
    innermost first). What lies outside the tensor is read as zero and not written. swizzle: 0, 32, 64 or 128, the bytes of a row
    of the box among which 16-byte pieces are permuted in shared memory; a row may not be longer. l2_promotion: 0, 64, 128 or 256.

    The answer depends on the address: equal calls are answered from memory, in about a microsecond.

    :raises BackendError: what the hardware cannot do, with the rule.
    """
    geometry = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return _encode(*geometry, box, swizzle, l2_promotion)


@lru_cache(maxsize=8192)
def _encode(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    l2_promotion: int,
) -> bytes:
    from cuda.bindings import driver

    _check(address, dtype, shape, strides, box, swizzle)
    size = dtype.itemsize
    status, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[dtype]}"),
        len(shape),
        address,
        [driver.cuuint64_t(extent) for extent in reversed(shape)],
        [driver.cuuint64_t(stride * size) for stride in reversed(strides[:-1])],
        [driver.cuuint32_t(extent) for extent in reversed(box)],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle}B' if swizzle else 'NONE'}"),
        getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{l2_promotion}B' if l2_promotion else 'NONE'}"),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise BackendError(f"CUDA driver: tensor map of {shape}, strides {strides}, {dtype}, box {box}: {status.name}")
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)


def _check(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> None:
    """What the driver answers with "invalid value" and no more."""
    if dtype not in _TYPES:
        wrong = f"its type is one of {', '.join(str(each).removeprefix('torch.') for each in _TYPES)}"
    elif not 1 <= len(shape) <= 5 or len(box) != len(shape):
        wrong = "it has 1 to 5 axes, and the box one extent for each"
    elif swizzle not in (0, 32, 64, 128):
        wrong = f"the swizzle is 0, 32, 64 or 128 bytes, not {swizzle}"
    elif strides[-1] != 1:
        wrong = "its last axis is contiguous"
    elif address % 16 or any(stride * dtype.itemsize % 16 for stride in strides[:-1]):
        wrong = "its address and its strides are multiples of 16 bytes"
    elif not all(1 <= extent <= _MAX_BOX for extent in box) or box[-1] * dtype.itemsize % 16:
        wrong = f"the box has extents of 1 to {_MAX_BOX}, and rows of a multiple of 16 bytes"
    elif swizzle and box[-1] * dtype.itemsize > swizzle:
        wrong = f"a row of the box is no longer than the swizzle of {swizzle} bytes"
    elif not all(shape):
        wrong = "it is not empty"
    else:
        return
    raise BackendError(f"tensor map of {shape}, strides {strides}, {dtype}, box {box}: needs that {wrong}")
