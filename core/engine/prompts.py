"""A step that is one prompt and nothing else, captured whole: what the first token of an idle engine takes.

Attention is causal, so no token sees those after it: a prompt is computed at the next larger captured length, and what the
padding after it computes is not read. So its attention has lengths that are fixed at the capture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.backend import Backends
from headway.core.contract.metadata import AttentionMetadata
from headway.core.engine.graph import GraphStep, name_of
from headway.core.engine.recorder import Recorder
from headway.core.engine.rows import Rows
from headway.core.engine.step import StepInput
from headway.core.sampling.sampler import Draws

log = logging.getLogger("headway")

_LONGS = 6
"""int64 numbers beside the id and the slots of each token: the row in `newest`, the last token's place, the key of the draw, the
bits of its scale, and those of a `TokenFilter`, two in one."""


class PromptInputs:
    """One device buffer for the inputs of every prompt graph, and two in pinned memory: one may be on its way."""

    def __init__(self, longest: int, step: GraphStep) -> None:
        device = step.newest.device
        self._groups = len(step.num_blocks)
        width = -(-longest // step.block_size)
        length = 2 * ((1 + self._groups) * longest + _LONGS) + self._groups * width
        self.device = torch.zeros(length, dtype=torch.int32, device=device)
        self.positions = torch.arange(longest, device=device)
        self._host = [torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self._block_size = step.block_size

    def views(self, flat: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """(ids [size], slots [groups, size], int64 [_LONGS], block tables int32 [groups, 1, blocks]) of a flat buffer, and their
        length."""
        tokens = (1 + self._groups) * size
        longs = 2 * (tokens + _LONGS)
        numbers = flat[:longs].view(torch.int64)
        ids, slots, ends = numbers[:size], numbers[size:tokens].view(-1, size), numbers[tokens:]
        end = longs + self._groups * -(-size // self._block_size)
        return ids, slots, ends, flat[longs:end].view(self._groups, 1, -1), end

    def fill(self, size: int, token_ids: NDArray[numpy.int64], row: int, rows: Rows, draws: Draws | None) -> None:
        """Send a prompt to the device. Padding has token 0, and slot -1."""
        self._host.reverse()  # to the buffer not in use: a step's copy is done before the step after next is launched
        host, count = self._host[0], len(token_ids)
        ids, slots, ends, tables, end = self.views(host, size)
        tokens = ids.numpy()
        tokens[:count], tokens[count:] = token_ids, 0
        last = ends.numpy()
        last[:4] = row, count - 1, 0, 0  # a scale of 0 is greedy
        if draws is not None:
            last[2:3], last[3:4].view(numpy.float32)[:1] = draws.keys, draws.scales
            if draws.filters is not None:  # else it is not looked at
                last[4:].view(numpy.float32)[:] = draws.filters[:, 0]
        at, positions = numpy.full(count, row, dtype=numpy.int32), numpy.arange(count, dtype=numpy.int32)
        for group, (places, table, known) in enumerate(zip(slots.numpy(), tables.numpy(), rows.tables, strict=True)):
            places[:count], places[count:] = rows.slots(at, positions, self._block_size, group), -1
            blocks = min(table.shape[1], known.shape[1])
            table[0, :blocks] = known[row, :blocks]
        self.device[:end].copy_(host[:end], non_blocking=True)


class PromptGraph:
    """One captured prompt of `size` tokens."""

    def __init__(self, step: GraphStep, inputs: PromptInputs, size: int, backends: Backends) -> None:
        self._step, self._inputs, self.size, self._by_spec = step, inputs, size, backends
        self.backends = (name_of(backends),)
        self._ids, slots, ends, tables, _ = inputs.views(inputs.device, size)
        self.rows, self._last, self._key = ends[:1], ends[1:2], ends[2:3]
        """Place in `newest` of the last replay's prompt; that of its last token; and the key of its draw."""
        self._scale, self._filter = ends[3:4].view(torch.float32)[:1], ends[4:].view(torch.float32)[:, None]
        self._metadata = [
            AttentionMetadata.one_prompt(size, table, places, step.block_size, num_blocks)
            for table, places, num_blocks in zip(tables, slots, step.num_blocks, strict=True)
        ]
        self._plans = step.attention.begin_prompt(self._metadata, backends)
        # Compiles what is not compiled yet, and finds missing memory while that can still be mended.
        self.tokens = self.run()
        self._replay: Callable[[], None] | None = None
        self.filtered = self.filter() if step.filters else self.tokens
        self._replay_filter: Callable[[], None] | None = None

    def capture(self, recorder: Recorder) -> None:
        """Record the step."""
        self._replay = recorder.record(self.run)
        if self._step.filters:
            self._replay_filter = recorder.record(self.filter)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Launch the step over the static inputs: logits [1, vocab_size] into the buffer of all; returns the token [1]."""
        step = self._step
        step.attention.resume_graph(self._metadata, self._by_spec, self._plans)
        hidden = step.model(self._ids, self._inputs.positions[: self.size], step.attention)
        out = None if step.logits is None else step.logits[:1]
        logits = step.model.compute_logits(hidden.index_select(0, self._last), out)
        if out is None:
            step.logits = logits
        self.tokens = step.choose(logits, self._scale, self._key)
        step.newest.index_copy_(0, self.rows, self.tokens)
        return self.tokens

    @torch.inference_mode()
    def filter(self) -> Tensor:
        """After `run`, choose the token anew if its row filters; returns it [1]."""
        step = self._step
        assert step.logits is not None
        self.filtered = step.filter(step.logits[:1], self.tokens, self._key, self._filter)
        step.newest.index_copy_(0, self.rows, self.filtered)
        return self.filtered

    def replay(self, step: StepInput, rows: Rows, draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Run a prompt. Returns its logits [1, vocab_size] and token [1], which the next replay overwrites."""
        assert self._replay is not None, "capture() it first"
        assert self._step.logits is not None
        self._inputs.fill(self.size, step.token_ids, int(step.rows[0]), rows, draws)
        self._replay()
        if draws is None or draws.filters is None:
            return self._step.logits[:1], self.tokens
        assert self._replay_filter is not None, "see GraphStep.filters"
        self._replay_filter()
        return self._step.logits[:1], self.filtered


