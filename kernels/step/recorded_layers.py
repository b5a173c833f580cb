"""A decoder's layers as one call of our C, where a step repeats an earlier one: Python took a third of a step of one token."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from headway.core.contract.model import Attention, WatchedAttention
from headway.kernels.runtime.native.library import Functions, Recording
from headway.kernels.step.operations import Rope

Layers = Callable[[Tensor, tuple[Rope, ...], Attention], Tensor]
"""All layers of a decoder: x [num_tokens, hidden_size], used up, and cos and sin of each rotary embedding."""

_MOST_ROWS = 32
"""Tokens of a step up to which its calls are recorded: of more, Python's share is small, and what lies between calls is large."""
_MOST_STEPS = 64
_ALLOCATE = frozenset(
    (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_strided.default)
)


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedStep:
    calls: Recording
    x: Tensor
    ropes: tuple[Rope, ...]
    out: Tensor
    held: Sequence[Tensor]
    """What the calls read and write between x and out."""


class RecordedLayers:
    """Runs layers in Python the first time that a kind of step comes, and repeats the calls of our C from then on.

    That is right where the layers do nothing else, which is watched while the calls are noted: an operation of torch's that
    computes, or an attention that is not one call of our C, and the kind of step is run in Python for good.
    """

    def __init__(self, functions: Functions) -> None:
        """functions: those that the layers call."""
        self._functions = functions
        self._steps: dict[Hashable, _RecordedStep | None] = {}
        self.repeated = 0
        """Steps that were not run in Python."""

    def __call__(self, layers: Layers, kind: Hashable, x: Tensor, ropes: tuple[Rope, ...], attention: Attention) -> Tensor:
        """Return what `layers` would, always the same ones; the next step overwrites it. kind: `WatchedAttention.step_kind`."""
        if len(x) > _MOST_ROWS:
            return layers(x, ropes, attention)
        key = (kind, len(x), x.dtype)
        if key not in self._steps:
            return self._record(layers, key, x, ropes, attention)
        step = self._steps[key]
        if step is None:
            return layers(x, ropes, attention)
        step.x.copy_(x)
        for recorded, rope in zip(step.ropes, ropes, strict=True):
            recorded[0].copy_(rope[0])
            recorded[1].copy_(rope[1])
        if torch._C._autograd._profiler_enabled():
            with record_function("headway.layers"):  # no operation of torch's would be seen
                step.calls.repeat()
        else:
            step.calls.repeat()
        self.repeated += 1
        return step.out

    def _record(self, layers: Layers, key: Hashable, x: Tensor, ropes: tuple[Rope, ...], attention: Attention) -> Tensor:
        if len(self._steps) >= _MOST_STEPS:
            self._steps.clear()
        first = x.clone()
        turns = tuple((cos.clone(), sin.clone()) for cos, sin in ropes)
        with self._functions.recording() as calls, _Watch() as watch:
            watched = _CountedAttention(cast(WatchedAttention, attention), calls)
            out = layers(first, turns, watched)
        whole = watch.only_views and watched.one_call_each
        self._steps[key] = _RecordedStep(calls, first, turns, out, watch.held) if whole else None
        return out


class _Watch(TorchDispatchMode):
    """Sees every operation of torch's: memory that is allocated is held, and views change nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[Tensor] = []
        self.only_views = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: the wrapper that torch puts around a mode otherwise imports torch._dynamo (0.9 s) in the first step."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATE:
            self.held.append(result)
        elif not _is_view(func, result, args):
            self.only_views = False
        return result


def _is_view(func: Any, result: Any, args: Any) -> bool:
    if func._schema.is_mutable or not args or not isinstance(args[0], Tensor):
        return False
    results = result if isinstance(result, (list, tuple)) else [result]
    place = args[0].untyped_storage().data_ptr()
    return all(isinstance(each, Tensor) and each.untyped_storage().data_ptr() == place for each in results)


class _CountedAttention:
    """Sees whether each layer's attention is one call of our C."""

    def __init__(self, attention: WatchedAttention, calls: Recording) -> None:
        self._attention = attention
        self._calls = calls
        self.one_call_each = True

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention`."""
        before = len(self._calls)
        out = self._attention.compute(layer, q, k, v)
        self.one_call_each &= len(self._calls) == before + 1
        return out

    def state(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """See `Attention`."""
        self.one_call_each = False
        return self._attention.state(layer, x, gates)
