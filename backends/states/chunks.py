"""Chunked recurrences (linear attention, SSM): matrix multiplications within a chunk, and one state update per chunk.

Let G_i be the sum of log decays up to token i of a chunk. The state after token i is

    S_i = exp(G_i) S_0 + sum over j <= i of exp(G_i - G_j) k_j d_j^T,

so a chunk's output and final state are computed from [C, C] matrices of decayed scores, multiplied by d. If d depends on the
state (the delta rule), d = u - w S_0, with u and w from one solve of a unit triangular matrix (WY form, Yang et al. 2024, arXiv
2406.06484). Otherwise d = v (state space duality, Dao and Gu 2024, arXiv 2405.21060). Decays are computed only as exponentials of
non-positive differences, so they cannot overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from headway.core.contract.state import GATED_DELTA, KDA, LIGHTNING, MAMBA2, StateParameters, StateSpec

_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of a recurrence for n sequences of L tokens: S = exp(g) S + k d^T, out = S^T q + skip. d is v, or beta (v - S^T k)
    with the delta rule.

    All tensors are float32.
    """

    q: Tensor
    """[n, L, key heads, K]: scaled queries."""
    k: Tensor
    """[n, L, key heads, K]: keys."""
    v: Tensor
    """[n, L, heads, V]: values."""
    g: Tensor
    """[n, L, heads], or [n, L, heads, K] if each key channel has its own decay: logarithms of the decays, at most 0."""
    beta: Tensor | None = None
    """[n, L, heads]: factors of the delta rule. None if the recurrence does not use the delta rule."""
    skip: Tensor | None = None
    """[n, L, heads, V]: tensor to add to the output. None means zeros."""


def operands(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], valid: Tensor | None) -> Operands:
    """Return the operands for layers of any kind except `mamba1` and `conv`.

    x: float32 [n, L, channels of the recurrence]; gates: [n, L, ...].
    valid: bool [n, L]: False for padding rows, which must not change the state. None means that all rows are valid.
    """
    if spec.kind == MAMBA2:
        return _mamba2(spec, parameters, x, gates, valid)
    both, v = _parts(x, (2 * spec.num_key_heads, spec.num_heads), (spec.key_dim, spec.value_dim))
    q, k = torch.split(_normed(both) if spec.qk_norm else both, spec.num_key_heads, dim=2)
    q = q if spec.scale == 1.0 else q * spec.scale
    assert parameters.decay_rate is not None
    if spec.kind == LIGHTNING:
        g = parameters.decay_rate.expand((*x.shape[:2], spec.num_heads))
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
    """Split channels [n, L, sum of heads * dims] into tensors [n, L, heads, dims]."""
    parts = torch.split(x, [count * dim for count, dim in zip(heads, dims, strict=True)], dim=-1)
    return [torch.unflatten(part, -1, (count, dim)) for part, count, dim in zip(parts, heads, dims, strict=True)]


def _normed(rows: Tensor) -> Tensor:
    return rows * rows.square().sum(-1, keepdim=True).add_(_NORM_EPSILON).rsqrt_()


@dataclass(frozen=True, slots=True)
class SelectiveOperands:
    """Operands of `mamba1`: S = exp(dt A) S + dt x B, out = S . C + D x, for H channels with states of K elements, in float32."""

    x: Tensor
    """[n, L, H]: inputs."""
    dt: Tensor
    """[n, L, H]: time steps."""
    B: Tensor
    """[n, L, K]: input matrix."""
    C: Tensor
    """[n, L, K]: output matrix."""
    A: Tensor
    """[K, H]: decay rates, all negative."""
    D: Tensor
    """[H]: factors by which inputs are multiplied before they are added to the output."""


