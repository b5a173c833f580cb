"""Attention functions that transformers' attention modules call: Headway's on the paged KV cache, and a probe at loading.

transformers finds the function by name (`AttentionInterface`). transformers builds no mask for this name, because no mask
function is registered for it. An attention module carries an `AttentionSite`, which knows its layer and the arguments that every
call must have.

The probe is a call with a few tokens that finds out how a model attends, before its engine is created. Attention returns zeros in
this call, so tokens cannot affect one another, unless the model mixes them elsewhere (convolution, state space, recurrence). The
probe detects such mixing by reversing the order of the tokens. A model with such mixing cannot run on packed sequences and is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from headway.core.contract.errors import ModelError
from headway.core.contract.model import Attention

NAME = "headway_engine"
"""Name of Headway's attention implementation."""
SITE = "headway_site"
"""Name of the attribute that stores an attention module's `AttentionSite`."""


class Passed(NamedTuple):
    """Arguments of an attention call, excluding the values of tensors; the same in every call of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scaling: float
    sliding_window: int | None
    softcap: float | None

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Passed:
        """Return the arguments of one call. query, key, value: [1, heads, num_tokens, head_dim]."""
        scaling = options.get("scaling")
        return cls(
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            query.shape[3] ** -0.5 if scaling is None else scaling,
            options.get("sliding_window") or None,
            options.get("softcap"),
        )


@dataclass(eq=False)
class Current:
    """Attention object of the current forward call, shared by all attention modules of a model."""

    attention: Attention | None = None
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = next(_HANDLES)
        _LIVE[self.handle] = self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of one layer. Arguments are as in `core.contract.model.Attention`."""
        assert self.attention is not None, "an attention module runs only inside a call of its model"
        return self.attention(layer, q, k, v)


@dataclass(eq=False)
class AttentionSite:
    """Data that Headway attaches to one attention module of a model."""

    name: str
    """Path of the module in the model."""
    layer: int
    """Index of the attention layer in the engine: modules are numbered in the order in which the model calls them."""
    passed: Passed
    """Arguments seen by the probe, which determine the layer's spec."""
    sinks: Tensor | None
    """Parameter with the module's sink logits. None means no sinks."""
    current: Current
    place: Tensor = field(init=False)
    """int64 [2] in host memory: handle and layer index. Because both are in a tensor, all layers share the compiled code."""

    def __post_init__(self) -> None:
        self.place = torch.tensor([self.current.handle, self.layer])

    def check(self, passed: Passed, sinks: Tensor | None, mask: object) -> None:
        """Check that a call has the arguments of the layer's spec. :raises ModelError: if an argument differs."""
        if passed == self.passed and sinks is self.sinks and mask is None:
            return
        differing = [(*pair, name) for name, *pair in zip(Passed._fields, self.passed, passed, strict=True) if pair[0] != pair[1]]
        if mask is not None:
            differing.append(("none", type(mask).__name__, "attention_mask"))
        if sinks is not self.sinks:
            differing.append(("those that it had", "others", "sinks"))
        needed, got, name = differing[0]
        raise ModelError(
            f"attention layer {self.layer} ({self.name}): {name} needs {needed}, as when the model was loaded, got {got}; its "
            "cache and its kernels were chosen for the first"
        )


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    """Compute attention for transformers. query, key, value: [1, heads, num_tokens, head_dim], all sequences of a step packed.

    Returns ([1, num_tokens, num_heads, v_head_dim], None).

    :raises ModelError: if the arguments differ from the layer's spec.
    """
    site: AttentionSite = getattr(module, SITE)
    site.check(Passed.of(query, key, value, options), options.get("s_aux"), attention_mask)
    q, k, v = (_by_token(tensor) for tensor in (query, key, value))
    if torch.compiler.is_compiling():
        out = torch.ops.headway.adapted_attention(q, k, v, site.place)
    else:
        out = site.current.attend(site.layer, q, k, v)
    return out[None], None


def _by_token(tensor: Tensor) -> Tensor:
    """Convert [1, heads, num_tokens, dim] to [num_tokens, heads, dim]: a view if each token is contiguous, else a copy."""
    tokens = tensor[0].transpose(0, 1)
    heads, dim = tokens.shape[1:]
    whole = tokens.stride(2) == 1 and tokens.stride(0) >= tokens.stride(1) * (heads - 1) + dim
    return tokens if whole else tokens.contiguous()


# torch's op registry is global, and an op takes only tensors and numbers: the number is used to find the live object.
_HANDLES = count()
_LIVE: WeakValueDictionary[int, Current] = WeakValueDictionary()

_library = torch.library.Library("headway", "FRAGMENT")
_library.define("adapted_attention(Tensor q, Tensor k, Tensor v, Tensor place) -> Tensor")


