"""float64 reference for a step of layers with states, computed token by token from the formulas in `StateBackend.scan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.core.contract.state import KDA, LIGHTNING, MAMBA1, MAMBA2, StateParameters, StateSpec
from headway.core.oracle.state_cases import StateCase


@dataclass
class SequenceState:
    """State of a sequence in float64, or of several sequences along the first axis."""

    recurrent: Tensor | None
    """[..., num_heads, key_dim, value_dim]: recurrent state. None if the layer has no recurrence."""
    conv: Tensor | None
    """[..., conv_channels, conv_width - 1]: inputs of the convolution, newest last. None if the layer has no convolution."""

    @classmethod
    def zeros(cls, spec: StateSpec) -> SequenceState:
        """Return the state of an empty sequence."""
        return cls(
            torch.zeros(spec.num_heads, spec.key_dim, spec.value_dim, dtype=torch.float64) if spec.recurrent else None,
            torch.zeros(spec.conv_channels, spec.conv_width - 1, dtype=torch.float64) if spec.conv_channels else None,
        )

    def changed(self, change: Callable[[Tensor], Tensor]) -> SequenceState:
        """Return the state with `change` applied to each part."""
        return SequenceState(*(None if part is None else change(part) for part in (self.recurrent, self.conv)))

    def copy(self) -> SequenceState:
        """Return a copy of the state."""
        return self.changed(torch.clone)


@dataclass(frozen=True)
class TokenOperands:
    """Operands with which one token updates the state of each head, in float64; axes of sequences come first."""

    decay: Tensor
    """[..., num_heads, key_dim or 1]: factor by which the state is multiplied before the token is added."""
    key: Tensor
    """[..., num_heads, key_dim]: key of the token in each head."""
    value: Tensor
    """[..., num_heads, value_dim]: value of the token in each head."""
    query: Tensor
    """[..., num_heads, key_dim]: scaled query of the token in each head."""
    beta: Tensor | None = None
    """[..., num_heads]: fraction by which a value replaces the value stored for its key. None means that values are added."""
    skip: Tensor | None = None
    """[..., num_heads, value_dim]: term added to the output. None means no such term."""


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), without overflow."""
    return torch.logaddexp(x, torch.zeros_like(x))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))


Curve = Callable[[Tensor], Tensor]


def read(
    spec: StateSpec,
    parameters: StateParameters,
    x: Tensor,
    gates: Sequence[Tensor],
    positive: Curve = softplus,
    strength: Curve = sigmoid,
) -> TokenOperands:
    """Return a token's operands, computed from its gates and from x, its input after the convolution.

    positive: activation function for the gate of the decay. strength: activation function for the gate of beta.
    """
    if spec.kind == MAMBA1:
        return _read_mamba1(parameters, x, gates, positive)
    if spec.kind == MAMBA2:
        return _read_mamba2(spec, parameters, x, gates, positive)
    value, query, key = _split(spec, x, value_first=False)
    if spec.qk_norm:
        query, key = (each / torch.sqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    query = query * spec.scale
    rate = torch.exp(_double(parameters.A_log))
    if spec.kind == LIGHTNING:
        return TokenOperands(torch.exp(-rate)[:, None], key, value, query)
    a, b = gates
    a, rate = (a, rate[:, None]) if spec.kind == KDA else (a[..., None], rate[:, None])
    bias = _double(parameters.dt_bias)
    decay = torch.exp(-rate * positive(a + (bias if spec.kind == KDA else bias[:, None])))
    return TokenOperands(decay, key, value, query, spec.beta_scale * strength(b))


def _read_mamba2(
    spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], positive: Curve
) -> TokenOperands:
    value, key, query = _split(spec, x, value_first=True)
    low, high = spec.dt_limits
    dt = positive(gates[0] + _double(parameters.dt_bias)).clamp(low, high if math.isfinite(high) else None)[..., None]
    decay = torch.exp(-torch.exp(_double(parameters.A_log))[:, None] * dt)
    return TokenOperands(decay, key, dt * value, query, skip=_double(parameters.D)[:, None] * value)


