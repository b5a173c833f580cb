"""Result file of a search: plans that meet the limits, best first, and the reasons why other layouts are slower or cannot
start."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.plan.attention_times import Source
from headway.plan.search import FleetPlan, FleetSearch, Layout, RefusedLayout
from headway.plan.step_time import StepParts

MEASURED_ON: Final = "h200"
"""Kind of GPU on which utilizations were fitted."""
_WORDS: Final = {
    "products": "linear layers",
    "attention": "attention",
    "experts": "experts",
    "states": "layers with a state",
    "sums": "all-reduces",
    "other": "norms and sampling",
    "host": "the host",
    "launches": "kernels launched one by one",
}


class PlanRow(BaseModel):
    """A simulated plan, as a row of the report."""

    model_config = ConfigDict(extra="forbid")

    tensor_parallel_size: int
    replicas: int
    kv_cache_dtype: str
    weights: str
    """Weight format: a name in WEIGHT_FORMATS. model means the checkpoint's format."""
    batch: int
    """Batch size: max_num_seqs of each replica."""
    num_gpus: int
    tokens_per_second: float
    """Output tokens per second of all replicas together."""
    tokens_per_second_per_gpu: float
    tokens_per_second_per_user: float
    """Tokens per second of a request after its first token."""
    first_token_ms: float
    per_token_ms: float
    memory_gib: float
    """Memory per GPU in GiB."""
    cache_tokens: int
    cached_share: float
    """Fraction of prompt tokens that were prefix cache hits."""
    preemptions: int
    attention: Source
    us_per_token: dict[str, float]
    """Component of a step -> time of one rank per output token, in microseconds. Host time overlaps with device time."""
    command: str
    """Command that starts a replica. Empty if the weight format needs a different checkpoint."""
    reason: str = ""
    """Reason why this plan is not the best: the limit that it misses, or the component that takes more time than in the best
    plan."""


class RefusedRow(BaseModel):
    """A layout that cannot start or misses a limit, as a row of the report."""

    model_config = ConfigDict(extra="forbid")

    layout: str
    reason: str


class PlanReport(ResultFile):
    """Result of one `headway plan`."""

    schema_: Literal["headway.plan/1"] = Field(default="headway.plan/1", alias="schema")
    command: str
    origin: Origin | None = None
    model: str
    gpu: str
    num_gpus: int
    input_len: int
    output_len: int
    rate: float | None
    """Arrival rate in requests per second. None means the maximum that can be served."""
    max_first_token_ms: float | None
    max_per_token_ms: float | None
    percentile: float
    prefix_len: int
    num_prefixes: int
    routing: str
    plans: list[PlanRow]
    """Best plan of each layout that meets the limits, best first."""
    full_load: list[PlanRow]
    """Every batch size of every layout on all GPUs, at full load."""
    refused: list[RefusedRow]
    sources: list[str]
    """Lines that state whether each kind of time is measured or estimated."""


def report_of(search: FleetSearch, best: Sequence[FleetPlan], model: str, command: str) -> PlanReport:
    """Return the report of a finished search. best: the search's result. :raises ConfigError: if no plan meets the limits."""
    if not best:
        raise nothing_meets(search)
    demand, first = search.demand, best[0]
    rows = [_row(plan, model, search, "" if plan is first else why_slower(plan, first, search)) for plan in best]
    met = {plan.layout for plan in best}
    missed = {plan.layout: plan for plan in search.plans if plan.layout not in met}
    refused = [*_refused(search.refused)]
    refused += [RefusedRow(layout=str(layout), reason=f"batch {plan.batch}: {plan.reason}") for layout, plan in missed.items()]
    return PlanReport(
        command=command,
        origin=Origin.here(),
        model=model,
        gpu=search.gpu.name,
        num_gpus=search.num_gpus,
        input_len=demand.input_len,
        output_len=demand.output_len,
        rate=demand.rate,
        max_first_token_ms=demand.limits.first_token_ms,
        max_per_token_ms=demand.limits.per_token_ms,
        percentile=demand.limits.percentile,
        prefix_len=demand.prefix_len,
        num_prefixes=demand.num_prefixes,
        routing=demand.routing,
        plans=rows,
        full_load=[_row(plan, model, search, plan.reason) for plan in search.full_load],
        refused=refused,
        sources=sources(search),
    )


def _refused(layouts: Sequence[RefusedLayout]) -> Iterator[RefusedRow]:
    """Yield one row per reason and tensor-parallel size, merging cache types and weight formats with the same reason."""
    by_reason: dict[tuple[int, str], list[Layout]] = {}
    for each in layouts:
        by_reason.setdefault((each.layout.size, each.reason), []).append(each.layout)
    for (size, reason), same in by_reason.items():
        yield RefusedRow(layout=str(same[0]) if len(same) == 1 else f"tensor-parallel size {size}", reason=reason)


