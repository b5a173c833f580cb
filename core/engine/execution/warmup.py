"""Warm-up: runs every kind of step once before the first request, so that no request waits for compilation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import numpy
import torch
from torch import Tensor

from headway.core.contract.adapters import adapters_of
from headway.core.contract.backend import Backends, Lengths, StepLimits, fits, powers
from headway.core.contract.kernel import AHEAD
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import AttentionFunctions, Model
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.step import NewPages, StartedRow, StepInput
from headway.core.engine.execution.attention import PagedAttention
from headway.core.engine.execution.captured_step import name_of
from headway.core.engine.execution.host_rows import Launched
from headway.core.engine.execution.model_runner import ModelRunner
from headway.core.engine.execution.states import LayersWithState
from headway.core.sampling.params import SamplingParams
from headway.core.select.selector import Selector
from headway.core.speculation.proposers import MAX_VERIFIED, WIDTHS

log = logging.getLogger("headway")

_SAMPLED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, logprobs=1),
    SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.1),
)
"""Sampling parameters that exercise all sampling kernels. The sequences of a step cycle through them."""
_SMALL = 2048  # Number of tokens up to which GEMM kernels depend on the number; larger steps use the kernels of the largest
_CONTEXT = 32  # Cached tokens per sequence in a whole step, where the choice of attention kernels is not tested


class WarmUp:
    """Runs warm-up steps through the engine's code.

    Whole steps exercise the model and the sampler. Attention of one layer of each kind runs at all shapes for which the kind's
    backends choose different kernels. All sequences share the first pages of the pool, which must be empty; `run` leaves zeros in
    them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: Model,
        attention: PagedAttention,
        selector: Selector,
        limits: StepLimits,
        size: PoolSize,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._runner = runner
        self._model = model
        self._attention = attention
        self._selector = selector
        self._limits = limits
        self._block_size = size.page_format.block_size
        self._groups = size.page_format.groups
        self._device = attention.layers.device
        self._ranks = ranks
        self._num_pages = size.num_pages
        self._adapters = adapters_of(model)
        self._failed: set[str] = set()
        self._reached: dict[AttentionSpec, list[tuple[Backends, Sequence[Lengths]]]] = {}
        """Attention steps of the last complete run that reached a kernel for the first time while kernels were compiled ahead."""
        self._in_flight: Launched | None = None  # The last launched step

    @torch.inference_mode()
    def run(self, complete: bool = True) -> None:
        """Run all steps once, and wait for them. Errors of backends are only logged, because a request's step would raise the
        same error again.

        complete: False to run attention only in the steps whose kernels the last complete run did not launch but compiled ahead.
        """
        self._in_flight = None
        reached = self._reached
        self._reached = {}
        one_of = {spec.kind: spec for spec in reversed(self._attention.layers.distinct)}
        for spec in one_of.values():  # kernels are compiled per kind of layer; first, since attention kernels take longest
            self._attend(spec, self._attention_steps(spec) if complete else reached.get(spec, ()))
        if self._attention.states is not None:
            self._run_states(self._attention.states)
        for step in self._steps():
            self._launch(step)
            if self._adapters is not None:  # in a slot of zeros
                self._launch(replace(step, adapters=numpy.zeros(step.num_seqs, dtype=numpy.int32)))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._runner.forget_tokens()
        self._selector.forget()
        pages = max(max(self._pages(self._limits.max_model_len, group)) for group in self._groups) + 1
        for group in self._groups:
            for cache in (self._attention.caches[layer] for layer in group.layers):
                for logical in (cache.logical_key, cache.logical_value):
                    logical[: pages * group.page_stride].zero_()

    def _steps(self) -> Iterator[StepInput]:
        """Yield prompts for all token counts at which kernels change, then decodes, mixed steps and verifications."""
        limits = self._limits
        small = min(limits.max_num_tokens, _SMALL)
        numbers = {*powers(small), *(3 * 2**n for n in range(32) if 3 * 2**n <= small), limits.max_num_tokens}
        for count in sorted(each for each in numbers if each <= limits.max_num_tokens):
            whole, rest = divmod(count, limits.max_model_len)
            query_lens = [limits.max_model_len] * whole + [rest] * (rest > 0)
            if len(query_lens) <= limits.max_num_seqs:
                yield self._step(query_lens, [0] * len(query_lens), first=count)
        context = min(_CONTEXT, limits.max_model_len - 1)
        if context == 0:
            return
        for num_seqs in powers(min(limits.max_num_seqs, limits.max_num_tokens - 1)):
            for first in range(len(_SAMPLED) if num_seqs == 1 else 1):
                yield self._step([1] * num_seqs, [context] * num_seqs, first)
        if limits.max_num_seqs > 1:
            yield self._step([1, 1], [0, context])
        longest = min(limits.max_decode_len, limits.max_model_len - 1)
        for width in sorted({min(each, longest) for each in WIDTHS} - {0, 1}):  # else the first verifications look slow
            context = min(_CONTEXT, limits.max_model_len - width)
            for num_seqs in powers(min(limits.max_num_seqs, limits.max_num_tokens // width, MAX_VERIFIED // width)):
                yield self._step([width] * num_seqs, [context] * num_seqs, num_drafts=width - 1)

    def _step(self, query_lens: Sequence[int], context_lens: Sequence[int], first: int = 0, num_drafts: int = 0) -> StepInput:
        """Return a step in which every token id is 0. first: index in `_SAMPLED` for the first sequence. num_drafts: drafts per
        sequence."""
        rows = numpy.arange(len(query_lens), dtype=numpy.int32)
        ends = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        return StepInput(
            rows=rows,
            query_lens=numpy.array(query_lens, dtype=numpy.int32),
            context_lens=numpy.array(context_lens, dtype=numpy.int32),
            num_draft_tokens=numpy.full(len(rows), num_drafts, dtype=numpy.int32),
            samples=numpy.ones(len(rows), dtype=numpy.bool_),
            token_ids=numpy.zeros(sum(query_lens), dtype=numpy.int64),
            state_indices=numpy.zeros(len(rows), dtype=numpy.int32),
            continues=False,
            verifies=num_drafts > 0,
            started=tuple(StartedRow(row, _SAMPLED[(first + row) % len(_SAMPLED)], 0) for row in rows.tolist()),
            new_pages=tuple(
                NewPages(row, 0, self._pages(end, group), number)
                for row, end in enumerate(ends)
                for number, group in enumerate(self._groups)
            ),
        )

    def _attend(self, spec: AttentionSpec, steps: Iterable[tuple[Backends, Sequence[Lengths]]]) -> None:
        """Run attention of one layer of this spec's kind in steps with these backends."""
        layer = self._attention.specs.index(spec)
        q, k, v = self.layer_inputs(layer)
        group = next(group for group in self._groups if layer in group.layers)
        ahead = AHEAD.get()
        for step, together in groupby(steps, itemgetter(1)):
            metadata = self._metadata(step, group)
            for backends, _ in together:
                known = 0 if ahead is None else ahead.num_new
                self._attend_once(layer, metadata, backends, (q, k, v))
                if ahead is not None and ahead.num_new > known:
                    self._reached.setdefault(spec, []).append((backends, step))

    def _attention_steps(self, spec: AttentionSpec) -> Iterator[tuple[Backends, Sequence[Lengths]]]:
        """Yield all attention steps of a layer, with each backend that auto may choose in each phase. The backends of a step
        follow one another."""
        for phase in reversed(Phase):  # kernels of decode take longest to compile
            wanted: dict[tuple[Lengths, ...], list[Backends]] = {}
            for backends in map(self._selector.instances.__getitem__, self._selector.selection.all_for(phase)):
                for step in self._steps_of(spec, phase, backends):
                    for whole in (step, [Lengths(1, 0), *step]) if phase is Phase.DECODE else (step,):
                        if fits(whole, self._limits):
                            wanted.setdefault(tuple(whole), []).append(backends)
            yield from ((backends, step) for step, users in wanted.items() for backends in users)

    def _run_states(self, states: LayersWithState) -> None:
        """Run one layer of each kind of state layer, in steps that reach all kernels of the backends."""
        for kind in states.kinds:
            layer = states.first_of(kind)
            x, *gates = self.layer_inputs(layer, of_state=True)
            for phase in Phase:
                for lengths in states.serving_in(kind, phase).warmup_steps(phase, self._limits):
                    if not fits(lengths, self._limits):
                        continue
                    try:
                        metadata = self._metadata(lengths, self._groups[0])
                        states.begin(states.metadata_of_rows(metadata, max(each.num_drafts for each in lengths)))
                        states(layer, x[: metadata.num_tokens], [gate[: metadata.num_tokens] for gate in gates])
                    except Exception as error:
                        self._note(f"states in {phase}", error)

    def _steps_of(self, spec: AttentionSpec, phase: Phase, backends: Backends) -> Iterator[Sequence[Lengths]]:
        """Yield steps that reach all kernels of a phase's backends. spec: spec of a layer's cache."""
        yield from backends[self._attention.layers.in_phase(spec, phase)].warmup_steps(phase, self._limits)
        if phase is Phase.EXTEND and spec in self._selector.gathering:
            yield from self._selector.gathering[spec].warmup_steps(phase, self._limits)

    def _metadata(self, lengths: Sequence[Lengths], group: CacheGroup) -> AttentionMetadata:
        query_lens, context_lens, drafts = numpy.array(lengths, dtype=numpy.int32).T
        counts = -(-(query_lens + context_lens) // self._block_size)
        blocks = group.blocks_of(self._pages(int(counts.max()) * self._block_size, group))[: counts.max()]
        tables = [numpy.where(numpy.arange(len(blocks)) < counts[:, None], blocks, numpy.int32(0))]
        num_blocks = [self._attention.num_blocks(group)]
        return AttentionMetadata.build_groups(
            query_lens, context_lens, tables, self._block_size, self._device, drafts + 1, num_blocks
        )[0]

    def _attend_once(self, layer: int, metadata: AttentionMetadata, backends: Backends, tensors: Sequence[Tensor]) -> None:
        try:
            decodes = metadata.decode is not None
            self._attention.begin(metadata, self._selector.backends_for(Phase.PREFILL) if decodes else backends, backends)
            q, k, v = (tensor[: metadata.num_tokens] for tensor in tensors)
            self._attention(layer, q, k, v)
        except Exception as error:
            self._note(f"{name_of(backends)} {(metadata.decode or metadata).phase}", error)

    def _launch(self, step: StepInput) -> None:
        """Launch a step, then wait for the previous step, as the engine loop does. Graphs have input memory for only two
        steps."""
        try:
            launched = self._runner.launch(step)
            if self._in_flight is not None:
                self._in_flight.wait()
            self._in_flight = launched
        except Exception as error:
            self._note("step", error)

    def _note(self, where: str, error: Exception) -> None:
        """Log a failure once, because no request can report it. With several ranks, raise the error instead, because the other
        ranks are still in the step."""
        if self._ranks.size > 1:
            raise error
        if where not in self._failed:
            self._failed.add(where)
            log.warning("warm-up: %s; a request that needs this step ends with the same error", error)
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()

    def layer_inputs(self, wanted: int, of_state: bool = False) -> list[Tensor]:
        """Return zero tensors with the strides that the model uses, for the largest step: q, k and v of an attention layer, or
        input and gates of a layer with a state. Views of one allocation still share memory."""
        seen: list[Tensor] = []

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer == wanted and not of_state:
                seen.extend((q, k, v))
            return q.new_zeros((*q.shape[:2], self._attention.value_head_dims[layer]))

        def state(layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
            assert self._attention.states is not None
            if layer == wanted and of_state:
                seen.extend((x, *gates))
            return x.new_zeros(x.shape[0], self._attention.states.out_channels(layer))

        few = torch.zeros(2, dtype=torch.int64, device=self._device)
        # int32 positions, as a decode graph passes them:
        self._model(few, few.int(), AttentionFunctions(attention, state))
        memory: dict[int, Tensor] = {}
        found = []
        for tensor in seen:
            storage = tensor.untyped_storage().data_ptr()
            if storage not in memory:  # shared by all views: large enough for the largest step
                memory[storage] = tensor.new_zeros((self._limits.max_num_tokens + 1) * max(each.stride(0) for each in seen))
            shape = (self._limits.max_num_tokens, *tensor.shape[1:])
            found.append(memory[storage].as_strided(shape, tensor.stride(), tensor.storage_offset()))
        return found

    def _pages(self, length: int, group: CacheGroup) -> list[int]:
        """Return the first pages of the pool, repeated if the pool has fewer pages than the sequence needs."""
        return [page % self._num_pages for page in range(-(-length // group.page_size))]
