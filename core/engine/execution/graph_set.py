"""CUDA graphs of an engine: captured decodes, prompts and verifications, piecewise graphs, and the choice of a step's graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from headway.core.contract.adapters import ModelAdapters, rows_with
from headway.core.contract.backend import Backends
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.metadata import Phase
from headway.core.contract.model import AttentionFunctions, Model
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.engine.data.step import StepInput
from headway.core.engine.execution.attention import PagedAttention
from headway.core.engine.execution.captured_step import (
    CapturedStep,
    DecodeGraph,
    GraphRecorder,
    PrefillGraph,
    VerifyGraph,
    borrowed,
    capturing,
    name_of,
)
from headway.core.engine.execution.static_inputs import (
    PADDING_CONTEXT,
    DecodeInputs,
    ModelStep,
    PrefillInputs,
    VerifyInputs,
    decode_shapes,
    prefill_shapes,
    verify_shapes,
)
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector
from headway.core.speculation.proposers import MAX_VERIFIED, WIDTHS

log = logging.getLogger("headway")

MAX_TOKENS = 2048
"""Number of tokens of the largest piecewise graph. A larger step keeps a GPU busy for longer than launching it takes."""


def piecewise_sizes(max_num_tokens: int) -> list[int]:
    """Return the token counts to capture: 8, 16, then multiples of 32 up to 128, of 64 up to 512, of 128 up to 1,024, and of 256
    up to MAX_TOKENS."""
    most = min(-(-max_num_tokens // 8) * 8, MAX_TOKENS)
    sizes = [8, 16, *range(32, 129, 32), *range(192, 513, 64), *range(640, 1025, 128), *range(1280, MAX_TOKENS + 1, 256)]
    return sorted({*(size for size in sizes if size <= most), most})


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """An attention call between two graph segments. Its tensors have one row per recorded token."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    writes: bool

    def run(self, attention: PagedAttention, count: int) -> None:
        if count == len(self.q):
            attention.run(self.layer, self.q, self.k, self.v, self.out, self.writes)
        else:
            attention.run(self.layer, self.q[:count], self.k[:count], self.v[:count], self.out[:count], self.writes)


@dataclass(frozen=True, slots=True)
class _StateCall:
    layer: int
    x: Tensor
    gates: Sequence[Tensor]
    out: Tensor

    def run(self, attention: PagedAttention, count: int) -> None:
        assert attention.states is not None
        attention.states.run(self.layer, self.x[:count], [gate[:count] for gate in self.gates], self.out[:count])


@dataclass(frozen=True, slots=True)
class _PiecewiseGraph:
    size: int
    calls: list[_AttentionCall | _StateCall]
    graphs: list[Callable[[], None]]
    hidden: Tensor

    def run(self, attention: PagedAttention, count: int) -> Tensor:
        """Return the hidden states of the first `count` tokens. Later rows are padding, which is not passed to attention."""
        for call, graph in zip(self.calls, self.graphs[:-1], strict=True):
            graph()
            call.run(attention, count)
        self.graphs[-1]()
        return self.hidden[:count]


