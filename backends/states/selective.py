"""Mamba's first recurrence, whose decay differs for each channel and each element of its state: no product of matrices has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from headway.core.contract.state import StateParameters


@dataclass(frozen=True, slots=True)
class SelectiveOperands:
    """S = exp(dt A) S + dt x B, out = S . C + D x for each of H channels with a state of K elements; all float32."""

    x: Tensor
    """[n, L, H]"""
    dt: Tensor
    """[n, L, H]"""
    B: Tensor
    """[n, L, K]"""
    C: Tensor
    """[n, L, K]"""
    A: Tensor
    """[H, K], below 0."""
    D: Tensor
    """[H]"""


def selective_operands(
    parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], valid: Tensor | None
) -> SelectiveOperands:
    """Read the input x, float32 [n, L, H], and the gates dt, B and C of `mamba1`; valid: see `operands`."""
    assert parameters.A_log is not None
    assert parameters.dt_bias is not None
    assert parameters.D is not None
    dt = softplus(gates[0].float() + parameters.dt_bias.float())
    if valid is not None:
        dt = dt * valid[..., None]
    return SelectiveOperands(x, dt, gates[1].float(), gates[2].float(), -parameters.A_log.float().exp(), parameters.D.float())


def scan_selective(
    chunk: int, inputs: SelectiveOperands, state: Tensor, after: Callable[[int, Tensor], None]
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over J chunks of L / J tokens, all chunks at once, and return the output [n, L, H] and the last state.

    Each chunk runs from a state of zeros; what the state before it adds is linear in that state, and is added once it is known.
    A single chunk begins with its state. state: [n, H, K]; after(j, state): see `scan_chunks`.
    """
    x, dt, B, C = (torch.unflatten(part, 1, (-1, chunk)) for part in (inputs.x, inputs.dt, inputs.B, inputs.C))
    chunks = x.shape[1]
    driven = dt * x
    own = state[:, None].clone() if chunks == 1 else state.new_zeros(state.shape[0], chunks, *state.shape[1:])  # [n, J, H, K]
    out = inputs.D * x  # [n, J, C, H]
    for token in range(chunk):
        own.mul_((dt[:, :, token, :, None] * inputs.A).exp_())
        own.addcmul_(driven[:, :, token, :, None], B[:, :, token, None, :])
        out[:, :, token] += (own @ C[:, :, token, :, None]).squeeze(-1)
    if chunks == 1:
        after(0, own[:, 0])
        return out.flatten(1, 2), own[:, 0]
    elapsed = dt.cumsum(2)  # [n, J, C, H]
    before = torch.empty_like(own)
    for j in range(chunks):
        before[:, j] = state
        state = torch.addcmul(own[:, j], (elapsed[:, j, -1, :, None] * inputs.A).exp_(), state)
        after(j, state)
    for token in range(chunk):
        kept = (elapsed[:, :, token, :, None] * inputs.A).exp_().mul_(before)
        out[:, :, token] += (kept @ C[:, :, token, :, None]).squeeze(-1)
    return out.flatten(1, 2), state


def step_selective(inputs: SelectiveOperands, state: Tensor, after: Callable[[int, Tensor], None]) -> Tensor:
    """Run token by token and return the output [n, L, H]; state: [n, H, K], overwritten; after: see `step_tokens`."""
    driven = inputs.dt * inputs.x
    out = inputs.D * inputs.x
    for token in range(out.shape[1]):
        state.mul_((inputs.dt[:, token, :, None] * inputs.A).exp_())
        state.addcmul_(driven[:, token, :, None], inputs.B[:, token, None, :])
        out[:, token] += (state @ inputs.C[:, token, :, None]).squeeze(-1)
        after(token, state)
    return out
