"""Costs of a model from its configuration: bytes and operations of a step on one rank, and the rank's memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import torch

from headway.core.contract.errors import ConfigError, ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.model import StateLayer
from headway.core.contract.spec import KV_DTYPES, AttentionSpec
from headway.core.contract.state import KEY_VALUE, StateParameters
from headway.core.engine.data.groups import PageFormat, page_format
from headway.core.engine.data.pool import SMALLEST_CHUNK, pool_size, size_text
from headway.core.engine.data.state_slots import StateSlots, plan_slots
from headway.core.select.request import LayerSpecs
from headway.models.checkpoints.checkpoint import check_folder
from headway.models.checkpoints.locate import locate
from headway.models.config import DecoderConfig, LayerConfig
from headway.models.families.families import TEXT_PARTS
from headway.models.layers.decoder import STATE_PARTS
from headway.models.loader import decoder_config, decoder_layer_specs, read_config
from headway.models.shard import ModelShard
from headway.plan.attention_times import layout_of
from headway.plan.devices import GIB, GpuKind

_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": (),
    "num_hidden_layers": ("hybrid_override_pattern", "layers_block_type", "layer_types"),
    "num_attention_heads": (),
    "vocab_size": (),
}
"""Required size in transformers' configuration -> names of fields that may replace it. A missing size is an error, because
transformers' default would be wrong."""


class PlannedModel(NamedTuple):
    """Data about a model that a plan needs."""

    config: DecoderConfig
    dtype: torch.dtype
    """Element type of weights, activations and, by default, the KV cache."""


def read_planned_model(model: str) -> PlannedModel:
    """Read a model's configuration from a folder, hub id or shape name. :raises ModelError: if the model is unknown or
    unsupported."""
    folder = locate(model, weights=False)
    missing = _missing(folder)
    if missing:
        raise ModelError(f"model {model}: config.json needs {', '.join(missing)}, got none; a plan is made of sizes alone")
    read = read_config(folder)
    config = decoder_config(read, required=True)
    assert config is not None
    return PlannedModel(config, read.dtype or torch.bfloat16)


def _missing(folder: Path) -> list[str]:
    stated: Any = check_folder(folder)
    kind = stated["model_type"]
    stated = stated.get("text_config", stated) if kind in TEXT_PARTS else stated
    lacking = {name for name, others in _SIZES.items() if not {name, *others} & set(stated)}
    if not lacking:
        return []
    from transformers import CONFIG_MAPPING

    own = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    return sorted(name for name in lacking if own.get(name) not in stated)


UNEVENNESS: Final = 0.75
"""Standard deviation of the logarithm of the experts' selection frequencies. Values from 0.65 to 0.9 match the experts selected
per layer in bench/results/h200/experts-vllm.json: with 16 and 64 tokens, 70.2 and 108.6 of 128 experts, and 44.6 and 59.8 of 64
experts."""


@dataclass(frozen=True)
class WeightPrecision:
    """Storage format of linear and expert weights; embedding, head, routers and norms keep the model's element type."""

    name: str
    bits: float | None
    """Bits per weight, including the scales. None means the size of the model's element type."""
    rate: float = 1.0
    """Bytes per second at which GEMMs read these weights, relative to 16-bit weights. Measured for 1, 16 and 64 requests with
    Llama-3-8B's shape on an H100 and an H200 (weights-*.json in bench/results, docs/plan.md)."""
    option: str | None = ""
    """Option that quantizes a plain checkpoint to this format. None means that a different checkpoint is needed."""
    of_experts: tuple[float | None, float] | None = None
    """Bits and read rate of expert weights. None means `bits` and `rate`."""

    @property
    def expert_bits(self) -> float | None:
        """Bits per expert weight; see `bits`."""
        return self.bits if self.of_experts is None else self.of_experts[0]

    @property
    def expert_rate(self) -> float:
        """Relative read rate of GEMMs with expert weights; see `rate`."""
        return self.rate if self.of_experts is None else self.of_experts[1]


WEIGHT_FORMATS: Final[Mapping[str, WeightPrecision]] = {
    each.name: each
    for each in (
        WeightPrecision("model", None),
        WeightPrecision("fp8", 8, 0.84, "--quantization fp8", of_experts=(8, 0.8)),
        WeightPrecision("int4", 4 + 16 / 128, 0.64, None),
        WeightPrecision("mxfp4", None, 1.0, None, of_experts=(4 + 8 / 32, 0.6)),
    )
}
"""Weight formats by name. model: the checkpoint's format. fp8: one scale per row. int4: groups of 128 weights with a 16-bit
scale. mxfp4: only expert weights."""


