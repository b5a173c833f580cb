"""A backend in the hands of the engine's own attention: sequences that come, grow and go over a paged pool, every step held to
float64 and every bit that is not the backend's to change watched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import CacheLayout, CacheWriter
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.execution.attention import PagedAttention
from headway.core.oracle.inputs import Numbers
from headway.core.oracle.oracle import StepSequence
from headway.core.oracle.steps import (
    AS_IN_AN_ENGINE,
    GUARD,
    Before,
    CellErrors,
    Layers,
    StepInputs,
    StepTensors,
    StepTurns,
    Tokens,
    Unlike,
    first_far,
)
from headway.core.select.layer_specs import LayerSpecs
from headway.testing.diagnosis.verdict import judge

_ZERO_AT = 6
"""How many blocks are handed out before block 0 where it is in use: then a sequence of several blocks has it, not as its last."""
_REMEMBERED = 4
"""Steps whose lengths and blocks are remembered."""
_NULL = 1
"""The block of zeros that stands in a table for those behind the window, unless block 0 does."""


class Session:
    """One instance of a backend for each of the two parts of a step, and the caches of a few layers that share every plan.

    q, k, v and out lie at the same addresses in every step, as those of an engine do. Blocks are handed out in no order, block 0
    to nobody: a table is padded with zeros, and a kernel that reads past a sequence's end meets the poison. Blocks behind a
    sliding window have been given back, and a block of zeros stands in their place. With `zero_in_use` it is as in an engine's
    pool: block 0 is a block like any other, or with a window the one of zeros; and tables of one shape lie at one address.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        layout: CacheLayout,
        block_size: int,
        writer: CacheWriter,
        prefill: AttentionBackend | None,
        decode: AttentionBackend | None,
        *,
        num_blocks: int,
        max_tokens: int,
        layouts: Sequence[CacheLayout] = (),
        memory: str = "own",
        layers: int = 2,
        poison: float = math.nan,
        seed: int = 0,
        scores: str = "normal",
        wide_tables: bool = False,
        zero_in_use: bool = False,
        unlike: Unlike | None = None,
        errors: CellErrors | None = None,
    ) -> None:
        """prefill, decode: who serves which part; layouts: others that a backend may confuse this one with; scores: out of
        cells.SCORES; wide_tables: the block table is a part of a wider one, whose other columns name no block; unlike: what is
        simpler than in an engine, None: nothing; errors: where the error of each judged step is noted."""
        self.unlike = unlike or AS_IN_AN_ENGINE
        self.errors = errors or CellErrors()
        zero_in_use = zero_in_use and not self.unlike.zero_unused
        self.spec = spec
        self.block_size = block_size
        self.layouts = layouts
        self.memory = memory
        self.prefill = prefill
        self.decode = decode
        spare = 4
        before = (first_far(spec, block_size) if memory == "far" else 0) + _NULL + 1
        self._null = 0 if zero_in_use and memory != "far" and spec.sliding_window is not None else _NULL
        self.num_blocks = num_blocks + before + spare
        self.layers = Layers(spec, layout, self.num_blocks, block_size, writer, memory=memory, layers=layers, poison=poison)
        self.generator = torch.Generator().manual_seed(seed)
        self.numbers = Numbers(spec, scores, self.generator)
        self._wide_tables = wide_tables
        self._contexts: list[tuple[list[int], Tensor]] = []
        """Blocks and cached positions of sequences whose rows have not been written yet."""
        self._tables: dict[tuple[int, ...], Tensor] | None = {} if zero_in_use else None
        """Where tables of a shape lie; None: anywhere."""
        for foreign in (*self.layers.given, *self.layers.right):
            foreign.fill_blocks([self._null], 0.0)
        order = torch.randperm(num_blocks, generator=self.generator) + before
        order = torch.arange(before, before + num_blocks) if self.unlike.blocks_in_order else order
        self._free: list[int] = order.tolist()
        if zero_in_use and memory != "far" and self._null:
            self._free.insert(_ZERO_AT, 0)
        self.attention = PagedAttention(LayerSpecs([spec] * layers), [foreign.cache for foreign in self.layers.given], writer)
        self.buffers = [StepInputs.allocate(spec, max_tokens, merged=layer % 2 == 1) for layer in range(layers)]
        self.previous: list[list[int]] = []
        """kv_len of each row of the first step and of the latest ones."""
        self.previous_blocks: list[list[tuple[int, ...]]] = []
        """Blocks of each row of the same steps."""
        self.planned = 0
        """The longest kv_len that a captured decode was planned for; 0: none was."""

    @property
    def backends(self) -> tuple[Mapping[AttentionSpec, AttentionBackend], Mapping[AttentionSpec, AttentionBackend]]:
        """Who serves the first part and the second, as the engine hands them to a step."""
        return {self.spec: self.prefill or self.decode}, {self.spec: self.decode or self.prefill}  # type: ignore[dict-item]

    @property
    def instances(self) -> list[AttentionBackend]:
        """The backend's instances, that of each part."""
        return [each for each in (self.prefill, self.decode) if each is not None]

    def open(self, context: int, share: Tokens | None = None) -> Tokens:
        """A sequence with `context` cached tokens. share: one whose full blocks it begins with, as after a prefix hit."""
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
        """Write the rows of the sequences that have been opened, all at once."""
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
        """Give a sequence the blocks for so many tokens."""
        while len(seq.blocks) * self.block_size < length:
            seq.blocks.append(self._free.pop(0))

    def close(self, seq: Tokens) -> None:
        """Give a sequence's blocks back."""
        self._write_contexts()
        self.layers.forget(seq.blocks)
        self._free += seq.blocks

    def lay_out(self, work: StepTurns, padding_rows: int = 0) -> StepTensors:
        """A step's metadata, its random inputs, and the sequences as they are after it; the caches are not written yet."""
        self._write_contexts()
        metadata = self._metadata(work, padding_rows)
        count = metadata.num_tokens
        ranges = [torch.arange(turn.seq.length, turn.seq.length + turn.query_len) for turn in work]
        positions = torch.cat([*ranges, torch.zeros(padding_rows, dtype=torch.int64)])
        inputs = [self._inputs(buffers, positions) for buffers in self.buffers]
        step = StepTensors(metadata, inputs, [], [], slice(count - padding_rows, count))
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

    def step(self, work: StepTurns, padding_rows: int = 0, *, checked: bool = True) -> StepTensors:
        """Run one step as the engine does and judge it.

        :raises Finding: anything about it is wrong.
        """
        step = self.lay_out(work, padding_rows)
        before = Before(step)
        with torch.inference_mode():
            self.attention.begin(step.metadata, *self.backends)
            self.run(step)
        self.finish(step, work, before, checked=checked)
        return step

    def run(self, step: StepTensors) -> None:
        """Every layer of a step that has been begun."""
        for layer, given in enumerate(step.inputs):
            self.attention.run(layer, given.q, given.k, given.v, given.out)

    def finish(self, step: StepTensors, work: StepTurns, before: Before, *, checked: bool = True) -> None:
        """Judge a step that has run, and let its sequences grow."""
        for layer, given in enumerate(step.inputs):
            self.layers.write(layer, given.k, given.v, step.metadata.slot_mapping, given=False)
        if checked:
            before.compare(step)
            judge(self, step)
        for turn in work:
            turn.seq.length += turn.query_len
        for kept, new in (
            (self.previous, [turn.seq.length for turn in work]),
            (self.previous_blocks, [tuple(turn.seq.blocks) for turn in work]),
        ):
            del kept[1 : len(kept) + 1 - _REMEMBERED]
            kept.append(new)  # type: ignore[arg-type]

    def _metadata(self, work: StepTurns, padding_rows: int) -> AttentionMetadata:
        for turn in work:
            self.reserve(turn.seq, turn.seq.length + turn.query_len)
        metadata = AttentionMetadata.build(
            [turn.query_len for turn in work] + [1] * padding_rows,
            [turn.seq.length for turn in work] + [-1] * padding_rows,
            [self._seen(turn.seq) for turn in work] + [[]] * padding_rows,
            self.block_size,
            self.spec.device,
            num_draft_tokens=[turn.num_draft_tokens for turn in work] + [0] * padding_rows,
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
        """The blocks of a sequence's table, once those that no later query sees are given back."""
        window = self.spec.sliding_window
        behind = 0 if window is None else max(seq.length - window + 1, 0) // self.block_size
        return [self._null] * behind + seq.blocks[behind:]

    def _inputs(self, buffers: StepInputs, positions: Tensor) -> StepInputs:
        """Fresh numbers at the old addresses."""
        given = buffers.first(len(positions))
        given.q.copy_(self.numbers.queries(*given.q.shape))
        k, v = self.numbers.rows(positions)
        given.k.copy_(k)
        if not self.spec.value_in_key:
            given.v.copy_(v)
        if self.unlike.out_of_zeros:
            given.guarded[GUARD:-GUARD] = 0.0
        return given
