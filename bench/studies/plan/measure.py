"""Times whole generations of random tokens on the GPU that is here, as points to predict."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from headway.bench.studies.plan.points import MeasuredPoint, Metric
from headway.core.contract.errors import ConfigError
from headway.core.sampling.params import SamplingParams
from headway.llm import LLM
from headway.plan.devices import GPU_KINDS

if TYPE_CHECKING:
    from headway.outputs import RequestOutput

_PASSES = 3


def measure(
    models: Sequence[str],
    batch_sizes: Sequence[str],
    lengths: Sequence[str],
    kv_cache_dtypes: Sequence[str],
    told: Callable[[str], None],
) -> list[MeasuredPoint]:
    """Measure every workload of every model: the median of three passes after one.

    :raises ConfigError: no GPU, or one of another kind than an H200, whose tables and utilisations the predictions take.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_name() != GPU_KINDS["h200"].title:
        got = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        raise ConfigError("headway.bench.studies.plan measure", f"an {GPU_KINDS['h200'].title}", got)
    found: list[MeasuredPoint] = []
    for model in models:
        for cache in kv_cache_dtypes:
            llm = LLM(model, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, kv_cache_dtype=cache)
            for batch in map(int, batch_sizes):
                for length in lengths:
                    found += measure_points(llm, model, cache, batch, *map(int, length.split("/")))
                    told(f"{found[-1]}: {found[-1].measured:.3f} {found[-1].metric}")
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    return found


def measure_points(llm: LLM, model: str, cache: str, batch: int, input_len: int, output_len: int) -> list[MeasuredPoint]:
    """Time per token and to the first token of `batch` requests at once: medians of three passes after one."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    passes = []
    for number in range(_PASSES + 1):
        llm.engine.forget_prefixes()  # else a pass would find the prompts of the one before
        prompts = _prompts(batch, input_len, llm.model.decoder.vocab_size, seed=number)
        passes.append(llm.generate(prompts, params, use_tqdm=False))
    figures: dict[Metric, float] = {
        "per_token_ms": statistics.median(map(_per_token_ms, passes[1:])),
        "first_token_ms": statistics.median(map(_first_token_ms, passes[1:])),
    }
    return [
        MeasuredPoint(model, None, batch, input_len, output_len, metric, figure, "measured here", cache)
        for metric, figure in figures.items()
    ]


def _prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    drawn: list[list[int]] = torch.randint(3, vocab_size, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def _first_token_ms(outputs: Sequence[RequestOutput]) -> float:
    """Mean over the requests, all of which arrived together."""
    times = [each.metrics for each in outputs if each.metrics is not None]
    begun = min(each.arrival_time for each in times)
    return 1e3 * statistics.mean((each.first_token_time or 0.0) - begun for each in times)


def _per_token_ms(outputs: Sequence[RequestOutput]) -> float:
    """Mean over the requests, of the time after the first token."""
    times = [each.metrics for each in outputs if each.metrics is not None]
    counts = [len(each.outputs[0].token_ids) for each in outputs]
    spans = [(each.finished_time or 0.0) - (each.first_token_time or 0.0) for each in times]
    return 1e3 * statistics.mean(span / (count - 1) for span, count in zip(spans, counts, strict=True))
