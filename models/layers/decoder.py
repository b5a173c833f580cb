"""A decoder whose layers are composed of parts: packed tokens, no padding, no batch axis, merged projections."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.core.contract.adapters import AdapterSlots
from headway.core.contract.model import Attention, StateLayer
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import CONV, GATED_DELTA, KDA, LIGHTNING, MAMBA1, MAMBA2
from headway.kernels.linear.linear import Linear
from headway.kernels.lora.bank import AdapterBank
from headway.kernels.lora.operations import adapted_operations
from headway.kernels.runtime.native.library import functions, native_support
from headway.kernels.step.invariant import TILE_ROWS, invariant_operations
from headway.kernels.step.native import NativeOperations, RecordedLayers
from headway.kernels.step.operations import Embedding, Norm, Operations, Rope, TorchOperations
from headway.models.checkpoints.weights import WeightSource
from headway.models.config import DecoderConfig
from headway.models.cut import ModelCut, VocabularyCut
from headway.models.families.rope import rope_tables
from headway.models.layers.latent_attention import LatentAttention
from headway.models.layers.ranked import SumsInOrder, over_ranks
from headway.models.layers.self_attention import MLP, ExpertsMLP, SelfAttention
from headway.models.layers.state_parts import GatedDelta, KimiDelta, Lightning, Mamba1, Mamba2, ShortConvolution, StatePart
from headway.models.layers.tensors import LayerTensors, read_kv_scales

if TYPE_CHECKING:
    from headway.kernels.experts.fused import FusedExperts
    from headway.kernels.linear.quantized_choice import ProductKind

log = logging.getLogger("headway")


AttentionPart = SelfAttention | LatentAttention
"""The attention of a layer."""
MixerPart = AttentionPart | StatePart
"""A part in which tokens meet: see `StatePart`, whose methods attention has as well."""


class OntoNormed:
    """Attention or a part with a state that adds to its normed input instead of to the residual stream (MiniMax-01)."""

    def __init__(self, norm: Norm, kept: float, part: MixerPart) -> None:
        """kept: multiplies the normed input before that; part: without a norm of its own."""
        self.norm = norm
        self._kept = kept
        self._part = part

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """As `StatePart`."""
        normed = ops.norm(x, self.norm)
        mixed = self._part.mix(normed, rope, ops, attention)
        return self._part.add(normed if self._kept == 1.0 else normed * self._kept, mixed, ops)


class SideBySide:
    """Attention and a part with a state that read one normed input; both outputs are added to the residual stream (Falcon-H1)."""

    def __init__(self, norm: Norm, attention: AttentionPart, state: StatePart) -> None:
        """attention, state: without norms of their own, before them or after."""
        self.norm = norm
        self._attention = attention
        self._state = state

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """As `StatePart`."""
        normed = ops.norm(x, self.norm)
        attended = self._attention.mix(normed, rope, ops, attention)
        moved = self._state.mix(normed, rope, ops, attention)
        return ops.add_products(x, [(attended, self._attention.out_proj), (moved, self._state.out_proj)])


def operations_for(inv_freq: Tensor, factors: Tensor) -> Operations:
    """Return the fused kernels on a GPU with Triton, our C on a CPU with a compiler, torch's operations elsewhere.

    inv_freq, factors: float32 [ropes, head_dim / 2] on the model's device, as `rope_tables` makes them.
    """
    if inv_freq.device.type != "cuda":
        return _on_cpu(inv_freq, factors) if inv_freq.device.type == "cpu" else TorchOperations(inv_freq, factors)
    try:
        from headway.kernels.step.fused import Fused
    except ImportError:  # torch for a GPU brings Triton, but not on every system
        return TorchOperations(inv_freq, factors)
    return Fused(inv_freq, factors)


def _on_cpu(inv_freq: Tensor, factors: Tensor) -> Operations:
    found = functions()
    if found is not None:
        return NativeOperations(inv_freq, factors, found)
    log.warning("model: torch computes the steps of a decode, which takes up to twice as long as our C: %s", native_support())
    return TorchOperations(inv_freq, factors)


class Decoder:
    """A decoder over the packed tokens of all sequences of a step, one row per token; rows meet in attention alone."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        batch_invariant: bool = False,
        ranks: Ranks = ONE_RANK,
        slots: AdapterSlots | None = None,
    ) -> None:
        """Take the layers' tensors from `weights`: of several ranks, each its part (`ModelCut`).

        batch_invariant: a row's bits do not depend on the other rows; slower. ranks: all of them call the decoder alike; its
        layers' specs are those of this rank's own heads, and its logits those of its own tokens. slots: for adapters; None: none.

        :raises ModelError: batch_invariant is asked for, and this machine's products depend on the batch.
        :raises ConfigError: the model does not divide among so many ranks.
        """
        self.config = config
        names = config.names
        self._invariant = batch_invariant
        self.device = weights.device
        self.dtype = weights.dtype
        cut = ModelCut(config, ranks.rank, ranks.size, by_expert=weights.device.type == "cpu")
        ranks = SumsInOrder(ranks) if batch_invariant else ranks
        tensors, vocabulary = LayerTensors(cut.own, weights, cut, ranks), cut.vocabulary
        table = vocabulary.table(tensors.take(f"{names.embed}.weight", vocabulary.axis, config.hidden_size))
        positions = cut.once(_positions(config, tensors))
        self.embed = Embedding(table, _rounded(config.embedding_scale, table), positions, vocabulary.tokens)
        self.attention_specs: list[AttentionSpec] = []
        self.state_layers: list[StateLayer] = []
        self.layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            places = len(self.attention_specs), len(self.state_layers)
            layer = DecoderLayer(cut.own, index, places, tensors, batch_invariant)
            self.layers.append(layer)
            self.attention_specs += [] if layer.attention is None else [layer.attention.spec]
            self.state_layers += [] if layer.state is None else layer.state.state_layers
        self.norm = _scaled(tensors.norm(names.norm, config.hidden_size), config.logit_scale)
        self.lm_head = _head(config, weights, tensors, vocabulary, table)
        self._missing = vocabulary.missing
        weights.finish(names.ignored, names.ignored_modules)
        rows = TILE_ROWS[weights.device.type] if batch_invariant else None
        self.operations = self._operations(ranks)
        self.adapters: AdapterBank | None = None
        """Slots of adapters; None: rows have none."""
        if slots is not None:
            operations, adapters = adapted_operations(self.operations, self._linears, slots, weights.dtype, rows)
            self.operations = operations
            self.adapters = adapters
        self.operations = over_ranks(self.operations, ranks)
        for layer in self.layers:
            layer.absorb_norms(self.operations)
        parts = [layer.attention for layer in self.layers if layer.attention is not None]
        self.latent_layers = {
            index: part.layer for index, part in enumerate(parts) if isinstance(part, LatentAttention) and part.layer
        }
        self.kv_scales = [layer.kv_scales for layer in self.layers if layer.attention is not None]
        """k_scale and v_scale of each attention layer's cache where it is fp8, from the checkpoint or 1."""

    @property
    def _linears(self) -> list[Linear]:
        return [self.lm_head, *(linear for layer in self.layers for linear in layer.linears)]

    def _operations(self, ranks: Ranks) -> Operations:
        """Return the operations of this device, and let our C run whole layers if they are its own."""
        operations = operations_for(*rope_tables(self.config.ropes, self.device))
        if self._invariant:
            operations = invariant_operations(operations, self._linears, self.device)
        own = operations if isinstance(operations, NativeOperations) and ranks.size == 1 else None
        self.recorded = None if own is None else RecordedLayers(own.functions)
        """Runs the layers that our C computes; None: they run one after the other."""
        return operations

    def part(self, index: int | None) -> object:
        """A layer, or (None) what stands around the layers."""
        return (self.embed, self.norm, self.lm_head) if index is None else self.layers[index]

    def rebuilt(self, index: int | None, weights: WeightSource) -> object:
        """Build a part anew, of other weights; only of a decoder on one rank. Raises as `__init__`."""
        if index is None:
            return Decoder(replace(self.config, layers=()), weights, self._invariant).part(None)
        cut = ModelCut(self.config, by_expert=weights.device.type == "cpu")
        before = self.layers[:index]
        places = sum(each.attention is not None for each in before), sum(each.num_states for each in before)
        layer = DecoderLayer(cut.own, index, places, LayerTensors(cut.own, weights, cut, ONE_RANK), self._invariant)
        layer.absorb_norms(self.operations)
        return layer

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.config.vocab_size

    @property
    def expert_kinds(self) -> list[FusedExperts]:
        """Kinds of layers of experts that choose among ways of computing them."""
        kinds = [layer.mlp.kind for layer in self.layers if isinstance(layer.mlp, ExpertsMLP)]
        return list(dict.fromkeys(kind for kind in kinds if kind is not None))

    @property
    def products(self) -> list[tuple[Linear, bool]]:
        """The layers' products, and which of them are gated."""
        gated = {layer.mlp.gated_product for layer in self.layers if isinstance(layer.mlp, MLP)}
        return [(linear, linear in gated) for layer in self.layers for linear in layer.linears]

    @property
    def rounding(self) -> str:
        """What products round of their activations on this processor, in words; empty: nothing."""
        own = functions()
        bits = 0 if own is None else own.x_bits
        if not bits or not any(linear.panels is not None and linear.reads_quantized for linear, _ in self.products):
            return ""
        return f".gguf blocks: activations rounded to {bits} bits (AVX-512 VNNI); dtype=float32 rounds nothing"

    @property
    def product_kinds(self) -> list[ProductKind]:
        """Kinds of products that choose among ways of computing them."""
        return self.operations.product_kinds(self.products)

    @property
    def max_position_embeddings(self) -> int:
        """Positions the model was made for."""
        return self.config.max_position_embeddings

    @property
    def embedding_size(self) -> int:
        """See core.contract.model.embedding_size."""
        return self.config.hidden_size

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, embedded: Sequence[tuple[int, Tensor]] = ()
    ) -> Tensor:
        """input_ids, positions: int32 or int64 [num_tokens]. Returns the last hidden states [num_tokens, hidden_size], normed.

        embedded: (index of a token, rows [count, hidden_size]), what this token and the next ones have in place of what the
        embedding gives, scaled where that is; learned positions are added.
        """
        x, ropes = self.operations.embed(input_ids, positions, self.embed)
        for first, rows in embedded:
            own = slice(first, first + len(rows))
            x[own] = rows.to(x.dtype)
            if self.embed.positions is not None:
                x[own] += self.embed.positions[positions[own]]
        adapted = self.adapters is not None and self.adapters.slots is not None
        kind = None if self.recorded is None or adapted else getattr(attention, "step_kind", None)
        if self.recorded is None or kind is None:
            x = self._run_layers(x, ropes, attention)
        else:
            x = self.recorded(self._run_layers, kind, x, ropes, attention)
        return self.operations.norm(x, self.norm)

    def _run_layers(self, x: Tensor, ropes: tuple[Rope, ...], attention: Attention) -> Tensor:
        for layer in self.layers:
            x = layer(x, ropes, self.operations, attention)
        return x

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden_size], only the rows that will be sampled. Returns logits of the rank's own tokens, see
        core.contract.Model."""
        logits, cap = self.operations.product(hidden, self.lm_head, out), self.config.logit_softcap
        logits = logits if cap is None else self.operations.softcap(logits, cap)
        if self._missing:
            logits[:, -self._missing :] = -torch.inf
        return logits


class DecoderLayer:
    """Attention, a part with a state or both, and then an MLP or experts: those that LayerConfig names."""

    def __init__(
        self, config: DecoderConfig, index: int, places: tuple[int, int], tensors: LayerTensors, batch_invariant: bool
    ) -> None:
        """config: of what this rank computes; places: how many layers of attention and how many with a state the model has before
        this one; tensors: the model's."""
        layer = config.layers[index]
        config = config if layer.names is None else replace(config, names=layer.names)
        tensors = tensors.below(config.names.layer.format(index), config)
        self._rope = layer.rope
        self.attention: AttentionPart | None = None
        self.state: StatePart | None = None
        if layer.attention:
            attention = SelfAttention if config.latent is None else LatentAttention
            self.attention = attention(config, layer, places[0], tensors, batch_invariant)
            k_scale, v_scale = read_kv_scales(tensors)
            self.kv_scales = k_scale, v_scale if config.latent is None else k_scale  # a value inside the key has the key's
        if layer.state:
            assert config.state is not None
            of_layer = replace(config, state=replace(config.state, slopes=layer.slopes))
            self.state = STATE_PARTS[config.state.spec.kind](of_layer, places[1], tensors, batch_invariant)
        mixer = self.attention or self.state
        self._mixer: MixerPart | SideBySide | OntoNormed | None = mixer
        if self.attention is not None and self.state is not None:
            norm = tensors.norm(config.names.mixer_norm, config.hidden_size)
            self._mixer = SideBySide(norm, self.attention, self.state)
        elif layer.kept is not None and mixer is not None:
            self._mixer = OntoNormed(tensors.norm(config.names.mixer_norm, config.hidden_size), layer.kept[0], mixer)
        self.mlp: MLP | ExpertsMLP | None = None
        if layer.mlp is not None:
            kept = None if layer.kept is None else layer.kept[1]
            self.mlp = ExpertsMLP(config, tensors, kept) if layer.mlp == "experts" else MLP(config, tensors)

    def absorb_norms(self, ops: Operations) -> None:
        """Merge norms into the products that follow them, where the operations can."""
        for part in self._parts:
            part.absorb_norms(ops)

    @property
    def num_states(self) -> int:
        """Layers with a state among its parts."""
        return 0 if self.state is None else len(self.state.state_layers)

    @property
    def linears(self) -> list[Linear]:
        """Products of this part, which absorb norms and are checked for batch invariance."""
        return [linear for part in self._parts for linear in part.linears]

    @property
    def _parts(self) -> list[MixerPart | MLP | ExpertsMLP]:
        return [part for part in (self.attention, self.state, self.mlp) if part is not None]

    def __call__(self, x: Tensor, ropes: tuple[Rope, ...], ops: Operations, attention: Attention) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, used up; ropes: of `Operations.embed`."""
        if self._mixer is not None:
            x = self._mixer(x, None if self._rope is None else ropes[self._rope], ops, attention)
        return x if self.mlp is None else self.mlp(x, ops)


STATE_PARTS: dict[str, type[StatePart]] = {
    GATED_DELTA: GatedDelta,
    KDA: KimiDelta,
    MAMBA2: Mamba2,
    MAMBA1: Mamba1,
    LIGHTNING: Lightning,
    CONV: ShortConvolution,
}
"""What computes a part with a state, by the kind of its recurrence."""


def _head(
    config: DecoderConfig, weights: WeightSource, tensors: LayerTensors, vocabulary: VocabularyCut, table: Tensor
) -> Linear:
    """The product that gives logits. table: the embedding's, which may serve as one too."""
    names, shape = config.names, (vocabulary.axis, config.hidden_size)
    head = f"{names.head}.weight"
    tied = config.tie_word_embeddings and head not in weights
    kept = weights.take_head(f"{names.embed}.weight" if tied else head, shape)
    if kept is not None and kept.shape[0] == len(vocabulary.head(table)):
        return Linear(kept, dtype=weights.dtype)
    return Linear(vocabulary.head(table if tied else tensors.take(head, vocabulary.axis, config.hidden_size)))


def _positions(config: DecoderConfig, tensors: LayerTensors) -> Tensor | None:
    """The rows of learned positions from that of position 0 on."""
    if config.names.positions is None:
        return None
    rows = config.max_position_embeddings + config.position_offset
    return tensors.take(f"{config.names.positions}.weight", rows, config.hidden_size)[config.position_offset :].contiguous()


def _rounded(scale: float, table: Tensor) -> float:
    """A factor as the table's dtype holds it: what models that were trained in half precision multiplied by."""
    return float(torch.tensor(scale, dtype=table.dtype))


def _scaled(norm: Norm, scale: float) -> Norm:
    """A norm whose result is multiplied: logits that are scaled (Granite) cost no step of their own."""
    if scale == 1.0:
        return norm
    return Norm(norm.weight.float() * scale, norm.eps, None if norm.bias is None else norm.bias.float() * scale)
