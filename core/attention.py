"""The one function a model calls: `attention(layer, q, k, v) -> out`, a torch.library op so that compilers leave it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from headway.core.backend import AttentionBackend, Plan
from headway.core.errors import BackendError, HeadwayError
from headway.core.layout import CacheWriter, LayerCache
from headway.core.metadata import AttentionMetadata, Phase
from headway.core.spec import AttentionSpec

Backends = Mapping[AttentionSpec, AttentionBackend]
"""The instance that serves each distinct spec."""


class PagedAttention:
    """Cache and backends of all layers of one model. `begin` sets a step up, then each layer calls it once.

    Layers with equal specs share one plan: planning is paid per spec and step, not per layer.
    """

    def __init__(self, specs: Sequence[AttentionSpec], caches: Sequence[LayerCache], writer: CacheWriter) -> None:
        assert len(specs) == len(caches)
        self.specs = list(specs)
        self.caches = list(caches)
        self._write = writer
        self._metadata: AttentionMetadata | None = None
        self._parts: list[tuple[Phase, slice, Backends, dict[AttentionSpec, Plan]]] = []
        self._handle = next(_HANDLES)
        _LIVE[self._handle] = self

    def begin(self, metadata: AttentionMetadata, prefill: Backends, decode: Backends) -> None:
        """Plan one step: `prefill` serves its first part (prefill and extend), `decode` the rest."""
        self._metadata = metadata
        self._parts = []
        start = 0
        for view, backends in ((metadata.prefill, prefill), (metadata.decode, decode)):
            if view is None:
                continue
            with _blame(backends, view.phase, f"{view.num_seqs} sequences, {view.num_tokens} tokens"):
                plans = {spec: backends[spec].plan(view) for spec in dict.fromkeys(self.specs)}
            self._parts.append((view.phase, slice(start, start + view.num_tokens), backends, plans))
            start += view.num_tokens

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to the layer's cache; attend with q [num_tokens, num_heads, head_dim]."""
        out = torch.empty_like(q)
        torch.ops.headway.attention(q, k, v, out, self._handle, layer)
        return out

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Body of the op `headway::attention`."""
        assert self._metadata is not None, "begin() a step first"
        cache, spec = self.caches[layer], self.specs[layer]
        self._write(k, v, cache, self._metadata.slot_mapping)
        for phase, tokens, backends, plans in self._parts:
            with _blame(backends, phase, f"layer {layer}, q {list(q[tokens].shape)}, k {list(k[tokens].shape)}"):
                backend, plan = backends[spec], plans[spec]
                if phase is Phase.DECODE:
                    backend.decode(q[tokens], cache, plan, out[tokens])
                else:
                    backend.prefill(q[tokens], k[tokens], v[tokens], cache, plan, out[tokens])


class _blame:
    """Turn whatever a backend raises into an error that names it, the phase and the shapes; cheap when nothing is raised."""

    def __init__(self, backends: Backends, phase: Phase, work: str) -> None:
        self.backends, self.phase, self.work = backends, phase, work

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, HeadwayError):
            name = next(iter(self.backends.values())).name
            raise BackendError(
                f"backend {name} failed in {self.phase.value} ({self.work}): {type(error).__name__}: {error}"
            ) from error


# torch's op registry is global, and an op takes tensors and numbers only: a number finds the live object again.
_HANDLES = count()
_LIVE: WeakValueDictionary[int, PagedAttention] = WeakValueDictionary()

_library = torch.library.Library("headway", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int handle, int layer) -> ()"
)


def _attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, handle: int, layer: int) -> None:
    _LIVE[handle].run(layer, q, k, v, out)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, out: Tensor, handle: int, layer: int) -> None:
    return None


_library.impl("attention", _attention, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("attention", _attention_fake, "Meta")  # type: ignore[no-untyped-call]
