"""Piecewise CUDA graphs: all of a model but its attentions, which are launched between the pieces.

A prompt's attention depends on its lengths, so a step with a prompt is no single graph; but what the model computes between two
attentions depends on the number of tokens alone (vLLM's piecewise graphs). One launch then replaces the seven or more of a layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.adapters import ModelAdapters, rows_with
from headway.core.contract.model import AttentionFunctions, Model
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.engine.execution.attention import PagedAttention
from headway.core.engine.execution.captured_step import GraphRecorder, borrowed, explain_failure

log = logging.getLogger("headway")

MAX_TOKENS = 2048
"""Tokens of the largest piecewise graph: a larger step keeps a GPU busy for longer than the host needs to launch it."""


def piecewise_sizes(max_num_tokens: int) -> list[int]:
    """Token counts worth a graph: 8, 16, 32, then steps of 32 to 128, of 64 to 512, of 128 to 1,024, of 256 to MAX_TOKENS."""
    most = min(-(-max_num_tokens // 8) * 8, MAX_TOKENS)
    sizes = [8, 16, *range(32, 129, 32), *range(192, 513, 64), *range(640, 1025, 128), *range(1280, MAX_TOKENS + 1, 256)]
    return sorted({*(size for size in sizes if size <= most), most})


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """An attention between two pieces. Its tensors have a row for each token that was recorded."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor

    def run(self, attention: PagedAttention, count: int) -> None:
        """Attend for the first `count` tokens."""
        if count == len(self.q):
            attention.run(self.layer, self.q, self.k, self.v, self.out)
        else:
            attention.run(self.layer, self.q[:count], self.k[:count], self.v[:count], self.out[:count])


@dataclass(frozen=True, slots=True)
class _StateCall:
    """A layer with a state between two pieces, like `_AttentionCall`."""

    layer: int
    x: Tensor
    gates: Sequence[Tensor]
    out: Tensor

    def run(self, attention: PagedAttention, count: int) -> None:
        """Run the first `count` tokens through the layer."""
        assert attention.states is not None
        attention.states.run(self.layer, self.x[:count], [gate[:count] for gate in self.gates], self.out[:count])


class _PiecewiseGraph:
    """The model over `size` tokens, as pieces."""

    def __init__(
        self, size: int, calls: list[_AttentionCall | _StateCall], graphs: list[Callable[[], None]], hidden: Tensor
    ) -> None:
        self.size = size
        self._calls = calls
        self._graphs = graphs
        self._hidden = hidden

    def run(self, attention: PagedAttention, count: int) -> Tensor:
        """Hidden states of the first `count` tokens; the rows after them are padding, which attention never sees."""
        for call, graph in zip(self._calls, self._graphs[:-1], strict=True):
            graph()
            call.run(attention, count)
        self._graphs[-1]()
        return self._hidden[:count]


