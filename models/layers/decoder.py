"""Decoder and its layers: attention and MLP over packed tokens without padding, with merged projections."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import embedding

from headway.core.contract.adapters import AdapterSlots
from headway.core.contract.kernel import AHEAD
from headway.core.contract.layer import Invariance
from headway.core.contract.model import Attention, StateLayer
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import CONV, GATED_DELTA, KDA, LIGHTNING, MAMBA1, MAMBA2
from headway.kernels.experts.bound import Experts, ExpertsKind, ExpertsOptions
from headway.kernels.experts.weights import RoutedWeights, each_expert
from headway.kernels.linear.choice import LinearChoice, LinearKernels
from headway.kernels.linear.linear import Linear
from headway.kernels.lora.bank import AdapterBank
from headway.kernels.lora.operations import adapted_operations
from headway.kernels.runtime.native.library import functions, native_support
from headway.kernels.step.invariant import TILE_ROWS, invariant_operations
from headway.kernels.step.native import NativeOperations, RecordedLayers
from headway.kernels.step.operations import Embedding, Gate, Norm, Operations, Rope
from headway.kernels.step.torch_operations import TorchOperations
from headway.models.checkpoints.expert_weights import take_experts
from headway.models.checkpoints.weights import WeightSource
from headway.models.config import DecoderConfig, LayerInputsConfig
from headway.models.families.rope import rope_tables
from headway.models.layers.attention import LatentAttention, SelfAttention
from headway.models.layers.ranked import SumsInOrder, over_ranks
from headway.models.layers.state_parts import GatedDelta, KimiDelta, Lightning, Mamba1, Mamba2, ShortConvolution, StatePart
from headway.models.layers.tensors import LayerTensors, read_kv_scales
from headway.models.shard import ModelShard, VocabularyShard

log = logging.getLogger("headway")


class MLP:
    """MLP: up projection, activation and down projection; gated (SwiGLU and similar, Shazeer 2020) or ungated."""

    def __init__(self, config: DecoderConfig, tensors: LayerTensors) -> None:
        names, hidden, inner = config.names, config.hidden_size, tensors.shard.inner
        self._gated = config.gated
        self._activation = config.activation
        rows = inner + inner if config.gated and len(names.up) == 1 else inner
        self.norm = tensors.norm_if_any(names.mlp_norm, hidden)
        by = config.multipliers
        scales = [by.gate] * inner.size + [1.0] * inner.size if by.gate != 1.0 else 1.0
        self.up_proj = tensors.linear(dict.fromkeys(names.up, rows), hidden, config.mlp_bias, scale=scales)
        scale = config.residual_scale * by.mlp
        self.down_proj = tensors.linear({names.down: hidden}, inner, config.mlp_bias, scale=scale)
        self.post_norm = tensors.norm_if_any(names.mlp_post_norm, hidden)

    @property
    def linears(self) -> list[Linear]:
        """Linear layers of this part, in the order of computation."""
        return [self.up_proj, self.down_proj]

    @property
    def gated_product(self) -> Linear | None:
        """Merged gate and up projection; the activated first half multiplies the second half. None if the MLP is not gated."""
        return self.up_proj if self._gated else None

    def absorb_norms(self, ops: Operations) -> None:
        """Merge the norm into the linear layer after it, if the operations support merging."""
        if self.norm is not None and self._gated:
            norm, up_proj = ops.absorb(self.norm, self.up_proj)
            self.norm = norm
            self.up_proj = up_proj

    def __call__(self, x: Tensor, ops: Operations) -> Tensor:
        """Return the updated residual stream. x: [num_tokens, hidden_size], the residual stream, overwritten."""
        compute = ops.norm_gated_product if self._gated else ops.norm_product
        inner = compute(x, self.norm, self.up_proj, self._activation)
        if self.post_norm is None:
            return ops.add_product(x, inner, self.down_proj)
        return ops.add_norm(x, ops.product(inner, self.down_proj), self.post_norm)


class ExpertsMLP:
    """Mixture of experts: routing, the experts' grouped GEMMs, and the weighted sum."""

    def __init__(self, config: DecoderConfig, tensors: LayerTensors, normed_scale: float | None = None) -> None:
        """normed_scale: factor of the normed stream to which the output is added; see `LayerConfig.normed_scales`."""
        assert config.experts is not None
        assert config.activation == config.experts.activation
        names = config.names
        self.norm = tensors.norm(names.mlp_norm or "", config.hidden_size)
        self._normed_scaled = None if normed_scale is None else replace(self.norm, weight=self.norm.weight * normed_scale)
        self._config = config.experts
        self._weights: RoutedWeights | None = take_experts(
            tensors.shard.experts,
            names.experts,
            config.hidden_size,
            tensors.weights,
            tensors.prefix,
            config.residual_scale * config.multipliers.mlp,
        )
        routed = (self._weights.gate_up, self._weights.down)
        self.num_elements = sum(math.prod(each.shape) for each in routed)
        """Number of elements of the routed experts' weights."""
        self.held_bytes = sum(each.nbytes for each in routed)
        """Size of the routed experts' weights in bytes, including scales."""
        self.compute: Experts | None = None
        """Implementation of the MoE layer; None until `absorb_norms` has run."""

    @property
    def linears(self) -> list[Linear]:
        """One linear layer of each kind; available only until `absorb_norms` runs."""
        weights, config = self._weights, self._config
        if weights is None:
            return []
        count = config.num_held + config.num_shared
        firsts = [each_expert(stacked, count)[0] for stacked in (weights.gate_up, weights.down)]
        return [Linear(weights.router), *(Linear(first, dtype=weights.router.dtype) for first in firsts)]

    @property
    def kind(self) -> ExpertsKind | None:
        """Kind of MoE layer; None if the layer has only one kernel and its weights are not repacked on a GPU."""
        kind: ExpertsKind | None = getattr(self.compute, "kind", None)
        return kind if kind is not None and (kind.chooses or kind.device.type == "cuda") else None

    def absorb_norms(self, ops: Operations) -> None:
        """Pass the weights to the implementation of the MoE layer, which may repack them."""
        if self._weights is not None:
            self.compute = ops.experts(self._config, self._weights, self.norm)
            self._weights = None

    def __call__(self, x: Tensor, ops: Operations) -> Tensor:
        """Return the updated residual stream. x: [num_tokens, hidden_size], the residual stream, overwritten."""
        assert self.compute is not None
        return self.compute(x, None if self._normed_scaled is None else ops.norm(x, self._normed_scaled))


