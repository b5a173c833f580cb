"""What an attention module of transformers calls in place of its own attention: Headway's, on the paged cache.

transformers finds it by name (`AttentionInterface`), and no mask is built for that name, since none is registered for it. A
module that takes part carries an `AttentionSite`, which knows its layer and what every call must hand over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from headway.core.contract.errors import ModelError
from headway.core.contract.model import Attention

NAME = "headway_engine"
"""The attention implementation that is served."""
SITE = "headway_site"
"""The attribute of an attention module that holds its `AttentionSite`."""


class Passed(NamedTuple):
    """What a call hands over beside the tensors' elements; it is the same in every call of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scaling: float
    sliding_window: int | None
    softcap: float | None

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Passed:
        """query, key, value: [1, heads, num_tokens, head_dim], as the attention interface has them."""
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
    """What all attention modules of a model share: the attention of the call that runs now."""

    attention: Attention | None = None
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = next(_HANDLES)
        _LIVE[self.handle] = self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `core.contract.model.Attention`."""
        assert self.attention is not None, "an attention module runs only inside a call of its model"
        return self.attention(layer, q, k, v)


@dataclass(eq=False)
class AttentionSite:
    """One attention module of a model."""

    name: str
    """Path of the module in the model."""
    layer: int
    """The number by which the engine knows it: attentions are counted in the order in which the model calls them."""
    passed: Passed
    """What the probe saw it hand over, and its spec says."""
    sinks: Tensor | None
    """The parameter that holds its sinks."""
    current: Current
    place: Tensor = field(init=False)
    """int64 [2] in host memory: handle and layer. A compiler that sees a tensor makes one kernel of all layers."""

    def __post_init__(self) -> None:
        self.place = torch.tensor([self.current.handle, self.layer])

    def check(self, passed: Passed, sinks: Tensor | None, mask: object) -> None:
        """Hold a call against the spec.

        :raises ModelError: it hands over something else.
        """
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
    """The function that transformers calls. query, key, value: [1, heads, num_tokens, head_dim] of all sequences of a step.

    Returns ([1, num_tokens, num_heads, v_head_dim], None).

    :raises ModelError: what is handed over is not what the layer's spec says.
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
    """[1, heads, num_tokens, dim] as [num_tokens, heads, dim]: a view, unless tokens do not lie one after the other in memory."""
    tokens = tensor[0].transpose(0, 1)
    heads, dim = tokens.shape[1:]
    whole = tokens.stride(2) == 1 and tokens.stride(0) >= tokens.stride(1) * (heads - 1) + dim
    return tokens if whole else tokens.contiguous()


# torch's op registry is global, and an op takes tensors and numbers only: a number finds the live object again.
_HANDLES = count()
_LIVE: WeakValueDictionary[int, Current] = WeakValueDictionary()

_library = torch.library.Library("headway", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("adapted_attention(Tensor q, Tensor k, Tensor v, Tensor place) -> Tensor")  # type: ignore[no-untyped-call]


def _attend(q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
    handle, layer = place.tolist()
    return _LIVE[handle].attend(layer, q, k, v)


def _attend_fake(q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:2], v.shape[2]))


_library.impl("adapted_attention", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("headway::adapted_attention", _attend_fake, lib=_library)

AttentionInterface.register(NAME, attend)
