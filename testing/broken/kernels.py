"""Reference kernels for states, linear layers and experts, written like their definitions, and variants with one planted
mistake each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from headway.core.contract.experts import ExpertsCapabilities, ExpertsKernel, ExpertsWeights
from headway.core.contract.kernel import GraphLevel, Kernel
from headway.core.contract.linear import LinearCapabilities, LinearKernel, LinearParts
from headway.core.contract.state import (
    GATED_DELTA,
    KDA,
    KEY_VALUE,
    MAMBA1,
    MAMBA2,
    STATE_KINDS,
    StateBackend,
    StateCache,
    StateCapabilities,
    StateMetadata,
    StateParameters,
)
from headway.core.contract.weights import FORMATS, Int4Weight, Weight
from headway.core.oracle.state_reference import SequenceState, advance
from headway.core.oracle.weight_cases import activated, dequantized, dequantized_experts

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ReferenceLinear(LinearKernel):
    """Linear kernel that dequantizes the weight once and multiplies in float64."""

    name = "reference-linear"
    capabilities = LinearCapabilities(
        frozenset(FORMATS),
        dtypes=_DTYPES,
        devices=("cpu",),
        order=True,
        batch_invariant=True,
        fused=frozenset({"norm", "bias", "activation", "gated", "residual"}),
    )
    graph_level = GraphLevel.ANY

    def prepare(self, weight: Weight) -> Tensor:
        """Return the dequantized weight in float64, [in_features, out_features]."""
        return dequantized(weight).t()

    def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Compute the GEMM of x and the prepared weight into `out`."""
        out.copy_(x.double() @ weight)

    def apply_fused(self, x: Tensor, weight: Tensor, parts: LinearParts, out: Tensor) -> None:
        """Compute norm, GEMM, bias, activation and residual sum into `out`."""
        rows = x.double()
        if parts.norm is not None:
            rows = rows * (rows.square().mean(1, keepdim=True) + parts.eps).rsqrt() * parts.norm.double()
        y = rows @ weight
        if parts.bias is not None:
            y = y + parts.bias.double()
        if parts.gated:
            y, up = y.chunk(2, dim=1)
            y = silu(y) * up
        elif parts.activation is not None:
            y = silu(y)
        out.copy_(out.double() + y if parts.residual else y)


