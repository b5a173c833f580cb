"""Loading a cubin and launching its kernels through cuda.core: in torch's context, on torch's streams."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from headway.core.contract.errors import BackendError

_UNASKED_SHARED = 46 * 1024
"""Dynamic shared memory that every block of threads may have: 48 KiB less what a kernel declares itself (2 KiB at most)."""


class Kernel:
    """One function of a loaded cubin, on one device.

    :raises BackendError: the driver does not load it.
    """

    def __init__(self, cubin: bytes, name: str, device: torch.device) -> None:
        from cuda.core import ObjectCode, launch

        self._name, self._device, self._launch = name, device, launch
        self._shared_limit = _UNASKED_SHARED
        try:
            self._kernel = ObjectCode.from_cubin(cubin).get_kernel(name)
        except Exception as error:  # cuda.core's class for it is not public
            raise BackendError(f"CUDA driver: loading {name}: {error}") from error

    def allow_shared(self, shared_bytes: int) -> None:
        """Let a block of threads have this much dynamic shared memory; to be called before a launch that needs it."""
        if shared_bytes <= self._shared_limit:
            return
        from cuda.bindings import driver  # cuda.core 1.2 reads this attribute, but does not write it

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, self._kernel.handle, self._device.index or 0)
        if status:
            raise BackendError(f"CUDA driver: {shared_bytes} bytes of shared memory for {self._name}: {status.name}")
        self._shared_limit = shared_bytes

    def __call__(self, config: Any, *arguments: Any) -> None:
        """Launch on torch's current stream of the device, without synchronising. config: from `launch_config`.

        arguments: in the kernel's order: a Python int for a pointer or a long long, numpy's int32 and float32 for int and float.
        """
        stream = _stream(torch.cuda.current_stream(self._device).cuda_stream)
        try:
            self._launch(stream, config, self._kernel, *arguments)
        except Exception as error:
            raise BackendError(f"CUDA driver: launch of {self._name} with {config}: {error}") from error


def launch_config(grid: tuple[int, int, int], threads: int, shared_bytes: int = 0, overlaps: bool = False) -> Any:
    """How to launch a kernel: a plan keeps it, for making it costs as much as launching.

    overlaps: the kernel may start while the one before it still runs; it waits itself before it reads what that one wrote.
    """
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=grid, block=threads, shmem_size=shared_bytes, programmatic_stream_serialization=overlaps)


@lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    """cuda.core's view of one of torch's streams; to ask a stream for it at every launch takes four times a launch."""
    from cuda.core import Stream

    return Stream.from_handle(handle)