def weight_format(name: str) -> WeightPrecision:
    """Return the weight format with this name. :raises ConfigError: if the name is unknown."""
    if name not in WEIGHT_FORMATS:
        raise ConfigError("--weights", ", ".join(WEIGHT_FORMATS), repr(name))
    return WEIGHT_FORMATS[name]


@dataclass(frozen=True)
class ProductShape:
    """GEMM of a step's tokens with a weight matrix [rows, columns], which occurs in `count` layers."""

    rows: float
    columns: float
    count: int


@dataclass(frozen=True)
class RankExperts:
    """Routed experts of one layer on one rank, which has a shard of each expert."""

    config: ExpertsConfig
    """Experts configuration of the rank's shard."""
    params: float
    """Number of weights per expert on the rank."""
    count: int

    def touched(self, tokens: int) -> float:
        """Return the mean number of experts whose weights a rank reads in a step of `tokens` tokens, assuming uneven selection
        (UNEVENNESS)."""
        missed = [(1 - chance) ** tokens for chance in self.chances]
        return len(missed) - sum(missed)

    @cached_property
    def chances(self) -> list[float]:
        """Probability that a token selects an expert, for each expert."""
        return list(_chances(self.config.num_experts, self.config.top_k))


def _chances(num_experts: int, top_k: int) -> Sequence[float]:
    normal = NormalDist()
    weights = [math.exp(UNEVENNESS * normal.inv_cdf((index + 0.5) / num_experts)) for index in range(num_experts)]
    total = sum(weights)
    return [min(top_k * weight / total, 1.0) for weight in weights]


@dataclass(frozen=True)
class RankCosts:
    """Weights, GEMMs and bytes of one rank in a step."""

    config: DecoderConfig
    """Configuration of the rank's shard (`ModelShard.own`). Hidden size, vocabulary and number of layers are the model's."""
    size: int
    """Number of ranks: the tensor-parallel size."""
    layers: LayerSpecs
    """Layers of the rank's shard; their KV caches have the requested element type."""
    weights: WeightPrecision
    products: tuple[ProductShape, ...]
    """GEMMs that every token needs, excluding experts and the head."""
    head: ProductShape
    experts: RankExperts | None
    plain_bytes: int
    """Size in bytes of the weights that have the model's element type in every weight format: embedding, head, routers and
    learned positions."""
    num_sums: int
    """Number of all-reduces of [tokens, hidden_size] per step."""
    itemsize: int
    """Bytes per element in the model's element type."""
    kinds: Mapping[AttentionSpec, int] = field(default_factory=dict)
    """Kind of attention layer -> number of the rank's layers of this kind."""

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight of a linear layer."""
        return self.itemsize if self.weights.bits is None else self.weights.bits / 8

    @property
    def bytes_per_expert_weight(self) -> float:
        """Bytes per weight of a routed expert."""
        bits = self.weights.expert_bits
        return self.itemsize if bits is None else bits / 8

    @cached_property
    def weight_bytes(self) -> float:
        """Size of the rank's weights in bytes."""
        params = sum(each.rows * each.columns * each.count for each in self.products)
        experts = 0.0
        if self.experts is not None:
            experts = self.experts.config.num_held * self.experts.params * self.experts.count
        return params * self.bytes_per_weight + experts * self.bytes_per_expert_weight + self.plain_bytes

    @property
    def cache_row_bytes(self) -> int:
        """Bytes of one token in the KV caches of all layers."""
        return sum(spec.cache_row_bytes for spec in self.layers.cached)

    @property
    def state_bytes(self) -> int:
        """Size of one sequence's states in bytes."""
        return sum(KEY_VALUE.bytes_per_slot(spec) for spec in self.layers.states)

    def largest_step_bytes(self, tokens: int, rows: int) -> float:
        """Return the approximate number of activation bytes of a step. rows: number of sampled rows, each of which takes 44 bytes
        per logit."""
        widest = max((each.rows + each.columns for each in self.products), default=0)
        return tokens * self.itemsize * (6 * self.config.hidden_size + 2 * widest) + rows * self.config.vocab_size * 44


