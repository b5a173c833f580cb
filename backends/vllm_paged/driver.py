"""Loading machine code and launching it, through the CUDA driver: in torch's context, on torch's streams."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from headway.core.contract.errors import BackendError

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, from compute capability 9.0 on"""
_UNASKED_SHARED = 46 * 1024
"""Dynamic shared memory that every block of threads may have: 48 KiB less what a kernel declares itself (2 KiB at most)."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes, of which one number is used."""

    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_char * 60))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Driver:
    """The functions of libcuda that are used, each checked."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.launch = self._library.cuLaunchKernelEx
        self.launch.argtypes = (ctypes.POINTER(_Launch), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

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


class Kernel:
    """One function of a loaded cubin, on the device that was current when it was loaded."""

    def __init__(self, cubin: bytes, name: str) -> None:
        self._driver = driver()
        self._name = name
        self._shared_limit = _UNASKED_SHARED
        self._overlap = (_Attribute * 1)(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1))
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
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        argument: Argument,
        device: torch.device,
        overlaps: bool = False,
    ) -> None:
        """Launch on torch's current stream of the device; `argument` is copied before this returns.

        overlaps: the kernel may start while the one before it still runs; it waits itself before it reads what that one wrote.
        """
        stream = torch.cuda.current_stream(device).cuda_stream
        count = 1 if overlaps else 0
        config = _Launch(grid, (threads, 1, 1), shared_bytes, stream, self._overlap, count)
        status = self._driver.launch(ctypes.byref(config), self._function, argument.pointers, None)
        if status:
            self._driver.check(status, f"launch of {self._name}, grid {grid}, {threads} threads, {shared_bytes} bytes shared")


class Argument:
    """A kernel's only parameter, a structure, with the array of pointers that a launch wants."""

    def __init__(self, value: ctypes.Structure) -> None:
        self.value = value
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(value))