def nothing_meets(search: FleetSearch) -> ConfigError:
    """Return the error for a search in which no plan meets the limits. The message states the limit that the closest plan
    exceeds, or why no layout can start."""
    closest = search.closest()
    if closest is None:
        by_size = sorted(search.refused, key=lambda each: (not each.reason.startswith("memory"), -each.layout.size))
        lines = [f"{each.reason} ({each.layout})" for each in by_size]  # closest to fitting first
        most = lines[0] if lines else "no layout was asked for"
        more = f"; {len(lines) - 1} more" if len(lines) > 1 else ""
        return ConfigError(f"{search.num_gpus} x {search.gpu.name}", "one layout that can start", most + more)
    plan, reason = closest
    hint = "raise the limit, shorten the requests, or add GPUs"
    got = f"{reason} by the closest of {len(search.plans)} plans ({plan.layout}, batch {plan.batch})"
    return ConfigError("limits", "a plan that meets them", got, hint)


def why_slower(plan: FleetPlan, best: FleetPlan, search: FleetSearch) -> str:
    """Return the reason why a plan that meets the limits is not the best: the difference in GPUs or speed, and the component that
    takes more GPU time."""
    if search.demand.rate is not None and plan.num_gpus != best.num_gpus:
        difference = f"takes {plan.num_gpus} GPUs, not {best.num_gpus}"
    elif search.demand.rate is not None:
        difference = f"as many GPUs, {plan.per_token_ms / best.per_token_ms:.2f} times the time per token"
    else:
        difference = f"{plan.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu:.2f} of the best plan's tokens"
    if search.num_gpus % plan.layout.size and search.demand.rate is None:
        difference += f"; {search.num_gpus % plan.layout.size} GPUs idle"
    own, its = _gpu_us(plan), _gpu_us(best)
    more = {name: own[name] - its[name] for name in own if name not in ("host", "launches")}
    name = max(more, key=lambda each: more[each])
    if more[name] > 0.02 * sum(its.values()):
        difference += f"; {_WORDS[name]}: {own[name]:.0f} us of GPU time per token, not {its[name]:.0f}"
    return difference + (f" (batch {plan.batch}, not {best.batch})" if plan.batch < best.batch else "")


def _gpu_us(plan: FleetPlan) -> dict[str, float]:
    """Return component -> GPU time per output token, in microseconds."""
    return {name: us * plan.layout.size for name, us in asdict(plan.latencies.parts).items()}


def _row(plan: FleetPlan, model: str, search: FleetSearch, reason: str) -> PlanRow:
    layout = plan.layout
    return PlanRow(
        tensor_parallel_size=layout.size,
        replicas=plan.replicas,
        kv_cache_dtype=layout.kv_cache_dtype,
        weights=layout.weights.name,
        batch=plan.batch,
        num_gpus=plan.num_gpus,
        tokens_per_second=plan.tokens_per_second,
        tokens_per_second_per_gpu=plan.tokens_per_second_per_gpu,
        tokens_per_second_per_user=plan.tokens_per_second_per_user,
        first_token_ms=plan.first_token_ms,
        per_token_ms=plan.per_token_ms,
        memory_gib=plan.memory_bytes / 2**30,
        cache_tokens=plan.cache_tokens,
        cached_share=plan.latencies.cached_share,
        preemptions=plan.latencies.num_preemptions,
        attention=plan.attention,
        us_per_token={each.name: getattr(plan.latencies.parts, each.name) for each in fields(StepParts)},
        command=start_command(layout, model, plan.batch, search.demand.max_model_len),
        reason=reason,
    )


def start_command(layout: Layout, model: str, batch: int, max_model_len: int) -> str:
    """Return the command that starts one replica; empty if the weight format needs a different checkpoint."""
    if layout.weights.option is None:
        return ""
    words = ["headway", "serve", model, *layout.weights.option.split()]
    if layout.size > 1:
        words += ["--tensor-parallel-size", str(layout.size)]
    if layout.kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", layout.kv_cache_dtype]
    return shlex.join([*words, "--max-num-seqs", str(batch), "--max-model-len", str(max_model_len)])


def sources(search: FleetSearch) -> list[str]:
    """Return lines that state whether each kind of time is measured or estimated."""
    gpu, kinds = search.gpu, {plan.attention for plan in search.full_load}
    notes: dict[Source, str] = {
        "table": "measured, by crossover tables of this kind of GPU",
        "like": f"scaled from a similar layer in crossover tables of {gpu.title}",
        "data sheet": "from the data sheet; no crossover table for this kind of GPU was given",
    }
    lines = [f"attention: {notes[kind]}" for kind in notes if kind in kinds]
    products = "linear layers, experts and the host: fitted to measurements of an NVIDIA H200"
    guess = "" if gpu.name == MEASURED_ON else ", an estimate for this kind of GPU"
    lines.append(f"{products} (docs/plan.md){guess}")
    if any(plan.layout.size > 1 for plan in search.full_load):
        lines.append(f"all-reduces: measured by others, on {gpu.all_reduce.source}")
    formats = {plan.layout.weights.name: plan.layout.weights for plan in search.full_load}
    for name, form in sorted(formats.items()):
        if form.rate < 1:
            lines.append(
                f"weights in {name}: linear layers read their bytes at {form.rate:g} of the 16-bit rate, measured on an H200"
            )
        if form.expert_rate < 1:
            lines.append(
                f"weights in {name}: experts, if any, read their bytes at {form.expert_rate:g} of the 16-bit rate, an estimate"
            )
    replicas = max((plan.replicas for plan in search.plans), default=1)
    if replicas > 1:
        lines.append("all replicas are equal; one of them was simulated with its share of the requests")
    return lines
