"""Static inputs of captured steps: one device buffer, laid out for each kind of step and filled by one copy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.adapters import NO_ADAPTER, ModelAdapters
from headway.core.contract.model import Model
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.engine.data.step import StepInput
from headway.core.engine.execution.attention import HostBlockTables, MirroredTables, PagedAttention
from headway.core.sampling.filtering import NO_FILTER
from headway.core.sampling.sampler import Draws, SamplingOps


@dataclass
class ModelStep:
    """Model, attention and sampling, shared by the graphs of all shapes."""

    model: Model
    attention: PagedAttention
    sampling: SamplingOps
    newest: Tensor
    """int64 [max_num_seqs + 1]: last sampled token of each row. The last entry is for padding."""
    block_size: int
    max_model_len: int
    num_blocks: Sequence[int]
    """Number of blocks in the pool, for each cache group."""
    ranks: Ranks = ONE_RANK
    adapters: ModelAdapters | None = None
    """The model's adapters, for graphs of steps with adapters. None for graphs of steps without adapters."""
    logits: Tensor | None = None
    """[largest batch, vocab_size]: shared buffer. Every graph writes its logits to the buffer's first rows."""

    @property
    def filters(self) -> bool:
        """True if graphs have a second part for `Draws.filters`, which steps without filters do not launch."""
        return self.sampling.choose is not None and self.sampling.filter is not None

    @property
    def padding_row(self) -> int:
        """Index of the entry of `newest` that is for padding."""
        return len(self.newest) - 1


_ALIGN = 4  # Fields and planes begin at multiples of this many elements, 16 bytes or more, as kernels may assume
PADDING_CONTEXT = 1
"""Number of cached tokens of a padding sequence in a verification. The sequence reads the pool's first blocks and writes
nothing."""

Field = TypeVar("Field")
_Ints = NDArray[numpy.int32]


class StepFields(NamedTuple, Generic[Field]):
    """Inputs of a captured step with n sequences in g cache groups. A verification has w query tokens per sequence, a prefill has
    t tokens."""

    ids: Field
    """int64 [n, w] or [t]: token ids. A decode reads its tokens from device memory instead. In a verification, the drafts follow
    tokens that the host has read."""
    keys: Field
    """int64 [n], [n, w] or [1]: keys of the draws."""
    slots: Field
    """int64 [g, n], [g, n, w] or [g, t]: slots to which keys and values are written. -1 means no write."""
    rows: Field
    """int64 [n]: each sequence's row in `ModelStep.newest`."""
    recomputed: Field
    """int64 [n], verification: number of query tokens of each sequence that are recomputed. They precede the new tokens."""
    last: Field
    """int64 [1], prefill: index of the prompt's last token."""
    positions: Field
    """int32 [n] or [n, w]: positions of the query tokens."""
    scales: Field
    """float32, in the shape of `keys`: 1 / temperature of the draws. 0 means greedy sampling."""
    filters: Field
    """float32 [4, ...], the last dimensions in the shape of `keys`: one `TokenFilter` per key."""
    seq_lens: Field
    """int32 [n]: sequence lengths, new tokens included."""
    context_lens: Field
    """int32 [n], verification: number of cached tokens. A decode uses its positions instead."""
    tables: Field
    """int32 [g, n, blocks]: block tables."""
    states: Field
    """int32 [n], decode or verification with state layers: slot of each sequence's state. -1 for padding."""
    adapters: Field
    """int32 [n], [n, w] or [t], if sequences may have adapters: slot of each token's adapter. NO_ADAPTER for tokens without an
    adapter and for padding."""
    out_states: Field
    """int32 [n, w], verification with state layers: `StateMetadata.out_slots`. A decode updates each state in place, so it does
    not need this field."""


Shapes = StepFields[tuple[int, ...]]
_INT, _LONG, _FLOAT = torch.int32, torch.int64, torch.float32
_DTYPES = StepFields(*[*[_LONG] * 6, _INT, _FLOAT, _FLOAT, *[_INT] * 6])
_PLANES = StepFields(*[name in ("slots", "filters", "tables") for name in StepFields._fields])
"""For each field, True if its first dimension is split into separately aligned planes."""
_EMPTY: Shapes = StepFields(*[(0,)] * len(_DTYPES))


