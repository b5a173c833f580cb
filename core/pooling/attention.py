"""Attention of layers that have no cache: this step's keys and values are all there are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from torch import Tensor

from headway.core.contract.backend import Backends, Plan
from headway.core.contract.layout import CacheGeometry
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.execution.faults import blame
from headway.core.select.costs import Shape
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selector import Selector


class DenseAttention:
    """The attention of a model whose layers are all dense. `begin` sets a batch up, then each layer calls it once.

    Layers with equal specs share one plan, and kernels get a cache of one block, which none of them reads.
    """

    def __init__(self, layers: LayerSpecs, selector: Selector) -> None:
        assert all(spec.dense for spec in layers.cached)
        self.layers = layers
        self._selector = selector
        self._kinds = layers.distinct
        self._kind_of = [self._kinds.index(spec) for spec in layers.cached]
        self._block_size = selector.selection.block_size
        geometries = [CacheGeometry.of(spec, 1, self._block_size) for spec in self._kinds]
        layouts = [selector.layout_of(spec) for spec in self._kinds]
        self._unread = [layout.allocate(geometry) for layout, geometry in zip(layouts, geometries, strict=True)]
        self._backends: Backends = {}
        self._plans: list[Plan] = []

    @property
    def serving(self) -> str:
        """The name of the backend that serves the batch set up last."""
        return next(iter(self._backends.values())).name

    @property
    def firsts(self) -> list[int]:
        """The first layer of each kind."""
        return [self._kind_of.index(kind) for kind in range(len(self._kinds))]

    def begin(self, lens: Sequence[int]) -> None:
        """Plan a batch of texts of these lengths, whose tokens lie one text after the other.

        :raises BackendError: the backend cannot plan it.
        """
        shape = Shape.of(Phase.PREFILL, lens, lens)
        self.begin_with(self._selector.backends_of(shape), lens)

    def begin_with(self, backends: Backends, lens: Sequence[int]) -> None:
        """Plan a batch for backends that the caller has chosen; raises as `begin`."""
        tables = numpy.zeros((len(lens), -(-max(lens) // self._block_size)), dtype=numpy.int32)
        device = self.layers.device
        metadata = AttentionMetadata.build(lens, [0] * len(lens), tables, self._block_size, device, num_blocks=1)
        self._backends = backends
        self._plans = []
        for spec in self._kinds:
            backend = backends[spec]
            try:
                self._plans.append(backend.plan(metadata))
            except (Exception, SystemExit) as error:
                raise blame(
                    error, f"backend {backend.name}", Phase.PREFILL, f"plan of {len(lens)} texts, {sum(lens)} tokens"
                ) from error

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `core.contract.model.Attention`; nothing is written.

        :raises BackendError: the backend raised.
        """
        kind = self._kind_of[layer]
        spec: AttentionSpec = self._kinds[kind]
        backend = self._backends[spec]
        out = q.new_empty((*q.shape[:2], spec.v_head_dim))
        try:
            backend.prefill(q, k, v, self._unread[kind], self._plans[kind], out)
        except (Exception, SystemExit) as error:
            raise blame(error, f"backend {backend.name}", Phase.PREFILL, f"layer {layer}, q {list(q.shape)}") from error
        return out
