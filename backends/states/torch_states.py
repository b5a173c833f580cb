"""The state backend `torch`: plain PyTorch in float32, for every kind and layout, on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from headway.backends.states.chunks import operands, scan_chunks, scan_selective, selective_operands, step_selective, step_tokens
from headway.backends.states.plans import (
    Room,
    ScanPlan,
    Segment,
    SequenceBlock,
    StepBlock,
    StepPlan,
    Writes,
    plan_scan,
    plan_step,
)
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layer import Invariance
from headway.core.contract.metadata import Phase
from headway.core.contract.state import (
    CHECKPOINT_TOKENS,
    MAMBA1,
    STATE_KINDS,
    StateBackend,
    StateCache,
    StateCapabilities,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
)


def convolve(spec: StateSpec, parameters: StateParameters, x: Tensor) -> Tensor:
    """Return the activated output of the convolution, float32 [n, L, channels]. x: float32 [n, conv_width - 1 + L, channels]."""
    assert parameters.conv_weight is not None
    first, *taps = parameters.conv_weight.float().unbind(1)
    length, bias = x.shape[1] - spec.conv_width + 1, parameters.conv_bias
    out = x[:, :length] * first if bias is None else torch.addcmul(bias.float(), x[:, :length], first)
    for place, tap in enumerate(taps, start=1):
        out.addcmul_(x[:, place : place + length], tap)
    return silu(out, inplace=True) if spec.activation == "silu" else out


def remembered(history: Tensor, x: Tensor, at: Tensor, from_history: Tensor) -> Tensor:
    """Return M states of the convolution. A state after a token consists of the last conv_width - 1 inputs up to that token.

    history: [num_seqs, conv_width - 1, channels]: convolution states before the step.
    x: [num_tokens, channels]: inputs of the step.
    at: int64 [M, conv_width - 1]: rows of x or, if `from_history` is true, of history flattened to [num_seqs * (conv_width - 1),
    channels].
    from_history: bool [M, conv_width - 1]: True for inputs from before the step.

    Returns [M, channels, conv_width - 1].
    """
    flat = at.flatten()
    new = x.index_select(0, flat.clamp(max=x.shape[0] - 1))
    old = history.flatten(0, 1)
    old = old.index_select(0, flat.clamp(max=old.shape[0] - 1))
    rows = torch.where(from_history.flatten()[:, None], old, new)
    return torch.unflatten(rows, 0, at.shape).transpose(1, 2)


def read_slots(states: Tensor, slots: Tensor, empty: Tensor | None) -> Tensor:
    """Return float32 copies of states, in the memory order of `states`.

    states: logical view [num_slots, ...] of any layout.
    slots: int [n]; rows for negative slots have arbitrary contents.
    empty: bool [n]: True for rows to fill with zeros. None means no row.
    """
    order = sorted(range(states.dim()), key=states.stride, reverse=True)
    if order[0] != 0:  # strides are ambiguous for tensors with one element
        order = list(range(states.dim()))
    taken = states.permute(order).index_select(0, slots.clamp(min=0)).float()
    taken = taken.permute([order.index(axis) for axis in range(states.dim())])
    if empty is None:
        return taken
    return taken.masked_fill_(empty.view((-1, *[1] * (states.dim() - 1))), 0.0)


def write_slots(states: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values [n, ...] to slots, int [n], all non-negative."""
    states.index_copy_(0, slots.long(), values.to(states.dtype))