def _spans(shapes: Shapes) -> Iterator[tuple[slice, torch.dtype, int, int, tuple[int, ...]]]:
    """Yield (span, dtype, number of planes, stride, shape) of each field. The span is in int32 elements of the buffer, the stride
    between planes in elements of the dtype."""
    end = 0
    for dtype, planes, shape in zip(_DTYPES, _PLANES, shapes, strict=True):
        count = shape[0] if planes else 1
        stride = _aligned(math.prod(shape) // count)
        start, end = end, end + count * stride * dtype.itemsize // 4
        yield slice(start, end), dtype, count, stride, shape


def _views(flat: Tensor, shapes: Shapes) -> StepFields[Tensor]:
    return StepFields(
        *(
            flat[span].view(dtype).view(count, stride)[:, : math.prod(shape) // count].view(shape)
            for span, dtype, count, stride, shape in _spans(shapes)
        )
    )


def _length(shapes: Shapes) -> int:
    length: int = max(span.stop for span, *_ in _spans(shapes))
    return length


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


class HostInputs:
    """Host memory from which a step's inputs are sent, divided into arrays of one layout at a time."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._shapes: Shapes | None = None
        self._layouts: dict[Shapes, tuple[StepFields[Tensor], StepFields[NDArray[Any]], Tensor]] = {}
        """Layout -> (fields, arrays, part of the memory to send). Cached, because making them takes longer than filling them."""

    def lay_out(self, shapes: Shapes) -> None:
        """Divide the memory into arrays of these shapes, unless it already has this layout."""
        if self._shapes == shapes:
            return
        self._shapes = shapes
        if shapes not in self._layouts:
            fields = _views(self._flat, shapes)
            self._layouts[shapes] = fields, StepFields(*(field.numpy() for field in fields)), self._flat[: _length(shapes)]
        self.fields, self.arrays, self.sent = self._layouts[shapes]
        self.mirrored = MirroredTables(self.arrays.tables)


class StaticInputs:
    """Device buffer for the inputs of one kind of graph, and two pinned host buffers: one is filled while the other is being
    sent."""

    def __init__(self, step: ModelStep, shapes: Iterable[Shapes]) -> None:
        device, length = step.newest.device, max(map(_length, shapes))
        self.buffer = torch.zeros(length, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host = [HostInputs(torch.zeros(length, dtype=torch.int32, pin_memory=pinned)) for _ in range(2)]
        self._step = step

    def fields(self, shapes: Shapes) -> StepFields[Tensor]:
        """Return the fields of the device buffer in this layout."""
        return _views(self.buffer, shapes)

    def _next(self, shapes: Shapes) -> HostInputs:
        """Return the host buffer that is not in use. A step's copy is done before the second step after it is launched."""
        self._host.reverse()
        self._host[0].lay_out(shapes)
        return self._host[0]

    def _send(self, host: HostInputs) -> StepFields[Tensor]:
        """Start the copy to the device. Returns the sent fields in host memory."""
        self.buffer[: len(host.sent)].copy_(host.sent, non_blocking=True)
        return host.fields


def decode_shapes(step: ModelStep, size: int, *width: int) -> Shapes:
    """Return the layout of a decode of `size` sequences. width: number of query tokens per sequence, given only for a
    verification."""
    groups, tokens = len(step.num_blocks), (size, *width)
    return _EMPTY._replace(
        keys=tokens,
        slots=(groups, *tokens),
        rows=(size,),
        positions=tokens,
        scales=tokens,
        filters=(len(NO_FILTER), *tokens),
        seq_lens=(size,),
        tables=(groups, size, _aligned(-(-step.max_model_len // step.block_size))),
        states=(size,) if step.attention.states is not None else (0,),
        adapters=tokens if step.adapters is not None else (0,),
    )


class DecodeInputs(StaticInputs):
    """Inputs of decode steps."""

    def fill(
        self,
        shapes: Shapes,
        rows: _Ints,
        positions: _Ints,
        tables: HostBlockTables,
        draws: Draws | None = None,
        states: _Ints | None = None,
        adapters: _Ints | None = None,
    ) -> StepFields[Tensor]:
        """Send a step to the device. Returns its fields in host memory.

        rows, positions, states, adapters: int32 [num_seqs]. The remaining sequences of the layout are padding, with length 0,
        slots of -1 and the token of the padding row.
        """
        host, count = self._next(shapes), len(rows)
        to = host.arrays
        to.rows[:count], to.rows[count:] = rows, self._step.padding_row
        to.positions[:count], to.positions[count:] = positions, 0
        numpy.add(positions, 1, out=to.seq_lens[:count])
        to.seq_lens[count:] = 0
        if draws is None:
            to.scales[:] = 0  # 0 is greedy
        else:
            to.scales[:count], to.keys[:count] = draws.scales, draws.keys
            to.scales[count:] = 0
            if draws.filters is not None:  # else the graph does not read them
                to.filters[:, :count], to.filters[:, count:] = draws.filters, 0
        for group, slots in enumerate(to.slots):
            slots[:count], slots[count:] = tables.slots(rows, positions, self._step.block_size, group), -1
        if states is not None:
            to.states[:count], to.states[count:] = states, -1
        if adapters is not None:
            to.adapters[:count], to.adapters[count:] = adapters, NO_ADAPTER
        host.mirrored.fill(to.rows, tables)
        return self._send(host)


def prefill_shapes(step: ModelStep, size: int) -> Shapes:
    """Return the layout of one prompt of `size` tokens."""
    groups = len(step.num_blocks)
    return _EMPTY._replace(
        ids=(size,),
        keys=(1,),
        slots=(groups, size),
        rows=(1,),
        last=(1,),
        scales=(1,),
        filters=(len(NO_FILTER), 1),
        tables=(groups, 1, -(-size // step.block_size)),
        adapters=(size,) if step.adapters is not None else (0,),
    )


class PrefillInputs(StaticInputs):
    """Inputs of single prompts."""

    def fill(self, shapes: Shapes, step: StepInput, tables: HostBlockTables, draws: Draws | None) -> StepFields[Tensor]:
        """Send a prompt to the device. Padding has token 0 and slot -1. Returns the sent fields in host memory."""
        host, count, row = self._next(shapes), step.num_tokens, int(step.rows[0])
        to = host.arrays
        to.ids[:count], to.ids[count:] = step.token_ids, 0
        if step.adapters is not None:
            to.adapters[:] = step.adapters[0]
        to.rows[0], to.last[0], to.keys[0], to.scales[0] = row, count - 1, 0, 0  # a scale of 0 is greedy
        if draws is not None:
            to.keys[:], to.scales[:] = draws.keys, draws.scales
            if draws.filters is not None:  # else the graph does not read them
                to.filters[:] = draws.filters
        rows, positions = numpy.full(count, row, dtype=numpy.int32), numpy.arange(count, dtype=numpy.int32)
        for group, slots in enumerate(to.slots):
            slots[:count], slots[count:] = tables.slots(rows, positions, self._step.block_size, group), -1
        host.mirrored.fill(to.rows, tables)
        return self._send(host)


def verify_shapes(step: ModelStep, size: int, width: int) -> Shapes:
    """Return the layout of a verification of `size` sequences with `width` query tokens each."""
    return decode_shapes(step, size, width)._replace(
        ids=(size, width),
        recomputed=(size,),
        context_lens=(size,),
        out_states=(size, width) if step.attention.states is not None else (0,),
    )


class VerifyInputs(StaticInputs):
    """Inputs of steps that verify drafts.

    A sequence with fewer query tokens than the layout's width is padded *before* its new tokens: some cached tokens are
    recomputed, and their results are neither stored nor read. Lengths thus stay exact, no position is past a sequence's end, and
    no other sequence's key is read. A sequence needs at least as many tokens as the width. Layers with a state skip the
    recomputed tokens; see `StateMetadata.recomputed`.
    """

    def fill(
        self, shapes: Shapes, step: StepInput, rows: _Ints, positions: _Ints, tables: HostBlockTables, draws: Draws | None
    ) -> StepFields[Tensor]:
        """Send a step to the device. Returns its fields in host memory. rows, positions: int32 [num_tokens]. draws: None means
        greedy sampling."""
        assert step.token_ids.min() >= 0, "drafts follow tokens that have been read"
        host, count, (size, width) = self._next(shapes), step.num_seqs, shapes.ids
        to = host.arrays
        new = None if step.num_tokens == size * width else new_tokens(step, width)
        if new is not None:
            for array, nothing in ((to.ids, 0), (to.keys, 0), (to.scales, 0), (to.filters, 0), (to.slots, -1)):  # 0 is greedy
                array.fill(nothing)

        def put(array: NDArray[Any], numbers: NDArray[Any]) -> None:
            """Write the values of the new tokens into an array [size, width]."""
            if new is None:
                array[:] = numbers.reshape(array.shape)
            else:
                array[:count][new] = numbers

        put(to.ids, step.token_ids)
        to.rows[:count], to.rows[count:] = step.rows, self._step.padding_row
        to.recomputed[:count], to.recomputed[count:] = width - step.query_lens, 0
        if step.adapters is not None:
            to.adapters[:count], to.adapters[count:] = step.adapters[:, None], NO_ADAPTER
        to.seq_lens[:count], to.seq_lens[count:] = step.context_lens + step.query_lens, PADDING_CONTEXT + width
        numpy.subtract(to.seq_lens, width, out=to.context_lens)
        numpy.add(to.context_lens[:, None], numpy.arange(width, dtype=numpy.int32), out=to.positions)
        if draws is None or not (draws.scales.any() or draws.filters is not None):
            to.scales.fill(0)  # the keys are not read then
        else:
            put(to.keys, draws.keys)
            put(to.scales, draws.scales)
            if draws.filters is not None:
                for array, numbers in zip(to.filters, draws.filters, strict=True):
                    put(array, numbers)
        for group, slots in enumerate(to.slots):
            put(slots, tables.slots(rows, positions, self._step.block_size, group))
        states = self._step.attention.states
        if states is not None:
            to.states[count:], to.out_states[count:] = -1, -1
            to.states[:count], to.out_states[:count] = states.slots_of_step(step, width)
        host.mirrored.fill(to.rows, tables)
        return self._send(host)


def new_tokens(step: StepInput, width: int) -> NDArray[numpy.bool_]:
    """Return bool [num_seqs, width], True for those query tokens of a verification that are new tokens of the step."""
    new: NDArray[numpy.bool_] = numpy.arange(width) >= width - step.query_lens[:, None]
    return new
