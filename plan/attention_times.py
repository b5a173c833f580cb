"""Attention time of a layer: from a crossover table, scaled from a similar layer's time, or from the GPU's data sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from headway.core.contract.layout import LATENT, NHD, NHD_INT8, CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import CostTable, Shape
from headway.plan.devices import GpuKind, Utilisation
from headway.tuning.table.convert import to_costs
from headway.tuning.table.schema import CrossoverTable, SpecRecord

Source = Literal["table", "like", "data sheet", "none"]
"""Source of a time. table: measured for this layer. like: scaled from a similar layer. none: no attention layers."""
_BLOCK_SIZES = (16, 256)  # block sizes to look up, in order of preference; `auto` chooses among them


@dataclass(frozen=True)
class MeasuredLayer:
    """Measured attention times of one kind of layer on one kind of GPU."""

    spec: AttentionSpec
    costs: CostTable
    backends: Sequence[str]

    @classmethod
    def of(cls, table: CrossoverTable) -> MeasuredLayer:
        """Return the times of a kernel-level crossover table."""
        backends = [record.name for record in table.kernels if record.usable]
        return cls(table.attention.to_spec(torch.device("cpu")), to_costs(table), backends)

    def fastest_us(self, shape: Shape) -> float:
        """Return the time in microseconds of the fastest backend, which is the backend that `auto` would choose. Infinite if no
        backend has a measured time."""
        layout = layout_of(self.spec).name
        times = (self.costs.at(shape, name, layout, size)[0] for size in _BLOCK_SIZES for name in self.backends)
        return min(times, default=math.inf)

    def inside(self, shape: Shape) -> Shape:
        """Return the nearest shape within the measured range of batch sizes and lengths."""
        known = self.costs.shapes[shape.phase]
        batch = min(shape.batch, max(each.batch for each in known))
        new = 1 if shape.phase is Phase.DECODE else min(shape.query_len, max(each.query_len for each in known))
        total = min(shape.kv_len - shape.query_len + new, max(each.kv_len for each in known))
        return replace(shape, batch=batch, query_len=min(new, total), kv_len=total)


class AttentionTimes:
    """Predictor of attention times on one kind of GPU."""

    def __init__(self, gpu: GpuKind, reached: Utilisation, measured: Iterable[MeasuredLayer] = ()) -> None:
        """measured: times from crossover tables of this kind of GPU."""
        self._read = gpu.read_rate * 1e-6
        self._matrix = gpu.matrix_rate * 1e-6
        self._reached = reached
        self._measured = {SpecRecord.of(each.spec).key: each for each in measured}
        self._asked: dict[tuple[AttentionSpec, Shape], float] = {}
        self._known: dict[AttentionSpec, tuple[MeasuredLayer | None, Source]] = {}

    def source(self, spec: AttentionSpec) -> Source:
        """Return the source of the times for a kind of layer."""
        return self._of(spec)[1]

    def us(self, spec: AttentionSpec, shape: Shape) -> float:
        """Return the time of one layer's attention call, in microseconds."""
        found = self._asked.get((spec, shape))
        if found is None:
            found = self._asked[spec, shape] = self._us(spec, shape)
        return found

    def _us(self, spec: AttentionSpec, shape: Shape) -> float:
        measured, source = self._of(spec)
        expected = self.data_sheet_us(spec, shape)
        if measured is None or not measured.costs.shapes[shape.phase]:
            return expected
        inside = measured.inside(shape)
        known = measured.fastest_us(inside) - (self._reached.alone_us if shape.phase is Phase.DECODE else 0.0)
        if not math.isfinite(known):
            return expected
        if source == "table" and inside == shape:
            return known
        return known * expected / self.data_sheet_us(measured.spec, inside)

    def _of(self, spec: AttentionSpec) -> tuple[MeasuredLayer | None, Source]:
        """Return (measurements, source) for a kind of layer, or for the most similar measured kind. Without either, the
        measurements are None."""
        if spec not in self._known:
            own = self._measured.get(SpecRecord.of(spec).key)
            like = None if own is not None else self._most_similar(spec)
            found: tuple[MeasuredLayer | None, Source] = (own, "table") if own is not None else (like, "like")
            self._known[spec] = found if found[0] is not None else (None, "data sheet")
        return self._known[spec]

    def _most_similar(self, spec: AttentionSpec) -> MeasuredLayer | None:
        """Return the most similar measured layer with the same head sizes and element type, or None. Similarity is the nearest
        number of KV heads, then of query heads."""

        def distance(other: AttentionSpec) -> tuple[float, float]:
            keys = abs(math.log(other.num_kv_heads / spec.num_kv_heads))
            return keys, abs(math.log(other.num_heads / spec.num_heads))

        def kind(of: AttentionSpec) -> tuple[object, ...]:
            return of.head_dim, of.v_head_dim, of.value_in_key, of.dense, of.dtype

        alike = [each for each in self._measured.values() if kind(each.spec) == kind(spec)]
        return min(alike, key=lambda each: distance(each.spec), default=None)

    def data_sheet_us(self, spec: AttentionSpec, shape: Shape) -> float:
        """Return a time in microseconds, computed from the call's cache bytes and operations and the fractions of peak rates that
        kernels reach."""
        reached, window = self._reached, spec.sliding_window
        seen = shape.kv_len if window is None else min(shape.kv_len, window + shape.query_len - 1)
        row = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize if spec.dense else spec.cache_row_bytes
        read = shape.batch * seen * row / (self._read * reached.decode_read)
        if shape.phase is Phase.DECODE:
            narrow = reached.narrow_us if spec.cache_dtype.itemsize < spec.dtype.itemsize else 0.0
            keys, fixed = float(shape.query_len * seen), reached.decode_us + narrow
        else:
            before = shape.kv_len - shape.query_len
            whole = shape.query_len * before + shape.query_len * (shape.query_len + 1) / 2
            keys, fixed = whole if window is None else min(whole, shape.query_len * window), reached.prefill_us
        operations = 2 * shape.batch * spec.num_heads * (spec.head_dim + spec.v_head_dim) * keys
        return fixed + math.hypot(read, operations / (self._matrix * reached.prefill_matrix))


def layout_of(spec: AttentionSpec) -> CacheLayout:
    """Return the default layout of a layer's KV cache."""
    if spec.value_in_key:
        return LATENT
    return NHD if spec.cache_dtype.is_floating_point else NHD_INT8
