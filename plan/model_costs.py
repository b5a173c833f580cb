"""A model by its configuration alone: bytes and operations of a step on one rank, and what the rank's memory holds."""

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
from headway.models.config import DecoderConfig
from headway.models.cut import ModelCut
from headway.models.families.families import TEXT_PARTS
from headway.models.layers.decoder import STATE_PARTS
from headway.models.loader import decoder_config, decoder_layer_specs, read_config
from headway.plan.attention_times import layout_of
from headway.plan.devices import GIB, GpuKind

_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": (),
    "num_hidden_layers": ("hybrid_override_pattern", "layers_block_type", "layer_types"),
    "num_attention_heads": (),
    "vocab_size": (),
}
"""Sizes by transformers' names -> what may replace them; a missing one would be transformers' default, another model's."""


class PlannedModel(NamedTuple):
    """What a plan must know of a model."""

    config: DecoderConfig
    dtype: torch.dtype
    """Element type of its weights, activations and, unless another is asked for, its cache."""


def read_planned_model(model: str) -> PlannedModel:
    """Read a model's configuration from a folder, hub id or shape name. :raises ModelError: unknown or unsupported."""
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
"""Standard deviation of the logarithm of how often an expert is chosen. The experts touched a layer in
bench/results/h200/experts-vllm.json (70.2 and 108.6 of 128 by 16 and 64 tokens, 44.6 and 59.8 of 64) lie at 0.65 to 0.9."""


@dataclass(frozen=True)
class WeightPrecision:
    """How the matrices of products and experts are kept; embedding, head, routers and norms stay in the model's element type."""

    name: str
    bits: float | None
    """Bits of a weight with its share of scales; None: those of the model's element type."""
    rate: float = 1.0
    """Share of the rate of weights of 16 bits at which products read these bytes: of 1, 16 and 64 requests of Llama-3-8B's shape
    on an H100 and an H200 (weights-*.json in bench/results, docs/plan.md)."""
    option: str | None = ""
    """What gives a plain checkpoint this format; None: it takes another checkpoint."""
    of_experts: tuple[float | None, float] | None = None
    """The bits and the rate of experts' weights, where they have others; None: those above."""

    @property
    def expert_bits(self) -> float | None:
        """Bits of an expert's weight, as `bits`."""
        return self.bits if self.of_experts is None else self.of_experts[0]

    @property
    def expert_rate(self) -> float:
        """The rate at which experts read, as `rate`."""
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
"""model: as the checkpoint has them. fp8: a scale a row. int4: groups of 128 with a 16-bit scale. mxfp4: of experts alone."""


def weight_format(name: str) -> WeightPrecision:
    """The format of a name. :raises ConfigError: there is none."""
    if name not in WEIGHT_FORMATS:
        raise ConfigError("--weights", ", ".join(WEIGHT_FORMATS), repr(name))
    return WEIGHT_FORMATS[name]


@dataclass(frozen=True)
class ProductShape:
    """A product of every token of a step with a matrix [rows, columns], in `count` layers."""

    rows: float
    columns: float
    count: int


@dataclass(frozen=True)
class RankExperts:
    """The routed experts of one layer on one rank, which has a part of each of them."""

    config: ExpertsConfig
    """The rank's."""
    params: float
    """Weights that the rank holds of an expert."""
    count: int

    def touched(self, tokens: int) -> float:
        """Mean number of experts whose weights a rank reads for a number of tokens; experts are uneven (UNEVENNESS)."""
        missed = [(1 - chance) ** tokens for chance in self.chances]
        return len(missed) - sum(missed)

    @cached_property
    def chances(self) -> list[float]:
        """Chance of each expert to be among a token's."""
        return list(_chances(self.config.num_experts, self.config.top_k))


def _chances(num_experts: int, top_k: int) -> Sequence[float]:
    normal = NormalDist()
    weights = [math.exp(UNEVENNESS * normal.inv_cdf((index + 0.5) / num_experts)) for index in range(num_experts)]
    total = sum(weights)
    return [min(top_k * weight / total, 1.0) for weight in weights]


