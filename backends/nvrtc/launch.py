"""Loading a cubin and launching its kernels: in torch's context, on torch's streams."""

from __future__ import annotations

from typing import Any

import torch

from headway.backends.nvrtc.arguments import Arguments
from headway.core.contract.errors import BackendError

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

        self.grid, self.block, self.shared_bytes = grid, (threads, 1, 1), shared_bytes
        self.overlaps, self.cluster = overlaps, cluster
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
        self.config.attrs, self.config.numAttrs = attributes, len(attributes)

    def __repr__(self) -> str:
        text = f"grid {self.grid}, {self.block[0]} threads, {self.shared_bytes} bytes of shared memory"
        return text if self.cluster == (1, 1, 1) else f"{text}, clusters of {self.cluster}"


class Kernel:
    """One function of a loaded cubin, on one device.

    :raises BackendError: the driver does not load it.
    """

    def __init__(self, cubin: bytes, name: str, device: torch.device) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._name, self._device, self._driver = name, device.index or 0, driver
        self._shared_limit = _UNASKED_SHARED
        try:
            self._kernel = ObjectCode.from_cubin(cubin).get_kernel(name)
        except Exception as error:  # cuda.core's class for it is not public
            raise BackendError(f"CUDA driver: loading {name}: {error}") from error
        self._function = driver.CUfunction(int(self._kernel.handle))  # the driver takes a CUkernel in its place
        self._start: Any = driver.cuLaunchKernelEx
        self._stream_of: Any = torch._C._cuda_getCurrentRawStream  # as Triton asks: a tenth of making a torch.cuda.Stream

    def allow_shared(self, shared_bytes: int) -> None:
        """Let a block of threads have this much dynamic shared memory; to be called before a launch that needs it."""
        if shared_bytes <= self._shared_limit:
            return
        self._set(self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        self._shared_limit = shared_bytes

    def allow_large_clusters(self) -> None:
        """Let a cluster have 16 blocks of threads in place of 8; to be called before a launch that needs it."""

    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        """Launch on torch's current stream of the device, without synchronising. arguments: may be changed when this returns."""
        launch.config.hStream = self._stream_of(self._device)
        (status,) = self._start(launch.config, self._function, arguments.address, 0)
        if status:
            raise BackendError(f"CUDA driver: launch of {self._name} with {launch}: {status.name}")

    def _set(self, attribute: Any, value: int) -> None:
        (status,) = self._driver.cuKernelSetAttribute(attribute, value, self._kernel.handle, self._device)
        if status:
            raise BackendError(f"CUDA driver: {attribute.name} = {value} for {self._name}: {status.name}")
