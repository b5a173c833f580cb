"""Bytes and operations of one step of a model on one rank, out of its configuration: products, experts, caches, states, sums."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Final, Literal

from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import KV_DTYPES, AttentionSpec
from headway.core.contract.state import KEY_VALUE, StateSpec
from headway.core.select.layer_specs import LayerSpecs
from headway.models.config import DecoderConfig
from headway.models.decoder import STATE_PARTS
from headway.models.experts.config import ExpertsConfig

ExpertCut = Literal["none", "column", "expert"]
"""How the experts of a layer lie on the ranks: column: a part of each; expert: some of them whole."""
TILE: Final = 64
"""Columns of an expert that a rank must have a multiple of: the kernels' smallest tile."""
UNEVENNESS: Final = 0.75
"""Standard deviation of the logarithm of how often an expert is chosen. The experts touched a layer in
bench/results/h200/experts-vllm.json (70.2 and 108.6 of 128 by 16 and 64 tokens, 44.6 and 59.8 of 64) lie at 0.65 to 0.9."""


@dataclass(frozen=True)
class WeightFormat:
    """How the matrices of products are kept; embedding, router and norms stay in the model's element type."""

    name: str
    bits: float | None
    """Bits of a weight with its share of scales; None: those of the model's element type."""
    loads: bool
    """Whether Headway loads weights of this format today."""


WEIGHT_FORMATS: Final[Mapping[str, WeightFormat]] = {
    each.name: each
    for each in (
        WeightFormat("model", None, True),
        WeightFormat("fp8", 8 + 32 / 128**2, False),
        WeightFormat("int4", 4 + 16 / 128, False),
    )
}
"""model: as the checkpoint has them. fp8: blocks of 128 x 128 with a float32 scale. int4: groups of 128 with a 16-bit scale."""


def weight_format(name: str) -> WeightFormat:
    """The format of a name.

    :raises ConfigError: there is none.
    """
    if name not in WEIGHT_FORMATS:
        raise ConfigError("--weights", ", ".join(WEIGHT_FORMATS), repr(name))
    return WEIGHT_FORMATS[name]


@dataclass(frozen=True)
class ModelCut:
    """How a model is cut for the ranks of one engine."""

    size: int = 1
    """Ranks."""
    experts: ExpertCut = "none"

    def __str__(self) -> str:
        return str(self.size) if self.experts == "none" else f"{self.size}, experts by {self.experts}"


@dataclass(frozen=True)
class ProductShape:
    """A product of every token of a step with a matrix [rows, columns], in `count` layers."""

    rows: float
    columns: float
    count: int


