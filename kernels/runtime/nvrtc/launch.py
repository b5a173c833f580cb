"""Loading a cubin and launching its kernels: in torch's context, on torch's streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headway.core.contract.compiled import AHEAD
from headway.core.contract.errors import BackendError
from headway.kernels.runtime.nvrtc.arguments import Arguments

_UNASKED_SHARED = 46 * 1024
"""Dynamic shared memory that every block of threads may have: 48 KiB less what a kernel declares itself (2 KiB at most)."""


class Launch:
    """How to launch a kernel. A plan keeps it: making one costs more than launching."""

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
        """overlaps: the kernel may start while the one before it still runs; it waits itself before it reads what that one wrote
        (programmatic dependent launch). cluster: blocks of threads that run together, in each direction of the grid.
        """
        from cuda.bindings import driver

        self.grid = grid
        self.block = (threads, 1, 1)
        self.shared_bytes = shared_bytes
        self.overlaps = overlaps
        self.cluster = cluster
        self.config = driver.CUlaunchConfig()
        """The driver's form; its stream is set by each launch."""
        self.config.gridDimX, self.config.gridDimY, self.config.gridDimZ = grid
        self.config.blockDimX, self.config.blockDimY, self.config.blockDimZ = self.block
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
            dims = attribute.value.clusterDim
            dims.x, dims.y, dims.z = cluster
            attributes.append(attribute)
        self.config.attrs = attributes
        self.config.numAttrs = len(attributes)

    def __repr__(self) -> str:
        text = f"grid {self.grid}, {self.block[0]} threads, {self.shared_bytes} bytes of shared memory"
        return text if self.cluster == (1, 1, 1) else f"{text}, clusters of {self.cluster}"


class Kernel:
    """One function of a compilation, on one device."""

    def __init__(self, cubin: Callable[[], bytes], name: str, device: torch.device) -> None:
        """cubin: gives the machine code; it is asked once, by `load` or by the first launch."""
        from cuda.bindings import driver

        self._cubin = cubin
        self._name = name
        self._device = device
        self._driver = driver
        self._index = device.index or 0
        self._attributes: dict[Any, int] = {}
        """What the function is to be allowed, by the driver's name."""
        self._shared_limit = _UNASKED_SHARED
        self._kernel: Any = None
        self._function: Any = None
        """The driver takes a CUkernel in place of a CUfunction; None before it is loaded."""
        self._start: Any = driver.cuLaunchKernelEx
        self._stream_of: Any = torch._C._cuda_getCurrentRawStream  # as Triton asks: a tenth of making a torch.cuda.Stream

    def load(self) -> None:
        """Hand the machine code to the driver. :raises BackendError: it does not compile, or the driver does not load it."""
        from cuda.core import ObjectCode

        code = self._cubin()
        with torch.cuda.device(self._device):
            torch.cuda.current_stream()  # makes torch's context, if nobody has
            try:
                self._kernel = ObjectCode.from_cubin(code).get_kernel(self._name)
            except Exception as error:  # cuda.core's class for it is not public
                raise BackendError(f"CUDA driver: loading {self._name}: {error}") from error
        self._function = self._driver.CUfunction(int(self._kernel.handle))
        for attribute, value in self._attributes.items():
            self._set(attribute, value)

    def allow_shared(self, shared_bytes: int) -> None:
        """Let a block of threads have this much dynamic shared memory; to be called before a launch that needs it."""
        if shared_bytes > self._shared_limit:
            self._allow(self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
            self._shared_limit = shared_bytes

    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        """Launch on torch's current stream of the device, without synchronising. arguments: may be changed when this returns."""
        if AHEAD.get() is not None:
            return
        if self._function is None:
            self.load()
        launch.config.hStream = self._stream_of(self._index)
        (status,) = self._start(launch.config, self._function, arguments.address, 0)
        if status:
            raise BackendError(f"CUDA driver: launch of {self._name} with {launch}: {status.name}")

    def _allow(self, attribute: Any, value: int) -> None:
        self._attributes[attribute] = value
        if self._kernel is not None:
            self._set(attribute, value)

    def _set(self, attribute: Any, value: int) -> None:
        (status,) = self._driver.cuKernelSetAttribute(attribute, value, self._kernel.handle, self._index)
        if status:
            raise BackendError(f"CUDA driver: {attribute.name} = {value} for {self._name}: {status.name}")
