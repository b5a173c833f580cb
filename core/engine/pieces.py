"""Steps of any kind as pieces of CUDA graphs: all of a model but its attentions, which are launched between the pieces.

A prompt's attention depends on its lengths, so a step with a prompt is no single graph; but what lies between two attentions
depends on the number of tokens alone (vLLM's piecewise graphs). One launch then stands for the seven or more of a layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.errors import BackendError, HeadwayError
from headway.core.contract.model import Model
from headway.core.engine.attention import PagedAttention
from headway.core.engine.recorder import Recorder, borrowed

log = logging.getLogger("headway")

MAX_TOKENS = 2048
"""Tokens of the largest step in pieces: a larger one keeps a GPU busy for longer than the host needs to launch it."""


def piece_sizes(max_num_tokens: int) -> list[int]:
    """Token counts worth pieces: 8, 16, 32, then steps of 32 to 128, of 64 to 512, of 128 to 1,024, of 256 to MAX_TOKENS."""
    most = min(-(-max_num_tokens // 8) * 8, MAX_TOKENS)
    sizes = [8, 16, *range(32, 129, 32), *range(192, 513, 64), *range(640, 1025, 128), *range(1280, MAX_TOKENS + 1, 256)]
    return sorted({*(size for size in sizes if size <= most), most})


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention between two pieces. Its tensors have a row for each token that was recorded."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class _Pieces:
    """The model over `size` tokens."""

    def __init__(self, size: int, calls: list[_Call], graphs: list[Callable[[], None]], hidden: Tensor) -> None:
        self.size = size
        self._calls, self._graphs, self._hidden = calls, graphs, hidden

    def run(self, attention: PagedAttention, count: int) -> Tensor:
        """Hidden states of the first `count` tokens; the rows after them are padding, which attention never sees."""
        whole = count == self.size
        for call, graph in zip(self._calls, self._graphs[:-1], strict=True):
            graph()
            tensors = (call.q, call.k, call.v, call.out)
            attention.run(call.layer, *(tensors if whole else [tensor[:count] for tensor in tensors]))
        self._graphs[-1]()
        return self._hidden[:count]


class PieceGraphs:
    """Pieces by number of tokens; a step takes the smallest that hold it."""

    def __init__(self, model: Model, attention: PagedAttention, device: torch.device) -> None:
        self._model, self._attention, self._device = model, attention, device
        self._by_size: list[_Pieces] = []
        """The smallest first."""
        self._inputs = torch.zeros(2, 0, dtype=torch.int64, device=device)
        """Token ids and positions; those of padding are left from other steps, hence such as the model takes."""
        self._outs: dict[tuple[int, ...], Tensor] = {}
        """Room for the output of one attention, by the shape of a token's."""

    @property
    def largest(self) -> int:
        """Tokens of the largest step in pieces; 0: there are none."""
        return self._by_size[-1].size if self._by_size else 0

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], recorder: Recorder) -> None:
        """Record the model at these numbers of tokens, the largest first, so that the others find their memory in its pool."""
        started = time.perf_counter()
        self._inputs = torch.zeros(2, max(sizes), dtype=torch.int64, device=self._device)
        too_large: list[int] = []
        for size in sorted(set(sizes), reverse=True):
            try:
                self._by_size.insert(0, self._record(size, recorder))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                too_large.append(size)
        if too_large:
            log.warning("CUDA graphs: no memory for steps of %s tokens in pieces", ", ".join(map(str, too_large)))
        log.info("CUDA graphs: steps of up to %d tokens in pieces, in %.1f s", self.largest, time.perf_counter() - started)

    def _record(self, size: int, recorder: Recorder) -> _Pieces:
        ids, positions = self._inputs[:, :size]

        def no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._out(layer, q)

        # Compiles what is not compiled yet, and finds missing memory while that can still be mended.
        self._model(ids, positions, no_attention)
        calls: list[_Call] = []
        graphs: list[Callable[[], None]] = []

        def between(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            graphs.append(recorder.end())
            out = self._out(layer, q)
            calls.append(_Call(layer, borrowed(q), borrowed(k), borrowed(v), out))
            recorder.begin()
            return out

        recorder.begin()
        try:
            hidden = self._model(ids, positions, between)
        except BaseException as error:
            with suppress(Exception):  # a recording that has failed may not end well, and the first fault is the one to tell
                recorder.end()
            if isinstance(error, RuntimeError) and not isinstance(error, (HeadwayError, torch.OutOfMemoryError)):
                raise BackendError(
                    f"CUDA graphs: the model over {size} tokens cannot be captured: {error}; --enforce-eager does without"
                ) from error
            raise
        graphs.append(recorder.end())
        return _Pieces(size, calls, graphs, borrowed(hidden))

    def _out(self, layer: int, q: Tensor) -> Tensor:
        """Where a layer's attention writes: one piece of memory for all layers, since each is read before the next is written."""
        shape = (q.shape[1], self._attention.value_head_dims[layer])
        room = self._outs.get(shape)
        if room is None:  # zeros: padding rows are computed with, and nobody reads what comes of them
            room = self._outs[shape] = torch.zeros(self._inputs.shape[1], *shape, dtype=q.dtype, device=q.device)
        return room[: q.shape[0]]

    def run(self, ids: Tensor, positions: Tensor) -> Tensor | None:
        """Hidden states [num_tokens, hidden_size] of the step that attention was begun for, valid until the next; None: too many
        tokens. ids, positions: int64 [num_tokens]."""
        count = len(ids)
        pieces = next((each for each in self._by_size if each.size >= count), None)
        if pieces is None:
            return None
        self._inputs[0, :count].copy_(ids)
        self._inputs[1, :count].copy_(positions)
        return pieces.run(self._attention, count)
