"""Loading machine code and launching it, through the CUDA driver: in torch's context, on torch's streams."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from headway.core.errors import BackendError

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
"""CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"""
_STATIC_SHARED_LIMIT = 48 * 1024


class Driver:
    """The functions of libcuda that are used, each checked."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self.launch = self._library.cuLaunchKernel
        self.launch.argtypes = (pointer, *(number,) * 7, pointer, pointer, pointer)

    def check(self, status: int, what: str) -> None:
        """:raises BackendError: status is not 0."""
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        raise BackendError(f"CUDA driver: {what}: {(text.value or b'unknown error').decode()}")

    def call(self, function: str, *arguments: object) -> None:
        """Call a driver function by name."""
        self.check(getattr(self._library, function)(*arguments), function)


@cache
def driver() -> Driver:
    """The driver; there is one."""
    return Driver()


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block of threads can ask for."""
    handle, limit = ctypes.c_int(), ctypes.c_int()
    driver().call("cuDeviceGet", ctypes.byref(handle), torch.device(device).index or 0)
    driver().call("cuDeviceGetAttribute", ctypes.byref(limit), _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, handle)
    return limit.value


class Kernel:
    """One function of a loaded cubin, on the device that was current when it was loaded."""

    def __init__(self, cubin: bytes, name: str) -> None:
        self._driver = driver()
        self._name = name
        self._shared_limit = _STATIC_SHARED_LIMIT
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._driver.call("cuModuleLoadData", ctypes.byref(module), cubin)
        self._driver.call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())

    def allow_shared(self, shared_bytes: int) -> None:
        """Let a block of threads have this much dynamic shared memory; to be called before a launch that needs it."""
        if shared_bytes > self._shared_limit:
            attribute = _MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._driver.call("cuFuncSetAttribute", self._function, attribute, ctypes.c_int(shared_bytes))
            self._shared_limit = shared_bytes

    def __call__(
        self, grid: tuple[int, int, int], threads: int, shared_bytes: int, argument: Argument, device: torch.device
    ) -> None:
        """Launch on torch's current stream of the device; `argument` is copied before this returns."""
        stream = torch.cuda.current_stream(device).cuda_stream
        status = self._driver.launch(self._function, *grid, threads, 1, 1, shared_bytes, stream, argument.pointers, None)
        if status:
            self._driver.check(status, f"launch of {self._name}, grid {grid}, {threads} threads, {shared_bytes} bytes shared")


class Argument:
    """A kernel's only parameter, a structure, with the array of pointers that a launch wants."""

    def __init__(self, value: ctypes.Structure) -> None:
        self.value = value
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(value))
