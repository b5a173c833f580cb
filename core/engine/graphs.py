"""The CUDA graphs of an engine: which decode steps are captured, and which of them runs a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from headway.core.contract.backend import Backends
from headway.core.engine.graph import DecodeGraph, GraphStep, StaticInputs, name_of
from headway.core.engine.recorder import Recorder
from headway.core.engine.step import StepInput

log = logging.getLogger("headway")


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, 8, then steps of 8 to 256, of 32 to 1,024 and of 128 from there to max_num_seqs."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32), *range(1152, max_num_seqs + 1, 128)]
    return sorted({*(size for size in sizes if size <= max_num_seqs), max_num_seqs})


class DecodeGraphs:
    """Graphs of one decode step each, by batch size; a step takes the smallest that holds it, and the rest is padding.

    A graph reads its inputs from one static buffer that one copy fills. It is captured at the longest context, where a backend
    fixes its grid, and the lengths it reads on the device decide what is computed.
    """

    def __init__(self, step: GraphStep) -> None:
        self._step = step
        self._graphs: dict[tuple[int, str], DecodeGraph] = {}
        self._size_of: list[int] = []
        """The captured batch size for each number of sequences."""
        self._warned = False

    def capture(self, batch_sizes: Sequence[int], candidates: Callable[[int], Sequence[Backends]], recorder: Recorder) -> None:
        """Capture the largest first, so that the others find their memory in its pool; says what it took.

        candidates: for a batch size, the backends worth a graph. One that cannot run in a graph, or memory that does not suffice,
        leaves steps to run as single launches: the log says so once.
        """
        device, most = self._step.newest.device, self._step.padding_row
        wanted = {size: candidates(size) for size in sorted(batch_sizes, reverse=True) if size <= most}
        inputs = StaticInputs(max(wanted), self._step)
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
                try:
                    graph = DecodeGraph(self._step, inputs, size, backends)
                    graph.capture(recorder)
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
        backend, refusal = next((each, found) for each in backends.values() if not (found := each.captures()))
        graph = DecodeGraph(self._step, StaticInputs(1, self._step), 1, backends)
        started = time.perf_counter()
        graph.run()
        log.warning(
            "CUDA graphs: %s cannot be captured (%s); launching a decode step kernel by kernel takes the host %.1f ms",
            backend.name,
            refusal.brief,
            1e3 * (time.perf_counter() - started),
        )

    def for_step(self, step: StepInput, backends: Callable[[int], Backends]) -> tuple[DecodeGraph | None, str]:
        """The graph that runs a step; or None and the reason, in words that steps of the same kind share.

        backends: for a captured batch size, those that are fastest at the step's lengths.
        """
        if not step.goes_on:
            decodes = (step.query_lens == 1) & (step.context_lens > 0)
            return None, "a token that the device does not hold" if decodes.all() else "a prompt in the step"
        if step.num_seqs >= len(self._size_of):
            largest = max(len(self._size_of) - 1, 0)
            if largest and not self._warned:
                self._warned = True
                log.warning(
                    "CUDA graphs: a decode step of %d sequences is launched kernel by kernel, for the largest captured batch is "
                    "%d; a larger number in cudagraph_capture_sizes captures more",
                    step.num_seqs,
                    largest,
                )
            return None, f"more than {largest} sequences" if largest else "no graph was captured"
        size = self._size_of[step.num_seqs]
        fastest = backends(size)
        graph = self._graphs.get((size, name_of(fastest)))
        return graph, "" if graph is not None else f"no graph of {name_of(fastest)} for {size} sequences"


def _used(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
