"""Steps of layers with states, with random numbers, and their float64 answers token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.backend import Lengths
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.state import (
    GATED_DELTA,
    KDA,
    LIGHTNING,
    MAMBA1,
    MAMBA2,
    StateCache,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
)
from headway.core.contract.state_backend import StateBackend


class Kept(NamedTuple):
    """The state of a slot, float64: [num_heads, key_dim, value_dim], and [conv_channels, conv_width - 1]."""

    recurrent: Tensor
    conv: Tensor


@dataclass(frozen=True)
class SlotCase:
    """One step over a pool of states in which every number is random."""

    spec: StateSpec
    parameters: StateParameters
    cache: StateCache
    metadata: StateMetadata
    x: Tensor
    gates: tuple[Tensor, ...]

    def run(self, backend: StateBackend) -> Tensor:
        """Return what a backend makes of the step; poisoned first, so that what is not written shows."""
        out = torch.full((self.x.shape[0], self.spec.out_channels), torch.nan, dtype=self.spec.dtype, device=self.x.device)
        split = self.metadata.step.num_prefill_tokens
        for view, rows in ((self.metadata.prefill, slice(0, split)), (self.metadata.decode, slice(split, None))):
            if view is not None:
                call = backend.step if view.step.num_decodes else backend.scan
                gates = [gate[rows] for gate in self.gates]
                call(self.x[rows], gates, self.parameters, self.cache, backend.plan(view), out[rows])
        return out

    def answer(self) -> tuple[Tensor, Mapping[int, Kept]]:
        """Return the output and what each written slot must hold, float64. Rows of padding sequences are NaN."""
        step, out = self.metadata.step, torch.full((self.x.shape[0], self.spec.out_channels), torch.nan, dtype=torch.float64)
        out, written, token = out.to(self.x.device), {}, 0
        for row, (length, end) in enumerate(zip(step.query_lens, step.kv_lens, strict=True)):
            slot = int(self.metadata.slots_cpu[row])
            rows = slice(token, token + length)
            token += length
            if slot < 0:
                continue
            wanted = self._targets(row, length)
            kept = self.kept(slot)
            if end == length:
                kept = Kept(torch.zeros_like(kept.recurrent), torch.zeros_like(kept.conv))
            out[rows], after = _run(self, rows, kept, set(wanted))
            written |= {target: after[tokens] for tokens, targets in wanted.items() for target in targets}
        return out, written

    def kept(self, slot: int) -> Kept:
        """Return what a slot holds now."""
        empty = self.x.new_zeros(1, 0, 0, dtype=torch.float64)
        recurrent = self.cache.logical_recurrent[slot].double() if self.spec.recurrent else empty
        return Kept(recurrent, self.cache.logical_conv[slot].double() if self.spec.conv_channels else empty[0])

    def _targets(self, row: int, length: int) -> dict[int, list[int]]:
        """Slots to write, by the new tokens after which."""
        slots = [int(slot) for slot in self.metadata.out_slots_cpu[row]]
        decodes = row >= self.metadata.step.num_prefills
        pairs = list(enumerate(slots[:length], 1)) if decodes else [(length, slots[0])]
        checkpoints = self.metadata.checkpoints_cpu
        pairs += [(n, slot) for seq, n, slot in ([] if checkpoints is None else checkpoints.tolist()) if seq == row]
        found: dict[int, list[int]] = {}
        for tokens, slot in pairs:
            if slot >= 0:
                found.setdefault(tokens, []).append(slot)
        return found


def _run(case: SlotCase, rows: slice, kept: Kept, wanted: set[int]) -> tuple[Tensor, dict[int, Kept]]:
    """The output of a sequence's tokens, and its state after those numbers of them that are wanted."""
    spec, x, after = case.spec, case.x[rows].double(), {}
    history = torch.cat((kept.conv.T, x)) if spec.conv_channels else x
    if spec.conv_channels:
        assert case.parameters.conv_weight is not None
        weight, bias = case.parameters.conv_weight.double(), case.parameters.conv_bias
        x = sum((history[i : i + x.shape[0]] * weight[:, i] for i in range(spec.conv_width)), torch.zeros_like(x))
        x = x if bias is None else x + bias.double()
        x = x * torch.sigmoid(x) if spec.activation == "silu" else x
    state, outputs = kept.recurrent, []
    inputs = _operands(case, x, [gate[rows].double() for gate in case.gates]) if spec.recurrent else None
    for t in range(x.shape[0]):
        if inputs is not None:
            q, k, v, decay, beta, skip = (each[t] for each in inputs)
            state = state * decay
            state = state + k[..., None] * (beta[:, None] * (v - _read(state, k) * skip))[:, None]
            outputs.append(_read(state, q) + inputs.direct[t])
        if t + 1 in wanted:
            after[t + 1] = Kept(state, history[t + 1 : t + spec.conv_width].T if spec.conv_channels else kept.conv)
    return torch.stack(outputs).flatten(1) if outputs else x, after


