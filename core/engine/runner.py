"""The device's side of the engine: launches a step, and hands its tokens over when they have come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.backend import Backends
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import Model
from headway.core.contract.transfer import upload
from headway.core.engine.attention import PagedAttention
from headway.core.engine.compilation import CompilationWatch
from headway.core.engine.copies import copy_slots
from headway.core.engine.graph import DecodeGraph, GraphStep
from headway.core.engine.graphs import DecodeGraphs
from headway.core.engine.groups import CacheGroup
from headway.core.engine.pieces import PieceGraphs
from headway.core.engine.prompts import PromptGraph, PromptGraphs
from headway.core.engine.recorder import Recorder
from headway.core.engine.rows import Draws, Rows
from headway.core.engine.step import NEWEST, Sampled, StepInput
from headway.core.sampling.sampler import SamplingOps, sample
from headway.core.sampling.verification import Verified, verify
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has been given; see `InFlight`."""

    tokens: Tensor
    """int64 [rows], or [rows, drafts + 1], in host memory and in the order of `order`; valid once `done`."""
    counts: Tensor | None
    """int64 [rows], likewise; None: every row has one token."""
    order: NDArray[numpy.int64] | None
    """Which of the step's sampling sequences each row is; None: they are in order."""
    done: torch.cuda.Event | None
    """None where the step ran at once."""
    backends: tuple[str, ...] = ()
    graph: bool = False
    piecewise: bool = False
    no_graph: str = ""
    compiled: tuple[str, ...] = ()
    first_nan: str | None = None

    def wait(self) -> Sampled:
        """The sampled tokens; waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        tokens = self.tokens.numpy()
        if tokens.ndim == 1:
            tokens = tokens[:, None]
        if self.order is not None:  # a graph's rows, and those have no drafts
            ordered = numpy.empty_like(tokens)
            ordered[self.order] = tokens
            tokens = ordered
        counts = numpy.ones(len(tokens), dtype=numpy.int64) if self.counts is None else self.counts.numpy()
        return Sampled(tokens, counts)


class Runner:
    """Runs steps that are plain data, on one device.

    The tokens a step samples stay on the device, one place a row, and are the next step's input there: the host need not have
    seen them to launch it.
    """

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        selector: Selector,
        sampling: SamplingOps,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        groups: Sequence[CacheGroup],
    ) -> None:
        """groups: the cache groups of the layers."""
        self._model = model
        self._attention = attention
        self._selector = selector
        self._sampling = sampling
        self._block_size = block_size
        self._groups = groups
        self._num_blocks = [attention.caches[group.layers[0]].geometry.num_blocks for group in groups]
        self._device = attention.specs[0].device
        self._newest = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self._device)  # the last is for padding rows
        self._max_model_len = max_model_len
        self._rows = Rows(max_num_seqs, -(-max_model_len // block_size), groups)
        self._graphs: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None
        self._pieces = PieceGraphs(model, attention, self._device)
        self._compilations: CompilationWatch | None = None
        self.observe: Callable[[NDArray[numpy.int32], Tensor], None] | None = None
        """Called in every step with the rows that sample and their logits, which the next step overwrites."""

    def capture(self, batch_sizes: Sequence[int], token_counts: Sequence[int], recorder: Recorder) -> None:
        """Capture decode steps of these many sequences, and pieces of other steps of these many tokens, as CUDA graphs.

        See DecodeGraphs for what may be refused.
        """
        self._pieces.capture(token_counts, recorder)
        sizes = self._block_size, self._max_model_len, self._num_blocks
        step = GraphStep(self._model, self._attention, self._sampling, self._newest, *sizes)
        graphs, prompts, selector = DecodeGraphs(step), PromptGraphs(step), self._selector

        def candidates(size: int) -> list[Backends]:
            return [selector.instances_of(name) for name in selector.decode_candidates(size)]

        graphs.capture(batch_sizes, candidates, recorder)  # before prompts, for its logits are the largest
        prompts.capture(token_counts, self._prompt_backends, recorder)
        self._graphs, self._prompts = graphs, prompts

    def _prompt_backends(self, length: int) -> Backends:
        """Those that are fastest for one prompt."""
        return self._selector.backends_for(Phase.PREFILL, 1, length, length)

    def forget_tokens(self) -> None:
        """Start every row anew: for steps that nobody asked for."""
        self._newest.zero_()

    def watch_compilations(self, watch: CompilationWatch) -> None:
        """From now on, tell of each step what was compiled for it."""
        self._compilations = watch

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Launched:
        """Start a step. On a CPU it has run when this returns."""
        if self._compilations is not None:
            self._compilations.take()  # for others in this process
        self._rows.update(step)
        if step.copies:
            copy_slots(self._attention.caches, self._groups, step.copies)
        graph, no_graph = self._graph(step)
        order, verified, piecewise = None, None, False
        if graph is not None:
            positions = step.context_lens + step.query_lens
            if isinstance(graph, PromptGraph):
                draws = self._draws(step.rows, positions)
                logits, best = graph.replay(step, self._rows, draws)
            else:
                # Kernels take rows in order: the longest first, or one of them starts last and the rest of the GPU waits for it.
                order = numpy.argsort(-step.context_lens, kind="stable")
                step = replace(step, rows=step.rows[order], context_lens=step.context_lens[order])
                positions = step.context_lens + 1
                draws = self._draws(step.rows, positions)
                logits, best = graph.replay(step.rows, step.context_lens, self._rows, draws)
            if self.observe is not None:
                self.observe(step.rows, logits)
            tokens = best if draws is not None else self._sample(logits, best, step.rows, positions)
            if tokens is not best:  # those are in their places already
                self._newest.index_copy_(0, graph.rows[: step.num_seqs], tokens)
        else:
            logits, piecewise = self._run(step)
            if self._graphs is not None and not piecewise and self._pieces.largest:
                no_graph = f"more than {self._pieces.largest} tokens"
            rows, positions = _sampled_at(step)
            if self.observe is not None:
                self.observe(rows, logits)
            tokens = self._sample(logits, self._sampling.greedy(logits), rows, positions)
            newest = tokens
            if step.num_draft_tokens.any():
                verified = _verify(step, tokens)
                newest = verified.newest
            self._newest.index_copy_(0, upload(torch.from_numpy(step.rows[step.samples]).long(), self._device), newest)
        backends = graph.backends if graph is not None else self._attention.serving
        compiled = self._compilations.take_late() if self._compilations is not None else ()
        counts, done = None, None
        if verified is not None:
            tokens, counts = verified.tokens, self._to_host(verified.counts)
        tokens = self._to_host(tokens)
        if self._device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        graphs = graph is not None, piecewise, no_graph
        return Launched(tokens, counts, order, done, backends, *graphs, compiled, self._attention.first_nan)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host

    def _graph(self, step: StepInput) -> tuple[DecodeGraph | PromptGraph | None, str]:
        """The graph that runs a step: captured for its size and for the backend that is fastest at its lengths; or why none."""
        if self._graphs is None or self._prompts is None:
            return None, ""
        prompt = self._prompts.for_step(step)
        if prompt is not None:
            return prompt, ""
        kv_len = int(step.context_lens.sum()) // step.num_seqs + 1
        return self._graphs.for_step(step, lambda size: self._selector.backends_for(Phase.DECODE, size, 1, kv_len))

    def _run(self, step: StepInput) -> tuple[Tensor, bool]:
        """The step in pieces or as single launches: logits of the tokens after which something is sampled; whether in pieces."""
        tables = self._rows.blocks(step.rows, step.context_lens + step.query_lens, self._block_size)
        decode_lens = step.num_draft_tokens + 1 if step.num_draft_tokens.any() else 1
        lens = step.query_lens, step.context_lens
        metadata = AttentionMetadata.build_groups(*lens, tables, self._block_size, self._device, decode_lens, self._num_blocks)
        input_ids, positions = self._inputs(step)
        first = metadata[0]
        prefill, decode = self._backends(first.prefill, Phase.PREFILL), self._backends(first.decode, Phase.DECODE)
        self._attention.begin(metadata, prefill, decode)
        in_pieces = self._pieces.run(input_ids, positions)
        hidden = self._model(input_ids, positions, self._attention) if in_pieces is None else in_pieces
        wanted = _logit_indices(step)
        if len(wanted) < len(hidden):  # none, in the middle of a prompt
            hidden = hidden.index_select(0, upload(torch.from_numpy(wanted), self._device))
        return self._model.compute_logits(hidden), in_pieces is not None

    def _backends(self, part: AttentionMetadata | None, phase: Phase) -> Backends:
        """Those that serve a part of the step; `phase` is that of a part without sequences."""
        if part is None:
            return self._selector.backends_for(phase)
        shape = Shape.of(part.phase, part.query_lens, part.kv_lens)
        return self._selector.backends_for(part.phase, shape.batch, shape.query_len, shape.kv_len)

    def _inputs(self, step: StepInput) -> tuple[Tensor, Tensor]:
        """Token ids and positions [num_tokens] on the device; tokens the host has not seen come from `_newest`."""
        rows = numpy.repeat(step.rows, step.query_lens)
        numbers = numpy.empty((3, step.num_tokens), dtype=numpy.int64)
        numbers[0], numbers[1], numbers[2] = step.token_ids, _positions(step), rows
        ids, positions, places = upload(torch.from_numpy(numbers), self._device)
        if (step.token_ids == NEWEST).any():
            ids = torch.where(ids == NEWEST, self._newest.index_select(0, places).clamp_min(0), ids)
        return ids, positions

    def _draws(self, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32]) -> Draws | None:
        """How a graph chooses all of a step's tokens; None where it can choose the most likely ones alone."""
        return None if self._sampling.choose is None else self._rows.draws(rows, positions)

    def _sample(self, logits: Tensor, best: Tensor, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32]) -> Tensor:
        params, seeds = self._rows.params, self._rows.seeds
        listed: list[int] = rows.tolist()
        listed_params = [params[row] for row in listed]
        return sample(logits, best, listed_params, [seeds[row] for row in listed], positions.tolist(), self._sampling.draw)


