"""Steps of layers with states, for tests and benchmarks: random inputs and parameters, and shuffled slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.state import (
    CHECKPOINT_TOKENS,
    CONV,
    GATED_DELTA,
    KDA,
    LIGHTNING,
    MAMBA1,
    MAMBA2,
    StateBackend,
    StateCache,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
)
from headway.core.oracle.cells import Finding

REGIMES = ("mild", "strong", "faint")
"""Regimes of a step's values. strong: one decay in five erases the state, and other decays erase almost nothing. faint: one gate
in three is saturated, some tokens are zero, and keys and queries of the first key head are nearly zero."""
MILD, STRONG, FAINT = REGIMES


@dataclass(frozen=True)
class StateCase:
    """Pool of states and one step over it, for testing and timing a state backend."""

    spec: StateSpec
    parameters: StateParameters
    metadata: StateMetadata
    cache: StateCache
    x: Tensor
    """[num_tokens, input_channels]: inputs of the layer for the step's tokens."""
    gates: Sequence[Tensor]


def make_state_case(
    lens: Sequence[tuple[int, int]],
    spec: StateSpec,
    layout: StateLayout,
    *,
    seed: int = 0,
    padding_rows: int = 0,
    spare_slots: int = 3,
    checkpoints: bool = True,
    in_place: bool = True,
    strided: bool = False,
    in_order: bool = False,
    decodes: bool = True,
    regime: str = MILD,
    draw_on: torch.device | None = None,
) -> StateCase:
    """Return a case with random numbers in every slot, as if used by earlier sequences, and shuffled slots for each sequence.

    Half of the unused slots, and half of the slots of sequences without a context, contain NaN, which reveals stray reads. The
    other half contain random numbers, which reveal reads that mask NaN.

    lens: (query_len, kv_len) of each sequence, prompts and extensions first. A sequence with a context and at most 8 new tokens
    decodes, and has a slot for each of its tokens.
    padding_rows: number of rows without slots at the end, like a CUDA graph's unused rows.
    checkpoints: True for checkpoints at every multiple of CHECKPOINT_TOKENS in every prompt; if `in_place` is False, at every
    second multiple.
    in_place: True if the first slot that a sequence writes is the slot that it reads.
    strided: True to slice x and gates from wider tensors.
    in_order: True for consecutive slots, as in an engine that has just started.
    decodes: False to treat short sequences with a context as extensions too.
    regime: one of REGIMES.
    draw_on: device that draws the numbers. A GPU is faster than the CPU, but draws different numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = generator if draw_on is None else torch.Generator(draw_on).manual_seed(seed)
    decoding = [decodes and kv > query and query <= 8 for query, kv in lens]
    widths = [query if decode else 1 for (query, _), decode in zip(lens, decoding, strict=True)]
    width = max(widths, default=1)
    padding = width if padding_rows and any(decoding) and all(query == width for query, _ in lens) else 1
    query_lens = [query for query, _ in lens] + [padding] * padding_rows
    contexts = [kv - query for query, kv in lens] + [-padding] * padding_rows
    drafts = [count - 1 if decode else -1 for count, decode in zip(widths, decoding, strict=True)] + [padding - 1] * padding_rows
    marks = [
        (row, tokens)
        for row, (query, _) in enumerate(lens)
        if checkpoints and not decoding[row]
        for tokens in range(CHECKPOINT_TOKENS, query + 1, CHECKPOINT_TOKENS)
        if in_place or (row + tokens // CHECKPOINT_TOKENS) % 2
    ]
    num_slots = len(lens) + sum(widths) + len(marks) + spare_slots
    order = list(range(num_slots))[::-1] if in_order else torch.randperm(num_slots, generator=generator).tolist()
    slots = [order.pop() for _ in lens]
    targets = [
        [read if in_place and not i else order.pop() for i in range(count)] for read, count in zip(slots, widths, strict=True)
    ]
    checkpoint_rows = [(row, tokens, order.pop()) for row, tokens in marks]
    block = max((kv for _, kv in lens), default=1) + 8
    step = AttentionMetadata.build(
        query_lens, contexts, [[0]] * len(lens) + [[]] * padding_rows, block, spec.device, num_draft_tokens=drafts
    )
    metadata = _metadata(step, slots + [-1] * padding_rows, targets + [[]] * padding_rows, width, checkpoint_rows)
    cache = layout.allocate(spec, num_slots)
    empty = [slot for slot, (query, kv) in zip(slots, lens, strict=True) if query == kv]
    for tensor in cache.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=numbers, device=numbers.device))
        tensor[[*empty[seed % 2 :: 2], *order[::2]]] = torch.nan
    x, *gates = random_inputs(spec, step.num_tokens, numbers, strided=strided)
    case = StateCase(spec, random_parameters(spec, numbers, bias=spec.conv_width != 2), metadata, cache, x, gates)
    return apply_regime(regime, case)


def apply_regime(regime: str, case: StateCase) -> StateCase:
    """Return the case with the inputs and parameters of a regime. Tensors may be changed in place."""
    if regime == STRONG and case.gates:
        case.gates[0].copy_(torch.where(_some(case.gates[0], 5), 300.0, -8.0))
    elif regime == STRONG and case.spec.kind == LIGHTNING:
        return replace(
            case, parameters=replace(case.parameters, A_log=torch.where(_some(_of(case.parameters.A_log), 2), 4.0, -9.0))
        )
    elif regime == FAINT:
        for gate in case.gates[:1] if case.spec.kind == MAMBA1 else case.gates:  # further gates of MAMBA1 are B and C
            ends = torch.where(_some(gate, 2), 30.0, -30.0).to(gate.dtype)
            gate.copy_(torch.where(_some(gate, 3, seed=2), ends, gate))
        case.x[1::5] = 0.0
        for part in _first_key_head(case.spec):
            case.x[:, part] *= 3e-4
            if case.parameters.conv_bias is not None:
                case.parameters.conv_bias[part] = 0.0
    return case


def _some(like: Tensor, one_in: int, seed: int = 1) -> Tensor:
    return (torch.rand(like.shape, generator=torch.Generator().manual_seed(seed)) < 1 / one_in).to(like.device)


def _first_key_head(spec: StateSpec) -> list[slice]:
    """Return the channel ranges of q and k in the first key head; for Mamba-2, the ranges of B and C."""
    if spec.kind in (CONV, MAMBA1):
        return []
    first, keys = spec.num_heads * spec.value_dim if spec.kind == MAMBA2 else 0, spec.num_key_heads * spec.key_dim
    return [slice(begin, begin + spec.key_dim) for begin in (first, first + keys)]


def _of(parameter: Tensor | None) -> Tensor:
    assert parameter is not None
    return parameter


def _metadata(
    step: AttentionMetadata,
    slots: Sequence[int],
    targets: Sequence[Sequence[int]],
    width: int,
    checkpoints: Sequence[tuple[int, int, int]],
) -> StateMetadata:
    device = step.query_start_loc.device
    out = torch.full((len(slots), width), -1, dtype=torch.int32)
    for row, own in enumerate(targets):
        out[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    reads = torch.tensor(slots, dtype=torch.int32)
    marks = torch.tensor(checkpoints, dtype=torch.int32).view(-1, 3) if checkpoints else None
    return StateMetadata(step, reads.to(device), out.to(device), reads, out, None if marks is None else marks.to(device), marks)


def random_inputs(spec: StateSpec, num_tokens: int, generator: torch.Generator, *, strided: bool = False) -> list[Tensor]:
    """Return random x and gates for `num_tokens` tokens, in the spec's dtype; keys have about unit length."""
    shapes = [(spec.input_channels,), *gate_shapes(spec)]
    # Both sides of a slice hold NaN, which reveals reads of neighbouring elements.
    found = []
    for number, shape in enumerate(shapes):
        size = torch.Size(shape).numel()
        wide = torch.full((num_tokens, size + 16), torch.nan, device=generator.device)
        spread = spec.key_dim**-0.5 if number == 0 and spec.kind in (GATED_DELTA, KDA, LIGHTNING) and not spec.qk_norm else 1.0
        wide[:, 8:-8] = torch.randn(num_tokens, size, generator=generator, device=generator.device) * spread
        rows = wide.to(spec.device, spec.dtype)[:, 8:-8]
        found.append(torch.unflatten(rows if strided else rows.contiguous(), 1, shape))
    return found


