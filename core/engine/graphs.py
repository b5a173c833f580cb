"""Decode steps captured once as CUDA graphs and replayed: one launch a step instead of hundreds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from headway.core.contract.backend import Backends, GraphLevel
from headway.core.contract.errors import BackendError, HeadwayError
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.model import Model
from headway.core.contract.support import Reason
from headway.core.engine.attention import PagedAttention
from headway.core.engine.scheduler import Scheduled

log = logging.getLogger("headway")

_LONGS = 2
"""int64 numbers a row: its place in `newest`, and its slot."""
_INTS = 2
"""int32 numbers a row: its position, and its length."""
_ALIGN = 4
"""Fields begin at multiples of 16 bytes, which kernels may rely on."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, 8 and then steps of 8, as far as max_num_seqs and 256."""
    most = min(max_num_seqs, 256)
    sizes = [1, 2, 4, *range(8, most + 1, 8)]
    return sorted({*(size for size in sizes if size <= most), most})


class DecodeGraphs:
    """Graphs of one decode step each, by batch size; a step takes the smallest that holds it, and the rest is padding.

    A graph reads its inputs from one static buffer that one copy fills. It is captured at the longest context, where a backend
    fixes its grid, and the lengths it reads on the device decide what is computed.
    """

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        greedy: Callable[[Tensor], Tensor],
        newest: Tensor,
        block_size: int,
        max_model_len: int,
    ) -> None:
        """newest: int64 [max_num_seqs + 1], the last sampled token of each row; the last place belongs to padding."""
        self._model = model
        self._attention = attention
        self._greedy = greedy
        self._newest = newest
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_num_seqs = len(newest) - 1
        self._width = _aligned(-(-max_model_len // block_size))
        self._tables = numpy.zeros((self._max_num_seqs, self._width), dtype=numpy.int32)
        self._logits: Tensor | None = None  # [largest batch, vocab_size]; every graph computes its own into its first rows
        self._graphs: dict[tuple[int, str], DecodeGraph] = {}
        self._size_of: list[int] = []
        """The captured batch size for each number of sequences."""

    def capture(self, batch_sizes: Sequence[int], candidates: Callable[[int], Sequence[Backends]]) -> None:
        """Capture the largest first, so that the others find their memory in its pool; says what it took.

        candidates: for a batch size, the backends worth a graph. One that cannot run in a graph, or memory that does not suffice,
        leaves steps to run as single launches: the log says so once.
        """
        device = self._newest.device
        wanted = {size: candidates(size) for size in sorted(batch_sizes, reverse=True) if size <= self._max_num_seqs}
        inputs = _Inputs(max(wanted), self._width, device)
        started, before = time.perf_counter(), _used(device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        refused: set[str] = set()
        too_large: list[int] = []
        for size, choices in wanted.items():
            for backends in choices:
                name = _name(backends)
                if name in refused:
                    continue
                if any(backend.graph_level < GraphLevel.DECODE for backend in backends.values()):
                    refused.add(name)
                    self._explain(backends)
                    continue
                try:
                    graph = DecodeGraph(self, inputs, size, backends)
                    graph.capture(pool, stream)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    too_large.append(size)
                else:
                    self._graphs[size, name] = graph
        if too_large:
            listed = ", ".join(map(str, too_large))
            log.warning("CUDA graphs: no memory for batches of %s: those are launched kernel by kernel", listed)
        sizes = sorted({size for size, _ in self._graphs})
        for size in sizes:
            self._size_of += [size] * (size + 1 - len(self._size_of))
        if sizes:
            log.info(
                "CUDA graphs: %d of decode captured, %d batch sizes up to %d, in %.1f s and %.0f MB: %s",
                len(self._graphs),
                len(sizes),
                sizes[-1],
                time.perf_counter() - started,
                (_used(device) - before) / 2**20,
                ", ".join(sorted({name for _, name in self._graphs})),
            )

    def _explain(self, backends: Backends) -> None:
        """Say why there are no graphs, and what a step costs without: the host's time to launch one, measured."""
        backend = min(backends.values(), key=lambda each: each.graph_level)
        step = DecodeGraph(self, _Inputs(1, self._width, self._newest.device), 1, backends)
        started = time.perf_counter()
        step.run()
        reason = Reason("graph_level", "DECODE or higher", backend.graph_level.name, "--enforce-eager says that this is meant")
        log.warning(
            "CUDA graphs: %s cannot be captured (%s); launching a decode step kernel by kernel takes the host %.1f ms",
            backend.name,
            reason,
            1e3 * (time.perf_counter() - started),
        )

    def size_for(self, step: list[Scheduled]) -> int | None:
        """The captured batch size that holds a step; None if the step is larger than all, or does not go on from `newest`."""
        count = len(step)
        if count >= len(self._size_of) or any(s.num_new_tokens > 1 or s.context_len != s.seq.newest_at for s in step):
            return None
        return self._size_of[count]

    def get(self, size: int, backends: Backends) -> DecodeGraph | None:
        """The graph of a batch size with these backends; None if it was not captured."""
        return self._graphs.get((size, _name(backends)))

    def fill(self, longs: numpy.ndarray, ints: numpy.ndarray, table: numpy.ndarray, step: list[Scheduled]) -> None:
        """Write a step's inputs. longs: int64 [_LONGS, batch]; ints: int32 [_INTS, batch]; table: int32 [batch, width]."""
        rows, slots, positions = [], [], []
        size = self._block_size
        for share in step:
            seq, at = share.seq, share.context_len
            row, blocks = seq.row or 0, seq.blocks
            if seq.num_tabled < len(blocks):
                self._tables[row, seq.num_tabled : len(blocks)] = blocks[seq.num_tabled :]
                seq.num_tabled = len(blocks)
            rows.append(row)
            slots.append(blocks[at // size] * size + at % size)
            positions.append(at)
        count = len(step)
        longs[:, :count] = rows, slots
        longs[:, count:] = [[self._max_num_seqs], [-1]]
        ints[0, :count] = positions
        ints[1, :count] = ints[0, :count] + 1
        ints[:, count:] = 0
        numpy.take(self._tables, rows, axis=0, out=table[:count])
        table[count:] = 0


class _Inputs:
    """One device buffer for the inputs of every graph, and two in pinned memory: one may be on its way while one is filled."""

    def __init__(self, most: int, width: int, device: torch.device) -> None:
        length = _aligned(most) * (2 * _LONGS + _INTS) + most * width
        self.width = width
        self.device = torch.zeros(length, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]

    def next_host(self) -> Tensor:
        """The buffer that is not in use: a step's copy is done before the step after next is launched."""
        self._host.reverse()
        return self._host[0]

    def views(self, flat: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """(int64 [_LONGS, batch], int32 [_INTS, batch], block table int32 [batch, width]) of a flat buffer, and their length."""
        stride = _aligned(batch)
        ints, table = 2 * _LONGS * stride, (2 * _LONGS + _INTS) * stride
        end = table + batch * self.width
        return (
            flat[:ints].view(torch.int64).view(_LONGS, stride)[:, :batch],
            flat[ints:table].view(_INTS, stride)[:, :batch],
            flat[table:end].view(batch, self.width),
            end,
        )


class DecodeGraph:
    """One captured step of `size` rows."""

    def __init__(self, owner: DecodeGraphs, inputs: _Inputs, size: int, backends: Backends) -> None:
        self._owner, self._inputs, self.size = owner, inputs, size
        self._backends = backends
        self.backends = (_name(backends),)
        longs, ints, table, _ = inputs.views(inputs.device, size)
        self.rows, self._slots = longs
        """Places in `newest` of the last replay's rows, padding included; and their slots."""
        self._positions, self._seq_lens = ints
        self._metadata = self._worst_case(table)
        self._plans = owner._attention.begin_graph(self._metadata, backends)
        # Compiles what is not compiled yet, and finds missing memory while that can still be mended.
        logits, self._tokens = self.run()
        if owner._logits is None or len(owner._logits) < size:
            owner._logits = logits

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Record the step; its memory comes from a pool that all graphs share.

        :raises BackendError: something in it cannot be captured.
        """
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # Not torch.cuda.graph, which collects Python's garbage before each capture: longer than the capture itself.
            with torch.cuda.stream(stream):
                self._graph.capture_begin(pool=pool)
                try:
                    _, self._tokens = self.run()
                finally:
                    self._graph.capture_end()
        except (HeadwayError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise BackendError(
                f"CUDA graphs: decode of {self.size} sequences with {_name(self._backends)} cannot be captured: {error}; "
                "--enforce-eager does without"
            ) from error

    def _worst_case(self, table: Tensor) -> AttentionMetadata:
        owner, size, device = self._owner, self.size, self._seq_lens.device
        starts = torch.arange(size + 1, dtype=torch.int32)
        return AttentionMetadata(
            num_prefills=0,
            num_decodes=size,
            num_prefill_tokens=0,
            num_decode_tokens=size,
            query_start_loc=starts.to(device),
            seq_lens=self._seq_lens,
            context_lens=self._positions,
            block_table=table,
            slot_mapping=self._slots,
            block_size=owner._block_size,
            max_query_len=1,
            max_seq_len=owner._max_model_len,
            query_start_loc_cpu=starts,
            seq_lens_cpu=torch.full((size,), owner._max_model_len, dtype=torch.int32),
            block_table_cpu=torch.zeros(table.shape, dtype=torch.int32),
        )

    @torch.inference_mode()
    def run(self) -> tuple[Tensor, Tensor]:
        """Launch the step over the static inputs; logits [size, vocab_size], in the buffer of all, and greedy tokens [size]."""
        owner, newest = self._owner, self._owner._newest
        # The first and largest makes the buffer. A copy of logits that the model had put elsewhere would write them twice.
        out = None if owner._logits is None or len(owner._logits) < self.size else owner._logits[: self.size]
        ids = newest.index_select(0, self.rows).clamp_min(0)  # the row of a sequence that ends with a NaN runs once more
        hidden = owner._model(ids, self._positions, owner._attention)
        logits = owner._model.compute_logits(hidden, out)
        assert out is None or logits.data_ptr() == out.data_ptr()
        tokens = owner._greedy(logits)
        newest.index_copy_(0, self.rows, tokens)
        return logits, tokens

    def load(self, step: list[Scheduled]) -> None:
        """Bring the static inputs, and plans that are more than those, up to date."""
        host = self._inputs.next_host()
        longs, ints, table, end = self._inputs.views(host, self.size)
        self._owner.fill(longs.numpy(), ints.numpy(), table.numpy(), step)
        self._inputs.device[:end].copy_(host[:end], non_blocking=True)
        metadata = replace(self._metadata, seq_lens_cpu=ints[1], block_table_cpu=table)
        for spec, plan in self._plans.items():
            self._backends[spec].plan_for_replay(plan, metadata)

    def replay(self, step: list[Scheduled]) -> tuple[Tensor, Tensor]:
        """Run a step. Returns its logits [len(step), vocab_size] and greedy tokens, both overwritten by the next replay."""
        self.load(step)
        self._graph.replay()
        assert self._owner._logits is not None
        return self._owner._logits[: len(step)], self._tokens[: len(step)]


def _name(backends: Backends) -> str:
    return next(iter(backends.values())).name


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _used(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free