AttentionPart = SelfAttention | LatentAttention
"""Attention part of a layer."""
MixerPart = AttentionPart | StatePart
"""Part that mixes tokens: attention, which also has the methods of `StatePart`, or a recurrent part."""


class OntoNormed:
    """Attention or a recurrent part that adds to its normed input instead of to the residual stream (MiniMax-01)."""

    def __init__(self, norm: Norm, normed_scale: float, part: MixerPart) -> None:
        """normed_scale: factor of the normed input in the sum. part: attention or recurrent part without a norm."""
        self.norm = norm
        self._normed_scale = normed_scale
        self._part = part

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Return the updated residual stream, as `StatePart` does."""
        normed = ops.norm(x, self.norm)
        mixed = self._part.mix(normed, rope, ops, attention)
        return self._part.add(normed if self._normed_scale == 1.0 else normed * self._normed_scale, mixed, ops)


class SideBySide:
    """Attention and a recurrent part with the same normed input; both outputs are added to the residual stream (Falcon-H1)."""

    def __init__(self, norm: Norm, attention: AttentionPart, state: StatePart) -> None:
        """attention, state: parts without norms."""
        self.norm = norm
        self._attention = attention
        self._state = state

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Return the updated residual stream, as `StatePart` does."""
        normed = ops.norm(x, self.norm)
        attended = self._attention.mix(normed, rope, ops, attention)
        moved = self._state.mix(normed, rope, ops, attention)
        return ops.add_products(x, [(attended, self._attention.out_proj), (moved, self._state.out_proj)])