def write_known_later(states: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values to slots, int [n], skipping negative slots, without knowing on the host which slots are negative.

    A row without a slot repeats the write of the first row with a slot. If no row has a slot, slot 0 is rewritten unchanged.
    """
    rows = slots.shape[0]
    wanted = slots >= 0
    first = wanted.int().argmax()
    source = torch.where(wanted, torch.arange(rows, device=slots.device), first)
    target = slots.index_select(0, source).clamp(min=0).long()
    values = values.to(states.dtype).index_select(0, source)
    held = states.index_select(0, target[:1])
    states.index_copy_(0, target, torch.where(wanted.any(), values, held))


_AT_ONCE = {
    "cpu": 32 * 2**20,
    "cuda": 256 * 2**20,
}  # Maximum bytes of float32 tensors computed at once; on a CPU they should stay near its caches
_ELEMENTS = {
    "cpu": 2**16,
    "cuda": 2**24,
}  # Maximum elements of `mamba1` states updated at once; on a CPU, more parallel chunks are slower


def _nothing(token: int, state: Tensor) -> None:
    """Do nothing with the state after a token."""


class _Layer(NamedTuple):
    parameters: StateParameters
    cache: StateCache


class TorchStates(StateBackend):
    """Reference backend for layers with a state. Prompts use batched GEMMs over chunks of 64 tokens, and decode runs token by
    token."""

    name = "torch"
    graph_level = GraphLevel.UNIFORM
    capabilities = StateCapabilities(
        kinds=frozenset(STATE_KINDS),
        state_dtypes=(torch.float32, torch.bfloat16, torch.float16),
        devices=("cpu", "cuda"),
        invariance=Invariance.PHASE,
    )

    def __init__(self, spec: StateSpec, layout: StateLayout) -> None:
        super().__init__(spec, layout)
        state = 4 * spec.num_heads * spec.key_dim * spec.value_dim + 4 * spec.conv_channels * spec.conv_width
        at_once = _AT_ONCE[spec.device.type]
        tokens = at_once // _bytes_per_token(spec)
        if spec.kind == MAMBA1:
            tokens = _ELEMENTS[spec.device.type] // (spec.num_heads * spec.key_dim) * CHECKPOINT_TOKENS
        self._room = Room(max(tokens, CHECKPOINT_TOKENS), max(at_once // (4 * state), 1))

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        tokens = max(self._room.tokens, CHECKPOINT_TOKENS * min(self._room.sequences, max_num_seqs))
        return 2 * tokens * _bytes_per_token(self.spec) + 2 * _AT_ONCE[self.spec.device.type]

    def plan(self, metadata: StateMetadata) -> ScanPlan | StepPlan:
        if metadata.step.phase is Phase.DECODE:
            return plan_step(metadata, self._room, captured=False)
        return plan_scan(metadata, self.spec.conv_width, self._room)

    def plan_for_capture(self, metadata: StateMetadata) -> StepPlan:
        return plan_step(metadata, self._room, captured=True)

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: ScanPlan, out: Tensor
    ) -> None:
        history = None
        if self.spec.conv_channels:
            history = read_slots(cache.logical_conv, plan.slots, plan.empty).transpose(1, 2)
            if plan.remembered is not None:
                kept = remembered(history.to(x.dtype), x, plan.remembered.at, plan.remembered.from_history)
                write_slots(cache.logical_conv, plan.remembered.slots, kept)
        for block in plan.blocks:
            past = None if history is None else history.index_select(0, block.sequences)
            self._scan_block(block, past, x, gates, _Layer(parameters, cache), out)

    def _scan_block(
        self, block: SequenceBlock, history: Tensor | None, x: Tensor, gates: Sequence[Tensor], layer: _Layer, out: Tensor
    ) -> None:
        """Run the segments of one block. history: float32 [n, conv_width - 1, channels]: inputs before the block's first
        tokens."""
        state = read_slots(layer.cache.logical_recurrent, block.slots, block.empty) if self.spec.recurrent else None
        for segment in block.segments:
            taken = _taken(x, segment)
            if self.spec.invariance:
                taken_gates = [_taken(gate, segment) for gate in gates]
                result, history, state = self._scan_alone(block.chunk, segment, taken, taken_gates, layer, history, state)
                self._put(result, segment, out)
                continue
            inputs = taken.float()
            if history is not None:
                joined = torch.cat((history, inputs), dim=1)
                inputs, history = convolve(self.spec, layer.parameters, joined), joined[:, segment.length :]
            if state is None:
                result = inputs
            else:
                taken_gates = [_taken(gate, segment) for gate in gates]
                result, state = self._scan_segment(block.chunk, segment, inputs, taken_gates, layer, state)
            self._put(result, segment, out)
        if state is not None:
            self._write_rows(layer.cache, block.last, state)

    @staticmethod
    def _put(result: Tensor, segment: Segment, out: Tensor) -> None:
        rows = result.reshape(-1, out.shape[-1])
        rows = rows if segment.places is None else rows.index_select(0, segment.places)
        out.index_copy_(0, segment.targets, rows.to(out.dtype))

    def _scan_alone(
        self,
        chunk: int,
        segment: Segment,
        x: Tensor,
        gates: Sequence[Tensor],
        layer: _Layer,
        history: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run a segment as `_scan_block` does, but compute each token as `_token` does. Arguments and results as there."""
        result = x.new_zeros((*x.shape[:2], self.spec.out_channels), dtype=torch.float32)
        history, state = (None if each is None else each.clone() for each in (history, state))
        live = None if segment.valid is None else segment.valid.tolist()
        for token in range(segment.length):
            for row in range(x.shape[0]):
                if live is None or live[row][token]:
                    at = (slice(row, row + 1), slice(token, token + 1))
                    self._token(x[at], [gate[at] for gate in gates], layer.parameters, history, state, result, at)
            index = token // chunk
            if state is not None and (token + 1) % chunk == 0 and index in segment.checkpoints:
                self._write_rows(layer.cache, segment.checkpoints[index], state)
        return result, history, state

    def _token(
        self,
        x: Tensor,
        gates: Sequence[Tensor],
        parameters: StateParameters,
        history: Tensor | None,
        state: Tensor | None,
        out: Tensor,
        at: tuple[slice, slice],
    ) -> None:
        """Compute one token of one sequence, so that every step makes the same calls with tensors of the same shapes.

        x, gates: [1, 1, ...]. history, state: float32 [n, ...] as in `_scan_block`, updated. out: float32 [n, L, ...], written.
        at: the token's sequence and place. The state is rounded to the type in which it is stored, as if the step ended here.
        """
        row, inputs = at[0], x.float().contiguous()
        if history is not None:
            joined = torch.cat((history[row], inputs), dim=1)
            history[row] = joined[:, 1:]
            inputs = convolve(self.spec, parameters, joined)
        if state is None:
            out[at] = inputs
            return
        own, gates = state[row].clone(memory_format=torch.contiguous_format), [gate.contiguous() for gate in gates]
        if self.spec.kind == MAMBA1:
            own = _by_element(own).contiguous()
            out[at] = step_selective(selective_operands(parameters, inputs, gates, None), own, _nothing)
            own = _by_channel(own)
        else:
            out[at] = step_tokens(operands(self.spec, parameters, inputs, gates, None), own, _nothing).flatten(2)
        state[row] = own.to(self.spec.state_dtype).float()

    def _scan_segment(
        self, chunk: int, segment: Segment, x: Tensor, gates: Sequence[Tensor], layer: _Layer, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence of one segment. Returns its output and the final state."""
        spec, selective = self.spec, self.spec.kind == MAMBA1

        def after(index: int, reached: Tensor) -> None:
            if index in segment.checkpoints:
                self._write_rows(layer.cache, segment.checkpoints[index], _by_channel(reached) if selective else reached)

        if selective:
            read = selective_operands(layer.parameters, x, gates, segment.valid)
            result, last = scan_selective(chunk, read, _by_element(state), after)
            return result, _by_channel(last)
        return scan_chunks(chunk, operands(spec, layer.parameters, x, gates, segment.valid), state, after)

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StepPlan, out: Tensor
    ) -> None:
        rows, layer = (len(plan.metadata.slots), plan.length), _Layer(parameters, cache)
        tokens, places = plan.order()
        x, *gates = (torch.unflatten(part if tokens is None else part.index_select(0, tokens), 0, rows) for part in (x, *gates))
        result = torch.unflatten(out, 0, rows) if tokens is None else out.new_empty((*rows, out.shape[-1]))
        if len(plan.blocks) == 1:
            self._step_block(plan, plan.blocks[0], x, gates, layer, result)
        else:
            for block in plan.blocks:
                some = block.rows
                self._step_block(plan, block, x[some], [gate[some] for gate in gates], layer, result[some])
        if places is not None:
            out.copy_(result.flatten(0, 1).index_select(0, places))

    def _step_block(
        self, plan: StepPlan, block: StepBlock, x: Tensor, gates: Sequence[Tensor], layer: _Layer, out: Tensor
    ) -> None:
        """Run one block of sequences of a decode step. x, gates, out: [n, L, ...]."""
        spec, states, (parameters, cache) = self.spec, _StepStates(plan, block), layer
        if spec.invariance:
            self._step_alone(plan.length, states, x, gates, layer, out)
            return
        inputs = x.float()
        if spec.conv_channels:
            history = states.read(cache.logical_conv).transpose(1, 2)
            joined = torch.cat((history, inputs), dim=1)
            inputs = convolve(spec, parameters, joined)
            for token in range(plan.length):
                states.keep(cache.logical_conv, token, joined[:, token + 1 : token + spec.conv_width].transpose(1, 2))
        if not spec.recurrent:
            out.copy_(inputs)
            return
        state = states.read(cache.logical_recurrent)

        def after(token: int, reached: Tensor) -> None:
            states.keep(cache.logical_recurrent, token, _by_channel(reached) if spec.kind == MAMBA1 else reached)

        if spec.kind == MAMBA1:
            out.copy_(step_selective(selective_operands(parameters, inputs, gates, None), _by_element(state), after))
        else:
            out.copy_(step_tokens(operands(spec, parameters, inputs, gates, None), state, after).flatten(2))

    def _step_alone(
        self, length: int, states: _StepStates, x: Tensor, gates: Sequence[Tensor], layer: _Layer, out: Tensor
    ) -> None:
        """Run a block of a decode step as `_step_block` does, but compute each token as `_token` does."""
        parameters, cache = layer
        history = states.read(cache.logical_conv).transpose(1, 2).clone() if self.spec.conv_channels else None
        state = states.read(cache.logical_recurrent).clone() if self.spec.recurrent else None
        result = x.new_zeros(out.shape, dtype=torch.float32)
        for token in range(length):
            for row in range(x.shape[0]):
                at = (slice(row, row + 1), slice(token, token + 1))
                self._token(x[at], [gate[at] for gate in gates], parameters, history, state, result, at)
            if history is not None:
                states.keep(cache.logical_conv, token, history.transpose(1, 2))
            if state is not None:
                states.keep(cache.logical_recurrent, token, state)
        out.copy_(result)

    @staticmethod
    def _write_rows(cache: StateCache, writes: Writes, state: Tensor) -> None:
        if len(writes.rows):
            write_slots(cache.logical_recurrent, writes.slots, state.index_select(0, writes.rows))


class _StepStates:
    """Reads and writes of states for a block of sequences in DECODE."""

    def __init__(self, plan: StepPlan, block: StepBlock) -> None:
        self._block = block
        step = plan.metadata.step
        self._slots = plan.metadata.slots[block.rows]
        self._empty = block.empty
        self._columns = None
        if plan.captured:
            self._empty = step.context_lens[block.rows] == 0
            self._columns = torch.where(self._slots[:, None] < 0, -1, plan.metadata.out_slots[block.rows])

    def read(self, states: Tensor) -> Tensor:
        """Return the states before the step in float32. The caller may overwrite them. states: logical view [num_slots, ...]."""
        if self._block.in_place is None:
            return read_slots(states, self._slots, self._empty)
        own = states[self._block.in_place]
        if self._empty is not None:
            own.masked_fill_(self._empty.view((-1, *[1] * (own.dim() - 1))), 0.0)
        return own.float()

    def keep(self, states: Tensor, token: int, values: Tensor) -> None:
        """Write the states after a token. token: the token's index. values: [n, ...]."""
        if self._columns is not None:
            if token < self._columns.shape[1]:
                write_known_later(states, self._columns[:, token], values)
        elif self._block.in_place is not None:
            own = states[self._block.in_place]
            if own.data_ptr() != values.data_ptr():  # otherwise the recurrence has updated the states in place
                own.copy_(values)
        elif len((writes := self._block.writes[token]).rows):
            rows = values if len(writes.rows) == len(values) else values.index_select(0, writes.rows)
            write_slots(states, writes.slots, rows)


def _taken(rows: Tensor, segment: Segment) -> Tensor:
    """Return rows [num_tokens, ...] in the shape [n, L, ...] of a segment."""
    return torch.unflatten(rows.index_select(0, segment.tokens), 0, (-1, segment.length))


def _by_element(state: Tensor) -> Tensor:
    """Return `mamba1` states [n, H, K, 1] with the recurrence's axis order, [n, K, H]."""
    return state.squeeze(-1).transpose(1, 2).contiguous()


def _by_channel(state: Tensor) -> Tensor:
    return state.transpose(1, 2)[..., None]


def _bytes_per_token(spec: StateSpec) -> int:
    """Return the approximate number of bytes that a scan allocates per token."""
    if spec.kind == MAMBA1:
        return 4 * spec.num_heads * (8 + 4 * spec.key_dim // CHECKPOINT_TOKENS) + 12 * spec.conv_channels
    per_head = 6 * spec.key_dim + 6 * spec.value_dim + 4 * CHECKPOINT_TOKENS
    return 4 * spec.num_heads * per_head + 12 * spec.conv_channels