def rank_costs(
    config: DecoderConfig,
    dtype: torch.dtype,
    size: int = 1,
    kv_cache_dtype: str = "auto",
    weights: WeightPrecision = WEIGHT_FORMATS["model"],
) -> RankCosts:
    """Return the costs of rank 0, which are the highest of all `size` ranks. config: configuration of the whole model. dtype: the
    model's element type.

    :raises ConfigError: if the model's sizes are not divisible by the number of ranks (`ModelShard`).
    """
    cut = ModelShard(config, size=size, by_expert=False)
    own, layers = cut.own, _own_layers(cut.own, dtype, kv_cache_dtype)
    vocab, hidden = cut.vocabulary.axis.size, config.hidden_size
    products = [*_attention_products(own), *_state_products(own, cut), *_mlp_products(own)]
    plain = vocab * hidden * (1 if config.tie_word_embeddings else 2)
    if (inputs := own.layer_inputs) is not None:  # every rank has the complete tables
        size_all = inputs.num_layers * inputs.size
        plain += inputs.vocab_size * size_all
        products += [ProductShape(size_all, hidden, 1), ProductShape(2 * inputs.size, hidden, inputs.num_layers)]
    experts = None
    if own.experts is not None:
        sparse = sum(layer.mlp == "experts" for layer in config.layers)
        params = (3 if own.experts.gated else 2) * own.experts.intermediate_size * hidden
        experts = RankExperts(own.experts, params, sparse)
        plain += sparse * own.experts.num_logits * hidden
    sums = 1 + sum((layer.attention or layer.state) + (layer.mlp is not None) for layer in config.layers)
    return RankCosts(
        config=own,
        size=size,
        layers=layers,
        weights=weights,
        products=tuple(products),
        head=ProductShape(vocab, hidden, 1),
        experts=experts,
        plain_bytes=plain * dtype.itemsize,
        num_sums=sums if size > 1 else 0,
        itemsize=dtype.itemsize,
        kinds=Counter(layers.cached[own.place_of(index)] for index, layer in enumerate(own.layers) if layer.attention),
    )


def _own_layers(own: DecoderConfig, dtype: torch.dtype, kv_cache_dtype: str) -> LayerSpecs:
    """Return the layers of one rank, with the requested element type for their KV caches."""
    layers = decoder_layer_specs(own, dtype, torch.device("cpu"))
    if kv_cache_dtype == "auto":
        return layers
    cache_dtype = KV_DTYPES[kv_cache_dtype]
    expanded = {replace(spec, kv_dtype=cache_dtype): other for spec, other in layers.expanded.items()}
    return replace(layers, cached=[replace(spec, kv_dtype=cache_dtype) for spec in layers.cached], expanded=expanded)


def _attention_products(own: DecoderConfig) -> list[ProductShape]:
    """Return the GEMMs around attention, including absorbed and expanded projections of latent attention."""
    count, hidden = sum(layer.attention for layer in own.layers), own.hidden_size
    if not count:
        return []
    heads, latent = own.num_heads, own.latent
    if latent is None:
        sizes = Counter(_rows_of_attention(own, layer) for layer in own.layers if layer.attention)
        return [
            shape
            for (rows, queries), each in sizes.items()
            for shape in (ProductShape(rows, hidden, each), ProductShape(hidden, queries, each))
        ]
    queries = heads * latent.q_dim
    made = [ProductShape(queries, hidden, count)]
    if latent.q_lora_rank is not None:
        made = [ProductShape(latent.q_lora_rank, hidden, count), ProductShape(queries, latent.q_lora_rank, count)]
    made.append(ProductShape(latent.kv_dim, hidden, count))
    made.append(ProductShape(heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank, count))
    return [*made, ProductShape(hidden, heads * latent.v_head_dim, count)]


def _rows_of_attention(own: DecoderConfig, layer: LayerConfig) -> tuple[int, int]:
    """Return the rows of a layer's merged projection, and the columns of its output projection."""
    sizes = own.of_layer(layer)
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim if layer.caches else 0
    return (2 if own.output_gate else 1) * queries + 2 * keys, queries


