"""A step of layers with states, laid out for batched products: which rows are computed together, and what is written where."""

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
    """States that are written at one moment: those of some rows of a block, to their slots."""

    rows: Tensor
    """int64 [m]: rows of the block."""
    slots: Tensor
    """int [m]"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring chunks of a block's sequences, computed at once: tokens [n, L], as rows of the step's packed tokens."""

    tokens: Tensor
    """int64 [n * L]; past a sequence's end its last token stands, so that nothing foreign is read."""
    valid: Tensor | None
    """bool [n, L]: which of them are tokens; None: all."""
    places: Tensor | None
    """int64: which of the n * L are tokens; None: all."""
    targets: Tensor
    """int64: the packed row of each of those, for the output."""
    length: int
    checkpoints: Mapping[int, Writes]
    """What is written after each of the segment's chunks."""


@dataclass(frozen=True, slots=True)
class SequenceBlock:
    """Sequences of about one length, which run side by side."""

    sequences: Tensor
    """int64 [n]: sequences of the step."""
    slots: Tensor
    """int [n]: the slots with which they begin."""
    empty: Tensor | None
    """bool [n]: which begin with zeros; None: none."""
    chunk: int
    segments: Sequence[Segment]
    last: Writes


@dataclass(frozen=True, slots=True)
class Remembered:
    """States of the convolution that a scan writes; see `remembered` in torch_states.py."""

    at: Tensor
    from_history: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """One step's prompts."""

    blocks: Sequence[SequenceBlock]
    slots: Tensor
    """int [num_seqs]: where each sequence's state is read."""
    empty: Tensor | None
    """bool [num_seqs]"""
    remembered: Remembered | None
    """None where the layer has no convolution, or nothing is written."""


@dataclass(frozen=True, slots=True)
class Room:
    """The most that is computed at once."""

    tokens: int
    sequences: int


def plan_scan(metadata: StateMetadata, conv_width: int, room: Room) -> ScanPlan:
    """Lay out a view of sequences that prefill or extend. conv_width: 0 without a convolution."""
    device, step = metadata.slots.device, metadata.step
    lens, starts = step.query_lens, step.query_start_loc_cpu.tolist()
    reads = metadata.slots_cpu.tolist()
    fresh = [kv <= query for query, kv in zip(lens, step.kv_lens, strict=True)]
    finals: list[int] = metadata.out_slots_cpu[:, 0].tolist()
    marks = [] if metadata.checkpoints_cpu is None else metadata.checkpoints_cpu.tolist()
    order = sorted((row for row in range(len(lens)) if reads[row] >= 0 and lens[row]), key=lambda row: -lens[row])
    host = _Host(device, starts, lens, fresh, finals, marks)
    blocks = [_block(metadata, host, rows, room.tokens) for rows in _alike(order, lens, room.sequences)]
    # Sequence, tokens after which its state is kept, and where the slot stands: in out_slots, or behind, among checkpoints.
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
    """Cut sequences, the longest first, into blocks whose shortest fills more than half of what its longest needs."""
    block: list[int] = []
    for row in order:
        if block and (len(block) == most or 2 * lens[row] <= _padded(lens[block[0]])):
            yield block
            block = []
        block.append(row)
    if block:
        yield block


def _padded(length: int) -> int:
    """The tokens that a sequence takes in its block."""
    if length >= CHECKPOINT_TOKENS:
        return -(-length // CHECKPOINT_TOKENS) * CHECKPOINT_TOKENS
    return 1 << (length - 1).bit_length()


def _windows(kept: Sequence[tuple[int, int, int]], width: int) -> tuple[Tensor, Tensor]:
    """Where the inputs lie that a convolution remembers after some tokens; see `remembered` in torch_states.py.
    kept: (sequence, its first packed token, number of tokens) of each state."""
    sequence, start, tokens = torch.tensor(kept).unbind(1)
    position = tokens[:, None] - (width - 1) + torch.arange(width - 1)
    old = position < 0
    return torch.where(old, sequence[:, None] * (width - 1) + (width - 1) + position, start[:, None] + position), old


class _Host(NamedTuple):
    """What the host knows of each sequence of a step."""

    device: torch.device
    starts: Sequence[int]  # First packed token
    lens: Sequence[int]  # New tokens
    fresh: Sequence[bool]  # Whether there is no context
    finals: Sequence[int]  # Slot after the last token; below 0: none
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
    """What is written after each chunk of a segment; `marks`: the host's rows of `StateMetadata.checkpoints`."""
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
    """Neighbouring sequences that decode, computed at once."""

    rows: slice
    empty: Tensor | None
    """bool [n]: which begin with zeros; None: none, or the plan is `captured`."""
    writes: Sequence[Writes]
    """After each of the L tokens; nothing where the plan is `captured`, or states are changed in place."""
    in_place: slice | None = None
    """The slots, where they follow one another and every state goes back to where it came from; None: anything else."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's decodes: [num_seqs, L] tokens."""

    metadata: StateMetadata
    length: int
    """Most new tokens of a sequence."""
    captured: bool
    """Whether slots are known only when a graph is replayed."""
    tokens: Tensor | None
    """int64 [num_seqs * L]: packed rows, a sequence's last token past its end; None where all have L tokens: row by row."""
    places: Tensor | None
    """int64 [num_decode_tokens]: where the packed tokens stand in [num_seqs * L]; None likewise."""
    blocks: Sequence[StepBlock]

    def order(self) -> tuple[Tensor | None, Tensor | None]:
        """Return `tokens` and `places`; where a graph finds them out at its replay, each row's new tokens come first."""
        recomputed = self.metadata.recomputed
        if recomputed is None:
            return self.tokens, self.places
        column = torch.arange(self.length, device=recomputed.device)
        row = self.length * torch.arange(len(recomputed), device=recomputed.device)[:, None]
        tokens = row + (column + recomputed[:, None]).clamp(max=self.length - 1)
        places = row + (column - recomputed[:, None]).clamp(min=0)
        return tokens.flatten(), places.flatten()


def plan_step(metadata: StateMetadata, room: Room, captured: bool) -> StepPlan:
    """Lay out a view of sequences that decode; padding is known on the host, the slots only on the device while steps run."""
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
    """See `StepBlock.in_place`. On a GPU what the host knows of the slots may be a guess."""
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
