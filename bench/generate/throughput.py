"""End-to-end generation times of Headway and of transformers' padded `generate`, on the same prompts in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from headway.bench.generate.workloads import take_prompts
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.sampling.params import SamplingParams
from headway.core.system.provenance import Origin
from headway.llm import LLM
from headway.tuning.measure.device import crowding, describe_device
from headway.tuning.measure.timing import Timer
from headway.tuning.table.schema import DeviceInfo

Generated = list[list[int]]
"""Output tokens of each prompt."""


@dataclass(frozen=True)
class TextWorkload:
    """Texts to continue greedily, with exactly `output_len` tokens per prompt."""

    num_prompts: int = 16
    output_len: int = 64
    repeat: int = 3


class EngineResult(BaseModel):
    """Results of one engine: medians over the repeats, after one warm-up."""

    model_config = ConfigDict(extra="forbid")

    engine: str
    settings: dict[str, str]
    tokens_per_second: float
    """Output tokens divided by the time from the first request to the last token."""
    fastest: float
    slowest: float
    time_to_first_token_ms: float
    """Mean time to first token over the prompts, which are all sent at once."""
    time_per_output_token_ms: float
    """Mean over the prompts of the time per token after the first."""
    same_tokens: float | None = None
    """Fraction of the output tokens, up to each text's end, that equal Headway's. None for Headway itself."""


class ThroughputReport(BaseModel):
    """Result of one throughput comparison."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal["headway.throughput/1"] = Field(default="headway.throughput/1", alias="schema")
    command: str
    origin: Origin | None = None
    """The code that wrote the file. None in files from before 2026-11-22."""
    busy: str = ""
    """CPU load of other processes at the start or end of the run; empty if negligible."""
    date: str
    model: str
    dtype: str
    num_prompts: int
    prompt_tokens: int
    output_len: int
    repeat: int
    device: DeviceInfo
    results: list[EngineResult]

    @property
    def speedup(self) -> float | None:
        """Headway's tokens per second divided by the other engine's."""
        return self.results[0].tokens_per_second / self.results[1].tokens_per_second if len(self.results) > 1 else None


@dataclass(frozen=True)
class _Pass:
    """One generation of the whole workload. Times are seconds from its start, one per prompt."""

    tokens: Generated
    seconds: float
    first: list[float]
    last: list[float]