def _attend(q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
    handle, layer = place.tolist()
    return _LIVE[handle].attend(layer, q, k, v)


_library.impl("adapted_attention", _attend, "CompositeExplicitAutograd")
torch.library.register_fake(
    "headway::adapted_attention", lambda q, k, v, place: q.new_empty((*q.shape[:2], v.shape[2])), lib=_library
)

AttentionInterface.register(NAME, attend)


PROBE = "headway_probe"
"""Name of Headway's attention implementation during the probe."""
NUM_TOKENS = 6
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Maximum error relative to a row's norm, for each dtype. The tolerance is needed because GEMMs may round differently if rows are
reordered."""

_UNDERSTOOD = {
    *("scaling", "sliding_window", "softcap", "s_aux"),
    # Without effect here: there is no dropout, and positions were applied before.
    *("dropout", "position_ids", "cache_position", "position_embeddings", "layer_idx", "cu_seq_lens_q", "cu_seq_lens_k"),
    *("max_length_q", "max_length_k", "use_cache", "logits_to_keep", "is_causal", "deterministic", "target_dtype"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "training"),
}


@dataclass(eq=False)
class Call:
    """Recorded call of one attention module."""

    name: str
    module: nn.Module
    passed: Passed
    sinks: Tensor | None
    tensors: tuple[Tensor, ...]
    """query, key and value: [1, heads, NUM_TOKENS, dim]."""


class _Recorder:
    def __init__(self, model: nn.Module, longest: int) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.longest = longest
        self.calls: list[Call] = []


_RECORDER: ContextVar[_Recorder] = ContextVar("headway_adapter_probe")


def run_probe(model: Any, forward: Callable[[], Tensor], longest: int = 0) -> tuple[Tensor, list[Call]]:
    """Return the result of `forward()`, and the attention calls that it makes, in order.

    longest: number of positions up to which each layer's mask is checked against its call. 0 means that masks are not checked.

    :raises ModelError: if an AttentionSpec cannot describe a call.
    """
    recorder = _Recorder(model, longest)
    token = _RECORDER.set(recorder)
    try:
        return forward(), recorder.calls
    finally:
        _RECORDER.reset(token)


@contextmanager
def probing(model: Any, name_after: str) -> Iterator[None]:
    """Use the probe as the model's attention inside the context, and the implementation `name_after` afterwards."""
    model.set_attn_implementation(PROBE)
    try:
        yield
    finally:
        model.set_attn_implementation(name_after)


def differ(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of rows [..., size] differ by more than rounding errors."""
    apart, size = (a.float() - b.float()).norm(dim=-1), a.float().norm(dim=-1)
    return bool((apart > _TOLERANCE[a.dtype] * size).any())


def _attend_probing(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    recorder = _RECORDER.get()
    name, layer = recorder.names[module], len(recorder.calls)
    where = f"attention layer {layer} ({name})"
    if any(call.module is module for call in recorder.calls):
        raise ModelError(f"{where}: is called twice for one token, and Headway keeps one key and value of it")
    giving = next((call.name for call in recorder.calls if key is call.tensors[1] or value is call.tensors[2]), None)
    if giving is not None:
        shared = getattr(module.config, "num_kv_shared_layers", None)
        field = "" if shared is None else f" (num_kv_shared_layers={shared} in config.json)"
        raise ModelError(
            f"{where}: has no keys and values of its own and reads those of {giving}{field}; Headway keeps keys and values "
            "for each layer, and does not serve layers that share them yet"
        )
    passed, sinks = Passed.of(query, key, value, options), options.get("s_aux")
    unknown = sorted(name for name, value in options.items() if value is not None and name not in _UNDERSTOOD)
    if unknown:
        raise ModelError(f"{where}: hands {', '.join(unknown)} to its attention, which Headway's does not know")
    tokens = query.shape[0], query.shape[2], key.shape[2], value.shape[2]
    if tokens != (1, NUM_TOKENS, NUM_TOKENS, NUM_TOKENS) or key.shape[3] != passed.head_dim or value.shape[1] != key.shape[1]:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ModelError(f"{where}: needs a query, key and value for each of {NUM_TOKENS} tokens, got shapes {shapes}")
    if recorder.longest:
        _check_mask(where, attention_mask, passed.sliding_window, options, module, recorder.longest)
    recorder.calls.append(Call(name, module, passed, sinks, (query, key, value)))
    return query.new_zeros(1, NUM_TOKENS, passed.num_heads, passed.v_head_dim), None


class _Mask(Tensor):
    """Attention mask that stores the rule from which transformers would build it."""

    rule: Callable[..., Tensor]


def _mask(q_length: int, kv_length: int, mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
    """Return a `_Mask` with its rule; transformers calls this function for every kind of mask that a model requests."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool).as_subclass(_Mask)
    mask.rule = mask_function
    return mask


def _check_mask(where: str, mask: Any, window: int | None, options: dict[str, Any], module: nn.Module, longest: int) -> None:
    """Check the rule of the layer's mask against the arguments of the call.

    :raises ModelError: if the rule and the arguments differ, so that attention without the mask would give a different result.
    """
    rule = getattr(mask, "rule", None)
    if rule is None:
        causal = options.get("is_causal")
        if mask is not None or not (getattr(module, "is_causal", True) if causal is None else causal):
            kind = "is not causal" if mask is None else "has a mask of the model's own"
            raise ModelError(f"{where}: {kind}; Headway computes causal attention over a whole sequence or a window")
        return
    keys, zero = torch.arange(longest), torch.tensor(0)
    for query in (longest - 1, longest // 2):
        seen = rule(zero, zero, torch.tensor(query), keys).expand(longest)
        if bool((seen & (keys > query)).any()):
            raise ModelError(f"{where}: its attention is bidirectional, as an encoder's is; Headway computes causal attention")
        expected = keys <= query if window is None else (keys <= query) & (keys > query - window)
        if not torch.equal(seen, expected):
            raise ModelError(
                f"{where}: its call says {f'sliding_window={window}' if window else 'no window'}, which shows token {query} "
                f"{int(expected.sum())} keys, and its mask shows it {int(seen.sum())}; Headway computes causal attention over a "
                "whole sequence or a window"
            )


AttentionInterface.register(PROBE, _attend_probing)
AttentionMaskInterface.register(PROBE, _mask)
