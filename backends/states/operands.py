"""What a recurrence reads: queries, keys, values, decays and write strengths, in float32, out of a layer's input and gates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from headway.core.contract.state import GATED_DELTA, KDA, LIGHTNING, MAMBA2, StateParameters, StateSpec

_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Operands:
    """A linear recurrence in one form: S = exp(g) S + k d^T, out = S^T q + skip, with d = v or d = beta (v - S^T k).

    n sequences of L tokens each; all float32.
    """

    q: Tensor
    """[n, L, key heads, K], scaled."""
    k: Tensor
    """[n, L, key heads, K]"""
    v: Tensor
    """[n, L, heads, V]"""
    g: Tensor
    """Logarithm of the decay, at most 0: [n, L, heads], or [n, L, heads, K] with a decay for each channel of the key."""
    beta: Tensor | None = None
    """[n, L, heads]; None: values are added as they are."""
    skip: Tensor | None = None
    """[n, L, heads, V], added to the output."""


def operands(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], valid: Tensor | None) -> Operands:
    """Read the input and the gates of every kind but `mamba1` and `conv`.

    x: float32 [n, L, channels of the recurrence]; gates: [n, L, ...]; valid: bool [n, L], False where a row is no token: it
    must leave the state as it is. None: all are tokens.
    """
    if spec.kind == MAMBA2:
        return _mamba2(spec, parameters, x, gates, valid)
    both, v = _parts(x, (2 * spec.num_key_heads, spec.num_heads), (spec.key_dim, spec.value_dim))
    q, k = torch.split(_normed(both) if spec.qk_norm else both, spec.num_key_heads, dim=2)
    q = q if spec.scale == 1.0 else q * spec.scale
    assert parameters.decay_rate is not None
    if spec.kind == LIGHTNING:
        g = parameters.decay_rate.expand(*x.shape[:2], spec.num_heads)
        if valid is not None:
            g, k = g * valid[..., None], k * valid[..., None, None]
        return Operands(q, k, v, g)
    assert spec.kind in (GATED_DELTA, KDA)
    assert parameters.dt_bias is not None
    a, b, rate = gates[0].float(), gates[1].float(), parameters.decay_rate
    g = (rate[:, None] if spec.kind == KDA else rate) * softplus(a + parameters.dt_bias.float())
    beta = b.sigmoid() if spec.beta_scale == 1.0 else b.sigmoid() * spec.beta_scale
    if valid is not None:
        beta = beta * valid[..., None]
        g = g * (valid[..., None, None] if spec.kind == KDA else valid[..., None])
    return Operands(q, k, v, g, beta)


def _mamba2(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], valid: Tensor | None) -> Operands:
    assert parameters.decay_rate is not None
    assert parameters.dt_bias is not None
    assert parameters.D is not None
    heads = (spec.num_heads, spec.num_key_heads, spec.num_key_heads)
    value, key, query = _parts(x, heads, (spec.value_dim, spec.key_dim, spec.key_dim))
    dt = softplus(gates[0].float() + parameters.dt_bias.float())
    if spec.dt_limits != (0.0, math.inf):
        dt = dt.clamp(*spec.dt_limits)
    if valid is not None:
        dt = dt * valid[..., None]
    g = parameters.decay_rate * dt
    return Operands(query, key, value * dt[..., None], g, skip=value * parameters.D.float()[:, None])


def _parts(x: Tensor, heads: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """Split the channels [n, L, sum of heads * dims] into [n, L, heads, dims] each."""
    parts = torch.split(x, [count * dim for count, dim in zip(heads, dims, strict=True)], dim=-1)
    return [torch.unflatten(part, -1, (count, dim)) for part, count, dim in zip(parts, heads, dims, strict=True)]


def _normed(rows: Tensor) -> Tensor:
    return rows * rows.square().sum(-1, keepdim=True).add_(_NORM_EPSILON).rsqrt_()