def run_throughput(
    llm: LLM, workload: TextWorkload, compare: bool, command: str, advance: Callable[[str], None] = lambda _: None
) -> ThroughputReport:
    """Run the workload with Headway and, if `compare`, with transformers using the same weights, dtype and threads. advance:
    called after each generation with the engine's name."""
    prompts = take_prompts(workload.num_prompts)
    ids = [llm.tokenizer(prompt)["input_ids"] for prompt in prompts]
    runners: list[tuple[str, dict[str, str], Callable[[], _Pass]]] = [
        ("headway", _settings(llm), lambda: _headway_pass(llm, ids, workload.output_len))
    ]
    if compare:
        peer = TransformersPeer(llm)
        runners.append(("transformers", peer.settings, lambda: peer.generate(prompts, workload.output_len)))
    busy = crowding()
    passes = {name: [_advanced(run, name, advance) for _ in range(workload.repeat + 1)] for name, _, run in runners}
    results = [_summary(name, settings, passes[name][1:]) for name, settings, _ in runners]
    ours = passes["headway"][-1].tokens
    for result in results[1:]:
        result.same_tokens = same_tokens(ours, passes[result.engine][-1].tokens, llm.model.eos_token_ids)
    dtype = llm.model.decoder.dtype
    return ThroughputReport(
        command=command,
        origin=Origin.here(),
        busy=busy or crowding(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=llm.model.name,
        dtype=DTYPE_NAMES[dtype],
        num_prompts=len(prompts),
        prompt_tokens=sum(map(len, ids)),
        output_len=workload.output_len,
        repeat=workload.repeat,
        device=describe_device(llm.device, dtype, Timer()),
        results=results,
    )


def num_passes(workload: TextWorkload, compare: bool) -> int:
    """Return the number of generations that `run_throughput` makes."""
    return (workload.repeat + 1) * (1 + compare)


def _advanced(run: Callable[[], _Pass], name: str, advance: Callable[[str], None]) -> _Pass:
    done = run()
    advance(name)
    return done


def _settings(llm: LLM) -> dict[str, str]:
    chosen = llm.engine.selection
    names = {phase.value: name for phase, name in chosen.names.items()}
    return {
        **names,
        "kv_layout": chosen.layout.name,
        "block_size": str(chosen.block_size),
        "prefix_cache": "emptied before each pass",
    }


def _headway_pass(llm: LLM, ids: Sequence[list[int]], output_len: int) -> _Pass:
    # Otherwise every pass would get prefix cache hits on the previous pass's prompts.
    llm.engine.forget_prefixes()
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(list(ids), params, use_tqdm=False)
    seconds = time.perf_counter() - start
    first = [(output.metrics.first_token_time or 0.0) - start for output in outputs]
    last = [(output.metrics.finished_time or 0.0) - start for output in outputs]
    return _Pass([output.outputs[0].token_ids for output in outputs], seconds, first, last)


class TransformersPeer:
    """transformers' `generate` on one left-padded batch, which is its common use. Decoding is greedy, with end-of-text banned
    until the output length is reached."""

    def __init__(self, llm: LLM) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self._device = llm.model.decoder.device
        loaded: Any = AutoModelForCausalLM.from_pretrained(llm.model.folder, dtype=llm.model.decoder.dtype)
        self._model: Any = loaded.to(self._device).eval()
        self._tokenizer = llm.tokenizer
        self.settings = {"attn_implementation": str(self._model.config._attn_implementation), "batch": "left-padded"}

    def generate(self, prompts: Sequence[str], output_len: int) -> _Pass:
        """Run one pass."""
        self._tokenizer.padding_side = "left"
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        batch = self._tokenizer(list(prompts), return_tensors="pt", padding=True).to(self._device)
        clock: list[float] = []

        def note_time(tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            clock.append(time.perf_counter())
            return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                **batch,
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                stopping_criteria=[note_time],
                pad_token_id=self._tokenizer.pad_token_id,
            )
        seconds = time.perf_counter() - start
        tokens = out[:, batch["input_ids"].shape[1] :].tolist()
        count = len(tokens)
        return _Pass(tokens, seconds, [clock[0] - start] * count, [clock[-1] - start] * count)


def same_tokens(ours: Generated, theirs: Generated, eos: frozenset[int]) -> float:
    """Return the fraction of equal tokens. Each text counts up to its first end-of-text token in `ours`, and its tokens are equal
    up to the first difference.

    After the end-of-text token, the two outputs differ by construction: only one engine may generate this token.
    """
    compared = equal = 0
    for a, b in zip(ours, theirs, strict=True):
        end = next((at for at, token in enumerate(a) if token in eos), len(a))
        compared += end
        equal += next((at for at in range(end) if a[at] != b[at]), end)
    return equal / max(compared, 1)


def _summary(name: str, settings: dict[str, str], passes: Sequence[_Pass]) -> EngineResult:
    rates = [sum(map(len, each.tokens)) / each.seconds for each in passes]
    per_token = [
        statistics.mean(
            (last - first) / (len(tokens) - 1) for tokens, first, last in zip(each.tokens, each.first, each.last, strict=True)
        )
        for each in passes
    ]
    return EngineResult(
        engine=name,
        settings=settings,
        tokens_per_second=statistics.median(rates),
        fastest=max(rates),
        slowest=min(rates),
        time_to_first_token_ms=1e3 * statistics.median(statistics.mean(each.first) for each in passes),
        time_per_output_token_ms=1e3 * statistics.median(per_token),
    )
