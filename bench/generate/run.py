"""Offline runs of one engine: every workload is warmed up, timed, compared with the roofline, and profiled in the middle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headway.bench.generate.profile import Window
from headway.bench.generate.results import OfflineCell, OfflineReport
from headway.bench.generate.roofline import ElementBytes, Rates, Roofline, measure_read_gbps
from headway.bench.generate.workloads import Requests, RequestSet
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.engine.data.stats import EngineStats
from headway.core.sampling.params import SamplingParams
from headway.core.system.provenance import Origin
from headway.llm import LLM
from headway.models.layers.decoder import Decoder
from headway.tuning.measure.device import crowding, describe_device
from headway.tuning.measure.timing import Timer


@dataclass(frozen=True)
class OfflineOptions:
    """Options of an offline run."""

    repeat: int = 3
    """Number of timed passes; the pass with the median rate counts."""
    warmup: int = 1
    """Number of untimed passes before the timed ones."""
    adapters: int = 0
    """Number of adapters that requests use in rotation, in additional passes after the passes without adapters. 0 means no
    additional passes."""
    trace: Path | None = None
    """File for a trace of steps in the middle of the last workload."""
    ranks: int = 1
    """Number of the engine's ranks, each of which reads and computes a shard."""


@dataclass(frozen=True)
class _Pass:
    """One generation of a whole workload."""

    seconds: float
    first_seconds: float
    """Mean time to the first token, in seconds."""
    later_seconds: float | None
    """Mean time per token after the first, in seconds."""
    stats: EngineStats