def operations_for(
    inv_freq: Tensor,
    factors: Tensor,
    kernels: LinearKernels | None = None,
    experts: ExpertsOptions | None = None,
    halves: Sequence[int] = (),
    invariant: bool = False,
) -> Operations:
    """Return the operations of the device: fused kernels on a GPU with Triton, C code on a CPU with a compiler, else torch.

    inv_freq, factors: float32 [ropes, head_dim / 2] on the model's device, from `rope_tables`. kernels, experts: kernels for
    linear layers and for MoE layers; None means Headway's own. halves: see `ropes_of`. invariant: True if a GPU's layers of
    experts must compute a token's result regardless of the other tokens.
    """
    if inv_freq.device.type == "cpu":
        return _on_cpu(inv_freq, factors, experts, halves)
    if inv_freq.device.type != "cuda":
        return TorchOperations(inv_freq, factors, experts, halves)
    try:
        from headway.kernels.step.fused import Fused
    except ImportError:  # torch for a GPU brings Triton, but not on every system
        return TorchOperations(inv_freq, factors, experts, halves)
    return Fused(inv_freq, factors, kernels, experts, halves, invariant)


def _on_cpu(inv_freq: Tensor, factors: Tensor, experts: ExpertsOptions | None, halves: Sequence[int]) -> Operations:
    found = functions()
    if found is not None:
        return NativeOperations(inv_freq, factors, found, experts, halves)
    log.warning("model: decode steps run on torch, up to twice as slow as Headway's C: %s", native_support())
    return TorchOperations(inv_freq, factors, experts, halves)


class LayerInputs:
    """Per-layer inputs: every layer's own embedding of each token, mixed with a projection of the token's embedding (Gemma 4)."""

    def __init__(self, config: DecoderConfig, sizes: LayerInputsConfig, tensors: LayerTensors) -> None:
        names, rows = config.names.inputs, sizes.num_layers * sizes.size
        self._size = sizes.size
        self.table = tensors.take(f"{names.table}.weight", sizes.vocab_size, rows)
        self._scale = _rounded(sizes.size**0.5, self.table) * 0.5**0.5
        self.proj = tensors.linear({names.proj: rows}, config.hidden_size, False)
        norm = tensors.norm(names.norm, sizes.size)
        # The projection is to be divided by hidden_size ** 0.5, which its norm undoes, except for the epsilon.
        self.norm = Norm(norm.weight.float() * 0.5**0.5, norm.eps * config.hidden_size)

    def __call__(self, input_ids: Tensor, x: Tensor, ops: Operations) -> list[Tensor]:
        """Return the input of each layer, [num_tokens, size]. x: [num_tokens, hidden_size], the embedded tokens."""
        own, size = embedding(input_ids, self.table).mul_(self._scale), self._size
        projected = ops.product(x, self.proj)
        return list(ops.add_norm(own.view(-1, size), projected.view(-1, size), self.norm).view_as(own).split(size, dim=1))


class LayerInput:
    """Part of a layer that adds the layer's input, gated by the residual stream, to the residual stream (Gemma 4)."""

    def __init__(self, config: DecoderConfig, sizes: LayerInputsConfig, tensors: LayerTensors) -> None:
        names, hidden = config.names.inputs, config.hidden_size
        self._activation = config.activation
        self.gate_proj = tensors.linear({names.gate: sizes.size}, hidden, False)
        self.out_proj = tensors.linear({names.out: hidden}, sizes.size, False)
        self.post_norm = tensors.norm(names.post_norm, hidden)

    @property
    def linears(self) -> list[Linear]:
        """Linear layers of this part, in the order of computation."""
        return [self.gate_proj, self.out_proj]

    def absorb_norms(self, ops: Operations) -> None:
        """Do nothing: the part has no norm before a linear layer."""

    def __call__(self, x: Tensor, of_layer: Tensor, ops: Operations) -> Tensor:
        """Return the updated residual stream. x: [num_tokens, hidden_size], overwritten. of_layer: [num_tokens, size]."""
        inner = ops.gate(ops.norm_product(x, None, self.gate_proj, self._activation), of_layer, Gate("none"))
        return ops.add_norm(x, ops.product(inner, self.out_proj), self.post_norm)


