"""A source of weights that rounds them: plain checkpoints on loading, and random ones in a checkpoint's format."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headway.core.system.text import shown_size
from headway.kernels.linear.axes import Axis, Shape, axes_of, held_part
from headway.kernels.linear.forms import QuantizedWeight, columns_of, merged, num_bytes, rows_of
from headway.models.checkpoints.formats.stored import StoredFormat
from headway.models.checkpoints.weights import STD, DummyWeights, WeightSource

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
        self._inner = inner
        self._quantize = quantize
        self._keeps = keeps
        self._keeps_experts = keeps_experts
        self._experts_alone = experts_alone
        self.dtype = inner.dtype
        self.device = inner.device
        self.take = inner.take
        self.take_merged = inner.take_merged
        self.take_as = inner.take_as
        self.take_number = inner.take_number
        self.take_head = inner.take_head
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


class DummyInFormat(QuantizeOnLoading):
    """Random weights in a checkpoint's format: codes and scales are drawn, whole, so that all ranks draw alike, and then cut."""

    def __init__(
        self,
        inner: DummyWeights,
        form: StoredFormat,
        keeps: Callable[[QuantizedWeight], bool],
        keeps_experts: Callable[[QuantizedWeight], bool] = lambda weight: False,
    ) -> None:
        """form: of the checkpoint's weights; what it expands is drawn as plain weights are. keeps: see `QuantizeOnLoading`."""
        super().__init__(inner, lambda weight: weight, keeps, keeps_experts, form.of_experts)
        self._dummy = inner
        self._form = form

    def take_product(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        if self._experts_alone:
            return super().take_product(sizes, in_features)
        drawn = self._drawn(_rows_of(sizes), Axis.of(in_features))
        return super().take_product(sizes, in_features) if drawn is None else self._rounded(drawn, self._keeps)

    def take_experts(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        drawn = self._drawn(_rows_of(sizes), Axis.of(in_features))
        return super().take_experts(sizes, in_features) if drawn is None else self._rounded(drawn, self._keeps_experts)

    def take_stacked(self, name: str, shape: Shape, transposed: bool = False) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        experts, high, wide = axes_of(shape)
        each, columns = (wide, high) if transposed else (high, wide)
        held = [
            range(at * each.whole + one.start, at * each.whole + one.stop)
            for run in experts.held
            for at in run
            for one in each.held
        ]
        drawn = self._drawn(Axis(experts.whole * each.whole, tuple(held)), columns)
        if drawn is None:
            return super().take_stacked(name, shape, transposed)
        weight = self._rounded(drawn, self._keeps_experts)
        if not isinstance(weight, Tensor):
            return weight
        stacked = weight.view(experts.size, each.size, columns.size)
        return stacked.mT if transposed else stacked

    def _octets(self, *shape: int) -> Tensor:
        """uint8, each of the 256 values as often as any other: 8 of one number of the generator."""
        count = math.prod(shape)
        words = torch.empty(-(-count // 8), dtype=torch.int64, device=self.device)
        words.random_(-(2**63), None, generator=self._dummy.generator)
        return words.view(torch.uint8)[:count].view(shape)

    def _drawn(self, rows: Axis, columns: Axis) -> Tensor | QuantizedWeight | None:
        """What is held of a weight; None: the format has no form for it."""
        dummy = self._dummy
        whole = self._form.drawn(self._octets, rows.whole, columns.whole, STD, dummy.dtype)
        if whole is None:
            return None
        cut = whole if rows.is_whole else merged([rows_of(whole, each) for each in rows.held or (range(0),)])
        if columns.is_whole:
            return cut
        narrow = columns_of(cut, columns.held[0]) if len(columns.held) == 1 else None
        return held_part(cut.dequantized(dummy.dtype), (cut.shape[0], columns)) if narrow is None else narrow


def _rows_of(sizes: Mapping[str, int | Axis]) -> Axis:
    return functools.reduce(Axis.__add__, map(Axis.of, sizes.values()))