def run_offline(
    llm: LLM,
    workloads: Sequence[RequestSet],
    options: OfflineOptions,
    *,
    load_format: str,
    start_seconds: float,
    command: str,
    advance: Callable[[str], None] = lambda _: None,
) -> OfflineReport:
    """Run the workloads one after the other. advance: called after each pass with the workload's label.
    :raises HeadwayError: if a request cannot be sent or has not generated all of its tokens."""
    device = describe_device(llm.device, llm.model.decoder.dtype, Timer())
    rates = Rates(measure_read_gbps(llm.device, Timer()), device.matrix_tflops)
    cells, busy, adapters = [], crowding(), _drawn_adapters(llm, options.adapters)
    for workload in workloads:
        requests = workload.requests(llm.model.decoder.vocab_size)
        for own in [[], adapters] if adapters else [[]]:
            passes = []
            for number in range(options.warmup + options.repeat):
                done = _run(llm, requests, workload.temperature, own)
                passes += [done] if number >= options.warmup else []
                advance(workload.label)
            last = workload is workloads[-1] and own == adapters
            idle = _look_inside(llm, requests, workload.temperature, options.trace if last else None, own)
            cells.append(_summary(llm, workload, requests, passes, idle, rates, options.ranks, len(own)))
    return OfflineReport(
        command=command,
        origin=Origin.here(),
        busy=busy or crowding(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=llm.model.name,
        load_format=load_format,
        dtype=DTYPE_NAMES[llm.model.decoder.dtype],
        warmup=options.warmup,
        repeat=options.repeat,
        start_seconds=start_seconds,
        settings=settings(llm),
        device=device,
        read_gbps=rates.read_gbps,
        cells=cells,
    )


def settings(llm: LLM) -> dict[str, str]:
    """Return the engine's settings in effect, by name."""
    chosen, config = llm.engine.selection, llm.engine.config
    return {
        "model_impl": llm.model.implementation,
        **{phase.value: name for phase, name in chosen.names.items()},
        "kv_layout": chosen.layout.name,
        "block_size": str(chosen.block_size),
        "pool_tokens": str(llm.engine.capacity.pool.num_tokens(llm.engine.capacity.max_model_len)),
        "max_model_len": str(llm.engine.capacity.max_model_len),
        "max_num_seqs": str(config.max_num_seqs),
        "max_num_batched_tokens": str(config.step_tokens),
        "enforce_eager": str(config.enforce_eager).lower(),
        "async_scheduling": str(config.async_scheduling).lower(),
        "tokenizer": "no" if llm.tokenizer is None else "yes",
        "prefix_cache": "emptied before each pass" if config.enable_prefix_caching else "off",
        **{f"experts {number}": kind.describe() for number, kind in enumerate(llm.model.decoder.expert_kinds)},
        **{f"products {kind.name}": kind.describe() for kind in llm.model.decoder.linear_choices},
    }


def _drawn_adapters(llm: LLM, count: int) -> list[LoRARequest]:
    """Return random adapters, registered with the engine as if loaded.
    :raises ConfigError: if the engine has no adapter slots."""
    made = [LoRARequest(f"drawn {number}", number, "no folder") for number in range(1, count + 1)]
    decoder = llm.model.decoder
    bank = decoder.adapters if isinstance(decoder, Decoder) else None
    if not made:
        return made
    if bank is None:
        raise ConfigError("--lora", "an engine with enable_lora=True", "one without")
    for each in made:
        llm.engine.adapter_table.add(each, bank.drawn(each.lora_int_id))
    return made


def _run(llm: LLM, requests: Requests, temperature: float, adapters: Sequence[LoRARequest] = ()) -> _Pass:
    # Otherwise every pass would get prefix cache hits on the previous pass's prompts.
    llm.engine.forget_prefixes()
    params = [SamplingParams(temperature=temperature, max_tokens=size, ignore_eos=True) for size in requests.output_lens]
    before = llm.engine.stats.snapshot()
    start = time.perf_counter()
    own = [adapters[number % len(adapters)] for number in range(len(params))] if adapters else None
    outputs = llm.generate(requests.prompts, params, use_tqdm=False, lora_request=own)
    seconds = time.perf_counter() - start
    first, later = [], []
    for number, (output, wanted) in enumerate(zip(outputs, requests.output_lens, strict=True)):
        completion, metrics = output.outputs[0], output.metrics
        count = len(completion.token_ids)
        if count != wanted or metrics.first_token_time is None or metrics.finished_time is None:
            why = completion.error or f"finish_reason {completion.finish_reason}"
            raise HeadwayError(f"throughput: request {number} needs {wanted} output tokens, got {count} ({why})")
        first.append(metrics.first_token_time - start)
        if count > 1:
            later.append((metrics.finished_time - metrics.first_token_time) / (count - 1))
    stats = llm.engine.stats - before
    return _Pass(seconds, statistics.mean(first), statistics.mean(later) if later else None, stats)


def _look_inside(
    llm: LLM, requests: Requests, temperature: float, trace: Path | None, adapters: Sequence[LoRARequest]
) -> float | None:
    if llm.device.type != "cuda" and trace is None:
        return None
    window = Window(llm.engine, llm.device, requests, temperature, adapters or (None,))
    try:
        idle = window.gpu_idle_share()
        if trace is not None:
            window.write_trace(trace)
    finally:
        window.close()
    return idle


def _summary(
    llm: LLM,
    workload: RequestSet,
    requests: Requests,
    passes: Sequence[_Pass],
    idle: float | None,
    rates: Rates,
    ranks: int,
    num_adapters: int,
) -> OfflineCell:
    ordered = sorted(passes, key=lambda each: each.seconds)
    chosen = ordered[len(ordered) // 2]
    stats, count = chosen.stats, requests.num_output_tokens
    seconds = _floor(llm, requests, stats, rates, ranks)
    input_len, output_len = workload.lengths or (None, None)
    return OfflineCell(
        label=f"{workload.label} + {num_adapters} adapters" if num_adapters else workload.label,
        num_adapters=num_adapters,
        batch_size=workload.batch_size,
        input_len=input_len,
        output_len=output_len,
        temperature=workload.temperature,
        prompt_tokens=requests.num_prompt_tokens,
        output_tokens=count,
        seconds=chosen.seconds,
        tokens_per_second=count / chosen.seconds,
        fastest=count / ordered[0].seconds,
        slowest=count / ordered[-1].seconds,
        time_to_first_token_ms=1e3 * chosen.first_seconds,
        time_per_output_token_ms=None if chosen.later_seconds is None else 1e3 * chosen.later_seconds,
        roofline_share=None if seconds is None else seconds[0] / chosen.seconds,
        floor_seconds=None if seconds is None else seconds[0],
        prefill_floor_seconds=None if seconds is None else seconds[1],
        num_steps=stats.num_steps,
        num_graph_steps=stats.num_graph_steps,
        steps_in_pieces=dict(stats.steps_in_pieces),
        steps_without_graph=dict(stats.steps_without_graph),
        compilations=dict(stats.compilations),
        num_preemptions=stats.num_preemptions,
        host_ms_per_step=1e3 * stats.host_seconds / stats.num_steps,
        host_ms_by_part={part: 1e3 * seconds / stats.num_steps for part, seconds in stats.host_parts.items()},
        wait_ms_per_step=1e3 * stats.wait_seconds / stats.num_steps,
        gpu_idle_share=idle,
        steps_by_backend=dict(stats.steps_by_backend),
    )


def _floor(llm: LLM, requests: Requests, stats: EngineStats, rates: Rates, ranks: int) -> tuple[float, float] | None:
    """Return the minimum seconds for all work and for the prompts only, or None for transformers implementations."""
    if not isinstance(llm.model.decoder, Decoder):
        return None
    decoder = llm.model.decoder
    roofline = Roofline(decoder.config, decoder.attention_specs, ranks, ElementBytes.of(decoder))
    lens = [len(prompt) for prompt in requests.prompts]
    whole = roofline.floor(stats, lens, llm.engine.config.step_tokens, rates).total
    return whole, roofline.prefill_flops(lens) / (1e12 * rates.matrix_tflops)