class SharedKeys:
    """Attention of one step that passes the keys and values of a layer to the later layers that share them (Gemma 4 E2B)."""

    def __init__(self, attention: Attention, sources: Container[int]) -> None:
        """sources: places of the KV caches that several layers read."""
        self._attention = attention
        self._again: Attention = getattr(attention, "again", attention)
        self._sources = sources
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self.state = attention.state

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return a layer's attention, as `Attention` does. k, v: without heads if the layer shares another layer's."""
        if layer in self._held:
            k, v = self._held[layer]
            return self._again(layer, q, k, v)
        if layer in self._sources:
            self._held[layer] = k, v
        return self._attention(layer, q, k, v)


class Decoder:
    """Decoder over the packed tokens of all sequences of a step, one row per token; only attention and recurrence mix rows."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        invariance: Invariance = Invariance.NONE,
        ranks: Ranks = ONE_RANK,
        slots: AdapterSlots | None = None,
        kernels: LinearKernels | None = None,
        experts: ExpertsOptions | None = None,
    ) -> None:
        """Read the layers' tensors from `weights`; with several ranks, read only this rank's shard (`ModelShard`).

        invariance: level that a row's bits must keep, which is slower. Attention and states depend on the level. All other parts
        compute each row separately at any level.
        ranks: communication between ranks, which must all make the same calls. The layers' specs have this rank's heads, and the
        logits cover this rank's part of the vocabulary.
        slots: adapter slots; None means no adapters.
        kernels, experts: kernels for linear and MoE layers; None means Headway's own.

        :raises ModelError: if invariance is requested, but GEMM results on this machine depend on the batch.
        :raises ConfigError: if the model does not divide among the ranks.
        """
        self.config = config
        names = config.names
        self._invariance = invariance
        self.device = weights.device
        self.dtype = weights.dtype
        shard = ModelShard(config, ranks.rank, ranks.size, by_expert=weights.device.type == "cpu")
        ranks = SumsInOrder(ranks) if invariance else ranks
        self._kernels = kernels
        tensors, vocabulary = LayerTensors(shard.own, weights, shard, ranks, kernels=kernels), shard.vocabulary
        table = vocabulary.table(tensors.take(f"{names.embed}.weight", vocabulary.axis, config.hidden_size))
        positions = shard.once(_positions(config, tensors))
        self.embed = Embedding(table, _rounded(config.embedding_scale, table), positions, vocabulary.tokens)
        self.attention_specs: list[AttentionSpec] = []
        self.state_layers: list[StateLayer] = []
        self.layers: list[DecoderLayer] = []
        inputs = config.layer_inputs
        self.layer_inputs = None if inputs is None else LayerInputs(config, inputs, tensors)
        self._shared = {config.place_of(index) for index, layer in enumerate(config.layers) if layer.shares_kv is not None}
        for index in range(config.num_layers):
            places = config.place_of(index), len(self.state_layers)
            layer = DecoderLayer(shard.own, index, places, tensors, invariance)
            self.layers.append(layer)
            self.attention_specs += [layer.attention.spec] if layer.caches and layer.attention is not None else []
            self.state_layers += [] if layer.state is None else layer.state.state_layers
        self.norm = _scaled(tensors.norm(names.norm, config.hidden_size), config.logit_scale)
        self.lm_head = _head(config, weights, tensors, vocabulary, table)
        self._missing = vocabulary.missing
        weights.finish(names.ignored, names.ignored_modules)
        rows = TILE_ROWS[weights.device.type] if invariance else None
        self.operations = self._operations(ranks, experts)
        self.adapters: AdapterBank | None = None
        """Slots for LoRA adapters and their weights. None means no adapters."""
        if slots is not None:
            operations, adapters = adapted_operations(self.operations, self._linears, slots, weights.dtype, rows)
            self.operations = operations
            self.adapters = adapters
        self.operations = over_ranks(self.operations, ranks, self.adapters)
        for layer in self.layers:
            layer.absorb_norms(self.operations)
        parts = [layer.attention for layer in self.layers if layer.caches]
        self.latent_layers = {
            index: part.layer for index, part in enumerate(parts) if isinstance(part, LatentAttention) and part.layer
        }
        self.kv_scales = [layer.kv_scales for layer in self.layers if layer.caches]
        """k_scale and v_scale of each attention layer's FP8 cache, from the checkpoint; 1 if the checkpoint has no scales."""

    @cached_property
    def _compiled_layers(self) -> Collection[int]:
        """Indices of the layers that run while kernels are compiled ahead: the first of each kind, because the others launch the
        same kernels. All layers run if layers share keys, or if weights may be packed for a chosen kernel."""
        if self._shared or self.linear_choices or self.expert_kinds:
            return range(len(self.layers))
        first: dict[object, int] = {}
        for index, (config, layer) in enumerate(zip(self.config.layers, self.layers, strict=True)):
            spec = None if layer.attention is None else layer.attention.spec.kind
            first.setdefault((config, spec, *(linear.spec() for linear in layer.linears)), index)
        return set(first.values())

    @property
    def _linears(self) -> list[Linear]:
        inputs = [] if self.layer_inputs is None else [self.layer_inputs.proj]
        return [self.lm_head, *inputs, *(linear for layer in self.layers for linear in layer.linears)]

    def _operations(self, ranks: Ranks, experts: ExpertsOptions | None) -> Operations:
        """Return the operations of this device. If they are Headway's C code on a single rank, also prepare the C code to run
        whole layers."""
        inv_freq, factors = rope_tables(self.config.ropes, self.device)
        halves = [len(rope.inv_freq) for rope in self.config.ropes]
        operations = operations_for(inv_freq, factors, self._kernels, experts, halves, bool(self._invariance))
        if self._invariance:
            operations = invariant_operations(operations, self._linears, self.device, experts)
        plain = ranks.size == 1 and self.layer_inputs is None
        own = operations if isinstance(operations, NativeOperations) and plain else None
        self.recorded = None if own is None else RecordedLayers(own.functions)
        """Runner of all layers in a single call of Headway's C code. None means that Python runs each part."""
        return operations

    def part(self, index: int | None) -> object:
        """Return the layer at `index`; for None, return the embeddings, the final norm and the output head."""
        if index is not None:
            return self.layers[index]
        inputs = [] if self.layer_inputs is None else [self.layer_inputs, self.layer_inputs.proj]
        return (self.embed, self.norm, self.lm_head, *inputs)

    def rebuilt(self, index: int | None, weights: WeightSource) -> object:
        """Return a new part for the same index as in `part`, built from `weights`. Tensor parallelism is not supported. Raises
        the same errors as `__init__`."""
        if index is None:
            return Decoder(replace(self.config, layers=()), weights, self._invariance, kernels=self._kernels).part(None)
        shard = ModelShard(self.config, by_expert=weights.device.type == "cpu")
        places = self.config.place_of(index), sum(each.num_states for each in self.layers[:index])
        tensors = LayerTensors(shard.own, weights, shard, ONE_RANK, kernels=self._kernels)
        layer = DecoderLayer(shard.own, index, places, tensors, self._invariance)
        layer.absorb_norms(self.operations)
        return layer

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; all token ids are smaller."""
        return self.config.vocab_size

    @property
    def expert_kinds(self) -> list[ExpertsKind]:
        """Kinds of MoE layers that have several kernels."""
        kinds = [layer.mlp.kind for layer in self.layers if isinstance(layer.mlp, ExpertsMLP)]
        return list(dict.fromkeys(kind for kind in kinds if kind is not None))

    @property
    def products(self) -> list[tuple[Linear, bool]]:
        """Linear layers of all decoder layers, each paired with True if the layer is gated, else False."""
        gated = {layer.mlp.gated_product for layer in self.layers if isinstance(layer.mlp, MLP)}
        return [(linear, linear in gated) for layer in self.layers for linear in layer.linears]

    @property
    def rounding(self) -> str:
        """Description of how this CPU's kernels round activations; empty if the kernels do not round activations."""
        own = functions()
        bits = 0 if own is None else own.x_bits
        if not bits or not any(linear.packed is not None and linear.reads_quantized for linear, _ in self.products):
            return ""
        return f".gguf blocks: activations rounded to {bits} bits (AVX-512 VNNI); dtype=float32 rounds nothing"

    @property
    def linear_choices(self) -> list[LinearChoice]:
        """Kinds of linear layers, including the head, whose kernel is chosen by measurement."""
        return self.operations.linear_choices([*self.products, (self.lm_head, False)])

    @property
    def max_position_embeddings(self) -> int:
        """Number of positions that the model supports."""
        return self.config.max_position_embeddings

    @property
    def embedding_size(self) -> int | None:
        """Number of elements of an embedded input, which is the hidden size. None if every layer embeds the tokens too."""
        return self.config.hidden_size if self.layer_inputs is None else None

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, embedded: Sequence[tuple[int, Tensor]] = ()
    ) -> Tensor:
        """Return the last hidden states [num_tokens, hidden_size], normed. input_ids, positions: int32 or int64 [num_tokens].

        embedded: pairs of a token index and rows [count, hidden_size]. The rows replace the scaled embeddings of `count` tokens
        from the index on; learned positions are still added.
        """
        x, ropes = self.operations.embed(input_ids, positions, self.embed)
        for first, rows in embedded:
            own = slice(first, first + len(rows))
            x[own] = rows.to(x.dtype)
            if self.embed.positions is not None:
                x[own] += self.embed.positions[positions[own]]
        inputs = None if self.layer_inputs is None else self.layer_inputs(input_ids, x, self.operations)
        adapted = self.adapters is not None and self.adapters.slots is not None
        kind = None if self.recorded is None or adapted else getattr(attention, "step_kind", None)
        if self.recorded is None or kind is None:
            x = self._run_layers(x, ropes, attention, inputs)
        else:
            x = self.recorded(self._run_layers, kind, x, ropes, attention)
        return self.operations.norm(x, self.norm)

    def _run_layers(
        self, x: Tensor, ropes: tuple[Rope, ...], attention: Attention, inputs: Sequence[Tensor] | None = None
    ) -> Tensor:
        attention = SharedKeys(attention, self._shared) if self._shared else attention
        ahead = AHEAD.get() is not None
        for index, layer in enumerate(self.layers):
            if ahead and index not in self._compiled_layers:
                continue
            x = layer(x, ropes, self.operations, attention, None if inputs is None else inputs[index])
        return x

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits for this rank's part of the vocabulary; see core.contract.Model. hidden: [rows, hidden_size]."""
        logits, cap = self.operations.product(hidden, self.lm_head, out), self.config.logit_softcap
        logits = logits if cap is None else self.operations.softcap(logits, cap)
        if self._missing:
            logits[:, -self._missing :] = -torch.inf
        return logits


