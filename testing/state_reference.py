"""The float64 answer to a step of layers with states, token by token from the formulas in `StateBackend.scan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.state import GATED_DELTA, KDA, LIGHTNING, MAMBA1, MAMBA2, StateParameters, StateSpec
from headway.testing.state_cases import StateCase


@dataclass
class SequenceState:
    """What a sequence remembers, float64."""

    recurrent: Tensor | None
    """[num_heads, key_dim, value_dim]"""
    conv: Tensor | None
    """[conv_channels, conv_width - 1], the newest input last."""

    @classmethod
    def zeros(cls, spec: StateSpec) -> SequenceState:
        """Return what an empty sequence remembers."""
        return cls(
            torch.zeros(spec.num_heads, spec.key_dim, spec.value_dim, dtype=torch.float64) if spec.recurrent else None,
            torch.zeros(spec.conv_channels, spec.conv_width - 1, dtype=torch.float64) if spec.conv_channels else None,
        )

    def copy(self) -> SequenceState:
        """Return a copy."""
        return SequenceState(*(None if part is None else part.clone() for part in (self.recurrent, self.conv)))


@dataclass(frozen=True)
class StateAnswer:
    """What a step must return and leave behind."""

    out: Tensor
    """float64 [num_tokens, out_channels]; NaN in the rows of padding sequences, which nobody reads."""
    written: Mapping[int, SequenceState]
    """The states of the slots that the step writes. All others must keep their bits."""
    writers: Mapping[int, tuple[int, int]]
    """The sequence that writes each of those slots, and after how many of its new tokens."""


def answer(case: StateCase, misread: Callable[[SequenceState], SequenceState] = lambda state: state) -> StateAnswer:
    """Compute the whole step, prompts and decodes alike.

    misread: what a mistaken backend makes of the state that it reads.
    """
    spec, metadata = case.spec, case.metadata
    step = metadata.step
    out = torch.full((step.num_tokens, spec.out_channels), torch.nan, dtype=torch.float64)
    written: dict[int, SequenceState] = {}
    writers: dict[int, tuple[int, int]] = {}
    token = 0
    for row, length in enumerate(step.query_lens):
        slot = int(metadata.slots_cpu[row])
        if slot >= 0:
            state = misread(_begin(case, row))
            targets = _targets(case, row, length)
            for index in range(length):
                gates = [gate[token + index].cpu().double() for gate in case.gates]
                out[token + index] = advance(spec, case.parameters, case.x[token + index].cpu().double(), gates, state)
                for target in targets.get(index + 1, ()):
                    written[target], writers[target] = state.copy(), (row, index + 1)
        token += length
    return StateAnswer(out, written, writers)


def states_along(case: StateCase, row: int) -> Iterator[SequenceState]:
    """Yield the state of one sequence after each of its new tokens."""
    state, starts = _begin(case, row), case.metadata.step.query_start_loc_cpu
    for token in range(int(starts[row]), int(starts[row + 1])):
        gates = [gate[token].cpu().double() for gate in case.gates]
        advance(case.spec, case.parameters, case.x[token].cpu().double(), gates, state)
        yield state


def _begin(case: StateCase, row: int) -> SequenceState:
    step = case.metadata.step
    if step.kv_lens[row] == step.query_lens[row]:
        return SequenceState.zeros(case.spec)
    return state_of(case, int(case.metadata.slots_cpu[row]))


def state_of(case: StateCase, slot: int) -> SequenceState:
    """Read a slot as the step finds it."""
    spec, cache = case.spec, case.cache
    return SequenceState(
        cache.logical_recurrent[slot].cpu().double() if spec.recurrent else None,
        cache.logical_conv[slot].cpu().double() if spec.conv_channels else None,
    )


def _targets(case: StateCase, row: int, length: int) -> dict[int, list[int]]:
    """The slots that get a sequence's state, by its number of new tokens."""
    metadata = case.metadata
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


