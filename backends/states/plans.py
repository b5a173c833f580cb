"""Plans of the state backend `torch`. A plan lists the rows to compute together in batched operations, and the states to
write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.kernel import upload
from headway.core.contract.state import CHECKPOINT_TOKENS, StateMetadata


@dataclass(frozen=True, slots=True)
class Writes:
    """A write of states: the rows of a block whose states are written, and the slots of these states."""

    rows: Tensor
    """int64 [m]: rows of the block."""
    slots: Tensor
    """int [m]: slot of each row's state."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive chunks of a block's sequences, computed at once. Tokens [n, L] are rows of the step's packed tokens."""

    tokens: Tensor
    """int64 [n * L]: token rows. A sequence's last token is repeated as padding."""
    valid: Tensor | None
    """bool [n, L]: False for padding. None means no padding."""
    places: Tensor | None
    """int64: positions, in the flattened [n * L], of tokens that are not padding. None means without padding."""
    targets: Tensor
    """int64: row of the packed output for each position in `places`."""
    length: int
    checkpoints: Mapping[int, Writes]
    """Index of a chunk in the segment -> states to write after that chunk."""


@dataclass(frozen=True, slots=True)
class SequenceBlock:
    """Sequences of similar length that run in parallel."""

    sequences: Tensor
    """int64 [n]: indices of the sequences in the step."""
    slots: Tensor
    """int [n]: slots of the initial states."""
    empty: Tensor | None
    """bool [n]: True for sequences that start from zeros. None if every sequence has an initial state."""
    chunk: int
    segments: Sequence[Segment]
    last: Writes


@dataclass(frozen=True, slots=True)
class Remembered:
    """Convolution states that a scan writes. The fields correspond to arguments of `remembered` in torch_states.py."""

    at: Tensor
    from_history: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """Plan of one prefill or extend step."""

    blocks: Sequence[SequenceBlock]
    slots: Tensor
    """int [num_seqs]: slot from which each sequence's state is read."""
    empty: Tensor | None
    """bool [num_seqs]: True for sequences that start from zeros. None if every sequence has an initial state."""
    remembered: Remembered | None
    """Convolution states to write. None if the layer has no convolution, or no state is written."""


@dataclass(frozen=True, slots=True)
class Room:
    """Limits on the amount of data that is computed at once."""

    tokens: int
    sequences: int


def plan_scan(metadata: StateMetadata, conv_width: int, room: Room) -> ScanPlan:
    """Return the plan for sequences in PREFILL or EXTEND. conv_width: 0 means no convolution."""
    device, step = metadata.slots.device, metadata.step
    lens, starts = step.query_lens, step.query_start_loc_cpu.tolist()
    reads = metadata.slots_cpu.tolist()
    fresh = [kv <= query for query, kv in zip(lens, step.kv_lens, strict=True)]
    finals: list[int] = metadata.out_slots_cpu[:, 0].tolist()
    marks = [] if metadata.checkpoints_cpu is None else metadata.checkpoints_cpu.tolist()
    order = sorted((row for row in range(len(lens)) if reads[row] >= 0 and lens[row]), key=lambda row: -lens[row])
    host = _Host(device, starts, lens, fresh, finals, marks)
    blocks = [_block(metadata, host, rows, room.tokens) for rows in _alike(order, lens, room.sequences)]
    # Sequence, number of tokens before the stored state, and index of the slot in out_slots followed by checkpoints.
    kept = [(row, lens[row], row) for row in order if finals[row] >= 0]
    kept += [(row, tokens, len(lens) + index) for index, (row, tokens, slot) in enumerate(marks) if slot >= 0 and reads[row] >= 0]
    remembered = None
    if conv_width and kept:
        slots = (
            metadata.out_slots[:, 0]
            if metadata.checkpoints is None
            else torch.cat((metadata.out_slots[:, 0], metadata.checkpoints[:, 2]))
        )
        at, old = _windows([(row, starts[row], tokens) for row, tokens, _ in kept], conv_width)
        chosen = upload(torch.tensor([place for _, _, place in kept]), device)
        remembered = Remembered(upload(at, device), upload(old, device), slots.index_select(0, chosen))
    return ScanPlan(blocks, metadata.slots, upload(torch.tensor(fresh), device) if any(fresh) else None, remembered)


