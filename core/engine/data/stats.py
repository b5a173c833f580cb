"""Counts of an engine's work since its start, seconds of a step's parts, and ranges for a profiler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Final, Self

import numpy
import torch
from torch.profiler import record_function

from headway.core.engine.data.step import StepInput
from headway.core.sampling.sampler import Gathers


@dataclass(kw_only=True, slots=True)
class LaunchFacts:
    """How a step was launched."""

    backends: tuple[str, ...] = ()
    graph: bool = False
    """Whether the step is the replay of one CUDA graph."""
    piecewise: bool = False
    """Whether the step is replays of several graphs with attention launched between them."""
    no_graph: str = ""
    """Why the step is not one graph, where graphs are in use; else empty."""
    compiled: tuple[str, ...] = ()
    """Kernels that had to be compiled for the step."""
    after_model: tuple[str, ...] = ()
    """Features of requests that were served after the model or its graph, kernel by kernel."""
    waited_for: tuple[str, ...] = ()
    """Features of requests that need the tokens of the step before on the host, so that launching waited for them."""
    wait_seconds: float = 0.0
    """Seconds that launching waited for the step before."""
    gathers: Gathers | None = None
    """What ranks have put together to choose tokens; None where there is one."""
    first_nan: str | None = None
    """What made the first NaN, where HEADWAY_DEBUG=1 looks for it."""


@dataclass
class EngineStats:
    """Counters that only grow: subtract an earlier `snapshot` to see a stretch of work."""

    num_steps: int = 0
    num_graph_steps: int = 0
    num_prefill_tokens: int = 0
    """Tokens computed beyond those of decoding sequences."""
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of sequences that were admitted, each counted once."""
    num_cached_tokens: int = 0
    """Prompt tokens among them that the prefix cache spared."""
    num_checkpoints: int = 0
    """States that were kept for prefix hits, of a model whose layers keep states."""
    num_checkpoint_hits: int = 0
    """Sequences that began with such a state."""
    num_checkpoint_evictions: int = 0
    """States that gave their slot to a newer one, whether the host's memory keeps them or not."""
    num_preemptions: int = 0
    preemptions_by_kind: Counter[str] = field(default_factory=Counter)
    blocks_swapped: int = 0
    """Blocks that preempted sequences left to be swapped; blocks that no other sequence needed meanwhile stayed in the pool."""
    blocks_offloaded: int = 0
    """Blocks copied to the host's memory."""
    blocks_stored: int = 0
    """Pages written to disk."""
    states_swapped: int = 0
    """States of preempted sequences that were copied to the host's memory."""
    states_offloaded: int = 0
    """States copied to the host's memory: those, and kept ones that gave their slot to a newer one."""
    states_restored: int = 0
    """States that were brought back from the host's memory or from disk."""
    offload_hits: int = 0
    """Tokens that were brought back from the host's memory or from disk, and so not computed again."""
    offload_bytes_out: int = 0
    offload_bytes_in: int = 0
    offload_failures: Counter[str] = field(default_factory=Counter)
    """Pages that were not kept, or not found as they should be, by reason."""
    num_draft_tokens: int = 0
    """Guesses that steps have verified."""
    num_drafts: int = 0
    """Guesses, of one token or several, that steps have verified for a sequence."""
    num_accepted_tokens: int = 0
    """Guesses among them that held."""
    num_draft_steps: int = 0
    """Steps with guesses to verify."""
    kv_tokens_read: int = 0
    """Cached tokens that decode tokens attended to, summed over all decode tokens."""
    host_seconds: float = 0.0
    """Seconds of scheduling, launching and reading steps, without waiting for the device."""
    schedule_seconds: float = 0.0
    """The part of `host_seconds` that chooses steps, guesses included."""
    prepare_seconds: float = 0.0
    """The part of `host_seconds` that turns chosen steps into plain data."""
    launch_seconds: float = 0.0
    """The part of `host_seconds` that fills inputs and launches."""
    read_seconds: float = 0.0
    """The part of `host_seconds` that takes in sampled tokens."""
    output_seconds: float = 0.0
    """Seconds beside `host_seconds`: the client's work, from deltas to texts and request outputs."""
    wait_seconds: float = 0.0
    """Seconds for which the host was blocked on the device."""
    steps_by_backend: Counter[str] = field(default_factory=Counter)
    """Steps in which a backend served a phase."""
    steps_by_phase: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Steps by phase and backend; where several backends serve parts of one phase, the first counts."""
    steps_without_graph: Counter[str] = field(default_factory=Counter)
    """Steps that were launched kernel by kernel although CUDA graphs are in use, by reason."""
    steps_in_pieces: Counter[str] = field(default_factory=Counter)
    """Steps that were replays of CUDA graphs with attention launched between them, by the reason why they were not one graph."""
    steps_without_drafts: Counter[str] = field(default_factory=Counter)
    """Steps that verified no guess although tokens are guessed, by reason."""
    steps_after_model: Counter[str] = field(default_factory=Counter)
    """Steps some of whose tokens were chosen after the model or its graph, kernel by kernel, by what requests asked for."""
    steps_by_tokens: Counter[int] = field(default_factory=Counter)
    """Steps by the bits of their number of tokens: under n those of 2^(n-1) to 2^n - 1 tokens."""
    steps_waiting: Counter[str] = field(default_factory=Counter)
    """Steps whose tokens waited for the host to read the step before, by what requests asked for; the model ran meanwhile."""
    rows_gathered: int = 0
    """Rows of logits that all ranks put together whole: those whose tokens depend on the whole distribution."""
    rows_of_candidates: int = 0
    """Rows of which each rank sent the others its most likely tokens alone, as many as top_k asks for."""
    rows_gathered_for: Counter[str] = field(default_factory=Counter)
    """The rows among `rows_gathered`, by what requests asked for; a row with several reasons counts under each."""
    compilations: Counter[str] = field(default_factory=Counter)
    """Triton kernels that were compiled after the engine was ready, by name: each has delayed a step."""

    def count(self, step: StepInput, launched: LaunchFacts) -> None:
        """Add a step that has been launched."""
        self.num_steps += 1
        self.num_graph_steps += launched.graph
        self.steps_by_backend.update(launched.backends)
        self.compilations.update(launched.compiled)
        self.steps_after_model.update(launched.after_model)
        self.steps_waiting.update(launched.waited_for)
        self.wait_seconds += launched.wait_seconds
        if launched.gathers is not None:
            self.rows_gathered += launched.gathers.rows
            self.rows_of_candidates += launched.gathers.candidates
            self.rows_gathered_for.update(launched.gathers.reasons)
        if launched.no_graph:
            (self.steps_in_pieces if launched.piecewise else self.steps_without_graph)[launched.no_graph] += 1
        if step.goes_on:  # the commonest step, counted without masks: the host's time counts where a step is short
            self.num_decode_tokens += step.num_seqs
            self.steps_by_tokens[step.num_seqs.bit_length()] += 1
            self.kv_tokens_read += int(step.context_lens.sum(dtype=int)) + step.num_seqs
            self.steps_by_phase.update(("decode", name) for name in launched.backends[-1:])
            return
        drafts = int(step.num_draft_tokens.sum())
        self.num_draft_tokens += drafts
        self.num_draft_steps += drafts > 0
        self.num_drafts += int(numpy.count_nonzero(step.num_draft_tokens))
        decodes = (step.context_lens > 0) & (step.query_lens == step.num_draft_tokens + 1)
        num_decodes = int(decodes.sum())
        self.num_decode_tokens += num_decodes
        prefilled = int(step.query_lens.sum(where=~decodes))
        self.num_prefill_tokens += prefilled
        self.steps_by_tokens[(prefilled + num_decodes).bit_length()] += 1
        self.kv_tokens_read += int(step.context_lens.sum(where=decodes, dtype=int)) + num_decodes
        if num_decodes:
            self.steps_by_phase.update(("decode", name) for name in launched.backends[-1:])
        if num_decodes < step.num_seqs:  # prompts come first in a step
            phase = "extend" if step.context_lens[~decodes].any() else "prefill"
            self.steps_by_phase.update((phase, name) for name in launched.backends[:1])

    @property
    def host_parts(self) -> dict[str, float]:
        """Seconds of the host's work by part; the last part is not in `host_seconds`."""
        parts = {
            "schedule": self.schedule_seconds,
            "prepare": self.prepare_seconds,
            "launch": self.launch_seconds,
            "read": self.read_seconds,
        }
        return {**parts, "other": self.host_seconds - sum(parts.values()), "outputs": self.output_seconds}

    def snapshot(self) -> Self:
        """A copy of the counters."""
        copies = {each.name: Counter(value) for each in fields(self) if isinstance(value := getattr(self, each.name), Counter)}
        return replace(self, **copies)  # type: ignore[arg-type]

    def __sub__(self, earlier: Self) -> Self:
        return type(self)(**{each.name: getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)})


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine at one moment, between two steps."""

    time: float
    """Seconds on the clock of time.perf_counter."""
    num_running: int
    num_waiting: int
    """Sequences that have not begun, or were preempted."""
    num_blocks: int
    """Blocks of the pool. Where a model has several cache groups, blocks here are pages."""
    num_used_blocks: int
    """Blocks that sequences hold."""
    num_cached_blocks: int
    """Blocks that no sequence holds and an equal prefix would find again."""
    totals: EngineStats
    """Counters since the start: subtract those of an earlier snapshot to see a stretch of time."""
    num_kept_states: int = 0
    """States that an equal prefix would find again, of a model whose layers keep states."""
    kept_state_bytes: int = 0
    """Bytes of these."""
    num_offloaded_blocks: int = 0
    """Blocks, never pages, that the host's memory keeps, whatever the pool holds of them; none without `kv_offload_size`."""
    num_offloaded_states: int = 0
    """States that the host's memory keeps, of a model whose layers keep states."""


