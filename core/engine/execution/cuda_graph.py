"""Recording launches for later replays: CUDA graphs, whose memory comes from one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headway.core.contract.errors import BackendError, HeadwayError


class GraphRecorder(Protocol):
    """Records what is launched between `begin` and `end`."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """Record `run()`; what is returned replays the recording."""

    def begin(self) -> None:
        """Record the kernels that are launched from now on, without running them."""

    def end(self) -> Callable[[], None]:
        """End what `begin` began; what is returned replays the recording, over the same memory each time."""


class CudaGraphRecorder:
    """Records CUDA graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._before: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """See GraphRecorder."""
        torch.cuda.synchronize()
        self.begin()
        try:
            run()
        finally:
            replay = self.end()
        return replay

    def begin(self) -> None:
        """See GraphRecorder."""
        # Not torch.cuda.graph, which collects Python's garbage before each capture: longer than the capture itself.
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        try:
            graph.capture_begin(pool=self._pool)
        except BaseException:
            torch.cuda.set_stream(before)
            raise
        self._graph = graph
        self._before = before

    def end(self) -> Callable[[], None]:
        """See GraphRecorder."""
        graph, before = self._graph, self._before
        assert graph is not None
        assert before is not None, "begin() first"
        self._graph = None
        try:
            graph.capture_end()
        finally:
            torch.cuda.set_stream(before)
        return graph.replay


def explain_failure(error: BaseException, what: str) -> BaseException:
    """The error to raise where `what` could not be captured: one that names it and a way out, unless `error` says so itself."""
    if not isinstance(error, RuntimeError) or isinstance(error, (HeadwayError, torch.OutOfMemoryError)):
        return error
    return BackendError(f"CUDA graphs: {what} cannot be captured: {error}; --enforce-eager does without")


def borrowed(tensor: Tensor) -> Tensor:
    """The same elements without a hold on their memory, so that what is recorded later may use the memory again.

    For a tensor out of a recording that is read after the replay of that recording and before the next one's.
    """
    if tensor.device.type != "cuda":
        return tensor
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.as_tensor(_Memory(tensor.data_ptr(), length * tensor.element_size()), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """A stretch of device memory that torch can wrap in a tensor without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
