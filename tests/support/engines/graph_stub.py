"""A stand-in for CUDA graphs on any device: every operator is written down, and done again over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class Tape:
    """A recorder whose replays write to the addresses that the recording wrote to, as a graph's do."""

    def __init__(self) -> None:
        self._listener: _Listener | None = None
        self.num_replays = 0

    def begin(self) -> None:
        assert self._listener is None
        self._listener = _Listener()
        self._listener.__enter__()

    def end(self) -> Callable[[], None]:
        assert self._listener is not None
        self._listener.__exit__(None, None, None)
        calls, self._listener = self._listener.calls, None

        def replay() -> None:
            self.num_replays += 1
            for func, args, kwargs, out in calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return torch.inference_mode()(replay)


class PiecesTape(Tape):
    """Pieces are taped; a whole step that would be one graph is run again."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        return lambda: run() and None


class AsItIs(Tape):
    """Stand-in for graphs that runs decodes and prompts again on the static inputs; segments are recorded and replayed."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            run()

        return replay