def _positions(step: StepInput) -> NDArray[numpy.int64]:
    """Position in its sequence of every new token: int64 [num_tokens]."""
    starts = numpy.cumsum(step.query_lens, dtype=numpy.int64) - step.query_lens
    positions: NDArray[numpy.int64] = numpy.arange(step.num_tokens) + numpy.repeat(step.context_lens - starts, step.query_lens)
    return positions


def _logit_indices(step: StepInput) -> NDArray[numpy.int64]:
    """Which new tokens something is sampled after: the last of each sampling sequence, and with d drafts the d before it."""
    counts = numpy.where(step.samples, step.num_draft_tokens + 1, 0)
    ends = numpy.cumsum(step.query_lens, dtype=numpy.int64)
    if not step.num_draft_tokens.any():
        last: NDArray[numpy.int64] = ends[step.samples] - 1
        return last
    indices: NDArray[numpy.int64] = numpy.repeat(ends - numpy.cumsum(counts), counts)
    return indices + numpy.arange(len(indices))


def _sampled_at(step: StepInput) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]]:
    """Row and position of every token that is sampled."""
    indices = _logit_indices(step)
    if len(indices) == step.num_tokens == step.num_seqs:
        return step.rows, step.context_lens + 1
    rows = numpy.repeat(step.rows, step.query_lens)[indices]
    return rows, (_positions(step)[indices] + 1).astype(numpy.int32)


def _verify(step: StepInput, tokens: Tensor) -> Verified:
    """Hold the drafts of the sampling sequences against what was sampled in their places."""
    guessed: list[list[int]] = []
    ends = numpy.cumsum(step.query_lens).tolist()
    for end, count, samples in zip(ends, step.num_draft_tokens.tolist(), step.samples.tolist(), strict=True):
        if samples:
            guessed.append(step.token_ids[end - count : end].tolist())
    return verify(tokens, guessed)
