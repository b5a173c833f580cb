"""Recording launches for later replays: CUDA graphs, whose memory comes from one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Recorder(Protocol):
    """Records what runs between `begin` and `end`."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """Record `run()`; what is returned runs it again."""

    def begin(self) -> None:
        """What is launched from now on is recorded, and does not run."""

    def end(self) -> Callable[[], None]:
        """End what `begin` began; what is returned runs it, over the same memory each time."""


class CudaRecorder:
    """Records CUDA graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._before: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """See Recorder."""
        torch.cuda.synchronize()
        self.begin()
        try:
            run()
        finally:
            replay = self.end()
        return replay

    def begin(self) -> None:
        """See Recorder."""
        # Not torch.cuda.graph, which collects Python's garbage before each capture: longer than the capture itself.
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        try:
            graph.capture_begin(pool=self._pool)
        except BaseException:
            torch.cuda.set_stream(before)
            raise
        self._graph, self._before = graph, before

    def end(self) -> Callable[[], None]:
        """See Recorder."""
        graph, before = self._graph, self._before
        assert graph is not None
        assert before is not None, "begin() first"
        self._graph = None
        try:
            graph.capture_end()
        finally:
            torch.cuda.set_stream(before)
        return graph.replay


def borrowed(tensor: Tensor) -> Tensor:
    """The same elements without a hold on their memory, so that what is recorded later may use it again.

    For a tensor out of a recording that is read after the replay of that recording and before the next one's.
    """
    if tensor.device.type != "cuda":
        return tensor
    places = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.as_tensor(_Memory(tensor.data_ptr(), places * tensor.element_size()), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """A stretch of device memory, as torch takes it in without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
