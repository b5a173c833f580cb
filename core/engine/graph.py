"""One decode step captured as a CUDA graph: static inputs, one copy to fill them, one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Backends
from headway.core.contract.errors import BackendError, HeadwayError
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.model import Model
from headway.core.engine.attention import PagedAttention
from headway.core.engine.recorder import Recorder
from headway.core.engine.rows import Rows
from headway.core.engine.sent_tables import SentTables
from headway.core.sampling.filtering import NO_FILTER
from headway.core.sampling.sampler import Draws, SamplingOps

_LONGS = 2
"""int64 numbers a row, beside its slot in each cache group: its place in `newest`, and the key of its draw."""
_INTS = 3 + len(NO_FILTER)
"""int32 numbers a row: its position, its length, and the bits of its draw's scale and of its `TokenFilter`."""
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
    num_blocks: Sequence[int]
    """Of each cache group."""
    logits: Tensor | None = None
    """[largest batch, vocab_size]: every graph computes its own into its first rows."""

    def choose(self, logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
        """A token for each row of logits; greedy ones where nothing draws in the same pass."""
        ops = self.sampling
        return ops.greedy(logits) if ops.choose is None else ops.choose(logits, scales, keys)

    def filter(self, logits: Tensor, chosen: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
        """The tokens `chosen`, but for rows that filter what they keep is drawn from."""
        assert self.sampling.filter is not None, "nothing asks for it"
        return self.sampling.filter(logits, chosen, keys, filters)

    @property
    def filters(self) -> bool:
        """Whether graphs have a second part, which `Draws.filters` asks for.

        It is a graph of its own behind the first, so that steps in which no row filters pay for none of its launches.
        """
        return self.sampling.choose is not None and self.sampling.filter is not None

    @property
    def padding_row(self) -> int:
        """The place in `newest` that belongs to no sequence."""
        return len(self.newest) - 1


class _HostBuffer:
    """Host memory from which a step's inputs are sent, as arrays for one batch size at a time."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.batch = 0
        """The batch size that the arrays are for; 0: none yet."""

    def lay_out(self, batch: int, longs: Tensor, ints: Tensor, tables: Tensor, end: int) -> None:
        """Become arrays for a batch size: views of `flat`, see StaticInputs.views."""
        self.batch, self.sent = batch, self.flat[:end]
        self.seq_lens, self.tables = ints[1], tables
        self.longs, self.ints, self.sent_tables = longs.numpy(), ints.numpy(), SentTables(tables.numpy())


class StaticInputs:
    """One device buffer for the inputs of every graph, and two in pinned memory: one may be on its way while one is filled."""

    def __init__(self, max_batch: int, step: GraphStep) -> None:
        device, groups = step.newest.device, len(step.num_blocks)
        self._longs = _LONGS + groups
        self.width = _aligned(-(-step.max_model_len // step.block_size))
        length = _aligned(max_batch) * (2 * self._longs + _INTS) + groups * max_batch * self.width
        self.device = torch.zeros(length, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host = [_HostBuffer(torch.zeros(length, dtype=torch.int32, pin_memory=pinned)) for _ in range(2)]
        self._step = step

    def views(self, flat: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """(int64 [_LONGS + groups, batch], int32 [_INTS, batch], block tables int32 [groups, batch, width]) of a flat buffer, and
        their length."""
        stride, longs = _aligned(batch), self._longs
        ints, table = 2 * longs * stride, (2 * longs + _INTS) * stride
        end = table + (longs - _LONGS) * batch * self.width
        return (
            flat[:ints].view(torch.int64).view(longs, stride)[:, :batch],
            flat[ints:table].view(_INTS, stride)[:, :batch],
            flat[table:end].view(-1, batch, self.width),
            end,
        )

    def fill(
        self, batch: int, at: NDArray[numpy.int32], positions: NDArray[numpy.int32], rows: Rows, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor]:
        """Send the inputs of a step to the device. Returns seq_lens and block tables of all `batch` rows, in host memory.

        at, positions: int32 [num_seqs]: row of each sequence, and where its new token stands. The rest of `batch` is padding:
        rows of length 0, whose slot is -1 and whose token goes to the place that belongs to nobody. rows: the same in every call.
        """
        self._host.reverse()  # to the buffer not in use: a step's copy is done before the step after next is launched
        host, count = self._host[0], len(at)
        if host.batch != batch:
            host.lay_out(batch, *self.views(host.flat, batch))
        places, keys, *slots_of = host.longs
        places[:count], places[count:] = at, self._step.padding_row
        written, seq_lens, scales, *filters = host.ints
        written[:count], written[count:] = positions, 0
        numpy.add(positions, 1, out=seq_lens[:count])
        seq_lens[count:] = 0
        if draws is None:
            scales[:] = 0  # greedy
        else:
            scales[:count], keys[:count] = draws.scales.view(numpy.int32), draws.keys
            scales[count:] = 0
            if draws.filters is not None:  # else they are not looked at
                for to, numbers in zip(filters, draws.filters.view(numpy.int32), strict=True):
                    to[:count], to[count:] = numbers, 0
        for group, slots in enumerate(slots_of):
            slots[:count], slots[count:] = rows.slots(at, positions, self._step.block_size, group), -1
        host.sent_tables.fill(places, rows)
        self.device[: len(host.sent)].copy_(host.sent, non_blocking=True)
        return host.seq_lens, host.tables


class DecodeGraph:
    """One captured step of `size` rows."""

    def __init__(self, step: GraphStep, inputs: StaticInputs, size: int, backends: Backends) -> None:
        self._step, self._inputs, self.size = step, inputs, size
        self._by_spec = backends
        self.backends = (name_of(backends),)
        longs, ints, tables, _ = inputs.views(inputs.device, size)
        self.rows, self._keys, *slots = longs
        """Places in `newest` of the last replay's rows, padding included; and the keys of their draws."""
        self._positions, self._seq_lens = ints[:2]
        self._scales, self._filters = ints[2].view(torch.float32), ints[3:].view(torch.float32)
        self.metadata = self._worst_case(slots, list(tables))
        """The step, as the layers of each cache group see it."""
        self._plans = step.attention.begin_graph(self.metadata, backends)
        groups = zip(self._plans.items(), step.attention.groups, strict=True)
        self._replanned = [(backends[spec], plan, group) for (spec, plan), group in groups if replans(backends[spec])]
        """What every replay brings up to date. No dictionary of specs, whose hash takes longer than the rest."""
        # Compiles what is not compiled yet, and finds missing memory while that can still be mended.
        self.tokens = self.run()
        self._replay: Callable[[], None] | None = None
        self.filtered = self.filter() if step.filters else self.tokens
        self._replay_filter: Callable[[], None] | None = None

    def capture(self, recorder: Recorder) -> None:
        """Record the step.

        :raises BackendError: something in it cannot be captured.
        """
        what = f"decode of {self.size} sequences with {self.backends[0]}"
        self._replay = recorded(recorder, self.run, what)
        if self._step.filters:
            self._replay_filter = recorded(recorder, self.filter, what)

    def _worst_case(self, slots: Sequence[Tensor], tables: Sequence[Tensor]) -> list[AttentionMetadata]:
        step, size, device = self._step, self.size, self._seq_lens.device
        starts = torch.arange(size + 1, dtype=torch.int32)
        first = AttentionMetadata(
            num_prefills=0,
            num_decodes=size,
            num_prefill_tokens=0,
            num_decode_tokens=size,
            query_start_loc=starts.to(device),
            seq_lens=self._seq_lens,
            context_lens=self._positions,
            block_table=tables[0],
            slot_mapping=slots[0],
            block_size=step.block_size,
            max_query_len=1,
            max_seq_len=step.max_model_len,
            query_start_loc_cpu=starts,
            seq_lens_cpu=torch.full((size,), step.max_model_len, dtype=torch.int32),
            block_table_cpu=torch.zeros(tables[0].shape, dtype=torch.int32),
            num_blocks=step.num_blocks[0],
            upper_bound_lens=True,
        )
        others = zip(tables[1:], slots[1:], step.num_blocks[1:], strict=True)
        return [first, *(replace(first, block_table=table, slot_mapping=to, num_blocks=count) for table, to, count in others)]

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

    @torch.inference_mode()
    def filter(self) -> Tensor:
        """After `run`, choose the tokens of rows that filter; returns those of all [size]."""
        step = self._step
        assert step.logits is not None
        self.filtered = step.filter(step.logits[: self.size], self.tokens, self._keys, self._filters)
        step.newest.index_copy_(0, self.rows, self.filtered)
        return self.filtered

    def replay(
        self, at: NDArray[numpy.int32], positions: NDArray[numpy.int32], rows: Rows, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a step, see StaticInputs.fill. Returns its logits [num_seqs, vocab_size] and tokens [num_seqs].

        draws: how they are chosen; None: greedily. Both are overwritten by the next replay.
        """
        assert self._replay is not None, "capture() it first"
        assert self._step.logits is not None
        seq_lens, tables = self._inputs.fill(self.size, at, positions, rows, draws)
        for backend, plan, group in self._replanned:
            known = replace(self.metadata[group], seq_lens_cpu=seq_lens, block_table_cpu=tables[group], upper_bound_lens=False)
            backend.plan_for_replay(plan, known)
        self._replay()
        tokens = self.tokens
        if draws is not None and draws.filters is not None:
            assert self._replay_filter is not None, "see GraphStep.filters"
            self._replay_filter()
            tokens = self.filtered
        return self._step.logits[: len(at)], tokens[: len(at)]


def recorded(recorder: Recorder, run: Callable[[], object], what: str) -> Callable[[], None]:
    """What runs a recorded step again.

    :raises BackendError: something in it cannot be captured.
    """
    try:
        return recorder.record(run)
    except (HeadwayError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise BackendError(f"CUDA graphs: {what} cannot be captured: {error}; --enforce-eager does without") from error


def replans(backend: AttentionBackend) -> bool:
    """Whether a backend has anything to bring up to date before a replay."""
    return type(backend).plan_for_replay is not AttentionBackend.plan_for_replay


def name_of(backends: Backends) -> str:
    """The name of the backend whose instances these are."""
    return next(iter(backends.values())).name


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
