"""Model runner: launches a step on the device, and returns the step's tokens when they have arrived on the host."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.adapters import adapters_of, rows_with
from headway.core.contract.backend import Backends, StepLimits
from headway.core.contract.kernel import listen, upload
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import Model
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.step import NEWEST, StepInput
from headway.core.engine.execution.attention import HostBlockTables, PagedAttention, copy_slots
from headway.core.engine.execution.captured_step import CapturedStep, DecodeGraph, GraphRecorder, PrefillGraph, VerifyGraph
from headway.core.engine.execution.graph_set import GraphSet, PiecewiseGraphs
from headway.core.engine.execution.host_rows import DeviceExtras, HostResults, HostRows, Launched, PromptScores
from headway.core.engine.execution.static_inputs import ModelStep
from headway.core.engine.execution.token_sampler import (
    Chosen,
    PromptScorer,
    TokenSampler,
    drafts_by_row,
    logit_indices,
    positions_of,
    sampled_at,
)
from headway.core.sampling.logprobs import Scores
from headway.core.sampling.sampler import Draws, SamplingOps
from headway.core.sampling.verification import verify
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector

log = logging.getLogger("headway")


class CompilationWatch:
    """Collector of the names of kernels that this process compiles from now on.

    Headway's CUDA C++ kernels report their compilations. Triton's compilations are seen through Triton's hook, if Triton is
    loaded; a hook that was already set is still called. The engine itself imports no kernel library. Compilations inside other
    libraries are not seen.
    """

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self._report = report
        self._names: list[str] = []
        listen(self._add)
        runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
        if runtime is None:  # not loaded, or a Triton before 3.4
            return
        watch, before = ref(self), runtime.jit_post_compile_hook

        def hook(**compiled: Any) -> Any:
            watching = watch()
            if watching is not None and not compiled.get("already_compiled"):
                watching._add(_name(compiled))
            return before(**compiled) if before is not None else None

        runtime.jit_post_compile_hook = hook

    def take(self) -> tuple[str, ...]:
        """Return the names of kernels compiled since the last call."""
        if not self._names:
            return ()
        names = tuple(self._names)
        self._names = []
        return names

    def take_unexpected(self) -> tuple[str, ...]:
        """Return and log the names of kernels compiled since the last call, after a step that should not have compiled any."""
        names = self.take()
        for name in names:
            log.warning("kernels: %s was compiled after the engine was ready; a step waited for it", name)
        return names

    def _add(self, name: str) -> None:
        self._names.append(name)
        if self._report is not None:
            self._report(name)


def _name(compiled: dict[str, Any]) -> str:
    return str(getattr(compiled.get("fn"), "name", None) or compiled.get("repr", "a kernel"))


class _DeviceResults(NamedTuple):
    chosen: Chosen
    tokens: Tensor  # Tokens, in the shape of `Launched.tokens`
    owners: NDArray[numpy.int64]  # int64 [rows of logits]: index of the sampling sequence to which each row belongs
    prompts: Sequence[PromptScores] = ()
    piecewise: bool = False


class ModelRunner:
    """Runs steps, given as plain data, on one device. Sampled tokens stay on the device as the next step's input."""

    def __init__(
        self,
        *,
        model: Model,
        attention: PagedAttention,
        selector: Selector,
        sampling: SamplingOps,
        limits: StepLimits,
        groups: Sequence[CacheGroup],
        hosts: HostRows,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """groups: cache groups of the layers. ranks: connection to all ranks, which run the same steps."""
        block_size = selector.selection.block_size
        max_num_seqs = limits.max_num_seqs
        max_model_len = limits.max_model_len
        self._model = model
        self._attention = attention
        self._selector = selector
        self._block_size = block_size
        self._groups = groups
        self._num_blocks = [attention.num_blocks(group) for group in groups]
        self._device = attention.layers.device
        self._newest = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self._device)  # the last row is for padding
        self._max_model_len = max_model_len
        self.tables = HostBlockTables(max_num_seqs, -(-max_model_len // block_size), groups)
        """Block tables of all rows, as the steps read them."""
        self._hosts = hosts
        self._ranks = ranks
        self._sampler = TokenSampler(sampling, max_num_seqs, model.vocab_size, self._device, self._hosts, ranks)
        self._vocabulary = self._sampler.vocabulary
        self._prompt_scorer = PromptScorer(model, self._vocabulary, self._device)
        self._results = HostResults(max_num_seqs, self._device)
        self._graphs: GraphSet | None = None
        self._adapters = adapters_of(model)
        self._piecewise = PiecewiseGraphs(model, attention, self._device, ranks)
        self._adapted_graphs: GraphSet | None = None  # Graphs of steps with adapters; the others compute no adapters
        self._adapter_piecewise = PiecewiseGraphs(model, attention, self._device, ranks, self._adapters)
        self.compilations: CompilationWatch | None = None
        """Collector of the names of kernels compiled during a step. None before the engine is ready."""
        self.observe: Callable[[NDArray[numpy.int32], Tensor], None] | None = None
        """Function called in every step with the sampling rows and their logits, which are valid until the next step. None means
        that no function is called."""

    def capture(
        self, batch_sizes: Sequence[int], token_counts: Sequence[int], recorder: GraphRecorder, max_decode_len: int = 1
    ) -> None:
        """Capture CUDA graphs for these batch sizes and prompt lengths. max_decode_len: maximum number of query tokens of a
        decode."""
        self._piecewise.capture(token_counts, recorder)
        if self._adapters is not None:
            self._adapter_piecewise.capture(token_counts, recorder)
        step = ModelStep(
            model=self._model,
            attention=self._attention,
            sampling=self._vocabulary.sampling,
            newest=self._newest,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            num_blocks=self._num_blocks,
            ranks=self._ranks,
        )
        graphs = GraphSet(step, self._selector)
        graphs.capture(batch_sizes, token_counts, max_decode_len, recorder)
        if self._adapters is not None:
            self._adapted_graphs = GraphSet(replace(step, adapters=self._adapters), self._selector)
            self._adapted_graphs.capture(batch_sizes, token_counts, max_decode_len, recorder)
        self._graphs = graphs

    def release_graphs(self) -> None:
        """Drop all graphs and their memory; `capture` makes them again."""
        self._graphs = self._adapted_graphs = None
        self._piecewise = PiecewiseGraphs(self._model, self._attention, self._device, self._ranks)
        self._adapter_piecewise = PiecewiseGraphs(self._model, self._attention, self._device, self._ranks, self._adapters)

    def forget_tokens(self) -> None:
        """Reset the last token of every row, which the steps of a warm-up have written."""
        self._newest.zero_()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Launched:
        """Start a step. On a CPU, the step has run when this method returns."""
        if self.compilations is not None:
            self.compilations.take()  # of others in this process
        self.tables.update(step)
        self._sampler.update(step.started)
        self._prompt_scorer.update(step.started)
        if step.copies:
            copy_slots(self._attention.caches, self._groups, step.copies)
        if step.restored and self._attention.states is not None:
            self._attention.states.restore(step.restored)
        graph, no_graph = self._graph(step)
        sampling = step.rows if step.continues else step.rows[step.samples]
        ran = self._launch(step, sampling) if graph is None else self._replay(graph, step)
        if graph is None and self._graphs is not None and not ran.piecewise and self._piecewise.largest:
            no_graph = f"more than {self._piecewise.largest} tokens"
        backends = graph.backends if graph is not None else self._attention.serving
        compiled = self.compilations.take_unexpected() if self.compilations is not None else ()
        extras = self._extras(ran)
        launched = Launched(
            tokens=self._results.copy(ran.tokens),
            order=None if graph is None or isinstance(graph, VerifyGraph) else ran.owners,
            backends=backends,
            graph=graph is not None,
            piecewise=ran.piecewise,
            no_graph=no_graph,
            compiled=compiled,
            first_nan=self._attention.first_nan,
            after_model=ran.chosen.after_model,
            waited_for=ran.chosen.waited_for,
            wait_seconds=ran.chosen.wait_seconds,
            gathers=self._vocabulary.take_gathers(),
            extras=extras,
        )
        self._hosts.launched(launched, sampling)
        return launched

    def _replay(self, graph: CapturedStep, step: StepInput) -> _DeviceResults:
        """Run a step as a graph, and choose the tokens that the graph could not choose."""
        if isinstance(graph, VerifyGraph):
            return self._verify(graph, step)
        order: NDArray[numpy.int64] = numpy.argsort(-step.context_lens, kind="stable")
        if isinstance(graph, PrefillGraph):
            rows, positions = step.rows, step.query_lens
            draws = self._draws(graph, rows, positions)
            logits, best = graph.replay(step, self.tables, draws)
        else:
            assert isinstance(graph, DecodeGraph)
            # Kernels take rows in order: longest first, or the longest starts last and the rest of the GPU waits for it.
            rows, context_lens = step.rows[order], step.context_lens[order]
            positions = context_lens + 1
            draws = self._draws(graph, rows, positions)
            states = self._state_slots(step, order)
            adapters = None if step.adapters is None else step.adapters[order]
            logits, best = graph.replay(rows, context_lens, self.tables, draws, states, adapters)
        self._show(step, rows, logits)
        chosen = self._sampler.sample(logits, rows, positions, best, drawn=draws is not None)
        if chosen.tokens is not best:  # those of the graph are in their rows already
            self._newest.index_copy_(0, graph.rows[: step.num_seqs], chosen.tokens)
        return _DeviceResults(chosen, chosen.tokens, order)

    def _state_slots(self, step: StepInput, order: NDArray[numpy.int64]) -> NDArray[numpy.int32] | None:
        """Return the slots of a decode's states, in the order of `order`; None if the model has no layers with a state."""
        if self._attention.states is None or step.state_indices is None:
            return None
        return self._attention.states.slots_of(step.rows[order], step.state_indices[order])

    def _launch(self, step: StepInput, sampling: NDArray[numpy.int32]) -> _DeviceResults:
        """Run a step piecewise or kernel by kernel. sampling: rows of the sequences that sample."""
        self.begin(step)
        hidden, piecewise = self.forward(step)
        prompts = self._prompt_scorer.score(step, hidden)
        wanted = logit_indices(step)
        if len(wanted) < len(hidden):  # none in the middle of a prompt
            hidden = hidden.index_select(0, upload(torch.from_numpy(wanted), self._device))
        logits = self._model.compute_logits(hidden)
        return self._choose(step, logits, sampling, prompts, piecewise)

    def _verify(self, graph: VerifyGraph, step: StepInput) -> _DeviceResults:
        """Run a step as a verification graph. Tokens that the graph cannot choose are chosen and verified after it."""
        rows, positions = numpy.repeat(step.rows, step.query_lens), positions_of(step).astype(numpy.int32)
        draws = self._draws(graph, rows, positions + 1)
        tokens = graph.replay(step, rows, positions, self.tables, draws)
        if self.observe is not None or step.shows_logits or draws is None or not self._sampler.plain(step.rows):
            return self._choose(step, graph.logits_of(step), step.rows)
        return _DeviceResults(Chosen(tokens), tokens, numpy.arange(step.num_seqs))

    def _choose(
        self,
        step: StepInput,
        logits: Tensor,
        sampling: NDArray[numpy.int32],
        prompts: Sequence[PromptScores] = (),
        piecewise: bool = False,
    ) -> _DeviceResults:
        """Choose the tokens of a step, and verify its drafts. sampling: rows of the sequences that sample."""
        rows, positions = sampled_at(step)
        self._show(step, rows, logits)
        owners: NDArray[numpy.int64] = numpy.arange(len(sampling))
        drafts = drafts_by_row(step) if step.num_draft_tokens.any() else {}
        if drafts:
            owners = numpy.repeat(owners, step.num_draft_tokens[step.samples] + 1)
            self._sampler.note_drafts(step)
        chosen = self._sampler.sample(logits, rows, positions, drafts=drafts)
        tokens = newest = chosen.tokens
        if drafts:
            tokens, newest = verify(tokens, [drafts.get(row, ()) for row in sampling.tolist()])
        self._newest.index_copy_(0, upload(torch.from_numpy(sampling).long(), self._device), newest)
        return _DeviceResults(chosen, tokens, owners, prompts, piecewise)

    def _extras(self, ran: _DeviceResults) -> DeviceExtras | None:
        chosen, prompts = ran.chosen, ran.prompts
        if chosen.scores is None and not prompts and not chosen.errors:
            return None
        scores = None if chosen.scores is None else self._scores_to_host(chosen.scores)
        listed = [replace(each, scores=self._scores_to_host(each.scores)) for each in prompts]
        return DeviceExtras(chosen.errors, scores, chosen.scored, listed, ran.owners)

    def _scores_to_host(self, scores: Scores) -> Scores:
        return Scores(*map(self._to_host, scores))

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host

    def _graph(self, step: StepInput) -> tuple[CapturedStep | None, str]:
        """Return the graph that runs a step, or None and the reason. The reason is empty before graphs are captured."""
        graphs = self._graphs if step.adapters is None else self._adapted_graphs
        if graphs is None:
            return None, ""
        if step.embedded:
            return None, "prompt_embeds"
        return graphs.for_step(step, prompt_logprobs=self._prompt_scorer.wants(step))

    def begin(self, step: StepInput, backends: Sequence[str] = ()) -> None:
        """Set up a step for `forward`. backends: names of the backends of an earlier run of the step; () chooses them."""
        metadata = AttentionMetadata.build_groups(
            step.query_lens,
            step.context_lens,
            self.tables.of_step(step.rows, step.context_lens + step.query_lens, self._block_size),
            self._block_size,
            self._device,
            step.num_draft_tokens + 1 if step.num_draft_tokens.any() else 1,
            self._num_blocks,
        )
        first = metadata[0]
        if backends:
            prefill = self.backends_of(first.prefill.phase if first.prefill else Phase.PREFILL, backends)
            decode = self.backends_of(Phase.DECODE, backends)
        else:
            prefill, decode = self._backends(first.prefill, Phase.PREFILL), self._backends(first.decode, Phase.DECODE)
        self._attention.begin(metadata, prefill, decode)
        if self._attention.states is not None:
            self._attention.states.begin(self._attention.states.metadata(step, first))

    def forward(self, step: StepInput, eager: bool = False) -> tuple[Tensor, bool]:
        """Run the model over a step, piecewise or kernel by kernel (always if `eager`).

        Return the hidden states of all tokens, and True if the step ran piecewise."""
        input_ids, positions = self._inputs(step)
        slots = None
        if step.adapters is not None and self._adapters is not None:
            slots = upload(torch.from_numpy(numpy.repeat(step.adapters, step.query_lens)), self._device)
        if step.embedded:
            rows = [(first, upload(given, self._device)) for first, given in step.embedded]
            with rows_with(self._adapters, slots):
                return self._model(input_ids, positions, self._attention, rows), False  # type: ignore[call-arg]
        segments = self._piecewise if slots is None else self._adapter_piecewise
        if not eager and self._graphs is not None and (hidden := segments.run(input_ids, positions, slots)) is not None:
            return hidden, True
        with rows_with(self._adapters, slots):
            return self._model(input_ids, positions, self._attention), False

    def backends_of(self, phase: Phase, names: Sequence[str]) -> Backends:
        """Return the instances of the backends with which a step ran a phase. names: `Launched.backends` of the step."""
        name = names[-1 if phase is Phase.DECODE else 0] if names else ""
        return self._selector.instances.get(name) or self._selector.backends_for(phase)

    def _backends(self, part: AttentionMetadata | None, phase: Phase) -> Backends:
        """Return the backends for a part of the step. phase: phase to use if `part` is None."""
        if part is None:
            return self._selector.backends_for(phase)
        shape = Shape.of(part.phase, part.query_lens, part.kv_lens)
        self._selector.count(shape.phase, shape.batch, shape.query_len, shape.kv_len)
        return self._selector.backends_of(shape)

    def _inputs(self, step: StepInput) -> tuple[Tensor, Tensor]:
        """Return token ids and positions, [num_tokens] each, on the device. Tokens that the host has not read come from
        `_newest`."""
        rows = step.rows if step.num_tokens == step.num_seqs else numpy.repeat(step.rows, step.query_lens)
        numbers = numpy.empty((3, step.num_tokens), dtype=numpy.int64)
        numbers[0], numbers[1], numbers[2] = step.token_ids, positions_of(step), rows
        ids, positions, own_rows = upload(torch.from_numpy(numbers), self._device)
        if step.continues:
            ids = self._newest.index_select(0, own_rows).clamp_min(0)
        elif (step.token_ids == NEWEST).any():
            ids = torch.where(ids == NEWEST, self._newest.index_select(0, own_rows).clamp_min(0), ids)
        return ids, positions

    def _draws(self, graph: CapturedStep, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32]) -> Draws | None:
        """Return the draws for a graph's tokens, or None if the graph supports only greedy sampling."""
        if self._vocabulary.sampling.choose is None:
            return None
        draws = self._sampler.draws(rows, positions)
        if draws.filters is not None:
            self._vocabulary.filtered_in_graph(draws.filters, graph.num_rows)
        return draws

    def _show(self, step: StepInput, rows: NDArray[numpy.int32], logits: Tensor) -> None:
        if self.observe is None and not step.shows_logits:
            return
        whole = self._vocabulary.whole(logits, "shown")
        if self.observe is not None:
            self.observe(rows, whole)
