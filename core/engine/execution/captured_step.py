"""Steps captured as CUDA graphs, with static inputs, one copy to fill them and one launch: decode, prefill and verification."""

from __future__ import annotations

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
from headway.core.select.selector import NO_ATTENTION


class GraphRecorder(Protocol):
    """Records what is launched between `begin` and `end`."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """Record `run()`; what is returned replays the recording."""

    def begin(self) -> None:
        """Record the kernels that are launched from now on, without running them."""

    def end(self) -> Callable[[], None]:
        """End what `begin` began; what is returned replays the recording, over the same memory each time."""


class CudaGraphRecorder:
    """Records CUDA graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._before: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        torch.cuda.synchronize()
        self.begin()
        try:
            run()
        finally:
            replay = self.end()
        return replay

    def begin(self) -> None:
        # Not torch.cuda.graph, which collects Python's garbage before each capture: longer than the capture itself.
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        try:
            graph.capture_begin(pool=self._pool)
        except BaseException:
            torch.cuda.set_stream(before)
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
            torch.cuda.set_stream(before)
        return graph.replay


@contextmanager
def capturing(what: str) -> Iterator[None]:
    """Raise errors within as one that names `what` cannot be captured and a way out, unless they say so themselves."""
    try:
        yield
    except (HeadwayError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise BackendError(f"CUDA graphs: {what} cannot be captured: {error}; --enforce-eager does without") from error


def borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory without holding it, so that later recordings may reuse the memory."""
    if tensor.device.type != "cuda":
        return tensor
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.as_tensor(_Memory(tensor.data_ptr(), length * tensor.element_size()), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """A stretch of device memory that torch can wrap in a tensor without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class CapturedStep(ABC):
    """A step of one shape over static inputs as a CUDA graph; a second one filters and draws anew (ModelStep.filters)."""

    description: str
    """The step in words, for errors."""

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
        """fields: static inputs. size: sequences, or tokens of a prefill. metadata: per cache group. plans: of `PagedAttention`;
        states: of `LayersWithState`, or None."""
        self._step = step
        self._fields = fields
        self.size = size
        self._by_spec = backends
        self._metadata = metadata
        self._plans = plans
        self._states = states
        self.backends = (name_of(backends),)
        self.rows = fields.rows
        """Rows of `newest` that the last replay wrote, padding included."""
        self._keys = fields.keys.view(-1)
        self._scales = fields.scales.view(-1)
        self._filters = fields.filters.view(len(fields.filters), -1)
        self.num_rows = len(self._scales)
        """Rows of logits, padding included."""
        groups = zip(plans.items(), step.attention.groups, strict=True) if metadata[0].upper_bound_lens else ()
        replanned = {id(plan): (backends[spec], plan, group) for (spec, plan), group in groups}
        nothing = AttentionBackend.plan_for_replay  # of a backend that has nothing to bring up to date
        self._replanned = [each for each in replanned.values() if type(each[0]).plan_for_replay is not nothing]
        """Plans that every replay brings up to date; none where lengths are fixed. No dictionary of specs: hashing them takes
        longer than the rest."""
        # Compiles what is not compiled yet, and finds missing memory while that can still be mended.
        self.tokens = self.run()
        self._replay: Callable[[], None] | None = None
        self.filtered = self.filter() if step.filters else self.tokens
        self._replay_filter: Callable[[], None] | None = None

    def capture(self, recorder: GraphRecorder) -> None:
        """Record the step. :raises BackendError: something in it cannot be captured."""
        with capturing(self.description):
            self._replay = recorder.record(self.run)
            if self._step.filters:
                self._replay_filter = recorder.record(self.filter)

    @abstractmethod
    def _hidden(self) -> Tensor:
        """Run the model over the static inputs: hidden states of the rows that are sampled, [rows, hidden_size]."""

    def _logits_memory(self) -> Tensor | None:
        logits, rows = self._step.logits, self.num_rows
        # The first and largest makes the buffer. A copy of logits that the model had put elsewhere would write them twice.
        return None if logits is None or len(logits) < rows else logits[:rows]

    def _finish(self, chosen: Tensor) -> Tensor:
        """Write the chosen tokens to their rows of `newest`; returns what the step brings."""
        self._step.newest.index_copy_(0, self.rows, chosen)
        return chosen

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Launch the step over the static inputs: logits into the memory of all graphs; returns the tokens."""
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
        """After `run`, choose the tokens of rows that filter; returns those of all rows, like `run`."""
        assert self._step.sampling.filter is not None, "no row asks for filters"
        chosen = self._step.sampling.filter(self._logits, self._chosen, self._keys, self._filters)
        self.filtered = self._finish(chosen)
        return self.filtered

    def _launch(self, draws: Draws | None, seq_lens: Tensor, tables: Tensor) -> Tensor:
        """Replay what was recorded; returns the tokens. seq_lens, tables: of this step, in host memory."""
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
        """Run a step (see DecodeInputs.fill); return logits [num_seqs, vocab_size] and tokens [num_seqs], which the next
        overwrites. draws: how the tokens are chosen; None: greedily."""
        sent = self._inputs.fill(self._shapes, rows, positions, tables, draws, states, adapters)
        tokens = self._launch(draws, sent.seq_lens, sent.tables)
        return self._logits[: len(rows)], tokens[: len(rows)]


class PrefillGraph(CapturedStep):
    """A captured prompt of `size` tokens: what the first token of an idle engine takes.

    Attention is causal, so no token sees those after it: a prompt is computed at the next larger captured length, and what the
    padding after it computes is not read. So its attention has lengths that are fixed at the capture.
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
    """Metadata, for each cache group, of a decode of `size` sequences with `width` query tokens each, at the longest lengths."""
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
    """Plan the layers with a state, if there are any, over the static inputs. The host knows no slot before a replay."""
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
    """The name of the backend whose instances these are; NO_ATTENTION if no layer has any."""
    return next((backend.name for backend in backends.values()), NO_ATTENTION)


class VerifyGraph(CapturedStep):
    """A captured verification by `size` sequences with `width` query tokens each; see VerifyInputs for narrower ones."""

    def __init__(self, step: ModelStep, inputs: VerifyInputs, size: int, width: int, backends: Backends, logits: Tensor) -> None:
        """logits: [at least size * width, vocab_size], where the graph computes its own into the first rows."""
        self._inputs = inputs
        self._shapes = verify_shapes(step, size, width)
        self.width = width
        self._memory = logits[: size * width]
        fields = inputs.fields(self._shapes)
        self.description = f"verification of {width - 1} drafts for each of {size} sequences with {name_of(backends)}"
        metadata = decode_metadata(step, fields, size, width, context_lens=fields.context_lens)
        plans = step.attention.begin_graph(metadata, backends)
        states = _begin_states(step, fields, metadata[0], fields.out_states, fields.recomputed)
        # All sequences become padding ones, so that kernels meet no lengths that no sequence has.
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
        """Compare the drafts with the chosen tokens: `Verified.tokens`."""
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
        """Run a step, see VerifyInputs.fill. Returns `Verified.tokens`, which the next replay overwrites."""
        sent = self._inputs.fill(self._shapes, step, rows, positions, tables, draws)
        return self._launch(draws, sent.seq_lens, sent.tables)[: step.num_seqs]

    def logits_of(self, step: StepInput) -> Tensor:
        """A copy of the logits [num_tokens, vocab_size] after each new token of the step that was replayed last."""
        indices = torch.from_numpy(numpy.flatnonzero(new_tokens(step, self.width)))
        return self._logits.index_select(0, upload(indices, self._logits.device))