class PiecewiseGraphs:
    """Piecewise graphs by number of tokens; a step takes the smallest that holds it."""

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        device: torch.device,
        ranks: Ranks = ONE_RANK,
        adapters: ModelAdapters | None = None,
    ) -> None:
        """adapters: the model's, where the graphs are of steps in which rows have some; None: none has any."""
        self._adapters = adapters
        self._slots = torch.zeros(0, dtype=torch.int32, device=device)
        """Slots of the rows' adapters; those of padding are left from other steps."""
        self._model = model
        self._attention = attention
        self._device = device
        self._ranks = ranks
        self._by_size: list[_PiecewiseGraph] = []
        """The smallest first."""
        self._inputs = torch.zeros(2, 0, dtype=torch.int64, device=device)
        """Token ids and positions; those of padding are left from other steps, hence valid ones."""
        self._outs: dict[tuple[int, ...], Tensor] = {}
        """Memory for the output of one attention or state, by the shape of one token's output."""

    @property
    def largest(self) -> int:
        """Tokens of the largest piecewise graph; 0: there is none."""
        return self._by_size[-1].size if self._by_size else 0

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], recorder: GraphRecorder) -> None:
        """Record the model at these numbers of tokens, the largest first, so that the others find their memory in its pool."""
        started = time.perf_counter()
        self._inputs = torch.zeros(2, max(sizes), dtype=torch.int64, device=self._device)
        self._slots = torch.zeros(max(sizes), dtype=torch.int32, device=self._device)
        too_large: list[int] = []
        for size in sorted(set(sizes), reverse=True):
            try:
                with rows_with(self._adapters, self._slots[:size]):
                    self._by_size.insert(0, self._record(size, recorder))
            except torch.OutOfMemoryError:
                if self._ranks.size > 1:  # the others have the graph, and wait in it for this one
                    raise
                torch.cuda.empty_cache()
                too_large.append(size)
        if too_large:
            log.warning("CUDA graphs: no memory for steps of %s tokens in pieces", ", ".join(map(str, too_large)))
        log.info("CUDA graphs: steps of up to %d tokens in pieces, in %.1f s", self.largest, time.perf_counter() - started)

    def _record(self, size: int, recorder: GraphRecorder) -> _PiecewiseGraph:
        ids, positions = self._inputs[:, :size]

        nothing = AttentionFunctions(
            lambda layer, q, k, v: self._out(layer, q), lambda layer, x, gates: self._state_out(layer, x)
        )
        # Compiles what is not compiled yet, and finds missing memory while that can still be mended.
        self._model(ids, positions, nothing)
        calls: list[_AttentionCall | _StateCall] = []
        graphs: list[Callable[[], None]] = []

        def between(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            graphs.append(recorder.end())
            out = self._out(layer, q)
            calls.append(_AttentionCall(layer, borrowed(q), borrowed(k), borrowed(v), out))
            recorder.begin()
            return out

        def state_between(layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
            graphs.append(recorder.end())
            out = self._state_out(layer, x)
            calls.append(_StateCall(layer, borrowed(x), [borrowed(gate) for gate in gates], out))
            recorder.begin()
            return out

        recorder.begin()
        try:
            hidden = self._model(ids, positions, AttentionFunctions(between, state_between))
        except BaseException as error:
            with suppress(Exception):  # a recording that has failed may not end well, and the first fault is the one to tell
                recorder.end()
            explained = explain_failure(error, f"the model over {size} tokens")
            if explained is error:
                raise
            raise explained from error
        graphs.append(recorder.end())
        return _PiecewiseGraph(size, calls, graphs, borrowed(hidden))

    def _out(self, layer: int, q: Tensor) -> Tensor:
        """Where a layer's attention writes: the same memory for all layers, since each reads before the next writes."""
        return self._room((q.shape[1], self._attention.value_head_dims[layer]), q)

    def _state_out(self, layer: int, x: Tensor) -> Tensor:
        """Where a layer with a state writes."""
        assert self._attention.states is not None
        return self._room((self._attention.states.out_channels(layer),), x)

    def _room(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory for an output of this shape for each of the tokens of `like`."""
        room = self._outs.get(shape)
        if room is None:  # zeros: padding rows are computed with, and nobody reads what comes of them
            room = self._outs[shape] = torch.zeros(self._inputs.shape[1], *shape, dtype=like.dtype, device=like.device)
        return room[: like.shape[0]]

    def run(self, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor | None:
        """Hidden states [num_tokens, hidden_size] of the step that attention was begun for, valid until the next step; None: no
        graph has so many tokens. ids, positions: int64 [num_tokens]; slots: of the rows' adapters, int32 [num_tokens]."""
        count = len(ids)
        graph = next((each for each in self._by_size if each.size >= count), None)
        if graph is None:
            return None
        self._inputs[0, :count].copy_(ids)
        self._inputs[1, :count].copy_(positions)
        if slots is not None:
            self._slots[:count].copy_(slots)
        return graph.run(self._attention, count)