def advance(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
    """Take one token: return its output, float64 [out_channels], and move the state on in place.

    x: float64 [input_channels]; gates: float64, one row each.
    """
    if state.conv is not None:
        assert parameters.conv_weight is not None
        window = torch.cat((state.conv, x[:, None]), dim=1)
        state.conv = window[:, 1:]
        x = (window * _double(parameters.conv_weight)).sum(1)
        if parameters.conv_bias is not None:
            x = x + _double(parameters.conv_bias)
        if spec.activation == "silu":
            x = x / (1 + torch.exp(-x))
    if not spec.recurrent:
        return x
    return _RULES[spec.kind](spec, parameters, x, gates, state).flatten()


def _double(weight: Tensor | None) -> Tensor:
    assert weight is not None
    return weight.cpu().double()


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _per_head(spec: StateSpec, rows: Tensor) -> Tensor:
    """Give each state head the row of its key head; rows: [num_key_heads * key_dim]."""
    rows = rows.reshape(spec.num_key_heads, spec.key_dim)
    share = spec.num_heads // spec.num_key_heads
    return torch.stack([rows[head // share] for head in range(spec.num_heads)])


def _cut(spec: StateSpec, x: Tensor, *, value_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The value [heads, value_dim] and the two of key_dim, in their order in x, [heads, key_dim]."""
    keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
    value = x[:values] if value_first else x[2 * keys :]
    first = values if value_first else 0
    one, two = (_per_head(spec, x[first + i * keys : first + (i + 1) * keys]) for i in range(2))
    return value.reshape(spec.num_heads, spec.value_dim), one, two


def _delta(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
    v, q, k = _cut(spec, x, value_first=False)
    if spec.qk_norm:
        q, k = (each / torch.sqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    q = q * spec.scale
    a, b = gates
    rate = torch.exp(_double(parameters.A_log))
    rate = rate[:, None] if spec.kind == KDA else rate
    decay = torch.exp(-rate * _softplus(a + _double(parameters.dt_bias)))
    beta = spec.beta_scale / (1 + torch.exp(-b))
    outputs = []
    assert state.recurrent is not None
    for head in range(spec.num_heads):
        old = state.recurrent[head] * (decay[head][:, None] if spec.kind == KDA else decay[head])
        change = beta[head] * (v[head] - old.T @ k[head])
        new = old + torch.outer(k[head], change)
        state.recurrent[head] = new
        outputs.append(new.T @ q[head])
    return torch.stack(outputs)


def _mamba2(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
    value, B, C = _cut(spec, x, value_first=True)
    low, high = spec.dt_limits
    dt = _softplus(gates[0] + _double(parameters.dt_bias)).clamp(low, high if math.isfinite(high) else None)
    decay = torch.exp(-torch.exp(_double(parameters.A_log)) * dt)
    assert state.recurrent is not None
    state.recurrent = decay[:, None, None] * state.recurrent + B[:, :, None] * (dt[:, None] * value)[:, None, :]
    return (state.recurrent * C[:, :, None]).sum(1) + _double(parameters.D)[:, None] * value


def _mamba1(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
    dt, B, C = gates
    dt = _softplus(dt + _double(parameters.dt_bias))
    assert state.recurrent is not None
    decay = torch.exp(-torch.exp(_double(parameters.A_log)) * dt[:, None])
    new = decay * state.recurrent[:, :, 0] + (dt * x)[:, None] * B
    state.recurrent = new[:, :, None]
    return new @ C + _double(parameters.D) * x


def _lightning(spec: StateSpec, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
    v, q, k = _cut(spec, x, value_first=False)
    if spec.qk_norm:
        q, k = (each / torch.sqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    decay = torch.exp(-torch.exp(_double(parameters.A_log)))
    assert state.recurrent is not None
    state.recurrent = decay[:, None, None] * state.recurrent + k[:, :, None] * v[:, None, :]
    return spec.scale * (state.recurrent * q[:, :, None]).sum(1)


_Rule = Callable[[StateSpec, StateParameters, Tensor, Sequence[Tensor], SequenceState], Tensor]
_RULES: Mapping[str, _Rule] = {
    GATED_DELTA: _delta,
    KDA: _delta,
    MAMBA2: _mamba2,
    MAMBA1: _mamba1,
    LIGHTNING: _lightning,
}