@dataclass(frozen=True)
class RankCosts:
    """What one rank holds, and reads and computes in a step."""

    config: DecoderConfig
    """The rank's own (`ModelCut.own`); hidden size, vocabulary and number of layers are the model's."""
    size: int
    """Ranks: the tensor-parallel size."""
    layers: LayerSpecs
    """The rank's own; caches have the element type that was asked for."""
    weights: WeightPrecision
    products: tuple[ProductShape, ...]
    """Products of every token; experts' and the head's are not among them."""
    head: ProductShape
    experts: RankExperts | None
    plain_bytes: int
    """Bytes of what is in the model's element type whatever the format: embedding, head, routers, learned positions."""
    num_sums: int
    """All-reduces of [tokens, hidden_size] in a step."""
    itemsize: int
    """Bytes of an element of the model."""
    kinds: Mapping[AttentionSpec, int] = field(default_factory=dict)
    """Each kind of the rank's layers of attention -> how many there are."""

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight of a product other than experts'."""
        return self.itemsize if self.weights.bits is None else self.weights.bits / 8

    @property
    def bytes_per_expert_weight(self) -> float:
        """Bytes of a weight of a routed expert."""
        bits = self.weights.expert_bits
        return self.itemsize if bits is None else bits / 8

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of the weights that the rank holds."""
        params = sum(each.rows * each.columns * each.count for each in self.products)
        experts = 0.0
        if self.experts is not None:
            experts = self.experts.config.num_held * self.experts.params * self.experts.count
        return params * self.bytes_per_weight + experts * self.bytes_per_expert_weight + self.plain_bytes

    @property
    def cache_row_bytes(self) -> int:
        """Bytes of one token in the caches of all layers."""
        return sum(spec.cache_row_bytes for spec in self.layers.cached)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(KEY_VALUE.bytes_per_slot(spec) for spec in self.layers.states)

    def largest_step_bytes(self, tokens: int, rows: int) -> float:
        """Bytes of activations of a step, roughly: rows are sampled. What filters logits needs 42 bytes for each at most."""
        widest = max((each.rows + each.columns for each in self.products), default=0)
        return tokens * self.itemsize * (6 * self.config.hidden_size + 2 * widest) + rows * self.config.vocab_size * 44


def rank_costs(
    config: DecoderConfig,
    dtype: torch.dtype,
    size: int = 1,
    kv_cache_dtype: str = "auto",
    weights: WeightPrecision = WEIGHT_FORMATS["model"],
) -> RankCosts:
    """Return the costs of rank 0 of `size` (no rank has more). config: of the whole model; dtype: its element type.
    :raises ConfigError: the model's sizes do not divide among so many GPUs (`ModelCut`)."""
    cut = ModelCut(config, size=size, by_expert=False)
    own, layers = cut.own, _own_layers(cut.own, dtype, kv_cache_dtype)
    vocab, hidden = cut.vocabulary.axis.size, config.hidden_size
    products = [*_attention_products(own), *_state_products(own, cut), *_mlp_products(own)]
    plain = vocab * hidden * (1 if config.tie_word_embeddings else 2)
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
        kinds=Counter(layers.cached),
    )


def _own_layers(own: DecoderConfig, dtype: torch.dtype, kv_cache_dtype: str) -> LayerSpecs:
    """The layers of one rank, with the element type that was asked for their caches."""
    layers = decoder_layer_specs(own, dtype, torch.device("cpu"))
    if kv_cache_dtype == "auto":
        return layers
    asked = KV_DTYPES[kv_cache_dtype]
    expanded = {replace(spec, kv_dtype=asked): other for spec, other in layers.expanded.items()}
    return replace(layers, cached=[replace(spec, kv_dtype=asked) for spec in layers.cached], expanded=expanded)


