"""Roofline: the minimum time of a generation from the bytes to read and the operations to compute, at the device's rates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.stats import EngineStats
from headway.models.config import DecoderConfig
from headway.models.layers.decoder import STATE_PARTS, Decoder, ExpertsMLP
from headway.models.shard import ModelShard
from headway.tuning.measure.timing import Timer


@dataclass(frozen=True)
class Rates:
    """Measured rates of the device."""

    read_gbps: float
    """Read rate of a large sum, in GB/s."""
    matrix_tflops: float


@dataclass(frozen=True)
class Floor:
    """Minimum seconds of a generation, by part."""

    decode: float
    """Seconds to read every step's weights once, and K and V of every decoded token's context."""
    prefill: float
    """Seconds to compute the prompts, minus the time to read weights in these steps, which `decode` includes."""

    @property
    def total(self) -> float:
        """Seconds of the whole generation."""
        return self.decode + self.prefill


@dataclass(frozen=True)
class ElementBytes:
    """Mean bytes per weight element in the stored format, including scales."""

    products: float
    head: float
    experts: float

    @classmethod
    def of(cls, decoder: Decoder) -> ElementBytes:
        """Return the bytes per element of a model's linear layers, head and experts."""
        linears = [linear for linear, _ in decoder.products]
        experts = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, ExpertsMLP)]
        usual = float(decoder.dtype.itemsize)
        return cls(
            _average(((each.held_bytes, each.out_features * each.in_features) for each in linears), usual),
            _average([(decoder.lm_head.held_bytes, decoder.lm_head.out_features * decoder.lm_head.in_features)], usual),
            _average(((each.held_bytes, each.num_elements) for each in experts), usual),
        )


class Roofline:
    """Operation and byte counts of one model. Omits norms, activations, sampling, states and writes, so the minimum is slightly
    low."""

    def __init__(
        self, config: DecoderConfig, specs: Sequence[AttentionSpec], ranks: int = 1, held: ElementBytes | None = None
    ) -> None:
        """config: configuration of the whole model. specs: specs of one rank. ranks: number of devices, each of which reads and
        computes a shard in parallel.
        held: bytes per element of each kind of weight. None means the model's element size."""
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size * (3 if config.gated else 2)
        layers = config.layers
        num_sparse, num_dense = (sum(layer.mlp == kind for layer in layers) for kind in ("experts", "dense"))
        attention = (3 if config.output_gate else 2) * q_size + 2 * kv_size
        rows = sum(layer.attention for layer in layers) * attention + num_dense * inner
        if config.state is not None:
            spec = config.state.spec
            sections = STATE_PARTS[spec.kind].sections(ModelShard(config).state)
            rows += sum(layer.state for layer in layers) * (sum(axis.size for axis in sections.values()) + spec.out_channels)
        self._config = config
        self._ranks = ranks
        self._expert_params = 0
        """Parameters of one routed expert, summed over all expert layers."""
        if config.experts is not None:
            experts = config.experts
            products = 3 if experts.gated else 2
            rows += num_sparse * (experts.num_logits + products * experts.shared_intermediate_size)
            self._expert_params = products * num_sparse * experts.intermediate_size * config.hidden_size
        self._layer_params = config.hidden_size * rows
        self._stored = held or ElementBytes(*[float(specs[0].dtype.itemsize)] * 3)
        self._head_params = config.vocab_size * config.hidden_size
        self.weight_bytes = round((self._layer_params * self._stored.products + self._head_params * self._stored.head) / ranks)
        """Bytes that every step reads: all linear layers and the head, without routed experts. A step reads only single rows of
        the embedding, which are omitted."""
        self.kv_bytes = sum(spec.cache_row_bytes for spec in specs)
        """Bytes of K and V of one token, in all layers."""

    def expert_bytes(self, num_tokens: float) -> float:
        """Return the bytes of routed experts that a step with `num_tokens` touches, if experts are chosen uniformly."""
        experts = self._config.experts
        if experts is None:
            return 0.0
        missed: float = (1 - experts.top_k / experts.num_experts) ** num_tokens
        touched = experts.num_experts * (1 - missed)
        return touched * self._expert_params * self._stored.experts / self._ranks

    def prefill_flops(self, prompt_lens: Sequence[int]) -> float:
        """Return the operations per device to compute prompts once.

        Counts linear layers for every token, attention within mask and window, and logits of the last token.
        """
        config = self._config
        keys = sum(keys_seen(length, window) for length in prompt_lens for window in config.sliding_windows)
        of_token = self._layer_params + (0 if config.experts is None else config.experts.top_k * self._expert_params)
        products = of_token * sum(prompt_lens) + self._head_params * len(prompt_lens)
        return (2 * products + 4 * config.num_heads * config.head_dim * keys) / self._ranks

    def floor(self, stats: EngineStats, prompt_lens: Sequence[int], step_tokens: int, rates: Rates) -> Floor:
        """Return the minimum time for prompts and the counted steps. step_tokens: maximum number of tokens per step.

        Contexts count in full, even if a sliding window reads less.
        """
        read = 1e9 * rates.read_gbps
        step_bytes = self.weight_bytes + self.expert_bytes(stats.num_decode_tokens / max(stats.num_steps, 1))
        decode = (stats.num_steps * step_bytes + stats.kv_tokens_read * self.kv_bytes) / read
        prefill_steps = -(-sum(prompt_lens) // step_tokens)
        compute = self.prefill_flops(prompt_lens) / (1e12 * rates.matrix_tflops)
        return Floor(decode, max(compute - prefill_steps * step_bytes / read, 0.0))


def _average(counted: Iterable[tuple[int, int]], usual: float) -> float:
    """Return the mean bytes per element. counted: pairs (bytes, elements). usual: result if there are no elements."""
    counted = list(counted)
    elements = sum(each for _, each in counted)
    return sum(each for each, _ in counted) / elements if elements else usual


def keys_seen(length: int, window: int | None) -> int:
    """Return the number of keys that a prompt's queries see, summed over the queries."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def measure_read_gbps(device: torch.device, timer: Timer) -> float:
    """Return the GB/s of a sum over 2 GiB of float32 (64 MiB on a CPU, or an eighth of the GPU's free memory if less)."""
    size = min(2**31, torch.cuda.mem_get_info(device)[0] // 8) if device.type == "cuda" else 2**26
    numbers = torch.ones(size // 4, device=device)
    return numbers.nbytes / timer.time(lambda: numbers.sum(), device).median_us * 1e-3
