"""The device side of the engine: launches a step, and hands its tokens over when they have come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from headway.core.contract.backend import Backends
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import Model
from headway.core.contract.transfer import upload
from headway.core.engine.attention import PagedAttention
from headway.core.engine.graphs import DecodeGraph, DecodeGraphs
from headway.core.engine.scheduler import Scheduled
from headway.core.sampling.sampler import SamplingOps, sample
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has been given."""

    step: list[Scheduled]
    sampled: list[Scheduled]
    """The shares that sample, in the order of `tokens`."""
    tokens: Tensor
    """int64 [len(sampled)] in host memory; valid once `done`."""
    done: torch.cuda.Event | None
    """None where the step ran at once."""
    backends: tuple[str, ...] = ()
    """Names of those that served it."""
    graph: bool = False
    """Whether it was a graph's replay."""
    first_nan: str | None = None
    """With HEADWAY_DEBUG=1: what made the first NaN."""

    def wait(self) -> list[int]:
        """The sampled tokens; waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        return list(self.tokens.tolist())


class Runner:
    """It knows sequences only as token ids, lengths, blocks and rows.

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
    ) -> None:
        self._model = model
        self._attention = attention
        self._selector = selector
        self._sampling = sampling
        self._block_size = block_size
        self._device = attention.specs[0].device
        self._newest = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self._device)  # the last is for padding rows
        self._max_model_len = max_model_len
        self._graphs: DecodeGraphs | None = None

    def capture(self, batch_sizes: Sequence[int]) -> None:
        """Capture decode steps of these many sequences as CUDA graphs; see DecodeGraphs for what may be refused."""
        sizes = self._block_size, self._max_model_len
        graphs = DecodeGraphs(self._model, self._attention, self._sampling.greedy, self._newest, *sizes)
        selector = self._selector
        graphs.capture(batch_sizes, lambda size: [selector.instances_of(name) for name in selector.decode_candidates(size)])
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, step: list[Scheduled]) -> Launched:
        """Start a step. On a CPU it has run when this returns."""
        graph = self._graph(step)
        if graph is not None:
            # Kernels take rows in order: the longest first, or one of them starts last and the rest of the GPU waits for it.
            step = sorted(step, key=lambda share: -share.context_len)
        sampled = [share for share in step if share.samples]
        if graph is not None:
            logits, best = graph.replay(step)
            tokens = self._sample(logits, best, sampled)
            if tokens is not best:  # those are in their places already
                self._newest.index_copy_(0, graph.rows[: len(step)], tokens)
        else:
            logits = self._run(step)
            tokens = self._sample(logits, self._sampling.greedy(logits), sampled)
            rows = torch.tensor([share.seq.row for share in sampled], dtype=torch.int64)
            self._newest.index_copy_(0, upload(rows, self._device), tokens)
        for share in sampled:
            share.seq.newest_at = share.context_len + share.num_new_tokens
        backends = graph.backends if graph is not None else self._attention.serving
        first_nan = self._attention.first_nan
        if self._device.type == "cpu":
            return Launched(step, sampled, tokens, None, backends, first_nan=first_nan)
        host = torch.empty(tokens.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Launched(step, sampled, host, done, backends, graph is not None, first_nan)

    def _graph(self, step: list[Scheduled]) -> DecodeGraph | None:
        """The graph that runs a step, where one was captured for its size and for the backend that is fastest at its lengths."""
        size = self._graphs.size_for(step) if self._graphs is not None else None
        if self._graphs is None or size is None:
            return None
        kv_len = sum(share.context_len for share in step) // len(step) + 1
        return self._graphs.get(size, self._selector.backends_for(Phase.DECODE, size, 1, kv_len))

    def _run(self, step: list[Scheduled]) -> Tensor:
        """The step as single launches; logits of the shares that sample."""
        input_ids, positions = self._inputs(step)
        metadata = AttentionMetadata.build(
            [share.num_new_tokens for share in step],
            [share.context_len for share in step],
            [share.seq.blocks for share in step],
            self._block_size,
            self._device,
        )
        prefill, decode = self._backends(metadata.prefill, Phase.PREFILL), self._backends(metadata.decode, Phase.DECODE)
        self._attention.begin(metadata, prefill, decode)
        hidden = self._model(input_ids, positions, self._attention)
        last = [row for row, share in enumerate(step) if share.samples]
        if len(last) < len(hidden):  # none, in the middle of a prompt
            hidden = hidden.index_select(0, upload(metadata.query_start_loc_cpu[1:][last] - 1, self._device))
        return self._model.compute_logits(hidden)

    def _backends(self, part: AttentionMetadata | None, phase: Phase) -> Backends:
        """Those that serve a part of the step; `phase` is that of a part without sequences."""
        if part is None:
            return self._selector.backends_for(phase)
        shape = Shape.of(part.phase, part.query_lens, part.kv_lens)
        return self._selector.backends_for(part.phase, shape.batch, shape.query_len, shape.kv_len)

    def _inputs(self, step: list[Scheduled]) -> tuple[Tensor, Tensor]:
        """Token ids and positions [num_tokens] on the device; tokens the host has not seen come from `_newest`."""
        token_ids: list[int] = []
        positions: list[int] = []
        unseen: list[tuple[int, int]] = []
        for share in step:
            first, last = share.context_len, share.context_len + share.num_new_tokens
            known = share.seq.token_ids[first:last]
            if len(known) < share.num_new_tokens:
                assert share.num_new_tokens == 1, "only a decoding sequence runs ahead of the host"
                assert share.seq.newest_at == first, "a token nobody knows"
                known = [0]
                unseen.append((len(token_ids), share.seq.row or 0))
            token_ids += known
            positions += range(first, last)
        numbers = numpy.array([token_ids, positions], dtype=numpy.int64)  # torch takes eight times as long for lists
        ids, places = upload(torch.from_numpy(numbers), self._device)
        if unseen:
            where = upload(torch.tensor(unseen), self._device)
            ids = ids.index_copy(0, where[:, 0], self._newest.index_select(0, where[:, 1]).clamp_min(0))
        return ids, places

    def _sample(self, logits: Tensor, best: Tensor, sampled: list[Scheduled]) -> Tensor:
        seqs = [share.seq for share in sampled]
        positions = [share.context_len + share.num_new_tokens for share in sampled]
        return sample(logits, best, [seq.params for seq in seqs], [seq.seed for seq in seqs], positions, self._sampling.draw)