class PiecewiseGraphs:
    """Piecewise graphs by number of tokens. A step uses the smallest graph that is large enough."""

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        device: torch.device,
        ranks: Ranks = ONE_RANK,
        adapters: ModelAdapters | None = None,
    ) -> None:
        """adapters: the model's adapters, for graphs of steps with adapters. None for steps without adapters."""
        self._adapters = adapters
        self._slots = torch.zeros(0, dtype=torch.int32, device=device)  # Slots of the rows' adapters; padding has old ones
        self._model = model
        self._attention = attention
        self._device = device
        self._ranks = ranks
        self._by_size: list[_PiecewiseGraph] = []  # Smallest first
        self._inputs = torch.zeros(2, 0, dtype=torch.int64, device=device)  # Token ids and positions; padding has old, valid ones
        self._outs: dict[tuple[int, ...], Tensor] = {}  # Memory for the output of one attention or state call, by a token's shape

    @property
    def largest(self) -> int:
        """Number of tokens of the largest piecewise graph. 0 if there is none."""
        return self._by_size[-1].size if self._by_size else 0

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], recorder: GraphRecorder) -> None:
        """Record the model at these token counts, largest first, so that smaller graphs reuse the memory of larger ones."""
        started = time.perf_counter()
        self._inputs = torch.zeros(2, max(sizes), dtype=torch.int64, device=self._device)
        self._slots = torch.zeros(max(sizes), dtype=torch.int32, device=self._device)
        too_large: list[int] = []
        for size in sorted(set(sizes), reverse=True):
            try:
                with rows_with(self._adapters, self._slots[:size]):
                    self._by_size.insert(0, self._record(size, recorder))
            except torch.OutOfMemoryError:
                if self._ranks.size > 1:  # the other ranks have the graph, and would wait in it for this one
                    raise
                torch.cuda.empty_cache()
                too_large.append(size)
        if too_large:
            log.warning("CUDA graphs: too little memory for piecewise graphs of %s tokens", ", ".join(map(str, too_large)))
        log.info(
            "CUDA graphs: piecewise graphs of up to %d tokens captured in %.1f s", self.largest, time.perf_counter() - started
        )

    def _record(self, size: int, recorder: GraphRecorder) -> _PiecewiseGraph:
        ids, positions = self._inputs[:, :size]

        nothing = AttentionFunctions(
            lambda layer, q, k, v: self._out(layer, q), lambda layer, x, gates: self._state_out(layer, x)
        )
        # Compiles missing kernels, and detects missing memory while that can still be handled.
        self._model(ids, positions, nothing)
        calls: list[_AttentionCall | _StateCall] = []
        graphs: list[Callable[[], None]] = []

        def between(layer: int, q: Tensor, k: Tensor, v: Tensor, writes: bool = True) -> Tensor:
            graphs.append(recorder.end())
            out = self._out(layer, q)
            calls.append(_AttentionCall(layer, borrowed(q), borrowed(k), borrowed(v), out, writes))
            recorder.begin()
            return out

        def state_between(layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
            graphs.append(recorder.end())
            out = self._state_out(layer, x)
            calls.append(_StateCall(layer, borrowed(x), [borrowed(gate) for gate in gates], out))
            recorder.begin()
            return out

        recorder.begin()
        with capturing(f"the model over {size} tokens"):
            try:
                hidden = self._model(ids, positions, AttentionFunctions(between, state_between, partial(between, writes=False)))
            except BaseException:
                with suppress(Exception):  # a failed recording may not end well, and the first error is the one to report
                    recorder.end()
                raise
        graphs.append(recorder.end())
        return _PiecewiseGraph(size, calls, graphs, borrowed(hidden))

    def _out(self, layer: int, q: Tensor) -> Tensor:
        """Return memory for a layer's attention output. Layers share it: an output is read before the next layer writes."""
        return self._room((q.shape[1], self._attention.value_head_dims[layer]), q)

    def _state_out(self, layer: int, x: Tensor) -> Tensor:
        assert self._attention.states is not None
        return self._room((self._attention.states.out_channels(layer),), x)

    def _room(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory for an output with this shape per token, for the tokens of `like`."""
        room = self._outs.get(shape)
        if room is None:  # zeros: padding rows are computed too, and their results are never read
            room = self._outs[shape] = like.new_zeros((self._inputs.shape[1], *shape))
        return room[: like.shape[0]]

    def run(self, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor | None:
        """Return hidden states [num_tokens, hidden_size] of the step that attention is set up for, valid until the next step.
        None if no graph has this many tokens.
        ids, positions: int64 [num_tokens]. slots: int32 [num_tokens]: adapter slots of the tokens."""
        count = len(ids)
        graph = next((each for each in self._by_size if each.size >= count), None)
        if graph is None:
            return None
        self._inputs[0, :count].copy_(ids)
        self._inputs[1, :count].copy_(positions)
        if slots is not None:
            self._slots[:count].copy_(slots)
        return graph.run(self._attention, count)


Graph = TypeVar("Graph", bound=CapturedStep)

_USUAL_LENGTH = 1024  # Sequence length for which the backend of a verification graph is chosen


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, then multiples of 8 up to 256, of 32 up to 1,024, and of 128 up to
    max_num_seqs."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32), *range(1152, max_num_seqs + 1, 128)]
    return sorted({*(size for size in sizes if size <= max_num_seqs), max_num_seqs})


def as_run(shape: Shape, device_type: str) -> Shape:
    """Return the shape, marked as captured if an engine with default options replays it as a CUDA graph although tables contain
    its launch times. This applies on a GPU to one prompt of at most MAX_TOKENS tokens without other sequences."""
    alone = shape.phase is Phase.PREFILL and shape.batch == 1 and shape.query_len <= MAX_TOKENS
    return replace(shape, captured=alone and device_type == "cuda")


class GraphSet:
    """All captured steps of an engine."""

    def __init__(self, step: ModelStep, selector: Selector) -> None:
        self._decodes = DecodeGraphs(step)
        self._prefills = PrefillGraphs(step)
        self._verifications = VerifyGraphs(step)
        self._selector = selector
        self._states = step.attention.states

    def capture(
        self, batch_sizes: Sequence[int], prompt_lengths: Sequence[int], max_decode_len: int, recorder: GraphRecorder
    ) -> None:
        """Record decodes of these batch sizes, prompts of these lengths, and verifications if max_decode_len > 1 query tokens.

        Decodes come first, because their logits are the largest.
        """
        selector = self._selector

        def candidates(size: int) -> list[Backends]:
            return [selector.instances[name] for name in selector.decode_candidates(size)]

        def fastest_prefill(length: int) -> Backends:
            return selector.backends_of(Shape(Phase.PREFILL, 1, length, length, captured=True))

        refused = "" if self._states is None else self._states.not_captured(GraphLevel.DECODE)
        if refused:
            log.warning("CUDA graphs: state backend %s cannot be captured; steps run as piecewise graphs", refused)
            return
        self._decodes.capture(batch_sizes, candidates, recorder)
        if self._states is None:  # scans of prompts depend on their lengths
            self._prefills.capture(prompt_lengths, fastest_prefill, recorder)
        self._verifications.capture(max_decode_len, selector, recorder)

    def for_step(self, step: StepInput, prompt_logprobs: bool) -> tuple[CapturedStep | None, str]:
        """Return the graph for a step's size and for the fastest backend at its lengths, or None and the reason. The reason is
        the same text for all steps of a kind.

        prompt_logprobs: True if the step computes log-probabilities of a prompt.
        """
        selector = self._selector
        if step.verifies or step.num_draft_tokens.any():
            graph, reason = self._verifications.for_step(step)
            if graph is not None:
                width = int(step.query_lens.max())
                selector.count(Phase.DECODE, step.num_seqs, width, int(step.context_lens.sum()) // step.num_seqs + width)
            return graph, reason
        if prompt_logprobs:
            return None, "prompt_logprobs"
        prefill = self._prefills.for_step(step)
        if prefill is not None:
            selector.count(Phase.PREFILL, 1, step.num_tokens, step.num_tokens)
            return prefill, ""
        kv_len = int(step.context_lens.sum()) // step.num_seqs + 1
        decode, reason = self._decodes.for_step(step, lambda size: selector.backends_for(Phase.DECODE, size, 1, kv_len))
        if decode is not None:
            selector.count(Phase.DECODE, step.num_seqs, 1, kv_len)
        return decode, reason


class DecodeGraphs:
    """Graphs of one decode step each, by batch size. A step uses the smallest graph that is large enough; the remaining rows are
    padding.

    A graph is captured at the longest context, so that a backend's grid is large enough. The lengths on the device decide what is
    computed.
    """

    def __init__(self, step: ModelStep) -> None:
        self._step = step
        self._graphs: dict[tuple[int, tuple[str, ...]], DecodeGraph] = {}
        self._size_of: list[int] = []  # Captured batch size for each number of sequences
        self._warned = False

    def capture(self, sizes: Sequence[int], candidates: Callable[[int], Sequence[Backends]], recorder: GraphRecorder) -> None:
        """Capture the batch sizes, largest first, so that smaller graphs reuse the memory of larger ones, and log the result.

        candidates: function that returns the backends to capture for a batch size. If a backend cannot run in a graph, or memory
        runs out, steps are launched kernel by kernel, which is logged once.
        """
        device, most = self._step.newest.device, self._step.padding_row
        wanted = {size: candidates(size) for size in sorted(sizes, reverse=True) if size <= most}
        inputs = DecodeInputs(self._step, [decode_shapes(self._step, max(wanted))])
        started, before = time.perf_counter(), _used(device)
        refused: set[str] = set()
        too_large: list[int] = []
        for size, choices in wanted.items():
            for backends in choices:
                name = name_of(backends)
                if name in refused:
                    continue
                if not all(backend.captures() for backend in backends.values()):
                    refused.add(name)
                    self._explain(backends)
                    continue
                graph = _captured(recorder, self._step.ranks, partial(DecodeGraph, self._step, inputs, size, backends))
                if graph is None:
                    too_large.append(size)
                else:
                    self._graphs[size, _key_of(backends)] = graph
        if too_large:
            listed = ", ".join(map(str, too_large))
            log.warning("CUDA graphs: too little memory for batches of %s, which are launched kernel by kernel", listed)
        captured = sorted({size for size, _ in self._graphs})
        for size in captured:
            self._size_of += [size] * (size + 1 - len(self._size_of))
        if captured:
            log.info(
                "CUDA graphs: %d decode graphs captured, %d batch sizes up to %d, in %.1f s and %.0f MB: %s",
                len(self._graphs),
                len(captured),
                captured[-1],
                time.perf_counter() - started,
                (_used(device) - before) / 2**20,
                ", ".join(sorted({"+".join(dict.fromkeys(names)) for _, names in self._graphs})),
            )

    def _explain(self, backends: Backends) -> None:
        """Log why a backend has no graphs, and the measured host time to launch a step kernel by kernel."""
        backend, refusal = next((each, found) for each in backends.values() if not (found := each.captures()))
        graph = DecodeGraph(self._step, DecodeInputs(self._step, [decode_shapes(self._step, 1)]), 1, backends)
        started = time.perf_counter()
        graph.run()
        log.warning(
            "CUDA graphs: %s cannot be captured (%s); launching a decode step kernel by kernel takes the host %.1f ms",
            backend.name,
            refusal.brief,
            1e3 * (time.perf_counter() - started),
        )

    def for_step(self, step: StepInput, backends: Callable[[int], Backends]) -> tuple[DecodeGraph | None, str]:
        """Return the graph that runs a step, or None and the reason. backends: function that returns the fastest backend for a
        captured batch size."""
        if not step.continues:
            decodes = (step.query_lens == 1) & (step.context_lens > 0)
            return None, "a token that the device does not hold" if decodes.all() else "a prompt in the step"
        if step.num_seqs >= len(self._size_of):
            largest = max(len(self._size_of) - 1, 0)
            if largest and not self._warned:
                self._warned = True
                log.warning(
                    "CUDA graphs: a decode step of %d sequences is launched kernel by kernel: the largest captured batch is "
                    "%d; a larger number in cudagraph_capture_sizes captures more",
                    step.num_seqs,
                    largest,
                )
            return None, f"more than {largest} sequences" if largest else "no graph was captured"
        size = self._size_of[step.num_seqs]
        fastest = backends(size)
        graph = self._graphs.get((size, _key_of(fastest)))
        return graph, "" if graph is not None else f"no graph of {name_of(fastest)} for {size} sequences"


def _key_of(backends: Backends) -> tuple[str, ...]:
    """Return the name of each spec's backend."""
    return tuple(backend.name for backend in backends.values())


class PrefillGraphs:
    """Graphs of one prompt each, by captured length. A prompt uses the shortest graph that is long enough.

    A length is captured with its fastest backend. A prompt uses this graph even if a different backend is selected, or is fastest
    at the prompt's own length. A replay saves more time than the difference between similarly fast backends.
    """

    def __init__(self, step: ModelStep) -> None:
        self._step = step
        self._sizes: list[int] = []
        self._graphs: dict[int, PrefillGraph] = {}

    def capture(self, sizes: Sequence[int], backends: Callable[[int], Backends], recorder: GraphRecorder) -> None:
        """Record prompts of these lengths, longest first. backends: function that returns the fastest backend for a length."""
        started, refused, step = time.perf_counter(), set[str](), self._step
        self._sizes = sorted(size for size in set(sizes) if size <= step.max_model_len)
        if self._sizes:
            inputs = PrefillInputs(step, [prefill_shapes(step, self._sizes[-1])])
            positions = torch.arange(self._sizes[-1], device=step.newest.device)
        for size in reversed(self._sizes):
            fastest = backends(size)
            name = name_of(fastest)
            if name in refused:
                continue
            # Deterministic mode needs equal bits for a prompt in any batch, and batches do not compute a graph's padding.
            if not all(backend.captures(size) and not spec.batch_invariant for spec, backend in fastest.items()):
                refused.add(name)
                continue
            graph = _captured(recorder, step.ranks, partial(PrefillGraph, step, inputs, size, fastest, positions))
            if graph is None:
                log.warning("CUDA graphs: too little memory for a prompt of %d tokens", size)
            else:
                self._graphs[size] = graph
        log.info("CUDA graphs: %d prefill graphs captured in %.1f s", len(self._graphs), time.perf_counter() - started)

    def for_step(self, step: StepInput) -> PrefillGraph | None:
        """Return the graph that runs a step, or None if the step is not one whole prompt, or is too long for every graph."""
        if step.num_seqs != 1 or step.context_lens[0] != 0 or not step.samples[0]:
            return None
        size = next((size for size in self._sizes if size >= step.num_tokens), 0)
        return self._graphs.get(size)


class VerifyGraphs:
    """Verification graphs by width and number of sequences. A step uses the narrowest graph that is large enough and, among
    graphs of equal width, the smallest.

    The graphs have at most MAX_VERIFIED tokens: in larger steps, every token makes the GEMMs slower, and drafts save the least
    time.
    """

    def __init__(self, step: ModelStep) -> None:
        self._step = step
        self._graphs: dict[tuple[int, int], VerifyGraph] = {}
        self._refused = ""

    def capture(self, max_decode_len: int, selector: Selector, recorder: GraphRecorder) -> None:
        """Record each width up to max_decode_len, for 1, 2, 4, ... sequences, largest first, with the fastest backend."""
        started, step = time.perf_counter(), self._step
        longest, states = step.max_model_len - PADDING_CONTEXT, step.attention.states
        widths = [WIDTHS[0], *(wider for width, wider in pairwise(WIDTHS) if width < max_decode_len)]
        if states is not None:  # the state backends support exactly this many tokens
            widths = list(dict.fromkeys(min(width, max_decode_len) for width in widths))
        sizes = [2**n for n in range(MAX_VERIFIED.bit_length()) if 2**n < 2 * step.padding_row]
        wanted = [(size, width) for width in widths for size in sizes if size * width <= MAX_VERIFIED and width <= longest]
        if not wanted or max_decode_len < 2:
            return
        refused = "" if states is None else states.not_captured(GraphLevel.UNIFORM)
        if refused:
            self._refused = f"state backend {refused}"
            log.warning(
                "CUDA graphs: %s cannot verify drafts in a full graph; verification runs as piecewise graphs", self._refused
            )
            return
        inputs = VerifyInputs(step, [verify_shapes(step, size, width) for size, width in wanted])
        tokens = max(size * width for size, width in wanted)
        assert step.logits is not None, "decode is captured first"
        logits = step.logits if len(step.logits) >= tokens else step.logits.new_empty(tokens, step.logits.shape[1])
        for size, width in sorted(wanted, key=lambda each: -each[0] * each[1]):
            kv_len = min(_USUAL_LENGTH, step.max_model_len)
            fastest = selector.backends_of(Shape(Phase.DECODE, size, width, kv_len, captured=True))
            refusal = next((found for backend in fastest.values() if not (found := backend.captures(width))), None)
            if refusal is not None:
                if not self._refused:
                    log.warning("CUDA graphs: verification with %s runs as piecewise graphs: %s", name_of(fastest), refusal.brief)
                self._refused = name_of(fastest)
                continue
            graph = _captured(recorder, step.ranks, partial(VerifyGraph, step, inputs, size, width, fastest, logits))
            if graph is None:
                log.warning("CUDA graphs: too little memory for verification by %d sequences of %d tokens", size, width)
            else:
                self._graphs[width, size] = graph
        took = time.perf_counter() - started
        log.info(
            "CUDA graphs: %d verification graphs of up to %d tokens captured in %.1f s", len(self._graphs), MAX_VERIFIED, took
        )

    def for_step(self, step: StepInput) -> tuple[VerifyGraph | None, str]:
        """Return the graph that runs a step with drafts, or None and the reason."""
        if not self._graphs:
            refused = f": {self._refused} cannot be captured" if self._refused else ""
            return None, f"drafts to verify{refused}"
        if not step.verifies:
            return None, "drafts beside a prompt"
        longest = int(step.query_lens.max())
        fitting = [key for key in self._graphs if key[0] >= longest and key[1] >= step.num_seqs]
        if not fitting:
            return None, "drafts of more tokens than were captured"
        width, size = min(fitting)
        if int((step.context_lens + step.query_lens).min()) <= width:
            return None, "drafts beside a sequence shorter than the graph"
        return self._graphs[width, size], ""


def _captured(recorder: GraphRecorder, ranks: Ranks, make: Callable[[], Graph]) -> Graph | None:
    """Return a new captured step, or None if memory runs out."""
    try:
        graph = make()
        graph.capture(recorder)
    except torch.OutOfMemoryError:
        if ranks.size > 1:  # the other ranks have the graph, and would wait in it for this one
            raise
        torch.cuda.empty_cache()
        return None
    return graph


def _used(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