def _alike(order: Sequence[int], lens: Sequence[int], most: int) -> Iterator[list[int]]:
    """Split sequences, longest first, into blocks. The shortest sequence of a block fills more than half of the block's padded
    length."""
    block: list[int] = []
    for row in order:
        if block and (len(block) == most or 2 * lens[row] <= _padded(lens[block[0]])):
            yield block
            block = []
        block.append(row)
    if block:
        yield block


def _padded(length: int) -> int:
    """Return the length, in tokens, to which a sequence's block is padded if the sequence is the longest in its block."""
    if length >= CHECKPOINT_TOKENS:
        return -(-length // CHECKPOINT_TOKENS) * CHECKPOINT_TOKENS
    return 1 << (length - 1).bit_length()


def _windows(kept: Sequence[tuple[int, int, int]], width: int) -> tuple[Tensor, Tensor]:
    """Return the arguments `at` and `from_history` of `remembered` in torch_states.py, which are the positions of the
    convolution's last inputs.

    kept: for each state to write, (sequence, the sequence's first packed token, number of tokens before the state).
    """
    sequence, start, tokens = torch.tensor(kept).unbind(1)
    position = tokens[:, None] - (width - 1) + torch.arange(width - 1)
    old = position < 0
    return torch.where(old, sequence[:, None] * (width - 1) + (width - 1) + position, start[:, None] + position), old


class _Host(NamedTuple):
    """Data of a step's sequences on the host."""

    device: torch.device
    starts: Sequence[int]  # Index of the first packed token
    lens: Sequence[int]  # Number of new tokens
    fresh: Sequence[bool]  # True without context
    finals: Sequence[int]  # Slot of the state after the last token; negative means none
    marks: Sequence[Sequence[int]]  # Rows of `StateMetadata.checkpoints` in this step


def _block(metadata: StateMetadata, host: _Host, rows: Sequence[int], most_tokens: int) -> SequenceBlock:
    device = host.device
    sequences = upload(torch.tensor(rows), device)
    longest = _padded(host.lens[rows[0]])
    chunk = min(longest, CHECKPOINT_TOKENS)
    span = max(most_tokens // len(rows) // chunk, 1) * chunk
    segments = []
    for first in range(0, longest, span):
        length = min(span, longest - first)
        segments.append(_segment(host, rows, first, length, _checkpoints(metadata, host.marks, rows, first, length)))
    kept = [place for place, row in enumerate(rows) if host.finals[row] >= 0]
    places = upload(torch.tensor(kept, dtype=torch.int64), device)
    empty = [host.fresh[row] for row in rows]
    return SequenceBlock(
        sequences,
        metadata.slots.index_select(0, sequences),
        upload(torch.tensor(empty), device) if any(empty) else None,
        chunk,
        segments,
        Writes(places, metadata.out_slots[:, 0].index_select(0, sequences.index_select(0, places))),
    )


def _segment(host: _Host, rows: Sequence[int], first: int, length: int, checkpoints: Mapping[int, Writes]) -> Segment:
    device = host.device
    begin = torch.tensor([host.starts[row] for row in rows])[:, None]
    size = torch.tensor([host.lens[row] for row in rows])[:, None]
    position = first + torch.arange(length)[None]
    valid = position < size
    tokens = (begin + torch.minimum(position, size - 1)).flatten()
    whole = bool(valid.all())
    places = valid.flatten().nonzero().squeeze(1)
    tokens_there = upload(tokens, device)
    return Segment(
        tokens_there,
        None if whole else upload(valid, device),
        None if whole else upload(places, device),
        tokens_there if whole else upload(tokens[places], device),
        length,
        checkpoints,
    )


def _checkpoints(
    metadata: StateMetadata, marks: Sequence[Sequence[int]], rows: Sequence[int], first: int, length: int
) -> dict[int, Writes]:
    """Return the states to write after each chunk of a segment. marks: rows of `StateMetadata.checkpoints` on the host."""
    place = {row: number for number, row in enumerate(rows)}
    found: dict[int, list[int]] = {}
    for index, (row, tokens, slot) in enumerate(marks):
        if row in place and slot >= 0 and first < tokens <= first + length:
            found.setdefault((tokens - first) // CHECKPOINT_TOKENS - 1, []).append(index)
    if not found:
        return {}
    assert metadata.checkpoints is not None
    device = metadata.slots.device
    return {
        chunk: Writes(
            upload(torch.tensor([place[marks[index][0]] for index in indices]), device),
            metadata.checkpoints[:, 2].index_select(0, upload(torch.tensor(indices), device)),
        )
        for chunk, indices in found.items()
    }


@dataclass(frozen=True, slots=True)
class StepBlock:
    """Consecutive sequences in DECODE, computed at once."""

    rows: slice
    empty: Tensor | None
    """bool [n]: True for sequences that start from zeros. None if the plan is captured, or if every sequence has an initial
    state."""
    writes: Sequence[Writes]
    """States to write after each of the L tokens. Empty if the plan is captured, or if states are updated in place."""
    in_place: slice | None = None
    """Range of the slots if they are consecutive and every state is written back to the slot from which it was read. Otherwise
    None."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one decode step, with [num_seqs, L] tokens."""

    metadata: StateMetadata
    length: int
    """Maximum number of new tokens per sequence."""
    captured: bool
    """True if slots are known only when a CUDA graph is replayed."""
    tokens: Tensor | None
    """int64 [num_seqs * L]: packed rows, padded with a sequence's last token. None if every sequence has L tokens."""
    places: Tensor | None
    """int64 [num_decode_tokens]: position of each packed token in [num_seqs * L]. None if every sequence has L tokens."""
    blocks: Sequence[StepBlock]

    def order(self) -> tuple[Tensor | None, Tensor | None]:
        """Return `tokens` and `places`. If `recomputed` is set, each sequence's recomputed tokens are skipped, so its new tokens
        come first."""
        recomputed = self.metadata.recomputed
        if recomputed is None:
            return self.tokens, self.places
        column = torch.arange(self.length, device=recomputed.device)
        row = self.length * torch.arange(len(recomputed), device=recomputed.device)[:, None]
        tokens = row + (column + recomputed[:, None]).clamp(max=self.length - 1)
        places = row + (column - recomputed[:, None]).clamp(min=0)
        return tokens.flatten(), places.flatten()


def plan_step(metadata: StateMetadata, room: Room, captured: bool) -> StepPlan:
    """Return the plan for sequences in DECODE. Padding is known on the host; slots may be known only on the device."""
    device, step = metadata.slots.device, metadata.step
    lens = step.query_lens
    longest = max(lens)
    tokens = places = None
    if min(lens) != longest:
        size = torch.tensor(lens)[:, None]
        position = torch.arange(longest)[None]
        tokens = upload((step.query_start_loc_cpu[:-1, None] + torch.minimum(position, size - 1)).flatten().long(), device)
        places = upload((position < size).flatten().nonzero().squeeze(1), device)
    assert tokens is None or not captured, "a captured step has sequences of one length"
    blocks = []
    for first in range(0, len(lens), room.sequences):
        rows = slice(first, min(first + room.sequences, len(lens)))
        empty, writes, in_place = None, [], None
        if not captured:
            in_place = _in_place(metadata, rows) if longest == 1 else None
            fresh = [kv <= query for query, kv in zip(lens[rows], step.kv_lens[rows], strict=True)]
            empty = upload(torch.tensor(fresh), device) if any(fresh) else None
            writes = [_after_token(metadata, rows, lens, token) for token in range(longest if in_place is None else 0)]
        blocks.append(StepBlock(rows, empty, writes, in_place))
    return StepPlan(metadata, longest, captured, tokens, places, blocks)


def _in_place(metadata: StateMetadata, rows: slice) -> slice | None:
    """Return `StepBlock.in_place`. On a GPU it is None, because the host's copy of the slots may be out of date."""
    if metadata.slots.device.type != "cpu":
        return None
    reads: list[int] = metadata.slots_cpu[rows].tolist()
    follow = reads[0] >= 0 and reads == [*range(reads[0], reads[0] + len(reads))]
    return slice(reads[0], reads[0] + len(reads)) if follow and reads == metadata.out_slots_cpu[rows, 0].tolist() else None


def _after_token(metadata: StateMetadata, rows: slice, lens: Sequence[int], token: int) -> Writes:
    host, reads = metadata.out_slots_cpu[rows], metadata.slots_cpu[rows].tolist()
    chosen = host[:, token].tolist() if token < host.shape[1] else [-1] * len(reads)
    kept = [
        row
        for row, (slot, read, length) in enumerate(zip(chosen, reads, lens[rows], strict=True))
        if slot >= 0 and read >= 0 and token < length
    ]
    places = upload(torch.tensor(kept, dtype=torch.int64), metadata.slots.device)
    column = metadata.out_slots[rows, min(token, host.shape[1] - 1)]
    return Writes(places, column.index_select(0, places))
