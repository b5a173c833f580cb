"""Loading and launching of cubins in torch's context and streams: arguments, tensor maps and launch configurations."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import Any

import numpy
import torch
from torch import Tensor

from headway.core.contract.errors import BackendError
from headway.core.contract.kernel import AHEAD, Ahead

Value = int | numpy.int32 | numpy.float32 | bytes
"""Kernel argument. An int is a pointer or a long long, and bytes are a struct passed by value, such as a tensor map."""
_PITCH = 64
"""Alignment of every value, in bytes: the alignment of a tensor map, which is the strictest of all kernel parameters."""


class Arguments:
    """Values of a kernel's parameters, in the kernel's order and the driver's format.

    A launch copies the values, so they may be changed as soon as it returns. `set` writes values directly to the memory that
    launches read. Not thread-safe: only one thread at a time may set and launch.
    """

    __slots__ = ("_formats", "_memory", "_pointers", "_start", "address", "values")

    def __init__(self, *values: Value) -> None:
        self._formats = tuple([_format_of(value) for value in values])
        packer, places = _layout(self._formats)
        self._memory = ctypes.create_string_buffer(packer.size + _PITCH)
        base = ctypes.addressof(self._memory)
        self._start = -base % _PITCH
        first = base + self._start
        self._pointers = (ctypes.c_void_p * len(places))(*[first + place for place in places])
        self.address = ctypes.addressof(self._pointers)
        """Address of the array of pointers to the values (the driver's kernelParams)."""
        self.values: tuple[Value, ...] = values
        """Current values, for tests and messages."""
        packer.pack_into(self._memory, self._start, *values)

    def set(self, *values: Value) -> None:
        """Replace the first values. The type of each value must stay the same."""
        packer, _ = _layout(self._formats[: len(values)])
        packer.pack_into(self._memory, self._start, *values)
        self.values = values + self.values[len(values) :]


def _format_of(value: Value) -> str:
    """Return the `struct` format of a value."""
    kind = type(value)
    if kind is int:
        return "q"
    if kind is numpy.int32:
        return "i"
    if kind is numpy.float32:
        return "f"
    if isinstance(value, bytes):
        return f"{len(value)}s"
    raise TypeError(f"a kernel's argument is an int (pointer, long long), numpy.int32, numpy.float32 or bytes, not {value!r}")


@lru_cache(maxsize=1024)
def _layout(formats: tuple[str, ...]) -> tuple[Struct, tuple[int, ...]]:
    """Return the packer that writes all values at once, and the offset of each value."""
    text, places, end = "=", [], 0
    for each in formats:
        places.append(end)
        size = Struct(f"={each}").size
        padding = -size % _PITCH
        text += f"{each}{padding}x"
        end += size + padding
    return Struct(text), tuple(places)


_TYPES = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.float8_e4m3fn: "UINT8",
    torch.uint8: "UINT8",
}
MAP_BYTES = 128
"""Size of a CUtensorMap in bytes."""
_MAX_BOX = 256


def tensor_map(tensor: Tensor, box: tuple[int, ...], swizzle: int = 128) -> bytes:
    """Return the tensor map of a tensor whose last axis is contiguous. Pass the map by value, as `const __grid_constant__`.

    box: extents of one copy, in the tensor's axis order (the kernel's coordinates start with the innermost axis). Elements
    outside the tensor are read as zero and not written.
    swizzle: number of bytes (0, 32, 64 or 128) within which 16-byte chunks are permuted in shared memory. A row of the box must
    not be longer than that.
    Results are cached, keyed by address and arguments. A repeated call takes about 1 us.
    :raises BackendError: if the hardware does not support the map. The message names the violated rule.
    """
    return _encode(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), box, swizzle)


@lru_cache(maxsize=8192)
def _encode(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
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
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise BackendError(f"CUDA driver: tensor map of {shape}, strides {strides}, {dtype}, box {box}: {status.name}")
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)