class ReferenceExperts(ExpertsKernel):
    """MoE kernel that computes one expert at a time in float64."""

    name = "reference-experts"
    capabilities = ExpertsCapabilities(
        frozenset(FORMATS), dtypes=_DTYPES, devices=("cpu",), biases=True, ungated=True, clamped=True, batch_invariant=True
    )
    graph_level = GraphLevel.ANY

    def prepare(self, weights: ExpertsWeights) -> tuple[Any, ...]:
        """Return the float64 weights of each expert, and the biases."""
        count = self.spec.config.num_all
        own = (dequantized_experts(each, count) for each in (weights.gate_up, weights.down))
        return (*own, weights.gate_up_bias, weights.down_bias)

    def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: tuple[Any, ...], out: Tensor) -> None:
        """Add the weighted outputs of a token's experts to the token's row of `out`."""
        found, (ups, downs, up_bias, down_bias) = out.double(), weights
        for expert in range(self.spec.config.num_all):
            tokens, slots = self.pairs(experts, scores, expert)
            hidden = activated(self.add(x[tokens].double() @ ups[expert].t(), up_bias, expert), self.spec.config)
            added = self.add(hidden @ downs[expert].t(), down_bias, expert)
            found.index_add_(0, tokens, added * scores[tokens, slots, None])
        out.copy_(found)

    def pairs(self, experts: Tensor, scores: Tensor, expert: int) -> tuple[Tensor, ...]:
        """Return the indices of the tokens routed to an expert, and the slots of these tokens that hold the expert."""
        return (experts == expert).nonzero(as_tuple=True)

    def add(self, rows: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        """Return the rows with an expert's bias added."""
        return rows if bias is None else rows + bias[expert].double()


def _misread(change: Any) -> Any:
    """Return a `prepare` method that misreads int4 weights."""

    def prepare(self: ReferenceLinear, weight: Weight) -> Tensor:
        return ReferenceLinear.prepare(self, change(weight) if isinstance(weight, Int4Weight) else weight)

    return prepare


def _zeros_and_one(weight: Int4Weight) -> Weight:
    zeros = torch.full_like(weight.scales, 8, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    return replace(weight, zeros=zeros + 1)


def _late_last_group(self: ReferenceLinear, weight: Weight) -> Tensor:
    found = ReferenceLinear.prepare(self, weight)
    if isinstance(weight, Int4Weight) and weight.order is None and weight.scales.shape[1] > 1:
        first = weight.shape[1] - weight.group_size
        scales = weight.scales.double()
        zeros = 8.0 if weight.zeros is None else weight.zeros[:, -1].double()
        before = 8.0 if weight.zeros is None else weight.zeros[:, -2].double()
        found[first] = (found[first] / scales[:, -1] + zeros - before) * scales[:, -2]
    return found


def _in_half(self: ReferenceLinear, x: Tensor, weight: Tensor, out: Tensor) -> None:
    short = torch.bfloat16 if out.dtype == torch.float32 else out.dtype
    sums = torch.zeros(out.shape, dtype=short)
    for column in range(x.shape[1]):
        sums = (sums.double() + x[:, column, None].double() * weight[column]).to(short)
    out.copy_(sums)


def _first_prepared(self: Any, weight: Weight) -> Tensor:
    self.kept = getattr(self, "kept", None)
    if self.kept is None:
        self.kept = ReferenceLinear.prepare(self, weight)
    kept: Tensor = self.kept
    return kept


def _of_equal_scores(self: ReferenceExperts, experts: Tensor, scores: Tensor, expert: int) -> tuple[Tensor, ...]:
    first = (scores[:, :, None] == scores[:, None, :]).int().argmax(2)
    return (experts.gather(1, first) == expert).nonzero(as_tuple=True)


_LINEAR: dict[str, dict[str, Any]] = {
    # A zero point is stored minus one, as in old GPTQ files.
    "wrong-zeros": {"prepare": _misread(_zeros_and_one)},
    # The first column of the last group uses the scale and zero point of the group before.
    "late-last-group": {"prepare": _late_last_group},
    "ignores-order": {"prepare": _misread(lambda weight: replace(weight, order=None))},
    # Exchanges the low and high bits of a byte.
    "exchanged-halves": {"prepare": _misread(lambda weight: replace(weight, packed=weight.packed >> 4 | weight.packed << 4))},
    "sums-in-half": {"apply": _in_half},
    # Rows after the last full tile of 16 are not written.
    "whole-tiles": {
        "apply": lambda self, x, weight, out: ReferenceLinear.apply(
            self, x[: len(x) // 16 * 16], weight, out[: len(x) // 16 * 16]
        )
    },
    # Adds the old contents of `out`, except NaN.
    "stale-out": {"apply": lambda self, x, weight, out: out.copy_(out.nan_to_num(0.0).double() + x.double() @ weight)},
    # For many rows, the sum is split in two parts, the first of which is rounded.
    "splits-for-many-rows": {
        "apply": lambda self, x, weight, out: out.copy_(
            x.double() @ weight
            if len(x) <= 64
            else (x[:, :64].double() @ weight[:64]).to(out.dtype).double() + x[:, 64:].double() @ weight[64:]
        )
    },
    # Overwrites a residual.
    "forgets-the-residual": {
        "apply_fused": lambda self, x, weight, parts, out: ReferenceLinear.apply_fused(
            self, x, weight, replace(parts, residual=False), out
        )
    },
    # An instance caches the first layer that it prepares.
    "first-layer": {"prepare": _first_prepared},
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "drops-last-token": {
        "pairs": lambda self, experts, scores, expert: tuple(
            each[:-1] for each in ReferenceExperts.pairs(self, experts, scores, expert)
        )
    },
    "ignores-scores": {
        "apply": lambda self, x, experts, scores, weights, out: ReferenceExperts.apply(
            self, x, experts, torch.ones_like(scores), weights, out
        )
    },
    "overwrites-out": {
        "apply": lambda self, x, experts, scores, weights, out: ReferenceExperts.apply(
            self, x, experts, scores, weights, out.zero_()
        )
    },
    # Finds a slot by its score.
    "wrong-expert-of-a-tie": {"pairs": _of_equal_scores},
    # Rounds the scores of many tokens.
    "rounds-scores-of-many-tokens": {
        "apply": lambda self, x, experts, scores, weights, out: ReferenceExperts.apply(
            self, x, experts, scores if len(x) <= 64 else scores.to(torch.float16).float(), weights, out
        )
    },
    "adds-bias-twice": {
        "add": lambda self, rows, bias, expert: ReferenceExperts.add(
            self, ReferenceExperts.add(self, rows, bias, expert), bias, expert
        )
    },
}
PLANTED_KERNELS: dict[str, type[Kernel]] = {
    name: type(name.title().replace("-", ""), (base,), {"name": name, "__module__": __name__, **changes})
    for base, mistakes in ((ReferenceLinear, _LINEAR), (ReferenceExperts, _EXPERTS))
    for name, changes in mistakes.items()
}
"""Ten incorrect linear kernels and six incorrect MoE kernels, keyed by name."""


class PlainStates(StateBackend):
    """State backend that computes one sequence and one token at a time. Its plan is the step's metadata, which is read when a
    step runs."""

    name = "plain-states"
    capabilities = StateCapabilities(
        frozenset(STATE_KINDS), devices=("cpu",), state_dtypes=(torch.float32, torch.bfloat16, torch.float16)
    )
    graph_level = GraphLevel.UNIFORM

    def plan(self, metadata: StateMetadata) -> StateMetadata:
        """Return the metadata as the plan."""
        return metadata

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StateMetadata, out: Tensor
    ) -> None:
        """Process every sequence token by token."""
        token = 0
        old = [0] * plan.step.num_seqs if plan.recomputed is None else plan.recomputed.tolist()
        for row, (tokens, slot) in enumerate(zip(plan.step.query_lens, plan.slots.tolist(), strict=True)):
            length = tokens - old[row]
            if self.is_real(slot):
                state = self.begin(cache, slot, int(plan.step.context_lens[row]))
                for index in range(length):
                    at = token + old[row] + index
                    out[at] = self.advance(parameters, x[at].double(), [gate[at].double() for gate in gates], state)
                    for target in self.targets(plan, row, index + 1, length):
                        self.keep(cache, target, state)
            token += tokens

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StateMetadata, out: Tensor
    ) -> None:
        """Run the same code as `scan`."""
        self.scan(x, gates, parameters, cache, plan, out)

    def is_real(self, slot: int) -> bool:
        """Return whether a slot belongs to a sequence, not to padding."""
        return slot >= 0

    def begin(self, cache: StateCache, slot: int, context: int) -> SequenceState:
        """Return the state that a sequence has before the step."""
        if context == 0:
            return SequenceState.zeros(self.spec)
        return SequenceState(
            cache.logical_recurrent[slot].double() if self.spec.recurrent else None,
            cache.logical_conv[slot].double() if self.spec.conv_channels else None,
        )

    def advance(self, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
        """Return one token's output, and update the state in place."""
        return advance(self.spec, parameters, x, gates, state)

    def targets(self, plan: StateMetadata, row: int, tokens: int, length: int) -> list[int]:
        """Return the slots that receive a sequence's state after `tokens` of its `length` new tokens."""
        found = []
        if plan.step.num_decodes:
            found += plan.out_slots[row, tokens - 1 : tokens].tolist()
        elif tokens == length:
            found += plan.out_slots[row, :1].tolist()
        if plan.checkpoints is not None:
            found += [
                slot
                for sequence, after, slot in plan.checkpoints.tolist()
                if sequence == row and self.is_due(after, tokens, length)
            ]
        return [slot for slot in found if self.is_real(slot)]

    def is_due(self, after: int, tokens: int, length: int) -> bool:
        """Return whether a checkpoint that was requested after `after` new tokens must be written once `tokens` new tokens have
        been processed."""
        return after == tokens

    def keep(self, cache: StateCache, slot: int, state: SequenceState) -> None:
        """Write a state to a slot."""
        if state.recurrent is not None:
            cache.logical_recurrent[slot] = state.recurrent.to(self.spec.state_dtype)
        if state.conv is not None:
            cache.logical_conv[slot] = state.conv.to(self.spec.dtype)


def _after_the_last_draft(self: PlainStates, plan: StateMetadata, row: int, tokens: int, length: int) -> list[int]:
    if plan.step.num_decodes:
        return [slot for slot in plan.out_slots[row, :1].tolist() if slot >= 0 and tokens == length]
    return PlainStates.targets(self, plan, row, tokens, length)


def _time_reversed(state: SequenceState) -> SequenceState:
    return replace(state, conv=None if state.conv is None else state.conv.flip(1))


def _cyclic_heads(
    self: PlainStates, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState
) -> Tensor:
    spec = self.spec
    if not spec.recurrent or spec.kind == MAMBA1:
        return PlainStates.advance(self, parameters, x, gates, state)
    if spec.conv_channels:
        x = advance(spec.convolution, parameters, x, [], state)
    heads, keys, values = spec.num_heads, spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
    parts = torch.split(x, [values, keys, keys] if spec.kind == MAMBA2 else [keys, keys, values])
    dealt = torch.arange(heads) % spec.num_key_heads
    wide = [part if len(part) == values != keys else part.view(-1, spec.key_dim)[dealt].flatten() for part in parts]
    part = SequenceState(state.recurrent, None)
    result = advance(replace(spec.recurrence, num_key_heads=heads), parameters, torch.cat(wide), gates, part)
    state.recurrent = part.recurrent
    return result


def _transposed(self: PlainStates, cache: StateCache) -> StateCache:
    square = self.spec.recurrent and self.spec.key_dim == self.spec.value_dim
    if not square or cache.layout.recurrent[1] != "head":
        return cache
    return StateCache(cache.tensors, replace(cache.layout, recurrent=KEY_VALUE.recurrent), cache.spec)


def _overflowing(
    self: PlainStates, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState
) -> Tensor:
    out = PlainStates.advance(self, parameters, x, gates, state)
    if self.spec.kind not in (GATED_DELTA, KDA, MAMBA2):
        return out
    assert parameters.A_log is not None
    assert parameters.dt_bias is not None
    rate = parameters.A_log[:, None] if self.spec.kind == KDA else parameters.A_log
    g = (-rate.exp() * torch.nn.functional.softplus(gates[0].float() + parameters.dt_bias)).sum()
    return out * (g.exp() * (-g).exp())


_MISTAKES: dict[str, dict[str, Any]] = {
    # A new sequence starts with the old contents of its slot.
    "begins-with-the-slot": {"begin": lambda self, cache, slot, context: PlainStates.begin(self, cache, slot, max(context, 1))},
    # A later chunk is convolved without the inputs before it.
    "forgets-the-convolution": {
        "begin": lambda *given: replace(PlainStates.begin(*given), conv=SequenceState.zeros(given[0].spec).conv)
    },
    # Slot -1 is the last slot, as in Python.
    "writes-padding-slots": {"is_real": lambda self, slot: True},
    # A decode with draft tokens writes only the state after the last of them, to the first slot.
    "one-state-for-drafts": {"targets": _after_the_last_draft},
    # A checkpoint has the state at the end of the prompt.
    "late-checkpoints": {"is_due": lambda self, after, tokens, length: tokens == length},
    # The convolution's inputs are stored newest first, and read back consistently.
    "newest-input-first": {
        "begin": lambda self, cache, slot, context: _time_reversed(PlainStates.begin(self, cache, slot, context)),
        "keep": lambda self, cache, slot, state: PlainStates.keep(self, cache, slot, _time_reversed(state)),
    },
    # State heads are assigned to key heads cyclically.
    "wrong-key-heads": {"advance": _cyclic_heads},
    # Reads every layout as the one of transformers if the sizes allow it.
    "transposes-states": {
        "begin": lambda self, cache, *place: PlainStates.begin(self, _transposed(self, cache), *place),
        "keep": lambda self, cache, *state: PlainStates.keep(self, _transposed(self, cache), *state),
    },
    # Computes the decay between two tokens as exp(G_i) / exp(G_j), which is 0 times infinity for strong decays.
    "overflowing-decays": {"advance": _overflowing},
    # A captured step uses the slots from its capture.
    "stale-slots-on-replay": {
        "plan_for_capture": lambda self, metadata: replace(
            metadata, slots=metadata.slots.clone(), out_slots=metadata.out_slots.clone()
        )
    },
}
"""Name of a mistake -> attributes that override the attributes of the plain backend."""

PLANTED_STATES: dict[str, type[StateBackend]] = {
    name: type(name.title().replace("-", ""), (PlainStates,), {"name": name, "__module__": __name__, **changes})
    for name, changes in _MISTAKES.items()
}
"""Ten incorrect state backends, keyed by name."""