def _attention_products(own: DecoderConfig) -> list[ProductShape]:
    """Products around attention, absorbed and expanded ones of latent attention included."""
    count, hidden = sum(layer.attention for layer in own.layers), own.hidden_size
    if not count:
        return []
    heads, latent = own.num_heads, own.latent
    if latent is None:
        queries, keys = heads * own.head_dim, own.num_kv_heads * own.head_dim
        rows = (2 if own.output_gate else 1) * queries + 2 * keys
        return [ProductShape(rows, hidden, count), ProductShape(hidden, queries, count)]
    queries = heads * latent.q_dim
    made = [ProductShape(queries, hidden, count)]
    if latent.q_lora_rank is not None:
        made = [ProductShape(latent.q_lora_rank, hidden, count), ProductShape(queries, latent.q_lora_rank, count)]
    made.append(ProductShape(latent.kv_dim, hidden, count))
    made.append(ProductShape(heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank, count))
    return [*made, ProductShape(hidden, heads * latent.v_head_dim, count)]


def _state_products(own: DecoderConfig, cut: ModelCut) -> list[ProductShape]:
    """Products before and behind layers with a state."""
    if own.state is None:
        return []
    count, hidden = sum(layer.state for layer in own.layers), own.hidden_size
    sections = STATE_PARTS[own.state.spec.kind].sections(cut.state)
    rows = sum(axis.size for axis in sections.values())
    return [ProductShape(rows, hidden, count), ProductShape(hidden, own.state.spec.out_channels, count)]


def _mlp_products(own: DecoderConfig) -> list[ProductShape]:
    """Products of dense MLPs, and of what every token passes in a layer with experts: the router and shared experts."""
    hidden, dense = own.hidden_size, sum(layer.mlp == "dense" for layer in own.layers)
    made = []
    if dense:
        inner = own.intermediate_size
        made += [ProductShape(inner * (2 if own.gated else 1), hidden, dense), ProductShape(hidden, inner, dense)]
    experts = own.experts
    if experts is not None and experts.shared_intermediate_size:
        sparse, inner = sum(layer.mlp == "experts" for layer in own.layers), experts.shared_intermediate_size
        made += [ProductShape(inner * (2 if experts.gated else 1), hidden, sparse), ProductShape(hidden, inner, sparse)]
    return made


def check_cache_dtype(config: DecoderConfig, name: str) -> str:
    """Why a model's caches cannot have this element type; empty if they can. :raises ConfigError: an unknown name."""
    if name not in ("auto", *KV_DTYPES):
        raise ConfigError("--kv-cache-dtype", f"auto, {', '.join(KV_DTYPES)}", repr(name))
    integer = name != "auto" and not KV_DTYPES[name].is_floating_point
    return f"{name}: a latent cache has no scales for each token" if config.latent is not None and integer else ""


BLOCK_SIZE: Final = 16
SPARE_BYTES: Final = int(0.75 * GIB)
"""CUDA's context, libraries' workspaces and graphs."""
GROUP_BYTES: Final = int(0.4 * GIB)
"""What NCCL takes on each of several ranks (342 to 392 MB in the tables of `devices`' source)."""


@dataclass(frozen=True)
class EngineLimits:
    """Options of an engine that bound its steps; names are vLLM's."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int = 16384
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = False


@dataclass(frozen=True)
class EngineMemory:
    """What an engine's scheduler knows of memory, and its limits."""

    pages: PageFormat
    num_pages: int
    limits: EngineLimits
    states: StateSlots | None = None
    used_bytes: float = 0.0
    """Bytes that a rank takes for weights, activations, states and pages."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds in sequences of max_model_len."""
        longest = self.limits.max_model_len
        return (self.num_pages - self.pages.reserved) * longest // self.pages.pages_for(longest, 1)


def engine_memory(gpu: GpuKind, costs: RankCosts, limits: EngineLimits) -> EngineMemory:
    """Size states and pages for the memory left on one GPU. :raises ConfigError: no room for one sequence of max_model_len."""
    usable = gpu.memory_bytes * limits.gpu_memory_utilization
    taken = SPARE_BYTES + (GROUP_BYTES if costs.size > 1 else 0)
    activations = costs.largest_step_bytes(limits.max_num_batched_tokens, limits.max_num_seqs)
    left = int(usable - costs.weight_bytes - activations - taken)
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
    return EngineMemory(pages, pool.num_pages, limits, slots, costs.weight_bytes + activations + taken + states + pool.num_bytes)
