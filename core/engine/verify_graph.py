"""A step that verifies drafts and nothing else, captured whole: every sequence has the same number of query tokens.

A sequence with fewer drafts than the graph's width is filled up *before* its new tokens: tokens that the cache holds already are
computed once more, written nowhere and read by nobody. So lengths stay exact, no position lies past a sequence's end, and no key
is read that belongs to nobody; a sequence needs as many tokens as the graph is wide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.backend import Backends
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.transfer import upload
from headway.core.engine.graph import GraphStep, name_of, recorded, replans
from headway.core.engine.recorder import Recorder
from headway.core.engine.rows import Rows
from headway.core.engine.step import StepInput
from headway.core.engine.verify_inputs import VerifyFields, VerifyInputs
from headway.core.sampling.sampler import Draws

FILL_CONTEXT = 1
"""Cached tokens of a padding sequence: its lengths are legal ones, its blocks are the pool's first, and it writes nothing."""


class VerifyGraph:
    """One captured step of `size` sequences with `width` query tokens each."""

    def __init__(self, step: GraphStep, inputs: VerifyInputs, size: int, width: int, backends: Backends) -> None:
        self._step, self._inputs, self.size, self.width, self._by_spec = step, inputs, size, width, backends
        self.backends = (name_of(backends),)
        self._shape = size, width, inputs.groups, inputs.blocks
        self._given, length = VerifyFields.of(inputs.device, *self._shape)
        self._sent_to = inputs.device[:length]
        self._places: NDArray[numpy.int32] = numpy.arange(width, dtype=numpy.int32)
        self._metadata = self._worst_case()
        self._plans = step.attention.begin_graph(self._metadata, backends)
        groups = zip(self._plans.items(), step.attention.groups, strict=True)
        self._replanned = [(backends[spec], plan, group) for (spec, plan), group in groups if replans(backends[spec])]
        self._fill_up()
        # Compiles what is not compiled yet, and finds missing memory while that can still be mended.
        self.tokens = self.run()
        self._replay: Callable[[], None] | None = None
        self.filtered = self.filter() if step.filters else self.tokens
        self._replay_filter: Callable[[], None] | None = None

    def capture(self, recorder: Recorder) -> None:
        """Record the step.

        :raises BackendError: something in it cannot be captured.
        """
        what = f"verification of {self.width - 1} drafts for each of {self.size} sequences with {self.backends[0]}"
        self._replay = recorded(recorder, self.run, what)
        if self._step.filters:
            self._replay_filter = recorded(recorder, self.filter, what)

    def _worst_case(self) -> list[AttentionMetadata]:
        step, given, size, width = self._step, self._given, self.size, self.width
        starts = torch.arange(0, size * width + 1, width, dtype=torch.int32)
        first = AttentionMetadata(
            num_prefills=0,
            num_decodes=size,
            num_prefill_tokens=0,
            num_decode_tokens=size * width,
            query_start_loc=starts.to(given.rows.device),
            seq_lens=given.seq_lens,
            context_lens=given.context_lens,
            block_table=given.tables[0],
            slot_mapping=given.slots[0].view(-1),
            block_size=step.block_size,
            max_query_len=width,
            max_seq_len=step.max_model_len,
            query_start_loc_cpu=starts,
            seq_lens_cpu=torch.full((size,), step.max_model_len, dtype=torch.int32),
            block_table_cpu=torch.zeros(given.tables[0].shape, dtype=torch.int32),
            num_blocks=step.num_blocks[0],
            upper_bound_lens=True,
        )
        return [
            replace(first, block_table=table, slot_mapping=slots.view(-1), num_blocks=count)
            for table, slots, count in zip(given.tables, given.slots, step.num_blocks, strict=True)
        ]

    def _fill_up(self) -> None:
        """Make every sequence a padding one: kernels meet no lengths that none has."""
        given = self._given
        self._inputs.device.zero_()
        given.slots.fill_(-1)
        given.rows.fill_(self._step.padding_row)
        given.seq_lens.fill_(FILL_CONTEXT + self.width)
        given.context_lens.fill_(FILL_CONTEXT)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Launch the step over the static inputs: logits into the buffer of all. Returns `Verified.tokens`."""
        step, given = self._step, self._given
        count = self.size * self.width
        step.attention.resume_graph(self._metadata, self._by_spec, self._plans)
        hidden = step.model(given.ids.view(count), given.positions.view(count), step.attention)
        logits = step.model.compute_logits(hidden, self._inputs.logits[:count])
        self._sampled = step.choose(logits, given.scales.view(count), given.keys.view(count))
        self.tokens = self._hold(self._sampled)
        return self.tokens

    @torch.inference_mode()
    def filter(self) -> Tensor:
        """After `run`, choose the tokens of sequences that filter, and hold all against the drafts once more."""
        given, count = self._given, self.size * self.width
        numbers = given.filters.view(-1, count)
        sampled = self._step.filter(self._inputs.logits[:count], self._sampled, given.keys.view(count), numbers)
        self.filtered = self._hold(sampled)
        return self.filtered

    def _hold(self, sampled: Tensor) -> Tensor:
        step, given = self._step, self._given
        return step.sampling.hold(sampled.view(self.size, self.width), given.ids, given.fill, given.rows, step.newest)

    def replay(
        self, step: StepInput, rows: Rows, at: NDArray[numpy.int32], positions: NDArray[numpy.int32], draws: Draws | None
    ) -> Tensor:
        """Run a step. Returns `Verified.tokens`, which the next replay overwrites.

        at, positions: int32 [num_tokens]: row and position of each new token. draws: how the tokens after these are chosen, one
        after the other; None: greedily.
        """
        assert self._replay is not None, "capture() it first"
        seq_lens, tables = self._fill(step, rows, at, positions, draws)
        for backend, plan, group in self._replanned:
            known = replace(self._metadata[group], seq_lens_cpu=seq_lens, block_table_cpu=tables[group], upper_bound_lens=False)
            backend.plan_for_replay(plan, known)
        self._replay()
        tokens = self.tokens
        if draws is not None and draws.filters is not None:
            assert self._replay_filter is not None, "see GraphStep.filters"
            self._replay_filter()
            tokens = self.filtered
        return tokens[: step.num_seqs]

    def logits_of(self, step: StepInput) -> Tensor:
        """A copy of the logits [num_tokens, vocab_size] after each new token of the step that was replayed last."""
        logits = self._inputs.logits
        places = torch.from_numpy(numpy.flatnonzero(self._new(step)))
        return logits.index_select(0, upload(places, logits.device))

    def _new(self, step: StepInput) -> NDArray[numpy.bool_]:
        """[num_seqs, width]: which query tokens are the step's own."""
        new: NDArray[numpy.bool_] = numpy.arange(self.width) >= self.width - step.query_lens[:, None]
        return new

    def _fill(
        self, step: StepInput, rows: Rows, at: NDArray[numpy.int32], positions: NDArray[numpy.int32], draws: Draws | None
    ) -> tuple[Tensor, Tensor]:
        """Send a step's inputs to the device. Returns seq_lens and block tables of all sequences, in host memory."""
        self._inputs.host.reverse()  # to the buffer not in use: a step's copy is done before the step after next is launched
        buffer, count = self._inputs.host[0], step.num_seqs
        buffer.lay_out(self._shape)
        ids, keys, slots, places, fill, all_positions, scales, filters, seq_lens, context_lens, _ = buffer.arrays
        assert step.token_ids.min() >= 0, "guesses follow tokens that have been read"
        whole = step.num_tokens == self.size * self.width
        new = None if whole else self._new(step)
        if not whole:
            for array, nothing in ((ids, 0), (keys, 0), (scales, 0), (filters, 0), (slots, -1)):  # a scale of 0 is greedy
                array.fill(nothing)

        def put(array: NDArray[Any], numbers: NDArray[Any]) -> None:
            """Of each new token, into [n, w]."""
            if new is None:
                array[:] = numbers.reshape(array.shape)
            else:
                array[:count][new] = numbers

        put(ids, step.token_ids)
        places[:count], places[count:] = step.rows, self._step.padding_row
        fill[:count], fill[count:] = self.width - step.query_lens, 0
        seq_lens[:count], seq_lens[count:] = step.context_lens + step.query_lens, FILL_CONTEXT + self.width
        numpy.subtract(seq_lens, self.width, out=context_lens)
        numpy.add(context_lens[:, None], self._places, out=all_positions)
        if draws is None or not (draws.scales.any() or draws.filters is not None):
            scales.fill(0)  # and the keys are not looked at
        else:
            put(keys, draws.keys)
            put(scales, draws.scales)
            if draws.filters is not None:
                for array, numbers in zip(filters, draws.filters, strict=True):
                    put(array, numbers)
        for group, array in enumerate(slots):
            put(array, rows.slots(at, positions, self._step.block_size, group))
        buffer.sent_tables.fill(places, rows)
        self._sent_to.copy_(buffer.sent, non_blocking=True)
        return buffer.fields.seq_lens, buffer.fields.tables
