"""Decode, prefill and verification steps captured as CUDA graphs: one copy fills the static inputs, one launch runs the step."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.adapters import NO_ADAPTER, rows_with
from headway.core.contract.backend import AttentionBackend, Backends
from headway.core.contract.errors import BackendError, HeadwayError
from headway.core.contract.kernel import upload
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.state import StateMetadata
from headway.core.engine.data.step import StepInput
from headway.core.engine.execution.attention import HostBlockTables, Plans
from headway.core.engine.execution.states import StateStepPart
from headway.core.engine.execution.static_inputs import (
    PADDING_CONTEXT,
    DecodeInputs,
    ModelStep,
    PrefillInputs,
    StepFields,
    VerifyInputs,
    decode_shapes,
    new_tokens,
    prefill_shapes,
    verify_shapes,
)
from headway.core.sampling.sampler import Draws
from headway.core.select.choice import NO_ATTENTION


class GraphRecorder(Protocol):
    """Recorder of the kernels launched between `begin` and `end`."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """Record `run()`. Returns a function that replays the recording."""

    def begin(self) -> None:
        """Record the kernels launched from now on, without running them."""

    def end(self) -> Callable[[], None]:
        """End the recording. Returns a function that replays it, over the same memory each time."""


class CudaGraphRecorder:
    """Recorder of CUDA graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._before: torch.cuda.Stream | None = None
        self._collects = False

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        torch.cuda.synchronize()
        self.begin()
        try:
            run()
        finally:
            replay = self.end()
        return replay

    def begin(self) -> None:
        # Not torch.cuda.graph, which runs Python's garbage collector before each capture: that takes longer than the capture. The
        # collector is off meanwhile, since a graph that it frees would make the capture invalid.
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        self._collects = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=self._pool)
        except BaseException:
            self._leave(before)
            raise
        self._graph = graph
        self._before = before

    def end(self) -> Callable[[], None]:
        graph, before = self._graph, self._before
        assert graph is not None
        assert before is not None, "begin() first"
        self._graph = None
        try:
            graph.capture_end()
        finally:
            self._leave(before)
        return graph.replay

    def _leave(self, before: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(before)
        if self._collects:
            gc.enable()


@contextmanager
def capturing(what: str) -> Iterator[None]:
    """Convert a RuntimeError raised in the context to a BackendError that names `what` and the option to disable CUDA graphs.
    Headway's errors are passed on."""
    try:
        yield
    except (HeadwayError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise BackendError(f"CUDA graphs: {what} cannot be captured: {error}; --enforce-eager does without") from error


def borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not own the memory, so that later recordings may reuse it."""
    if tensor.device.type != "cuda":
        return tensor
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.as_tensor(_Memory(tensor.data_ptr(), length * tensor.element_size()), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """A range of device memory that torch can wrap in a tensor without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class CapturedStep(ABC):
    """A step of one shape over static inputs, as a CUDA graph. A second graph filters logits and draws again."""

    description: str
    """Text that describes the step in errors."""

    def __init__(
        self,
        step: ModelStep,
        fields: StepFields[Tensor],
        size: int,
        backends: Backends,
        metadata: Sequence[AttentionMetadata],
        plans: Plans,
        states: list[StateStepPart] | None = None,
    ) -> None:
        """fields: static inputs. size: number of sequences, or number of tokens of a prefill. metadata: one per cache group.
        plans: from `PagedAttention`. states: parts from `LayersWithState`, or None."""
        self._step = step
        self._fields = fields
        self.size = size
        self._by_spec = backends
        self._metadata = metadata
        self._plans = plans
        self._states = states
        self.backends = (name_of(backends),)
        self.rows = fields.rows
        """Indices of the rows of `newest` that a replay writes, padding included."""
        self._keys = fields.keys.view(-1)
        self._scales = fields.scales.view(-1)
        self._filters = fields.filters.view(len(fields.filters), -1)
        self.num_rows = len(self._scales)
        """Number of rows of logits, padding included."""
        groups = zip(plans.items(), step.attention.groups, strict=True) if metadata[0].upper_bound_lens else ()
        replanned = {id(plan): (backends[spec], plan, group) for (spec, plan), group in groups}
        nothing = AttentionBackend.plan_for_replay  # a backend with this method has nothing to update
        self._replanned = [each for each in replanned.values() if type(each[0]).plan_for_replay is not nothing]
        """Plans that every replay updates; empty if lengths are fixed. The plans are in a list, because hashing specs in a dict
        would be slow."""
        # Compiles missing kernels, and detects missing memory while that can still be handled.
        self.tokens = self.run()
        self._replay: Callable[[], None] | None = None
        self.filtered = self.filter() if step.filters else self.tokens
        self._replay_filter: Callable[[], None] | None = None

    def capture(self, recorder: GraphRecorder) -> None:
        """Record the step.

        :raises BackendError: if a part of the step cannot be captured.
        """
        with capturing(self.description):
            self._replay = recorder.record(self.run)
            if self._step.filters:
                self._replay_filter = recorder.record(self.filter)

    @abstractmethod
    def _hidden(self) -> Tensor:
        """Run the model over the static inputs. Returns hidden states of the sampled rows, [rows, hidden_size]."""

    def _logits_memory(self) -> Tensor | None:
        logits, rows = self._step.logits, self.num_rows
        # The first and largest graph allocates the buffer. Copying logits from elsewhere would write them twice.
        return None if logits is None or len(logits) < rows else logits[:rows]

    def _finish(self, chosen: Tensor) -> Tensor:
        """Write the chosen tokens to their rows of `newest`. Returns the step's result."""
        self._step.newest.index_copy_(0, self.rows, chosen)
        return chosen

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Launch the step over the static inputs, with logits in the memory that all graphs share. Returns the tokens."""
        step = self._step
        step.attention.resume_graph(self._metadata, self._by_spec, self._plans)
        if self._states is not None and step.attention.states is not None:
            step.attention.states.resume(self._states)
        out = self._logits_memory()
        with rows_with(step.adapters, None if step.adapters is None else self._fields.adapters.view(-1)):
            hidden = self._hidden()
        self._logits = step.model.compute_logits(hidden, out)
        if out is None:
            step.logits = self._logits
        assert out is None or self._logits.data_ptr() == out.data_ptr()
        ops = step.sampling
        self._chosen = ops.greedy(self._logits) if ops.choose is None else ops.choose(self._logits, self._scales, self._keys)
        self.tokens = self._finish(self._chosen)
        return self.tokens

    @torch.inference_mode()
    def filter(self) -> Tensor:
        """Choose tokens again for rows with filters, after `run`. Returns the tokens of all rows, like `run`."""
        assert self._step.sampling.filter is not None, "no row asks for filters"
        chosen = self._step.sampling.filter(self._logits, self._chosen, self._keys, self._filters)
        self.filtered = self._finish(chosen)
        return self.filtered

    def _launch(self, draws: Draws | None, seq_lens: Tensor, tables: Tensor) -> Tensor:
        """Replay the recording. Returns the tokens. seq_lens, tables: this step's values, in host memory."""
        assert self._replay is not None, "capture() it first"
        for backend, plan, group in self._replanned:
            known = replace(self._metadata[group], seq_lens_cpu=seq_lens, block_table_cpu=tables[group], upper_bound_lens=False)
            backend.plan_for_replay(plan, known)
        self._replay()
        if draws is None or draws.filters is None:
            return self.tokens
        assert self._replay_filter is not None, "see ModelStep.filters"
        self._replay_filter()
        return self.filtered


class DecodeGraph(CapturedStep):
    """A captured decode of `size` sequences."""

    def __init__(self, step: ModelStep, inputs: DecodeInputs, size: int, backends: Backends) -> None:
        self._inputs = inputs
        self._shapes = decode_shapes(step, size)
        fields = inputs.fields(self._shapes)
        self.description = f"decode of {size} sequences with {name_of(backends)}"
        metadata = decode_metadata(step, fields, size, 1, context_lens=fields.positions)
        states = _begin_states(step, fields, metadata[0], fields.states.view(-1, 1))
        super().__init__(step, fields, size, backends, metadata, step.attention.begin_graph(metadata, backends), states)

    def _hidden(self) -> Tensor:
        step = self._step
        ids = step.newest.index_select(0, self.rows).clamp_min(0)  # the row of a sequence that ends with a NaN runs once more
        return step.model(ids, self._fields.positions, step.attention)

    def replay(
        self,
        rows: NDArray[numpy.int32],
        positions: NDArray[numpy.int32],
        tables: HostBlockTables,
        draws: Draws | None = None,
        states: NDArray[numpy.int32] | None = None,
        adapters: NDArray[numpy.int32] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a step (see DecodeInputs.fill). Returns logits [num_seqs, vocab_size] and tokens [num_seqs], which the next replay
        overwrites.
        draws: parameters of the draws. None means greedy sampling."""
        sent = self._inputs.fill(self._shapes, rows, positions, tables, draws, states, adapters)
        tokens = self._launch(draws, sent.seq_lens, sent.tables)
        return self._logits[: len(rows)], tokens[: len(rows)]


class PrefillGraph(CapturedStep):
    """A captured prompt of `size` tokens, for prompts that run without other sequences.

    Attention is causal, so no token sees later tokens. A prompt runs at the next larger captured length, and the results of the
    padding are not read. The attention lengths are therefore fixed at capture.
    """

    def __init__(self, step: ModelStep, inputs: PrefillInputs, size: int, backends: Backends, positions: Tensor) -> None:
        """positions: 0, 1, 2, ... on the device, for at least `size` tokens."""
        self._inputs = inputs
        self._shapes = prefill_shapes(step, size)
        self._positions = positions[:size]
        fields = inputs.fields(self._shapes)
        self.description = f"a prompt of {size} tokens with {name_of(backends)}"
        metadata = [
            AttentionMetadata.one_prompt(size, table, slots, step.block_size, num_blocks)
            for table, slots, num_blocks in zip(fields.tables, fields.slots, step.num_blocks, strict=True)
        ]
        super().__init__(step, fields, size, backends, metadata, step.attention.begin_prefill_graph(metadata, backends))

    def _hidden(self) -> Tensor:
        hidden = self._step.model(self._fields.ids, self._positions, self._step.attention)
        return hidden.index_select(0, self._fields.last)

    def replay(self, step: StepInput, tables: HostBlockTables, draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Run a prompt. Returns its logits [1, vocab_size] and token [1], which the next replay overwrites."""
        sent = self._inputs.fill(self._shapes, step, tables, draws)
        return self._logits, self._launch(draws, sent.seq_lens, sent.tables)


def decode_metadata(
    step: ModelStep, fields: StepFields[Tensor], size: int, width: int, context_lens: Tensor
) -> list[AttentionMetadata]:
    """Return metadata per cache group for a decode of `size` sequences with `width` query tokens each, at maximum lengths."""
    starts = torch.arange(0, size * width + 1, width, dtype=torch.int32)
    first = AttentionMetadata(
        num_prefills=0,
        num_decodes=size,
        num_prefill_tokens=0,
        num_decode_tokens=size * width,
        query_start_loc=starts.to(fields.rows.device),
        seq_lens=fields.seq_lens,
        context_lens=context_lens,
        block_table=fields.tables[0],
        slot_mapping=fields.slots[0].view(-1),
        block_size=step.block_size,
        max_query_len=width,
        max_seq_len=step.max_model_len,
        query_start_loc_cpu=starts,
        seq_lens_cpu=torch.full((size,), step.max_model_len, dtype=torch.int32),
        block_table_cpu=torch.zeros(fields.tables[0].shape, dtype=torch.int32),
        num_blocks=step.num_blocks[0],
        upper_bound_lens=True,
    )
    return [
        replace(first, block_table=table, slot_mapping=slots.view(-1), num_blocks=count)
        for table, slots, count in zip(fields.tables, fields.slots, step.num_blocks, strict=True)
    ]


def _begin_states(
    step: ModelStep, fields: StepFields[Tensor], lengths: AttentionMetadata, out_slots: Tensor, recomputed: Tensor | None = None
) -> list[StateStepPart] | None:
    """Plan the layers with a state, if any, over the static inputs. The host learns the slots only at a replay."""
    states = step.attention.states
    if states is None:
        return None
    metadata = StateMetadata(
        step=lengths,
        slots=fields.states,
        out_slots=out_slots,
        slots_cpu=torch.full(fields.states.shape, -1, dtype=torch.int32),
        out_slots_cpu=torch.full(out_slots.shape, -1, dtype=torch.int32),
        recomputed=recomputed,
    )
    return states.begin_graph(metadata)


def name_of(backends: Backends) -> str:
    """Return the names of the backends of these instances, joined if kinds of layers differ. NO_ATTENTION if there are none."""
    return "+".join(dict.fromkeys(backend.name for backend in backends.values())) or NO_ATTENTION


class VerifyGraph(CapturedStep):
    """A captured verification for `size` sequences with `width` query tokens each; see VerifyInputs for sequences with fewer
    tokens."""

    def __init__(self, step: ModelStep, inputs: VerifyInputs, size: int, width: int, backends: Backends, logits: Tensor) -> None:
        """logits: buffer [num_rows, vocab_size] with at least size * width rows. The graph writes its logits to the first
        rows."""
        self._inputs = inputs
        self._shapes = verify_shapes(step, size, width)
        self.width = width
        self._memory = logits[: size * width]
        fields = inputs.fields(self._shapes)
        self.description = f"verification of {width - 1} drafts for each of {size} sequences with {name_of(backends)}"
        metadata = decode_metadata(step, fields, size, width, context_lens=fields.context_lens)
        plans = step.attention.begin_graph(metadata, backends)
        states = _begin_states(step, fields, metadata[0], fields.out_states, fields.recomputed)
        # Make all rows padding, so that kernels see only valid lengths.
        inputs.buffer.zero_()
        fields.slots.fill_(-1)
        fields.states.fill_(-1)
        fields.adapters.fill_(NO_ADAPTER)
        fields.rows.fill_(step.padding_row)
        fields.seq_lens.fill_(PADDING_CONTEXT + width)
        fields.context_lens.fill_(PADDING_CONTEXT)
        super().__init__(step, fields, size, backends, metadata, plans, states)

    def _hidden(self) -> Tensor:
        step, fields = self._step, self._fields
        return step.model(fields.ids.view(-1), fields.positions.view(-1), step.attention)

    def _logits_memory(self) -> Tensor:
        return self._memory

    def _finish(self, chosen: Tensor) -> Tensor:
        """Compare the drafts with the chosen tokens. Returns `Verified.tokens`."""
        step, fields = self._step, self._fields
        sampled = chosen.view(self.size, self.width)
        return step.sampling.accept_drafts(sampled, fields.ids, fields.recomputed, fields.rows, step.newest)

    def replay(
        self,
        step: StepInput,
        rows: NDArray[numpy.int32],
        positions: NDArray[numpy.int32],
        tables: HostBlockTables,
        draws: Draws | None,
    ) -> Tensor:
        """Run a step; see VerifyInputs.fill. Returns `Verified.tokens`, which the next replay overwrites."""
        sent = self._inputs.fill(self._shapes, step, rows, positions, tables, draws)
        return self._launch(draws, sent.seq_lens, sent.tables)[: step.num_seqs]

    def logits_of(self, step: StepInput) -> Tensor:
        """Return a copy of the logits [num_tokens, vocab_size] after each new token of the last replayed step."""
        indices = torch.from_numpy(numpy.flatnonzero(new_tokens(step, self.width)))
        return self._logits.index_select(0, upload(indices, self._logits.device))
