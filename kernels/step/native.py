"""Decoder steps on a CPU by C kernels, each with one call and one parallel region. Small steps are recorded and replayed as one
call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from headway.core.contract.model import Attention, WatchedAttention
from headway.kernels.experts.bound import ExpertsOptions
from headway.kernels.linear.linear import Linear
from headway.kernels.runtime.native.library import TYPES, Functions, NormStruct, PackedWeight, Recording, product_of
from headway.kernels.step.config import ACTIVATE, Activation
from headway.kernels.step.operations import Heads, Norm, Rope
from headway.kernels.step.torch_operations import TorchOperations, norm_values

Layers = Callable[[Tensor, tuple[Rope, ...], Attention], Tensor]
"""Function that runs all layers of a decoder. Arguments: x [num_tokens, hidden_size], which is overwritten; cos and sin of each
RoPE; attention. The result is x after all layers."""

_MOST_ROWS = 32
"""Maximum number of tokens in a recorded step. Larger steps spend little time in Python, and their recordings would occupy much
memory between calls."""
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
    """Tensors for intermediate results that the recorded calls read and write."""


class RecordedLayers:
    """Layers that run in Python for the first step of each kind, and replay the recorded C calls for later steps.

    Replaying is correct only if the layers do nothing except these calls, which is checked while recording. If torch computes
    anything, or an attention is not exactly one C call, steps of that kind always run in Python.
    """

    def __init__(self, functions: Functions) -> None:
        """Start without recordings. functions: the C functions that the layers call."""
        self._functions = functions
        self._steps: dict[Hashable, _RecordedStep | None] = {}
        self.repeated = 0
        """Number of steps that were replayed."""

    def __call__(self, layers: Layers, kind: Hashable, x: Tensor, ropes: tuple[Rope, ...], attention: Attention) -> Tensor:
        """Return the result of `layers`, which must be the same function in every call. The next step overwrites the result.
        kind: value of `WatchedAttention.step_kind`."""
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
            with record_function("headway.layers"):  # replayed calls are invisible to torch's profiler
                step.calls.repeat()
        else:
            step.calls.repeat()
        self.repeated += 1
        return step.out

    def _record(self, layers: Layers, key: Hashable, x: Tensor, ropes: tuple[Rope, ...], attention: Attention) -> Tensor:
        if len(self._steps) >= _MOST_STEPS:
            self._steps.clear()
        first = x.clone()
        own_ropes = tuple((cos.clone(), sin.clone()) for cos, sin in ropes)
        with self._functions.recording() as calls, _Watch() as watch:
            watched = _CountedAttention(cast(WatchedAttention, attention), calls)
            out = layers(first, own_ropes, watched)
        whole = watch.only_views and watched.one_call_each
        self._steps[key] = _RecordedStep(calls, first, own_ropes, out, watch.held) if whole else None
        return out


class _Watch(TorchDispatchMode):
    """Dispatch mode that watches every operation of torch. It keeps allocated memory alive, and records whether all operations
    other than allocations are views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[Tensor] = []
        self.only_views = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's wrapper around a mode would import torch._dynamo (0.9 s) in the first step."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record whether it allocates memory, returns a view, or computes."""
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
    """Attention that checks whether each layer makes exactly one C call."""

    def __init__(self, attention: WatchedAttention, calls: Recording) -> None:
        self._attention = attention
        self._calls = calls
        self.one_call_each = True

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, writes: bool = True) -> Tensor:
        before = len(self._calls)
        out = self._attention.compute(layer, q, k, v, writes)
        self.one_call_each &= len(self._calls) == before + 1
        return out

    def again(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self(layer, q, k, v, writes=False)

    def state(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        self.one_call_each = False
        return self._attention.state(layer, x, gates)


_STORE, _ADD, _GATED = range(3)
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


class NativeOperations(TorchOperations):
    """Operations that use the C kernels for layers with packed weights, and torch's functions for other layers."""

    def __init__(
        self,
        inv_freq: Tensor,
        factors: Tensor,
        functions: Functions,
        experts: ExpertsOptions | None = None,
        halves: Sequence[int] = (),
    ) -> None:
        super().__init__(inv_freq, factors, experts, halves)
        self.functions = functions

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return super().norm(x, norm) if _needs_torch(x, norm) else self._norm(x, norm, x.new_empty(x.shape), adds=False)

    def add_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        if _needs_torch(x, norm) or residual.dtype != x.dtype or not residual.is_contiguous():
            return super().add_norm(residual, x, norm)
        return self._norm(x, norm, residual, adds=True)

    def _norm(self, x: Tensor, norm: Norm, out: Tensor, adds: bool) -> Tensor:
        """Store the norm of x in `out` or, with `adds`, add it to `out`. Return `out`."""
        (rows, size), (factors, least) = x.shape, _norm(norm)
        self.functions.norm(
            NormStruct(
                x=x.data_ptr(),
                out=out.data_ptr(),
                rows=rows,
                ldx=x.stride(0),
                size=size,
                norm=factors,
                norm_least=least,
                type=TYPES[x.dtype],
                adds=adds,
            )
        )
        return out

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        packed = _packed_of(x, linear)
        return linear(x, out) if packed is None else self._store(x, packed, out=out)

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        packed = _packed_of(x, linear)
        if packed is None:
            return super().norm_product(x, norm, linear, activation)
        x, norm = self._before(x, norm)
        if activation in _ACTIVATIONS:
            return self._store(x, packed, norm, activation)
        y = self._store(x, packed, norm)
        return y if activation is None else ACTIVATE[activation](y)

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        packed = _packed_of(x, linear)
        if packed is None or not packed.gates or activation not in _ACTIVATIONS:
            return super().norm_gated_product(x, norm, linear, activation)
        x, norm = self._before(x, norm)
        out = x.new_empty(len(x), packed.out_features // 2)
        self._run(x, packed, norm, _GATED, activation, out)
        return out

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        packed = _packed_of(x, linear)
        if packed is None or heads.whole_norm or heads.head_dim % 2 or not _normed(heads.q_norm) or not _normed(heads.k_norm):
            return super().norm_qkv(x, norm, linear, heads, rope)
        x, norm = self._before(x, norm)
        dim, rotated = heads.head_dim, heads.num_heads + heads.num_kv_heads
        qkv = x.new_empty(len(x), packed.out_features // dim, dim)
        others: dict[str, Any] = {"head_dim": dim, "q_heads": heads.num_heads, "heads": rotated}
        for name, each in (("norm", norm), ("q_norm", heads.q_norm), ("k_norm", heads.k_norm)):
            others[name], others[f"{name}_least"] = _norm(each)
        if rope is not None:
            others |= {"cos": rope[0].data_ptr(), "sin": rope[1].data_ptr()}
        self.functions.product(product_of(packed, x, qkv, others))
        return qkv[:, : heads.num_heads], qkv[:, heads.num_heads : rotated], norm_values(self, qkv[:, rotated:], heads)

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        packed = _packed_of(x, linear)
        if packed is None or residual.stride(1) != 1 or residual.dtype != x.dtype:
            return super().add_product(residual, x, linear)
        self._run(x, packed, None, _ADD, None, residual)
        return residual

    def _before(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """Return x and the norm for a C kernel. If it does not support the norm, x is normed here and the norm is None."""
        return (x, norm) if norm is None or norm.by_length is not None else (self.norm(x, norm), None)

    def _store(
        self,
        x: Tensor,
        packed: PackedWeight,
        norm: Norm | None = None,
        activation: Activation | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        out = x.new_empty(len(x), packed.out_features) if out is None else out
        self._run(x, packed, norm, _STORE, activation, out)
        return out

    def _run(
        self, x: Tensor, packed: PackedWeight, norm: Norm | None, mode: int, activation: Activation | None, out: Tensor
    ) -> None:
        factors, least = _norm(norm)
        others = {"norm": factors, "norm_least": least, "mode": mode, "activation": _ACTIVATIONS[activation]}
        self.functions.product(product_of(packed, x, out, others))


def _packed_of(x: Tensor, linear: Linear) -> PackedWeight | None:
    """Return a layer's packed weight, or None if the weight is not packed or the C kernels cannot read x."""
    return linear.packed if linear.packed is not None and x.dtype == linear.dtype and x.stride(1) == 1 else None


def _needs_torch(x: Tensor, norm: Norm) -> bool:
    """Return whether the C kernels do not support a norm of x."""
    return norm.by_length is None or x.dim() != 2 or x.stride(1) != 1 or x.dtype not in TYPES


def _normed(norm: Norm | None) -> bool:
    """Return whether the C kernels can apply a norm. This is true for None and for an RMSNorm on one rank."""
    return norm is None or norm.by_length is not None


def _norm(norm: Norm | None) -> tuple[int | None, float]:
    """Return the address of a norm's factors (None without a norm), and the term that is added to the sum of squares."""
    if norm is None:
        return None, 0.0
    assert norm.by_length is not None
    return norm.by_length[0].data_ptr(), norm.weight.shape[0] * norm.eps
