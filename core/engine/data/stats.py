"""Counters of an engine's work since its start, the time spent in each part of a step, and profiler ranges."""

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
    """Facts about how a step was launched."""

    backends: tuple[str, ...] = ()
    graph: bool = False
    """True if the step replays one CUDA graph."""
    piecewise: bool = False
    """True if the step replays several graphs and launches attention between them (piecewise CUDA graphs)."""
    no_graph: str = ""
    """Reason why the step is not one CUDA graph. Empty if the step is one graph, or if graphs are off."""
    compiled: tuple[str, ...] = ()
    """Names of the kernels that were compiled for the step."""
    after_model: tuple[str, ...] = ()
    """Request features whose kernels were launched one by one after the model or its graph."""
    waited_for: tuple[str, ...] = ()
    """Request features that need the previous step's tokens on the host, for which launching waited."""
    wait_seconds: float = 0.0
    """Seconds for which launching waited for the previous step."""
    gathers: Gathers | None = None
    """Counts of the logits that ranks gathered to choose tokens. None with one rank."""
    first_nan: str | None = None
    """Source of the first NaN, if HEADWAY_DEBUG=1 looks for it."""


@dataclass
class EngineStats:
    """Counters that only grow. Subtract an earlier `snapshot` to get the work in between."""

    num_steps: int = 0
    num_graph_steps: int = 0
    num_prefill_tokens: int = 0
    """Number of tokens computed in prefill and extend."""
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    """Number of prompt tokens of admitted sequences, each counted once."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    missed_tokens: Counter[str] = field(default_factory=Counter)
    """Number of prompt tokens of admitted sequences that were not found in the prefix cache, by reason."""
    evictions: Counter[str] = field(default_factory=Counter)
    """Number of pages and saved states whose content can no longer be found in the pool, by cause."""
    num_checkpoints: int = 0
    """Number of states saved for prefix hits, in models with state layers."""
    num_checkpoint_hits: int = 0
    """Number of sequences that started from a saved state."""
    num_checkpoint_evictions: int = 0
    """Number of saved states that were evicted from the device, whether or not they were copied to host memory."""
    num_preemptions: int = 0
    preemptions_by_kind: Counter[str] = field(default_factory=Counter)
    blocks_swapped: int = 0
    """Number of blocks that preempted sequences released for swapping, including blocks that stayed in the pool."""
    blocks_offloaded: int = 0
    """Number of blocks copied to host memory."""
    blocks_stored: int = 0
    """Number of pages written to disk."""
    states_swapped: int = 0
    """Number of states of preempted sequences that were copied to host memory."""
    states_offloaded: int = 0
    """Number of states copied to host memory: swapped states, and evicted saved states."""
    states_restored: int = 0
    """Number of states restored from host memory or disk."""
    offload_hits: int = 0
    """Number of tokens restored from host memory or disk, and therefore not recomputed."""
    offload_bytes_out: int = 0
    offload_bytes_in: int = 0
    offload_failures: Counter[str] = field(default_factory=Counter)
    """Number of pages that could not be saved or restored, by reason."""
    num_draft_tokens: int = 0
    """Number of draft tokens that steps verified."""
    num_drafts: int = 0
    """Number of drafts that steps verified. A draft is one or several tokens for one sequence."""
    num_accepted_tokens: int = 0
    """Number of accepted draft tokens."""
    num_draft_steps: int = 0
    """Number of steps that verified drafts."""
    kv_tokens_read: int = 0
    """Number of cached tokens that each decode token attended to, summed over all decode tokens."""
    host_seconds: float = 0.0
    """Seconds spent on scheduling, launching and reading steps, excluding waits for the device."""
    schedule_seconds: float = 0.0
    """Part of `host_seconds` for scheduling, including the proposal of drafts."""
    prepare_seconds: float = 0.0
    """Part of `host_seconds` for turning scheduled steps into plain data."""
    launch_seconds: float = 0.0
    """Part of `host_seconds` for filling inputs and launching."""
    read_seconds: float = 0.0
    """Part of `host_seconds` for processing sampled tokens."""
    output_seconds: float = 0.0
    """Seconds spent on turning deltas into texts and request outputs. They are not part of `host_seconds`."""
    wait_seconds: float = 0.0
    """Seconds for which the host was blocked on the device."""
    steps_by_backend: Counter[str] = field(default_factory=Counter)
    """Number of steps in which each backend ran a phase."""
    steps_by_phase: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of steps, by phase and backend. If several backends run parts of a phase, the step counts for the first backend."""
    steps_without_graph: Counter[str] = field(default_factory=Counter)
    """Number of steps launched kernel by kernel although CUDA graphs are on, by reason."""
    steps_in_pieces: Counter[str] = field(default_factory=Counter)
    """Number of steps that replayed piecewise CUDA graphs, by the reason why they were not one graph."""
    steps_without_drafts: Counter[str] = field(default_factory=Counter)
    """Number of steps without drafts although speculation is on, by reason."""
    steps_after_model: Counter[str] = field(default_factory=Counter)
    """Number of steps whose tokens were chosen after the model or its graph, kernel by kernel, by request feature."""
    steps_by_tokens: Counter[int] = field(default_factory=Counter)
    """Number of steps, keyed by the bit length n of the number of tokens in the step: 2^(n-1) to 2^n - 1 tokens."""
    steps_waiting: Counter[str] = field(default_factory=Counter)
    """Number of steps that sampled only after the host had read the previous step, by request feature."""
    rows_gathered: int = 0
    """Number of rows of logits that ranks gathered in full, because the tokens depend on the whole distribution."""
    rows_of_candidates: int = 0
    """Number of rows of logits for which each rank sent only its top_k most likely tokens."""
    rows_gathered_for: Counter[str] = field(default_factory=Counter)
    """Number of rows in `rows_gathered` by request feature. A row with several features counts under each."""
    tuned_points: int = 0
    """Number of points whose times were measured while the engine was idle."""
    tuning_changes: int = 0
    """Number of times that the engine took other kernels after such measurements."""
    tuning_saved_seconds: float = 0.0
    """Seconds of attention that the steps before these changes would have saved with the new kernels."""
    compilations: Counter[str] = field(default_factory=Counter)
    """Number of kernels compiled after the engine was ready, by name. Each compilation delayed a step."""

    def count(self, step: StepInput, launched: LaunchFacts) -> None:
        """Count a launched step."""
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
        if step.continues:  # the most common step, counted without masks: short steps are sensitive to host time
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
        """Seconds of host work for each part of a step. The last part, `outputs`, is not in `host_seconds`."""
        parts = {
            "schedule": self.schedule_seconds,
            "prepare": self.prepare_seconds,
            "launch": self.launch_seconds,
            "read": self.read_seconds,
        }
        return {**parts, "other": self.host_seconds - sum(parts.values()), "outputs": self.output_seconds}

    def snapshot(self) -> Self:
        """Return a copy of the counters."""
        copies = {each.name: Counter(value) for each in fields(self) if isinstance(value := getattr(self, each.name), Counter)}
        return replace(self, **copies)  # type: ignore[arg-type]

    def __sub__(self, earlier: Self) -> Self:
        return type(self)(**{each.name: getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)})


