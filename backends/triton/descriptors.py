"""Tensor descriptors (TMA) of keys and values, made once for each memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headway.backends.triton.layer import INTERPRETED
from headway.core.contract.layout import LayerCache

_MOST = 256
"""Descriptors that are kept: those of the caches of a large model, and of the buffers for k and v that its steps use in turn."""


class Descriptors:
    """Those of one layer kind. A cache stays where it is, and buffers come back, so that few are ever made."""

    def __init__(self, block_d: int) -> None:
        self._block_d = block_d
        self._known: dict[Hashable, tuple[TensorDescriptor, TensorDescriptor]] = {}

    def of(
        self, keys: Tensor, values: Tensor, cache: LayerCache | None, block_n: int
    ) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Of a cache, or of a step's own k and v [num_tokens, num_kv_heads, head_dim] where it is None; boxes of block_n rows."""
        key = (keys.data_ptr(), values.data_ptr(), cache is None, block_n, keys.shape[0], keys.stride(), values.stride())
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            views = one_block(keys, values) if cache is None else blocks(cache)
            box = [1, 1, block_n, self._block_d]
            first, second = (TensorDescriptor(_memory(t), list(t.shape), list(t.stride()), box) for t in views)
            known = self._known[key] = first, second
        return known


def one_block(k: Tensor, v: Tensor) -> list[Tensor]:
    """Views [1, head, token, dim]: one block that holds every token."""
    return [t.transpose(0, 1).unsqueeze(0) for t in (k, v)]


def blocks(cache: LayerCache) -> list[Tensor]:
    """Views [block, head, slot, dim] of a cache whose head_dim is not split."""
    return [t.squeeze(4).transpose(1, 2) for t in (cache.logical_key, cache.logical_value)]


def describable(view: Tensor) -> bool:
    """Whether the tensor memory accelerator can address it: 16-byte aligned rows, elements side by side."""
    size = view.element_size()
    return view.stride(3) == 1 and view.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in view.stride()[:3])


class _Memory:
    """Stands for a tensor in a descriptor, which would keep it alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        """Its address."""
        return self._address


def _memory(tensor: Tensor) -> Any:
    return tensor if INTERPRETED else _Memory(tensor)
