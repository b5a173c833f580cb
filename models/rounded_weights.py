"""A source of weights that rounds them: plain checkpoints on loading, and random ones in a checkpoint's format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from headway.models.axes import Axis, Shape
from headway.models.quantization.forms import QuantizedWeight, num_bytes
from headway.models.weights import WeightSource, shown_size

log = logging.getLogger("headway")


class QuantizeOnLoading:
    """A source whose weights of products and experts get fewer bits; embeddings, the head and routers stay as they are."""

    def __init__(
        self,
        inner: WeightSource,
        quantize: Callable[[Tensor], QuantizedWeight | Tensor],
        keeps: Callable[[QuantizedWeight], bool],
        keeps_experts: Callable[[QuantizedWeight], bool] = lambda weight: False,
        experts_alone: bool = False,
    ) -> None:
        """keeps, keeps_experts: as of `Weights`; another form is expanded again, rounded.

        experts_alone: nothing else is rounded.
        """
        self._inner, self._quantize, self._keeps, self._keeps_experts = inner, quantize, keeps, keeps_experts
        self._experts_alone = experts_alone
        self.dtype, self.device = inner.dtype, inner.device
        self.take, self.take_merged, self.take_into = inner.take, inner.take_merged, inner.take_into
        self.take_number, self.take_head = inner.take_number, inner.take_head
        self._plain = self._bytes = 0
        """Bytes of the weights that were rounded, before and after."""
        self._forms: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def take_product(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        plain = self._inner.take_product(sizes, in_features)
        return plain if self._experts_alone else self._rounded(plain, self._keeps)

    def take_experts(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        return self._rounded(self._inner.take_experts(sizes, in_features), self._keeps_experts)

    def take_stacked(self, name: str, shape: Shape, transposed: bool = False) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        plain = self._inner.take_stacked(name, shape, transposed)
        if not isinstance(plain, Tensor):
            return plain
        rows = (plain.mT if transposed else plain).flatten(0, 1)
        weight = self._rounded(rows, self._keeps_experts)
        if not isinstance(weight, Tensor):
            return weight
        return weight.view(len(plain), -1, weight.shape[1]).mT if transposed else weight.view(plain.shape)

    def expand(self, weight: QuantizedWeight) -> Tensor:
        """See WeightSource."""
        whole = weight.dequantized(self.dtype)
        self._bytes += whole.nbytes - num_bytes(weight)
        return whole

    def _rounded(self, plain: Tensor | QuantizedWeight, keeps: Callable[[QuantizedWeight], bool]) -> Tensor | QuantizedWeight:
        weight = self._quantize(plain) if isinstance(plain, Tensor) else plain
        if isinstance(weight, Tensor):
            return weight
        kept = weight if keeps(weight) else weight.dequantized(self.dtype)
        if isinstance(plain, Tensor):
            self._forms[weight.kind] = None
            self._plain += plain.nbytes
            self._bytes += kept.nbytes if isinstance(kept, Tensor) else num_bytes(kept)
        return kept

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """See WeightSource; the log says what was rounded."""
        self._inner.finish(ignored, modules)
        if self._forms:
            size, was = shown_size(self._bytes), shown_size(self._plain)
            expanded = "" if self._bytes < self._plain else f", and expanded again to {str(self.dtype).removeprefix('torch.')}"
            became = f"{size} instead of {was}" if not expanded else f"{size} as before"
            log.info("weights: rounded to %s on loading%s: %s", ", ".join(self._forms), expanded, became)