def selective_operands(
    parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], valid: Tensor | None
) -> SelectiveOperands:
    """Return the operands of `mamba1`. x: float32 [n, L, H]. gates: (dt, B, C). valid: as in `operands`."""
    assert parameters.decay_rate is not None
    assert parameters.dt_bias is not None
    assert parameters.D is not None
    dt = softplus(gates[0].float() + parameters.dt_bias.float())
    if valid is not None:
        dt = dt * valid[..., None]
    return SelectiveOperands(
        x, dt, gates[1].float(), gates[2].float(), parameters.decay_rate.T.contiguous(), parameters.D.float()
    )


def scan_selective(
    chunk: int, inputs: SelectiveOperands, state: Tensor, after: Callable[[int, Tensor], None]
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over J chunks of L / J tokens in parallel. Return the output [n, L, H] and the final state.

    Each chunk starts from a zero state. The output is linear in the preceding state, so that state's contribution is added when
    the state is known. A single chunk starts from `state`, [n, K, H]. after: called as after(j, state), as in `scan_chunks`.
    """
    x, dt, B, C = (torch.unflatten(part, 1, (-1, chunk)) for part in (inputs.x, inputs.dt, inputs.B, inputs.C))
    chunks = x.shape[1]
    own = state[:, None].clone() if chunks == 1 else state.new_zeros((state.shape[0], chunks, *state.shape[1:]))  # [n, J, K, H]
    out = _run(replace(inputs, x=x, dt=dt, B=B, C=C), own, lambda token: None)
    if chunks == 1:
        after(0, own[:, 0])
        return out.flatten(1, 2), own[:, 0]
    elapsed = dt.cumsum(2)  # [n, J, C, H]
    before = torch.empty_like(own)
    for j in range(chunks):
        before[:, j] = state
        state = torch.addcmul(own[:, j], (elapsed[:, j, -1, None] * inputs.A).exp_(), state)
        after(j, state)
    kept = torch.empty_like(own)
    for token in range(chunk):
        torch.mul(elapsed[:, :, token, None], inputs.A, out=kept).exp_().mul_(before)
        out[:, :, token] += (C[:, :, token, None] @ kept).squeeze(-2)
    return out.flatten(1, 2), state


def step_selective(inputs: SelectiveOperands, state: Tensor, after: Callable[[int, Tensor], None]) -> Tensor:
    """Run the recurrence token by token. Returns the output [n, L, H]. state: [n, K, H], overwritten. after: see step_tokens."""
    return _run(inputs, state, lambda token: after(token, state))


def _run(inputs: SelectiveOperands, state: Tensor, after: Callable[[int], None]) -> Tensor:
    """Update the state [..., K, H] token by token, with inputs [..., L, H or K]. Returns the output [..., L, H]."""
    driven = inputs.dt * inputs.x
    out = inputs.D * inputs.x
    decay = torch.empty_like(state)
    for token in range(out.shape[-2]):
        torch.mul(inputs.dt[..., token, None, :], inputs.A, out=decay).exp_()
        state.mul_(decay).addcmul_(inputs.B[..., token, :, None], driven[..., token, None, :])
        out[..., token, :] += (inputs.C[..., token, None, :] @ state).squeeze(-2)
        after(token)
    return out


class _Scores(NamedTuple):
    """Decayed scores of a chunk's tokens and decays of the state, for n sequences, H heads and J chunks of C tokens."""

    queries: Tensor  # [n, H, J, C, C]: q_i . k_j with the decay from j to i; 0 for j > i
    keys: Tensor | None  # [n, H, J, C, C]: k_i . k_j with decay; valid below the diagonal; None without the delta rule
    from_start: Tensor  # [n, H, J, C, 1 or K]: decays from the chunk's start through each token
    to_end: Tensor  # [n, H, J, C, 1 or K]: decays after each token to the chunk's end
    whole: Tensor  # [n, H, J, 1 or K, 1]: decay over the chunk


def scan_chunks(chunk: int, inputs: Operands, state: Tensor, after: Callable[[int, Tensor], None]) -> tuple[Tensor, Tensor]:
    """Run the recurrence. Return the output [n, L, H, V] and the final state, which is a new tensor. Both are float32.

    chunk: number of tokens per chunk, a power of two that divides L.
    state: [n, H, K, V]: initial states.
    after: called as after(j, state) with the state after chunk j. The function must not store the tensor.
    """
    heads = inputs.v.shape[2]
    # With one decay per head, the heads of a key head share their scores; with one per key channel they do not.
    widened = heads if inputs.g.dim() == 4 else inputs.k.shape[2]
    q, k = (_in_chunks(widen(part, widened), chunk) for part in (inputs.q, inputs.k))
    v, g = _in_chunks(inputs.v, chunk), _in_chunks(inputs.g if inputs.g.dim() == 4 else inputs.g[..., None], chunk)
    delta = inputs.beta is not None
    scores = _scores_by_channel(q, k, g, delta) if inputs.g.dim() == 4 else _scores_by_head(q, k, g, delta)
    q, k = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (q, k))
    reads, values = q * scores.from_start, v
    corrections = None
    if inputs.beta is not None:
        assert scores.keys is not None
        beta = _in_chunks(inputs.beta[..., None], chunk)
        both = torch.cat((v * beta, k * scores.from_start * beta), dim=-1)
        # The solver assumes a unit diagonal and does not read above it.
        solved = torch.linalg.solve_triangular(scores.keys * beta, both, upper=False, unitriangular=True)
        values, corrections = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    writes = (k * scores.to_end).transpose(-1, -2)
    out, last = _over_chunks(scores, reads, writes, values, corrections, state, after)
    out = out.permute(0, 2, 3, 1, 4).flatten(1, 2)
    return (out if inputs.skip is None else out + inputs.skip), last