EnterRange = Callable[[str], None]
"""Closes the profiler's range that is open and opens the one of this name; "" opens none."""

PARTS: Final = ("schedule", "prepare", "launch", "wait", "read", "outputs")

_ANY: Final = ("", *PARTS)


def no_ranges(part: str) -> None:
    """Show nothing: no profiler is attached."""


class ProfilerRanges:
    """Shows the parts as ranges "headway.NAME" to torch's profiler, and on a CUDA device by NVTX to Nsight Systems."""

    def __init__(self, device: torch.device) -> None:
        self._nvtx = device.type == "cuda"
        self._open: record_function | None = None

    def __call__(self, part: str) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
            if self._nvtx:
                torch.cuda.nvtx.range_pop()
        if part:
            self._open = record_function(f"headway.{part}")
            self._open.__enter__()
            if self._nvtx:
                torch.cuda.nvtx.range_push(f"headway.{part}")


class StepClock:
    """Adds up the seconds of each part of a step in `EngineStats`, for profilers too; called some eight times a step."""

    def __init__(self, stats: EngineStats, now: Callable[[], float] = time.perf_counter) -> None:
        self.enter_range: EnterRange = no_ranges
        """Replaced while a profiler is attached."""
        self._stats = stats
        self._now = now
        self._seconds = dict.fromkeys(_ANY, 0.0)  # Seconds of each part that are not in the statistics yet
        self._part = ""
        self._entered = self._began = 0.0
        self._waited = stats.wait_seconds
        self._waited_before = 0.0

    def begin_step(self) -> None:
        """Begin a step; a part that an interrupt has cut short is not counted."""
        self._part = ""
        self._entered = self._now()
        self._began = self._entered
        self._waited_before = self._stats.wait_seconds

    def enter(self, part: str) -> float:
        """End the part under way and enter one of PARTS, or "" for what belongs to none; returns the time."""
        now = self._now()
        self._seconds[self._part] += now - self._entered
        self._part = part
        self._entered = now
        self.enter_range(part)
        return now

    def leave(self) -> float:
        """End the running part, update the statistics, and return the time. Waits counted by `EngineStats.count` are excluded."""
        now, seconds, stats = self.enter(""), self._seconds, self._stats
        stats.schedule_seconds += seconds["schedule"]
        stats.prepare_seconds += seconds["prepare"]
        stats.launch_seconds += seconds["launch"] - (stats.wait_seconds - self._waited)
        stats.wait_seconds += seconds["wait"]
        stats.read_seconds += seconds["read"]
        stats.output_seconds += seconds["outputs"]
        self._waited = stats.wait_seconds
        self._seconds = dict.fromkeys(_ANY, 0.0)
        return now

    def end_step(self) -> None:
        """End the step: the time in it that was not spent waiting for the device was the host's work."""
        now, stats = self.leave(), self._stats
        stats.host_seconds += now - self._began - (stats.wait_seconds - self._waited_before)