class DecoderLayer:
    """Decoder layer: attention, a recurrent part or both, then an MLP or experts, as defined by LayerConfig."""

    def __init__(
        self, config: DecoderConfig, index: int, places: tuple[int, int], tensors: LayerTensors, invariance: Invariance
    ) -> None:
        """config: configuration of this rank's shard. places: number of attention layers and number of recurrent layers before
        this layer. tensors: reader of the model's tensors."""
        layer = config.layers[index]
        config = config.of_layer(layer)
        tensors = tensors.of_layer(index, config)
        self._rope = layer.rope
        self.caches = layer.caches
        self.attention: AttentionPart | None = None
        self.state: StatePart | None = None
        if layer.attention:
            attention = SelfAttention if config.latent is None else LatentAttention
            self.attention = attention(config, layer, places[0], tensors, invariance)
            k_scale, v_scale = read_kv_scales(tensors)
            self.kv_scales = k_scale, v_scale if config.latent is None else k_scale  # a value inside the key has the key's scale
        if layer.state:
            assert config.state is not None
            of_layer = replace(config, state=replace(config.state, slopes=layer.slopes))
            self.state = STATE_PARTS[config.state.spec.kind](of_layer, places[1], tensors, invariance)
        mixer = self.attention or self.state
        self._mixer: MixerPart | SideBySide | OntoNormed | None = mixer
        if self.attention is not None and self.state is not None:
            norm = tensors.norm(config.names.mixer_norm, config.hidden_size)
            self._mixer = SideBySide(norm, self.attention, self.state)
        elif layer.normed_scales is not None and mixer is not None:
            self._mixer = OntoNormed(tensors.norm(config.names.mixer_norm, config.hidden_size), layer.normed_scales[0], mixer)
        self.mlp: MLP | ExpertsMLP | None = None
        if layer.mlp is not None:
            scale = None if layer.normed_scales is None else layer.normed_scales[1]
            self.mlp = ExpertsMLP(config, tensors, scale) if layer.mlp == "experts" else MLP(config, tensors)
        self.input = None if config.layer_inputs is None else LayerInput(config, config.layer_inputs, tensors)
        self._scalar = None if config.names.scalar is None else tensors.take(config.names.scalar, 1)

    def absorb_norms(self, ops: Operations) -> None:
        """Merge norms into the linear layers after them, if the operations support it."""
        for part in self._parts:
            part.absorb_norms(ops)

    @property
    def num_states(self) -> int:
        """Number of layers that state backends run for this decoder layer."""
        return 0 if self.state is None else len(self.state.state_layers)

    @property
    def linears(self) -> list[Linear]:
        """Linear layers of all parts. Norms are merged into these layers, and the batch invariance of these layers is checked."""
        return [linear for part in self._parts for linear in part.linears]

    @property
    def _parts(self) -> list[MixerPart | MLP | ExpertsMLP | LayerInput]:
        return [part for part in (self.attention, self.state, self.mlp, self.input) if part is not None]

    def __call__(
        self, x: Tensor, ropes: tuple[Rope, ...], ops: Operations, attention: Attention, own: Tensor | None = None
    ) -> Tensor:
        """Return the new residual stream. x: [num_tokens, hidden_size], overwritten. ropes: from `Operations.embed`. own: the
        layer's input, from `LayerInputs`."""
        if self._mixer is not None:
            x = self._mixer(x, None if self._rope is None else ropes[self._rope], ops, attention)
        x = x if self.mlp is None else self.mlp(x, ops)
        if self.input is not None and own is not None:
            x = self.input(x, own, ops)
        return x if self._scalar is None else x.mul_(self._scalar)