@dataclass(frozen=True)
class EngineSnapshot:
    """State of an engine at one moment, between two steps."""

    time: float
    """Time on the clock of time.perf_counter, in seconds."""
    num_running: int
    num_waiting: int
    """Number of sequences that have not started or were preempted."""
    num_blocks: int
    """Number of blocks in the pool. With several cache groups, the block counts here are page counts."""
    num_used_blocks: int
    """Number of blocks that sequences reference."""
    num_cached_blocks: int
    """Number of blocks that no sequence references and that a prefix hit would reuse."""
    totals: EngineStats
    """Counters since the start. Subtract the counters of an earlier snapshot to get the work in between."""
    num_kept_states: int = 0
    """Number of saved states that a prefix hit would reuse, in models with state layers."""
    kept_state_bytes: int = 0
    """Size of the saved states in bytes."""
    num_offloaded_blocks: int = 0
    """Number of blocks (never pages) in host memory, including blocks also in the pool. 0 without `kv_offload_size`."""
    num_offloaded_states: int = 0
    """Number of states in host memory, in models with state layers."""


EnterRange = Callable[[str], None]
"""Function that closes the open profiler range and opens a range with the given name, or none if the name is empty."""

PARTS: Final = ("schedule", "prepare", "launch", "wait", "read", "outputs")

_ANY: Final = ("", *PARTS)


def no_ranges(part: str) -> None:
    """Do nothing: no profiler is attached."""


class ProfilerRanges:
    """Reports the parts of a step as ranges "headway.NAME" to torch's profiler and, on a CUDA device, also through NVTX."""

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
    """Adds the seconds of each part of a step to `EngineStats`, and opens profiler ranges. Called about eight times per step."""

    def __init__(self, stats: EngineStats, now: Callable[[], float] = time.perf_counter) -> None:
        self.enter_range: EnterRange = no_ranges
        """Function that opens profiler ranges. It is replaced while a profiler is attached."""
        self._stats = stats
        self._now = now
        self._seconds = dict.fromkeys(_ANY, 0.0)  # Seconds of each part that are not yet in the statistics
        self._part = ""
        self._entered = self._began = 0.0
        self._waited = stats.wait_seconds
        self._waited_before = 0.0

    def begin_step(self) -> None:
        """Begin a step. If an interrupt ended the previous step within a part, the time of that part is not counted."""
        self._part = ""
        self._entered = self._now()
        self._began = self._entered
        self._waited_before = self._stats.wait_seconds

    def enter(self, part: str) -> float:
        """End the current part and enter `part`, one of PARTS or "" for none. Returns the current time in seconds."""
        now = self._now()
        self._seconds[self._part] += now - self._entered
        self._part = part
        self._entered = now
        self.enter_range(part)
        return now

    def leave(self) -> float:
        """End the current part, add the seconds of all parts to the counters, and return the current time in seconds. Waits
        counted by `EngineStats.count` are excluded from the launch time."""
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
        """End the step. Its time, excluding waits for the device, counts as host work."""
        now, stats = self.leave(), self._stats
        stats.host_seconds += now - self._began - (stats.wait_seconds - self._waited_before)
