"""Predicted time of one step on one rank: GEMMs, attention, experts, states, all-reduces and the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.core.contract.metadata import Phase
from headway.core.contract.state import KEY_VALUE, StateSpec
from headway.core.select.costs import Shape
from headway.plan.attention_times import AttentionTimes, Source
from headway.plan.devices import H200, GpuKind, Utilisation
from headway.plan.model_costs import ProductShape, RankCosts

WEAKEST_FIRST: tuple[Source, ...] = ("data sheet", "like", "table")
GRAPH_TOKENS = 2048
"""Maximum number of tokens in a prefill step that runs as one CUDA graph (`headway.core.engine.execution`)."""


@dataclass(frozen=True)
class StepWork:
    """The sequences of one step."""

    query_lens: Sequence[int] = ()
    """Number of new tokens of each prompt or chunk of a prompt."""
    kv_lens: Sequence[int] = ()
    """Number of cached plus new tokens of each prompt or chunk, in the order of query_lens."""
    num_decodes: int = 0
    """Number of sequences that decode one token."""
    decode_kv: int = 0
    """Mean number of cached plus new tokens of the decoding sequences."""
    num_sampled: int = 0
    """Number of sequences whose next token the step samples."""

    @property
    def num_tokens(self) -> int:
        """Number of new tokens in the step."""
        return sum(self.query_lens) + self.num_decodes


@dataclass(frozen=True)
class StepParts:
    """Time of a step by component, in microseconds. All components except `host` and `launches` run one after another on the
    device."""

    products: float = 0.0
    attention: float = 0.0
    experts: float = 0.0
    states: float = 0.0
    sums: float = 0.0
    """Time of all-reduces and of the exchange of sampled tokens."""
    other: float = 0.0
    host: float = 0.0
    """Time of host work before a step. The device does not wait if this work takes less time than the previous step."""
    launches: float = 0.0
    """Time of host work after the device has started the step, in which kernels are launched one by one."""

    def times(self, host_free: float, device_free: float) -> tuple[float, float]:
        """Return the times in seconds at which host and device finish a step, given the times at which they become free."""
        begun = host_free + 1e-6 * self.host
        launched = begun + 1e-6 * self.launches
        return launched, max(max(begun, device_free) + 1e-6 * self.device, launched)

    @property
    def device(self) -> float:
        """Time on the device, in microseconds."""
        return self.products + self.attention + self.experts + self.states + self.sums + self.other


class StepPredictor:
    """Predictor of step times on one rank."""

    def __init__(
        self, gpu: GpuKind, costs: RankCosts, reached: Utilisation = H200, attention: AttentionTimes | None = None
    ) -> None:
        """attention: attention times for this kind of GPU. None means times from the data sheet."""
        self.gpu = gpu
        self.costs = costs
        self._reached = reached
        self._attention = AttentionTimes(gpu, reached) if attention is None else attention
        self._read = gpu.read_rate * 1e-6
        self._matrix = gpu.matrix_rate * 1e-6  # per microsecond
        self._decodes: dict[tuple[int, int], StepParts] = {}

    @property
    def attention_source(self) -> Source:
        """The least reliable source of the attention times."""
        found = {self._attention.source(spec) for spec in self.costs.layers.counts}
        return next((source for source in WEAKEST_FIRST if source in found), "none")

    def step(self, work: StepWork) -> StepParts:
        """Return the components of a step."""
        rounded = replace(work, decode_kv=_rounded(work.decode_kv))
        if work.query_lens:
            return self._parts(rounded)
        key = rounded.num_decodes, rounded.decode_kv
        if key not in self._decodes:
            self._decodes[key] = self._parts(rounded)
        return self._decodes[key]

    def _parts(self, work: StepWork) -> StepParts:
        costs, reached, tokens = self.costs, self._reached, work.num_tokens
        products = sum(each.count * self._product(each, tokens) for each in costs.products)
        products += self._product(costs.head, work.num_sampled) if work.num_sampled else 0.0
        width = costs.config.hidden_size * 8 + sum(each.rows + each.columns for each in costs.products[-2:])
        elements = tokens * width * costs.itemsize * costs.config.num_layers / (self._read * reached.element_read)
        return StepParts(
            products=products,
            attention=self._attend(work),
            experts=self._experts(tokens),
            states=sum(self._state(spec, work) for spec in costs.layers.states),
            sums=self._sums(tokens, work.num_sampled),
            other=reached.step_us + costs.config.num_layers * reached.layer_us + elements,
            host=reached.host_us + reached.host_sequence_us * (work.num_decodes + len(work.query_lens)),
            launches=costs.config.num_layers * self._launches_of_a_layer(work),
        )

    def _launches_of_a_layer(self, work: StepWork) -> float:
        """Return the host time for launching a layer's kernels, in microseconds. 0 for steps that run as one CUDA graph (decode,
        short prefill)."""
        if not work.query_lens:
            return 0.0
        if work.num_decodes:
            return self._reached.host_mixed_us
        return self._reached.host_layer_us if work.num_tokens > GRAPH_TOKENS else 0.0

    def _product(self, product: ProductShape, tokens: int) -> float:
        """Return the time of a GEMM in microseconds. Reading the weights overlaps with the tensor cores' work."""
        weights = product.rows * product.columns
        rate = self._read * self._reached.product_read * self.costs.weights.rate
        read = weights * self.costs.bytes_per_weight / rate
        depth = 1 + self._reached.product_depth / product.columns
        compute = 2 * weights * tokens * depth / (self._matrix * self._reached.product_matrix)
        return self._reached.product_us + math.hypot(read, compute)

    def _experts(self, tokens: int) -> float:
        """Return the time of all layers of routed experts, in microseconds."""
        experts = self.costs.experts
        if experts is None:
            return 0.0
        rate = self._read * self._reached.product_read * self.costs.weights.expert_rate
        read = experts.touched(tokens) * experts.params * self.costs.bytes_per_expert_weight / rate
        operations = 2 * tokens * experts.config.top_k * experts.params
        compute = operations / (self._matrix * self._reached.expert_matrix)
        return experts.count * (self._reached.expert_us + math.hypot(read, compute))

    def _sums(self, tokens: int, rows: int) -> float:
        """Return the time of all-reduces and of the exchange of sampled tokens between ranks, in microseconds. rows: number of
        sampled rows."""
        costs, size = self.costs, self.costs.size
        if size == 1:
            return 0.0
        table = self.gpu.all_reduce
        summed = costs.num_sums * table.us(size, tokens * costs.config.hidden_size * costs.itemsize)
        return summed + table.us(size, rows * 8)

    def _state(self, spec: StateSpec, work: StepWork) -> float:
        """Return the time of a state layer in microseconds. Decode reads and writes each sequence's state; prefill scans the
        tokens."""
        reached, size, us = self._reached, KEY_VALUE.bytes_per_slot(spec), 0.0
        if work.num_decodes:
            us += reached.state_us + 2 * size * work.num_decodes / (self._read * reached.state_read)
        if work.query_lens:
            elements = max(spec.num_heads * spec.key_dim * spec.value_dim, spec.conv_channels)
            rate = reached.scan_flops * 1e-6 * self.gpu.matrix_rate / 989e12
            us += reached.state_us * 4 + 6 * elements * sum(work.query_lens) / rate
        return us

    def _attend(self, work: StepWork) -> float:
        us = 0.0
        for spec, count in self.costs.kinds.items():
            if work.num_decodes:
                shape = Shape(Phase.DECODE, work.num_decodes, 1, max(work.decode_kv, 1))
                us += count * self._attention.us(spec, shape)
            pairs = list(zip(work.query_lens, work.kv_lens, strict=True))
            for phase, wanted in ((Phase.PREFILL, False), (Phase.EXTEND, True)):
                chosen = [(new, kv) for new, kv in pairs if (kv > new) is wanted]
                if chosen:
                    shape = Shape.of(phase, [new for new, _ in chosen], [kv for _, kv in chosen])
                    us += count * self._attention.us(self.costs.layers.in_phase(spec, phase), shape)
        return us


def _rounded(length: int) -> int:
    """Return a length rounded to about 2 %, so that similar steps are predicted once."""
    unit = 1 << max(length.bit_length() - 6, 0)
    return max(round(length / unit) * unit, 1)