def gate_shapes(spec: StateSpec) -> list[tuple[int, ...]]:
    """Return, for each gate of the spec's kind, the shape of one token's row."""
    heads, keys = spec.num_heads, spec.key_dim
    shapes: dict[str, list[tuple[int, ...]]] = {
        GATED_DELTA: [(heads,), (heads,)],
        KDA: [(heads, keys), (heads,)],
        MAMBA2: [(heads,)],
        MAMBA1: [(heads,), (keys,), (keys,)],
        LIGHTNING: [],
        CONV: [],
    }
    return shapes[spec.kind]


def random_parameters(spec: StateSpec, generator: torch.Generator, *, bias: bool = True) -> StateParameters:
    """Return random parameters of a layer, with decays from almost none to strong."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(spec.device)

    heads, keys, conv = spec.num_heads, spec.key_dim, spec.conv_channels
    weights: dict[str, Tensor] = {}
    if conv:
        weights["conv_weight"] = (normal(conv, spec.conv_width) * spec.conv_width**-0.5).to(spec.dtype)
        if bias:
            weights["conv_bias"] = (normal(conv) * 0.3).to(spec.dtype)
    if spec.recurrent:
        weights["A_log"] = (
            normal(heads, keys) if spec.kind == MAMBA1 else normal(heads) - (3.0 if spec.kind == LIGHTNING else 0.0)
        )
    if spec.kind in (GATED_DELTA, KDA, MAMBA1, MAMBA2):
        weights["dt_bias"] = normal(heads, keys) - 1.0 if spec.kind == KDA else normal(heads) - 1.0
    if spec.kind in (MAMBA1, MAMBA2):
        weights["D"] = normal(heads)
    return StateParameters(**weights)


def run_states(backend: StateBackend, case: StateCase) -> Tensor:
    """Return the output of one layer's step through one backend; see `run_layers`."""
    return run_layers(backend, backend, [case])[0]