def _read_mamba1(parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], positive: Curve) -> TokenOperands:
    dt, key, query = gates
    dt = positive(dt + _double(parameters.dt_bias))[..., None]
    decay = torch.exp(-torch.exp(_double(parameters.A_log)) * dt)
    key, query = (rows[..., None, :].expand((*decay.shape[:-1], -1)) for rows in (key, query))
    return TokenOperands(decay, key, dt * x[..., None], query, skip=(_double(parameters.D) * x)[..., None])


def update(operands: TokenOperands, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a token, [..., num_heads, value_dim], and the state after the token."""
    state = operands.decay[..., None] * state
    added = operands.value
    if operands.beta is not None:
        added = operands.beta[..., None] * (added - seen(state, operands.key))
    state = state + operands.key[..., None] * added[..., None, :]
    out = seen(state, operands.query)
    return (out if operands.skip is None else out + operands.skip), state


def seen(state: Tensor, by: Tensor) -> Tensor:
    """Return the value that each head's state stores for a key or query: S^T k, where S is the state and k the key or query."""
    return (state * by[..., None]).sum(-2)


def convolve(spec: StateSpec, parameters: StateParameters, x: Tensor, remembered: Tensor) -> tuple[Tensor, Tensor]:
    """Return the convolution's output for a token's input, and the inputs to remember for the next token."""
    window = torch.cat((remembered, x[..., None]), dim=-1)
    return activate(spec, parameters, (window * _double(parameters.conv_weight)).sum(-1)), window[..., 1:]


def activate(spec: StateSpec, parameters: StateParameters, x: Tensor) -> Tensor:
    """Return a convolution's sum after adding the bias and applying the activation function."""
    if parameters.conv_bias is not None:
        x = x + _double(parameters.conv_bias)
    return x * sigmoid(x) if spec.activation == "silu" else x


@dataclass(frozen=True)
class Rules:
    """Functions of the reference. Each function can be replaced to model a mistake of a kernel."""

    begin: Callable[[StateCase, int], SequenceState] = field(default=lambda case, row: begin(case, row))
    """Function that returns a sequence's state before the step."""
    before: Callable[[int, SequenceState], SequenceState] = field(default=lambda token, state: state)
    """Function that returns the state that a new token sees, given the token's index and the state left by the previous token."""
    convolve: Callable[[StateSpec, StateParameters, Tensor, Tensor], tuple[Tensor, Tensor]] = convolve
    read: Callable[[StateSpec, StateParameters, Tensor, Sequence[Tensor]], TokenOperands] = read
    update: Callable[[TokenOperands, Tensor], tuple[Tensor, Tensor]] = update


RIGHT = Rules()


def advance(
    spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState, rules: Rules = RIGHT
) -> Tensor:
    """Return the output of one token, or of one token for each of several sequences, float64 [..., out_channels]. Updates `state`
    in place.

    x: float64 [..., input_channels]; gates: float64, one row per gate.
    """
    if state.conv is not None:
        x, conv = rules.convolve(spec, parameters, x, state.conv)
        state.conv = conv
    if not spec.recurrent:
        return x
    assert state.recurrent is not None
    out, recurrent = rules.update(rules.read(spec, parameters, x, gates), state.recurrent)
    state.recurrent = recurrent
    return out.flatten(-2)


@dataclass(frozen=True)
class StateAnswer:
    """Expected output of a step, and expected states after it."""

    out: Tensor
    """float64 [num_tokens, out_channels]; NaN in the rows of padding sequences, which are not compared."""
    written: Mapping[int, SequenceState]
    """Slot that the step writes -> expected state. All other slots must stay bitwise the same."""
    writers: Mapping[int, tuple[int, int]]
    """Slot -> (index of the sequence that writes it, number of the sequence's new tokens before the write)."""


def answer(case: StateCase, rules: Rules = RIGHT, rows: Sequence[int] | None = None) -> StateAnswer:
    """Return the expected results of the whole step, prompts and decodes. rows: indices of the sequences to compute, or None for
    all.

    Sequences advance together, token by token. They are sorted by length, longest first, so the sequences with remaining tokens
    are always the first ones.
    """
    spec, step, slots = case.spec, case.metadata.step, case.metadata.slots_cpu.tolist()
    out = torch.full((step.num_tokens, spec.out_channels), torch.nan, dtype=torch.float64)
    written: dict[int, SequenceState] = {}
    writers: dict[int, tuple[int, int]] = {}
    lens, starts = step.query_lens, step.query_start_loc_cpu.tolist()
    wanted = [row for row in (range(len(lens)) if rows is None else rows) if slots[row] >= 0]
    order = sorted(wanted, key=lambda row: -lens[row])
    if not order:
        return StateAnswer(out, written, writers)
    begun = [rules.begin(case, row) for row in order]
    joined = [[getattr(each, part) for each in begun] for part in ("recurrent", "conv")]
    state = SequenceState(*(None if parts[0] is None else torch.stack(parts) for parts in joined))
    targets = [targets_of(case, row) for row in order]
    x, gates = case.x.cpu().double(), [gate.cpu().double() for gate in case.gates]
    for token in range(lens[order[0]]):
        left = sum(lens[row] > token for row in order)
        state = rules.before(token, state.changed(lambda part, left=left: part[:left]))  # type: ignore[misc]
        at = torch.tensor([starts[row] + token for row in order[:left]])
        out[at] = advance(spec, case.parameters, x[at], [gate[at] for gate in gates], state, rules)
        for place, row in enumerate(order[:left]):
            for slot in targets[place].get(token + 1, ()):
                written[slot] = state.changed(lambda part, place=place: part[place].clone())  # type: ignore[misc]
                writers[slot] = row, token + 1
    return StateAnswer(out, written, writers)


def begin(case: StateCase, row: int) -> SequenceState:
    """Return the initial state of a sequence, which is zero for a sequence without a context."""
    step = case.metadata.step
    if step.kv_lens[row] == step.query_lens[row]:
        return SequenceState.zeros(case.spec)
    return state_of(case, int(case.metadata.slots_cpu[row]))


def state_of(case: StateCase, slot: int) -> SequenceState:
    """Return a slot's state before the step."""
    spec, cache = case.spec, case.cache
    return SequenceState(
        cache.logical_recurrent[slot].cpu().double() if spec.recurrent else None,
        cache.logical_conv[slot].cpu().double() if spec.conv_channels else None,
    )


def targets_of(case: StateCase, row: int) -> dict[int, list[int]]:
    """Return a map from number of new tokens of a sequence to the slots that receive the sequence's state after these tokens."""
    metadata, length = case.metadata, case.metadata.step.query_lens[row]
    slots = [int(slot) for slot in metadata.out_slots_cpu[row]]
    decodes = row >= metadata.step.num_prefills
    pairs = list(enumerate(slots[:length], start=1)) if decodes else [(length, slots[0])]
    if metadata.checkpoints_cpu is not None:
        pairs += [(tokens, slot) for sequence, tokens, slot in metadata.checkpoints_cpu.tolist() if sequence == row]
    found: dict[int, list[int]] = {}
    for tokens, slot in pairs:
        if slot >= 0:
            found.setdefault(tokens, []).append(slot)
    return found


def _double(weight: Tensor | None) -> Tensor:
    assert weight is not None
    return weight.cpu().double()


def _split(spec: StateSpec, x: Tensor, *, value_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return value [..., heads, value_dim] and the two tensors of size key_dim, each [..., heads, key_dim], in their order in x.
    value_first: True if the value comes first in x."""
    keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
    parts = torch.split(x, [values, keys, keys] if value_first else [keys, keys, values], dim=-1)
    value, one, two = parts if value_first else (parts[2], *parts[:2])
    of_head = torch.arange(spec.num_heads) // (spec.num_heads // spec.num_key_heads)
    first, second = (torch.unflatten(part, -1, (spec.num_key_heads, spec.key_dim))[..., of_head, :] for part in (one, two))
    return torch.unflatten(value, -1, (spec.num_heads, spec.value_dim)), first, second