class PromptGraphs:
    """Graphs of one prompt each, by captured length; a prompt takes the smallest that holds it.

    A length is captured with the backend that is fastest there. A prompt takes that graph whoever is fastest at its own length or
    serves at present: a replay spares more than backends that are about as fast differ by.
    """

    def __init__(self, step: GraphStep) -> None:
        self._step = step
        self._sizes: list[int] = []
        self._graphs: dict[int, PromptGraph] = {}

    def capture(self, sizes: Sequence[int], backends: Callable[[int], Backends], recorder: Recorder) -> None:
        """Record prompts of these lengths, the longest first. backends: the fastest for a length; others take no part."""
        started, refused = time.perf_counter(), set[str]()
        self._sizes = sorted(size for size in set(sizes) if size <= self._step.max_model_len)
        inputs = PromptInputs(self._sizes[-1], self._step) if self._sizes else None
        for size in reversed(self._sizes):
            fastest = backends(size)
            name = name_of(fastest)
            if inputs is None or name in refused:
                continue
            # Deterministic mode wants a prompt's bits alone and in a batch to be the same, and no batch computes its padding.
            if not all(backend.captures(size) and not spec.batch_invariant for spec, backend in fastest.items()):
                refused.add(name)
                continue
            try:
                graph = PromptGraph(self._step, inputs, size, fastest)
                graph.capture(recorder)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                log.warning("CUDA graphs: no memory for a prompt of %d tokens", size)
            else:
                self._graphs[size] = graph
        log.info("CUDA graphs: %d of one prompt captured, in %.1f s", len(self._graphs), time.perf_counter() - started)

    def for_step(self, step: StepInput) -> PromptGraph | None:
        """The graph that runs a step; None where it is not one whole prompt, or a longer one than was captured."""
        if step.num_seqs != 1 or step.context_lens[0] != 0 or not step.samples[0]:
            return None
        size = next((size for size in self._sizes if size >= step.num_tokens), 0)
        return self._graphs.get(size)
