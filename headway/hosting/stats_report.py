"""Text reports of an engine's statistics: one line, a full page, and periodic log lines."""

from __future__ import annotations

import logging
import time
from collections import Counter

from headway.core.engine.data.stats import EngineSnapshot, EngineStats
from headway.core.engine.loop import EngineLoop
from headway.outputs import RequestOutput

log = logging.getLogger("headway.stats")

WIDTH = 80
"""Maximum length of a line, in columns."""


def stats_line(now: EngineSnapshot, before: EngineSnapshot) -> str:
    """Return one line of at most 80 columns: the current state, and the nonzero counts since `before`."""
    done = now.totals - before.totals
    host = f", host {now.num_offloaded_blocks:,}" if now.num_offloaded_blocks else ""
    parts = [
        f"run {now.num_running:,}" + (f" wait {now.num_waiting:,}" if now.num_waiting else ""),
        f"{_rate(done.num_output_tokens, now.time - before.time)} tok/s",
        f"blocks {_share(now.num_used_blocks, now.num_blocks)}, cached {_share(now.num_cached_blocks, now.num_blocks)}{host}",
    ]
    if done.num_cached_tokens:
        parts.append(f"hits {_share(done.num_cached_tokens, done.num_prompt_tokens)}")
    if done.num_preemptions:
        parts.append(f"preempted {done.num_preemptions:,}")
    if done.num_draft_tokens:
        parts.append(f"drafts {_share(done.num_accepted_tokens, done.num_draft_tokens)}")
    if done.steps_without_graph:
        parts.append(f"no graph {done.steps_without_graph.total():,}")
    if done.steps_by_backend:
        parts.append("+".join(name for name, _ in done.steps_by_backend.most_common(2)))
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + 3 <= WIDTH:
            line += f" | {part}"
    return line[:WIDTH]


def stats_page(now: EngineSnapshot, before: EngineSnapshot) -> list[str]:
    """Return all statistics, one line per subject, with counts since `before`."""
    done = now.totals - before.totals
    seconds = done.host_seconds + done.wait_seconds
    found, rate = _share(done.num_cached_tokens, done.num_prompt_tokens), _rate(done.num_output_tokens, seconds)
    offloaded = f"; {now.num_offloaded_blocks:,} in host memory" if now.num_offloaded_blocks else ""
    lines = [
        f"sequences  {now.num_running:,} running, {now.num_waiting:,} waiting; {done.num_preemptions:,} preemptions",
        f"blocks     {now.num_used_blocks:,} of {now.num_blocks:,} used, {now.num_cached_blocks:,} cached{offloaded}",
        f"prompts    {done.num_prompt_tokens:,} tokens, {done.num_cached_tokens:,} of them ({found}) found in the cache",
        f"output     {done.num_output_tokens:,} tokens in {seconds:.1f} s of work: {rate} tokens/s",
    ]
    if done.num_checkpoints or now.num_kept_states:
        size = f"{now.kept_state_bytes / 2**20:,.0f} MiB"
        lines.append(
            f"states     {now.num_kept_states:,} cached ({size}); {done.num_checkpoint_hits:,} sequences resumed from one, "
            f"{done.num_checkpoint_evictions:,} were evicted"
        )
        if now.num_offloaded_states or done.states_offloaded:
            lines.append(
                f"           {now.num_offloaded_states:,} in host memory; {done.states_offloaded:,} copied there, "
                f"{done.states_swapped:,} of them of preempted sequences, {done.states_restored:,} copied back"
            )
    if done.num_draft_tokens or done.steps_without_drafts:
        accepted = (
            f"{done.num_accepted_tokens:,} of {done.num_draft_tokens:,} draft tokens accepted in {done.num_draft_steps:,} steps"
        )
        lines.append(f"drafts     {accepted}; steps without: {_listed(done.steps_without_drafts)}")
    lines.append(
        f"steps      {done.num_steps:,}, {done.num_graph_steps:,} of them one graph; by backend: {_listed(done.steps_by_backend)}"
    )
    for text, counts in (
        ("in graph segments", done.steps_in_pieces),
        ("outside a graph", done.steps_without_graph),
        ("with tokens sampled after the model", done.steps_after_model),
        ("that waited for the step before", done.steps_waiting),
    ):
        if counts:
            lines.append(f"           {text}: {_listed(counts)}")
    if done.rows_gathered or done.rows_of_candidates:
        lines.append(
            f"ranks      {done.rows_gathered:,} rows of logits gathered whole: {_listed(done.rows_gathered_for)}; "
            f"{done.rows_of_candidates:,} as candidates"
        )
    return lines


def answer_line(output: RequestOutput, done: EngineStats, more: str) -> str:
    """Return a line with a response's tokens per second after the first token, and its backends. done: the response's counters.
    more: command or option that shows further details."""
    tokens, metrics = sum(len(each.token_ids) for each in output.outputs), output.metrics
    seconds = (metrics.finished_time or metrics.arrival_time) - metrics.arrival_time - metrics.time_to_first_token
    served: dict[str, list[str]] = {"prefill": [], "extend": [], "decode": []}
    for (phase, name), _ in done.steps_by_phase.most_common():
        served[phase].append(name)
    backends = ", ".join(f"{phase}: {' and '.join(names)}" for phase, names in served.items() if names)
    counted = f"{tokens} token{'s' * (tokens != 1)}{', cut off' * (output.outputs[0].finish_reason == 'length')}"
    first = f"{metrics.time_to_first_token:.2f} s"
    speed = f"{_rate(tokens - 1, seconds)} tokens/s ({counted}; first after {first})" if tokens > 1 else f"{counted} in {first}"
    return f"{speed} - {backends} - {more}: more"


class StatsLog:
    """Logger of an engine's `stats_line`, at most once per interval while the engine steps."""

    def __init__(self, engine: EngineLoop, interval: float) -> None:
        log.setLevel(logging.INFO)  # the lines were requested, whatever the level of other messages
        self._interval = interval
        self._last = engine.snapshot()

    def stepped(self, engine: EngineLoop) -> None:
        """Log a line if the interval is over. Called after each step."""
        if time.perf_counter() - self._last.time >= self._interval:
            now = engine.snapshot()
            log.info("%s", stats_line(now, self._last))
            self._last = now


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common()) or "none"


def _share(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0:.0%}"


def _rate(count: int, seconds: float) -> str:
    rate = count / seconds if seconds > 0 else 0.0
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