def _over_chunks(
    scores: _Scores,
    reads: Tensor,
    writes: Tensor,
    values: Tensor,
    corrections: Tensor | None,
    state: Tensor,
    after: Callable[[int, Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Propagate the state from chunk to chunk. Returns the output [n, H, J, C, V] and the final state."""
    shape, chunks = values.shape, values.shape[2]
    state = state.flatten(0, 1)
    out = torch.empty_like(values).flatten(0, 1)
    queries, whole, reads, writes, values = (part.flatten(0, 1) for part in (scores.queries, scores.whole, reads, writes, values))
    corrections = None if corrections is None else corrections.flatten(0, 1)
    for j in range(chunks):
        added = values[:, j] if corrections is None else torch.baddbmm(values[:, j], corrections[:, j], state, alpha=-1)
        out[:, j] = torch.baddbmm(torch.bmm(reads[:, j], state), queries[:, j], added)
        state = torch.baddbmm(state * whole[:, j], writes[:, j], added)
        after(j, state.view(*shape[:2], *state.shape[1:]))
    return out.view(shape), state.view(*shape[:2], *state.shape[1:])


def _in_chunks(rows: Tensor, chunk: int) -> Tensor:
    """Return [n, L, heads, dim] as [n, heads, J, C, dim]."""
    return torch.unflatten(rows, 1, (-1, chunk)).permute(0, 3, 1, 2, 4).contiguous()


def widen(rows: Tensor, heads: int) -> Tensor:
    """Return key heads [..., key heads, dim], repeated to [..., heads, dim]."""
    if rows.shape[-2] == heads:
        return rows
    return rows[..., None, :].expand((*rows.shape[:-1], heads // rows.shape[-2], rows.shape[-1])).flatten(-3, -2)


def _scores_by_head(q: Tensor, k: Tensor, g: Tensor, delta: bool) -> _Scores:
    """Return the scores for one decay per head. q, k: [n, key heads, J, C, K]; g: [n, H, J, C, 1]."""
    sums = g.double().squeeze(-1).cumsum(-1)  # double: differences of large sums must be exact to float32's last bit
    below = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=g.device).tril()
    between = (sums[..., :, None] - sums[..., None, :]).float().masked_fill_(~below, -torch.inf).exp_()
    groups = torch.unflatten(between, 1, (q.shape[1], -1))  # [n, key heads, heads of each, J, C, C]
    keys = k.transpose(-1, -2)
    return _Scores(
        ((q @ keys)[:, :, None] * groups).flatten(1, 2),
        ((k @ keys)[:, :, None] * groups).flatten(1, 2) if delta else None,
        sums.float().exp_()[..., None],
        (sums[..., -1:] - sums).float().exp_()[..., None],
        sums[..., -1:].float().exp_()[..., None],
    )


def _scores_by_channel(q: Tensor, k: Tensor, g: Tensor, delta: bool) -> _Scores:
    """Return the scores for recurrences with one decay per key channel. q, k and g are [n, H, J, C, K].

    exp(G_i - G_j) = exp(G_i - R) exp(R - G_j) for any R. If R is between G_i and G_j, both factors are at most 1. Pairs of tokens
    are therefore grouped by blocks of 2, 4, ..., C tokens, with i in the second half of the block, j in the first half, and R at
    the block's middle.
    """
    n, heads, chunks, chunk = k.shape[:4]
    scores = k.new_zeros(n, heads, chunks, 2 if delta else 1, chunk, chunk)
    rows = torch.stack((q, k), dim=3) if delta else q[:, :, :, None]  # [n, H, J, 2 or 1, C, K]
    scores[:, :, :, 0].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    half = 1
    while half < chunk:
        halves = (chunk // (2 * half), 2, half)
        earlier, later = torch.unflatten(g, 3, halves).unbind(4)  # [n, H, J, blocks, half, K]
        through = later.cumsum(-2).exp_()
        upper = torch.unflatten(rows, 4, halves)[..., 1, :, :] * through[:, :, :, None]
        lower = torch.unflatten(k, 3, halves)[..., 0, :, :] * _sums_after(earlier).exp_()
        products = upper @ lower[:, :, :, None].transpose(-1, -2)  # [n, H, J, 2 or 1, blocks, half, half]
        blocks = torch.unflatten(torch.unflatten(scores, -1, halves), -4, halves)  # [..., blocks, 2, half, blocks, 2, half]
        blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).copy_(products.movedim(-3, -1))
        half *= 2
    sums = g.cumsum(-2)
    return _Scores(
        scores[:, :, :, 0], scores[:, :, :, 1] if delta else None, sums.exp(), _sums_after(g).exp_(), sums[..., -1, :, None].exp()
    )


def _sums_after(g: Tensor) -> Tensor:
    """Return the sums over the tokens after each token, along the second-to-last axis."""
    after = torch.zeros_like(g)
    after[..., :-1, :] = g[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return after


def step_tokens(inputs: Operands, state: Tensor, after: Callable[[int, Tensor], None]) -> Tensor:
    """Run the recurrence token by token. Return the output, float32 [n, L, H, V].

    state: float32 [n, H, K, V], overwritten.
    after: called as after(i, state) with the state after token i. The function must not store the tensor.
    """
    heads, v, beta = inputs.v.shape[2], inputs.v, inputs.beta
    q, k = widen(inputs.q, heads), widen(inputs.k, heads)
    decays = inputs.g.exp()[..., None] if inputs.g.dim() == 4 else inputs.g.exp()[..., None, None]  # [n, L, H, 1 or K, 1]
    rows = []
    for i in range(v.shape[1]):
        state.mul_(decays[:, i])
        added = v[:, i, :, None]  # [n, H, 1, V]
        if beta is not None:
            added = (added - k[:, i, :, None] @ state) * beta[:, i, :, None, None]
        state.addcmul_(k[:, i, :, :, None], added)
        rows.append(q[:, i, :, None] @ state)
        after(i, state)
    out = torch.cat(rows, dim=2).transpose(1, 2) if len(rows) > 1 else rows[0].transpose(1, 2)
    return out if inputs.skip is None else out + inputs.skip