STATE_PARTS: dict[str, type[StatePart]] = {
    GATED_DELTA: GatedDelta,
    KDA: KimiDelta,
    MAMBA2: Mamba2,
    MAMBA1: Mamba1,
    LIGHTNING: Lightning,
    CONV: ShortConvolution,
}
"""Classes of recurrent parts, keyed by the kind of recurrence."""


def _head(
    config: DecoderConfig, weights: WeightSource, tensors: LayerTensors, vocabulary: VocabularyShard, table: Tensor
) -> Linear:
    """Return the output head. table: the embedding, which is also the head if the two are tied."""
    names, shape = config.names, (vocabulary.axis, config.hidden_size)
    head = f"{names.head}.weight"
    tied = config.tie_word_embeddings and head not in weights
    head_blocks = weights.take_head(f"{names.embed}.weight" if tied else head, shape)
    if head_blocks is not None and head_blocks.shape[0] == len(vocabulary.head(table)):
        return Linear(head_blocks, dtype=weights.dtype, kernels=tensors.kernels)
    taken = table if tied else tensors.take(head, vocabulary.axis, config.hidden_size)
    return Linear(vocabulary.head(taken), kernels=tensors.kernels)


def _positions(config: DecoderConfig, tensors: LayerTensors) -> Tensor | None:
    """Return the embeddings of learned positions, starting with position 0; None without learned positions."""
    if config.names.positions is None:
        return None
    rows = config.max_position_embeddings + config.position_offset
    return tensors.take(f"{config.names.positions}.weight", rows, config.hidden_size)[config.position_offset :].contiguous()


def _rounded(scale: float, table: Tensor) -> float:
    """Return a factor rounded to the table's dtype, as in the training of half-precision models."""
    return float(torch.tensor(scale, dtype=table.dtype))


def _scaled(norm: Norm, scale: float) -> Norm:
    """Return a norm whose output is multiplied by `scale`, so that scaled logits (Granite) need no extra operation."""
    if scale == 1.0:
        return norm
    return Norm(norm.weight.float() * scale, norm.eps, None if norm.bias is None else norm.bias.float() * scale)
