"""An executor without a model: it stores what was written to every cache slot, and checks everything that a step reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random

import numpy
import torch
from numpy.typing import NDArray

from headway.core.engine.data.executor import Capacity, ExecutorLostError
from headway.core.engine.data.groups import NULL_PAGE
from headway.core.engine.data.step import NEWEST, Sampled, StepInput
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import NOT_A_TOKEN, keys_of
from page_copier_stub import Moving, demand

Words = NDArray[numpy.uint64]

WORDS = 3
"""Number of token ids: few, so that prompts share prefixes and drafts are accepted by chance."""
STOP = WORDS
"""The token that ends a text."""
VOCABULARY = WORDS + 1
_BASE = 0x9E3779B97F4A7C15
_GARBAGE = 0xDEAD


class History:
    """One completion as it should be: its prompt, and after it tokens that seed and position decide."""

    def __init__(self, prompt: Sequence[int], seed: int, max_model_len: int) -> None:
        self.prompt_len, self.bad_at, self.refused = len(prompt), -1, False
        """bad_at: position whose token cannot be sampled; refused: the request cannot be prepared."""
        drawn = keys_of([seed] * max_model_len, range(max_model_len)) >> 40
        tokens = numpy.where(drawn % 48 == 0, STOP, drawn % WORDS).astype(numpy.int64)
        tokens[: len(prompt)] = prompt
        self.tokens = tokens
        self.prefixes = prefix_sums(tokens)
        """[max_model_len]: for each position what names it, the token there and all before it."""


def prefix_sums(tokens: NDArray[numpy.int64], first: int = 0, before: int = 0) -> Words:
    """A name for the prefix that ends at each token, from position `first` on: sums of token times power, modulo 2**64."""
    places = numpy.arange(first + 1, first + len(tokens) + 1, dtype=numpy.uint64)
    powers = keys_of(numpy.full(len(tokens), _BASE, dtype=numpy.uint64), places)
    sums: Words = numpy.cumsum((tokens + 1).astype(numpy.uint64) * powers) + numpy.uint64(before)
    return sums


@dataclass
class Flight:
    """A step that has been launched."""

    device: FakeDevice
    sampled: Sampled
    faulty: bool
    spoiled: bool
    """True if the step ran after a faulty one, on its data."""
    backends: tuple[str, ...] = ()
    graph: bool = False
    piecewise: bool = False
    no_graph: str = ""
    compiled: tuple[str, ...] = ()
    after_model: tuple[str, ...] = ()
    waited_for: tuple[str, ...] = ()
    wait_seconds: float = 0.0
    gathers: None = None
    first_nan: str | None = None
    interrupted: bool = False
    """True to interrupt the first wait, as Ctrl-C does."""

    def wait(self) -> Sampled:
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        demand(not self.spoiled, "tokens are taken of a step that has read what a fault has left")
        if self.faulty:
            self.device.faulty = False
            raise RuntimeError("a fault of the device")
        return self.sampled


@dataclass
class FakeDevice:
    """See `Executor`. A fault leaves garbage where the step should have written; one that shows at the wait spoils every step
    that is launched until somebody waits."""

    capacity: Capacity
    histories: Mapping[int, History]
    """By the completion's seed."""
    draw: Random
    faults: float = 0.0
    """Share of steps that fail."""
    ooms: int = 0
    """Steps for which memory will be too small."""
    interrupts: float = 0.0
    """Share of steps whose first wait is interrupted."""
    mover: Moving | None = field(default=None, init=False)
    adapters: None = field(default=None, init=False)
    faulty: bool = field(default=False, init=False)
    num_steps: int = field(default=0, init=False)
    num_faults: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        pool, rows, longest = self.capacity.pool, self.capacity.max_num_seqs, self.capacity.max_model_len
        self.groups = pool.page_format.groups
        sizes = [group.page_size for group in self.groups]
        self.memory: Words = numpy.full((pool.num_pages, max(sizes)), _GARBAGE, dtype=numpy.uint64)
        self.tables = [numpy.full((rows, -(-longest // size) + 1), NULL_PAGE, dtype=numpy.int64) for size in sizes]
        self.tokens: NDArray[numpy.int64] = numpy.zeros((rows, longest), dtype=numpy.int64)
        self.prefixes: Words = numpy.zeros((rows, longest), dtype=numpy.uint64)
        self.newest_at: NDArray[numpy.int64] = numpy.full(rows, -1, dtype=numpy.int64)
        self.seed_of: NDArray[numpy.uint64] = numpy.zeros(rows, dtype=numpy.uint64)

    def read_page(self, page: int) -> Words:
        return self.memory[page].copy()

    def write_page(self, page: int, content: Words) -> None:
        self.memory[page] = content

    def capture(self) -> None:
        """There is nothing to capture."""

    def failed(self, error: Exception) -> None:
        """The next step runs."""

    def call_when_lost(self, tell: Callable[[ExecutorLostError], None]) -> None:
        """It is never lost."""

    def shutdown(self) -> None:
        """There is nothing to end."""

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        ready: Future[None] = Future()
        if params.seed is None or not self.histories[params.seed].refused:
            return None
        ready.set_exception(ValueError("it cannot be prepared"))
        return ready

    def launch(self, step: StepInput) -> Flight:
        self.num_steps += 1
        self._take_in(step)
        fails = self.draw.random() < self.faults
        spoiled, at_wait = self.faulty, self.faulty or (fails and self.draw.random() < 0.5)
        if self.ooms and self.draw.random() < 0.05:
            self.ooms, fails, at_wait = self.ooms - 1, True, False
            error: Exception = torch.OutOfMemoryError("no memory")
        else:
            error = RuntimeError("a backend raised")
        places = self._check_inputs(step, spoiled=at_wait)
        if fails or at_wait:
            self.num_faults += 1
            for number in range(len(self.groups)):
                self.memory[self._slots(number, *places)] = _GARBAGE
            if not at_wait:
                raise error
            self.faulty = True
            return Flight(self, self._sample(step), faulty=True, spoiled=spoiled)
        self._copy(step)
        self._write(step, *places)
        self._check_reads(step)
        return Flight(self, self._sample(step), faulty=False, spoiled=False, interrupted=self.draw.random() < self.interrupts)

    def _take_in(self, step: StepInput) -> None:
        for started in step.started:
            row, history = started.row, self.histories[started.seed]
            self.tokens[row], self.prefixes[row] = history.tokens, history.prefixes
            self.newest_at[row], self.seed_of[row] = -1, started.seed
        for row, start, pages, group in step.new_pages:
            self.tables[group][row, start : start + len(pages)] = pages

    def _check_inputs(self, step: StepInput, spoiled: bool) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """Check row and position of every new token; each must be the sequence's own token, or a draft token."""
        rows = numpy.repeat(step.rows, step.query_lens).astype(numpy.int64)
        starts = numpy.cumsum(step.query_lens, dtype=numpy.int64) - step.query_lens
        positions = numpy.arange(step.num_tokens) + numpy.repeat(step.context_lens - starts, step.query_lens)
        guesses = positions >= numpy.repeat(step.context_lens + step.query_lens - step.num_draft_tokens, step.query_lens)
        own = numpy.where(
            step.token_ids == NEWEST, self.newest_at[rows] == positions, step.token_ids == self.tokens[rows, positions]
        )
        demand(spoiled or (own | guesses).all(), "a token that is not the sequence's")
        demand(len(set(step.rows.tolist())) == step.num_seqs, "a row stands twice in a step")
        demand((step.query_lens > 0).all(), "a sequence without tokens")
        alone = (step.query_lens == 1) & (self.newest_at[step.rows] == step.context_lens)
        demand(step.continues == bool(alone.all()), "continues is not what the rows say")
        return rows, positions

    def _slots(
        self, number: int, rows: NDArray[numpy.int64], positions: NDArray[numpy.int64]
    ) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        size = self.groups[number].page_size
        return self.tables[number][rows, positions // size], positions % size

    def _copy(self, step: StepInput) -> None:
        """All copies read before any of them writes."""
        read = [self.memory[source, :count].copy() for _, source, _, count in step.copies]
        for (_, _, target, count), words in zip(step.copies, read, strict=True):
            self.memory[target, :count] = words

    def _write(self, step: StepInput, rows: NDArray[numpy.int64], positions: NDArray[numpy.int64]) -> None:
        words = self.prefixes[rows, positions]
        ends = numpy.cumsum(step.query_lens)
        for index in numpy.flatnonzero(step.num_draft_tokens):  # a guess is written as what it is, right or wrong
            end, count = int(ends[index]), int(step.num_draft_tokens[index])
            first = int(positions[end - count])
            before = int(self.prefixes[step.rows[index], first - 1])
            words[end - count : end] = prefix_sums(step.token_ids[end - count : end], first, before)
        written = []
        for number in range(len(self.groups)):
            pages, places = self._slots(number, rows, positions)
            demand(not self._reserved or (pages != NULL_PAGE).all(), "the null page is written to")
            self.memory[pages, places] = words ^ numpy.uint64(number)
            written.append(pages * self.memory.shape[1] + places)
        slots = numpy.concatenate(written)
        demand(len(numpy.unique(slots)) == len(slots), "two tokens go to one slot")

    @property
    def _reserved(self) -> bool:
        return self.capacity.pool.page_format.reserved > 0

    def _check_reads(self, step: StepInput) -> None:
        """Every slot that a sequence sees holds its own token, and all before that one are its own as well."""
        ends = (step.context_lens + step.query_lens - step.num_draft_tokens)[:, None]
        places = numpy.arange(ends.max())
        for number, group in enumerate(self.groups):
            seen = places < ends
            if group.window is not None:
                seen &= places >= step.context_lens[:, None] - group.window + 1
            pages, within = self._slots(number, step.rows[:, None].astype(numpy.int64), places[None, :])
            right = self.memory[pages, within] == self.prefixes[step.rows, : len(places)] ^ numpy.uint64(number)
            wrong = numpy.argwhere(seen & ~right)
            if len(wrong):
                index, position = wrong[0].tolist()
                seed = int(self.seed_of[step.rows[index]])
                demand(False, f"step {self.num_steps}, group {number}: {seed} reads another's cache at {position}")

    def _sample(self, step: StepInput) -> Sampled:
        """Return the tokens that follow from the histories, after the accepted draft tokens."""
        found: list[list[int]] = []
        starts = numpy.cumsum(step.query_lens) - step.query_lens
        for index in numpy.flatnonzero(step.samples).tolist():
            row, drafts = int(step.rows[index]), int(step.num_draft_tokens[index])
            at = int(step.context_lens[index] + step.query_lens[index]) - drafts
            first = int(starts[index] + step.query_lens[index]) - drafts
            guesses, held = step.token_ids[first : first + drafts], 0
            while held < drafts and guesses[held] == self.tokens[row, at + held]:
                held += 1
            bad = self.histories[int(self.seed_of[row])].bad_at - at
            tokens = self.tokens[row, at : at + held + 1].tolist()
            if 0 <= bad <= held:
                tokens = [*tokens[:bad], NOT_A_TOKEN]
            self.newest_at[row] = at + len(tokens) - 1
            found.append(tokens)
        longest = max(map(len, found), default=1)
        padded = numpy.array([tokens + [0] * (longest - len(tokens)) for tokens in found], dtype=numpy.int64)
        return Sampled(padded.reshape(len(found), longest), numpy.array([len(tokens) for tokens in found], dtype=numpy.int64))
