"""Attention and layers with a state for packed sequences without an engine: dense caches, and every formula token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu, softplus

from headway.core.contract.model import StateLayer, latent_layers, state_layers
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import AttentionSpec
from headway.core.sampling.ranked_vocabulary import join_logits


class DenseAttention:
    """The `Attention` of a model: keys, values and states of numbered sequences, which grow with every step."""

    def __init__(self, model: Any) -> None:
        self._specs, self._latents, self._states = model.attention_specs, latent_layers(model), state_layers(model)
        self._kept: dict[tuple[str, int, int], Any] = {}
        self._step: list[tuple[int, int]] = []
        self._called: set[int] = set()

    def begin(self, step: Sequence[tuple[int, int]]) -> None:
        """step: number of a sequence, and how many tokens it has in the step; as their tokens are packed."""
        self._step = [*step]
        self._called = set()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec, counts, outs = self._specs[layer], [count for _, count in self._step], []
        for (seq, count), queries, *new in zip(self._step, *(tensor.split(counts) for tensor in (q, k, v)), strict=True):
            before = self._kept.get(("kv", layer, seq))
            if layer in self._called:  # of layers that share a cache, the first has written to it
                assert all(torch.equal(held[len(held) - count :], each) for held, each in zip(before, new, strict=True))
                before, new = [held[: len(held) - count] for held in before], new
            keys, values = new if before is None else map(torch.cat, zip(before, new, strict=True))
            self._kept["kv", layer, seq] = keys, values
            if layer in self._latents:
                keys, values = self._latents[layer].expand(keys)
            ages = torch.arange(len(keys) - count, len(keys))[:, None] - torch.arange(len(keys))
            seen = ((ages >= 0) & (ages < (spec.sliding_window or len(keys)))).to(keys.device)
            heads = [tensor.transpose(0, 1) for tensor in (queries, keys, values)]
            outs.append(attend(spec, *heads, seen).transpose(0, 1))
        self._called.add(layer)
        return torch.cat(outs)

    def state(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        counts, outs = [count for _, count in self._step], []
        spec = self._states[layer].spec
        assert x.shape == (sum(counts), spec.input_channels)
        assert all(tensor.stride(-1) == 1 for tensor in (x, *gates))
        for (seq, _), rows, *parts in zip(self._step, *(tensor.split(counts) for tensor in (x, *gates)), strict=True):
            kept = self._kept.setdefault(("state", layer, seq), {})
            outs.append(run_tokens(self._states[layer], rows.double(), [part.double() for part in parts], kept).to(x.dtype))
        return torch.cat(outs)


@torch.inference_mode()
def logits_of_text(model: Any, ids: Tensor, ranks: Ranks = ONE_RANK) -> Tensor:
    """Logits [tokens, vocab_size] of a model over one text, of its part on a rank and of the others'."""
    attention = DenseAttention(model)
    attention.begin([(0, len(ids))])
    hidden = model(ids, torch.arange(len(ids)), attention)
    return join_logits(model.compute_logits(hidden), model.vocab_size, ranks)


def attend(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q, k, v: [heads, tokens, dim]; seen: bool [queries, keys]."""
    if spec.softcap is None and spec.sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=spec.scale, enable_gqa=True)
    k, v = (part.repeat_interleave(spec.group_size, 0) for part in (k, v))
    scores = q @ k.mT * spec.scale
    scores = scores if spec.softcap is None else spec.softcap * (scores / spec.softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = torch.full((len(q), 1, 1), -torch.inf) if spec.sinks is None else torch.tensor(spec.sinks)[:, None, None]
    return torch.cat([scores, sinks.expand(-1, q.shape[1], 1)], dim=2).softmax(2)[..., :-1] @ v


def run_tokens(layer: StateLayer, x: Tensor, gates: Sequence[Tensor], kept: dict[str, Tensor]) -> Tensor:
    """Return the outputs for one sequence in float64, token by token, by the formulas of `StateBackend.scan`.

    kept: the sequence's state, empty before its first token; updated.
    """
    spec, weights = layer
    if spec.conv_channels:
        before = kept.get("conv", x.new_zeros(spec.conv_width - 1, spec.conv_channels))
        rows = torch.cat([before, x])
        kept["conv"] = rows[len(rows) - spec.conv_width + 1 :]
        x = torch.einsum("tcw,cw->tc", rows.unfold(0, spec.conv_width, 1), weights.conv_weight.double())
        x = x if weights.conv_bias is None else x + weights.conv_bias.double()
        x = silu(x) if spec.activation == "silu" else x
    if not spec.recurrent:
        return x
    state = kept.get("state", x.new_zeros(spec.num_heads, spec.key_dim, spec.value_dim))
    outs = []
    for row, *of_token in zip(x, *gates, strict=True):
        state, out = STEPS[spec.kind](layer, state, row, of_token)
        outs.append(out.flatten())
    kept["state"] = state
    return torch.stack(outs)


def delta(layer: StateLayer, state: Tensor, x: Tensor, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    spec, weights = layer
    q, k, v = by_heads(spec, x)
    if spec.qk_norm:
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    a, b = gates
    rate, bias = weights.A_log.double().exp(), weights.dt_bias.double()
    decay = -(rate[:, None] if spec.kind == "kda" else rate) * softplus(a.view_as(bias) + bias)
    state = state * decay.exp().view(spec.num_heads, -1, 1)
    missing = spec.beta_scale * b.sigmoid()[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
    state = state + torch.einsum("hk,hv->hkv", k, missing)
    return state, torch.einsum("hkv,hk->hv", state, q * spec.scale)


def by_heads(spec: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = spec.num_key_heads * spec.key_dim
    q, k, v = x.split([keys, keys, spec.num_heads * spec.value_dim])
    repeats = spec.num_heads // spec.num_key_heads
    q, k = (part.view(-1, spec.key_dim).repeat_interleave(repeats, 0) for part in (q, k))
    return q, k, v.view(spec.num_heads, spec.value_dim)


def mamba2(layer: StateLayer, state: Tensor, x: Tensor, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    spec, weights = layer
    inner, keys = spec.num_heads * spec.value_dim, spec.num_key_heads * spec.key_dim
    v, *groups = x.split([inner, keys, keys])
    B, C = (part.view(-1, spec.key_dim).repeat_interleave(spec.num_heads // spec.num_key_heads, 0) for part in groups)
    dt = softplus(gates[0] + weights.dt_bias.double()).clamp(*spec.dt_limits)
    v = v.view(spec.num_heads, spec.value_dim)
    state = (-weights.A_log.double().exp() * dt).exp()[:, None, None] * state
    state = state + torch.einsum("hk,hv->hkv", B, dt[:, None] * v)
    return state, torch.einsum("hkv,hk->hv", state, C) + weights.D.double()[:, None] * v


def mamba1(layer: StateLayer, state: Tensor, x: Tensor, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    weights, (dt, B, C) = layer.parameters, gates
    dt = softplus(dt + weights.dt_bias.double())[:, None]
    new = (-weights.A_log.double().exp() * dt).exp() * state[..., 0] + dt * x[:, None] * B
    return new[..., None], new @ C + weights.D.double() * x


def lightning(layer: StateLayer, state: Tensor, x: Tensor, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    spec, weights = layer
    q, k, v = by_heads(spec, x)
    state = (-weights.A_log.double().exp()).exp()[:, None, None] * state + torch.einsum("hk,hv->hkv", k, v)
    return state, spec.scale * torch.einsum("hkv,hk->hv", state, q)


STEPS = {"gated_delta": delta, "kda": delta, "mamba2": mamba2, "mamba1": mamba1, "lightning": lightning}
