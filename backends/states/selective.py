"""Mamba's first recurrence, whose decay differs for each channel and each element of its state: no product of matrices has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from headway.core.contract.state import StateParameters


@dataclass(frozen=True, slots=True)
class SelectiveOperands:
    """S = exp(dt A) S + dt x B, out = S . C + D x for each of H channels with a state of K elements; all float32.

    The channels come last wherever there are any, since there are many.
    """

    x: Tensor
    """[n, L, H]"""
    dt: Tensor
    """[n, L, H]"""
    B: Tensor
    """[n, L, K]"""
    C: Tensor
    """[n, L, K]"""
    A: Tensor
    """[K, H], below 0."""
    D: Tensor
    """[H]"""


def selective_operands(
    parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], valid: Tensor | None
) -> SelectiveOperands:
    """Read the input x, float32 [n, L, H], and the gates dt, B and C of `mamba1`; valid: see `operands`."""
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
    """Run the recurrence over J chunks of L / J tokens, all chunks at once, and return the output [n, L, H] and the last state.

    Each chunk runs from a state of zeros; what the state before it adds is linear in that state, and is added once it is known.
    A single chunk begins with its state. state: [n, K, H]; after(j, state): see `scan_chunks`.
    """
    x, dt, B, C = (torch.unflatten(part, 1, (-1, chunk)) for part in (inputs.x, inputs.dt, inputs.B, inputs.C))
    chunks = x.shape[1]
    own = state[:, None].clone() if chunks == 1 else state.new_zeros(state.shape[0], chunks, *state.shape[1:])  # [n, J, K, H]
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
    """Run token by token and return the output [n, L, H]; state: [n, K, H], overwritten; after: see `step_tokens`."""
    return _run(inputs, state, lambda token: after(token, state))


def _run(inputs: SelectiveOperands, state: Tensor, after: Callable[[int], None]) -> Tensor:
    """Move the state [..., K, H] on token by token, inputs being [..., L, H or K]; returns the output [..., L, H]."""
    driven = inputs.dt * inputs.x
    out = inputs.D * inputs.x
    decay = torch.empty_like(state)
    for token in range(out.shape[-2]):
        torch.mul(inputs.dt[..., token, None, :], inputs.A, out=decay).exp_()
        state.mul_(decay).addcmul_(inputs.B[..., token, :, None], driven[..., token, None, :])
        out[..., token, :] += (inputs.C[..., token, None, :] @ state).squeeze(-2)
        after(token)
    return out