def _read(state: Tensor, key: Tensor) -> Tensor:
    return (state * key[..., None]).sum(1)


class _Operands(tuple[Tensor, ...]):
    """q, k [T, heads, key_dim], v [T, heads, value_dim], decay of a state, beta [T, heads], 1 where the delta rule holds [T]."""

    direct: Tensor
    """[T, heads, value_dim]: what goes straight to the output."""


def _operands(case: SlotCase, x: Tensor, gates: Sequence[Tensor]) -> _Operands:
    spec, parameters = case.spec, case.parameters
    heads, keys, tokens = spec.num_heads, spec.num_key_heads * spec.key_dim, x.shape[0]
    assert parameters.A_log is not None
    slope = parameters.A_log.double().exp()
    bias = 0 if parameters.dt_bias is None else parameters.dt_bias.double()
    softplus = torch.nn.functional.softplus(gates[0] + bias, threshold=1e6) if gates else slope
    ones, delta = x.new_ones(tokens, heads), x.new_zeros(tokens)

    def of_heads(part: Tensor) -> Tensor:
        return part.reshape(tokens, spec.num_key_heads, spec.key_dim).repeat_interleave(heads // spec.num_key_heads, 1)

    if spec.kind == MAMBA1:
        k, q = (gate[:, None].expand(tokens, heads, -1) for gate in gates[1:])
        v, beta, decay = x[..., None], softplus, torch.exp(-slope * softplus[..., None])[..., None]
    elif spec.kind == MAMBA2:
        v, k, q = x.split([x.shape[1] - 2 * keys, keys, keys], 1)
        v, k, q = v.reshape(tokens, heads, -1), of_heads(k), of_heads(q)
        beta = softplus.clamp(*spec.dt_limits)
        decay = torch.exp(-slope * beta)[..., None, None]
    else:
        q, k, v = x.split([keys, keys, x.shape[1] - 2 * keys], 1)
        q, k, v = of_heads(q), of_heads(k), v.reshape(tokens, heads, -1)
        if spec.qk_norm:
            q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        q = q * spec.scale
        if spec.kind == LIGHTNING:
            beta, decay = ones, torch.exp(-slope).expand(tokens, heads)[..., None, None]
        else:
            beta, delta = spec.beta_scale * torch.sigmoid(gates[1]), x.new_ones(tokens)
            decay = torch.exp(-(slope[:, None] if spec.kind == KDA else slope) * softplus)
            decay = decay[..., None] if spec.kind == KDA else decay[..., None, None]
    found = _Operands((q, k, v, decay, beta, delta))
    found.direct = torch.zeros_like(v) if parameters.D is None else parameters.D.double()[:, None] * v
    return found


def make_case(
    spec: StateSpec,
    layout: StateLayout,
    lens: Sequence[Lengths],
    *,
    seed: int = 0,
    bias: bool = True,
    in_place: bool = True,
    checkpoints: Mapping[int, Sequence[int]] | None = None,
    pad_rows: int = 0,
) -> SlotCase:
    """Make a step. Slots are shuffled; those of sequences without a context hold NaN, which must not be read.

    in_place: the slot read is among those written, the last of them; else it is another. pad_rows: padding rows at the end.
    checkpoints: by sequence, new tokens after which one is left.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    device = spec.device

    def random(*shape: int, dtype: torch.dtype = spec.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    drafts = [each.num_drafts for each in lens]
    width, count = 1 + max(drafts, default=0), sum(1 + each for each in drafts) + len(lens) + 8
    count += sum(map(len, (checkpoints or {}).values()))
    free = torch.randperm(count, generator=generator).tolist()
    cache = layout.allocate(spec, count)
    for tensor in cache.tensors.values():
        tensor.copy_(random(*tensor.shape, dtype=tensor.dtype))
    rows = [[free.pop() for _ in range(1 + each)] + [-1] * (width - 1 - each) for each in drafts] + [[-1] * width] * pad_rows
    out_slots = torch.tensor(rows, dtype=torch.int32).view(-1, width)
    slots = [row[each] if in_place else free.pop() for row, each in zip(rows, drafts, strict=False)]
    slots_cpu = torch.tensor([*slots, *[-1] * pad_rows], dtype=torch.int32)
    for each, slot in zip(lens, slots, strict=True):
        if each.context_len == 0:
            for tensor in cache.tensors.values():
                tensor[slot] = torch.nan
    left = [(seq, n, free.pop()) for seq, tokens in (checkpoints or {}).items() for n in tokens]
    left_cpu = torch.tensor(left, dtype=torch.int32) if left else None
    query = [each.query_len for each in lens] + [1] * pad_rows
    context = [each.context_len for each in lens] + [-1] * pad_rows
    drafts += [0] * pad_rows
    tables = [[0]] * len(lens) + [[]] * pad_rows
    block = max(each.query_len + each.context_len for each in lens)
    step = AttentionMetadata.build(query, context, tables, block, device, num_draft_tokens=drafts)
    metadata = StateMetadata(
        step, slots_cpu.to(device), out_slots.to(device), slots_cpu, out_slots,
        None if left_cpu is None else left_cpu.to(device), left_cpu,
    )  # fmt: skip
    x = random(step.num_tokens, spec.input_channels + 16)[:, : spec.input_channels]
    return SlotCase(spec, _parameters(spec, random, bias), cache, metadata, x, _gates(spec, step.num_tokens, random))


def _parameters(spec: StateSpec, random: Callable[..., Tensor], bias: bool) -> StateParameters:
    """Random weights, with decays from nearly none to strong ones."""
    heads, keys, found = spec.num_heads, spec.key_dim, dict[str, Tensor]()
    if spec.conv_channels:
        found["conv_weight"] = random(spec.conv_channels, spec.conv_width) * spec.conv_width**-0.5
        if bias:
            found["conv_bias"] = 0.3 * random(spec.conv_channels)
    if spec.recurrent:
        weak = 3.0 if spec.kind == LIGHTNING else 0.0
        found["A_log"] = random(*((heads, keys) if spec.kind == MAMBA1 else (heads,)), dtype=torch.float32) - weak
    if spec.kind in (GATED_DELTA, KDA, MAMBA1, MAMBA2):
        found["dt_bias"] = random(*((heads, keys) if spec.kind == KDA else (heads,)), dtype=torch.float32) - 1.0
    if spec.kind in (MAMBA1, MAMBA2):
        found["D"] = random(heads, dtype=torch.float32)
    return StateParameters(**found)


def _gates(spec: StateSpec, tokens: int, random: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    heads, keys = spec.num_heads, spec.key_dim
    shapes: Mapping[str, Sequence[tuple[int, ...]]] = {
        GATED_DELTA: [(heads,), (heads,)],
        KDA: [(heads, keys), (heads,)],
        MAMBA2: [(heads,)],
        MAMBA1: [(heads,), (keys,), (keys,)],
    }
    return tuple(random(tokens, *shape) for shape in shapes.get(spec.kind, ()))


def errors(case: SlotCase, backend: StateBackend) -> tuple[float, float]:
    """Run a case and return the relative errors of the output and of the worst state; infinite where another slot was touched."""
    before = {name: tensor.clone() for name, tensor in case.cache.tensors.items()}
    wanted, written = case.answer()
    out = case.run(backend)
    live = ~torch.isnan(wanted).any(1)
    wrong = max(
        (_error(got, want) for slot, kept in written.items() for got, want in zip(case.kept(slot), kept, strict=True)),
        default=0.0,
    )
    others = [slot for slot in range(case.cache.num_slots) if slot not in written]
    same = all(
        torch.equal(tensor[others].nan_to_num(7.0), before[name][others].nan_to_num(7.0))
        for name, tensor in case.cache.tensors.items()
    )
    untouched = bool(torch.isnan(out[~live]).all())
    return _error(out[live].double(), wanted[live]), wrong if same and untouched else math.inf


def _error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, infinite where either is no number."""
    if want.numel() == 0:
        return 0.0
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf
