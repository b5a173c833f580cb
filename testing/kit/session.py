"""Backend driven by the engine's attention: sequences start, grow and end in a paged pool, and every step is checked.

Outputs are compared with float64, and all memory that the backend must not change is compared bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.execution.attention import PagedAttention
from headway.core.oracle.cells import CheckCell, Finding
from headway.core.oracle.inputs import Numbers
from headway.core.oracle.oracle import StepSequence, distance, expected
from headway.core.oracle.steps import (
    GUARD,
    UNWRITTEN,
    Before,
    CellErrors,
    Layers,
    StepInputs,
    StepTensors,
    StepWork,
    Tokens,
    bits,
    first_far,
)
from headway.core.select.request import LayerSpecs
from headway.testing.diagnosis.guess import Wrong, guess
from headway.testing.diagnosis.places import wrong_parts, wrong_sequences
from headway.testing.kit.subject import AttentionSubject

_ZERO_AT = 6
"""Number of blocks that are allocated before block 0, if block 0 is used. Block 0 then belongs to a longer sequence but is not
its last block."""
_REMEMBERED = 4
"""Number of latest steps whose lengths and blocks are stored."""
_NULL = 1
"""Index of the block of zeros that replaces blocks before the window in a block table, unless block 0 is the block of zeros."""


class SessionRoom(NamedTuple):
    """Capacity of a session's cache and step tensors."""

    num_blocks: int
    """Number of cache blocks for the session's sequences."""
    max_tokens: int
    """Maximum number of tokens per step."""
    layers: int


class Session:
    """Backend instances for both parts of a step, and the caches of a few layers that share every plan.

    q, k, v and out have the same addresses in every step, as in an engine. Blocks are allocated in random order without block 0.
    Because a table is padded with zeros, a kernel that reads past a sequence's end reads poison. Blocks before a sliding window
    are freed and replaced by a block of zeros.

    With `zero_in_use`, as in an engine's pool, block 0 is used like any other block or, with a window, is the block of zeros. All
    tables of one shape then have the same address.
    """

    def __init__(
        self,
        subject: AttentionSubject,
        cell: CheckCell,
        spec: AttentionSpec,
        parts: tuple[AttentionBackend, AttentionBackend],
        room: SessionRoom,
        poison: float,
    ) -> None:
        """cell: determines the cache, the scores and the work. parts: backends for prompts and for decode. poison: value of every
        slot without a token."""
        memory, zero_in_use = cell.memory, cell.work in ("many", "again") or cell.check == "steps"
        layout, writer = subject.layouts[cell.layout], subject.writer(cell.layout)
        self.guesses = True
        """True if failures include a likely cause."""
        self.errors = CellErrors()
        """Errors of the checked steps."""
        self.spec = spec
        self.block_size = cell.block_size
        self.layouts = list(subject.layouts.values())
        """All layouts that a backend may confuse with the session's layout."""
        self.memory = memory
        self.prefill = parts[0]
        self.decode = parts[1]
        spare = 4
        before = (first_far(spec, cell.block_size) if memory == "far" else 0) + _NULL + 1
        self._null = 0 if zero_in_use and memory != "far" and spec.sliding_window is not None else _NULL
        self.num_blocks = room.num_blocks + before + spare
        self.layers = Layers(
            spec, layout, self.num_blocks, cell.block_size, writer, memory=memory, layers=room.layers, poison=poison
        )
        self.generator = torch.Generator().manual_seed(0)
        self.numbers = Numbers(spec, cell.scores, self.generator)
        self._wide_tables = cell.work == "tables"
        """True if a block table is a slice of a wider table, whose other columns name no block."""
        self._contexts: list[tuple[list[int], Tensor]] = []
        """(blocks, cached positions) of sequences whose cached keys and values are not yet written."""
        self._tables: dict[tuple[int, ...], Tensor] | None = {} if zero_in_use else None
        """Shape of a block table -> memory that is reused for all tables of this shape. None means new memory for each table."""
        for foreign in (*self.layers.given, *self.layers.right):
            foreign.fill_blocks([self._null], 0.0)
        order = torch.randperm(room.num_blocks, generator=self.generator) + before
        self._free: list[int] = order.tolist()
        if zero_in_use and memory != "far" and self._null:
            self._free.insert(_ZERO_AT, 0)
        self.attention = PagedAttention(
            LayerSpecs([spec] * room.layers), [foreign.cache for foreign in self.layers.given], writer
        )
        self.buffers = [StepInputs.allocate(spec, room.max_tokens, merged=layer % 2 == 1) for layer in range(room.layers)]
        self.previous: list[list[int]] = []
        """kv_len of each row, for the first step and for the most recent steps."""
        self.previous_blocks: list[list[tuple[int, ...]]] = []
        """Blocks of each row, for the same steps as in `previous`."""
        self.planned = 0
        """Maximum kv_len for which a captured decode was planned; 0 means no captured decode."""

    @property
    def backends(self) -> tuple[Mapping[AttentionSpec, AttentionBackend], Mapping[AttentionSpec, AttentionBackend]]:
        """Backends for the first and the second part of a step, as the engine passes them."""
        return {self.spec: self.prefill}, {self.spec: self.decode}

    @property
    def instances(self) -> list[AttentionBackend]:
        """Backend instances of both parts."""
        return [self.prefill, self.decode]

    def open(self, context: int, share: Tokens | None = None) -> Tokens:
        """Return a sequence with `context` cached tokens. share: sequence whose full blocks are reused, as after a prefix
        cache hit."""
        seq = Tokens()
        if share is not None:
            shared = min(share.length, context) // self.block_size
            seq.blocks = share.blocks[:shared]
            seq.length = shared * self.block_size
        if context > seq.length:
            self.reserve(seq, context)
            self._contexts.append((seq.blocks, torch.arange(seq.length, context)))
            seq.length = context
        return seq

    def _write_contexts(self) -> None:
        if not self._contexts:
            return
        positions = torch.cat([at for _, at in self._contexts])
        blocks = torch.cat([torch.tensor(blocks)[at // self.block_size] for blocks, at in self._contexts])
        self._contexts.clear()
        slots = (blocks * self.block_size + positions % self.block_size).to(self.spec.device)
        for layer in range(len(self.buffers)):
            k, v = self.numbers.rows(positions)
            self.layers.write(layer, k, v, slots, given=True)

    def reserve(self, seq: Tokens, length: int) -> None:
        """Allocate blocks until a sequence has room for `length` tokens."""
        while len(seq.blocks) * self.block_size < length:
            seq.blocks.append(self._free.pop(0))

    def close(self, seq: Tokens) -> None:
        """Free a sequence's blocks."""
        self._write_contexts()
        self.layers.forget(seq.blocks)
        self._free += seq.blocks

    def lay_out(self, work: StepWork, padding_rows: int = 0, padding_len: int = 1) -> StepTensors:
        """Return a step with metadata, random inputs, and the sequences in their state after the step. The step's keys and values
        are not yet written to the caches. padding_len: number of query tokens of a padding row."""
        self._write_contexts()
        metadata = self._metadata(work, padding_rows, padding_len)
        padding = padding_rows * padding_len
        count = metadata.num_tokens
        ranges = [torch.arange(turn.seq.length, turn.seq.length + turn.query_len) for turn in work]
        positions = torch.cat([*ranges, torch.zeros(padding, dtype=torch.int64)])
        inputs = [self._inputs(buffers, positions) for buffers in self.buffers]
        step = StepTensors(metadata, inputs, [], [], slice(count - padding, count))
        for given in inputs:
            given.out[step.padding] = PADDING_VALUE
        start = 0
        for turn in work:
            step.tokens.append(slice(start, start + turn.query_len))
            start += turn.query_len
        for layer, given in enumerate(inputs):
            cache = self.layers.right[layer].cache
            step.rows.append(
                [
                    StepSequence(self.spec, given.q[tokens].clone(), turn.seq.length, tuple(turn.seq.blocks), cache)
                    for turn, tokens in zip(work, step.tokens, strict=True)
                ]
            )
        return step

    def step(self, work: StepWork, padding_rows: int = 0, *, checked: bool = True) -> StepTensors:
        """Run one step as the engine does, and check it if `checked`.

        :raises Finding: if an output is wrong, or memory changed that must not.
        """
        step = self.lay_out(work, padding_rows)
        before = Before(step)
        self.run(step)
        self.finish(step, work, before, checked=checked)
        return step

    def run(self, step: StepTensors) -> None:
        """Plan a step and run all of its layers."""
        with torch.inference_mode():
            self.begin(step)
            self.run_layers(step)

    def begin(self, step: StepTensors) -> None:
        """Plan a step, as the engine does before its first layer."""
        prefill, decode = self.backends
        self.attention.begin(step.metadata, prefill, decode)

    def run_layers(self, step: StepTensors) -> None:
        """Run all layers of a planned step."""
        for layer, given in enumerate(step.inputs):
            self.attention.run(layer, given.q, given.k, given.v, given.out)

    def finish(self, step: StepTensors, work: StepWork, before: Before, *, checked: bool = True) -> None:
        """Check a step that has run, and advance its sequences."""
        for layer, given in enumerate(step.inputs):
            self.layers.write(layer, given.k, given.v, step.metadata.slot_mapping, given=False)
        if checked:
            before.compare(step)
            judge(self, step)
        for turn in work:
            turn.seq.length += turn.query_len
        for kept in (self.previous, self.previous_blocks):
            del kept[1 : len(kept) + 1 - _REMEMBERED]
        self.previous.append([turn.seq.length for turn in work])
        self.previous_blocks.append([tuple(turn.seq.blocks) for turn in work])

    def _metadata(self, work: StepWork, padding_rows: int, padding_len: int) -> AttentionMetadata:
        for turn in work:
            self.reserve(turn.seq, turn.seq.length + turn.query_len)
        metadata = AttentionMetadata.build(
            [turn.query_len for turn in work] + [padding_len] * padding_rows,
            [turn.seq.length for turn in work] + [-padding_len] * padding_rows,
            [self._seen(turn.seq) for turn in work] + [[]] * padding_rows,
            self.block_size,
            self.spec.device,
            num_draft_tokens=[turn.num_draft_tokens for turn in work] + [padding_len - 1] * padding_rows,
            num_blocks=self.num_blocks,
        )
        if self._tables is not None:
            table = self._tables.setdefault(tuple(metadata.block_table.shape), metadata.block_table)
            return replace(metadata, block_table=table.copy_(metadata.block_table))
        if not self._wide_tables:
            return metadata
        rows, columns = metadata.block_table.shape
        wide = torch.full((rows, 2 * columns + 5), -1, dtype=torch.int32, device=self.spec.device)
        wide[:, :columns] = metadata.block_table
        return replace(metadata, block_table=wide[:, :columns])

    def _seen(self, seq: Tokens) -> list[int]:
        """Return the blocks in the block table of a sequence. Blocks that no later query can see are replaced by the block of
        zeros."""
        window = self.spec.sliding_window
        num_freed = 0 if window is None else max(seq.length - window + 1, 0) // self.block_size
        return [self._null] * num_freed + seq.blocks[num_freed:]

    def _inputs(self, buffers: StepInputs, positions: Tensor) -> StepInputs:
        given = buffers.first(len(positions))
        given.q.copy_(self.numbers.queries(*given.q.shape))
        k, v = self.numbers.rows(positions)
        given.k.copy_(k)
        if not self.spec.value_in_key:
            given.v.copy_(v)
        return given


SEQUENCE_FACTOR = 8.0
"""Factor on the tolerance for a single sequence, whose error varies more than the error of a complete step."""
_STRIDED = "wrong in a strided view of memory: go by the strides of the cache, or declare contiguous_blocks"
MEMORY = {
    "packed": _STRIDED,
    "interleaved": _STRIDED,
    "spaced": _STRIDED,
    "far": "wrong where numbers of blocks and slots are beyond 16 bits, and offsets of elements beyond 32",
}
_LISTED = 6
_COMPARED = 4
"""Maximum number of correct sequences on which a mistake is tried; it must leave their outputs unchanged."""
_EXPONENT = 88.0
"""Largest argument for which the float32 exponential is finite."""


def judge(session: Session, step: StepTensors) -> None:
    """Check the outputs of a step, and all memory that the step must not change.

    :raises Finding: for the first error; the message contains the numbers and the likely cause.
    """
    for layer in range(len(step.inputs)):
        _cache(session, step, layer)
        _guards(step, layer)
    tolerance = limit(session, step)
    for layer in range(len(step.inputs)):
        _answers(session, step, layer, tolerance)
        _padding(step, layer)


def limit(session: Session, step: StepTensors) -> float:
    """Return the largest tolerance declared by the step's backends, plus an allowance for rounding that depends on the
    distribution of scores."""
    parts = [(step.metadata.num_prefills, session.prefill), (step.metadata.num_decodes, session.decode)]
    declared = max(float(backend.tolerance[session.spec.dtype]) for count, backend in parts if count)
    return declared + session.numbers.slack


def _cache(session: Session, step: StepTensors, layer: int) -> None:
    given, right = session.layers.given[layer], session.layers.right[layer]
    if not given.differs(right):
        return
    wrong = given.differing_slots(right)
    new = {slot for slot in step.metadata.slot_mapping.tolist() if slot >= 0}
    missing, stray = sorted(wrong & new), sorted(wrong - new)
    said = []
    if missing:
        slots = missing[:_LISTED]
        said.append(f"{len(missing)} of {len(new)} new tokens are not in the cache as the writer leaves them (slots {slots})")
    if stray:
        said.append(f"{len(stray)} slots of no new token are changed (slots {stray[:_LISTED]})")
    if not wrong:
        said.append("memory between the rows, which belongs to somebody else, is changed")
    looks = "writes to the wrong slot" if missing and stray else "writes to the cache"
    if missing and not stray:
        kept = given.cache.gather(torch.tensor(missing, device=session.spec.device))
        found = any(bool(each.double().isfinite().any()) for each in kept)
        looks = "writes the new tokens wrongly" if found else "forgets to write the new token"
    last = session.num_blocks * session.block_size - 1
    if stray and not missing and (stray == [last] or step.padding.start < step.padding.stop):
        looks = "writes padding rows to the cache: slot -1 means that nothing is written"
    raise Finding(f"layer {layer}: the cache must hold what the layout's writer leaves: {'; '.join(said)}", guess=looks)


def _guards(step: StepTensors, layer: int) -> None:
    guarded = step.inputs[layer].guarded
    edges = torch.cat([guarded[:GUARD], guarded[-GUARD:]])
    if not bool(edges.isnan().all()):
        raise Finding(
            f"layer {layer}: rows before or after `out`, which belong to somebody else, are written",
            guess="writes more rows than `out` has",
        )


PADDING_VALUE = 192.0
"""Value of padding rows of `out` before a step; exact in every dtype."""


def _padding(step: StepTensors, layer: int) -> None:
    padding = step.inputs[layer].out[step.padding]
    if bool(((padding != PADDING_VALUE) & (padding != 0)).any()):
        raise Finding(
            f"layer {layer}: the output of padding rows (length 0) must be left alone or zero; it holds other values",
            guess="writes padding rows",
        )


def _vanish(out: Tensor, answer: Tensor) -> bool:
    """Return whether all values of an answer and of the output are below the smallest normal number, as when a sink takes all
    weight."""
    smallest = torch.finfo(out.dtype).tiny
    return not out.numel() or (float(answer.abs().max()) < smallest and float(out.abs().max()) < smallest)


def _answers(session: Session, step: StepTensors, layer: int, tolerance: float) -> None:
    rows, given = step.rows[layer], step.inputs[layer]
    right = [expected(row)[0] for row in rows]
    outs = [given.out[tokens] for tokens in step.tokens]
    if not outs:
        return
    error = distance(torch.cat(outs), torch.cat(right))
    session.errors.note(error, tolerance)
    errors = [0.0 if _vanish(out, answer) else distance(out, answer) for out, answer in zip(outs, right, strict=True)]
    bad = [number for number, each in enumerate(errors) if not each <= SEQUENCE_FACTOR * tolerance]
    if error <= tolerance and not bad:
        return
    numbers = bad or [max(range(len(errors)), key=errors.__getitem__)]
    finite = [number for number in numbers if not math.isnan(errors[number])]
    worst = max(finite, key=errors.__getitem__) if finite else numbers[0]
    if not session.guesses:
        looks = "" if finite else "NaN"
    else:
        looks = _unwritten(given, step, numbers) or _guessed(session, step, layer, numbers, bad, right, tolerance)
        parts = wrong_parts([outs[each] for each in finite], [right[each] for each in finite]) if finite else ""
        said = looks or MEMORY.get(session.memory, ""), wrong_sequences(rows, bad), parts
        looks = "; ".join(part for part in said if part)
    words = f"{_count(bad, rows)}layer {layer}: {_numbers(worst, rows, outs, right)}"
    raise Finding(words, guess=looks, error=error, tolerance=tolerance)


def _fine(step: StepTensors, bad: Sequence[int]) -> list[int]:
    """Return the indices of a few correct sequences, from the parts of the step that have wrong sequences."""
    parts = {number < step.metadata.num_prefills for number in bad}
    right = [n for n in range(len(step.tokens)) if n not in bad and (n < step.metadata.num_prefills) in parts]
    return right if len(right) <= _COMPARED else [right[at * (len(right) - 1) // (_COMPARED - 1)] for at in range(_COMPARED)]


def _wrong(session: Session, step: StepTensors, layer: int, number: int, right: Sequence[Tensor]) -> Wrong:
    rows, prompts = step.rows[layer], step.metadata.num_prefills
    lens = [before[number] for before in session.previous if number < len(before)]
    return Wrong(
        number,
        rows[number],
        step.inputs[layer].out[step.tokens[number]].clone(),
        layers=[others[number] for at, others in enumerate(step.rows) if at != layer],
        rows=rows,
        answers=right,
        part=slice(0, prompts) if number < prompts else slice(prompts, len(rows)),
        earlier=[length for length in (session.planned, *reversed(lens)) if length],
        earlier_blocks=[before[number] for before in reversed(session.previous_blocks) if number < len(before)],
        layouts=session.layouts,
    )


def _unwritten(given: StepInputs, step: StepTensors, numbers: Sequence[int]) -> str:
    """Return a description of rows that were not written; "" if all were written."""
    missed = [number for number in numbers if given.unwritten(step.tokens[number])]
    if not missed:
        return ""
    parts = torch.cat([bits(given.out[step.tokens[number]]) for number in missed]) == UNWRITTEN[given.out.dtype]
    said = ""
    for name, where in (("heads", parts.any(0).any(-1)), ("elements", parts.any(0).any(0))):
        found = where.nonzero().flatten().tolist()
        if not said and len(found) < len(where):
            said = f"; {len(found)} of {len(where)} {name}, first {found[0]}"
    whose = "every sequence" if len(missed) == len(step.tokens) else "some sequences"
    return f"leaves rows of `out` unwritten, or parts of them: of {whose}{said}"


def _guessed(
    session: Session,
    step: StepTensors,
    layer: int,
    numbers: Sequence[int],
    bad: Sequence[int],
    right: Sequence[Tensor],
    tolerance: float,
) -> str:
    """Return the likely cause of the errors in some wrong sequences.

    numbers: indices of the wrong sequences. bad: indices of all sequences with errors beyond rounding. right: correct answers.
    """
    try:
        with _on_device_of(step.inputs[layer].out):
            wrong = [_wrong(session, step, layer, number, right) for number in numbers]
            fine = [_wrong(session, step, layer, number, right) for number in _fine(step, bad)]
            computed = [each for each in wrong if not bool(each.out.isnan().any())]
            if bad and computed and (looks := guess(computed, fine, tolerance)):
                return looks
    except (RuntimeError, ValueError, IndexError) as fault:  # the finding matters more than its likely cause
        return f"no guess, by an error of the kit's own: {type(fault).__name__}: {fault}"
    if not computed:
        looks = "NaN for one sequence" if len(wrong) == 1 and fine else "NaN"
        lift = session.numbers.lift
        if abs(lift) > _EXPONENT and session.spec.sliding_window is None:  # with a window, there may be no visible key
            looks += f" where scores are near {lift:+.0f}: exponentials that are not relative to the largest score"
        return looks
    return "" if bad else "a rounding that is coarser than the declared tolerance"


def _on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context manager that makes new tensors on the tensor's device. On a CPU it does nothing, because a device context
    would slow every torch call."""
    return nullcontext() if tensor.device.type == "cpu" else tensor.device


def _count(bad: Sequence[int], rows: Sequence[object]) -> str:
    return f"{len(bad)} of {len(rows)} sequences {'is' if len(bad) == 1 else 'are'} wrong; " if bad else ""


def _numbers(worst: int, rows: Sequence[StepSequence], outs: Sequence[Tensor], right: Sequence[Tensor]) -> str:
    out, answer = outs[worst].double(), right[worst]
    apart = (out - answer).abs()
    at = int(torch.where(apart.isnan(), torch.inf, apart).argmax())
    token, head, dim = (int(i) for i in torch.unravel_index(torch.tensor(at), answer.shape))
    row = rows[worst]
    lens = f"query_len {row.query_len}, kv_len {row.kv_len}"
    return (
        f"sequence {worst} ({lens}), query {token}, head {head}, element {dim}: "
        f"expected {float(answer[token, head, dim]):.5g}, got {float(out[token, head, dim]):.5g}"
    )