def run_layers(scans: StateBackend, steps: StateBackend, layers: Sequence[StateCase]) -> list[Tensor]:
    """Return each layer's output of one step. As in the engine, the step is planned once, with the first layer's metadata for all
    layers.

    The outputs are first filled with NaN, which reveals missed rows. Their rows are slices of wider rows, as in a fused
    projection. scans: backend for prompts and extensions. steps: backend for decodes.
    """
    metadata, n = layers[0].metadata, layers[0].metadata.step.num_prefill_tokens
    scanned = None if metadata.prefill is None else scans.plan(metadata.prefill)
    stepped = None if metadata.decode is None else steps.plan(metadata.decode)
    found = []
    for case in layers:
        wide = case.x.new_full((case.x.shape[0], case.spec.out_channels + 16), torch.nan)
        out = wide[:, 8:-8]
        if metadata.prefill is not None:
            scans.scan(case.x[:n], [gate[:n] for gate in case.gates], case.parameters, case.cache, scanned, out[:n])
        if metadata.decode is not None:
            steps.step(case.x[n:], [gate[n:] for gate in case.gates], case.parameters, case.cache, stepped, out[n:])
        if not (wide[:, :8].isnan().all() and wide[:, -8:].isnan().all()):
            raise Finding("columns beside the output's must be left alone", guess="needs tensors in one piece")
        found.append(out)
    return found