def _check(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> None:
    """Check the rules for which the driver reports only "invalid value"."""
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


_UNASKED_SHARED = 46 * 1024
"""Dynamic shared memory, in bytes, that needs no call of `allow_shared`: 48 KiB minus the static shared memory (at most 2
KiB)."""


class Launch:
    """Launch configuration of a kernel. Plans reuse configurations, because making one costs more than launching a kernel."""

    __slots__ = ("block", "cluster", "config", "grid", "overlaps", "shared_bytes")

    def __init__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int = 0,
        *,
        overlaps: bool = False,
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        """Configure a launch.

        overlaps: True to let the kernel start while its predecessor runs (programmatic dependent launch). The kernel itself waits
        before it reads its predecessor's results. cluster: thread blocks per cluster in each direction of the grid.
        """
        from cuda.bindings import driver

        self.grid = grid
        self.block = (threads, 1, 1)
        self.shared_bytes = shared_bytes
        self.overlaps = overlaps
        self.cluster = cluster
        self.config = driver.CUlaunchConfig()
        """The driver's launch configuration. Each launch sets its stream."""
        for axis, programs, count in zip("XYZ", grid, self.block, strict=True):
            setattr(self.config, f"gridDim{axis}", programs)
            setattr(self.config, f"blockDim{axis}", count)
        self.config.sharedMemBytes = shared_bytes
        attributes = []
        if overlaps:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster != (1, 1, 1):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            for axis, count in zip("xyz", cluster, strict=True):
                setattr(attribute.value.clusterDim, axis, count)
            attributes.append(attribute)
        self.config.attrs = attributes
        self.config.numAttrs = len(attributes)

    def __repr__(self) -> str:
        text = f"grid {self.grid}, {self.block[0]} threads, {self.shared_bytes} bytes of shared memory"
        return text if self.cluster == (1, 1, 1) else f"{text}, clusters of {self.cluster}"


class CompiledKernel:
    """A kernel function in a cubin, on one device."""

    def __init__(self, cubin: Callable[[], bytes], name: str, device: torch.device) -> None:
        """Make a kernel without loading it. cubin: function that returns the machine code. It is called once, by `load` or by the
        first launch."""
        from cuda.bindings import driver

        self._cubin = cubin
        self._name = name
        self._device = device
        self._driver = driver
        self._index = device.index or 0
        self._attributes: dict[Any, int] = {}
        """Driver's name of each attribute to set on the function -> value of the attribute."""
        self._shared_limit = _UNASKED_SHARED
        self._called_in: Ahead | None = None
        self._kernel: Any = None
        self._function: Any = None
        """CUkernel, which the driver accepts instead of a CUfunction. None until the kernel is loaded."""
        self._start: Any = driver.cuLaunchKernelEx
        # like Triton: a tenth of the time of making a torch.cuda.Stream
        self._stream_of: Any = torch._C._cuda_getCurrentRawStream

    def load(self) -> None:
        """Load the machine code into the driver.

        :raises BackendError: if the source does not compile, or the driver does not load the machine code.
        """
        from cuda.core import ObjectCode

        code = self._cubin()
        with torch.cuda.device(self._device):
            torch.cuda.current_stream()  # creates torch's context if needed
            try:
                self._kernel = ObjectCode.from_cubin(code).get_kernel(self._name)
            except Exception as error:  # cuda.core's exception class is not public
                raise BackendError(f"CUDA driver: loading {self._name}: {error}") from error
        self._function = self._driver.CUfunction(int(self._kernel.handle))
        for attribute, value in self._attributes.items():
            self._set(attribute, value)

    def allow_shared(self, shared_bytes: int) -> None:
        """Raise the limit of dynamic shared memory per thread block. Call this before a launch that exceeds the limit."""
        if shared_bytes > self._shared_limit:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._attributes[attribute] = self._shared_limit = shared_bytes
            if self._kernel is not None:
                self._set(attribute, shared_bytes)

    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        """Launch on torch's current stream of the device, without synchronising. arguments: may be changed when this returns."""
        if (ahead := AHEAD.get()) is not None:
            if self._function is None and self._called_in is not ahead:
                ahead.num_new += 1
                self._called_in = ahead
            return
        if self._function is None:
            self.load()
        launch.config.hStream = self._stream_of(self._index)
        (status,) = self._start(launch.config, self._function, arguments.address, 0)
        if status:
            raise BackendError(f"CUDA driver: launch of {self._name} with {launch}: {status.name}")

    def _set(self, attribute: Any, value: int) -> None:
        (status,) = self._driver.cuKernelSetAttribute(attribute, value, self._kernel.handle, self._index)
        if status:
            raise BackendError(f"CUDA driver: {attribute.name} = {value} for {self._name}: {status.name}")