def _state_products(own: DecoderConfig, cut: ModelShard) -> list[ProductShape]:
    """Return the GEMMs before and after state layers."""
    if own.state is None:
        return []
    count, hidden = sum(layer.state for layer in own.layers), own.hidden_size
    sections = STATE_PARTS[own.state.spec.kind].sections(cut.state)
    rows = sum(axis.size for axis in sections.values())
    return [ProductShape(rows, hidden, count), ProductShape(hidden, own.state.spec.out_channels, count)]


def _mlp_products(own: DecoderConfig) -> list[ProductShape]:
    """Return the GEMMs of dense MLPs, and of the router and shared experts in expert layers."""
    hidden, made = own.hidden_size, list[ProductShape]()
    for inner, dense in Counter(own.of_layer(layer).intermediate_size for layer in own.layers if layer.mlp == "dense").items():
        made += [ProductShape(inner * (2 if own.gated else 1), hidden, dense), ProductShape(hidden, inner, dense)]
    experts = own.experts
    if experts is not None and experts.shared_intermediate_size:
        sparse, inner = sum(layer.mlp == "experts" for layer in own.layers), experts.shared_intermediate_size
        made += [ProductShape(inner * (2 if experts.gated else 1), hidden, sparse), ProductShape(hidden, inner, sparse)]
    return made


def check_cache_dtype(config: DecoderConfig, name: str) -> str:
    """Return the reason why a model's KV cache cannot have this element type, or "" if it can. :raises ConfigError: if the
    element type is unknown."""
    if name not in ("auto", *KV_DTYPES):
        raise ConfigError("--kv-cache-dtype", f"auto, {', '.join(KV_DTYPES)}", repr(name))
    integer = name != "auto" and not KV_DTYPES[name].is_floating_point
    return f"{name}: a latent cache has no scales for each token" if config.latent is not None and integer else ""


BLOCK_SIZE: Final = 16
SPARE_BYTES: Final = int(0.75 * GIB)
"""Bytes reserved for CUDA's context, library workspaces and graphs."""
GROUP_BYTES: Final = int(0.4 * GIB)
"""Bytes reserved per rank for NCCL if there are several ranks. The source of the tables in `devices` reports 342 to 392 MB."""


@dataclass(frozen=True)
class EngineLimits:
    """Engine options that limit the size of a step, under vLLM's names."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int = 16384
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = False


@dataclass(frozen=True)
class EngineMemory:
    """Memory and limits of an engine, as its scheduler sees them."""

    pages: PageFormat
    num_pages: int
    limits: EngineLimits
    states: StateSlots | None = None
    used_bytes: float = 0.0
    """Memory used on a rank in bytes: weights, activations, states and pages."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the KV cache can hold if all sequences have the length max_model_len."""
        longest = self.limits.max_model_len
        return (self.num_pages - self.pages.reserved) * longest // self.pages.pages_for(longest, 1)


def engine_memory(gpu: GpuKind, costs: RankCosts, limits: EngineLimits) -> EngineMemory:
    """Choose the number of states and pages for the memory left on one GPU. :raises ConfigError: if not even one sequence
    fits."""
    usable = gpu.memory_bytes * limits.gpu_memory_utilization
    overhead = SPARE_BYTES + (GROUP_BYTES if costs.size > 1 else 0)
    activations = costs.largest_step_bytes(limits.max_num_batched_tokens, limits.max_num_seqs)
    left = int(usable - costs.weight_bytes - activations - overhead)
    if left <= 0:
        parts = f"{size_text(int(costs.weight_bytes))} of weights and {size_text(int(activations))} of activations"
        raise ConfigError("memory", f"{parts} in {size_text(int(usable))}", f"{size_text(int(gpu.memory_bytes))} a GPU")
    layers = [StateLayer(spec, StateParameters()) for spec in costs.layers.states]
    caches = costs.layers.cached
    slots = plan_slots(layers, KEY_VALUE, limits.max_num_seqs, 1, left, limits.enable_prefix_caching, bool(caches))
    left -= 0 if slots is None else slots.num_bytes
    pages = page_format(caches, [layout_of(spec) for spec in caches], BLOCK_SIZE, limits.max_model_len)
    pool = pool_size(pages, limits.max_model_len, limits.max_num_seqs, SMALLEST_CHUNK, left)
    states = 0 if slots is None else slots.num_bytes
    return EngineMemory(
        pages, pool.num_pages, limits, slots, costs.weight_bytes + activations + overhead + states + pool.num_bytes
    )
