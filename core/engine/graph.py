"""One decode step captured as a CUDA graph: static inputs, one copy to fill them, one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.backend import Backends
from headway.core.contract.errors import BackendError, HeadwayError
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.model import Model
from headway.core.engine.attention import PagedAttention
from headway.core.engine.recorder import Recorder
from headway.core.engine.rows import Rows
from headway.core.sampling.sampler import Draws, SamplingOps

_LONGS = 3
"""int64 numbers a row: its place in `newest`, its slot, and the key of its draw."""
_INTS = 3
"""int32 numbers a row: its position, its length, and the bits of its draw's scale."""
_ALIGN = 4
"""Fields begin at multiples of 16 bytes, which kernels may rely on."""


@dataclass
class GraphStep:
    """What all graphs of an engine compute: the step itself, whatever its batch size."""

    model: Model
    attention: PagedAttention
    sampling: SamplingOps
    newest: Tensor
    """int64 [max_num_seqs + 1]: the last sampled token of each row; the last place belongs to padding."""
    block_size: int
    max_model_len: int
    num_blocks: int
    """Of the pool."""
    logits: Tensor | None = None
    """[largest batch, vocab_size]: every graph computes its own into its first rows."""

    def choose(self, logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
        """A token for each row of logits; greedy ones where nothing draws in the same pass."""
        ops = self.sampling
        return ops.greedy(logits) if ops.choose is None else ops.choose(logits, scales, keys)

    @property
    def padding_row(self) -> int:
        """The place in `newest` that belongs to no sequence."""
        return len(self.newest) - 1


class StaticInputs:
    """One device buffer for the inputs of every graph, and two in pinned memory: one may be on its way while one is filled."""

    def __init__(self, max_batch: int, step: GraphStep) -> None:
        device = step.newest.device
        self.width = _aligned(-(-step.max_model_len // step.block_size))
        length = _aligned(max_batch) * (2 * _LONGS + _INTS) + max_batch * self.width
        self.device = torch.zeros(length, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._step = step

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

    def fill(
        self, batch: int, at: NDArray[numpy.int32], positions: NDArray[numpy.int32], rows: Rows, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor]:
        """Send the inputs of a step to the device. Returns seq_lens and block table of all `batch` rows, in host memory.

        at, positions: int32 [num_seqs]: row of each sequence, and where its new token stands. The rest of `batch` is padding:
        rows of length 0, whose slot is -1 and whose token goes to the place that belongs to nobody.
        """
        self._host.reverse()  # to the buffer not in use: a step's copy is done before the step after next is launched
        host, count = self._host[0], len(at)
        longs, ints, table, end = self.views(host, batch)
        places, slots, keys = longs.numpy()
        places[:count], places[count:] = at, self._step.padding_row
        slots[:count], slots[count:] = rows.slots(at, positions, self._step.block_size), -1
        written, seq_lens, scales = ints.numpy()
        written[:count], written[count:] = positions, 0
        seq_lens[:count], seq_lens[count:] = positions + 1, 0
        scales[:] = 0  # greedy
        if draws is not None:
            scales[:count], keys[:count] = draws.scales.view(numpy.int32), draws.keys
        tables = table.numpy()
        numpy.take(rows.tables, at, axis=0, out=tables[:count, : rows.tables.shape[1]])
        tables[count:] = 0
        self.device[:end].copy_(host[:end], non_blocking=True)
        return ints[1], table


class DecodeGraph:
    """One captured step of `size` rows."""

    def __init__(self, step: GraphStep, inputs: StaticInputs, size: int, backends: Backends) -> None:
        self._step, self._inputs, self.size = step, inputs, size
        self._by_spec = backends
        self.backends = (name_of(backends),)
        longs, ints, table, _ = inputs.views(inputs.device, size)
        self.rows, self._slots, self._keys = longs
        """Places in `newest` of the last replay's rows, padding included; and their slots."""
        self._positions, self._seq_lens, bits = ints
        self._scales = bits.view(torch.float32)
        self.metadata = self._worst_case(table)
        self._plans = step.attention.begin_graph(self.metadata, backends)
        # Compiles what is not compiled yet, and finds missing memory while that can still be mended.
        self.tokens = self.run()
        self._replay: Callable[[], None] | None = None

    def capture(self, recorder: Recorder) -> None:
        """Record the step.

        :raises BackendError: something in it cannot be captured.
        """
        try:
            self._replay = recorder.record(self.run)
        except (HeadwayError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise BackendError(
                f"CUDA graphs: decode of {self.size} sequences with {self.backends[0]} cannot be captured: {error}; "
                "--enforce-eager does without"
            ) from error

    def _worst_case(self, table: Tensor) -> AttentionMetadata:
        step, size, device = self._step, self.size, self._seq_lens.device
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
            block_size=step.block_size,
            max_query_len=1,
            max_seq_len=step.max_model_len,
            query_start_loc_cpu=starts,
            seq_lens_cpu=torch.full((size,), step.max_model_len, dtype=torch.int32),
            block_table_cpu=torch.zeros(table.shape, dtype=torch.int32),
            num_blocks=step.num_blocks,
            upper_bound_lens=True,
        )

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Launch the step over the static inputs: logits into the buffer of all; returns the tokens [size]."""
        step, newest = self._step, self._step.newest
        step.attention.resume_graph(self.metadata, self._by_spec, self._plans)
        # The first and largest makes the buffer. A copy of logits that the model had put elsewhere would write them twice.
        out = None if step.logits is None or len(step.logits) < self.size else step.logits[: self.size]
        ids = newest.index_select(0, self.rows).clamp_min(0)  # the row of a sequence that ends with a NaN runs once more
        hidden = step.model(ids, self._positions, step.attention)
        logits = step.model.compute_logits(hidden, out)
        assert out is None or logits.data_ptr() == out.data_ptr()
        if out is None:
            step.logits = logits
        self.tokens = step.choose(logits, self._scales, self._keys)
        newest.index_copy_(0, self.rows, self.tokens)
        return self.tokens

    def replay(
        self, at: NDArray[numpy.int32], positions: NDArray[numpy.int32], rows: Rows, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a step, see StaticInputs.fill. Returns its logits [num_seqs, vocab_size] and tokens [num_seqs].

        draws: how they are chosen; None: greedily. Both are overwritten by the next replay.
        """
        assert self._replay is not None, "capture() it first"
        assert self._step.logits is not None
        seq_lens, table = self._inputs.fill(self.size, at, positions, rows, draws)
        metadata = replace(self.metadata, seq_lens_cpu=seq_lens, block_table_cpu=table, upper_bound_lens=False)
        for spec, plan in self._plans.items():
            self._by_spec[spec].plan_for_replay(plan, metadata)
        self._replay()
        return self._step.logits[: len(at)], self.tokens[: len(at)]


def name_of(backends: Backends) -> str:
    """The name of the backend whose instances these are."""
    return next(iter(backends.values())).name


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
