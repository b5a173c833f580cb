"""Counters of an engine's work since its start, seconds per part of a step, and profiler ranges."""

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
    """Reason why the step is not one graph. Empty if it is, or if graphs are off."""
    compiled: tuple[str, ...] = ()
    """Kernels that were compiled for the step."""
    after_model: tuple[str, ...] = ()
    """Request features that ran after the model or its graph, kernel by kernel."""
    waited_for: tuple[str, ...] = ()
    """Request features that need the previous step's tokens on the host, for which launching waited."""
    wait_seconds: float = 0.0
    """Seconds that launching waited for the previous step."""
    gathers: Gathers | None = None
    """Logits that ranks gathered to choose tokens. None with one rank."""
    first_nan: str | None = None
    """Source of the first NaN, if HEADWAY_DEBUG=1 looks for it."""


@dataclass
class EngineStats:
    """Counters that only grow. Subtract an earlier `snapshot` to get the work in between."""

    num_steps: int = 0
    num_graph_steps: int = 0
    num_prefill_tokens: int = 0
    """Tokens computed other than by decode."""
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of admitted sequences, each counted once."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_checkpoints: int = 0
    """States saved for prefix hits, in models whose layers keep states."""
    num_checkpoint_hits: int = 0
    """Sequences that began with a saved state."""
    num_checkpoint_evictions: int = 0
    """Saved states that were evicted from the device, whether host memory holds them or not."""
    num_preemptions: int = 0
    preemptions_by_kind: Counter[str] = field(default_factory=Counter)
    blocks_swapped: int = 0
    """Blocks that preempted sequences left for swapping; blocks that no other sequence needed stayed in the pool."""
    blocks_offloaded: int = 0
    """Blocks copied to host memory."""
    blocks_stored: int = 0
    """Pages written to disk."""
    states_swapped: int = 0
    """States of preempted sequences that were copied to host memory."""
    states_offloaded: int = 0
    """States copied to host memory: swapped states, and evicted saved states."""
    states_restored: int = 0
    """States restored from host memory or disk."""
    offload_hits: int = 0
    """Tokens restored from host memory or disk, and therefore not recomputed."""
    offload_bytes_out: int = 0
    offload_bytes_in: int = 0
    offload_failures: Counter[str] = field(default_factory=Counter)
    """Pages that could not be saved or restored, by reason."""
    num_draft_tokens: int = 0
    """Draft tokens that steps verified."""
    num_drafts: int = 0
    """Drafts, of one or several tokens for one sequence, that steps verified."""
    num_accepted_tokens: int = 0
    """Accepted draft tokens."""
    num_draft_steps: int = 0
    """Steps that verified drafts."""
    kv_tokens_read: int = 0
    """Cached tokens that decode tokens attended to, summed over all decode tokens."""
    host_seconds: float = 0.0
    """Seconds of scheduling, launching and reading steps, without waiting for the device."""
    schedule_seconds: float = 0.0
    """Part of `host_seconds` for scheduling, proposing drafts included."""
    prepare_seconds: float = 0.0
    """Part of `host_seconds` for turning scheduled steps into plain data."""
    launch_seconds: float = 0.0
    """Part of `host_seconds` for filling inputs and launching."""
    read_seconds: float = 0.0
    """Part of `host_seconds` for processing sampled tokens."""
    output_seconds: float = 0.0
    """Seconds, outside `host_seconds`, of the client's work from deltas to texts and request outputs."""
    wait_seconds: float = 0.0
    """Seconds for which the host was blocked on the device."""
    steps_by_backend: Counter[str] = field(default_factory=Counter)
    """Steps by backend that ran a phase."""
    steps_by_phase: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Steps by phase and backend. If several backends run parts of one phase, the first counts."""
    steps_without_graph: Counter[str] = field(default_factory=Counter)
    """Steps launched kernel by kernel although CUDA graphs are on, by reason."""
    steps_in_pieces: Counter[str] = field(default_factory=Counter)
    """Steps that replayed piecewise CUDA graphs, by the reason why they were not one graph."""
    steps_without_drafts: Counter[str] = field(default_factory=Counter)
    """Steps without drafts although speculation is on, by reason."""
    steps_after_model: Counter[str] = field(default_factory=Counter)
    """Steps with tokens chosen after the model or its graph, kernel by kernel, by request feature."""
    steps_by_tokens: Counter[int] = field(default_factory=Counter)
    """Steps by bit length n of their number of tokens: 2^(n-1) to 2^n - 1 tokens."""
    steps_waiting: Counter[str] = field(default_factory=Counter)
    """Steps whose tokens waited for the host to read the previous step, by request feature; the model ran meanwhile."""
    rows_gathered: int = 0
    """Rows of logits that ranks gathered in full, because their tokens depend on the whole distribution."""
    rows_of_candidates: int = 0
    """Rows for which each rank sent only its top_k most likely tokens."""
    rows_gathered_for: Counter[str] = field(default_factory=Counter)
    """Rows of `rows_gathered` by request feature; a row with several features counts under each."""
    compilations: Counter[str] = field(default_factory=Counter)
    """Triton kernels compiled after the engine was ready, by name. Each delayed a step."""

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
        """Seconds of host work by part. The last part, `outputs`, is not in `host_seconds`."""
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
    """Sequences that have not started or were preempted."""
    num_blocks: int
    """Blocks in the pool. With several cache groups, blocks here are pages."""
    num_used_blocks: int
    """Blocks that sequences hold."""
    num_cached_blocks: int
    """Blocks that no sequence holds and that a prefix hit would reuse."""
    totals: EngineStats
    """Counters since the start. Subtract the counters of an earlier snapshot to get the work in between."""
    num_kept_states: int = 0
    """Saved states that a prefix hit would reuse, in models whose layers keep states."""
    kept_state_bytes: int = 0
    """Bytes of the saved states."""
    num_offloaded_blocks: int = 0
    """Blocks (never pages) in host memory, including blocks that the pool holds too. 0 without `kv_offload_size`."""
    num_offloaded_states: int = 0
    """States in host memory, in models whose layers keep states."""


EnterRange = Callable[[str], None]
"""Closes the open profiler range and opens the one of this name. "" opens none."""

PARTS: Final = ("schedule", "prepare", "launch", "wait", "read", "outputs")

_ANY: Final = ("", *PARTS)


def no_ranges(part: str) -> None:
    """Do nothing: no profiler is attached."""


class ProfilerRanges:
    """Reports the parts as ranges "headway.NAME" to torch's profiler, and on a CUDA device by NVTX to Nsight Systems."""

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
        """Replaced while a profiler is attached."""
        self._stats = stats
        self._now = now
        self._seconds = dict.fromkeys(_ANY, 0.0)  # Seconds of each part that are not yet in the statistics
        self._part = ""
        self._entered = self._began = 0.0
        self._waited = stats.wait_seconds
        self._waited_before = 0.0

    def begin_step(self) -> None:
        """Begin a step. A part that an interrupt ended is not counted."""
        self._part = ""
        self._entered = self._now()
        self._began = self._entered
        self._waited_before = self._stats.wait_seconds

    def enter(self, part: str) -> float:
        """End the current part and enter one of PARTS, or "" for none of them. Returns the time."""
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
        """End the step. Its time that was not spent waiting for the device counts as the host's work."""
        now, stats = self.leave(), self._stats
        stats.host_seconds += now - self._began - (stats.wait_seconds - self._waited_before)
