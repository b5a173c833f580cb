"""The least time a generation could take: what must be read at the device's read rate, and computed at its matrix rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.stats import EngineStats
from headway.models.config import DecoderConfig
from headway.models.cut import ModelCut
from headway.models.layers.decoder import STATE_PARTS, Decoder, ExpertsMLP
from headway.tuning.measure.timing import Timer


@dataclass(frozen=True)
class Rates:
    """What the device was measured to do."""

    read_gbps: float
    """1e9 bytes a second, of a large sum."""
    matrix_tflops: float


@dataclass(frozen=True)
class Floor:
    """Seconds."""

    decode: float
    """Every step's weights, and K and V of every decoded token's context, read once."""
    prefill: float
    """The prompts' floating-point operations, less the reading of weights that `decode` counts for those steps already."""

    @property
    def total(self) -> float:
        """Seconds of the whole generation."""
        return self.decode + self.prefill


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of a weight's element on average, as they are held: quantised ones with their scales."""

    products: float
    head: float
    experts: float

    @classmethod
    def of(cls, decoder: Decoder) -> ElementBytes:
        """Count what a model's products and experts hold."""
        linears = [linear for linear, _ in decoder.products]
        experts = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, ExpertsMLP)]
        usual = float(decoder.dtype.itemsize)
        return cls(
            _average(((each.held_bytes, each.out_features * each.in_features) for each in linears), usual),
            _average([(decoder.lm_head.held_bytes, decoder.lm_head.out_features * decoder.lm_head.in_features)], usual),
            _average(((each.held_bytes, each.num_elements) for each in experts), usual),
        )


class Roofline:
    """The counts of one model. Norms, activations, sampling, states and writes are left out, so the floor is a little too low."""

    def __init__(
        self, config: DecoderConfig, specs: Sequence[AttentionSpec], ranks: int = 1, held: ElementBytes | None = None
    ) -> None:
        """config: the whole model's. specs: one rank's. ranks: so many devices read and compute a part each, all at once.

        held: bytes of an element of each kind of weight; None: every element takes what one of the model's does.
        """
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size * (3 if config.gated else 2)
        layers = config.layers
        num_sparse, num_dense = (sum(layer.mlp == kind for layer in layers) for kind in ("experts", "dense"))
        attention = (3 if config.output_gate else 2) * q_size + 2 * kv_size
        rows = sum(layer.attention for layer in layers) * attention + num_dense * inner
        if config.state is not None:
            spec = config.state.spec
            sections = STATE_PARTS[spec.kind].sections(ModelCut(config).state)
            rows += sum(layer.state for layer in layers) * (sum(axis.size for axis in sections.values()) + spec.out_channels)
        self._config = config
        self._ranks = ranks
        self._expert_params = 0
        """One routed expert's in every layer that has experts."""
        if config.experts is not None:
            experts = config.experts
            products = 3 if experts.gated else 2
            rows += num_sparse * (experts.num_logits + products * experts.shared_intermediate_size)
            self._expert_params = products * num_sparse * experts.intermediate_size * config.hidden_size
        self._layer_params = config.hidden_size * rows
        self._held = held or ElementBytes(*[float(specs[0].dtype.itemsize)] * 3)
        self._head_params = config.vocab_size * config.hidden_size
        self.weight_bytes = round((self._layer_params * self._held.products + self._head_params * self._held.head) / ranks)
        """Read by every step: all products but routed experts' and the output head; of the embedding a step reads single rows,
        which are left out."""
        self.kv_bytes = sum(spec.cache_row_bytes for spec in specs)
        """K and V of one token, all layers."""

    def expert_bytes(self, num_tokens: float) -> float:
        """Weights of the routed experts that a step of so many tokens touches, if all experts are chosen equally often."""
        experts = self._config.experts
        if experts is None:
            return 0.0
        missed: float = (1 - experts.top_k / experts.num_experts) ** num_tokens
        touched = experts.num_experts * (1 - missed)
        return touched * self._expert_params * self._held.experts / self._ranks

    def prefill_flops(self, prompt_lens: Sequence[int]) -> float:
        """Operations of a device to compute prompts once.

        Products of every token, attention by causality and window, logits of the last.
        """
        config = self._config
        keys = sum(keys_seen(length, window) for length in prompt_lens for window in config.sliding_windows)
        of_token = self._layer_params + (0 if config.experts is None else config.experts.top_k * self._expert_params)
        products = of_token * sum(prompt_lens) + self._head_params * len(prompt_lens)
        return (2 * products + 4 * config.num_heads * config.head_dim * keys) / self._ranks

    def floor(self, stats: EngineStats, prompt_lens: Sequence[int], step_tokens: int, rates: Rates) -> Floor:
        """Least time for prompts and the steps that were counted; step_tokens: most tokens of a step.

        Contexts count in full, also where a sliding window reads less.
        """
        read = 1e9 * rates.read_gbps
        step_bytes = self.weight_bytes + self.expert_bytes(stats.num_decode_tokens / max(stats.num_steps, 1))
        decode = (stats.num_steps * step_bytes + stats.kv_tokens_read * self.kv_bytes) / read
        prefill_steps = -(-sum(prompt_lens) // step_tokens)
        compute = self.prefill_flops(prompt_lens) / (1e12 * rates.matrix_tflops)
        return Floor(decode, max(compute - prefill_steps * step_bytes / read, 0.0))


def _average(counted: Iterable[tuple[int, int]], usual: float) -> float:
    """Bytes for each element. counted: bytes and elements; usual: of no elements at all."""
    counted = list(counted)
    elements = sum(each for _, each in counted)
    return sum(each for each, _ in counted) / elements if elements else usual


def keys_seen(length: int, window: int | None) -> int:
    """Keys that the queries of a prompt see, summed over the queries."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def measure_read_gbps(device: torch.device, timer: Timer) -> float:
    """1e9 bytes a second of a sum over 2 GiB of float32 (64 MiB on a CPU, an eighth of a GPU's free memory if that is less)."""
    size = min(2**31, torch.cuda.mem_get_info(device)[0] // 8) if device.type == "cuda" else 2**26
    numbers = torch.ones(size // 4, device=device)
    return numbers.nbytes / timer.time(lambda: numbers.sum(), device).median_us * 1e-3