@dataclass(frozen=True)
class RankExperts:
    """The routed experts of one layer on one rank."""

    config: ExpertsConfig
    cut: ModelCut
    params: float
    """Weights that a rank holds of an expert that it has a part of."""
    count: int
    """Layers with experts."""

    def touched(self, tokens: int) -> float:
        """Experts whose weights the busiest rank reads for so many tokens, on average.

        Experts are chosen unevenly (UNEVENNESS), and by tokens that do not know of each other. With whole experts on a rank the
        busiest of the ranks counts: the mean and sqrt(2 ln ranks) standard deviations.
        """
        missed = [(1 - chance) ** tokens for chance in self.chances]
        mean = len(missed) - sum(missed)
        if self.cut.experts != "expert":
            return mean
        ranks = self.cut.size
        variance = sum(chance * (1 - chance) for chance in missed) / ranks
        return min(mean / ranks + math.sqrt(2 * math.log(ranks) * variance), -(-len(missed) // ranks))

    def share(self) -> float:
        """Share of a token's routed operations that one rank computes."""
        return 1 / self.cut.size

    @cached_property
    def chances(self) -> list[float]:
        """Chance of each expert to be among a token's."""
        return list(_chances(self.config.num_experts, self.config.top_k))


def _chances(num_experts: int, top_k: int) -> Sequence[float]:
    normal = NormalDist()
    weights = [math.exp(UNEVENNESS * normal.inv_cdf((index + 0.5) / num_experts)) for index in range(num_experts)]
    total = sum(weights)
    return [min(top_k * weight / total, 1.0) for weight in weights]


def cut_heads(spec: AttentionSpec, size: int) -> AttentionSpec:
    """The spec of a layer on one of `size` ranks: key-value heads are repeated where ranks outnumber them."""
    sinks = None if spec.sinks is None else spec.sinks[: spec.num_heads // size]
    return replace(spec, num_heads=spec.num_heads // size, num_kv_heads=max(spec.num_kv_heads // size, 1), sinks=sinks)


def cut_state(spec: StateSpec, size: int) -> StateSpec:
    """The spec of a layer with a state on one of `size` ranks: heads and channels are cut, groups of keys repeated."""
    if size == 1:
        return spec
    keys = max(spec.num_key_heads // size, 1) if spec.num_key_heads else 0
    cut = replace(spec, num_heads=spec.num_heads // size, num_key_heads=keys, conv_channels=0, conv_width=0, activation="silu")
    channels = spec.conv_channels // size if not spec.recurrent else cut.input_channels
    if not spec.recurrent:
        return replace(spec, conv_channels=channels)
    return (
        replace(cut, conv_channels=channels, conv_width=spec.conv_width, activation=spec.activation) if spec.conv_width else cut
    )


@dataclass(frozen=True)
class RankCosts:
    """What one rank holds, and reads and computes in a step."""

    config: DecoderConfig
    cut: ModelCut
    layers: LayerSpecs
    """The rank's own: heads are cut, and caches have the element type that was asked for."""
    weights: WeightFormat
    products: tuple[ProductShape, ...]
    """Products of every token; experts' and the head's are not among them."""
    head: ProductShape
    """The product of the rows that are sampled."""
    experts: RankExperts | None
    plain_bytes: int
    """Bytes of what is in the model's element type whatever the format: embedding, head, routers, learned positions."""
    num_sums: int
    """All-reduces of [tokens, hidden_size] in a step."""
    kinds: Mapping[AttentionSpec, int] = field(default_factory=dict)
    """Each kind of the rank's layers of attention -> how many there are."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the model."""
        return self.layers.cached[0].dtype.itemsize

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight of a product."""
        return self.itemsize if self.weights.bits is None else self.weights.bits / 8

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of the weights that the rank holds."""
        params = sum(each.rows * each.columns * each.count for each in self.products)
        if self.experts is not None:
            held = self.experts.config.num_experts
            held = -(-held // self.cut.size) if self.cut.experts == "expert" else held
            params += held * self.experts.params * self.experts.count
        return params * self.bytes_per_weight + self.plain_bytes

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
    layers: LayerSpecs,
    cut: ModelCut = ModelCut(),
    kv_cache_dtype: str = "auto",
    weights: WeightFormat = WEIGHT_FORMATS["model"],
) -> RankCosts:
    """The costs of one rank of a model that is cut; `obstacle` must have none. layers: of the whole model."""
    own = _own_layers(layers, cut.size, kv_cache_dtype)
    itemsize, hidden = own.cached[0].dtype.itemsize, config.hidden_size
    vocab = -(-config.vocab_size // cut.size)
    products = [*_attention_products(config, cut.size), *_state_products(config, own.states), *_mlp_products(config, cut.size)]
    plain = vocab * hidden * (1 if config.tie_word_embeddings else 2)
    experts = None
    if config.experts is not None:
        sparse = sum(layer.mlp == "experts" for layer in config.layers)
        params = (3 if config.experts.gated else 2) * config.experts.intermediate_size * hidden
        parts = cut.size if cut.experts == "column" else 1
        experts = RankExperts(config.experts, cut, params / parts, sparse)
        plain += sparse * config.experts.num_logits * hidden
    sums = 1 + sum((layer.attention or layer.state) + (layer.mlp is not None) for layer in config.layers)
    return RankCosts(
        config=config,
        cut=cut,
        layers=own,
        weights=weights,
        products=tuple(products),
        head=ProductShape(vocab, hidden, 1),
        experts=experts,
        plain_bytes=plain * itemsize,
        num_sums=sums if cut.size > 1 else 0,
        kinds=Counter(own.cached),
    )


def _own_layers(layers: LayerSpecs, size: int, kv_cache_dtype: str) -> LayerSpecs:
    """The layers of one rank, with the element type that was asked for their caches."""
    cached = [cut_heads(spec, size) for spec in layers.cached]
    expanded = {cut_heads(spec, size): cut_heads(other, size) for spec, other in layers.expanded.items()}
    if kv_cache_dtype != "auto":
        dtype = KV_DTYPES[kv_cache_dtype]
        expanded = {replace(spec, kv_dtype=dtype): other for spec, other in expanded.items()}
        cached = [replace(spec, kv_dtype=dtype) for spec in cached]
    return LayerSpecs(cached, expanded, [cut_state(spec, size) for spec in layers.states])


def _attention_products(config: DecoderConfig, size: int) -> list[ProductShape]:
    """Products around attention, absorbed and expanded ones of latent attention included."""
    count, hidden = sum(layer.attention for layer in config.layers), config.hidden_size
    if not count:
        return []
    heads, latent = config.num_heads / size, config.latent
    if latent is None:
        queries = heads * config.head_dim
        keys = max(config.num_kv_heads / size, 1) * config.head_dim
        rows = (2 if config.output_gate else 1) * queries + 2 * keys
        return [ProductShape(rows, hidden, count), ProductShape(hidden, queries, count)]
    queries = heads * latent.q_dim
    made = [ProductShape(queries, hidden, count)]
    if latent.q_lora_rank is not None:
        made = [ProductShape(latent.q_lora_rank, hidden, count), ProductShape(queries, latent.q_lora_rank, count)]
    made.append(ProductShape(latent.kv_dim, hidden, count))
    made.append(ProductShape(heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank, count))
    return [*made, ProductShape(hidden, heads * latent.v_head_dim, count)]


def _state_products(config: DecoderConfig, states: Sequence[StateSpec]) -> list[ProductShape]:
    """Products before and behind layers with a state. states: the rank's."""
    if config.state is None:
        return []
    count, hidden = sum(layer.state for layer in config.layers), config.hidden_size
    spec = states[0]
    rows = sum(STATE_PARTS[spec.kind].sections(spec).values())
    return [ProductShape(rows, hidden, count), ProductShape(hidden, spec.out_channels, count)]


def _mlp_products(config: DecoderConfig, size: int) -> list[ProductShape]:
    """Products of dense MLPs, and of what every token passes in a layer with experts: the router and shared experts."""
    hidden, dense = config.hidden_size, sum(layer.mlp == "dense" for layer in config.layers)
    made = []
    if dense:
        inner = config.intermediate_size / size
        made += [ProductShape(inner * (2 if config.gated else 1), hidden, dense), ProductShape(hidden, inner, dense)]
    experts = config.experts
    if experts is not None and experts.shared_intermediate_size:
        sparse, inner = sum(layer.mlp == "experts" for layer in config.layers), experts.shared_intermediate_size / size
        made += [ProductShape(inner * (2 if experts.gated else 1), hidden, sparse), ProductShape(hidden, inner, sparse)]
    return made


def obstacle(config: DecoderConfig, cut: ModelCut) -> str:
    """The first number of a model that cannot be cut so; empty if all can."""
    size = cut.size
    if size == 1:
        return ""
    whole: dict[str, int] = {"heads": config.num_heads}
    if any(layer.mlp == "dense" for layer in config.layers):
        whole["columns of the MLP"] = config.intermediate_size
    if config.state is not None:
        spec = config.state.spec
        whole["state heads" if spec.recurrent else "channels"] = spec.num_heads if spec.recurrent else spec.conv_channels
        if spec.recurrent and spec.num_key_heads > size:
            whole["key heads of states"] = spec.num_key_heads
    experts = config.experts
    if experts is not None and cut.experts == "expert":
        whole["experts"] = experts.num_experts
    for what, count in whole.items():
        if count % size:
            return f"{count} {what} do not divide by {size}"
    kv_heads = 1 if config.latent is not None else config.num_kv_heads
    if max(kv_heads, size) % min(kv_heads, size):
        return f"{kv_heads} key-value heads do not divide by {size}, nor the other way round"
    if experts is not None and cut.experts == "column" and experts.intermediate_size % (size * TILE):
        return f"an expert's {experts.intermediate_size} columns over {size} are no multiple of {TILE}"
    return ""


def check_cache_dtype(config: DecoderConfig, name: str) -> str:
    """Why a model's caches cannot have this element type; empty if they can.

    :raises ConfigError: an unknown name.
    """
    if name not in ("auto", *KV_DTYPES):
        raise ConfigError("--kv-cache-dtype", f"auto, {', '.join(KV_DTYPES)}", repr(name))
    integer = name != "auto" and not KV_DTYPES[name].is_floating_point
    return f"{name}: a latent cache has no scales for each token" if config.latent is not None and integer else ""
