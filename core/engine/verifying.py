"""Steps that verify drafts: which of them are one graph, and how the others are checked."""

from __future__ import annotations

import logging
import time
from itertools import pairwise

import torch

from headway.core.contract.metadata import Phase
from headway.core.engine.graph import GraphStep, name_of
from headway.core.engine.recorder import Recorder
from headway.core.engine.step import StepInput
from headway.core.engine.verify_graph import FILL_CONTEXT, VerifyGraph
from headway.core.engine.verify_inputs import VerifyInputs
from headway.core.select.selector import Selector
from headway.core.speculation.times import WIDTHS

log = logging.getLogger("headway")

MAX_TOKENS = 256
"""Query tokens of the largest step."""
_USUAL_LENGTH = 1024
"""Tokens of a sequence for which the backend of a graph is chosen."""


class VerifyGraphs:
    """Graphs of verification by width and number of sequences; a step takes the narrowest and smallest that holds it.

    They have at most MAX_TOKENS tokens: in larger steps the model's products take longer with every token, and drafts gain least.
    """

    def __init__(self, step: GraphStep) -> None:
        self._step = step
        self._graphs: dict[tuple[int, int], VerifyGraph] = {}
        self._refused = ""

    def capture(self, max_decode_len: int, selector: Selector, recorder: Recorder) -> None:
        """Record each width up to max_decode_len at the powers of two of sequences, the largest first.

        The backend is the one that is fastest for a number of sequences and a width, if it can run so in a graph.
        """
        started, step = time.perf_counter(), self._step
        longest = step.max_model_len - FILL_CONTEXT
        widths = [WIDTHS[0], *(wider for width, wider in pairwise(WIDTHS) if width < max_decode_len)]
        sizes = [2**n for n in range(MAX_TOKENS.bit_length()) if 2**n < 2 * step.padding_row]
        wanted = [(size, width) for width in widths for size in sizes if size * width <= MAX_TOKENS and width <= longest]
        if not wanted or max_decode_len < 2:
            return
        inputs = VerifyInputs(wanted, step)
        for size, width in sorted(wanted, key=lambda each: -each[0] * each[1]):
            fastest = selector.backends_for(Phase.DECODE, size, width, min(_USUAL_LENGTH, step.max_model_len))
            refusal = next((found for backend in fastest.values() if not (found := backend.captures(width))), None)
            if refusal is not None:
                if not self._refused:
                    log.warning("CUDA graphs: verification with %s is launched in pieces: %s", name_of(fastest), refusal.brief)
                self._refused = name_of(fastest)
                continue
            try:
                graph = VerifyGraph(step, inputs, size, width, fastest)
                graph.capture(recorder)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                log.warning("CUDA graphs: no memory for verification by %d sequences of %d tokens", size, width)
            else:
                self._graphs[width, size] = graph
        took = time.perf_counter() - started
        log.info("CUDA graphs: %d of verification captured, of up to %d tokens, in %.1f s", len(self._graphs), MAX_TOKENS, took)

    def for_step(self, step: StepInput) -> tuple[VerifyGraph | None, str]:
        """The graph that runs a step with drafts; or None and the reason, in words that steps of the same kind share."""
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
